/* NVFP4 in Transformer Engine's order of operations, for tensors of the video plane: rows of bfloat16 or float32 to packed
 * codes, block scales, and back. The reference beside them is dataplanes.numerics.nvfp4: quantise_by_peak and
 * dequantise_by_peak, whose bits these are.
 *
 * Per element only what has no branch: the compiler then works on 16 at a time.
 */
#include <stdint.h>
#include <string.h>

enum { BFLOAT16 = 0, FLOAT32 = 1 };

#define BLOCK 16
#define E4M3_LARGEST 448.0f
#define E2M1_LARGEST 6.0f
#define RAISED_TO_FOUR 1.5f
#define FLOAT_LARGEST 3.402823466e38f

static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static inline __attribute__((always_inline)) void load(const void *x, int64_t dtype, int64_t first, float *restrict out) {
    if (dtype == BFLOAT16) {
        const uint16_t *halves = (const uint16_t *)x + first;
        for (int i = 0; i < BLOCK; i++) out[i] = float_of((uint32_t)halves[i] << 16);
    } else {
        memcpy(out, (const float *)x + first, BLOCK * sizeof *out);
    }
}

static inline float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

static inline float at_most(float x, float largest) { return x < largest ? x : largest; }

/* Nearest e4m3 byte, ties to even, of a value within 0..448. */
static inline uint8_t to_e4m3(float x) {
    uint32_t u = bits_of(x);
    uint32_t normal = ((u + 0x7ffffu + ((u >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t small = (uint32_t)(int32_t)__builtin_rintf(x * 512.0f);
    return (uint8_t)(u < 0x3c800000u ? small : normal);
}

/* What a byte of to_e4m3 stands for. */
static inline float of_e4m3(uint8_t byte) {
    return byte < 8 ? (float)byte * 0x1p-9f : float_of(((uint32_t)byte << 20) + (120u << 23));
}

/* Nearest e2m1 code, ties to even, saturating; negative zero is zero. */
static inline uint32_t to_e2m1(float x) {
    float size = at_most(magnitude(x), E2M1_LARGEST);
    float low = __builtin_rintf(size * 2.0f), middle = __builtin_rintf(size) + 2.0f;
    float high = __builtin_rintf(size * 0.5f) + 4.0f;
    float code = size <= 2.0f ? low : size <= 4.0f ? middle : high;
    uint32_t sign = (bits_of(x) >> 28) & 8u;
    return (uint32_t)(int32_t)code | (x == 0.0f ? 0u : sign);
}

/* What a code stands for: its bits in the places of float32's exponent and mantissa, and below 1 a half or nothing. No
 * float32 subnormals are met on the way, which a process may have switched off. */
static inline float of_e2m1(uint32_t code) {
    uint32_t size = code & 7u;
    uint32_t half = size ? 126u << 23 : 0u;
    return float_of((size < 2 ? half : (size << 22) + (126u << 23)) | (code & 8u) << 28);
}

typedef uint8_t block_bytes __attribute__((vector_size(BLOCK)));
typedef uint16_t block_halves __attribute__((vector_size(2 * BLOCK)));
typedef uint32_t block_words __attribute__((vector_size(4 * BLOCK)));
typedef float block_floats __attribute__((vector_size(4 * BLOCK)));

/* What the 16 codes of 8 bytes stand for, by of_e2m1. As vectors, since compilers do not see them in a loop. */
static inline __attribute__((always_inline)) block_floats unpacked(const uint8_t *packed) {
    const block_words shift = {0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4};
    block_bytes bytes = {0};
    memcpy(&bytes, packed, BLOCK / 2);
#ifdef __clang__
    bytes = __builtin_shufflevector(bytes, bytes, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
#else
    const block_bytes twice = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    bytes = __builtin_shuffle(bytes, twice);
#endif
    block_words codes = __builtin_convertvector(bytes, block_words) >> shift;
    block_words size = codes & 7, half = (block_words)(size == 1) & (126u << 23);
    block_words from_one = (block_words)(size > 1) & ((size << 22) + (126u << 23));
    return (block_floats)(half | from_one | (codes & 8) << 28);
}

static inline __attribute__((always_inline)) void store(block_floats x, int64_t dtype, int64_t first, void *out) {
    if (dtype == BFLOAT16) {
        block_words u = (block_words)x;
        block_halves halves = __builtin_convertvector((u + 0x7fff + (u >> 16 & 1)) >> 16, block_halves);
        memcpy((uint16_t *)out + first, &halves, sizeof halves);
    } else {
        memcpy((float *)out + first, &x, sizeof x);
    }
}

/* One block for one wanted scale: its codes, and its scale's byte. */
static inline __attribute__((always_inline)) uint8_t quantise_block(
    const float *restrict x, float wanted, float decode, uint32_t *restrict codes) {
    uint8_t byte = to_e4m3(at_most(wanted, E4M3_LARGEST));
    float reciprocal = at_most(1.0f / (of_e4m3(byte) * decode), FLOAT_LARGEST);
    for (int i = 0; i < BLOCK; i++) codes[i] = to_e2m1(x[i] * reciprocal);
    return byte;
}

/* Squared error, added from the first element to the last. */
static inline __attribute__((always_inline)) float squared_error(
    const float *restrict x, const uint32_t *restrict codes, uint8_t byte, float peak, float largest_product) {
    float squares[BLOCK], scale = of_e4m3(byte), total = 0.0f;
    for (int i = 0; i < BLOCK; i++) {
        float off = of_e2m1(codes[i]) * scale * peak / largest_product - x[i];
        squares[i] = off * off;
    }
    for (int i = 0; i < BLOCK; i++) total += squares[i];
    return total;
}

static inline __attribute__((always_inline)) float peak_of(const float *restrict x, int64_t n) {
    uint32_t peak = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t size = bits_of(x[i]) & 0x7fffffffu;
        peak = size > peak ? size : peak;
    }
    return float_of(peak);
}

/* The largest magnitude of each row of n, n a multiple of 16; NaN where an element is. */
void nvfp4_peaks(const void *x, int64_t dtype, int64_t rows, int64_t n, float *restrict peaks) {
    for (int64_t row = 0; row < rows; row++) {
        uint32_t largest[BLOCK] = {0}, peak = 0;
        for (int64_t b = 0; b < n; b += BLOCK) {
            float work[BLOCK];
            load(x, dtype, row * n + b, work);
            for (int i = 0; i < BLOCK; i++) {
                uint32_t size = bits_of(work[i]) & 0x7fffffffu;
                largest[i] = size > largest[i] ? size : largest[i];
            }
        }
        for (int i = 0; i < BLOCK; i++) peak = largest[i] > peak ? largest[i] : peak;
        peaks[row] = float_of(peak);
    }
}

/* x [rows][n]; peaks: one, or one a row if peak_stride is 1; packed [rows][n / 2]; scales [rows][n / 16]. */
void nvfp4_encode(
    const void *x, int64_t dtype, int64_t rows, int64_t n, const float *peaks, int64_t peak_stride,
    int64_t is_four_over_six, float largest_scale, uint8_t *restrict packed, uint8_t *restrict scales) {
    float largest_product = largest_scale * E2M1_LARGEST;
    for (int64_t row = 0; row < rows; row++) {
        float peak = peaks[row * peak_stride];
        float encode = at_most(largest_product / peak, FLOAT_LARGEST), decode = 1.0f / encode;
        float per_block = encode * (1.0f / E2M1_LARGEST);
        for (int64_t b = 0; b < n; b += BLOCK) {
            float work[BLOCK];
            uint32_t codes[BLOCK];
            load(x, dtype, row * n + b, work);
            float block_peak = peak_of(work, BLOCK);
            uint8_t byte;
            if (is_four_over_six) {
                uint32_t other[BLOCK];
                float base = block_peak / E2M1_LARGEST * encode;
                byte = quantise_block(work, base, decode, codes);
                uint8_t other_byte = quantise_block(work, base * RAISED_TO_FOUR, decode, other);
                float six = squared_error(work, codes, byte, peak, largest_product);
                if (squared_error(work, other, other_byte, peak, largest_product) < six) {
                    byte = other_byte;
                    memcpy(codes, other, sizeof codes);
                }
            } else {
                byte = quantise_block(work, block_peak * per_block, decode, codes);
            }
            *scales++ = byte;
            for (int i = 0; i < BLOCK / 2; i++) *packed++ = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
        }
    }
}

/* Back; without peaks the codes' values times their block scales alone. */
void nvfp4_decode(
    const uint8_t *restrict packed, const uint8_t *restrict scales, int64_t rows, int64_t n, const float *peaks,
    int64_t peak_stride, float largest_scale, int64_t dtype, void *restrict out) {
    float unit = 1.0f / (largest_scale * E2M1_LARGEST);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t b = 0; b < n; b += BLOCK) {
            float step = of_e4m3(*scales++);
            if (peaks) step = step * peaks[row * peak_stride] * unit;
            store(unpacked(packed) * step, dtype, row * n + b, out);
            packed += BLOCK / 2;
        }
    }
}
