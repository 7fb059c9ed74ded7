/* SplitZip over byte sections: short codes for the commonest exponents, escapes for the others.
 *
 * splitzip.py states the format and is the reference, which these functions agree with bit for bit. One thread; no
 * allocation; nothing is read or written outside the announced sizes.
 */
#include <stdint.h>
#include <string.h>

enum { EXPONENTS = 1, FP8 = 2, FORMS = 2 };
enum { DONE = 0, DAMAGED = 3 };

#define CODES 16
#define HEAD (1 + 8 + CODES) /* form, plain size, table */
#define CHUNK 1024
#define BLOCK 16
#define ESCAPE 0x100u /* beside a code of 0 */

/* The bits of a byte that a code stands for, and what is left of it: an FP8 byte's sign and two lowest bits. */
static inline uint32_t symbol_of(int form, uint32_t b) { return form == EXPONENTS ? b : (b >> 2) & 31u; }
static inline uint32_t rest_of(uint32_t b) { return (b >> 7) << 2 | (b & 3u); }
static inline uint32_t fp8_byte(uint32_t symbol, uint32_t rest) { return (rest >> 2) << 7 | symbol << 2 | (rest & 3u); }
static inline int alphabet_of(int form) { return form == EXPONENTS ? 256 : 32; }

static inline int64_t chunks_of(int64_t size) { return (size + CHUNK - 1) / CHUNK; }

static inline int64_t triplet_bytes(int form, int64_t size) { return form == FP8 ? (3 * size + 7) / 8 : 0; }

/* Bytes before the escapes. */
static int64_t fixed_bytes(int form, int64_t size) {
    return HEAD + (size + 1) / 2 + triplet_bytes(form, size) + 2 * chunks_of(size);
}

static void put_size(uint8_t *out, int64_t size) {
    for (int k = 0; k < 8; k++) out[k] = (uint8_t)(size >> (8 * k));
}

static uint64_t get_size(const uint8_t *in) {
    uint64_t size = 0;
    for (int k = 0; k < 8; k++) size |= (uint64_t)in[k] << (8 * k);
    return size;
}

static void count_bytes(const uint8_t *restrict plain, int64_t size, int64_t *restrict counts) {
    /* Four tables, so that equal neighbours do not wait for each other. */
    int64_t parts[4][256] = {{0}};
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, plain + i, 8);
        for (int k = 0; k < 8; k++) parts[k & 3][(uint8_t)(word >> (8 * k))]++;
    }
    for (; i < size; i++) parts[0][plain[i]]++;
    for (int b = 0; b < 256; b++) counts[b] = parts[0][b] + parts[1][b] + parts[2][b] + parts[3][b];
}

/* The commonest symbols, smaller ones first among equals; returns how many bytes have another one. */
static int64_t choose(int form, const int64_t *counts, int64_t size, uint8_t *table) {
    int64_t folded[256] = {0}, covered = 0;
    for (int b = 0; b < 256; b++) folded[symbol_of(form, (uint32_t)b)] += counts[b];
    for (int k = 0; k < CODES; k++) {
        int best = -1;
        for (int e = 0; e < alphabet_of(form); e++)
            if (folded[e] >= 0 && (best < 0 || folded[e] > folded[best])) best = e;
        table[k] = (uint8_t)best;
        covered += folded[best];
        folded[best] = -1;
    }
    return size - covered;
}

static void pack_triplets(const uint8_t *restrict values, int64_t size, uint8_t *restrict out) {
    for (int64_t i = 0; i < size; i += 8) {
        uint32_t word = 0;
        int64_t have = size - i < 8 ? size - i : 8;
        for (int64_t k = 0; k < have; k++) word |= (uint32_t)values[i + k] << (3 * k);
        for (int64_t k = 0; k < (3 * have + 7) / 8; k++) *out++ = (uint8_t)(word >> (8 * k));
    }
}

/* Codes and rests of one chunk; returns its escapes. A chunk but the last holds whole nibbles and triplets. */
static inline __attribute__((always_inline)) int64_t encode_chunk(
    int form, const uint16_t *restrict low, const uint16_t *restrict high, const uint8_t *restrict plain, int64_t size,
    uint8_t *restrict nibbles, uint8_t *restrict triplets, uint8_t *restrict places, uint8_t *restrict symbols) {
    int64_t escapes = 0;
    for (int64_t block = 0; block < size; block += BLOCK) {
        int64_t end = block + BLOCK < size ? block + BLOCK : size, i = block;
        uint32_t seen = 0;
#pragma GCC unroll 8
        for (; i + 2 <= end; i += 2) {
            uint32_t both = (uint32_t)low[plain[i]] | high[plain[i + 1]];
            nibbles[i / 2] = (uint8_t)both;
            seen |= both;
        }
        if (i < end) {
            nibbles[i / 2] = (uint8_t)low[plain[i]];
            seen |= low[plain[i]];
        }
        if (!(seen & ESCAPE)) continue;
        for (i = block; i < end; i++) {
            if (!(low[plain[i]] & ESCAPE)) continue;
            places[2 * escapes] = (uint8_t)i;
            places[2 * escapes + 1] = (uint8_t)(i >> 8);
            symbols[escapes++] = (uint8_t)symbol_of(form, plain[i]);
        }
    }
    if (form == FP8) {
        uint8_t rests[CHUNK];
        for (int64_t i = 0; i < size; i++) rests[i] = (uint8_t)rest_of(plain[i]);
        pack_triplets(rests, size, triplets);
    }
    return escapes;
}

