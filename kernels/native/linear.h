#ifndef PDSERVE_LINEAR_H
#define PDSERVE_LINEAR_H

#include "quantized.h"
#include "vector.h"

#include <stdint.h>

#define PANEL 4 /* strips of LANES columns whose weights lie together, in all kinds but ROWS */

/* What a weight [outs, k] is kept as. The first two kinds are multiplied as integers, see quantized.c, and the others as
 * the float32 numbers that they stand for, see strips.c. */
enum { INT4 = 4, INT8 = 8, ROWS = 32, FLOATS, HALVES, BFLOATS, BYTES, NIBBLES };

/* A weight [outs, k] and its bias. */
typedef struct {
    int64_t kind, outs, k;
    const void *data;
    const float *scales; /* INT8: [outs, filled up to whole strips] */
    const float *bias;   /* [outs] or null */
} Projection;

/* y [rows, outs] = x [rows, k] @ w.T (+ bias) (+ residual). Residual [rows, outs] may be null, or y itself. Strides, in
 * floats, are those of rows. `activations` are x for a product of integers, and not looked at for another. */
typedef struct {
    const float *x;
    const Projection *w;
    const float *residual;
    float *y;
    int64_t x_stride, residual_stride, y_stride, rows;
    const Activations *activations;
} Linear;

/* y at a row and a strip = sums (+ bias) (+ residual). */
INLINE void finish_strip(const Linear *job, int64_t row, int64_t strip, vec sums) {
    const int64_t col = strip * LANES, left = job->w->outs - col;
    float *y = job->y + row * job->y_stride + col;
    const float *bias = job->w->bias ? job->w->bias + col : 0;
    const float *residual = job->residual ? job->residual + row * job->residual_stride + col : 0;
    if (left >= LANES) {
        if (bias) sums += load(bias);
        if (residual) sums += load(residual);
        store(y, sums);
    } else {
        if (bias) sums += load_part(bias, left);
        if (residual) sums += load_part(residual, left);
        store_part(y, sums, left);
    }
}

/* How a product is cut into items for `pd_parallel`: by `rows` rows of x and `outs` columns of y. Item i is the part
 * at row (i / ranges) * rows and column (i % ranges) * outs. Bits do not depend on it. */
typedef struct {
    int64_t rows, outs, ranges, items;
} Cut;

/* `products`: how many of this size an item is to hold. */
Cut cut_linear(const Linear *linear, int64_t products);
void linear_item(const Linear *linear, const Cut *cut, int64_t item);

/* `count` products, which must not need each other. */
void run_linears(const Linear *linears, int64_t count);

/* Rows [first .. end) of columns [col .. last) of a product of integers; col is a multiple of 16. */
void quantized_part(const Linear *linear, int64_t first, int64_t end, int64_t col, int64_t last);

#endif
