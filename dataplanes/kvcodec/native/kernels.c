/* Fused CPU kernels of the KV codec: load -> Hadamard -> number format -> pack, and back; and the lossless byte split.
 * See planes.h for what they promise.
 */
#include "planes.h"

typedef struct {
    kv_rotation rotation;
    int64_t first_token;
    int64_t group;        /* tokens on the channel axis, channels on the token axis */
    int64_t channel_axis; /* 1: a group is one channel over tokens; 0: channels of one token */
    int64_t levels;
    int64_t per_byte; /* symbols that share a byte */
    float inverse_cells;
    float smallest_step;
    float inverse_largest_offset;
} kv_levels;

/* FP8 e4m3 with a scale per head vector, or NVFP4 with a scale per block of 16 and one per token. */
typedef struct {
    kv_rotation rotation;
    int64_t is_nvfp4;
    int64_t is_four_over_six; /* a block's peak lands at 6 or at 4 */
    int64_t per_byte;
    const float *e4m3_values; /* of all 256 bytes */
    const float *e2m1_values; /* of all 16 codes */
    float scale_per_peak;
    float smallest_scale;
} kv_float_format;

/* Step, offset and what the symbol loop needs, from a group's extremes. */
static inline void grid(const kv_levels *c, float low, float high, float *step, float *offset) {
    float extent = high - low;
    float size_low = low < 0 ? -low : low, size_high = high < 0 ? -high : high;
    float peak = size_low > size_high ? size_low : size_high;
    float wanted = extent * c->inverse_cells;
    float floor_by_peak = peak * c->inverse_largest_offset;
    wanted = wanted > floor_by_peak ? wanted : floor_by_peak;
    wanted = wanted > c->smallest_step ? wanted : c->smallest_step;
    float s = float_of((bits_of(wanted) + 0xffffu) & 0xffff0000u);
    float middle = extent > 0 ? s * (0.5f - 0.5f / FRACTION) : 0.0f;
    *step = s;
    *offset = __builtin_rintf((low + middle) * (FRACTION / s));
}

static inline uint8_t symbol(float x, float zero, float inverse_step, float last) {
    float q = __builtin_rintf((x - zero) * inverse_step);
    q = q > 0.0f ? q : 0.0f;
    return (uint8_t)(int32_t)(q < last ? q : last);
}

/* One head of one group of tokens: work is [count][n]. low and high are scratch of n. */
static void quantise_channels(
    const kv_levels *c, const float *restrict work, int64_t count, int64_t n, float *restrict low,
    float *restrict high, uint8_t *restrict symbols, int64_t symbol_stride, kv_halves steps, kv_halves offsets) {
    memcpy(low, work, (size_t)n * 4);
    memcpy(high, work, (size_t)n * 4);
    for (int64_t t = 1; t < count; t++)
        for (int64_t i = 0; i < n; i++) {
            float x = work[t * n + i];
            low[i] = x < low[i] ? x : low[i];
            high[i] = x > high[i] ? x : high[i];
        }
    for (int64_t i = 0; i < n; i++) {
        float step, offset;
        grid(c, low[i], high[i], &step, &offset);
        put_half(steps, i, bits_of(step) >> 16);
        put_half(offsets, i, (uint32_t)(int32_t)offset);
        low[i] = offset * (step / FRACTION);
        high[i] = 1.0f / step;
    }
    float last = (float)(c->levels - 1);
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = 0; i < n; i++)
            symbols[t * symbol_stride + i] = symbol(work[t * n + i], low[i], high[i], last);
}

#define TOKEN_BLOCK 32

/* Whole tokens [count][channels], a group being neighbouring channels of one token: extremes of all groups first, then
 * their grids side by side in vectors, then symbols. low and high are scratch of a number for each group. */
