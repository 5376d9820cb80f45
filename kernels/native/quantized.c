/* y = x @ w.T (+ bias) (+ residual) with int8 or int4 weights.
 *
 * Rows of x become int8, with a scale for every GROUP values of a row. The products of a group are summed as integers,
 * exactly, and the groups' sums scaled and added in the order of K. So neither the tile or the thread, nor the rows
 * beside it, can change a row's bits.
 *
 * Weights lie in strips of LANES columns, in the order in which they are read: four values along K of the first column,
 * of the second, and so on. They are unsigned:
 *   int8  weight + 128; 128 times the sum of x is taken off again. One scale for a column.
 *   int4  in groups, too: LANES half-precision scales, LANES minima, then the values; a byte holds one of four values
 *         along K in its low bits and one of the next four in its high ones. weight = min + scale * value.
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
#define STRIPS 2           /* side by side in a tile */
#define ITEM_ROWS 16       /* that are quantised as one item */

#if LANES == 16
#define MOST_ROWS 6
#else
#define MOST_ROWS 3
#endif

/* --- activations ------------------------------------------------------------------------------------------------- */

Activations activations_in(void *scratch, int64_t rows, int64_t k) {
    const int64_t padded = (k + GROUP - 1) / GROUP * GROUP, groups = padded / GROUP;
    Activations to = {.k = k, .padded = padded};
    if (!scratch) return to;
    to.values = scratch;
    to.wide = (int16_t *)(to.values + rows * padded);
    to.scales = (float *)(to.wide + rows * padded);
    to.sums = to.scales + rows * groups;
    to.zeros = (int32_t *)(to.sums + rows * groups);
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
    to->zeros[at] = ZERO * sum;
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
    const int64_t col = strip * LANES, left = job->w->outs - col;
    if (bits == 8) sums *= load(job->w->scales + col);
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

/* Rows [row .. row + rows) of one or two strips. Sums are variables, one by one: compilers leave an array in memory. */
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
INLINE void tile(const int bits, const int rows, const int strips, const Linear *job, int64_t row, int64_t strip) {
    const Activations *x = job->activations;
    const int64_t padded = x->padded, groups = padded / GROUP;
    const int64_t group_bytes = bits == 8 ? GROUP * LANES : GROUP_BYTES, size = groups * group_bytes;
    const uint8_t *w = (const uint8_t *)job->w->data + strip * size;
#define DECLARE(r) vec float##r##a = {0}, float##r##b = {0};
    EACH_ROW(DECLARE)
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *a = w + group * group_bytes, *b = a + size;
        const int8_t *bytes = x->values + row * padded + group * GROUP;
        const int16_t *wide = x->wide + row * padded + group * GROUP;
        const float *scales = x->scales + row * groups + group, *sums = x->sums + row * groups + group;
        const int32_t *zeros = x->zeros + row * groups + group;
#define DECLARE_SUMS(r)                                                                                              \
    Sum sum##r##a = {0}, sum##r##b = {0};                                                                            \
    GroupSum group##r##a = {0}, group##r##b = {0};
        EACH_ROW(DECLARE_SUMS)
#define ADD_BYTES(r)                                                                                                 \
    if (rows > r) {                                                                                                  \
        Values value = values_at(bytes + r * padded + step * STEP, wide + r * padded + step * STEP);                 \
        sum##r##a = dot(sum##r##a, from_a, value);                                                                   \
        if (strips > 1) sum##r##b = dot(sum##r##b, from_b, value);                                                   \
    }
        for (int step = 0; bits == 8 && step < STEPS; step++) {
            Weights from_a = weights_at(a + step * VECTOR_BYTES), from_b = from_a;
            __builtin_prefetch(a + strips * size + step * VECTOR_BYTES, 0, 2);
            if (strips > 1) from_b = weights_at(b + step * VECTOR_BYTES);
            if (strips > 1) __builtin_prefetch(b + strips * size + step * VECTOR_BYTES, 0, 2);
            EACH_ROW(ADD_BYTES)
        }
#define ADD_PAIR(r)                                                                                                  \
    if (rows > r) {                                                                                                  \
        const int8_t *from = bytes + r * padded + pair * 2 * STEP;                                                   \
        ivec first = four_bytes(from), second = four_bytes(from + STEP);                                             \
        group##r##a = group_dot(group_dot(group##r##a, low_a, first), high_a, second);                               \
        if (strips > 1) group##r##b = group_dot(group_dot(group##r##b, low_b, first), high_b, second);               \
    }
        for (int pair = 0; bits == 4 && pair < PAIRS; pair++) {
            const int64_t at = 4 * LANES + pair * VECTOR_BYTES;
            ivec both_a = bytes_at(a + at), both_b = strips > 1 ? bytes_at(b + at) : both_a;
            ivec low_a = both_a & 0x0f0f0f0f, high_a = both_a >> 4 & 0x0f0f0f0f;
            ivec low_b = both_b & 0x0f0f0f0f, high_b = both_b >> 4 & 0x0f0f0f0f;
            EACH_ROW(ADD_PAIR)
        }
        vec scale_a = {0}, scale_b = {0}, min_a = {0}, min_b = {0};
        if (bits == 4) {
            scale_a = load_halves(a), min_a = load_halves(a + 2 * LANES);
            if (strips > 1) scale_b = load_halves(b), min_b = load_halves(b + 2 * LANES);
        }
#define SCALE_STRIP(r, s)                                                                                            \
    if (bits == 8) {                                                                                                 \
        float##r##s += scales[r * groups] * floats(total(sum##r##s) - zeros[r * groups]);                            \
    } else {                                                                                                         \
        float##r##s += scale_##s * scales[r * groups] * floats(group_total(group##r##s));                            \
        float##r##s += min_##s * sums[r * groups];                                                                   \
    }
#define SCALE(r)                                                                                                     \
    if (rows > r) {                                                                                                  \
        SCALE_STRIP(r, a)                                                                                            \
        if (strips > 1) {                                                                                            \
            SCALE_STRIP(r, b)                                                                                        \
        }                                                                                                            \
    }
        EACH_ROW(SCALE)
    }
#define FINISH(r)                                                                                                    \
    if (rows > r) {                                                                                                  \
        finish(bits, job, row + r, strip, float##r##a);                                                              \
        if (strips > 1) finish(bits, job, row + r, strip + 1, float##r##b);                                          \
    }
    EACH_ROW(FINISH)
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
INLINE void walk(const int bits, const Linear *job, int64_t first, int64_t end, int64_t strip, int64_t last) {
    const int64_t tiles = (end - first + MOST_ROWS - 1) / MOST_ROWS;
    while (strip < last) {
        const int together = last - strip >= STRIPS ? STRIPS : 1;
        int64_t row = first;
        for (int64_t left = tiles; left > 0; left--) { /* tiles of nearly equal height */
            const int64_t here = (end - row + left - 1) / left;
            if (together == 1) tile_of(bits, 1, here, job, row, strip);
            else tile_of(bits, STRIPS, here, job, row, strip);
            row += here;
        }
        strip += together;
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
