/* A small team of threads: see threads.c. */
#ifndef PDSERVE_THREADS_H
#define PDSERVE_THREADS_H

#include <stdint.h>

typedef void (*Work)(void *context, int64_t item);

/* Call work(context, item) once for every item in [0 .. count), in any order, perhaps on several threads at once;
 * return when all are done. Work must not call this again. An item should take 10 to 100 microseconds: a helper that
 * loses its core holds up the caller by one item, and to claim one costs a tenth of a microsecond. */
void pd_parallel(Work work, void *context, int64_t count);

/* If another process wishes for this core, and this one gives way there, wait until it has what it wanted. Looked at
 * before every item; also to be called in the middle of items that take milliseconds. */
void pd_give_way(void);

/* Whether anybody would help now. */
int pd_may_be_helped(void);

#endif
