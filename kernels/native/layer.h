#ifndef PDSERVE_LAYER_H
#define PDSERVE_LAYER_H

#include <stdint.h>

/* The weights of a decoder layer. See layer.c for what follows. */
typedef struct Layer Layer;

void pd_attention_inputs(const Layer *layer, const float *hidden, const float *cos, const float *sin, int64_t rotary,
                         float *qkv, float *scratch, void *bytes, int64_t rows);
void pd_attention_outputs(const Layer *layer, const float *attended, const float *hidden, float *sum, float *normed,
                          void *bytes, int64_t rows);
void pd_gated_mlp(const Layer *layer, const float *normed, float *sum, float *scratch, void *bytes,
                  int64_t rows);

#endif
