/* Interleaved range asymmetric numeral systems (Duda, arXiv 1311.2540) with tables that both sides have.
 *
 * 32 states of 31 bits, renormalised by 16-bit words; the state of a symbol is its number in its row modulo 32. What is
 * written does not depend on the processor: the vector code and the plain code below make the same bytes.
 *
 * Stream: 32 states, then words in the order in which the decoder takes them. A symbol that a table does not hold is
 * coded as the table's escape; its 16 bits follow the words of its run of 16 symbols.
 */
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define WIDE 1
#endif

enum { DONE = 0, DAMAGED = 3 };

typedef uint16_t word __attribute__((aligned(1), may_alias)); /* frames promise no alignment */

#define RUN 16
#define STATES 32
#define LOWEST_STATE (1u << 15)
#define PROBABILITY_BITS 12
#define TOTAL (1u << PROBABILITY_BITS)
#define TABLE_SYMBOLS 256
#define ESCAPE 255u

/* Rows of symbols, each of a kind; kinds share 64 tables. Symbols are ordered 0, 1, -1, 2, -2, ..., escape. */
typedef struct {
    int64_t rows;
    const int32_t *kinds;    /* of each row */
    const int32_t *lengths;  /* of the rows of each kind, multiples of 32 */
    int64_t longest;
    const uint8_t *tables;   /* [kind][longest]: the table of each symbol */
    const uint8_t *escapes;  /* [kind][longest]: where that table's escape stands */
    const uint32_t *decoding; /* [table][4096]: symbol << 24 | (slot - start) << 12 | frequency - 1; escapes: 255 << 24 */
    const uint32_t *encoding; /* [table][256][2]: reciprocal; bias | (4096 - frequency) << 13 | shift << 25 */
} kv_coded_rows;

static inline uint32_t order_of(int32_t q) { return q > 0 ? 2u * (uint32_t)q - 1u : 2u * (uint32_t)-q; }

static inline int32_t symbol_of(uint32_t order) {
    int32_t size = (int32_t)((order + 1) / 2);
    return order & 1 ? size : -size;
}

/* Sixteen symbols, last one first; returns where the stream now begins. */
static word *encode_run(
    const kv_coded_rows *c, const uint8_t *tables, const uint8_t *escapes, const int16_t *q, uint32_t *states,
    word *cursor) {
#ifdef WIDE
    const __m512i zero = _mm512_setzero_si512();
    __m512i symbols = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)q));
    __m512i table = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)tables));
    __m512i last = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)escapes));
    __m512i twice = _mm512_slli_epi32(symbols, 1);
    __mmask16 positive = _mm512_cmpgt_epi32_mask(symbols, zero);
    __m512i order = _mm512_mask_sub_epi32(_mm512_sub_epi32(zero, twice), positive, twice, _mm512_set1_epi32(1));
    __mmask16 escaped = _mm512_cmpge_epu32_mask(order, last);
    order = _mm512_min_epu32(order, last);
    if (escaped) {
        cursor -= __builtin_popcount(escaped);
        _mm256_mask_storeu_epi16(
            cursor, (__mmask16)((1u << __builtin_popcount(escaped)) - 1u),
            _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(escaped, symbols)));
    }
    __m512i index = _mm512_or_si512(_mm512_slli_epi32(table, 8), order);
    __m512i reciprocal = _mm512_i32gather_epi32(index, c->encoding, 8);
    __m512i packed = _mm512_i32gather_epi32(index, c->encoding + 1, 8);
    __m512i bias = _mm512_and_si512(packed, _mm512_set1_epi32(0x1fff));
    __m512i complement = _mm512_and_si512(_mm512_srli_epi32(packed, 13), _mm512_set1_epi32(0xfff));
    __m512i shift = _mm512_srli_epi32(packed, 25);
    __m512i x = _mm512_loadu_si512(states);
    __m512i limit = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(TOTAL), complement), 31 - PROBABILITY_BITS);
    __mmask16 full = _mm512_cmpge_epu32_mask(x, limit);
    int words = __builtin_popcount(full);
    cursor -= words;
    _mm256_mask_storeu_epi16(
        cursor, (__mmask16)((1u << words) - 1u), _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x)));
    x = _mm512_mask_srli_epi32(x, full, x, 16);
    __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(x, reciprocal), 32);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(reciprocal, 32));
    __m512i quotient = _mm512_srlv_epi32(_mm512_mask_blend_epi32(0xaaaa, even, odd), shift);
    x = _mm512_add_epi32(_mm512_add_epi32(x, bias), _mm512_mullo_epi32(quotient, complement));
    _mm512_storeu_si512(states, x);
#else
    for (int i = RUN - 1; i >= 0; i--)
        if (order_of(q[i]) >= escapes[i]) *--cursor = (uint16_t)q[i];
    for (int i = RUN - 1; i >= 0; i--) {
        uint32_t order = order_of(q[i]), x = states[i];
        const uint32_t *entry =
            c->encoding + 2 * (tables[i] * TABLE_SYMBOLS + (order < escapes[i] ? order : escapes[i]));
        uint32_t bias = entry[1] & 0x1fffu, complement = entry[1] >> 13 & 0xfffu, shift = entry[1] >> 25;
        if (x >= (TOTAL - complement) << (31 - PROBABILITY_BITS)) {
            *--cursor = (uint16_t)x;
            x >>= 16;
        }
        uint32_t quotient = (uint32_t)((uint64_t)x * entry[0] >> 32) >> shift;
        states[i] = x + bias + quotient * complement;
    }
