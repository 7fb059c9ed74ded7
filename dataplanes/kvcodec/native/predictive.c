/* Fused CPU kernels of the layer-predictive transform codec: undo RoPE -> predict from decoded layers -> transform ->
 * uniform quantiser with a dead zone, and back.
 *
 * The result for one token depends on nothing but that token and its position, however tokens are tiled. Predictions are
 * sums of products of integers, exact in any order, so that both sides predict alike whatever their processors. One
 * thread; no allocation survives a call; nothing is read or written outside the announced shapes.
 */
#include "elements.h"
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#define PANEL 32 /* columns of a panel of weights */
#define PAIR 2   /* products that one instruction adds up in each lane */
#define TOKEN_TILE 8
#define MOST_DEPTH 8
#define TOKEN_BLOCK 96 /* tokens whose working set stays in the second-level cache */
#define LARGEST_SYMBOL 32000.0f
#define TOO_LARGE -1.0f

typedef uint32_t word_lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* Key and value planes [tokens, heads, head_dim] of every layer; heads and head_dim are contiguous within a token. */
typedef struct {
    const int64_t *key_addresses, *value_addresses; /* of token 0, per layer */
    const int64_t *key_strides, *value_strides;     /* elements between tokens, per layer */
    const int64_t *index;                           /* row of each token, or NULL for 0, 1, 2, ... */
    int64_t tokens, heads, key_dim, value_dim;
    int64_t dtype;
} kv_layers;

/* Integer weights stand in panels [columns / 32][rows / 2][32][2]. Synthesis is bfloat16; each run of 32 of its columns
 * is interleaved, 0 16 1 17 ...: one word holds two columns, and widening takes a shift or a mask. */
typedef struct {
    int64_t layers;
    int64_t width;      /* elements of a joint vector, a multiple of 32; what heads do not fill is zero */
    int64_t max_rank;   /* coefficients for which there are weights, a multiple of 32 */
    int64_t depth;      /* layers that a prediction sees */
    int64_t bottleneck; /* of the prediction, a multiple of 32; 0 for none */
    float largest;             /* of the integers that predictions see */
    const float *gain;         /* [layer][width]: decoded layer to integer */
    const int16_t *narrow;     /* [layer][depth] panels of [width][bottleneck] */
    const float *narrow_scale; /* [layer][bottleneck]: sum to integer */
    const int16_t *widen;      /* [layer] panels of [bottleneck][width] */
    const float *widen_scale;  /* [layer][width]: sum to prediction */
    float largest_input;         /* of the integers that the analysis sees */
    const float *weight;         /* [layer][width]: what elements are multiplied with before they become integers */
    const int16_t *analysis;     /* [layer] panels of [width][max_rank] */
    const float *analysis_scale; /* [layer][max_rank] */
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

#define SINKS 4

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

static inline char *row_of(int64_t address, int64_t stride, const kv_layers *p, int64_t token) {
    int64_t row = p->index ? p->index[token] : token;
    return (char *)(intptr_t)address + row * stride * element_bytes(p->dtype);
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

/* A product of int16 matrices, summed over sources; sums fit into int32 because whoever made the numbers saw to it. */
typedef struct {
    const int16_t *inputs[MOST_DEPTH]; /* [tokens][depth], of each source */
    int64_t sources, depth;
    const int16_t *weights; /* of each source: panels [columns / 32][depth / 2][32][2] */
    int64_t source_stride;
} kv_product;

#ifdef __AVX512VNNI__
/* As an instruction: from the intrinsic GCC 12 makes two copies of every total in every turn. */
static inline __attribute__((always_inline)) void add_products(__m512i *total, __m512i x, __m512i y) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(*total) : "v"(x), "v"(y));
}
#endif