static void quantise_tokens(
    const kv_levels *c, const float *restrict work, int64_t count, int64_t channels, float *restrict low,
    float *restrict high, uint8_t *restrict symbols, kv_halves steps, kv_halves offsets) {
    int64_t n = c->group, groups = count * channels / n;
    for (int64_t g = 0; g < groups; g++) {
        const float *restrict x = work + g * n;
        float smallest = x[0], largest = x[0];
#pragma omp simd reduction(min : smallest) reduction(max : largest)
        for (int64_t i = 0; i < n; i++) {
            smallest = x[i] < smallest ? x[i] : smallest;
            largest = x[i] > largest ? x[i] : largest;
        }
        low[g] = smallest;
        high[g] = largest;
    }
    for (int64_t g = 0; g < groups; g++) {
        float step, offset;
        grid(c, low[g], high[g], &step, &offset);
        put_half(steps, g, bits_of(step) >> 16);
        put_half(offsets, g, (uint32_t)(int32_t)offset);
        low[g] = offset * (step / FRACTION);
        high[g] = 1.0f / step;
    }
    float last = (float)(c->levels - 1);
    for (int64_t g = 0; g < groups; g++) {
        float zero = low[g], inverse_step = high[g];
        for (int64_t i = g * n; i < (g + 1) * n; i++) symbols[i] = symbol(work[i], zero, inverse_step, last);
    }
}

static int64_t tokens_until_boundary(const kv_levels *c, int64_t token) {
    return c->group - (c->first_token + token) % c->group;
}

/* packed [planes, ceil(tokens / per_byte), channels]; steps and offsets [planes, groups, channels] on the channel axis,
 * [planes, tokens, groups] on the token axis. */
int kv_levels_encode(
    const kv_planes *p, const kv_levels *c, uint8_t *packed, uint8_t *step_lows, uint8_t *step_highs,
    uint8_t *offset_lows, uint8_t *offset_highs) {
    kv_halves steps = {step_lows, step_highs}, offsets = {offset_lows, offset_highs};
    int64_t n = p->head_dim, channels = p->heads * n, rows = (p->tokens + c->per_byte - 1) / c->per_byte;
    int64_t span = c->channel_axis ? c->group : TOKEN_BLOCK;
    span = span < p->tokens ? span : p->tokens;
    int64_t width = c->channel_axis ? n : channels, extremes = c->channel_axis ? n : span * channels / c->group;
    uint8_t *symbols;
    float *work = scratch(span * width + 2 * extremes, p->tokens * channels, &symbols);
    if (!work) return NO_MEMORY;
    float *low = work + span * width, *high = low + extremes;
    int status = DONE;
    for (int64_t plane = 0; plane < p->planes && status == DONE; plane++) {
        for (int64_t t = 0, count; t < p->tokens && status == DONE; t += count) {
            count = c->channel_axis ? tokens_until_boundary(c, t) : TOKEN_BLOCK;
            count = count < p->tokens - t ? count : p->tokens - t;
            /* A head at a time where groups span tokens, else whole tokens. */
            for (int64_t start = 0; start < channels; start += width) {
                for (int64_t i = 0; i < count; i++) {
                    const char *row = row_of(p, plane, t + i) + start * element_bytes(p->dtype);
                    if (load(row, p->dtype, width, work + i * width) >= LARGEST_INPUT_BITS) status = NOT_EXPRESSIBLE;
                    rotate(work + i * width, width, &c->rotation);
                }
                if (status != DONE) break;
                uint8_t *target = symbols + t * channels + start;
                if (c->channel_axis)
                    quantise_channels(
                        c, work, count, n, low, high, target, channels, advanced(steps, start),
                        advanced(offsets, start));
                else
                    quantise_tokens(c, work, count, channels, low, high, target, steps, offsets);
            }
            int64_t grids = c->channel_axis ? channels : count * channels / c->group;
            steps = advanced(steps, grids);
            offsets = advanced(offsets, grids);
        }
        if (status == DONE) pack(symbols, p->tokens, channels, c->levels, c->per_byte, packed + plane * rows * channels);
    }
    free(work);
    return status;
}

static inline void dequantise(
    const uint8_t *restrict symbols, const float *restrict offsets, const float *restrict steps, int64_t n,
    float *restrict out) {
    for (int64_t i = 0; i < n; i++) out[i] = ((float)symbols[i] * FRACTION + offsets[i]) * steps[i];
}

