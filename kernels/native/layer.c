/* A decoder layer but for its attention: root-mean-square norms, rotary positions, gated MLP, residuals.
 *
 * Nothing here mixes rows. Weights stay where the model has them; what a model has not is a null pointer.
 */
#include "layer.h"
#include "linear.h"
#include "threads.h"
#include "vector.h"

#include <math.h>

#define ITEM_ROWS 16 /* of norms and rotary positions, which are next to nothing */

struct Layer {
    int64_t hidden, heads, kv_heads, head_dim, inner; /* inner: width of the MLP */
    int64_t q_norm_size, k_norm_size;                 /* a norm's weight may span a head or all of them */
    float input_eps, post_eps, q_eps, k_eps;
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    Projection q, k, v, o, gate, up, down;
};

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

/* What the items of one call share; its arguments. */
typedef struct {
    const Layer *layer;
    const float *in, *weight, *cos, *sin;
    float *out;
    float eps;
    int64_t rows, rotary, stride;
    const Activations *quantized; /* of `out`, or null */
} Rows;

static int64_t row_items(int64_t rows) { return (rows + ITEM_ROWS - 1) / ITEM_ROWS; }
static int64_t last_row(const Rows *all, int64_t item) {
    const int64_t end = (item + 1) * ITEM_ROWS;
    return end < all->rows ? end : all->rows;
}

static void norm_item(void *context, int64_t item) {
    const Rows *all = context;
    const int64_t size = all->layer->hidden;
    for (int64_t r = item * ITEM_ROWS; r < last_row(all, item); r++) {
        norm(all->in + r * size, all->weight, all->eps, size, all->out + r * size);
        if (all->quantized) quantize_row(all->quantized, all->out + r * size, r);
    }
}

static void norm_rows(const Layer *layer, const float *in, const float *weight, float eps, float *out, int64_t rows,
                      const Activations *quantized) {
    Rows all = {layer, in, weight, .out = out, .eps = eps, .rows = rows, .quantized = quantized};
    pd_parallel(norm_item, &all, row_items(rows));
}

/* Norms of q and k, and rotary positions, in place. */
static void position_item(void *context, int64_t item) {
    const Rows *all = context;
    const Layer *layer = all->layer;
    const int64_t head_dim = layer->head_dim, q_width = layer->heads * head_dim, kv_width = layer->kv_heads * head_dim;
    for (int64_t r = item * ITEM_ROWS; r < last_row(all, item); r++) {
        float *q = all->out + r * all->stride, *k = q + q_width;
        const float *cos = all->cos + r * all->rotary, *sin = all->sin + r * all->rotary;
        if (layer->q_norm) norm_parts(q, layer->q_norm, layer->q_eps, layer->q_norm_size, q_width);
        if (layer->k_norm) norm_parts(k, layer->k_norm, layer->k_eps, layer->k_norm_size, kv_width);
        rotate(q, cos, sin, layer->heads, head_dim, all->rotary);
        rotate(k, cos, sin, layer->kv_heads, head_dim, all->rotary);
    }
}

/* hidden [rows, hidden] -> qkv [rows, (heads + 2 * kv_heads) * head_dim]: q, then k, then v. cos, sin [rows, rotary].
 * scratch [rows, hidden]; bytes: of `activations_in`, or null where no weight is quantised. */
EXPORT void pd_attention_inputs(const Layer *layer, const float *hidden, const float *cos, const float *sin,
                                int64_t rotary, float *qkv, float *scratch, void *bytes, int64_t rows) {
    const int64_t size = layer->hidden, head_dim = layer->head_dim;
    const int64_t q_width = layer->heads * head_dim, kv_width = layer->kv_heads * head_dim;
    const int64_t stride = q_width + 2 * kv_width;
    float *k = qkv + q_width, *v = k + kv_width;
    const Activations quantized = activations_in(bytes, rows, size);
    norm_rows(layer, hidden, layer->input_norm, layer->input_eps, scratch, rows, bytes ? &quantized : 0);
    const Linear linears[] = {
        {scratch, &layer->q, 0, qkv, size, 0, stride, rows, &quantized},
        {scratch, &layer->k, 0, k, size, 0, stride, rows, &quantized},
        {scratch, &layer->v, 0, v, size, 0, stride, rows, &quantized},
    };
    run_linears(linears, 3);
    Rows all = {layer, .cos = cos, .sin = sin, .out = qkv, .rows = rows, .rotary = rotary, .stride = stride};
    pd_parallel(position_item, &all, row_items(rows));
}

/* attended [rows, heads * head_dim] and the layer's input -> sum [rows, hidden], normed [rows, hidden]. */
EXPORT void pd_attention_outputs(const Layer *layer, const float *attended, const float *hidden, float *sum,
                                 float *normed, void *bytes, int64_t rows) {
    const int64_t size = layer->hidden, width = layer->heads * layer->head_dim;
    const Activations quantized = activations_in(bytes, rows, width);
    if (bytes) quantize_rows(&quantized, attended, width, rows);
    const Linear out = {attended, &layer->o, hidden, sum, width, size, size, rows, &quantized};
    run_linears(&out, 1);
    norm_rows(layer, sum, layer->post_norm, layer->post_eps, normed, rows, 0);
}

typedef struct {
    Linear gate, up;
    Cut cut;
} Gated;

/* One part of gate and of up, then the activation there: gate becomes silu(gate) * up. */
static void gated_item(void *context, int64_t item) {
    const Gated *gated = context;
    const Cut *cut = &gated->cut;
    linear_item(&gated->gate, cut, item);
    linear_item(&gated->up, cut, item);
    const int64_t inner = gated->gate.w->outs, first = item / cut->ranges * cut->rows, col = item % cut->ranges * cut->outs;
    for (int64_t r = first; r < first + cut->rows && r < gated->gate.rows; r++) {
        float *gate = gated->gate.y + r * inner;
        const float *up = gated->up.y + r * inner;
        const int64_t end = col + cut->outs < inner ? col + cut->outs : inner;
        int64_t i = col;
        for (; i + LANES <= end; i += LANES) {
            vec value = load(gate + i);
            store(gate + i, value / (1.0f + exponential(-value)) * load(up + i));
        }
        if (i < end) {
            vec value = load_part(gate + i, end - i);
            store_part(gate + i, value / (1.0f + exponential(-value)) * load_part(up + i, end - i), end - i);
        }
    }
}

/* sum += down(silu(gate(normed)) * up(normed)). scratch [2, rows, inner]. */
EXPORT void pd_gated_mlp(const Layer *layer, const float *normed, float *sum, float *scratch, void *bytes,
                         int64_t rows) {
    const int64_t size = layer->hidden, inner = layer->inner;
    float *gate = scratch, *up = scratch + rows * inner;
    Activations quantized = activations_in(bytes, rows, size);
    if (bytes) quantize_rows(&quantized, normed, size, rows);
    Gated gated = {
        {normed, &layer->gate, 0, gate, size, 0, inner, rows, &quantized},
        {normed, &layer->up, 0, up, size, 0, inner, rows, &quantized},
    };
    gated.cut = cut_linear(&gated.gate, 2);
    pd_parallel(gated_item, &gated, gated.cut.items);
    quantized = activations_in(bytes, rows, inner);
    if (bytes) quantize_rows(&quantized, gate, inner, rows);
    const Linear down = {gate, &layer->down, sum, sum, inner, size, size, rows, &quantized};
    run_linears(&down, 1);
}
