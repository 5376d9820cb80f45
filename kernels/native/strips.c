/* y = x @ w.T (+ bias) (+ residual) in float32.
 *
 * Weights lie in strips of LANES columns, and along K in groups of GROUP, the last of which is filled up with zeros.
 * PANEL strips lie together: group after group along K, and in a group strip after strip, so that memory is one stream.
 * What a strip holds of a group stands for float32 numbers, exactly, in as few bytes as these need: a step of few rows
 * takes as long as its weights take to come from memory.
 *   FLOATS   GROUP vectors of LANES numbers
 *   HALVES   the same in half precision
 *   BFLOATS  the same without the lower 16 bits, which are zeros
 *   BYTES    LANES scales in half precision, then GROUP times LANES signed bytes. weight = scale * byte
 *   NIBBLES  LANES scales and LANES minima in half precision, then GROUP / 8 times LANES words of eight values along K,
 *            the first in the lowest bits. weight = min + scale * value
 * Products of a scale and so short a number are exact, so these are the numbers in a file of such weights. ROWS are no
 * strips but [outs, k] floats as torch has them.
 *
 * Every element is one sum, in the order of K. The tile it happens to be in, or the thread, or the rows beside it do not
 * change that, so they cannot change a row's bits. Few rows multiply what the strips hold at once (`direct`); for more, a
 * piece of two strips is made floats, in L1, and multiplied by tile after tile of rows.
 */
#include "strips.h"
#include "integer.h"
#include "vector.h"

#define UNROLLED _Pragma("GCC unroll 32")
#define ROLLED _Pragma("GCC unroll 1")
#define HALF_ROLLED _Pragma("GCC unroll 2")
#define WORD 8 /* values along K in a word of nibbles; */
#define MOST_IN_PLACE 4 /* so many are made floats where they stand, before the word has to be shifted */
#define MOST_SUMS 24 /* in a tile, */
#define MOST_STRIPS 8
#define AHEAD_BYTES 49152 /* of what is multiplied, its memory is fetched */
#define CHUNK 6      /* groups in a piece, */
#define PAIR 2       /* and strips; */
#define SPAN 8       /* strips that are walked together along K */
#if LANES == 16
#define MOST_TILE_ROWS 12 /* with two strips: 24 of 32 registers hold sums */
#define MOST_DIRECT_ROWS 8
#else
#define MOST_TILE_ROWS 6 /* 12 of 16 */
#define MOST_DIRECT_ROWS 4
#endif

INLINE int64_t group_bytes(const int kind) {
    switch (kind) {
    case HALVES: case BFLOATS: return 2 * LANES * GROUP;
    case BYTES: return 2 * LANES + LANES * GROUP;
    case NIBBLES: return 4 * LANES + LANES * GROUP / 2;
    default: return 4 * LANES * GROUP;
    }
}

INLINE int64_t num_groups(const Projection *w) { return (w->k + GROUP - 1) / GROUP; }

INLINE int64_t panel_bytes(const int kind, const Projection *w) { return num_groups(w) * PANEL * group_bytes(kind); }

/* Where a strip begins; its groups are PANEL * group_bytes apart. */
INLINE const uint8_t *strip_at(const int kind, const Projection *w, int64_t strip) {
    return (const uint8_t *)w->data + strip / PANEL * panel_bytes(kind, w) + strip % PANEL * group_bytes(kind);
}

/* What is the same for all values of a strip's group. */
typedef struct {
    vec scales[MOST_IN_PLACE]; /* a sixteenth for every place that a nibble stands higher */
    vec min;
} Terms;

INLINE Terms terms_at(const int kind, const int in_place, const uint8_t *group) {
    Terms terms = {{{0}}, {0}};
    if (kind == BYTES || kind == NIBBLES) terms.scales[0] = load_halves(group);
    if (kind == NIBBLES) {
        terms.min = load_halves(group + 2 * LANES);
        for (int i = 1; i < in_place; i++) terms.scales[i] = terms.scales[i - 1] * 0.0625f;
    }
    return terms;
}

INLINE ivec word_at(const int kind, const uint8_t *group, int64_t at) {
    return kind == NIBBLES ? bytes_at(group + 4 * LANES + at / WORD * 4 * LANES) : (ivec){0};
}

/* The LANES numbers at a place along K of a group; of NIBBLES, those at a place in the word, which moves on after each
 * `in_place` of them: shifts are done where products are. */
