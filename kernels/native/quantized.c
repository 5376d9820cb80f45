/* y = x @ w.T (+ bias) (+ residual) with int8 or int4 weights.
 *
 * Rows of x become int8, with a scale for every GROUP values of a row. The products of a group are summed as integers,
 * exactly, and the groups' sums scaled and added in the order of K. So neither the tile or the thread, nor the rows
 * beside it, can change a row's bits.
 *
 * Weights lie in the order in which they are read, as one stream of memory is half as fast again as several: panels of
 * PANEL strips of LANES columns; in a panel, group after group along K; in a group, strip after strip; there, four values
 * along K of the first column, of the second, and so on. They are unsigned:
 *   int8  weight + 128; 128 times the sum of x is taken off again. One scale for a column.
 *   int4  LANES half-precision scales, LANES minima, then the values; a byte holds one of four values along K in its low
 *         bits and one of the next four in its high ones. weight = min + scale * value.
 */
#include "linear.h"
#include "integer.h"
#include "threads.h"

#include <math.h>

#define STEPS (GROUP / STEP) /* of a group: vectors of int8, */
#define PAIRS (STEPS / 2)    /* or half as many of int4 */
#define GROUP_BYTES (4 * LANES + PAIRS * VECTOR_BYTES)
#define ZERO 128
#define MOST_FLOAT 3.402823466e38f
#define LEAST_RANGE 1e-36f /* a group that stays below it counts as zeros: 127 / range would overflow */
#define LINE_BYTES 64
#define AHEAD_BYTES 4096   /* the only tile of a panel fetches so far ahead; each of several, the next panel's part */
#define ITEM_ROWS 16       /* that are quantised as one item */

#if LANES == 16
#define MOST_ROWS 6
#else
#define MOST_ROWS 3
#endif
#ifdef WIDE /* twice as many registers for sums */
#define WHOLE_ROWS 1
#define UNROLLED 2
#else
#define WHOLE_ROWS MOST_ROWS /* that are still one tile with all strips of a panel */
#define UNROLLED 8
#endif
#define PRAGMA(text) _Pragma(#text)
#define UNROLL(times) PRAGMA(GCC unroll times)

/* --- activations ------------------------------------------------------------------------------------------------- */

Activations activations_in(void *scratch, int64_t rows, int64_t k) {
    const int64_t padded = (k + GROUP - 1) / GROUP * GROUP, groups = padded / GROUP;
    Activations to = {.k = k, .padded = padded};
    if (!scratch) return to;
    to.values = scratch;
    to.wide = (int16_t *)(to.values + rows * padded);
    to.scales = (float *)(to.wide + rows * padded);
    to.sums = to.scales + rows * groups;
    to.starts = (int32_t *)(to.sums + rows * groups);
    return to;
}

INLINE vec part_of(const float *x, int64_t left) {
    return left >= LANES ? load(x) : left > 0 ? load_part(x, left) : (vec){0};
}

/* A group's scale, values and sum. One that holds NaN or infinity has NaN for its scale, and makes its row NaN. */
INLINE void quantize_group(const Activations *to, const float *x, int64_t left, int64_t at) {
    int8_t *values = to->values + at * GROUP;
    vec part[GROUP / LANES];
    ivec most = {0}, total = {0};
    for (int i = 0; i < GROUP / LANES; i++) {
        part[i] = part_of(x + i * LANES, left - i * LANES);
        ivec bits = (ivec)part[i] & 0x7fffffff; /* as integers, magnitudes compare alike, and NaN is above all */
        ivec mask = bits > most;
        most = (bits & mask) | (most & ~mask);
    }
    const int32_t bits = largest_lane(most);
    float range;
    memcpy(&range, &bits, 4);
    const int usable = range >= LEAST_RANGE && range <= MOST_FLOAT;
    const vec factor = splat(usable ? 127.0f / range : 0.0f);
    for (int i = 0; i < GROUP / LANES; i++) {
        ivec rounded = usable ? rounded_product(part[i], factor) : (ivec){0};
        total += rounded;
        store_bytes(values + i * LANES, rounded);
#ifdef WIDE
        for (int lane = 0; lane < LANES; lane++) to->wide[at * GROUP + i * LANES + lane] = (int16_t)rounded[lane];
#endif
    }
    const int32_t sum = sum_lanes(total);
    const float scale = usable ? range / 127.0f : range < LEAST_RANGE ? 0.0f : NAN;
    to->scales[at] = scale;
    to->starts[at] = -ZERO * sum;
    to->sums[at] = scale * (float)sum;
}

