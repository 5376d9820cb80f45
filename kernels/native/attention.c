/* Attention of single new tokens over a paged cache, float32: K and V are read once, where they lie.
 *
 * A context is walked in segments whose K and V fit L1: scores, then a softmax that is rescaled from segment to
 * segment, then the sum of V. All queries that share a KV head take their part while it is there. The order depends on
 * token numbers only, so neither the neighbours nor the places of the blocks change a bit.
 */
#include "paged.h"
#include "threads.h"
#include "vector.h"

#include <math.h>

#define SEGMENT 64 /* tokens */
#define GROUP 4    /* queries at a time */
#define FEW 8      /* sequences: their heads are shared out too, though a token's K and V are then read in parts */
#if LANES == 16
#define WIDTH 4 /* vectors of V at a time: with GROUP, 16 of 32 registers hold sums */
#else
#define WIDTH 2 /* 8 of 16 */
#endif

/* Where the tokens of a segment have their K and V, all heads of it. */
typedef struct {
    int64_t tokens, slots[SEGMENT];
    const char *keys[SEGMENT], *values[SEGMENT];
} Segment;

/* LANES elements from element i on, or the `count` first of them: floats, or bytes whose scale is applied later. */
INLINE vec load_element(const int bytes, const char *row, int64_t i) {
    return bytes ? load_bytes((const int8_t *)row + i) : load((const float *)row + i);
}
INLINE vec load_elements(const int bytes, const char *row, int64_t i, int64_t count) {
    return bytes ? load_bytes_part((const int8_t *)row + i, count) : load_part((const float *)row + i, count);
}

/* Scores of `tokens` rows of K with `group` queries. q [group, dim], scores [group][SEGMENT]. What the next segment
 * needs is fetched meanwhile: blocks lie anywhere, and no prefetcher guesses that. */
INLINE void score(const int bytes, const int tokens, const int group, const char *const *keys, const char *const *next,
                  int64_t head_offset, const float *q, int64_t dim, float scale, float *scores) {
    vec sums[GROUP][4];
    for (int g = 0; g < group; g++)
        for (int t = 0; t < tokens; t++) sums[g][t] = (vec){0};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vec key[4];
        for (int t = 0; t < tokens; t++) {
            key[t] = load_element(bytes, keys[t], head_offset + i);
            __builtin_prefetch(next[t] + (head_offset + i) * (bytes ? 1 : 4), 0, 2);
        }
        for (int g = 0; g < group; g++) {
            vec query = load(q + g * dim + i);
            for (int t = 0; t < tokens; t++) sums[g][t] += query * key[t];
        }
    }
    if (i < dim)
        for (int t = 0; t < tokens; t++) {
            vec key = load_elements(bytes, keys[t], head_offset + i, dim - i);
            for (int g = 0; g < group; g++) sums[g][t] += load_part(q + g * dim + i, dim - i) * key;
        }
    vec kept[GROUP][4]; /* by way of memory, as in linear.c */
    for (int g = 0; g < group; g++)
        for (int t = 0; t < tokens; t++) kept[g][t] = sums[g][t];
    __asm__("" : : "r"(kept) : "memory");
    for (int g = 0; g < group; g++) {
        if (tokens == 4)
            store4(scores + g * SEGMENT, fold_sums(kept[g][0], kept[g][1], kept[g][2], kept[g][3]) * scale);
        else
            for (int t = 0; t < tokens; t++) scores[g * SEGMENT + t] = fold_sum(kept[g][t]) * scale;
    }
}

/* out [group, dim] = out * rescale + sum over tokens of probability * V, for `width` vectors from `i` on. */
INLINE void mix(const int bytes, const int width, const int group, int64_t tokens, const char *const *values,
                const char *const *next, int64_t head_offset, const float *probabilities, const float *rescale,
                int64_t i, int64_t dim, float *out) {
    vec sums[GROUP][WIDTH];
    for (int g = 0; g < group; g++)
        for (int w = 0; w < width; w++) sums[g][w] = load(out + g * dim + i + w * LANES) * rescale[g];
    for (int64_t t = 0; t < tokens; t++) {
        vec value[WIDTH];
        for (int w = 0; w < width; w++) {
            value[w] = load_element(bytes, values[t], head_offset + i + w * LANES);
            __builtin_prefetch(next[t] + (head_offset + i + w * LANES) * (bytes ? 1 : 4), 0, 2);
        }
        for (int g = 0; g < group; g++)
            for (int w = 0; w < width; w++) sums[g][w] += value[w] * probabilities[g * SEGMENT + t];
    }
    for (int g = 0; g < group; g++)
        for (int w = 0; w < width; w++) store(out + g * dim + i + w * LANES, sums[g][w]);
}