INLINE vec floats_at(const int kind, const int in_place, const uint8_t *group, const Terms *terms, int64_t at,
                     const int place, ivec *word) {
    switch (kind) {
    case HALVES: return load_halves(group + at * 2 * LANES);
    case BFLOATS: return load_upper_halves(group + at * 2 * LANES);
    case BYTES: return load_bytes((const int8_t *)group + 2 * LANES + at * LANES) * terms->scales[0];
    case NIBBLES: {
        const vec value = in_place == 1 ? low_nibbles(*word) : __builtin_convertvector(*word & 15 << 4 * place, vec);
        if (place + 1 == in_place) *word = *word >> 4 * in_place;
        return value * terms->scales[place] + terms->min;
    }
    default: return load((const float *)group + at * LANES);
    }
}

INLINE void expand(const int kind, const uint8_t *group, float *to) { /* [GROUP, LANES] */
    const Terms terms = terms_at(kind, 1, group);
    ROLLED for (int64_t at = 0; at < GROUP;) {
        ivec word = word_at(kind, group, at);
        UNROLLED for (int i = 0; i < WORD; i++, at++)
            store(to + at * LANES, floats_at(kind, 1, group, &terms, at, 0, &word));
    }
}

/* The same, out of line: for the last group, which is not whole. */
#define EXPAND(name, kind)                                                                                           \
    static void __attribute__((noinline)) name(const uint8_t *group, float *to) { expand(kind, group, to); }
EXPAND(expand_halves, HALVES)
EXPAND(expand_bfloats, BFLOATS)
EXPAND(expand_bytes, BYTES)
EXPAND(expand_nibbles, NIBBLES)
INLINE void expand_last(const int kind, const uint8_t *group, float *to) {
    switch (kind) {
    case HALVES: expand_halves(group, to); break;
    case BFLOATS: expand_bfloats(group, to); break;
    case BYTES: expand_bytes(group, to); break;
    default: expand_nibbles(group, to);
    }
}

static void __attribute__((noinline)) finish_tile(const Linear *job, int64_t row, int64_t rows, int64_t strip,
                                                  int strips, int sums_apart, const vec *sums) { /* [rows, sums_apart] */
    for (int64_t r = 0; r < rows; r++)
        for (int s = 0; s < strips; s++) finish_strip(job, row + r, strip + s, sums[r * sums_apart + s]);
}

/* --- few rows ---------------------------------------------------------------------------------------------------- */

/* All rows [row .. row + rows) of some strips: of one panel, or of two whole ones. */
INLINE void direct(const int kind, const int rows, const int strips, const Linear *job, int64_t row, int64_t strip) {
    const int64_t k = job->w->k, stride = job->x_stride, panel = panel_bytes(kind, job->w);
    const float *x = job->x + row * stride;
    const uint8_t *group = strip_at(kind, job->w, strip);
    const int in_place = LANES < 16 || strips > 2 ? 1 : rows > 6 ? 2 : MOST_IN_PLACE; /* registers suffice for it */
#define OF_STRIP(s) (group + (s) / PANEL * panel + (s) % PANEL * group_bytes(kind))
    vec sums[MOST_SUMS];
    UNROLLED for (int i = 0; i < rows * strips; i++) sums[i] = (vec){0};
    int64_t left = k;
    for (; left >= GROUP; left -= GROUP, group += PANEL * group_bytes(kind), x += GROUP) {
        Terms terms[MOST_STRIPS];
        UNROLLED for (int s = 0; s < strips; s++) {
            terms[s] = terms_at(kind, in_place, OF_STRIP(s));
            ROLLED for (int64_t line = 0; line < group_bytes(kind); line += 64)
                __builtin_prefetch(OF_STRIP(s) + AHEAD_BYTES + line, 0, 3);
        }
        ROLLED for (int64_t at = 0; at < GROUP;) {
            ivec words[MOST_STRIPS];
            UNROLLED for (int s = 0; s < strips; s++) words[s] = word_at(kind, OF_STRIP(s), at);
            HALF_ROLLED for (int i = 0; i < WORD; i += in_place)
                UNROLLED for (int place = 0; place < in_place; place++, at++)
                    UNROLLED for (int s = 0; s < strips; s++) {
                        const vec w = floats_at(kind, in_place, OF_STRIP(s), terms + s, at, place, words + s);
                        UNROLLED for (int r = 0; r < rows; r++) sums[r * strips + s] += splat(x[r * stride + at]) * w;
                    }
        }
    }
    if (left > 0)
        UNROLLED for (int s = 0; s < strips; s++) {
            float floats[GROUP * LANES];
            expand_last(kind, OF_STRIP(s), floats);
            for (int64_t i = 0; i < left; i++)
                UNROLLED for (int r = 0; r < rows; r++)
                    sums[r * strips + s] += splat(x[r * stride + i]) * load(floats + i * LANES);
        }
    vec kept[MOST_SUMS];
    UNROLLED for (int i = 0; i < rows * strips; i++) kept[i] = sums[i];
    finish_tile(job, row, rows, strip, strips, strips, kept);
}