int kv_levels_decode(
    const kv_planes *p, const kv_levels *c, const uint8_t *packed, uint8_t *step_lows, uint8_t *step_highs,
    uint8_t *offset_lows, uint8_t *offset_highs) {
    kv_halves steps = {step_lows, step_highs}, offsets = {offset_lows, offset_highs};
    int64_t n = p->head_dim, channels = p->heads * n, rows = (p->tokens + c->per_byte - 1) / c->per_byte;
    uint8_t *symbols;
    float *work = scratch(3 * channels, (p->tokens + 1) * channels, &symbols);
    if (!work) return NO_MEMORY;
    float *row_steps = work + channels, *row_offsets = row_steps + channels;
    for (int64_t plane = 0; plane < p->planes; plane++) {
        unpack(
            packed + plane * rows * channels, p->tokens, channels, c->levels, c->per_byte, symbols,
            symbols + p->tokens * channels);
        int64_t left = 0;
        for (int64_t t = 0; t < p->tokens; t++) {
            if (c->channel_axis) {
                if (left == 0) {
                    left = tokens_until_boundary(c, t);
                    for (int64_t i = 0; i < channels; i++) {
                        row_steps[i] = float_of(get_half(steps, i) << 16) / FRACTION;
                        row_offsets[i] = (float)(int16_t)get_half(offsets, i);
                    }
                    steps = advanced(steps, channels);
                    offsets = advanced(offsets, channels);
                }
                left--;
                dequantise(symbols + t * channels, row_offsets, row_steps, channels, work);
            } else {
                const uint8_t *row = symbols + t * channels;
                for (int64_t g = 0; g < channels; g += c->group) {
                    float step = float_of(get_half(steps, 0) << 16) / FRACTION;
                    float offset = (float)(int16_t)get_half(offsets, 0);
                    steps = advanced(steps, 1);
                    offsets = advanced(offsets, 1);
                    for (int64_t i = g; i < g + c->group; i++)
                        work[i] = ((float)row[i] * FRACTION + offset) * step;
                }
            }
            rotate_back(work, channels, &c->rotation);
            store(work, p->dtype, channels, row_of(p, plane, t));
        }
    }
    free(work);
    return DONE;
}

#define FP4_BLOCK 16
#define E4M3_LARGEST 448.0f
#define E4M3_SMALLEST 0x1p-9f
#define E2M1_LARGEST 6.0f
#define RAISED_TO_FOUR 1.5f

static inline float clamp(float x, float low, float high) {
    x = x > low ? x : low;
    return x < high ? x : high;
}

static inline float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

/* Nearest e4m3 byte, ties to even, of a value within +-448. */
static inline uint8_t to_e4m3(float x) {
    uint32_t u = bits_of(x), size = u & 0x7fffffffu;
    uint32_t normal = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t small = (uint32_t)(int32_t)__builtin_rintf(float_of(size) * 512.0f);
    return (uint8_t)((size < 0x3c800000u ? small : normal) | ((u >> 24) & 0x80u));
}

/* Nearest e2m1 code, ties to even, saturating; the grid is even inside each binade. */
static inline uint8_t to_e2m1(float x) {
    float size = magnitude(x);
    size = size < E2M1_LARGEST ? size : E2M1_LARGEST;
    float low = __builtin_rintf(size * 2.0f), middle = __builtin_rintf(size) + 2.0f;
    float high = __builtin_rintf(size * 0.5f) + 4.0f;
    float code = size <= 2.0f ? low : size <= 4.0f ? middle : high;
    return (uint8_t)((uint32_t)(int32_t)code | ((bits_of(x) >> 28) & 8u));
}

/* A bfloat16 scale that covers a peak; its bits go to the side data. */
static float scale_of_peak(const kv_float_format *c, float peak, kv_halves out) {
    float raised = peak * c->scale_per_peak;
    uint16_t bits;
    raised = raised > c->smallest_scale ? raised : c->smallest_scale;
    store(&raised, BFLOAT16, 1, (char *)&bits);
    put_half(out, 0, bits);
    return float_of((uint32_t)bits << 16);
}