/* 32 columns of a few tokens from token `t` on; `panel` numbers the columns. */
static inline __attribute__((always_inline)) void multiply_tile(
    const int rows, const kv_product *p, int64_t t, int64_t panel, float sums[TOKEN_TILE][PANEL]) {
#ifdef __AVX512VNNI__
    __m512i totals[TOKEN_TILE][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) totals[r][0] = totals[r][1] = _mm512_setzero_si512();
    for (int64_t s = 0; s < p->sources; s++) {
        const int16_t *x = p->inputs[s] + t * p->depth;
        const int16_t *weights = p->weights + s * p->source_stride + panel * p->depth * PANEL;
        for (int64_t k = 0; k < p->depth; k += PAIR, weights += PANEL * PAIR) {
            __m512i first = _mm512_loadu_si512(weights), second = _mm512_loadu_si512(weights + LANES * PAIR);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, x + r * p->depth + k, sizeof pair);
                __m512i factors = _mm512_set1_epi32(pair);
                add_products(&totals[r][0], factors, first);
                add_products(&totals[r][1], factors, second);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(sums[r], _mm512_cvtepi32_ps(totals[r][0]));
        _mm512_storeu_ps(sums[r] + LANES, _mm512_cvtepi32_ps(totals[r][1]));
    }
#else
    int32_t totals[TOKEN_TILE][PANEL] = {{0}};
    for (int64_t s = 0; s < p->sources; s++) {
        const int16_t *weights = p->weights + s * p->source_stride + panel * p->depth * PANEL;
        for (int64_t k = 0; k < p->depth; k += PAIR, weights += PANEL * PAIR)
            for (int r = 0; r < rows; r++) {
                const int16_t *x = p->inputs[s] + (t + r) * p->depth + k;
                for (int i = 0; i < PANEL; i++)
                    totals[r][i] += x[0] * weights[i * PAIR] + x[1] * weights[i * PAIR + 1];
            }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < PANEL; i++) sums[r][i] = (float)totals[r][i];
#endif
}

/* n numbers, a multiple of 16, times their scales: rounded, within -largest .. largest. */
static inline void to_integers(
    const float *restrict x, const float *restrict scales, float largest, int64_t n, int16_t *restrict out) {
    for (int64_t i = 0; i < n; i++) {
        float y = x[i] * scales[i];
        y = y > largest ? largest : y;
        y = y < -largest ? -largest : y;
        out[i] = (int16_t)(int32_t)__builtin_rintf(y);
    }
}

/* The same with one scale, which the largest of the numbers sets; returns what a 1 then stands for, or TOO_LARGE. */
static float to_own_integers(const float *restrict x, float largest, int64_t n, int16_t *restrict out) {
    uint32_t peak = 0; /* infinities and NaNs exceed every finite limit */
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]) & 0x7fffffffu;
        peak = u > peak ? u : peak;
    }
    if (peak >= LARGEST_INPUT_BITS) return TOO_LARGE;
    float scale = float_of(peak) > 0x1p-96f ? largest / float_of(peak) : 0.0f;
    for (int64_t i = 0; i < n; i++) out[i] = (int16_t)(int32_t)__builtin_rintf(x[i] * scale);
    return float_of(peak) / largest;
}

/* [tokens][out_stride], as floats times their column's scale, or as integers of that. */
static inline __attribute__((always_inline)) void multiply(
    const kv_product *p, const float *restrict scales, int64_t columns, int64_t tokens, float *restrict floats,
    int64_t out_stride, int16_t *restrict integers, float largest) {
    for (int64_t panel = 0; panel < columns / PANEL; panel++) {
        const float *restrict scale = scales + panel * PANEL;
        for (int64_t t = 0, rows; t < tokens; t += rows) {
            float sums[TOKEN_TILE][PANEL];
            if (tokens - t >= TOKEN_TILE) {
                multiply_tile(TOKEN_TILE, p, t, panel, sums);
                rows = TOKEN_TILE;
            } else if (tokens - t >= 4) {
                multiply_tile(4, p, t, panel, sums);
                rows = 4;
            } else {
                multiply_tile(1, p, t, panel, sums);
                rows = 1;
            }
            for (int64_t r = 0; r < rows; r++) {
                int64_t place = (t + r) * out_stride + panel * PANEL;
                if (integers)
                    to_integers(sums[r], scale, largest, PANEL, integers + place);
                else
                    for (int i = 0; i < PANEL; i++) floats[place + i] = sums[r][i] * scale[i];
            }
        }
    }
}

