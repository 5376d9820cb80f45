#ifndef PDSERVE_STRIPS_H
#define PDSERVE_STRIPS_H

#include "linear.h"

/* Rows [first .. end) of columns [col .. last) of a product in float32. There are at most MOST_BLOCK_ROWS; col is a
 * multiple of LANES. */
#define MOST_BLOCK_ROWS 252
void strips_part(const Linear *linear, int64_t first, int64_t end, int64_t col, int64_t last);

#endif
