/* Paged KV: written, attended to, and both as parts of a decoder layer in two calls. */
#include "paged.h"
#include "layer.h"
#include "vector.h"

EXPORT void pd_attend(const PagedLayer *layer, const Step *step, const float *q, int64_t q_stride, float *out) {
    if (step->singles.count) attend_singles(layer, &step->singles, q, q_stride, out);
    if (step->chunks.count) attend_chunks(layer, &step->chunks, q, q_stride, out);
}

/* How many slots from the first on follow each other, as those within a block do: one copy does for all of them. */
static int64_t run_length(const int64_t *slots, int64_t rows) {
    int64_t length = 1;
    while (length < rows && slots[length] == slots[0] + length) length++;
    return length;
}

static void scatter(float *cache, const int64_t *slots, int64_t rows, int64_t width, const float *from, int64_t stride) {
    for (int64_t r = 0, run; r < rows; r += run) {
        run = stride == width ? run_length(slots + r, rows - r) : 1;
        memcpy(cache + slots[r] * width, from + r * stride, (size_t)(run * width) * sizeof(float));
    }
}

/* to = round(x * 127 / absmax), and its scale. What is not finite makes the scale NaN, so that it is not lost. */
static void quantise(const float *x, int64_t dim, int8_t *to, float *scale) {
    float most = 0, spoilt = 0;
    for (int64_t i = 0; i < dim; i++) {
        const float size = x[i] < 0 ? -x[i] : x[i];
        most = size > most ? size : most;
        spoilt += x[i] * 0.0f;
    }
    const float inverse = most > 0 ? 127.0f / most : 0;
    for (int64_t i = 0; i < dim; i++) to[i] = spoilt == 0 ? (int8_t)__builtin_rintf(x[i] * inverse) : 0;
    *scale = spoilt == 0 ? most / 127.0f : __builtin_nanf("");
}

static void write_rows(const PagedLayer *layer, void *cache, float *scales, int64_t dim, const int64_t *slots,
                       int64_t rows, const float *from, int64_t stride) {
    const int64_t heads = layer->kv_heads;
    if (!scales) {
        scatter(cache, slots, rows, heads * dim, from, stride);
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = slots[r] * heads + h;
            quantise(from + r * stride + h * dim, dim, (int8_t *)cache + at * dim, scales + at);
        }
}

EXPORT void pd_write_kv(const PagedLayer *layer, const int64_t *slots, int64_t rows, const float *k, int64_t k_stride,
                        const float *v, int64_t v_stride) {
    write_rows(layer, layer->k_cache, layer->k_scales, layer->k_dim, slots, rows, k, k_stride);
    write_rows(layer, layer->v_cache, layer->v_scales, layer->v_dim, slots, rows, v, v_stride);
}

/* What a layer does up to having its K and V in the cache. qkv [rows, heads + 2 * kv_heads, head_dim] is kept for
 * pd_end_layer; scratch [rows, hidden]; bytes: see layer.c. */
EXPORT void pd_begin_layer(const Layer *weights, const PagedLayer *layer, const int64_t *slots, const float *hidden,
                           const float *cos, const float *sin, int64_t rotary, float *qkv, float *scratch,
                           void *bytes, int64_t rows) {
    const int64_t q_width = layer->heads * layer->k_dim, kv_width = layer->kv_heads * layer->k_dim;
    const int64_t stride = q_width + 2 * kv_width;
    pd_attention_inputs(weights, hidden, cos, sin, rotary, qkv, scratch, bytes, rows);
    pd_write_kv(layer, slots, rows, qkv + q_width, stride, qkv + q_width + kv_width, stride);
}

/* The rest of it: hidden becomes the layer's output. attended [rows, heads * head_dim], normed [rows, hidden] and
 * inner [2, rows, width of the MLP] are scratch. */
EXPORT void pd_end_layer(const Layer *weights, const PagedLayer *layer, const Step *step, const float *qkv,
                         float *attended, float *normed, float *inner, void *bytes, float *hidden,
                         int64_t rows) {
    pd_attend(layer, step, qkv, (layer->heads + 2 * layer->kv_heads) * layer->k_dim, attended);
    pd_attention_outputs(weights, attended, hidden, hidden, normed, bytes, rows);
    pd_gated_mlp(weights, normed, hidden, inner, bytes, rows);
}

/* pd_begin_layer and pd_end_layer of `count` layers of one size, one after the other. */
EXPORT void pd_run_layers(const Layer *const *weights, const PagedLayer *const *layers, int64_t count, const Step *step,
                          const int64_t *slots, const float *cos, const float *sin, int64_t rotary, float *qkv,
                          float *attended, float *normed, float *inner, void *bytes, float *hidden, int64_t rows) {
    for (int64_t i = 0; i < count; i++) {
        pd_begin_layer(weights[i], layers[i], slots, hidden, cos, sin, rotary, qkv, attended, bytes, rows);
        pd_end_layer(weights[i], layers[i], step, qkv, attended, normed, inner, bytes, hidden, rows);
    }
}