/* What one block of tokens needs. */
typedef struct {
    float *current;      /* [TOKEN_BLOCK][width]: the prediction, then the decoded layer, without its mean */
    float *coefficients; /* [TOKEN_BLOCK][max_rank] */
    float *units;        /* [TOKEN_BLOCK]: what one of a token's residual integers stands for */
    float *token;        /* [width] */
    float *values;       /* [max_rank] */
    int32_t *places;     /* [max_rank] */
    int16_t *history;    /* [depth][TOKEN_BLOCK][width]: decoded layers */
    int16_t *residual;   /* [TOKEN_BLOCK][width] */
    int16_t *narrow;     /* [TOKEN_BLOCK][bottleneck] */
} workspace;

static char *open_workspace(const kv_predictor *c, workspace *w) {
    int64_t layer = TOKEN_BLOCK * c->width, coefficients = TOKEN_BLOCK * c->max_rank;
    int64_t words = layer + coefficients + TOKEN_BLOCK + c->width + 2 * c->max_rank;
    int64_t halves = (c->depth + 1) * layer + TOKEN_BLOCK * c->bottleneck;
    char *memory = malloc((size_t)(words * 4 + halves * 2));
    if (!memory) return NULL;
    w->current = (float *)memory;
    w->coefficients = w->current + layer;
    w->units = w->coefficients + coefficients;
    w->token = w->units + TOKEN_BLOCK;
    w->values = w->token + c->width;
    w->places = (int32_t *)(w->values + c->max_rank);
    w->history = (int16_t *)(memory + words * 4);
    w->residual = w->history + c->depth * layer;
    w->narrow = w->residual + layer;
    return memory;
}

static inline int16_t *layer_history(const kv_predictor *c, const workspace *w, int64_t layer) {
    return w->history + layer % c->depth * TOKEN_BLOCK * c->width;
}

static void forget(const kv_predictor *c, const workspace *w) {
    memset(w->history, 0, (size_t)(c->depth * TOKEN_BLOCK * c->width) * 2);
}

/* The prediction of a layer from the decoded layers before it, into w->current. */
static void predict(const kv_predictor *c, const workspace *w, int64_t layer, int64_t tokens) {
    if (layer == 0 || c->depth == 0 || c->bottleneck == 0) {
        memset(w->current, 0, (size_t)(tokens * c->width) * 4);
        return;
    }
    int64_t panels = c->width * c->bottleneck;
    kv_product narrow = {
        .sources = c->depth, .depth = c->width, .weights = c->narrow + layer * c->depth * panels, .source_stride = panels};
    for (int64_t i = 0; i < c->depth; i++) narrow.inputs[i] = layer_history(c, w, layer + i);
    multiply(
        &narrow, c->narrow_scale + layer * c->bottleneck, c->bottleneck, tokens, NULL,
        c->bottleneck, w->narrow, c->largest);
    kv_product widen = {
        .inputs = {w->narrow}, .sources = 1, .depth = c->bottleneck, .weights = c->widen + layer * panels};
    multiply(&widen, c->widen_scale + layer * c->width, c->width, tokens, w->current, c->width, NULL, 0);
}