static void quantise_fp8(
    const kv_float_format *c, const float *restrict x, int64_t n, uint8_t *restrict codes, kv_halves scale) {
    float s = scale_of_peak(c, peak_of(x, n), scale);
    for (int64_t i = 0; i < n; i++) codes[i] = to_e4m3(clamp(x[i] / s, -E4M3_LARGEST, E4M3_LARGEST));
}

static inline uint8_t fp4_block_scale(float wanted) { return to_e4m3(clamp(wanted, E4M3_SMALLEST, E4M3_LARGEST)); }

/* What to_e2m1's code stands for, without its sign. */
static inline float e2m1_size(float size) {
    size = size < E2M1_LARGEST ? size : E2M1_LARGEST;
    float low = __builtin_rintf(size * 2.0f) * 0.5f, middle = __builtin_rintf(size);
    float high = __builtin_rintf(size * 0.5f) * 2.0f;
    return size <= 2.0f ? low : size <= 4.0f ? middle : high;
}

/* A block's squared error in units of the outer scale; summed as a tree, halves first, as the reference does. */
static inline __attribute__((always_inline)) float fp4_error(
    const float *restrict x, int64_t n, float scale, float outer) {
    float squares[FP4_BLOCK] = {0};
    float step = scale * outer;
    for (int64_t i = 0; i < n; i++) {
        float size = magnitude(x[i] / step), off = e2m1_size(size) - size;
        squares[i] = off * off;
    }
    for (int64_t half = FP4_BLOCK / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++) squares[i] += squares[i + half];
    return squares[0] * (scale * scale);
}

/* Inlined twice, so that whole blocks have a length that the compiler knows. */
static inline __attribute__((always_inline)) uint8_t quantise_fp4_block(
    const kv_float_format *c, const float *restrict x, int64_t n, float outer, uint8_t *restrict codes) {
    float wanted = peak_of(x, n) / (E2M1_LARGEST * outer);
    uint8_t scale = fp4_block_scale(wanted);
    if (c->is_four_over_six) {
        uint8_t other = fp4_block_scale(wanted * RAISED_TO_FOUR);
        float other_error = fp4_error(x, n, c->e4m3_values[other], outer);
        if (other_error < fp4_error(x, n, c->e4m3_values[scale], outer)) scale = other;
    }
    float step = c->e4m3_values[scale] * outer;
    for (int64_t i = 0; i < n; i++) codes[i] = to_e2m1(x[i] / step);
    return scale;
}

/* One head of a token whose outer scale is known. */
static void quantise_fp4(
    const kv_float_format *c, const float *restrict x, int64_t n, float outer, uint8_t *restrict codes,
    uint8_t *restrict block_scales) {
    int64_t i = 0;
    for (; i + FP4_BLOCK <= n; i += FP4_BLOCK)
        *block_scales++ = quantise_fp4_block(c, x + i, FP4_BLOCK, outer, codes + i);
    if (i < n) *block_scales = quantise_fp4_block(c, x + i, n - i, outer, codes + i);
}

/* packed as in kv_levels_encode; scales [planes, tokens, heads] for FP8, [planes, tokens] for NVFP4, whose block scales
 * are [planes, tokens, heads, blocks]. */
int kv_float_encode(
    const kv_planes *p, const kv_float_format *c, uint8_t *packed, uint8_t *scale_lows, uint8_t *scale_highs,
    uint8_t *block_scales) {
    kv_halves scales = {scale_lows, scale_highs};
    int64_t n = p->head_dim, channels = p->heads * n, rows = (p->tokens + c->per_byte - 1) / c->per_byte;
    int64_t blocks = (n + FP4_BLOCK - 1) / FP4_BLOCK;
    uint8_t *symbols;
    float *work = scratch(channels, p->tokens * channels, &symbols);
    if (!work) return NO_MEMORY;
    int status = DONE;
    for (int64_t plane = 0; plane < p->planes && status == DONE; plane++) {
        for (int64_t t = 0; t < p->tokens && status == DONE; t++) {
            if (load(row_of(p, plane, t), p->dtype, channels, work) >= LARGEST_INPUT_BITS) status = NOT_EXPRESSIBLE;
            rotate(work, channels, &c->rotation);
            uint8_t *target = symbols + t * channels;
            float outer = 0.0f;
            if (c->is_nvfp4) {
                outer = scale_of_peak(c, peak_of(work, channels), scales);
                scales = advanced(scales, 1);
            }
            for (int64_t h = 0; h < p->heads; h++) {
                if (c->is_nvfp4) {
                    quantise_fp4(c, work + h * n, n, outer, target + h * n, block_scales);
                    block_scales += blocks;
                } else {
                    quantise_fp8(c, work + h * n, n, target + h * n, scales);
                    scales = advanced(scales, 1);
                }
            }
        }
        if (status == DONE) pack(symbols, p->tokens, channels, 16, c->per_byte, packed + plane * rows * channels);
    }
    free(work);
    return status;
}

