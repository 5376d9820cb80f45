/* KV between paged caches and slabs, with the checksum of the slab taken on the way: what moves is read from memory
 * once and written once.
 *
 * A slab holds the tokens of one plane after those of the other. In a cache they lie in runs: those of a block follow
 * each other. The checksum is XXH3-64 of the whole slab, so its stripes go on over the ends of runs and of planes.
 */
#include "xxh3.h"

/* A plane of a cache: blocks of tokens of so many bytes. */
typedef struct {
    uint8_t *cache;
    int64_t token_bytes;
} Plane;

/* What moves: tokens [first_token, first_token + tokens) of a sequence, whose blocks are in the table. */
typedef struct {
    const Plane *planes;
    int64_t num_planes;
    const int64_t *table;
    int64_t block_size, first_token, tokens;
} Range;

/* The slab, and how far it was summed. */
typedef struct {
    Sums sums;
    const uint8_t *slab;
    int64_t stripe, stripes; /* the next one, and how many there are before the end, which is a case of its own */
} Summing;

enum { GATHER, SCATTER };

/* Past the caches: what moves is not read again by this core, which wants to keep other things in there. */
INLINE void store_past(uint8_t *to, words value) {
#if LANES == 16
    _mm512_stream_si512((__m512i *)to, (__m512i)value);
#elif LANES == 8
    _mm256_stream_si256((__m256i *)to, (__m256i)value);
#elif defined(__SSE2__)
    _mm_stream_si128((__m128i *)to, (__m128i)value);
#else
    *(unaligned_words *)to = value;
#endif
}

/* Sum so many stripes from `from` on, in their turn, and copy them. `next`, if any, will be read soon: it is fetched
 * into the second cache, since the first has room for far fewer lines that are on their way. */
INLINE void take(Summing *s, const uint8_t *from, int64_t stripes, uint8_t *to, const uint8_t *next, int past) {
    Sums sums = s->sums;
    int64_t at = s->stripe % STRIPES_IN_BLOCK;
    s->stripe += stripes;
    for (int64_t i = 0; i < stripes; i++, from += STRIPE_BYTES) {
        if (next) __builtin_prefetch(next + i * STRIPE_BYTES, 0, 2);
        for (int v = 0; v < VECTORS; v++) {
            const words data = load_words(from + v * VECTOR_BYTES);
            if (to && past) store_past(to + v * VECTOR_BYTES, data);
            if (to && !past) *(unaligned_words *)(to + v * VECTOR_BYTES) = data;
            sums.sums[v] = add_vector(sums.sums[v], data, load_words(xxh3_secret + 8 * at + v * VECTOR_BYTES));
        }
        if (to) to += STRIPE_BYTES;
        if (++at == STRIPES_IN_BLOCK) {
            scramble(&sums);
            at = 0;
        }
    }
    s->sums = sums;
}

/* Sum what is in the slab, and was not summed yet, up to a byte of it (whole stripes only). */
INLINE void catch_up(Summing *s, int64_t end) {
    int64_t stripe = end / STRIPE_BYTES;
    if (stripe > s->stripes) stripe = s->stripes;
    if (stripe > s->stripe) take(s, s->slab + s->stripe * STRIPE_BYTES, stripe - s->stripe, 0, 0, 0);
}

/* Copy a run, whose place in the slab is `at`, and sum it as far as stripes are whole. */
INLINE void move_run(Summing *s, uint8_t *run, int64_t at, int64_t bytes, const uint8_t *next, int how) {
    uint8_t *slab = (uint8_t *)s->slab + at;
    int64_t done = 0;
    const int past = (uintptr_t)(how == GATHER ? slab : run) % STRIPE_BYTES == 0;
    if (at == s->stripe * STRIPE_BYTES && (past || how == GATHER)) {
        int64_t stripes = bytes / STRIPE_BYTES;
        if (stripes > s->stripes - s->stripe) stripes = s->stripes - s->stripe;
        done = stripes * STRIPE_BYTES;
        if (how == SCATTER) take(s, slab, stripes, run, 0, 1);
        else if (past) take(s, run, stripes, slab, next, 1);
        else take(s, run, stripes, slab, next, 0);
    }
    if (how == GATHER) memcpy(slab + done, run + done, (size_t)(bytes - done));
    catch_up(s, at + bytes);
    if (how == SCATTER) memcpy(run + done, slab + done, (size_t)(bytes - done));
}

/* Where the KV of a token lies in a plane, and of those behind it in its block. */
INLINE uint8_t *run_of(const Range *range, int64_t plane, int64_t token) {
    const int64_t slot = range->table[token / range->block_size] * range->block_size + token % range->block_size;
    return range->planes[plane].cache + slot * range->planes[plane].token_bytes;
}

INLINE uint64_t move(const Range *range, uint8_t *slab, int how) {
    int64_t at = 0, bytes = 0;
    for (int64_t p = 0; p < range->num_planes; p++) bytes += range->tokens * range->planes[p].token_bytes;
    Summing s = {xxh3_begin(), slab, 0, (bytes - 1) / STRIPE_BYTES};
    for (int64_t p = 0; p < range->num_planes; p++) {
        const Plane plane = range->planes[p];
        const int64_t end = range->first_token + range->tokens, size = range->block_size;
        for (int64_t token = range->first_token, count; token < end; token += count) {
            const int64_t inside = token % size, last = token + size - inside >= end;
            count = last ? end - token : size - inside;
            uint8_t *run = run_of(range, p, token);
            const uint8_t *next = 0;
            if (!last) next = run_of(range, p, token + count);
            else if (p + 1 < range->num_planes) next = run_of(range, p + 1, range->first_token);
            move_run(&s, run, at, count * plane.token_bytes, next, how);
            at += count * plane.token_bytes;
        }
    }
#if defined(__SSE2__)
    _mm_sfence(); /* what was stored past the caches comes before whatever tells of it */
#endif
    return xxh3_end(&s.sums, slab, bytes);
}

/* Copy the range into the slab (of more than LONG_BYTES); its checksum. */
EXPORT void pd_gather_slab(const Range *range, uint8_t *slab, uint64_t *checksum) {
    *checksum = move(range, slab, GATHER);
}

/* Copy the slab into the range. The checksum is of what was copied. */
EXPORT void pd_scatter_slab(const Range *range, uint8_t *slab, uint64_t *checksum) {
    *checksum = move(range, slab, SCATTER);
}