void quantize_row(const Activations *to, const float *x, int64_t row) {
    const int64_t groups = to->padded / GROUP;
    for (int64_t group = 0; group < groups; group++)
        quantize_group(to, x + group * GROUP, to->k - group * GROUP, row * groups + group);
}

typedef struct {
    const Activations *to;
    const float *x;
    int64_t stride, rows;
} Rows;

static void row_item(void *context, int64_t item) {
    const Rows *all = context;
    for (int64_t row = item * ITEM_ROWS; row < (item + 1) * ITEM_ROWS && row < all->rows; row++)
        quantize_row(all->to, all->x + row * all->stride, row);
}

void quantize_rows(const Activations *to, const float *x, int64_t stride, int64_t rows) {
    Rows all = {to, x, stride, rows};
    pd_parallel(row_item, &all, (rows + ITEM_ROWS - 1) / ITEM_ROWS);
}

/* --- tiles ------------------------------------------------------------------------------------------------------- */

INLINE void finish(const int bits, const Linear *job, int64_t row, int64_t strip, vec sums) {
    const int64_t col = strip * LANES;
    if (col >= job->w->outs) return; /* fills a panel up */
    finish_strip(job, row, strip, bits == 8 ? sums * load(job->w->scales + col) : sums);
}

/* The first row and strip of a tile, and which it is of the tiles of these strips, which take turns at fetching. */
typedef struct {
    int64_t row, strip, turn, turns;
} Place;

/* Where a tile reads. */
typedef struct {
    const uint8_t *weights; /* of the first group; the next is `stride` bytes on */
    int64_t stride;
    int64_t ahead; /* how far in front of what it reads it fetches */
    int64_t groups;
    const int8_t *bytes; /* of the first row; and so on */
    const int16_t *wide;
    const float *scales, *sums;
    const int32_t *starts;
} Source;

INLINE Source source_of(const int64_t size, const Linear *job, Place place) {
    const Activations *x = job->activations;
    const int64_t groups = x->padded / GROUP, at = place.row * groups, panel = groups * PANEL * size;
    const uint8_t *w = (const uint8_t *)job->w->data + place.strip / PANEL * panel + place.strip % PANEL * size;
    const int64_t ahead = job->rows > MOST_ROWS ? panel : AHEAD_BYTES;
    return (Source){w, PANEL * size, ahead, groups, x->values + at * GROUP, x->wide + at * GROUP,
                    x->scales + at, x->sums + at, x->starts + at};
}