/* One segment for `group` queries of one KV head, whose scales for the tokens are given with bytes. largest, total
 * [group]: the softmax so far. */
INLINE void attend(const int bytes, const int group, const Segment *segment, const Segment *next, int64_t k_offset,
                   int64_t v_offset, const float *k_scales, const float *v_scales, const float *q, int64_t k_dim,
                   int64_t v_dim, float scale, float softcap, float *most, float *total, float *out) {
    const int64_t tokens = segment->tokens;
    const char *const *values = segment->values;
    float scores[GROUP * SEGMENT], rescale[GROUP];
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4)
        score(bytes, 4, group, segment->keys + t, next->keys + t, k_offset, q, k_dim, scale, scores + t);
    for (; t < tokens; t++)
        score(bytes, 1, group, segment->keys + t, next->keys + t, k_offset, q, k_dim, scale, scores + t);
    for (int g = 0; g < group; g++) {
        float *mine = scores + g * SEGMENT;
        if (bytes)
            for (t = 0; t < tokens; t++) mine[t] *= k_scales[t];
        if (softcap > 0)
            for (t = 0; t < tokens; t++) mine[t] = softcap * tanhf(mine[t] / softcap);
        for (t = tokens; t % LANES; t++) mine[t] = -INFINITY;
        const int64_t padded = t;
        vec peaks = splat(most[g]);
        for (t = 0; t < padded; t += LANES) peaks = larger(peaks, load(mine + t));
        float peak = most[g];
        for (int lane = 0; lane < LANES; lane++) peak = peak > peaks[lane] ? peak : peaks[lane];
        vec sum = {0};
        for (t = 0; t < padded; t += LANES) {
            vec weight = exponential(load(mine + t) - peak);
            store(mine + t, weight);
            sum += weight;
        }
        rescale[g] = exponential(splat(most[g] - peak))[0];
        total[g] = total[g] * rescale[g] + fold_sum(sum);
        most[g] = peak;
        if (bytes)
            for (t = 0; t < tokens; t++) mine[t] *= v_scales[t];
    }
    int64_t i = 0;
    for (; i + WIDTH * LANES <= v_dim; i += WIDTH * LANES)
        mix(bytes, WIDTH, group, tokens, values, next->values, v_offset, scores, rescale, i, v_dim, out);
    for (; i + LANES <= v_dim; i += LANES)
        mix(bytes, 1, group, tokens, values, next->values, v_offset, scores, rescale, i, v_dim, out);
    for (; i < v_dim; i++)
        for (int g = 0; g < group; g++) {
            float sum = out[g * v_dim + i] * rescale[g];
            for (t = 0; t < tokens; t++) {
                const int64_t at = v_offset + i;
                const float value = bytes ? ((const int8_t *)values[t])[at] : ((const float *)values[t])[at];
                sum += value * scores[g * SEGMENT + t];
            }
            out[g * v_dim + i] = sum;
        }
}

typedef struct {
    const PagedLayer *layer;
    const Sequences *sequences;
    const float *q;
    int64_t q_stride;
    int64_t parts; /* items of a sequence: 1, or one for each KV head */
    float *out;
} Call;

static int64_t first_token(const Call *call, int64_t s) {
    const int64_t len = call->sequences->context_lens[s], window = call->layer->window;
    return window && len > window ? len - window : 0;
}

static void find_segment(const Call *call, int64_t s, int64_t first, Segment *segment) {
    const PagedLayer *layer = call->layer;
    const int64_t *table = call->sequences->tables + s * call->sequences->table_stride;
    const int64_t left = call->sequences->context_lens[s] - first;
    const int64_t k_row = layer->kv_heads * layer->k_dim, v_row = layer->kv_heads * layer->v_dim;
    const int64_t size = layer->k_scales ? 1 : sizeof(float);
    segment->tokens = left < SEGMENT ? left : SEGMENT;
    int64_t block = first / layer->block_size, offset = first % layer->block_size;
    for (int64_t t = 0; t < segment->tokens; t++) {
        int64_t slot = table[block] * layer->block_size + offset;
        segment->slots[t] = slot;
        segment->keys[t] = (const char *)layer->k_cache + slot * k_row * size;
        segment->values[t] = (const char *)layer->v_cache + slot * v_row * size;
        if (++offset == layer->block_size) block++, offset = 0;
    }
}

