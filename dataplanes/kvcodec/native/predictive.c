/* Fused CPU kernels of the layer-predictive transform codec: undo RoPE -> predict from decoded layers -> transform ->
 * uniform quantiser with a dead zone, and back; and its entropy coder, an interleaved rANS with calibrated tables.
 *
 * The result for one token depends on nothing but that token and its position: every sum runs over one index in
 * ascending order, however tokens are tiled. Multiply-adds are fused where the processor has them. One thread; no
 * allocation survives a call; nothing is read or written outside the announced shapes.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BFLOAT16 = 0, FLOAT16 = 1, FLOAT32 = 2 };
enum { DONE = 0, NOT_EXPRESSIBLE = 1, NO_MEMORY = 2, DAMAGED = 3 };

#define LANES 16
#define PANEL 32 /* columns of a weight panel */
#define TOKEN_TILE 12
#define TOKEN_BLOCK 96 /* tokens whose working set stays in the second-level cache */
#define LARGEST_INPUT_BITS 0x6f800000u /* 2**96 */
#define LARGEST_SYMBOL 32000.0f

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t word_lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* Key and value planes [tokens, heads, head_dim] of every layer; heads and head_dim are contiguous within a token. */
typedef struct {
    const int64_t *key_addresses, *value_addresses; /* of token 0, per layer */
    const int64_t *key_strides, *value_strides;     /* elements between tokens, per layer */
    const int64_t *index;                           /* row of each token, or NULL for 0, 1, 2, ... */
    int64_t tokens, heads, key_dim, value_dim;
    int64_t dtype;
} kv_layers;

/* Weights are bfloat16 in panels [columns / 32][depth][32], except synthesis, which is [layer][rank][width]. Each run of
 * 32 columns is interleaved, 0 16 1 17 2 18 ...: one word holds two columns, and widening takes a shift or a mask. */
typedef struct {
    int64_t layers;
    int64_t width;      /* elements of a joint vector, a multiple of 32; what heads do not fill is zero */
    int64_t max_rank;   /* coefficients for which there are weights, a multiple of 32 */
    int64_t depth;      /* layers that a prediction sees */
    int64_t bottleneck; /* of the prediction, a multiple of 32; 0 for none */
    const uint16_t *narrow;    /* [layer][depth][bottleneck / 32][width][32] */
    const uint16_t *widen;     /* [layer][width / 32][bottleneck][32] */
    const uint16_t *analysis;  /* [layer][max_rank / 32][width][32] */
    const uint16_t *synthesis; /* [layer][max_rank][width] */
    const float *mean;         /* [position class][layer][width] */
    const int32_t *ranks;      /* [position class][layer], multiples of 32 */
    int64_t rotary_dim;
    const float *cosines, *sines; /* [token][rotary_dim / 2] */
    int64_t first_token;
    int64_t request_tokens;   /* of the whole request, 0 if unknown */
    int64_t band_count;
    const int64_t *bands;     /* descending: tokens at the request's end with finer steps */
    const float *refinements; /* [position class]: by which the step is finer there */
    float step;
    float dead_zone;   /* what is added before rounding down */
    float shrink;      /* how much nearer to zero a symbol is reconstructed */
} kv_predictor;

/* Frequencies of 2**15 per class; symbols are ordered 0, 1, -1, 2, -2, ..., escape. */
typedef struct {
    const uint8_t *classes;  /* [position class][layer][max_rank] */
    const int32_t *counts;   /* symbols of a class, the escape included */
    const uint32_t *starts;  /* [class][257]: cumulative frequencies */
    const uint8_t *hints;    /* [class][128]: the symbol that holds slot 256 * i */
} kv_tables;

#define SINKS 4
#define TABLE_STRIDE 257
#define HINTS 128
#define PROBABILITY_BITS 15
#define STATES 4
#define LOWEST_STATE (1ull << 31)