int kv_float_decode(
    const kv_planes *p, const kv_float_format *c, const uint8_t *packed, uint8_t *scale_lows, uint8_t *scale_highs,
    const uint8_t *block_scales) {
    kv_halves scales = {scale_lows, scale_highs};
    int64_t n = p->head_dim, channels = p->heads * n, rows = (p->tokens + c->per_byte - 1) / c->per_byte;
    uint8_t *symbols;
    float *work = scratch(channels, (p->tokens + 1) * channels, &symbols);
    if (!work) return NO_MEMORY;
    for (int64_t plane = 0; plane < p->planes; plane++) {
        unpack(
            packed + plane * rows * channels, p->tokens, channels, 16, c->per_byte, symbols,
            symbols + p->tokens * channels);
        for (int64_t t = 0; t < p->tokens; t++) {
            const uint8_t *row = symbols + t * channels;
            float outer = 0.0f;
            if (c->is_nvfp4) {
                outer = float_of(get_half(scales, 0) << 16);
                scales = advanced(scales, 1);
            }
            for (int64_t h = 0; h < p->heads; h++) {
                if (!c->is_nvfp4) {
                    float scale = float_of(get_half(scales, 0) << 16);
                    scales = advanced(scales, 1);
                    for (int64_t i = h * n; i < (h + 1) * n; i++) work[i] = c->e4m3_values[row[i]] * scale;
                    continue;
                }
                for (int64_t b = 0; b < n; b += FP4_BLOCK) {
                    float step = c->e4m3_values[*block_scales++] * outer;
                    int64_t end = h * n + (n - b < FP4_BLOCK ? n : b + FP4_BLOCK);
                    for (int64_t i = h * n + b; i < end; i++) work[i] = c->e2m1_values[row[i] & 15] * step;
                }
            }
            rotate_back(work, channels, &c->rotation);
            store(work, p->dtype, channels, row_of(p, plane, t));
        }
    }
    free(work);
    return DONE;
}

/* Exponents apart from signs and mantissas, bfloat16: both rows are [planes, tokens, channels]. */
void kv_split_bfloat16(const kv_planes *p, uint8_t *restrict exponents, uint8_t *restrict rest) {
    int64_t channels = p->heads * p->head_dim;
    for (int64_t plane = 0; plane < p->planes; plane++)
        for (int64_t t = 0; t < p->tokens; t++, exponents += channels, rest += channels) {
            const uint16_t *row = (const uint16_t *)row_of(p, plane, t);
            for (int64_t i = 0; i < channels; i++) {
                exponents[i] = (uint8_t)(row[i] >> 7);
                rest[i] = (uint8_t)((row[i] & 0x7f) | ((row[i] >> 8) & 0x80));
            }
        }
}

void kv_join_bfloat16(const kv_planes *p, const uint8_t *restrict exponents, const uint8_t *restrict rest) {
    int64_t channels = p->heads * p->head_dim;
    for (int64_t plane = 0; plane < p->planes; plane++)
        for (int64_t t = 0; t < p->tokens; t++, exponents += channels, rest += channels) {
            uint16_t *row = (uint16_t *)row_of(p, plane, t);
            for (int64_t i = 0; i < channels; i++)
                row[i] = (uint16_t)((exponents[i] << 7) | (rest[i] & 0x7f) | ((rest[i] & 0x80) << 8));
        }
}