/* As many strips as go; returns the first of those that are left. */
INLINE int64_t direct_walk(const int kind, const Linear *job, int64_t row, int64_t rows, int64_t strip, int64_t last) {
#define TAKE(count, strips)                                                                                          \
    case count:                                                                                                      \
        for (; strip + strips <= last; strip += strips) direct(kind, count, strips, job, row, strip);                \
        break;
#if LANES == 16
    if (rows == 1)
        for (; strip + 8 <= last; strip += 8) direct(kind, 1, 8, job, row, strip);
    switch (rows) { TAKE(1, 4) TAKE(2, 4) TAKE(3, 4) TAKE(4, 4) TAKE(5, 2) TAKE(6, 2) TAKE(7, 2) TAKE(8, 2) }
#else
    switch (rows) { TAKE(1, 4) TAKE(2, 2) TAKE(3, 2) TAKE(4, 2) }
#endif
    return strip;
}

/* --- more rows --------------------------------------------------------------------------------------------------- */

/* A piece of two strips along K, as floats, and the memory to fetch meanwhile. */
typedef struct {
    const float *a, *b;   /* [steps, LANES], but for what lies between groups: */
    int64_t steps, apart; /* how far apart these begin, in floats */
    const uint8_t *next;
    int64_t next_apart, next_bytes; /* how far apart groups are there, and what to fetch at each step */
} Piece;

/* sums [rows, PAIR] += x [rows, steps] by the piece. `first`: they begin at zero. */
INLINE void tile(const int rows, const float *x, int64_t stride, const Piece *piece, int first, vec *kept) {
    const float *a = piece->a, *b = piece->b;
    const uint8_t *next = piece->next;
    vec sums[MOST_SUMS];
    UNROLLED for (int i = 0; i < rows * PAIR; i++) sums[i] = first ? (vec){0} : kept[i];
    for (int64_t left = piece->steps; left > 0; left -= GROUP) {
        for (int64_t i = 0; i < left && i < GROUP; i++, x++) {
            const vec of_a = load(a + i * LANES), of_b = load(b + i * LANES);
            __builtin_prefetch(next + i * piece->next_bytes, 0, 2);
            __builtin_prefetch(next + i * piece->next_bytes + 64, 0, 2);
            UNROLLED for (int r = 0; r < rows; r++) {
                const vec value = splat(x[r * stride]);
                sums[PAIR * r] += value * of_a;
                sums[PAIR * r + 1] += value * of_b;
            }
        }
        a += piece->apart, b += piece->apart, next += piece->next_apart;
    }
    UNROLLED for (int i = 0; i < rows * PAIR; i++) kept[i] = sums[i];
}

static void tile_of(int64_t rows, const float *x, int64_t stride, const Piece *piece, int first, vec *kept) {
#define TILE(count)                                                                                                  \
    case count: tile(count, x, stride, piece, first, kept); break;
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if MOST_TILE_ROWS > 6
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
}

/* `steps` values along K of a strip of ROWS, from `at` on. */
static void transpose(const Projection *w, int64_t strip, int64_t at, int64_t steps, float *to) { /* [steps, LANES] */
    for (int64_t lane = 0; lane < LANES; lane++) {
        const int64_t col = strip * LANES + lane;
        const float *from = (const float *)w->data + col * w->k + at;
        for (int64_t i = 0; i < steps; i++) to[i * LANES + lane] = col < w->outs ? from[i] : 0;
    }
}

/* A piece of one strip, in memory already or made in `room`. */
INLINE const float *floats_of(const int kind, const Projection *w, int64_t strip, int64_t at, int64_t steps, float *room) {
    if (kind == ROWS) {
        transpose(w, strip, at, steps, room);
        return room;
    }
    const uint8_t *group = strip_at(kind, w, strip) + at / GROUP * PANEL * group_bytes(kind);
    if (kind == FLOATS) return (const float *)group;
    for (int64_t i = 0; i < steps; i += GROUP, group += PANEL * group_bytes(kind)) expand(kind, group, room + i * LANES);
    return room;
}

/* Whether rows that far apart share so few of the first cache's sets that a tile of them does not stay there. */
static int crowded(int64_t stride) { return stride * (int64_t)sizeof(float) / 64 % 8 == 0; }

