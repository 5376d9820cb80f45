/* Causal attention of a prompt's chunk over a paged cache, float32: K and V are read where they lie.
 * K and V in int8 become floats a segment at a time, in L1.
 *
 * A tile is as many queries as fill WIDTH vectors, one query (of one head) a lane; all of a tile share a KV head. Lanes
 * being queries, a key's or value's element is a scalar for all of them, the softmax needs no sum across lanes, and only
 * the queries and the results are transposed, once a tile. A tile walks the context in segments between multiples of
 * SEGMENT, with a softmax that is rescaled from one to the next.
 *
 * What a lane computes is ordered by key positions alone, and a key it may not see adds exactly nothing: so its bits do
 * not depend on the other lanes, nor on where the prompt was cut into chunks of more than one token.
 */
#include "paged.h"
#include "threads.h"
#include "vector.h"

#include <math.h>

#define WIDTH 3 /* vectors of queries */
#if LANES == 16
#define ROWS 8 /* keys, or dimensions of V, at a time: with WIDTH, 24 of 32 registers hold sums */
#else
#define ROWS 4 /* 12 of 16 */
#endif
#define TILE (WIDTH * LANES)
#define SEGMENT 64       /* tokens */
#define HIDDEN (-1e30f) /* finite, so that the difference of two is 0 */

typedef struct {
    const PagedLayer *layer;
    const Sequences *sequences;
    const float *q;
    int64_t q_stride;
    float *out;
} Call;

/* A tile at work: queries `from` .. `from` + `lanes` of a sequence's tokens x the heads of one KV head. Matrices
 * queries [k_dim][TILE], scores [SEGMENT][TILE], mixed [v_dim][TILE] have a column for every query. */
typedef struct {
    const PagedLayer *layer;
    int64_t sequence, kv_head, from, lanes;
    int64_t first_key, last_key; /* that any lane sees */
    float *queries, *scores, *mixed;
    float *room; /* for K and V of a segment, where they are bytes */
    const float *keys[SEGMENT], *values[SEGMENT]; /* of the KV head, for the tokens of a segment */
    float most[TILE], total[TILE], rescale[TILE];
    int32_t positions[TILE];
} Tile;

INLINE void transpose4(vec4 rows[4]) {
    vec4 a = SHUFFLE(rows[0], rows[1], 0, 4, 1, 5), b = SHUFFLE(rows[2], rows[3], 0, 4, 1, 5);
    vec4 c = SHUFFLE(rows[0], rows[1], 2, 6, 3, 7), d = SHUFFLE(rows[2], rows[3], 2, 6, 3, 7);
    rows[0] = SHUFFLE(a, b, 0, 1, 4, 5), rows[1] = SHUFFLE(a, b, 2, 3, 6, 7);
    rows[2] = SHUFFLE(c, d, 0, 1, 4, 5), rows[3] = SHUFFLE(c, d, 2, 3, 6, 7);
}

/* Sums are variables, one by one: compilers leave an array of them in memory. */
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define DECLARE(r) vec sum##r##a = {0}, sum##r##b = {0}, sum##r##c = {0};
#define ADD(r, element)                                                                                              \
    if (count > r) {                                                                                                 \
        const float factor = element;                                                                                \
        sum##r##a += a * factor;                                                                                     \
        if (width > 1) sum##r##b += b * factor;                                                                      \
        if (width > 2) sum##r##c += c * factor;                                                                      \
    }
/* A row of a matrix [..][TILE], as far as it is used. */
#define LOAD_ROW(from)                                                                                               \
    const vec a = load(from), b = width > 1 ? load((from) + LANES) : a, c = width > 2 ? load((from) + 2 * LANES) : a
