/* y = x @ w.T (+ bias) (+ residual) with int8 or int4 weights.
 *
 * Every row of x becomes int8 with a scale of its own. Products are summed as integers, exactly, so that neither the
 * tile or the thread nor the instructions used, nor the rows beside it, can change a row's bits.
 *
 * Weights lie in strips of LANES columns, in the order in which they are read: four values along K of the first column,
 * of the second, and so on. They are unsigned:
 *   int8  weight + 128; 128 times the row's sum is taken off again. One scale for a column.
 *   int4  in groups of GROUP along K: LANES half-precision scales, LANES minima, then the values; a byte holds one of
 *         four values along K in its low bits and one of the next four in its high ones. weight = min + scale * value.
 */
#include "linear.h"
#include "integer.h"
#include "threads.h"

#include <math.h>

#define PAIRS (GROUP / (2 * STEP)) /* vectors of a group's values, each of two steps */
#define GROUP_BYTES (4 * LANES + PAIRS * VECTOR_BYTES)
#define ZERO 128
#define MOST_FLOAT 3.402823466e38f
#define LEAST_RANGE 1e-36f /* a row that stays below it counts as zeros: 127 / range would overflow */

#if LANES == 16
#define MOST_ROWS 6
#else
#define MOST_ROWS 3
#endif
#ifdef WIDE
#define STRIPS 2 /* side by side in an int8 tile */
#else
#define STRIPS 4
#endif

#define ITEM_ROWS 16 /* that are quantised as one item */

/* --- activations --------------------------------------------------------------------------------------------------- */

Activations activations_in(void *scratch, int64_t rows, int64_t k) {
    Activations to = {.k = k, .padded = (k + GROUP - 1) / GROUP * GROUP};
    if (!scratch) return to;
    to.values = scratch;
    to.wide = (int16_t *)(to.values + rows * to.padded);
    to.group_sums = (float *)(to.wide + rows * to.padded);
    to.sums = (int32_t *)(to.group_sums + rows * (to.padded / GROUP));
    to.scales = (float *)(to.sums + rows);
    return to;
}

INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* The largest magnitude. As integers, floats without a sign compare alike, and NaN is above all. */
static float range_of(const float *x, int64_t k) {
    ivec most = {0};
    for (int64_t i = 0; i < k; i += LANES) {
        ivec bits = (ivec)magnitude(i + LANES <= k ? load(x + i) : load_part(x + i, k - i)), mask = bits > most;
        most = (bits & mask) | (most & ~mask);
    }
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits = most[lane] > bits ? most[lane] : bits;
    float range;
    memcpy(&range, &bits, 4);
    return range;
}

