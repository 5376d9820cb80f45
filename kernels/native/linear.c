/* y = x @ w.T (+ bias) (+ residual), float32.
 *
 * Every element is one dot product along K: LANES partial sums in the order of K, folded in a fixed order. The tile an
 * element happens to be in does not change that, so a row's bits never depend on the rows beside it or on their number.
 */
#include "linear.h"
#include "threads.h"
#include "vector.h"

#if LANES == 16
#define MOST_ROWS 6 /* with COLS columns: 24 of 32 registers hold sums */
#else
#define MOST_ROWS 3 /* 12 of 16 */
#endif
#define COLS 4
#define BLOCK_BYTES (384 << 10) /* of x that are walked again and again: they should stay in L2 */
#define ITEM_BYTES (192 << 10)  /* of weights in an item, */
#define ITEM_STEPS (2 << 20)    /* and multiplications, whichever is less, */
#define ITEM_COLS 16            /* but no fewer columns. */
#define ITEM_BYTE_STEPS (8 << 20) /* The same of quantised weights: */
#define ITEM_BYTE_COLS 64         /* four strips of the widest. */
#define MOST_LINEARS 4

INLINE void finish(const Linear *job, int64_t row, int64_t col, vec4 sums) {
    if (job->w->bias) sums += load4(job->w->bias + col);
    if (job->residual) sums += load4(job->residual + row * job->residual_stride + col);
    store4(job->y + row * job->y_stride + col, sums);
}

/* Rows [row .. row + rows) of four columns. Sums are variables, one by one: compilers leave an array of them in memory.
 * The weights of the next columns are fetched into L2 meanwhile, by every tile of these columns: at 8 to 16 rows that
 * is worth half as much speed again as if only the first tile asked for them. */
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
INLINE void tile(const int rows, const Linear *job, int64_t row, int64_t col) {
    const int64_t k = job->w->k, stride = job->x_stride;
    const float *x = job->x + row * stride, *w = (const float *)job->w->data + col * k;
#define DECLARE(r) vec sum##r##a = {0}, sum##r##b = {0}, sum##r##c = {0}, sum##r##d = {0};
    EACH_ROW(DECLARE)
#define ADD(r, input)                                                                                                \
    if (rows > r) {                                                                                                  \
        vec value = input;                                                                                           \
        sum##r##a += value * a, sum##r##b += value * b, sum##r##c += value * c, sum##r##d += value * d;              \
    }
#define ADD_WHOLE(r) ADD(r, load(x + r * stride + i))
#define ADD_PART(r) ADD(r, load_part(x + r * stride + i, k - i))
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        vec a = load(w + i), b = load(w + k + i), c = load(w + 2 * k + i), d = load(w + 3 * k + i);
        __builtin_prefetch(w + COLS * k + i, 0, 2);
        __builtin_prefetch(w + (COLS + 1) * k + i, 0, 2);
        __builtin_prefetch(w + (COLS + 2) * k + i, 0, 2);
        __builtin_prefetch(w + (COLS + 3) * k + i, 0, 2);
        EACH_ROW(ADD_WHOLE)
    }
    if (i < k) {
        const int64_t left = k - i;
        vec a = load_part(w + i, left), b = load_part(w + k + i, left);
        vec c = load_part(w + 2 * k + i, left), d = load_part(w + 3 * k + i, left);
        EACH_ROW(ADD_PART)
    }
    /* By way of memory: taking halves of the registers themselves makes GCC 12 keep the sums there all the time. */
    vec kept[COLS * MOST_ROWS];
#define KEEP(r)                                                                                                      \
    if (rows > r) {                                                                                                  \
        vec *mine = kept + COLS * r;                                                                                 \
        mine[0] = sum##r##a, mine[1] = sum##r##b, mine[2] = sum##r##c, mine[3] = sum##r##d;                          \
    }
    EACH_ROW(KEEP)
    __asm__("" : : "r"(kept) : "memory");
    for (int r = 0; r < rows; r++) {
        const vec *mine = kept + COLS * r;
        finish(job, row + r, col, fold_sums(mine[0], mine[1], mine[2], mine[3]));
    }
}

/* One row of eight columns, so that there are enough sums which do not wait for each other. */
INLINE void wide_tile(const Linear *job, int64_t row, int64_t col) {
    const int64_t k = job->w->k;
    const float *x = job->x + row * job->x_stride, *w = (const float *)job->w->data + col * k;
    vec a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};