#endif
    return cursor;
}

/* Returns the bytes used at the end of `out`, which has room for 4 bytes a symbol and the states. */
int64_t kv_rans_encode(const kv_coded_rows *c, const int16_t *symbols, int64_t count, uint8_t *out, int64_t capacity) {
    uint32_t states[STATES];
    for (int i = 0; i < STATES; i++) states[i] = LOWEST_STATE;
    word *end = (word *)(out + capacity), *cursor = end;
    const int16_t *q = symbols + count;
    for (int64_t row = c->rows - 1; row >= 0; row--) {
        int64_t kind = c->kinds[row];
        const uint8_t *tables = c->tables + kind * c->longest, *escapes = c->escapes + kind * c->longest;
        q -= c->lengths[kind];
        for (int64_t j = c->lengths[kind] - RUN; j >= 0; j -= RUN)
            cursor = encode_run(c, tables + j, escapes + j, q + j, states + j % STATES, cursor);
    }
    cursor -= sizeof states / 2;
    memcpy(cursor, states, sizeof states);
    return (int64_t)(end - cursor) * 2;
}

/* Sixteen symbols; returns where the stream goes on, or NULL where it is too short. */
static const word *decode_run(
    const kv_coded_rows *c, const uint8_t *tables, int16_t *q, uint32_t *states, const word *cursor,
    const word *end) {
#ifdef WIDE
    if (end - cursor >= 2 * RUN) { /* so that whole vectors can be read */
        __m512i table = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)tables));
        __m512i x = _mm512_loadu_si512(states);
        __m512i slot = _mm512_and_si512(x, _mm512_set1_epi32(TOTAL - 1));
        __m512i entry =
            _mm512_i32gather_epi32(_mm512_or_si512(_mm512_slli_epi32(table, PROBABILITY_BITS), slot), c->decoding, 4);
        __m512i less = _mm512_and_si512(entry, _mm512_set1_epi32(0xfff));
        __m512i bias = _mm512_and_si512(_mm512_srli_epi32(entry, 12), _mm512_set1_epi32(0xfff));
        __m512i high = _mm512_srli_epi32(x, PROBABILITY_BITS);
        x = _mm512_add_epi32(_mm512_add_epi32(_mm512_mullo_epi32(less, high), high), bias);
        __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(LOWEST_STATE));
        __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)cursor));
        x = _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(low, words));
        cursor += __builtin_popcount(low);
        _mm512_storeu_si512(states, x);
        __m512i order = _mm512_srli_epi32(entry, 24);
        __m512i size = _mm512_srli_epi32(_mm512_add_epi32(order, _mm512_set1_epi32(1)), 1);
        __mmask16 negative = _mm512_testn_epi32_mask(order, _mm512_set1_epi32(1));
        __m512i value = _mm512_mask_sub_epi32(size, negative, _mm512_setzero_si512(), size);
        __mmask16 escaped = _mm512_cmpeq_epu32_mask(order, _mm512_set1_epi32(ESCAPE));
        if (escaped) {
            __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)cursor));
            value = _mm512_mask_expand_epi32(value, escaped, wide);
            cursor += __builtin_popcount(escaped);
        }
        _mm256_storeu_si256((__m256i *)q, _mm512_cvtepi32_epi16(value));
        return cursor;
    }
#endif
    uint32_t escaped = 0;
    for (int i = 0; i < RUN; i++) {
        uint32_t x = states[i], entry = c->decoding[tables[i] << PROBABILITY_BITS | (x & (TOTAL - 1))];
        x = ((entry & 0xfffu) + 1) * (x >> PROBABILITY_BITS) + (entry >> 12 & 0xfffu);
        if (x < LOWEST_STATE) {
            if (cursor == end) return NULL;
            x = x << 16 | *cursor++;
        }
        states[i] = x;
        q[i] = (int16_t)symbol_of(entry >> 24);
        escaped |= (uint32_t)(entry >> 24 == ESCAPE) << i;
    }
    for (int i = 0; i < RUN; i++) {
        if (!(escaped >> i & 1)) continue;
        if (cursor == end) return NULL;
        q[i] = (int16_t)*cursor++;
    }
    return cursor;
}

/* Undoes kv_rans_encode; DAMAGED if the bytes do not end where the symbols do. */
int kv_rans_decode(const kv_coded_rows *c, const uint8_t *coded, int64_t size, int16_t *symbols) {
    uint32_t states[STATES];
    if (size < (int64_t)sizeof states || size % 2) return DAMAGED;
    memcpy(states, coded, sizeof states);
    for (int i = 0; i < STATES; i++)
        if (states[i] < LOWEST_STATE || states[i] >> 31) return DAMAGED;
    const word *cursor = (const word *)(coded + sizeof states), *end = (const word *)(coded + size);
    for (int64_t row = 0; row < c->rows; row++) {
        int64_t kind = c->kinds[row];
        const uint8_t *tables = c->tables + kind * c->longest;
        for (int64_t j = 0; j < c->lengths[kind]; j += RUN) {
            cursor = decode_run(c, tables + j, symbols + j, states + j % STATES, cursor, end);
            if (!cursor) return DAMAGED;
        }
        symbols += c->lengths[kind];
    }
    for (int i = 0; i < STATES; i++)
        if (states[i] != LOWEST_STATE) return DAMAGED;
    return cursor == end ? DONE : DAMAGED;
}
