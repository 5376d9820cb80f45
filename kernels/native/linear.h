#ifndef PDSERVE_LINEAR_H
#define PDSERVE_LINEAR_H

#include "quantized.h"

#include <stdint.h>

/* A weight [outs, k] and its bias. `bits` says what the weight is: 32 contiguous floats; 8 and 4 see quantized.c. */
typedef struct {
    int64_t bits, outs, k;
    const void *data;
    const float *scales; /* 8 bits: [outs, filled up to whole strips] */
    const float *bias;   /* [outs] or null */
} Projection;

/* y [rows, outs] = x [rows, k] @ w.T (+ bias) (+ residual). Residual [rows, outs] may be null, or y itself. Strides, in
 * floats, are those of rows. `activations` are x for a quantised weight, and not looked at for another. */
typedef struct {
    const float *x;
    const Projection *w;
    const float *residual;
    float *y;
    int64_t x_stride, residual_stride, y_stride, rows;
    const Activations *activations;
} Linear;

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

/* Rows [first .. end) of columns [col .. last) of a product with a quantised weight; col is a multiple of 16. */
void quantized_part(const Linear *linear, int64_t first, int64_t end, int64_t col, int64_t last);

#endif
