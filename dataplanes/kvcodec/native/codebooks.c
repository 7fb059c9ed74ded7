/* Symmetric levels with one step for all heads of a token, and a Gaussian codebook with a scale per head vector.
 * See planes.h for what they promise; dataplanes/numerics/absmax.py and lloyd_max.py are the reference.
 */
#include "planes.h"

typedef struct {
    kv_rotation rotation;
    int64_t is_absmax;
    int64_t alphabet; /* how many symbols there are */
    int64_t per_byte;
    const float *entries; /* of the codebook, in order */
    const float *edges;   /* between neighbouring entries */
    float inverse_last;   /* 1 / the level of a token's largest magnitude */
    float inverse_dim;    /* 1 / the length of a head vector */
    float smallest_scale;
    float smallest_peak;
} kv_codebook;

static void quantise_absmax(
    const kv_codebook *c, const float *restrict x, int64_t n, uint8_t *restrict symbols, kv_halves step_out) {
    float wanted = peak_of(x, n) * c->inverse_last, last = (float)((c->alphabet - 1) / 2);
    wanted = wanted > c->smallest_scale ? wanted : c->smallest_scale;
    uint32_t bits = (bits_of(wanted) + 0xffffu) >> 16;
    float inverse = 1.0f / float_of(bits << 16);
    put_half(step_out, 0, bits);
    for (int64_t i = 0; i < n; i++) {
        float q = __builtin_rintf(x[i] * inverse);
        q = q > -last ? q : -last;
        symbols[i] = (uint8_t)(int32_t)((q < last ? q : last) + last);
    }
}

/* Root mean square; halves are added until one is left, as the reference does. squares is scratch of 2 n. */
static float scale_of(const kv_codebook *c, const float *restrict x, int64_t n, float *restrict squares) {
    float peak = peak_of(x, n);
    int64_t width = 1;
    while (width < n) width *= 2;
    peak = peak > c->smallest_peak ? peak : c->smallest_peak;
    for (int64_t i = 0; i < n; i++) {
        float part = x[i] / peak;
        squares[i] = part * part;
    }
    for (int64_t i = n; i < width; i++) squares[i] = 0.0f;
    while (width > 1) {
        width /= 2;
        for (int64_t i = 0; i < width; i++) squares[i] += squares[i + width];
    }
    float scale = peak * __builtin_sqrtf(squares[0] * c->inverse_dim);
    return scale > c->smallest_scale ? scale : c->smallest_scale;
}

static void quantise_codebook(
    const kv_codebook *c, const float *restrict x, int64_t n, float *restrict scratch_floats,
    uint8_t *restrict symbols, kv_halves scale_out) {
    float scale = scale_of(c, x, n, scratch_floats);
    uint16_t bits;
    store(&scale, BFLOAT16, 1, (char *)&bits);
    put_half(scale_out, 0, bits);
    float inverse = 1.0f / float_of((uint32_t)bits << 16), *restrict y = scratch_floats;
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[i] * inverse;
        symbols[i] = 0;
    }
    for (int64_t e = 0; e < c->alphabet - 1; e++) {
        float edge = c->edges[e];
        for (int64_t i = 0; i < n; i++) symbols[i] = (uint8_t)(symbols[i] + (y[i] > edge));
    }
}

/* packed [planes, ceil(tokens / per_byte), channels]; scales [planes, tokens] for absmax, else [planes, tokens, heads]. */
int kv_codebook_encode(
    const kv_planes *p, const kv_codebook *c, uint8_t *packed, uint8_t *scale_lows, uint8_t *scale_highs) {
    kv_halves scales = {scale_lows, scale_highs};
    int64_t n = p->head_dim, channels = p->heads * n, rows = (p->tokens + c->per_byte - 1) / c->per_byte;
    uint8_t *symbols;
    float *work = scratch(channels + 2 * n, p->tokens * channels, &symbols);
    if (!work) return NO_MEMORY;
    int status = DONE;
    for (int64_t plane = 0; plane < p->planes && status == DONE; plane++) {
        for (int64_t t = 0; t < p->tokens && status == DONE; t++) {
            if (load(row_of(p, plane, t), p->dtype, channels, work) >= LARGEST_INPUT_BITS) status = NOT_EXPRESSIBLE;
            rotate(work, channels, &c->rotation);
            uint8_t *target = symbols + t * channels;
            if (c->is_absmax) {
                quantise_absmax(c, work, channels, target, scales);
                scales = advanced(scales, 1);
                continue;
            }
            for (int64_t h = 0; h < p->heads; h++) {
                quantise_codebook(c, work + h * n, n, work + channels, target + h * n, scales);
                scales = advanced(scales, 1);
            }
        }
        if (status == DONE)
            pack(symbols, p->tokens, channels, c->alphabet, c->per_byte, packed + plane * rows * channels);
    }
    free(work);
    return status;
}

int kv_codebook_decode(
    const kv_planes *p, const kv_codebook *c, const uint8_t *packed, uint8_t *scale_lows, uint8_t *scale_highs) {
    kv_halves scales = {scale_lows, scale_highs};
    int64_t n = p->head_dim, channels = p->heads * n, rows = (p->tokens + c->per_byte - 1) / c->per_byte;
    uint8_t *symbols;
    float *work = scratch(channels, (p->tokens + 1) * channels, &symbols);
    float values[256];
    if (!work) return NO_MEMORY;
    /* Symbols that no sender makes stand for the last entry, or go on counting. */
    for (int64_t s = 0; s < 256; s++)
        values[s] = c->is_absmax ? (float)(s - (c->alphabet - 1) / 2)
                                 : c->entries[s < c->alphabet ? s : c->alphabet - 1];
    for (int64_t plane = 0; plane < p->planes; plane++) {
        unpack(
            packed + plane * rows * channels, p->tokens, channels, c->alphabet, c->per_byte, symbols,
            symbols + p->tokens * channels);
        for (int64_t t = 0; t < p->tokens; t++) {
            const uint8_t *row = symbols + t * channels;
            int64_t span = c->is_absmax ? channels : n;
            for (int64_t start = 0; start < channels; start += span) {
                float scale = float_of(get_half(scales, 0) << 16);
                scales = advanced(scales, 1);
                for (int64_t i = start; i < start + span; i++) work[i] = values[row[i]] * scale;
            }
            rotate_back(work, channels, &c->rotation);
            store(work, p->dtype, channels, row_of(p, plane, t));
        }
    }
    free(work);
    return DONE;
}