static void copy_rows(const float *x, int64_t stride, int64_t rows, int64_t steps, float *to) { /* [rows, CHUNK * GROUP] */
    for (int64_t r = 0; r < rows; r++, x += stride, to += CHUNK * GROUP) {
        int64_t i = 0;
        for (; i + LANES <= steps; i += LANES) store(to + i, load(x + i));
        for (; i < steps; i++) to[i] = x[i];
    }
}

INLINE void piece_walk(const int kind, const Linear *job, int64_t row, int64_t rows, int64_t strip, int64_t last) {
    _Alignas(64) float room[PAIR][CHUNK * GROUP * LANES], copy[MOST_BLOCK_ROWS * CHUNK * GROUP];
    vec sums[SPAN * MOST_BLOCK_ROWS];
    const int64_t k = job->w->k, tiles = (rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS;
    const int copied = rows > MOST_TILE_ROWS && crowded(job->x_stride);
    for (int64_t i = 0; k == 0 && i < rows * SPAN; i++) sums[i] = (vec){0};
    for (; strip < last; strip += SPAN) {
        const int64_t end = last - strip < SPAN ? last : strip + SPAN;
        for (int64_t at = 0; at < k; at += CHUNK * GROUP) {
            const int64_t steps = k - at < CHUNK * GROUP ? k - at : CHUNK * GROUP;
            const float *x = job->x + row * job->x_stride + at;
            if (copied) copy_rows(x, job->x_stride, rows, steps, copy);
            const int64_t stride = copied ? CHUNK * GROUP : job->x_stride;
            for (int64_t s = strip; s < end; s += PAIR) {
                Piece piece = {.steps = steps, .apart = (kind == FLOATS ? PANEL : 1) * GROUP * LANES};
                piece.next_apart = PANEL * group_bytes(kind), piece.next_bytes = PAIR * group_bytes(kind) / GROUP;
                piece.next = strip_at(kind, job->w, s) + (at / GROUP + CHUNK) * piece.next_apart;
                piece.a = floats_of(kind, job->w, s, at, steps, room[0]);
                piece.b = s + 1 == end ? piece.a : floats_of(kind, job->w, s + 1, at, steps, room[1]);
                for (int64_t left = tiles, first = 0; left > 0; left--) { /* tiles of nearly equal height */
                    const int64_t here = (rows - first + left - 1) / left;
                    vec *kept = sums + (s - strip) * rows + first * PAIR;
                    tile_of(here, (copied ? copy : x) + first * stride, stride, &piece, at == 0, kept);
                    first += here;
                }
            }
        }
        for (int64_t s = strip; s < end; s += PAIR)
            finish_tile(job, row, rows, s, s + 1 == end ? 1 : PAIR, PAIR, sums + (s - strip) * rows);
    }
}

/* ----------------------------------------------------------------------------------------------------------------- */

INLINE void part(const int kind, const Linear *job, int64_t row, int64_t rows, int64_t strip, int64_t last) {
    const int in_place = kind == ROWS || kind == FLOATS; /* nothing is made floats: pieces are as fast */
    if (!in_place && rows <= MOST_DIRECT_ROWS) strip = direct_walk(kind, job, row, rows, strip, last);
    if (strip < last) piece_walk(kind, job, row, rows, strip, last);
}

#define PART(name, kind)                                                                                             \
    static void name(const Linear *job, int64_t row, int64_t rows, int64_t strip, int64_t last) {                    \
        part(kind, job, row, rows, strip, last);                                                                     \
    }
PART(rows_part, ROWS)
PART(floats_part, FLOATS)
PART(halves_part, HALVES)
PART(bfloats_part, BFLOATS)
PART(bytes_part, BYTES)
PART(nibbles_part, NIBBLES)

void strips_part(const Linear *linear, int64_t first, int64_t end, int64_t col, int64_t last) {
    const int64_t strip = col / LANES, last_strip = (last + LANES - 1) / LANES;
    switch (linear->w->kind) {
    case FLOATS: floats_part(linear, first, end - first, strip, last_strip); break;
    case HALVES: halves_part(linear, first, end - first, strip, last_strip); break;
    case BFLOATS: bfloats_part(linear, first, end - first, strip, last_strip); break;
    case BYTES: bytes_part(linear, first, end - first, strip, last_strip); break;
    case NIBBLES: nibbles_part(linear, first, end - first, strip, last_strip); break;
    default: rows_part(linear, first, end - first, strip, last_strip);
    }
}