/* 0: the first token; 1: the next three; 2: all others, but 3, 4, ...: those in the bands at the request's end. */
static inline int64_t position_class(const kv_predictor *c, int64_t token) {
    int64_t position = c->first_token + token;
    if (position < SINKS) return position == 0 ? 0 : 1;
    int64_t left = c->request_tokens - position, class = 2;
    if (c->request_tokens == 0) return class;
    for (int64_t i = 0; i < c->band_count; i++) class += left <= c->bands[i];
    return class;
}

/* Coefficients that are coded of a layer of a token. */
static inline int64_t token_rank(const kv_predictor *c, int64_t layer, int64_t token) {
    return c->ranks[position_class(c, token) * c->layers + layer];
}

/* Symbols of a layer of the tokens start .. stop - 1. */
static int64_t count_symbols(const kv_predictor *c, int64_t layer, int64_t start, int64_t stop) {
    int64_t count = 0;
    for (int64_t t = start; t < stop; t++) count += token_rank(c, layer, t);
    return count;
}

static int64_t largest_rank(const kv_predictor *c, int64_t layer, int64_t start, int64_t stop) {
    int64_t largest = 0;
    for (int64_t t = start; t < stop; t++) {
        int64_t rank = token_rank(c, layer, t);
        largest = rank > largest ? rank : largest;
    }
    return largest;
}

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

static inline char *row_of(int64_t address, int64_t stride, const kv_layers *p, int64_t token) {
    int64_t row = p->index ? p->index[token] : token;
    return (char *)(intptr_t)address + row * stride * element_bytes(p->dtype);
}