/* One segment for all queries of KV heads [first .. end). most, total [heads]; queries, mixed [heads, dim]. */
INLINE void attend_heads(const int bytes, const PagedLayer *layer, const Segment *segment, const Segment *next,
                         int64_t first, int64_t end, const float *queries, float *most, float *total, float *mixed) {
    const int64_t shared = layer->heads / layer->kv_heads, k_dim = layer->k_dim, v_dim = layer->v_dim;
    for (int64_t kv_head = first; kv_head < end; kv_head++) {
        float k_scales[SEGMENT], v_scales[SEGMENT];
        for (int64_t t = 0; bytes && t < segment->tokens; t++) {
            k_scales[t] = layer->k_scales[segment->slots[t] * layer->kv_heads + kv_head];
            v_scales[t] = layer->v_scales[segment->slots[t] * layer->kv_heads + kv_head];
        }
        for (int64_t h = kv_head * shared, last = h + shared; h < last;) {
#define ATTEND(group)                                                                                                \
    attend(bytes, group, segment, next, kv_head *k_dim, kv_head *v_dim, k_scales, v_scales, queries + h * k_dim,     \
           k_dim, v_dim, layer->scale, layer->softcap, most + h, total + h, mixed + h * v_dim);                      \
    h += group;                                                                                                      \
    break
            switch (last - h) {
            case 1: ATTEND(1);
            case 2: ATTEND(2);
            case 3: ATTEND(3);
            default: ATTEND(4);
            }
#undef ATTEND
        }
    }
}

/* In functions of their own, so that compilers treat them as well as when there was one. */
#define SPECIAL(name, bytes)                                                                                         \
    static __attribute__((noinline)) void name(const PagedLayer *layer, const Segment *segment, const Segment *next, \
                                               int64_t first, int64_t end, const float *queries, float *most,        \
                                               float *total, float *mixed) {                                         \
        attend_heads(bytes, layer, segment, next, first, end, queries, most, total, mixed);                          \
    }
SPECIAL(attend_floats, 0)
SPECIAL(attend_bytes, 1)

/* A sequence, or one KV head of it. While its last segment is worked on, what the next item begins with is fetched. */
static void attend_item(void *context, int64_t item) {
    const Call *call = context;
    const PagedLayer *layer = call->layer;
    const int64_t s = item / call->parts, part = item % call->parts, shared = layer->heads / layer->kv_heads;
    const int64_t kv_first = call->parts == 1 ? 0 : part, kv_end = call->parts == 1 ? layer->kv_heads : part + 1;
    const int64_t first_head = kv_first * shared, end_head = kv_end * shared, v_dim = layer->v_dim;
    const int64_t row = call->sequences->starts[s], len = call->sequences->context_lens[s];
    const float *queries = call->q + row * call->q_stride;
    float *mixed = call->out + row * layer->heads * v_dim, most[layer->heads], total[layer->heads];
    memset(mixed + first_head * v_dim, 0, (size_t)((end_head - first_head) * v_dim) * sizeof(float));
    for (int64_t h = first_head; h < end_head; h++) {
        most[h] = layer->sinks ? layer->sinks[h] : -INFINITY;
        total[h] = layer->sinks ? 1.0f : 0.0f;
    }
    Segment segments[2], *segment = segments, *next = segments + 1;
    find_segment(call, s, first_token(call, s), segment);
    for (int64_t first = first_token(call, s); first < len; first += SEGMENT) {
        next->tokens = 0;
        if (first + SEGMENT < len)
            find_segment(call, s, first + SEGMENT, next);
        else if (call->parts == 1 && s + 1 < call->sequences->count)
            find_segment(call, s + 1, first_token(call, s + 1), next);
        for (int64_t t = next->tokens; t < segment->tokens; t++) /* may point anywhere valid */
            next->keys[t] = segment->keys[t], next->values[t] = segment->values[t];
        (layer->k_scales ? attend_bytes : attend_floats)(layer, segment, next, kv_first, kv_end, queries, most, total, mixed);
        Segment *done = segment;
        segment = next, next = done;
    }
    for (int64_t h = first_head; h < end_head; h++)
        for (int64_t i = 0; i < v_dim; i++) mixed[h * v_dim + i] /= total[h];
}

void attend_singles(const PagedLayer *layer, const Sequences *sequences, const float *q, int64_t q_stride, float *out) {
    const int64_t parts = sequences->count < FEW && pd_may_be_helped() ? layer->kv_heads : 1;
    Call call = {layer, sequences, q, q_stride, parts, out};
    pd_parallel(attend_item, &call, sequences->count * parts);
}
