/* The largest number of every row, and where it stands first. */
#include "threads.h"
#include "vector.h"

#include <math.h>

typedef struct {
    const float *x;
    int64_t stride, width;
    float *largest;
    int64_t *places;
} Rows;

INLINE ivec counting(void) {
    ivec lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes;
}

/* Every lane keeps its own largest, and when it came; NaN is larger than everything. */
static void row_item(void *context, int64_t row) {
    const Rows *rows = context;
    const float *x = rows->x + row * rows->stride;
    vec most = splat(-INFINITY);
    ivec at = counting(), place = at, strange = {0};
    int64_t i = 0;
    for (; i + LANES <= rows->width; i += LANES, at += LANES) {
        vec value = load(x + i);
        ivec mask = value > most;
        most = (vec)(((ivec)value & mask) | ((ivec)most & ~mask));
        place = (at & mask) | (place & ~mask);
        strange |= value != value;
    }
    float largest = most[0];
    int64_t found = place[0], spoilt = strange[0];
    for (int lane = 1; lane < LANES; lane++) {
        if (most[lane] > largest || (most[lane] == largest && place[lane] < found))
            largest = most[lane], found = place[lane];
        spoilt |= strange[lane];
    }
    for (; i < rows->width; i++) {
        if (x[i] > largest) largest = x[i], found = i;
        spoilt |= x[i] != x[i];
    }
    rows->largest[row] = spoilt ? NAN : largest;
    rows->places[row] = found;
}

/* x [rows, width], at least one wide and not wider than 2^31: largest [rows], NaN where a row has one; places [rows]. */
EXPORT void pd_largest(const float *x, int64_t stride, int64_t rows, int64_t width, float *largest, int64_t *places) {
    Rows all = {x, stride, width, largest, places};
    pd_parallel(row_item, &all, rows);
}
