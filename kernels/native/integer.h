/* Exact sums of products of unsigned bytes (weights) and signed ones (activations), four at a time in every lane.
 *
 * A vector of weights holds LANES columns, four values along K of each. There are three ways: the instruction made for
 * it (VNNI); bytes widened to 16 bits, because the older instruction for bytes saturates; and plain shifts.
 */
#ifndef PDSERVE_INTEGER_H
#define PDSERVE_INTEGER_H

#include "vector.h"

#define STEP 4 /* values along K in a lane */
#define VECTOR_BYTES (STEP * LANES)

INLINE ivec bytes_at(const void *from) { return (ivec)load(from); }
INLINE ivec four_bytes(const int8_t *from) { /* in every lane */
    int32_t four;
    memcpy(&four, from, 4);
    return four - (ivec){0};
}

#if defined(__AVX512VNNI__) || LANES == 4
typedef ivec Sum, Weights, Values, GroupSum;
#if LANES == 16
INLINE Sum dot(Sum sum, Weights w, Values x) { return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
#else
INLINE Sum dot(Sum sum, Weights w, Values x) {
    for (int bit = 0; bit < 32; bit += 8) sum += (w >> bit & 255) * (x << (24 - bit) >> 24);
    return sum;
}
#endif
INLINE Weights weights_at(const uint8_t *from) { return bytes_at(from); }
INLINE Values values_at(const int8_t *bytes, const int16_t *wide) { return four_bytes(bytes); }
INLINE Sum sum_from(int32_t start) { return start - (ivec){0}; }
INLINE ivec total(Sum sum) { return sum; }
INLINE GroupSum group_dot(GroupSum sum, ivec w, ivec x) { return dot(sum, w, x); }
INLINE ivec group_total(GroupSum sum) { return sum; }

#else
#define WIDE
typedef struct {
    ivec low, high; /* of the first and of the second half of the columns, two lanes for each */
} Sum, Weights;
typedef ivec Values;
typedef ivec GroupSum; /* of 16-bit lanes, two for each column */
#if LANES == 16
#define BITS(operation) _mm512_##operation
typedef __m512i integers;
typedef __m256i half_integers;
#define load_half(from) _mm256_loadu_si256(from)
#define splat_64 _mm512_set1_epi64
#else
#define BITS(operation) _mm256_##operation
typedef __m256i integers;
typedef __m128i half_integers;
#define load_half(from) _mm_loadu_si128(from)
#define splat_64 _mm256_set1_epi64x
#endif
INLINE Weights weights_at(const uint8_t *from) {
    const half_integers *half = (const half_integers *)from;
    return (Weights){(ivec)BITS(cvtepu8_epi16)(load_half(half)), (ivec)BITS(cvtepu8_epi16)(load_half(half + 1))};
}
INLINE Values values_at(const int8_t *bytes, const int16_t *wide) {
    int64_t four;
    memcpy(&four, wide, 8);
    return (ivec)splat_64(four);
}
INLINE Sum sum_from(int32_t start) {
    const ivec first_lanes = (ivec)splat_64((uint32_t)start);
    return (Sum){first_lanes, first_lanes};
}
INLINE Sum dot(Sum sum, Weights w, Values x) {
    return (Sum){sum.low + (ivec)BITS(madd_epi16)((integers)w.low, (integers)x),
                 sum.high + (ivec)BITS(madd_epi16)((integers)w.high, (integers)x)};
}
INLINE ivec total(Sum sum) {
#if LANES == 16
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512i low = (__m512i)sum.low, high = (__m512i)sum.high;
    return (ivec)_mm512_permutex2var_epi32(low, even, high) + (ivec)_mm512_permutex2var_epi32(low, odd, high);
#else
    return (ivec)_mm256_permute4x64_epi64(_mm256_hadd_epi32((__m256i)sum.low, (__m256i)sum.high), 0xd8);
#endif
}
/* Of weights up to 15, two products are at most 3810, and those of a group of 32 still fit 16 bits: exact. */
INLINE GroupSum group_dot(GroupSum sum, ivec w, ivec x) {
    return (ivec)BITS(add_epi16)((integers)sum, BITS(maddubs_epi16)((integers)w, (integers)x));
}
INLINE ivec group_total(GroupSum sum) { return (ivec)BITS(madd_epi16)((integers)sum, BITS(set1_epi16)(1)); }
#endif

/* LANES numbers in half precision. */
INLINE vec load_halves(const void *from) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#elif LANES == 8
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(from));
#else
    uint16_t half[LANES];
    memcpy(half, from, sizeof half);
    ivec bits = {half[0], half[1], half[2], half[3]};
    vec magnitude = (vec)((bits & 0x7fff) << 13) * 0x1p112f; /* of subnormal ones, too */
    ivec special = (bits & 0x7fff) >= 0x7c00;             /* becomes NaN */
    return (vec)((ivec)magnitude | (bits & 0x8000) << 16 | (special & 0x7fc00000));
#endif
}

INLINE vec floats(ivec x) { return __builtin_convertvector(x, vec); }

INLINE int32_t largest_lane(ivec x) {
#if LANES == 16
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
#endif
}

INLINE int32_t sum_lanes(ivec x) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
#endif
}

/* LANES numbers that fit a byte. */
INLINE void store_bytes(int8_t *to, ivec x) {
#if LANES == 16
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int lane = 0; lane < LANES; lane++) to[lane] = (int8_t)x[lane];
#endif
}

/* Rounded to the nearest, ties to even. The product is rounded first: never a fused multiplication and addition. */
INLINE ivec rounded_product(vec a, vec b) {
#if LANES == 16
    return (ivec)_mm512_cvtps_epi32(_mm512_mul_ps((__m512)a, (__m512)b));
#elif LANES == 8
    return (ivec)_mm256_cvtps_epi32(_mm256_mul_ps((__m256)a, (__m256)b));
#else
    vec product = a * b;
    ivec rounded;
    for (int lane = 0; lane < LANES; lane++) rounded[lane] = (int32_t)__builtin_rintf(product[lane]);
    return rounded;
#endif
}

#endif
