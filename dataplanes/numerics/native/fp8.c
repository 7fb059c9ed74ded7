/* FP8 e4m3 as torch rounds and reads it: rows of float32 to bytes and back, with one scale or one a row. The reference is
 * in dataplanes.numerics.fp8_rows; these are its bits (a NaN stays one, whichever).
 *
 * Per element only what has no branch: the compiler then works on 16 at a time.
 */
#include <stdint.h>
#include <string.h>

#define LARGEST 0x43e00000u /* 448 */
#define SMALLEST_NORMAL 0x3c800000u
#define INFINITE 0x7f800000u
#define NOT_A_NUMBER 0x7fu

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

/* Nearest byte, ties to even, saturating; the sign stays with zero. */
static inline uint8_t to_e4m3(float x) {
    uint32_t u = bits_of(x), size = u & 0x7fffffffu;
    uint32_t within = size < LARGEST ? size : LARGEST;
    uint32_t normal = ((within + 0x7ffffu + ((within >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t small = (uint32_t)(int32_t)__builtin_rintf(float_of(within) * 512.0f);
    uint32_t byte = within < SMALLEST_NORMAL ? small : normal;
    return (uint8_t)((size > INFINITE ? NOT_A_NUMBER : byte) | (u >> 24 & 0x80u));
}

/* What a byte stands for. No float32 subnormals are met on the way, which a process may have switched off. */
static inline float of_e4m3(uint8_t byte) {
    uint32_t size = byte & 0x7fu, sign = (uint32_t)(byte & 0x80u) << 24;
    uint32_t normal = (size << 20) + (120u << 23), small = bits_of((float)(int32_t)size * 0x1p-9f);
    uint32_t bits = size < 8 ? small : normal;
    return float_of((size == NOT_A_NUMBER ? INFINITE | 0x400000u : bits) | sign);
}

/* x [rows][n]; scales: one, or one a row if scale_stride is 1; codes [rows][n]. */
void fp8_encode(
    const float *restrict x, int64_t rows, int64_t n, const float *restrict scales, int64_t scale_stride,
    uint8_t *restrict codes) {
    for (int64_t row = 0; row < rows; row++) {
        float scale = scales[row * scale_stride];
        for (int64_t i = row * n; i < (row + 1) * n; i++) codes[i] = to_e4m3(x[i] / scale);
    }
}

/* Back; without scales what the bytes stand for alone. */
void fp8_decode(
    const uint8_t *restrict codes, int64_t rows, int64_t n, const float *restrict scales, int64_t scale_stride,
    float *restrict out) {
    for (int64_t row = 0; row < rows; row++) {
        float scale = scales ? scales[row * scale_stride] : 1.0f;
        for (int64_t i = row * n; i < (row + 1) * n; i++) out[i] = of_e4m3(codes[i]) * scale;
    }
}