/* A row with NaN or infinity becomes NaN, by its scale. */
void quantize_row(const Activations *to, const float *x, int64_t row) {
    const int64_t k = to->k, padded = to->padded;
    int8_t *values = to->values + row * padded;
    const float range = range_of(x, k);
    const int usable = range >= LEAST_RANGE && range <= MOST_FLOAT;
    const vec factor = splat(usable ? 127.0f / range : 0.0f);
    for (int64_t i = 0; i < padded; i += LANES) {
        ivec rounded = {0};
        if (usable && i < k) rounded = rounded_product(i + LANES <= k ? load(x + i) : load_part(x + i, k - i), factor);
        for (int lane = 0; lane < LANES; lane++) values[i + lane] = (int8_t)rounded[lane];
#ifdef WIDE
        for (int lane = 0; lane < LANES; lane++) to->wide[row * padded + i + lane] = (int16_t)rounded[lane];
#endif
    }
    to->scales[row] = usable ? range / 127.0f : range < LEAST_RANGE ? 0.0f : NAN;
    int32_t sum = 0;
    float *group_sums = to->group_sums + row * (padded / GROUP);
    for (int64_t group = 0; group < padded / GROUP; group++) {
        int32_t part = 0;
        for (int i = 0; i < GROUP; i++) part += values[group * GROUP + i];
        group_sums[group] = (float)part;
        sum += part;
    }
    to->sums[row] = sum;
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

/* --- tiles --------------------------------------------------------------------------------------------------------- */

INLINE void finish(const Linear *job, int64_t row, int64_t col, vec sums) {
    const int64_t left = job->w->outs - col;
    float *y = job->y + row * job->y_stride + col;
    const float *bias = job->w->bias, *residual = job->residual;
    if (residual) residual += row * job->residual_stride + col;
    if (left >= LANES) {
        if (bias) sums += load(bias + col);
        if (residual) sums += load(residual);
        store(y, sums);
    } else {
        if (bias) sums += load_part(bias + col, left);
        if (residual) sums += load_part(residual, left);
        store_part(y, sums, left);
    }
}

static void finish_int8(const Linear *job, int64_t row, int64_t strip, ivec sums) {
    const Activations *input = job->activations;
    vec scale = input->scales[row] * load(job->w->scales + strip * LANES);
    finish(job, row, strip * LANES, __builtin_convertvector(sums - ZERO * input->sums[row], vec) * scale);
}

/* Rows [row .. row + rows) of `strips` strips. Sums are variables, one by one: compilers leave an array in memory. */
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
INLINE void tile_int8(const int rows, const int strips, const Linear *job, int64_t row, int64_t strip) {
    const int64_t padded = job->activations->padded, size = padded * LANES;
    const uint8_t *w = (const uint8_t *)job->w->data + strip * size;
    const int8_t *bytes = job->activations->values + row * padded;
    const int16_t *wide = job->activations->wide + row * padded;
#define DECLARE(r) Sum sum##r##a = {0}, sum##r##b = {0}, sum##r##c = {0}, sum##r##d = {0};
    EACH_ROW(DECLARE)
#define ADD(r)                                                                                                       \
    if (rows > r) {                                                                                                  \
        Values value = values_at(bytes + r * padded + i, wide + r * padded + i);                                     \
        sum##r##a = dot(sum##r##a, a, value);                                                                        \
        if (strips > 1) sum##r##b = dot(sum##r##b, b, value);                                                        \
        if (strips > 2) sum##r##c = dot(sum##r##c, c, value), sum##r##d = dot(sum##r##d, d, value);                  \
    }
    for (int64_t i = 0; i < padded; i += STEP) {
        const uint8_t *from = w + i * LANES;
        Weights a = weights_at(from), b = a, c = a, d = a;
        __builtin_prefetch(from + strips * size, 0, 2);
        if (strips > 1) b = weights_at(from + size), __builtin_prefetch(from + (strips + 1) * size, 0, 2);
        if (strips > 2) {
            c = weights_at(from + 2 * size), __builtin_prefetch(from + (strips + 2) * size, 0, 2);
            d = weights_at(from + 3 * size), __builtin_prefetch(from + (strips + 3) * size, 0, 2);
        }
        EACH_ROW(ADD)
    }
#define FINISH(r)                                                                                                    \
    if (rows > r) {                                                                                                  \
        finish_int8(job, row + r, strip, total(sum##r##a));                                                          \
        if (strips > 1) finish_int8(job, row + r, strip + 1, total(sum##r##b));                                      \
        if (strips > 2) finish_int8(job, row + r, strip + 2, total(sum##r##c));                                      \
        if (strips > 2) finish_int8(job, row + r, strip + 3, total(sum##r##d));                                      \
    }
    EACH_ROW(FINISH)
}

/* Rows of one or two strips; each group's exact sums are scaled and added up in the order of K. */
INLINE void tile_int4(const int rows, const int strips, const Linear *job, int64_t row, int64_t strip) {
    const int64_t padded = job->activations->padded, groups = padded / GROUP, size = groups * GROUP_BYTES;
    const uint8_t *w = (const uint8_t *)job->w->data + strip * size;
    const int8_t *bytes = job->activations->values + row * padded;
    const float *sums = job->activations->group_sums + row * groups;
#define DECLARE_FLOAT(r) vec float##r##a = {0}, float##r##b = {0};
    EACH_ROW(DECLARE_FLOAT)
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *a = w + group * GROUP_BYTES, *b = a + size;
#define DECLARE_GROUP(r) GroupSum group##r##a = {0}, group##r##b = {0};
        EACH_ROW(DECLARE_GROUP)
#define ADD_PAIR(r)                                                                                                  \
    if (rows > r) {                                                                                                  \
        const int8_t *from = bytes + r * padded + group * GROUP + pair * 2 * STEP;                                   \
        ivec first = four_bytes(from), second = four_bytes(from + STEP);                                             \
        group##r##a = group_dot(group_dot(group##r##a, low_a, first), high_a, second);                               \
        if (strips > 1) group##r##b = group_dot(group_dot(group##r##b, low_b, first), high_b, second);               \
    }
        for (int pair = 0; pair < PAIRS; pair++) {
            const int64_t at = 4 * LANES + pair * VECTOR_BYTES;
            ivec both_a = bytes_at(a + at), both_b = strips > 1 ? bytes_at(b + at) : both_a;
            ivec low_a = both_a & 0x0f0f0f0f, high_a = both_a >> 4 & 0x0f0f0f0f;
            ivec low_b = both_b & 0x0f0f0f0f, high_b = both_b >> 4 & 0x0f0f0f0f;
            EACH_ROW(ADD_PAIR)
        }
        vec scale_a = load_halves(a), min_a = load_halves(a + 2 * LANES), scale_b = scale_a, min_b = min_a;
        if (strips > 1) scale_b = load_halves(b), min_b = load_halves(b + 2 * LANES);
#define SCALE(r)                                                                                                     \
    if (rows > r) {                                                                                                  \
        const float sum = sums[r * groups + group];                                                                  \
        float##r##a += scale_a * __builtin_convertvector(group_total(group##r##a), vec);                             \
        float##r##a += min_a * sum;                                                                                  \
        if (strips > 1) float##r##b += scale_b * __builtin_convertvector(group_total(group##r##b), vec);             \
        if (strips > 1) float##r##b += min_b * sum;                                                                  \
    }
        EACH_ROW(SCALE)
    }
#define FINISH_FLOAT(r)                                                                                              \
    if (rows > r) {                                                                                                  \
        finish(job, row + r, strip * LANES, float##r##a * job->activations->scales[row + r]);                              \
        if (strips > 1) finish(job, row + r, (strip + 1) * LANES, float##r##b * job->activations->scales[row + r]);        \
    }
    EACH_ROW(FINISH_FLOAT)
}

INLINE void tile(const int bits, const int rows, const int strips, const Linear *job, int64_t row, int64_t strip) {
    if (bits == 8) tile_int8(rows, strips, job, row, strip);
    else tile_int4(rows, strips, job, row, strip);
}

INLINE void tile_of(const int bits, const int strips, int64_t rows, const Linear *job, int64_t row, int64_t strip) {
    switch (rows) {
    case 1: tile(bits, 1, strips, job, row, strip); break;
    case 2: tile(bits, 2, strips, job, row, strip); break;
    case 3: tile(bits, 3, strips, job, row, strip); break;
#if MOST_ROWS > 3
    case 4: tile(bits, 4, strips, job, row, strip); break;
    case 5: tile(bits, 5, strips, job, row, strip); break;
    case 6: tile(bits, 6, strips, job, row, strip); break;
#endif
    }
}

/* Rows [first .. end) of strips [strip .. last). */
INLINE void walk(const int bits, const int strips, const Linear *job, int64_t first, int64_t end, int64_t strip,
                 int64_t last) {
    const int64_t tiles = (end - first + MOST_ROWS - 1) / MOST_ROWS;
    while (strip < last) {
        const int together = last - strip >= strips ? strips : 1;
        int64_t row = first;
        for (int64_t left = tiles; left > 0; left--) { /* tiles of nearly equal height */
            const int64_t here = (end - row + left - 1) / left;
            if (together == 1) tile_of(bits, 1, here, job, row, strip);
            else tile_of(bits, strips, here, job, row, strip);
            row += here;
        }
        strip += together;
    }
}

static void part_int8(const Linear *job, int64_t first, int64_t end, int64_t strip, int64_t last) {
    walk(8, STRIPS, job, first, end, strip, last);
}

static void part_int4(const Linear *job, int64_t first, int64_t end, int64_t strip, int64_t last) {
    walk(4, 2, job, first, end, strip, last);
}

void quantized_part(const Linear *linear, int64_t first, int64_t end, int64_t col, int64_t last) {
    const int64_t strip = col / LANES, last_strip = (last + LANES - 1) / LANES;
    if (linear->w->bits == 8) part_int8(linear, first, end, strip, last_strip);
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

/* Columns of a strip: the order of the weights depends on it. */
EXPORT void pd_strip_columns(int64_t *columns) { *columns = LANES; }