/* Converts n elements and returns the largest magnitude's bits: infinities and NaNs exceed every finite limit. */
static uint32_t load(const char *source, int64_t dtype, int64_t n, float *restrict out) {
    uint32_t peak = 0;
    if (dtype == BFLOAT16) {
        const uint16_t *x = (const uint16_t *)source;
        for (int64_t i = 0; i < n; i++) out[i] = float_of((uint32_t)x[i] << 16);
    } else if (dtype == FLOAT16) {
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

/* Rotates every head by its position's angle: direction 1 applies RoPE, -1 undoes it. Halves are paired. */
static void rotate(
    float *restrict x, int64_t heads, int64_t head_dim, int64_t rotary_dim, const float *restrict cosines,
    const float *restrict sines, float direction) {
    int64_t half = rotary_dim / 2;
    for (int64_t h = 0; h < heads; h++) {
        float *restrict first = x + h * head_dim, *restrict second = first + half;
        for (int64_t i = 0; i < half; i++) {
            float a = first[i], b = second[i], s = direction * sines[i];
            first[i] = a * cosines[i] - b * s;
            second[i] = b * cosines[i] + a * s;
        }
    }
}

/* Columns 0 .. 15 and 16 .. 31 of an interleaved run. */
static inline vector first_half(word_lanes words) { return (vector)(words << 16); }
static inline vector second_half(word_lanes words) { return (vector)(words & 0xffff0000u); }

static inline __attribute__((always_inline)) void multiply_tile(
    const int rows, const float *restrict x, int64_t x_stride, const uint16_t *restrict panel, int64_t depth,
    float *restrict out, int64_t out_stride, int accumulate) {
    vector sums[TOKEN_TILE][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        sums[r][0] = accumulate ? *(vector *)(out + r * out_stride) : (vector){0};
        sums[r][1] = accumulate ? *(vector *)(out + r * out_stride + LANES) : (vector){0};
    }
    for (int64_t k = 0; k < depth; k++) {
        word_lanes words = *(const word_lanes *)(panel + k * PANEL);
        vector low = first_half(words), high = second_half(words);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float factor = x[r * x_stride + k];
            sums[r][0] += factor * low;
            sums[r][1] += factor * high;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        *(vector *)(out + r * out_stride) = sums[r][0];
        *(vector *)(out + r * out_stride + LANES) = sums[r][1];
    }
}

/* out [tokens][columns] (+)= x [tokens][depth] times panels [columns / 32][depth][32] */
static void multiply(
    const float *x, int64_t x_stride, const uint16_t *panels, int64_t depth, int64_t columns, int64_t tokens,
    float *out, int64_t out_stride, int accumulate) {
    for (int64_t column = 0; column < columns; column += PANEL, panels += depth * PANEL) {
        int64_t t = 0;
        for (; t + TOKEN_TILE <= tokens; t += TOKEN_TILE)
            multiply_tile(
                TOKEN_TILE, x + t * x_stride, x_stride, panels, depth, out + t * out_stride + column, out_stride,
                accumulate);
        for (; t + 4 <= tokens; t += 4)
            multiply_tile(
                4, x + t * x_stride, x_stride, panels, depth, out + t * out_stride + column, out_stride, accumulate);
        for (; t < tokens; t++)
            multiply_tile(
                1, x + t * x_stride, x_stride, panels, depth, out + t * out_stride + column, out_stride, accumulate);
    }
}

/* What one block of tokens needs. */
typedef struct {
    float *history; /* [depth + 1][TOKEN_BLOCK][width]: decoded layers without their means; the current one among them */
    float *input;   /* [TOKEN_BLOCK][width] */
    float *narrow;  /* [TOKEN_BLOCK][bottleneck] */
    float *coefficients; /* [TOKEN_BLOCK][max_rank] */
    int32_t *places;     /* [max_rank] */
    float *values;       /* [max_rank] */
} workspace;

static char *open_workspace(const kv_predictor *c, workspace *w) {
    int64_t history = (c->depth + 1) * TOKEN_BLOCK * c->width, input = TOKEN_BLOCK * c->width;
    int64_t narrow = TOKEN_BLOCK * c->bottleneck, coefficients = TOKEN_BLOCK * c->max_rank;
    char *memory = malloc((size_t)(history + input + narrow + coefficients + 2 * c->max_rank) * 4);
    if (!memory) return NULL;
    w->history = (float *)memory;
    w->input = w->history + history;
    w->narrow = w->input + input;
    w->coefficients = w->narrow + narrow;
    w->values = w->coefficients + coefficients;
    w->places = (int32_t *)(w->values + c->max_rank);
    return memory;
}

static inline float *layer_history(const kv_predictor *c, const workspace *w, int64_t layer) {
    return w->history + (layer % (c->depth + 1)) * TOKEN_BLOCK * c->width;
}

/* The prediction of a layer from the decoded layers before it, into that layer's place in the history. */
static void predict(const kv_predictor *c, const workspace *w, int64_t layer, int64_t tokens) {
    float *current = layer_history(c, w, layer);
    int64_t first = layer < c->depth ? 0 : layer - c->depth;
    if (first == layer || c->bottleneck == 0) {
        memset(current, 0, (size_t)(tokens * c->width) * 4);
        return;
    }
    int64_t panel = c->width * c->bottleneck;
    for (int64_t source = first; source < layer; source++) {
        const uint16_t *weights = c->narrow + (layer * c->depth + (source - layer + c->depth)) * panel;
        multiply(
            layer_history(c, w, source), c->width, weights, c->width, c->bottleneck, tokens, w->narrow, c->bottleneck,
            source > first);
    }
    multiply(
        w->narrow, c->bottleneck, c->widen + layer * panel, c->bottleneck, c->width, tokens, current, c->width, 0);
}

/* target [width] += sum of values[i] * rows[places[i]] */
static void add_rows(
    float *restrict target, int64_t width, const uint16_t *restrict rows, const int32_t *restrict places,
    const float *restrict values, int64_t count) {
    int64_t column = 0;
    for (; column + 4 * PANEL <= width; column += 4 * PANEL) {
        vector sums[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sums[i] = *(vector *)(target + column + i * LANES);
        for (int64_t n = 0; n < count; n++) {
            const uint16_t *row = rows + places[n] * width + column;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                word_lanes words = *(const word_lanes *)(row + i * PANEL);
                sums[2 * i] += values[n] * first_half(words);
                sums[2 * i + 1] += values[n] * second_half(words);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) *(vector *)(target + column + i * LANES) = sums[i];
    }
    for (; column < width; column += PANEL) {
        vector low = *(vector *)(target + column), high = *(vector *)(target + column + LANES);
        for (int64_t n = 0; n < count; n++) {
            word_lanes words = *(const word_lanes *)(rows + places[n] * width + column);
            low += values[n] * first_half(words);
            high += values[n] * second_half(words);
        }
        *(vector *)(target + column) = low;
        *(vector *)(target + column + LANES) = high;
    }
}

/* Adds what the symbols of one token stand for. */
static void reconstruct(
    const kv_predictor *c, const workspace *w, int64_t layer, const int16_t *restrict symbols, int64_t rank, float step,
    float *restrict target) {
    int64_t count = 0;
    for (int64_t run = 0; run < rank; run += 4) {
        uint64_t four;
        memcpy(&four, symbols + run, sizeof four);
        if (four == 0) continue; /* most are */
        for (int64_t j = run; j < run + 4; j++) {
            int32_t q = symbols[j];
            float size = (float)(q < 0 ? -q : q) - c->shrink;
            w->places[count] = (int32_t)j;
            w->values[count] = q < 0 ? -size * step : size * step;
            count += q != 0;
        }
    }
    add_rows(target, c->width, c->synthesis + layer * c->max_rank * c->width, w->places, w->values, count);
}

static float token_step(const kv_predictor *c, int64_t token) {
    return c->step / c->refinements[position_class(c, token)];
}

/* symbols [layer][token][rank of that layer and token] */
int kv_predictive_encode(const kv_layers *p, const kv_predictor *c, int16_t *symbols) {
    workspace w;
    char *memory = open_workspace(c, &w);
    if (!memory) return NO_MEMORY;
    int status = DONE;
    int64_t keys = p->heads * p->key_dim, values = p->heads * p->value_dim, half = c->rotary_dim / 2;
    for (int64_t start = 0; start < p->tokens && status == DONE; start += TOKEN_BLOCK) {
        int64_t count = p->tokens - start < TOKEN_BLOCK ? p->tokens - start : TOKEN_BLOCK;
        int16_t *layer_symbols = symbols;
        for (int64_t layer = 0; layer < c->layers && status == DONE; layer++) {
            int64_t widest = largest_rank(c, layer, start, start + count);
            int16_t *q_of_token = layer_symbols + count_symbols(c, layer, 0, start);
            float *current = layer_history(c, &w, layer);
            predict(c, &w, layer, count);
            for (int64_t i = 0; i < count; i++) {
                int64_t t = start + i;
                float *restrict x = w.input + i * c->width;
                const char *key = row_of(p->key_addresses[layer], p->key_strides[layer], p, t);
                const char *value = row_of(p->value_addresses[layer], p->value_strides[layer], p, t);
                if (load(key, p->dtype, keys, x) >= LARGEST_INPUT_BITS ||
                    load(value, p->dtype, values, x + keys) >= LARGEST_INPUT_BITS)
                    status = NOT_EXPRESSIBLE;
                rotate(x, p->heads, p->key_dim, c->rotary_dim, c->cosines + t * half, c->sines + t * half, -1.0f);
                for (int64_t k = keys + values; k < c->width; k++) x[k] = 0.0f;
                const float *restrict mean =
                    c->mean + (position_class(c, t) * c->layers + layer) * c->width;
                const float *restrict guess = current + i * c->width;
                for (int64_t k = 0; k < c->width; k++) x[k] = (x[k] - mean[k]) - guess[k];
            }
            if (status != DONE) break;
            multiply(
                w.input, c->width, c->analysis + layer * c->max_rank * c->width, c->width, widest, count, w.coefficients,
                c->max_rank, 0);
            for (int64_t i = 0; i < count; i++) {
                float step = token_step(c, start + i), inverse = 1.0f / step;
                float dead_zone = c->dead_zone;
                uint32_t peak = 0;
                int64_t rank = token_rank(c, layer, start + i);
                const float *restrict y = w.coefficients + i * c->max_rank;
                int16_t *restrict q = q_of_token;
                for (int64_t j = 0; j < rank; j++) {
                    float size = __builtin_fabsf(y[j]) * inverse;
                    uint32_t u = bits_of(size);
                    peak = u > peak ? u : peak; /* infinities and NaNs exceed every finite number */
                    int32_t cell = (int32_t)((size < LARGEST_SYMBOL ? size : LARGEST_SYMBOL) + dead_zone);
                    q[j] = (int16_t)(y[j] < 0 ? -cell : cell);
                }
                if (peak >= bits_of(LARGEST_SYMBOL)) status = NOT_EXPRESSIBLE;
                reconstruct(c, &w, layer, q, rank, step, current + i * c->width);
                q_of_token += rank;
            }
            layer_symbols += count_symbols(c, layer, 0, p->tokens);
        }
    }
    free(memory);
    return status;
}

int kv_predictive_decode(const kv_layers *p, const kv_predictor *c, const int16_t *symbols) {
    workspace w;
    char *memory = open_workspace(c, &w);
    if (!memory) return NO_MEMORY;
    int64_t keys = p->heads * p->key_dim, values = p->heads * p->value_dim, half = c->rotary_dim / 2;
    for (int64_t start = 0; start < p->tokens; start += TOKEN_BLOCK) {
        int64_t count = p->tokens - start < TOKEN_BLOCK ? p->tokens - start : TOKEN_BLOCK;
        const int16_t *layer_symbols = symbols;
        for (int64_t layer = 0; layer < c->layers; layer++) {
            const int16_t *q_of_token = layer_symbols + count_symbols(c, layer, 0, start);
            float *current = layer_history(c, &w, layer);
            predict(c, &w, layer, count);
            for (int64_t i = 0; i < count; i++) {
                int64_t t = start + i, rank = token_rank(c, layer, t);
                float *restrict decoded = current + i * c->width, *restrict x = w.input;
                reconstruct(c, &w, layer, q_of_token, rank, token_step(c, t), decoded);
                q_of_token += rank;
                const float *restrict mean =
                    c->mean + (position_class(c, t) * c->layers + layer) * c->width;
                for (int64_t k = 0; k < keys + values; k++) x[k] = decoded[k] + mean[k];
                rotate(x, p->heads, p->key_dim, c->rotary_dim, c->cosines + t * half, c->sines + t * half, 1.0f);
                store(x, p->dtype, keys, row_of(p->key_addresses[layer], p->key_strides[layer], p, t));
                store(x + keys, p->dtype, values, row_of(p->value_addresses[layer], p->value_strides[layer], p, t));
            }
            layer_symbols += count_symbols(c, layer, 0, p->tokens);
        }
    }
    free(memory);
    return DONE;
}

static inline uint32_t symbol_place(int32_t q) { return q > 0 ? 2u * (uint32_t)q - 1u : 2u * (uint32_t)-q; }

static inline int32_t symbol_at(uint32_t place) {
    int32_t size = (int32_t)((place + 1) / 2);
    return place & 1 ? size : -size;
}

/* rANS from the last symbol to the first; words are written backwards from the end of the buffer.
 *
 * Returns the bytes used at the end of `out`, or -1 if the buffer is too small. Symbols are [layer][token][rank]; the
 * state of a symbol is its coefficient's number modulo 4, which is why ranks are multiples of 4. */
int64_t kv_rans_encode(
    const kv_predictor *c, const kv_tables *tables, int64_t tokens, const int16_t *symbols, uint8_t *out,
    int64_t capacity) {
    uint64_t states[STATES] = {LOWEST_STATE, LOWEST_STATE, LOWEST_STATE, LOWEST_STATE};
    uint8_t *end = out + capacity, *cursor = end;
    int64_t total = 0;
    for (int64_t layer = 0; layer < c->layers; layer++) total += count_symbols(c, layer, 0, tokens);
    const int16_t *q = symbols + total;
    for (int64_t layer = c->layers - 1; layer >= 0; layer--) {
        for (int64_t t = tokens - 1; t >= 0; t--) {
            int64_t rank = token_rank(c, layer, t);
            const uint8_t *classes =
                tables->classes + (position_class(c, t) * c->layers + layer) * c->max_rank;
            q -= rank;
            /* At worst two words a symbol. */
            if (cursor - out < rank * 8 + STATES * 8) return -1;
            for (int64_t j = rank - 1; j >= 0; j--) {
                uint64_t x = states[j % STATES];
                const uint32_t *starts = tables->starts + classes[j] * TABLE_STRIDE;
                uint32_t place = symbol_place(q[j]), last = (uint32_t)tables->counts[classes[j]] - 1;
                if (place >= last) {
                    place = last;
                    if (x >= 1ull << 47) {
                        cursor -= 4;
                        memcpy(cursor, &x, 4);
                        x >>= 32;
                    }
                    x = x << 16 | (uint16_t)q[j];
                }
                uint64_t start = starts[place], frequency = starts[place + 1] - start;
                if (x >= frequency << (31 - PROBABILITY_BITS + 32)) {
                    cursor -= 4;
                    memcpy(cursor, &x, 4);
                    x >>= 32;
                }
                states[j % STATES] = (x / frequency << PROBABILITY_BITS) + x % frequency + start;
            }
        }
    }
    cursor -= sizeof states;
    memcpy(cursor, states, sizeof states);
    return end - cursor;
}

/* Undoes kv_rans_encode; DAMAGED if the bytes do not end where the symbols do. */
int kv_rans_decode(
    const kv_predictor *c, const kv_tables *tables, int64_t tokens, const uint8_t *coded, int64_t size,
    int16_t *symbols) {
    uint64_t states[STATES];
    if (size < (int64_t)sizeof states || size % 4) return DAMAGED;
    memcpy(states, coded, sizeof states);
    const uint8_t *cursor = coded + sizeof states, *end = coded + size;
    int16_t *q = symbols;
    for (int64_t layer = 0; layer < c->layers; layer++) {
        for (int64_t t = 0, rank; t < tokens; t++, q += rank) {
            rank = token_rank(c, layer, t);
            const uint8_t *classes =
                tables->classes + (position_class(c, t) * c->layers + layer) * c->max_rank;
            for (int64_t j = 0; j < rank; j++) {
                uint64_t x = states[j % STATES];
                const uint32_t *starts = tables->starts + classes[j] * TABLE_STRIDE;
                uint32_t slot = (uint32_t)x & ((1u << PROBABILITY_BITS) - 1);
                uint32_t place = 0;
                if (slot >= starts[1]) {
                    place = tables->hints[classes[j] * HINTS + (slot >> 8)];
                    while (slot >= starts[place + 1]) place++;
                }
                x = (uint64_t)(starts[place + 1] - starts[place]) * (x >> PROBABILITY_BITS) + slot - starts[place];
                if (x < LOWEST_STATE) {
                    if (cursor == end) return DAMAGED;
                    uint32_t word;
                    memcpy(&word, cursor, 4);
                    cursor += 4;
                    x = x << 32 | word;
                }
                int32_t value = symbol_at(place);
                if (place == (uint32_t)tables->counts[classes[j]] - 1) {
                    value = (int16_t)(uint16_t)x;
                    x >>= 16;
                    if (x < LOWEST_STATE) {
                        if (cursor == end) return DAMAGED;
                        uint32_t word;
                        memcpy(&word, cursor, 4);
                        cursor += 4;
                        x = x << 32 | word;
                    }
                }
                states[j % STATES] = x;
                q[j] = (int16_t)value;
            }
        }
    }
    for (int i = 0; i < STATES; i++)
        if (states[i] != LOWEST_STATE) return DAMAGED;
    return cursor == end ? DONE : DAMAGED;
}
