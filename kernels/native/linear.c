/* Matrix products cut into items, which threads share. */
#include "linear.h"
#include "strips.h"
#include "threads.h"
#include "vector.h"

#define BLOCK_BYTES (512 << 10)   /* of x that are walked again and again: they should stay in L2 */
#define LEAST_BLOCK_ROWS 48
#define ITEM_BYTES (64 << 10)     /* of weights in an item, */
#define ITEM_STEPS (512 << 10)      /* and multiplications, whichever is less; */
#define ITEM_BYTE_STEPS (8 << 20) /* of integers; */
#define ITEM_COLS 64              /* but no fewer columns: what the widest tile takes */
#define MOST_LINEARS 4

static int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static int of_integers(const Projection *w) { return w->kind == INT8 || w->kind == INT4; }

/* Of a weight with k values, in bits, scales not counted. */
static int64_t column_bits(const Projection *w) {
    switch (w->kind) {
    case INT4: case NIBBLES: return 4 * w->k;
    case INT8: case BYTES: return 8 * w->k;
    case HALVES: case BFLOATS: return 16 * w->k;
    default: return 32 * w->k;
    }
}

Cut cut_linear(const Linear *linear, int64_t products) {
    const int integers = of_integers(linear->w);
    const int64_t k = larger_of(linear->w->k, 1), rows = larger_of(linear->rows, 1), outs = linear->w->outs;
    int64_t most = larger_of(BLOCK_BYTES / (integers ? k : 4 * k), LEAST_BLOCK_ROWS);
    if (!integers) most = smaller_of(most, MOST_BLOCK_ROWS);
    const int64_t blocks = (rows + most - 1) / most, block = (rows + blocks - 1) / blocks; /* nearly equal ones */
    const int64_t by_bytes = ITEM_BYTES * 8 / larger_of(column_bits(linear->w), 1);
    const int64_t by_steps = (integers ? ITEM_BYTE_STEPS : ITEM_STEPS) / (block * k);
    const int64_t width = larger_of(smaller_of(by_bytes, by_steps) / products / ITEM_COLS, 1) * ITEM_COLS;
    const int64_t ranges = (outs + width - 1) / width;
    return (Cut){block, width, ranges, linear->rows ? blocks * ranges : 0};
}

void linear_item(const Linear *linear, const Cut *cut, int64_t item) {
    const int64_t row = item / cut->ranges * cut->rows, col = item % cut->ranges * cut->outs;
    const int64_t end = smaller_of(row + cut->rows, linear->rows), last = smaller_of(col + cut->outs, linear->w->outs);
    if (of_integers(linear->w)) quantized_part(linear, row, end, col, last);
    else strips_part(linear, row, end, col, last);
}

typedef struct {
    const Linear *linears;
    Cut cuts[MOST_LINEARS];
} Several;

static void several_item(void *context, int64_t item) {
    const Several *several = context;
    int64_t i = 0;
    for (; item >= several->cuts[i].items; i++) item -= several->cuts[i].items;
    linear_item(several->linears + i, several->cuts + i, item);
}

void run_linears(const Linear *linears, int64_t count) {
    Several several = {linears};
    int64_t items = 0;
    for (int64_t i = 0; i < count; i++) {
        several.cuts[i] = cut_linear(linears + i, 1);
        items += several.cuts[i].items;
    }
    pd_parallel(several_item, &several, items);
}

/* x [rows, k] -> y [rows, outs] contiguous, with a weight that is not multiplied as integers. */
EXPORT void pd_linear(const Projection *w, const float *x, int64_t x_stride, float *y, int64_t rows) {
    const Linear linear = {x, w, 0, y, x_stride, 0, w->outs, rows};
    run_linears(&linear, 1);
}