#define STORE_ROW(r, to)                                                                                             \
    if (count > r) {                                                                                                 \
        store(to, sum##r##a);                                                                                        \
        if (width > 1) store((to) + LANES, sum##r##b);                                                               \
        if (width > 2) store((to) + 2 * LANES, sum##r##c);                                                           \
    }

/* scores[t] = queries . keys[t] for `count` keys. */
INLINE void score(const int width, const int count, const Tile *tile, int64_t t, int64_t dim) {
    const float *const *keys = tile->keys + t, *queries = tile->queries;
    float *scores = tile->scores + t * TILE;
    EACH_ROW(DECLARE)
#define FIND_KEY(r) const float *key##r = keys[r < count ? r : 0];
    EACH_ROW(FIND_KEY)
    for (int64_t i = 0; i < dim; i++) {
        LOAD_ROW(queries + i * TILE);
#define ADD_KEY(r) ADD(r, key##r[i])
        EACH_ROW(ADD_KEY)
    }
#define STORE_SCORES(r) STORE_ROW(r, scores + r * TILE)
    EACH_ROW(STORE_SCORES)
}

/* mixed[i] = mixed[i] * rescale + sum over tokens of V[token][i] * scores[token], for `count` dimensions from i on. */
INLINE void mix(const int width, const int count, const Tile *tile, int64_t i, int64_t tokens) {
    const float *const *values = tile->values, *scores = tile->scores;
    float *mixed = tile->mixed + i * TILE;
    EACH_ROW(DECLARE)
    {
        LOAD_ROW(tile->rescale);
#define RESCALE(r)                                                                                                   \
    if (count > r) {                                                                                                 \
        sum##r##a = load(mixed + r * TILE) * a;                                                                      \
        if (width > 1) sum##r##b = load(mixed + r * TILE + LANES) * b;                                               \
        if (width > 2) sum##r##c = load(mixed + r * TILE + 2 * LANES) * c;                                           \
    }
        EACH_ROW(RESCALE)
    }
    for (int64_t t = 0; t < tokens; t++) {
        const float *value = values[t] + i;
        LOAD_ROW(scores + t * TILE);
#define ADD_VALUE(r) ADD(r, value[r])
        EACH_ROW(ADD_VALUE)
    }
#define STORE_MIXED(r) STORE_ROW(r, mixed + r * TILE)
    EACH_ROW(STORE_MIXED)
}

INLINE vec hyperbolic_tangent(vec x) {
    const vec square = x * x, small = splat(0.0625f);
    vec series = square * (62.0f / 2835) - 17.0f / 315;
    series = series * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    series = x + x * square * series;
    vec power = exponential(x * 2.0f);
    vec whole = 1.0f - 2.0f / (power + 1.0f);
    ivec near_zero = square < small;
    return (vec)(((ivec)series & near_zero) | ((ivec)whole & ~near_zero));
}

/* Scores of one vector of queries become weights; most, total and rescale follow. first: position of the first token. */
INLINE void weigh(const int masked, Tile *tile, int64_t lane, int64_t first, int64_t tokens, int64_t window,
                  float softcap) {
    ivec position, earliest;
    memcpy(&position, tile->positions + lane, sizeof position);
    earliest = position - (int32_t)(window ? window - 1 : INT32_MAX); /* wraps for nobody: positions are not negative */
    float *scores = tile->scores + lane;
    vec most = load(tile->most + lane), peak = most, sum = {0};
    for (int64_t t = 0; t < tokens; t++) {
        vec value = load(scores + t * TILE);
        if (softcap > 0) value = hyperbolic_tangent(value / softcap) * softcap;
        if (masked) {
            const int32_t key = (int32_t)(first + t);
            ivec seen = (key <= position) & (key >= earliest);
            value = (vec)(((ivec)value & seen) | ((ivec)splat(HIDDEN) & ~seen));
        }
        if (masked || softcap > 0) store(scores + t * TILE, value);
        peak = larger(peak, value);
    }
    for (int64_t t = 0; t < tokens; t++) {
        vec weight = exponential(load(scores + t * TILE) - peak);
        if (masked) {
            const int32_t key = (int32_t)(first + t);
            weight = (vec)((ivec)weight & (key <= position) & (key >= earliest));
        }
        store(scores + t * TILE, weight);
        sum += weight;
    }
    vec rescale = exponential(most - peak);
    store(tile->rescale + lane, rescale);
    store(tile->total + lane, load(tile->total + lane) * rescale + sum);
    store(tile->most + lane, peak);
}

/* Functions of their own: inlined into one another, they would keep sums in memory. */
#define SPECIAL(width)                                                                                               \
    static __attribute__((noinline)) void score##width(const Tile *tile, int64_t t, int64_t dim) {                   \
        score(width, ROWS, tile, t, dim);                                                                            \
    }                                                                                                                \
    static __attribute__((noinline)) void mix##width(const Tile *tile, int64_t i, int64_t tokens) {                  \
        mix(width, ROWS, tile, i, tokens);                                                                           \
    }
SPECIAL(1) SPECIAL(2) SPECIAL(3)

/* One segment for all lanes of a tile that has `width` vectors of them. */
INLINE void attend_segment(const int width, Tile *tile, int64_t first, int64_t tokens) {
    const PagedLayer *layer = tile->layer;
    const int64_t last = first + tokens - 1, youngest = tile->positions[tile->lanes - 1];
    const int masked = last > tile->positions[0] || (layer->window && first <= youngest - layer->window);
    for (int64_t t = 0; t < tokens; t += ROWS) (width == 1 ? score1 : width == 2 ? score2 : score3)(tile, t, layer->k_dim);
    for (int64_t lane = 0; lane < width * LANES; lane += LANES)
        if (masked)
            weigh(1, tile, lane, first, tokens, layer->window, layer->softcap);
        else
            weigh(0, tile, lane, first, tokens, layer->window, layer->softcap);
    int64_t i = 0;
    for (; i + ROWS <= layer->v_dim; i += ROWS) (width == 1 ? mix1 : width == 2 ? mix2 : mix3)(tile, i, tokens);
    for (; i < layer->v_dim; i++) mix(width, 1, tile, i, tokens);
}

static const float *unpack(const int8_t *from, float scale, int64_t dim, float *to) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(to + i, load_bytes(from + i) * scale);
    for (; i < dim; i++) to[i] = (float)from[i] * scale;
    return to;
}