static void encode_as(
    int form, const uint8_t *table, int64_t escapes, const uint8_t *restrict plain, int64_t size,
    uint8_t *restrict out) {
    uint16_t low[256], high[256]; /* a byte's code in either half, or ESCAPE */
    for (int b = 0; b < 256; b++) {
        low[b] = high[b] = ESCAPE;
        for (int k = 0; k < CODES; k++)
            if (table[k] == symbol_of(form, (uint32_t)b)) low[b] = (uint16_t)k, high[b] = (uint16_t)(k << 4);
    }
    uint8_t *nibbles = out + HEAD, *triplets = nibbles + (size + 1) / 2;
    uint8_t *counts = triplets + triplet_bytes(form, size), *places = counts + 2 * chunks_of(size);
    uint8_t *symbols = places + 2 * escapes;
    *out = (uint8_t)form;
    put_size(out + 1, size);
    memcpy(out + 9, table, CODES);
    for (int64_t start = 0; start < size; start += CHUNK) {
        int64_t length = size - start < CHUNK ? size - start : CHUNK, found;
        uint8_t *four = nibbles + start / 2, *three = triplets + start / 8 * 3;
        if (form == EXPONENTS)
            found = encode_chunk(EXPONENTS, low, high, plain + start, length, four, three, places, symbols);
        else
            found = encode_chunk(FP8, low, high, plain + start, length, four, three, places, symbols);
        *counts++ = (uint8_t)found;
        *counts++ = (uint8_t)(found >> 8);
        places += 2 * found;
        symbols += found;
    }
}

/* For each section: coded_sizes[i] bytes at out[i], or, where nothing is saved, sizes[i] and nothing written. */
void kv_splitzip_encode(
    int64_t sections, const int64_t *plain, const int64_t *sizes, const int64_t *out, int64_t *coded_sizes) {
    for (int64_t s = 0; s < sections; s++) {
        const uint8_t *source = (const uint8_t *)(intptr_t)plain[s];
        int64_t size = sizes[s], best_size = size, best_escapes = 0, counts[256];
        uint8_t best_table[CODES], table[CODES];
        int best = 0;
        count_bytes(source, size, counts);
        for (int form = 1; form <= FORMS; form++) {
            int64_t escapes = choose(form, counts, size, table);
            int64_t wanted = fixed_bytes(form, size) + 3 * escapes;
            if (wanted >= best_size) continue;
            best = form, best_size = wanted, best_escapes = escapes;
            memcpy(best_table, table, CODES);
        }
        coded_sizes[s] = best_size;
        if (best) encode_as(best, best_table, best_escapes, source, size, (uint8_t *)(intptr_t)out[s]);
    }
}

static int decode_section(const uint8_t *restrict coded, int64_t coded_size, uint8_t *restrict plain, int64_t size) {
    if (coded_size < 1 || *coded < 1 || *coded > FORMS) return DAMAGED;
    int form = *coded;
    int64_t fixed = fixed_bytes(form, size), chunks = chunks_of(size), escapes = 0;
    if (coded_size < fixed || get_size(coded + 1) != (uint64_t)size) return DAMAGED;
    const uint8_t *table = coded + 9, *nibbles = table + CODES, *triplets = nibbles + (size + 1) / 2;
    const uint8_t *counts = coded + fixed - 2 * chunks, *places = coded + fixed, *symbols;
    for (int64_t c = 0; c < chunks; c++) escapes += counts[2 * c] | counts[2 * c + 1] << 8;
    if (coded_size != fixed + 3 * escapes) return DAMAGED;
    symbols = places + 2 * escapes;
    if (form == EXPONENTS) {
        uint16_t pairs[256];
        for (int b = 0; b < 256; b++) {
            uint8_t both[2] = {table[b & 15], table[b >> 4]};
            memcpy(&pairs[b], both, 2);
        }
        for (int64_t i = 0; i < size / 2; i++) memcpy(plain + 2 * i, &pairs[nibbles[i]], 2);
        if (size & 1) plain[size - 1] = table[nibbles[size / 2] & 15];
    } else {
        uint8_t bytes[128]; /* of a rest above a code */
        for (uint32_t k = 0; k < 128; k++) bytes[k] = (uint8_t)fp8_byte(table[k & 15u], k >> 4);
        for (int64_t i = 0; i < size; i += 8) {
            int64_t have = size - i < 8 ? size - i : 8;
            uint32_t word = 0;
            for (int64_t k = 0; k < (3 * have + 7) / 8; k++) word |= (uint32_t)*triplets++ << (8 * k);
            for (int64_t k = 0; k < have; k++) {
                uint32_t code = nibbles[(i + k) / 2] >> (4 * ((i + k) & 1)) & 15u;
                plain[i + k] = bytes[(word >> (3 * k) & 7u) << 4 | code];
            }
        }
    }
    for (int64_t c = 0; c < chunks; c++) {
        int64_t count = counts[2 * c] | counts[2 * c + 1] << 8, start = c * CHUNK;
        for (; count; count--, places += 2, symbols++) {
            int64_t place = start + (places[0] | places[1] << 8);
            if (place - start >= CHUNK || place >= size || *symbols >= alphabet_of(form)) return DAMAGED;
            plain[place] = form == EXPONENTS ? *symbols : (uint8_t)fp8_byte(*symbols, rest_of(plain[place]));
        }
    }
    return DONE;
}

/* Undoes kv_splitzip_encode; the caller leaves out sections that are as long as what they stand for. */
int kv_splitzip_decode(
    int64_t sections, const int64_t *coded, const int64_t *coded_sizes, const int64_t *plain, const int64_t *sizes) {
    for (int64_t s = 0; s < sections; s++)
        if (decode_section(
                (const uint8_t *)(intptr_t)coded[s], coded_sizes[s], (uint8_t *)(intptr_t)plain[s], sizes[s]))
            return DAMAGED;
    return DONE;
}