/* In a tile, sums are variables, one by one: compilers leave an array in memory. r: row, s: strip. */
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define EACH_STRIP(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#define FETCH(size)                                                                                                  \
    if (until-- == 0) {                                                                                              \
        until = place.turns - 1;                                                                                     \
        for (int line = 0; line < size; line += LINE_BYTES) __builtin_prefetch(w + from.ahead + line, 0, 2);         \
    }
#define DECLARE(r) vec sum##r##_0 = {0}, sum##r##_1 = {0}, sum##r##_2 = {0}, sum##r##_3 = {0};
#define FINISH_STRIP(r, s)                                                                                           \
    if (strips > s) finish(bits, job, place.row + r, place.strip + s, sum##r##_##s);
#define FINISH(r)                                                                                                    \
    if (rows > r) {                                                                                                  \
        EACH_STRIP(FINISH_STRIP, r)                                                                                  \
    }

/* `rows` rows of `strips` strips of one panel. */
INLINE void tile_int8(const int rows, const int strips, const Linear *job, Place place) {
    const int bits = 8;
    const Source from = source_of(GROUP * LANES, job, place);
    int64_t until = place.turn;
    EACH_ROW(DECLARE)
    for (int64_t group = 0; group < from.groups; group++) {
        const uint8_t *w = from.weights + group * from.stride;
        FETCH(strips * GROUP * LANES)
#define START(r)                                                                                                     \
    Sum dots##r##_0 = sum_from(rows > r ? from.starts[group + r * from.groups] : 0), dots##r##_1 = dots##r##_0,      \
        dots##r##_2 = dots##r##_0, dots##r##_3 = dots##r##_0;
        EACH_ROW(START)
#define ADD_STRIP(r, s)                                                                                              \
    if (strips > s) dots##r##_##s = dot(dots##r##_##s, weights##s, value);
#define ADD(r)                                                                                                       \
    if (rows > r) {                                                                                                  \
        const int64_t at = (group + r * from.groups) * GROUP + step * STEP;                                          \
        const Values value = values_at(from.bytes + at, from.wide + at);                                             \
        EACH_STRIP(ADD_STRIP, r)                                                                                     \
    }
        UNROLL(UNROLLED)
        for (int step = 0; step < STEPS; step++, w += VECTOR_BYTES) {
            const Weights weights0 = weights_at(w);
            const Weights weights1 = strips > 1 ? weights_at(w + GROUP * LANES) : weights0;
            const Weights weights2 = strips > 2 ? weights_at(w + 2 * GROUP * LANES) : weights0;
            const Weights weights3 = strips > 3 ? weights_at(w + 3 * GROUP * LANES) : weights0;
            EACH_ROW(ADD)
        }
#define SCALE_STRIP(r, s)                                                                                            \
    if (strips > s) sum##r##_##s += scale * floats(total(dots##r##_##s));
#define SCALE(r)                                                                                                     \
    if (rows > r) {                                                                                                  \
        const vec scale = splat(from.scales[group + r * from.groups]);                                               \
        EACH_STRIP(SCALE_STRIP, r)                                                                                   \
    }
        EACH_ROW(SCALE)
#undef START
#undef ADD
#undef ADD_STRIP
#undef SCALE
#undef SCALE_STRIP
    }
    EACH_ROW(FINISH)
}

INLINE void tile_int4(const int rows, const int strips, const Linear *job, Place place) {
    const int bits = 4;
    const Source from = source_of(GROUP_BYTES, job, place);
    int64_t until = place.turn;
    EACH_ROW(DECLARE)
    for (int64_t group = 0; group < from.groups; group++) {
        const uint8_t *w = from.weights + group * from.stride;
        FETCH(strips * GROUP_BYTES)
#define START(r) GroupSum dots##r##_0 = {0}, dots##r##_1 = {0}, dots##r##_2 = {0}, dots##r##_3 = {0};
        EACH_ROW(START)
#define ADD_STRIP(r, s)                                                                                              \
    if (strips > s) dots##r##_##s = group_dot(group_dot(dots##r##_##s, low##s, first), high##s, second);
#define ADD(r)                                                                                                       \
    if (rows > r) {                                                                                                  \
        const int8_t *values = from.bytes + (group + r * from.groups) * GROUP + pair * 2 * STEP;                     \
        const ivec first = four_bytes(values), second = four_bytes(values + STEP);                                   \
        EACH_STRIP(ADD_STRIP, r)                                                                                     \
    }
#define SPLIT(s)                                                                                                     \
    const ivec both##s = bytes_at(w + (strips > s ? s : 0) * GROUP_BYTES + 4 * LANES + pair * VECTOR_BYTES);         \
    const ivec low##s = both##s & 0x0f0f0f0f, high##s = both##s >> 4 & 0x0f0f0f0f;
        UNROLL(UNROLLED)
        for (int pair = 0; pair < PAIRS; pair++) {
            SPLIT(0) SPLIT(1) SPLIT(2) SPLIT(3)
            EACH_ROW(ADD)
        }
#define HALVES(s)                                                                                                    \
    const uint8_t *halves##s = w + (strips > s ? s : 0) * GROUP_BYTES;                                               \
    const vec scale##s = load_halves(halves##s), min##s = load_halves(halves##s + 2 * LANES);
        HALVES(0) HALVES(1) HALVES(2) HALVES(3)
#define SCALE_STRIP(r, s)                                                                                            \
    if (strips > s) {                                                                                                \
        sum##r##_##s += scale##s * scale * floats(group_total(dots##r##_##s));                                       \
        sum##r##_##s += min##s * sum;                                                                                \
    }
#define SCALE(r)                                                                                                     \
    if (rows > r) {                                                                                                  \
        const int64_t at = group + r * from.groups;                                                                  \
        const vec scale = splat(from.scales[at]), sum = splat(from.sums[at]);                                        \
        EACH_STRIP(SCALE_STRIP, r)                                                                                   \
    }
        EACH_ROW(SCALE)
    }
    EACH_ROW(FINISH)
}

INLINE void tile(const int bits, const int rows, const int strips, const Linear *job, Place place) {
    if (bits == 8) tile_int8(rows, strips, job, place);
    else tile_int4(rows, strips, job, place);
}

/* All strips of a panel: at once where there is one tile, since that waits for memory; else so many that there are
 * registers for all sums. */
INLINE void panel_of(const int bits, int64_t rows, const Linear *job, Place place) {
    const int alone = job->rows <= WHOLE_ROWS;
#define TILES(count, together)                                                                                       \
    case count:                                                                                                      \
        if (alone) tile(bits, count, PANEL, job, place);                                                             \
        else                                                                                                         \
            for (int s = 0; s < PANEL; s += together, place.strip += together)                                       \
                tile(bits, count, together, job, place);                                                             \
        break;
    switch (rows) {
#if MOST_ROWS > 3
        TILES(1, 4) TILES(2, 4) TILES(3, 4) TILES(4, 2) TILES(5, 2) TILES(6, 2)
#else
        TILES(1, 2) TILES(2, 2) TILES(3, 2)
#endif
    }
}

/* Rows [first .. end) of strips [strip .. last), which begin with a panel. */
INLINE void walk(const int bits, const Linear *job, int64_t first, int64_t end, int64_t strip, int64_t last) {
    const int64_t tiles = (end - first + MOST_ROWS - 1) / MOST_ROWS;
    for (; strip < last; strip += PANEL) {
        Place place = {first, strip, 0, tiles};
        for (; place.turn < tiles; place.turn++) { /* tiles of nearly equal height */
            const int64_t left = tiles - place.turn, here = (end - place.row + left - 1) / left;
            panel_of(bits, here, job, place);
            place.row += here;
        }
    }
}

static void part_int8(const Linear *job, int64_t first, int64_t end, int64_t strip, int64_t last) {
    walk(8, job, first, end, strip, last);
}

static void part_int4(const Linear *job, int64_t first, int64_t end, int64_t strip, int64_t last) {
    walk(4, job, first, end, strip, last);
}

void quantized_part(const Linear *linear, int64_t first, int64_t end, int64_t col, int64_t last) {
    const int64_t strip = col / LANES, last_strip = (last + LANES - 1) / LANES;
    if (linear->w->kind == INT8) part_int8(linear, first, end, strip, last_strip);
    else part_int4(linear, first, end, strip, last_strip);
}

/* x [rows, k] -> y [rows, outs] contiguous. scratch: of `activations_in`. */
EXPORT void pd_quantized_linear(const Projection *w, const float *x, int64_t x_stride, float *y, int64_t rows,
                                void *scratch) {
    const Activations activations = activations_in(scratch, rows, w->k);
    quantize_rows(&activations, x, x_stride, rows);
    const Linear linear = {x, w, 0, y, x_stride, 0, w->outs, rows, &activations};
    run_linears(&linear, 1);
}

/* The order of the weights depends on these: columns of a strip, and strips of a panel. */
EXPORT void pd_panel(int64_t *columns, int64_t *strips) { *columns = LANES, *strips = PANEL; }
