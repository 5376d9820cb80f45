/* y = x @ w.T (+ bias) (+ residual), float32, one thread.
 *
 * Every element is one dot product along K: LANES partial sums in the order of K, folded in a fixed order. The tile an
 * element happens to be in does not change that, so a row's bits never depend on the rows beside it or on their number.
 */
#include "vector.h"

#if LANES == 16
#define MOST_ROWS 6 /* with COLS columns: 24 of 32 registers hold sums */
#else
#define MOST_ROWS 3 /* 12 of 16 */
#endif
#define COLS 4
#define WIDE_COLS 8 /* of a single row, to have enough sums that do not wait for each other */
#define BLOCK_BYTES (384 << 10) /* of x that are walked again and again: they should stay in L2 */

typedef struct {
    const float *x, *w, *bias, *residual;
    float *y;
    int64_t x_stride, residual_stride, y_stride, k;
} Job;

/* Elements [row .. row + rows) x [col .. col + cols). `fresh`: these weights are read for the first time, so the ones
 * behind them will be next. */
INLINE void tile(const int rows, const int cols, const int fresh, const Job *job, int64_t row, int64_t col) {
    const int64_t k = job->k;
    const float *x = job->x + row * job->x_stride, *w = job->w + col * k;
    vec sums[MOST_ROWS][WIDE_COLS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) sums[r][c] = (vec){0};
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        vec weights[WIDE_COLS];
        for (int c = 0; c < cols; c++) {
            weights[c] = load(w + c * k + i);
            if (fresh) __builtin_prefetch(w + (c + cols) * k + i);
        }
        for (int r = 0; r < rows; r++) {
            vec input = load(x + r * job->x_stride + i);
            for (int c = 0; c < cols; c++) sums[r][c] += input * weights[c];
        }
    }
    if (i < k)
        for (int c = 0; c < cols; c++) {
            vec weight = load_part(w + c * k + i, k - i);
            for (int r = 0; r < rows; r++) sums[r][c] += load_part(x + r * job->x_stride + i, k - i) * weight;
        }
    for (int r = 0; r < rows; r++) {
        float *y = job->y + (row + r) * job->y_stride + col;
        const float *residual = job->residual ? job->residual + (row + r) * job->residual_stride + col : 0;
        if (cols == 1) {
            float sum = fold_sum(sums[r][0]);
            if (job->bias) sum += job->bias[col];
            if (residual) sum += residual[0];
            y[0] = sum;
            continue;
        }
        for (int c = 0; c < cols; c += 4) {
            vec4 sum = fold_sums(sums[r][c], sums[r][c + 1], sums[r][c + 2], sums[r][c + 3]);
            if (job->bias) sum += load4(job->bias + col + c);
            if (residual) sum += load4(residual + c);
            store4(y + c, sum);
        }
    }
}

INLINE void tile_of(int64_t rows, const int cols, const int fresh, const Job *job, int64_t row, int64_t col) {
    switch (rows) {
    case 1: tile(1, cols, fresh, job, row, col); break;
    case 2: tile(2, cols, fresh, job, row, col); break;
    case 3: tile(3, cols, fresh, job, row, col); break;
#if MOST_ROWS > 3
    case 4: tile(4, cols, fresh, job, row, col); break;
    case 5: tile(5, cols, fresh, job, row, col); break;
    case 6: tile(6, cols, fresh, job, row, col); break;
#endif
    }
}

/* x [rows, k], w [outs, k] contiguous, bias [outs] or null, residual [rows, outs] or null (may be y itself). */
EXPORT void pd_linear(const float *x, int64_t x_stride, const float *w, const float *bias, const float *residual,
                      int64_t residual_stride, float *y, int64_t y_stride, int64_t rows, int64_t outs, int64_t k) {
    const Job job = {x, w, bias, residual, y, x_stride, residual_stride, y_stride, k};
    int64_t block = BLOCK_BYTES / (4 * (k ? k : 1));
    block = (block < 48 ? 48 : block) / MOST_ROWS * MOST_ROWS;
    for (int64_t first = 0; first < rows; first += block) {
        int64_t end = first + block < rows ? first + block : rows;
        int64_t tiles = (end - first + MOST_ROWS - 1) / MOST_ROWS;
        int64_t col = 0;
        if (end - first == 1)
            for (; col + WIDE_COLS <= outs; col += WIDE_COLS) tile(1, WIDE_COLS, 1, &job, first, col);
        for (; col + COLS <= outs; col += COLS) {
            int64_t row = first;
            for (int64_t left = tiles; left > 0; left--) { /* tiles of nearly equal height */
                int64_t rows_here = (end - row + left - 1) / left;
                if (row == first)
                    tile_of(rows_here, COLS, 1, &job, row, col);
                else
                    tile_of(rows_here, COLS, 0, &job, row, col);
                row += rows_here;
            }
        }
        for (; col < outs; col++)
            for (int64_t row = first; row < end; row++) tile(1, 1, 0, &job, row, col);
    }
}