/* Keeps a token of a decoded layer for predictions. */
static void remember(const kv_predictor *c, const workspace *w, int64_t layer, int64_t i) {
    if (c->depth == 0) return;
    int16_t *history = layer_history(c, w, layer) + i * c->width;
    to_integers(w->current + i * c->width, c->gain + layer * c->width, c->largest, c->width, history);
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
#ifdef __AVX512BW__
    const __m512 shrink = _mm512_set1_ps(c->shrink), unit = _mm512_set1_ps(step);
    __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t run = 0; run < rank; run += LANES) {
        __m512i q = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(symbols + run)));
        __mmask16 coded = _mm512_test_epi32_mask(q, q);
        __m512 size = _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_abs_epi32(q)), shrink), unit);
        __mmask16 negative = _mm512_movepi32_mask(q);
        size = _mm512_mask_sub_ps(size, negative, _mm512_setzero_ps(), size);
        _mm512_mask_compressstoreu_ps(w->values + count, coded, size);
        _mm512_mask_compressstoreu_epi32(w->places + count, coded, places);
        count += __builtin_popcount(coded);
        places = _mm512_add_epi32(places, _mm512_set1_epi32(LANES));
    }
#else
    for (int64_t j = 0; j < rank; j++) {
        int32_t q = symbols[j];
        float size = ((float)(q < 0 ? -q : q) - c->shrink) * step;
        w->places[count] = (int32_t)j;
        w->values[count] = q < 0 ? -size : size;
        count += q != 0;
    }
#endif
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
        forget(c, &w);
        for (int64_t layer = 0; layer < c->layers && status == DONE; layer++) {
            int16_t *q_of_token = layer_symbols + count_symbols(c, layer, 0, start);
            int64_t widest = 0;
            predict(c, &w, layer, count);
            for (int64_t i = 0; i < count; i++) {
                int64_t t = start + i, rank = token_rank(c, layer, t);
                widest = rank > widest ? rank : widest;
                float *restrict x = w.token;
                const char *key = row_of(p->key_addresses[layer], p->key_strides[layer], p, t);
                const char *value = row_of(p->value_addresses[layer], p->value_strides[layer], p, t);
                if (load(key, p->dtype, keys, x) >= LARGEST_INPUT_BITS ||
                    load(value, p->dtype, values, x + keys) >= LARGEST_INPUT_BITS)
                    status = NOT_EXPRESSIBLE;
                rotate(x, p->heads, p->key_dim, c->rotary_dim, c->cosines + t * half, c->sines + t * half, -1.0f);
                for (int64_t k = keys + values; k < c->width; k++) x[k] = 0.0f;
                const float *restrict mean =
                    c->mean + (position_class(c, t) * c->layers + layer) * c->width;
                const float *restrict guess = w.current + i * c->width, *restrict weight = c->weight + layer * c->width;
                for (int64_t k = 0; k < c->width; k++) x[k] = ((x[k] - mean[k]) - guess[k]) * weight[k];
                w.units[i] = to_own_integers(x, c->largest_input, c->width, w.residual + i * c->width);
                if (w.units[i] == TOO_LARGE) status = NOT_EXPRESSIBLE;
            }
            if (status != DONE) break;
            kv_product analysis = {
                .inputs = {w.residual}, .sources = 1, .depth = c->width,
                .weights = c->analysis + layer * c->max_rank * c->width};
            multiply(
                &analysis, c->analysis_scale + layer * c->max_rank, widest, count, w.coefficients, c->max_rank, NULL, 0);
            for (int64_t i = 0; i < count; i++) {
                float step = token_step(c, start + i), inverse = w.units[i] / step;
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
                reconstruct(c, &w, layer, q, rank, step, w.current + i * c->width);
                remember(c, &w, layer, i);
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
        forget(c, &w);
        for (int64_t layer = 0; layer < c->layers; layer++) {
            const int16_t *q_of_token = layer_symbols + count_symbols(c, layer, 0, start);
            predict(c, &w, layer, count);
            for (int64_t i = 0; i < count; i++) {
                int64_t t = start + i, rank = token_rank(c, layer, t);
                float *restrict decoded = w.current + i * c->width, *restrict x = w.token;
                reconstruct(c, &w, layer, q_of_token, rank, token_step(c, t), decoded);
                remember(c, &w, layer, i);
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