/* Where the tokens of a segment lie. Up to the next multiple of ROWS the last one is repeated. */
static void find_tokens(const int64_t *table, int64_t first, int64_t tokens, Tile *tile) {
    const PagedLayer *layer = tile->layer;
    const int64_t k_dim = layer->k_dim, v_dim = layer->v_dim;
    int64_t block = first / layer->block_size, offset = first % layer->block_size;
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t row = (table[block] * layer->block_size + offset) * layer->kv_heads + tile->kv_head;
        if (layer->k_scales) {
            float *room = tile->room + t * (k_dim + v_dim);
            tile->keys[t] = unpack((const int8_t *)layer->k_cache + row * k_dim, layer->k_scales[row], k_dim, room);
            room += k_dim;
            tile->values[t] = unpack((const int8_t *)layer->v_cache + row * v_dim, layer->v_scales[row], v_dim, room);
        } else {
            tile->keys[t] = (const float *)layer->k_cache + row * k_dim;
            tile->values[t] = (const float *)layer->v_cache + row * v_dim;
        }
        if (++offset == layer->block_size) block++, offset = 0;
    }
    for (int64_t t = tokens; t % ROWS; t++) tile->keys[t] = tile->keys[tokens - 1];
}

/* Lanes too many repeat the last one. */
static void open_tile(const Call *call, Tile *tile) {
    const PagedLayer *layer = tile->layer;
    const Sequences *sequences = call->sequences;
    const int64_t shared = layer->heads / layer->kv_heads, dim = layer->k_dim, first_row = sequences->starts[tile->sequence];
    const int64_t before = sequences->context_lens[tile->sequence] - sequences->query_lens[tile->sequence];
    for (int64_t lane = 0; lane < TILE; lane += 4) {
        const float *queries[4];
        for (int r = 0; r < 4; r++) {
            const int64_t query = tile->from + (lane + r < tile->lanes ? lane + r : tile->lanes - 1);
            const int64_t row = query / shared, head = tile->kv_head * shared + query % shared;
            queries[r] = call->q + (first_row + row) * call->q_stride + head * dim;
            tile->positions[lane + r] = (int32_t)(before + row);
            tile->most[lane + r] = layer->sinks ? layer->sinks[head] : HIDDEN;
            tile->total[lane + r] = layer->sinks ? 1.0f : 0.0f;
        }
        float *to = tile->queries + lane;
        int64_t i = 0;
        for (; i + 4 <= dim; i += 4) {
            vec4 part[4];
            for (int r = 0; r < 4; r++) part[r] = load4(queries[r] + i) * layer->scale;
            transpose4(part);
            for (int r = 0; r < 4; r++) store4(to + (i + r) * TILE, part[r]);
        }
        for (; i < dim; i++)
            for (int r = 0; r < 4; r++) to[i * TILE + r] = queries[r][i] * layer->scale;
    }
    memset(tile->mixed, 0, (size_t)(layer->v_dim * TILE) * sizeof(float));
    tile->last_key = tile->positions[tile->lanes - 1];
    tile->first_key = layer->window && tile->positions[0] >= layer->window ? tile->positions[0] - layer->window + 1 : 0;
}

