#ifndef PDSERVE_LINEAR_H
#define PDSERVE_LINEAR_H

#include <stdint.h>

/* y [rows, outs] = x [rows, k] @ w.T (+ bias) (+ residual). w [outs, k] is contiguous; bias [outs] and residual
 * [rows, outs] may be null, and residual may be y itself. Strides, in floats, are those of rows. */
typedef struct {
    const float *x, *w, *bias, *residual;
    float *y;
    int64_t x_stride, residual_stride, y_stride, rows, outs, k;
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

#endif
