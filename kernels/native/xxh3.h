/* XXH3-64 (xxhash, with no seed) of a long stretch of bytes, a stripe of 64 at a time, in whatever steps suit. */
#ifndef PDSERVE_XXH3_H
#define PDSERVE_XXH3_H

#include "vector.h"

#define STRIPE_BYTES 64
#define STRIPES_IN_BLOCK 16
#define VECTOR_BYTES (LANES * 4)
#define VECTORS (STRIPE_BYTES / VECTOR_BYTES)
#define LONG_BYTES 240 /* up to here xxhash has other rules, which are not here */

typedef uint64_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t unaligned_words __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));

typedef struct {
    words sums[VECTORS];
} Sums;

extern const uint8_t xxh3_secret[192];

INLINE words load_words(const uint8_t *from) { return *(const unaligned_words *)from; }

/* The product of the lower halves of each word. */
INLINE words multiply(words a, words b) {
#if LANES == 16
    return (words)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif LANES == 8
    return (words)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (words)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

INLINE words swap_pairs(words a) {
#if LANES == 16
    return (words)_mm512_shuffle_epi32((__m512i)a, 0x4e);
#elif LANES == 8
    return (words)_mm256_shuffle_epi32((__m256i)a, 0x4e);
#else
    return (words){a[1], a[0]};
#endif
}

INLINE words add_vector(words sums, words data, words key) {
    const words mixed = data ^ key;
    return sums + swap_pairs(data) + multiply(mixed, mixed >> 32);
}

/* After the last stripe of every block. */
INLINE void scramble(Sums *s) {
    for (int v = 0; v < VECTORS; v++) {
        const words mixed = s->sums[v] ^ (s->sums[v] >> 47) ^ load_words(xxh3_secret + 128 + v * VECTOR_BYTES);
        const words prime = (words){0} + 0x9E3779B1u;
        s->sums[v] = multiply(mixed, prime) + (multiply(mixed >> 32, prime) << 32);
    }
}

Sums xxh3_begin(void);

/* The hash of `bytes` (more than LONG_BYTES) whose (bytes - 1) / STRIPE_BYTES stripes are in the sums. */
uint64_t xxh3_end(const Sums *s, const uint8_t *data, int64_t bytes);

#endif