static void close_tile(const Call *call, const Tile *tile) {
    const PagedLayer *layer = tile->layer;
    const int64_t shared = layer->heads / layer->kv_heads, dim = layer->v_dim;
    for (int64_t lane = 0; lane < tile->lanes; lane += 4) {
        const int64_t count = tile->lanes - lane < 4 ? tile->lanes - lane : 4;
        const vec4 total = load4(tile->total + lane);
        const float *mixed = tile->mixed + lane;
        float *out[4];
        for (int64_t r = 0; r < count; r++) {
            const int64_t query = tile->from + lane + r, head = tile->kv_head * shared + query % shared;
            out[r] = call->out + ((call->sequences->starts[tile->sequence] + query / shared) * layer->heads + head) * dim;
        }
        int64_t i = 0;
        for (; count == 4 && i + 4 <= dim; i += 4) {
            vec4 part[4];
            for (int r = 0; r < 4; r++) part[r] = load4(mixed + (i + r) * TILE) / total;
            transpose4(part);
            for (int r = 0; r < 4; r++) store4(out[r] + i, part[r]);
        }
        for (; i < dim; i++)
            for (int64_t r = 0; r < count; r++) out[r][i] = mixed[i * TILE + r] / total[r];
    }
}

static void attend_tile(const Call *call, int64_t sequence, int64_t kv_head, int64_t from, int64_t lanes) {
    const PagedLayer *layer = call->layer;
    const int64_t dims = layer->k_dim + layer->v_dim;
    float scratch[(dims + SEGMENT) * TILE] __attribute__((aligned(64)));
    float room[layer->k_scales ? SEGMENT * dims : 1] __attribute__((aligned(64)));
    Tile tile = {.layer = layer, .sequence = sequence, .kv_head = kv_head, .from = from, .lanes = lanes};
    tile.queries = scratch, tile.room = room;
    tile.scores = tile.queries + layer->k_dim * TILE;
    tile.mixed = tile.scores + SEGMENT * TILE;
    open_tile(call, &tile);
    for (int64_t first = tile.first_key, next; first <= tile.last_key; first = next) {
        pd_give_way(); /* over a long context this takes milliseconds */
        next = (first / SEGMENT + 1) * SEGMENT;
        next = next <= tile.last_key ? next : tile.last_key + 1;
        find_tokens(call->sequences->tables + sequence * call->sequences->table_stride, first, next - first, &tile);
        switch ((lanes + LANES - 1) / LANES) {
        case 1: attend_segment(1, &tile, first, next - first); break;
        case 2: attend_segment(2, &tile, first, next - first); break;
        default: attend_segment(3, &tile, first, next - first); break;
        }
    }
    close_tile(call, &tile);
}

/* Tiles in the order of sequences, then KV heads, then tokens: threads that take turns share K and V. */
static void attend_item(void *context, int64_t item) {
    const Call *call = context;
    const int64_t kv_heads = call->layer->kv_heads, shared = call->layer->heads / kv_heads;
    for (int64_t sequence = 0;; sequence++) {
        const int64_t queries = call->sequences->query_lens[sequence] * shared, tiles = (queries + TILE - 1) / TILE;
        if (item < tiles * kv_heads) {
            const int64_t from = item % tiles * TILE;
            attend_tile(call, sequence, item / tiles, from, queries - from < TILE ? queries - from : TILE);
            return;
        }
        item -= tiles * kv_heads;
    }
}

/* k_dim + v_dim must not exceed 1024: a tile lies on the stack. */
void attend_chunks(const PagedLayer *layer, const Sequences *sequences, const float *q, int64_t q_stride, float *out) {
    Call call = {layer, sequences, q, q_stride, out};
    int64_t items = 0;
    for (int64_t s = 0; s < sequences->count; s++)
        items += (sequences->query_lens[s] * (layer->heads / layer->kv_heads) + TILE - 1) / TILE * layer->kv_heads;
    pd_parallel(attend_item, &call, items);
}
