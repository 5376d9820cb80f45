#ifndef PDSERVE_PAGED_H
#define PDSERVE_PAGED_H

#include <stdint.h>

/* One layer's paged KV, and how its attention is computed. Caches are [blocks, block_size, kv_heads, dim]: floats, or
 * int8 where there are scales, [blocks, block_size, kv_heads] each. */
typedef struct {
    void *k_cache, *v_cache;
    float *k_scales, *v_scales; /* or both null */
    const float *sinks; /* [heads] or null */
    int64_t block_size, heads, kv_heads, k_dim, v_dim, window; /* window: 0 for none */
    float scale, softcap;                                      /* softcap: 0 for none */
} PagedLayer;

/* Sequences of a step: query_lens[i] rows of q from starts[i] on are the last of context_lens[i] tokens, whose table is
 * tables[i * table_stride ..]. */
typedef struct {
    int64_t count, table_stride;
    const int64_t *starts, *query_lens, *context_lens, *tables;
} Sequences;

typedef struct {
    Sequences singles, chunks; /* those with one query, and with more */
} Step;

/* out [rows, heads, v_dim] = attention of q, of which a row begins every q_stride floats. */
void pd_attend(const PagedLayer *layer, const Step *step, const float *q, int64_t q_stride, float *out);

/* Store a step's K and V, [rows, kv_heads, dim] with rows that far apart, at their slots. */
void pd_write_kv(const PagedLayer *layer, const int64_t *slots, int64_t rows, const float *k, int64_t k_stride,
                 const float *v, int64_t v_stride);

/* The two halves of pd_attend. */
void attend_singles(const PagedLayer *layer, const Sequences *sequences, const float *q, int64_t q_stride, float *out);
void attend_chunks(const PagedLayer *layer, const Sequences *sequences, const float *q, int64_t q_stride, float *out);

#endif
