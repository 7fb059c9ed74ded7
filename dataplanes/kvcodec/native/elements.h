/* What every kernel shares: elements of the KV cache, from memory to float32 and back. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BFLOAT16 = 0, FLOAT16 = 1, FLOAT32 = 2 };
enum { DONE = 0, NOT_EXPRESSIBLE = 1, NO_MEMORY = 2, DAMAGED = 3 };

#define LANES 16
#define LARGEST_INPUT_BITS 0x6f800000u /* 2**96 */

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

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

static inline int64_t element_bytes(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* Converts n elements and returns the largest magnitude's bits: infinities and NaNs exceed every finite limit. */
static uint32_t load(const char *source, int64_t dtype, int64_t n, float *restrict out) {
    uint32_t peak = 0;
    if (dtype == BFLOAT16) {
        const uint16_t *x = (const uint16_t *)source;
        for (int64_t i = 0; i < n; i++) {
            uint32_t u = (uint32_t)x[i] << 16;
            out[i] = float_of(u);
            u &= 0x7fffffffu;
            peak = u > peak ? u : peak;
        }
        return peak;
    }
    if (dtype == FLOAT16) {
        const _Float16 *x = (const _Float16 *)source;
        for (int64_t i = 0; i < n; i++) out[i] = (float)x[i];
    } else {
        memcpy(out, source, (size_t)n * 4);
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(out[i]) & 0x7fffffffu;
        peak = u > peak ? u : peak;
    }
    return peak;
}

static void store(const float *restrict x, int64_t dtype, int64_t n, char *target) {
    if (dtype == BFLOAT16) {
        uint16_t *out = (uint16_t *)target;
        for (int64_t i = 0; i < n; i++) {
            uint32_t u = bits_of(x[i]);
            out[i] = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
        }
    } else if (dtype == FLOAT16) {
        _Float16 *out = (_Float16 *)target;
        for (int64_t i = 0; i < n; i++) {
            float y = x[i] < -65504.0f ? -65504.0f : x[i];
            out[i] = (_Float16)(y > 65504.0f ? 65504.0f : y);
        }
    } else {
        memcpy(target, x, (size_t)n * 4);
    }
}
