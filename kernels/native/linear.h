#ifndef PDSERVE_LINEAR_H
#define PDSERVE_LINEAR_H

#include <stdint.h>

/* See linear.c. */
void pd_linear(const float *x, int64_t x_stride, const float *w, const float *bias, const float *residual,
               int64_t residual_stride, float *y, int64_t y_stride, int64_t rows, int64_t outs, int64_t k);

#endif
