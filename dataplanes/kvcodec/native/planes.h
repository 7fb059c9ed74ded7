/* What all kernels of number formats share: planes, the Hadamard transform, packing.
 *
 * The Python modules of dataplanes/numerics are the reference, and kernels agree with them bit for bit: the same
 * operations in the same order in float32, without contraction (-ffp-contract=off). One thread; no allocation survives a
 * call; nothing is read or written outside the announced shapes.
 */
#pragma once
#include "elements.h"

#define FRACTION 16.0f

typedef int32_t lanes __attribute__((vector_size(LANES * 4)));

/* Planes [tokens, heads, head_dim]; heads and head_dim are contiguous within a token. */
typedef struct {
    const int64_t *addresses; /* of token 0 of each plane */
    const int64_t *strides;   /* elements between tokens, per plane */
    const int64_t *index;     /* row of each token, or NULL for 0, 1, 2, ... */
    int64_t planes, tokens, heads, head_dim;
    int64_t dtype;
} kv_planes;

typedef struct {
    int64_t block; /* of the Hadamard transform, 1 for none */
    const float *signs;
    float norm;
} kv_rotation;

/* Side data of 16 bits: low and high bytes apart, because only the high ones are predictable. */
typedef struct {
    uint8_t *low, *high;
} kv_halves;

static inline void put_half(kv_halves h, int64_t i, uint32_t x) {
    h.low[i] = (uint8_t)x;
    h.high[i] = (uint8_t)(x >> 8);
}

static inline uint32_t get_half(kv_halves h, int64_t i) { return h.low[i] | (uint32_t)h.high[i] << 8; }

static inline kv_halves advanced(kv_halves h, int64_t n) {
    kv_halves result = {h.low + n, h.high + n};
    return result;
}

static inline char *row_of(const kv_planes *p, int64_t plane, int64_t token) {
    int64_t row = p->index ? p->index[token] : token;
    return (char *)(intptr_t)p->addresses[plane] + row * p->strides[plane] * element_bytes(p->dtype);
}

static inline vector butterfly_lanes(vector x, lanes partner, vector sign) {
    return __builtin_shuffle(x, partner) + x * sign;
}

/* Unnormalised Hadamard transform in place, distance 1 first; n is a power of two. */
static void butterflies(float *x, int64_t n) {
    if (n < LANES) {
        for (int64_t h = 1; h < n; h *= 2)
            for (int64_t i = 0; i < n; i += 2 * h)
                for (int64_t j = i; j < i + h; j++) {
                    float a = x[j], b = x[j + h];
                    x[j] = a + b;
                    x[j + h] = a - b;
                }
        return;
    }
    const lanes p1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    const lanes p2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
    const lanes p4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
    const lanes p8 = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
    const vector s1 = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
    const vector s2 = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
    const vector s4 = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
    const vector s8 = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
    for (int64_t i = 0; i < n; i += LANES) {
        vector v = *(const vector *)(x + i);
        v = butterfly_lanes(v, p1, s1);
        v = butterfly_lanes(v, p2, s2);
        v = butterfly_lanes(v, p4, s4);
        v = butterfly_lanes(v, p8, s8);
        *(vector *)(x + i) = v;
    }
    for (int64_t h = LANES; h < n; h *= 2)
        for (int64_t i = 0; i < n; i += 2 * h)
            for (int64_t j = i; j < i + h; j += LANES) {
                vector a = *(const vector *)(x + j), b = *(const vector *)(x + j + h);
                *(vector *)(x + j) = a + b;
                *(vector *)(x + j + h) = a - b;
            }
}

static void rotate(float *restrict x, int64_t n, const kv_rotation *c) {
    if (c->block == 1) return;
    for (int64_t i = 0; i < n; i += c->block) {
        for (int64_t j = 0; j < c->block; j++) x[i + j] *= c->signs[j];
        butterflies(x + i, c->block);
        for (int64_t j = 0; j < c->block; j++) x[i + j] *= c->norm;
    }
}

static void rotate_back(float *restrict x, int64_t n, const kv_rotation *c) {
    if (c->block == 1) return;
    for (int64_t i = 0; i < n; i += c->block) {
        butterflies(x + i, c->block);
        for (int64_t j = 0; j < c->block; j++) x[i + j] = x[i + j] * c->norm * c->signs[j];
    }
}

static inline float peak_of(const float *restrict x, int64_t n) {
    uint32_t peak = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]) & 0x7fffffffu;
        peak = u > peak ? u : peak;
    }
    return float_of(peak);
}

/* per_byte neighbouring tokens into each byte. */
static void pack(
    const uint8_t *restrict symbols, int64_t tokens, int64_t channels, int64_t levels, int64_t per_byte,
    uint8_t *restrict packed) {
    for (int64_t t = 0; t < tokens; t += per_byte, packed += channels) {
        int64_t have = tokens - t < per_byte ? tokens - t : per_byte;
        memcpy(packed, symbols + (t + have - 1) * channels, (size_t)channels);
        for (int64_t k = have - 2; k >= 0; k--) {
            const uint8_t *restrict row = symbols + (t + k) * channels;
            for (int64_t i = 0; i < channels; i++) packed[i] = (uint8_t)(packed[i] * levels + row[i]);
        }
    }
}

static void unpack(
    const uint8_t *restrict packed, int64_t tokens, int64_t channels, int64_t levels, int64_t per_byte,
    uint8_t *restrict symbols, uint8_t *restrict rest) {
    /* floor(r / levels) for bytes: the reciprocal is exact enough because r * levels < 65536. */
    uint16_t reciprocal = (uint16_t)((65536 + levels - 1) / levels);
    for (int64_t t = 0; t < tokens; t += per_byte, packed += channels) {
        int64_t have = tokens - t < per_byte ? tokens - t : per_byte;
        const uint8_t *restrict row = packed;
        for (int64_t k = 0; k < have; k++) {
            uint8_t *restrict out = symbols + (t + k) * channels;
            if (k == per_byte - 1) {
                memcpy(out, row, (size_t)channels);
                break;
            }
            for (int64_t i = 0; i < channels; i++) {
                uint16_t r = row[i];
                uint16_t quotient = (uint16_t)(((uint32_t)r * reciprocal) >> 16);
                out[i] = (uint8_t)(r - quotient * (uint16_t)levels);
                rest[i] = (uint8_t)quotient;
            }
            row = rest;
        }
    }
}

/* Scratch of one call: floats first, then bytes. */
static float *scratch(int64_t floats, int64_t bytes, uint8_t **byte_part) {
    float *memory = malloc((size_t)floats * 4 + (size_t)bytes);
    *byte_part = (uint8_t *)(memory + floats);
    return memory;
}
