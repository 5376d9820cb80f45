#ifndef PDSERVE_QUANTIZED_H
#define PDSERVE_QUANTIZED_H

#include <stdint.h>

#define GROUP 32 /* values along K that share a scale: of x, and of int4 weights */

/* Rows of x in int8, made once for all products that read them. */
typedef struct {
    int64_t k, padded; /* padded: k filled up to whole groups, with zeros */
    int8_t *values;    /* [rows, padded] */
    int16_t *wide;     /* the same numbers, where there is no instruction for bytes */
    float *scales;     /* [rows, groups] */
    float *sums;       /* [rows, groups]: of scale * value */
    int32_t *starts;   /* [rows, groups]: of a group's sum, taking off what 128 added to every int8 weight adds */
} Activations;

/* Where they go in `scratch`, which has rows * 4 * padded bytes and is aligned as floats are. */
Activations activations_in(void *scratch, int64_t rows, int64_t k);
void quantize_row(const Activations *to, const float *x, int64_t row);
/* All rows of x, which lie `stride` floats apart. */
void quantize_rows(const Activations *to, const float *x, int64_t stride, int64_t rows);

#endif
