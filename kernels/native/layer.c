/* A decoder layer but for its attention: root-mean-square norms, rotary positions, gated MLP, residuals.
 *
 * Nothing here mixes rows. Weights stay where the model has them; what a model has not is a null pointer.
 */
#include "linear.h"
#include "vector.h"

#include <math.h>

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, inner; /* inner: width of the MLP */
    int64_t q_norm_size, k_norm_size;                 /* a norm's weight may span a head or all of them */
    float input_eps, post_eps, q_eps, k_eps;
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    const float *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias;
    const float *gate, *up, *down, *gate_bias, *up_bias, *down_bias;
} Layer;

static void norm(const float *x, const float *weight, float eps, int64_t size, float *y) {
    vec squares = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec value = load(x + i);
        squares += value * value;
    }
    if (i < size) {
        vec value = load_part(x + i, size - i);
        squares += value * value;
    }
    float scale = 1.0f / sqrtf(fold_sum(squares) / (float)size + eps);
    for (i = 0; i < size; i++) y[i] = weight[i] * (x[i] * scale);
}

static void norm_parts(float *x, const float *weight, float eps, int64_t size, int64_t width) {
    for (int64_t first = 0; first < width; first += size) norm(x + first, weight, eps, size, x + first);
}

/* x [heads, head_dim]: the first `rotary` dimensions of every head are turned, halves paired. */
static void rotate(float *restrict x, const float *restrict cos, const float *restrict sin, int64_t heads,
                   int64_t head_dim, int64_t rotary) {
    const int64_t half = rotary / 2;
    for (int64_t h = 0; h < heads; h++) {
        float *first = x + h * head_dim, *second = first + half;
        for (int64_t i = 0; i < half; i++) {
            float a = first[i], b = second[i];
            first[i] = a * cos[i] - b * sin[i];
            second[i] = b * cos[half + i] + a * sin[half + i];
        }
    }
}

/* hidden [rows, hidden] -> qkv [rows, (heads + 2 * kv_heads) * head_dim]: q, then k, then v. cos, sin [rows, rotary].
 * scratch [rows, hidden]. */
EXPORT void pd_attention_inputs(const Layer *layer, const float *hidden, const float *cos, const float *sin,
                                int64_t rotary, float *qkv, float *scratch, int64_t rows) {
    const int64_t size = layer->hidden, head_dim = layer->head_dim;
    const int64_t q_width = layer->heads * head_dim, kv_width = layer->kv_heads * head_dim;
    const int64_t stride = q_width + 2 * kv_width;
    float *k = qkv + q_width, *v = k + kv_width;
    for (int64_t r = 0; r < rows; r++)
        norm(hidden + r * size, layer->input_norm, layer->input_eps, size, scratch + r * size);
    pd_linear(scratch, size, layer->q, layer->q_bias, 0, 0, qkv, stride, rows, q_width, size);
    pd_linear(scratch, size, layer->k, layer->k_bias, 0, 0, k, stride, rows, kv_width, size);
    pd_linear(scratch, size, layer->v, layer->v_bias, 0, 0, v, stride, rows, kv_width, size);
    for (int64_t r = 0; r < rows; r++) {
        if (layer->q_norm) norm_parts(qkv + r * stride, layer->q_norm, layer->q_eps, layer->q_norm_size, q_width);
        if (layer->k_norm) norm_parts(k + r * stride, layer->k_norm, layer->k_eps, layer->k_norm_size, kv_width);
        rotate(qkv + r * stride, cos + r * rotary, sin + r * rotary, layer->heads, head_dim, rotary);
        rotate(k + r * stride, cos + r * rotary, sin + r * rotary, layer->kv_heads, head_dim, rotary);
    }
}

/* attended [rows, heads * head_dim] and the layer's input -> sum [rows, hidden], normed [rows, hidden]. */
EXPORT void pd_attention_outputs(const Layer *layer, const float *attended, const float *hidden, float *sum,
                                 float *normed, int64_t rows) {
    const int64_t size = layer->hidden, width = layer->heads * layer->head_dim;
    pd_linear(attended, width, layer->o, layer->o_bias, hidden, size, sum, size, rows, size, width);
    for (int64_t r = 0; r < rows; r++) norm(sum + r * size, layer->post_norm, layer->post_eps, size, normed + r * size);
}

/* sum += down(silu(gate(normed)) * up(normed)). scratch [2, rows, inner]. */
EXPORT void pd_gated_mlp(const Layer *layer, const float *normed, float *sum, float *scratch, int64_t rows) {
    const int64_t size = layer->hidden, inner = layer->inner, count = rows * inner;
    float *gate = scratch, *up = scratch + count;
    pd_linear(normed, size, layer->gate, layer->gate_bias, 0, 0, gate, inner, rows, inner, size);
    pd_linear(normed, size, layer->up, layer->up_bias, 0, 0, up, inner, rows, inner, size);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec value = load(gate + i);
        store(gate + i, value / (1.0f + exponential(-value)) * load(up + i));
    }
    if (i < count) {
        vec value = load_part(gate + i, count - i);
        store_part(gate + i, value / (1.0f + exponential(-value)) * load_part(up + i, count - i), count - i);
    }
    pd_linear(gate, inner, layer->down, layer->down_bias, sum, size, sum, size, rows, size, inner);
}