#define ADD_COLUMN(sum, number, load_value)                                                                          \
    sum += value * load_value(w + number * k + i);                                                                   \
    __builtin_prefetch(w + (number + 8) * k + i, 0, 2);
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        vec value = load(x + i);
        ADD_COLUMN(a, 0, load) ADD_COLUMN(b, 1, load) ADD_COLUMN(c, 2, load) ADD_COLUMN(d, 3, load)
        ADD_COLUMN(e, 4, load) ADD_COLUMN(f, 5, load) ADD_COLUMN(g, 6, load) ADD_COLUMN(h, 7, load)
    }
    if (i < k) {
        vec value = load_part(x + i, k - i);
#define LEFT(from) load_part(from, k - i)
        ADD_COLUMN(a, 0, LEFT) ADD_COLUMN(b, 1, LEFT) ADD_COLUMN(c, 2, LEFT) ADD_COLUMN(d, 3, LEFT)
        ADD_COLUMN(e, 4, LEFT) ADD_COLUMN(f, 5, LEFT) ADD_COLUMN(g, 6, LEFT) ADD_COLUMN(h, 7, LEFT)
    }
    finish(job, row, col, fold_sums(a, b, c, d));
    finish(job, row, col + 4, fold_sums(e, f, g, h));
}

static void single(const Linear *job, int64_t row, int64_t col) {
    const int64_t k = job->w->k;
    const float *x = job->x + row * job->x_stride, *w = (const float *)job->w->data + col * k;
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) sums += load(x + i) * load(w + i);
    if (i < k) sums += load_part(x + i, k - i) * load_part(w + i, k - i);
    float sum = fold_sum(sums);
    if (job->w->bias) sum += job->w->bias[col];
    if (job->residual) sum += job->residual[row * job->residual_stride + col];
    job->y[row * job->y_stride + col] = sum;
}

static void tile_of(int64_t rows, const Linear *job, int64_t row, int64_t col) {
    switch (rows) {
    case 1: tile(1, job, row, col); break;
    case 2: tile(2, job, row, col); break;
    case 3: tile(3, job, row, col); break;
#if MOST_ROWS > 3
    case 4: tile(4, job, row, col); break;
    case 5: tile(5, job, row, col); break;
    case 6: tile(6, job, row, col); break;
#endif
    }
}

/* Rows [first .. end) of columns [col .. last). */
static void part(const Linear *job, int64_t first, int64_t end, int64_t col, int64_t last) {
    const int64_t tiles = (end - first + MOST_ROWS - 1) / MOST_ROWS;
    if (end - first == 1)
        for (; col + 2 * COLS <= last; col += 2 * COLS) wide_tile(job, first, col);
    for (; col + COLS <= last; col += COLS) {
        int64_t row = first;
        for (int64_t left = tiles; left > 0; left--) { /* tiles of nearly equal height */
            int64_t rows_here = (end - row + left - 1) / left;
            tile_of(rows_here, job, row, col);
            row += rows_here;
        }
    }
    for (; col < last; col++)
        for (int64_t row = first; row < end; row++) single(job, row, col);
}

static int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

Cut cut_linear(const Linear *linear, int64_t products) {
    const int64_t k = linear->w->k ? linear->w->k : 1, rows = linear->rows ? linear->rows : 1, outs = linear->w->outs;
    const int quantized = linear->w->bits < 32;
    int64_t block = BLOCK_BYTES / (quantized ? k : 4 * k);
    block = (block < 48 ? 48 : block) / MOST_ROWS * MOST_ROWS;
    const int64_t steps = quantized ? ITEM_BYTE_STEPS : ITEM_STEPS;
    const int64_t least = quantized ? ITEM_BYTE_COLS : ITEM_COLS;
    int64_t width = smaller_of(ITEM_BYTES * 8 / (linear->w->bits * k), steps / (smaller_of(block, rows) * k)) / products;
    width = width < least ? least : width / least * least;
    const int64_t ranges = (outs + width - 1) / width;
    return (Cut){block, width, ranges, (linear->rows + block - 1) / block * ranges};
}

void linear_item(const Linear *linear, const Cut *cut, int64_t item) {
    const int64_t row = item / cut->ranges * cut->rows, col = item % cut->ranges * cut->outs;
    const int64_t end = smaller_of(row + cut->rows, linear->rows), last = smaller_of(col + cut->outs, linear->w->outs);
    if (linear->w->bits < 32) quantized_part(linear, row, end, col, last);
    else part(linear, row, end, col, last);
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

/* See `Linear`; w [outs, k] is contiguous. */
EXPORT void pd_linear(const float *x, int64_t x_stride, const float *w, const float *bias, const float *residual,
                      int64_t residual_stride, float *y, int64_t y_stride, int64_t rows, int64_t outs, int64_t k) {
    const Projection projection = {32, outs, k, w, .bias = bias};
    const Linear linear = {x, &projection, residual, y, x_stride, residual_stride, y_stride, rows};
    run_linears(&linear, 1);
}
