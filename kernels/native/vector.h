/* One vector width for every kernel, chosen by the compiler's flags: 16, 8 or 4 floats. */
#ifndef PDSERVE_VECTOR_H
#define PDSERVE_VECTOR_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16)));
typedef float unaligned_vec4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t ivec4 __attribute__((vector_size(16)));
typedef float vec8 __attribute__((vector_size(32)));

INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec value) { *(unaligned_vec *)to = value; }

INLINE vec4 load4(const float *from) { return *(const unaligned_vec4 *)from; }
INLINE void store4(float *to, vec4 value) { *(unaligned_vec4 *)to = value; }

/* The first `count` floats (1 to LANES - 1), zeros behind them. No call of memcpy: it would push every sum out of its
 * register in the loop before. */
#if LANES == 16
INLINE vec load_part(const float *from, int64_t count) {
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}
INLINE void store_part(float *to, vec value, int64_t count) {
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)value);
}
#elif LANES == 8
INLINE __m256i first_lanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vec load_part(const float *from, int64_t count) { return (vec)_mm256_maskload_ps(from, first_lanes(count)); }
INLINE void store_part(float *to, vec value, int64_t count) {
    _mm256_maskstore_ps(to, first_lanes(count), (__m256)value);
}
#else
INLINE vec load_part(const float *from, int64_t count) {
    return (vec){from[0], count > 1 ? from[1] : 0, count > 2 ? from[2] : 0, 0};
}
INLINE void store_part(float *to, vec value, int64_t count) {
    to[0] = value[0];
    if (count > 1) to[1] = value[1];
    if (count > 2) to[2] = value[2];
}
#endif
/* LANES signed bytes as floats. */
#if LANES == 16
INLINE vec load_bytes(const int8_t *from) {
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
#elif LANES == 8
INLINE vec load_bytes(const int8_t *from) {
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}
#else
INLINE vec load_bytes(const int8_t *from) { return (vec){from[0], from[1], from[2], from[3]}; }
#endif
/* The first `count` (1 to LANES - 1), zeros behind them. */
INLINE vec load_bytes_part(const int8_t *from, int64_t count) {
    int8_t some[LANES] = {0};
    for (int64_t i = 0; i < count; i++) some[i] = from[i];
    return load_bytes(some);
}
/* LANES floats of which only the upper 16 bits are there. */
INLINE vec load_upper_halves(const void *from) {
#if LANES == 16
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16);
#elif LANES == 8
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16);
#else
    uint16_t upper[LANES];
    memcpy(upper, from, sizeof upper);
    return (vec)((ivec){upper[0], upper[1], upper[2], upper[3]} << 16);
#endif
}
/* The lowest four bits of every lane, as a float. */
INLINE vec low_nibbles(ivec bits) {
#if LANES == 16
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (vec)_mm512_permutexvar_ps((__m512i)bits, numbers); /* looks at these bits only */
#else
    return __builtin_convertvector(bits & 15, vec);
#endif
}
INLINE vec splat(float value) { return value - (vec){0}; }

/* Lanes folded in halves down to four, always in the same order. */
INLINE vec4 fold(vec value) {
#if LANES == 16
    vec8 low, high;
    memcpy(&low, &value, 32);
    memcpy(&high, (const char *)&value + 32, 32);
    vec8 half = low + high;
#elif LANES == 8
    vec8 half = value;
#endif
#if LANES > 4
    vec4 first, second;
    memcpy(&first, &half, 16);
    memcpy(&second, (const char *)&half + 16, 16);
    return first + second;
#else
    return value;
#endif
}
INLINE float fold_sum(vec value) {
    vec4 four = fold(value);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec4){__VA_ARGS__})
#endif

/* fold_sum of four at once, to the bit. */
INLINE vec4 fold_sums(vec first, vec second, vec third, vec fourth) {
    vec4 a = fold(first), b = fold(second), c = fold(third), d = fold(fourth);
    vec4 ab = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
    vec4 cd = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

/* b where either is NaN */
#if LANES == 16
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif LANES == 8
INLINE vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vec larger(vec a, vec b) {
    ivec mask = a > b;
    return (vec)(((ivec)a & mask) | ((ivec)b & ~mask));
}
INLINE vec smaller(vec a, vec b) {
    ivec mask = a < b;
    return (vec)(((ivec)a & mask) | ((ivec)b & ~mask));
}
#endif

/* e^x to a few units in the last place; x beyond [-87, 88] counts as the bound, NaN stays NaN. */
INLINE vec exponential(vec x) {
    const float rounder = 12582912.0f; /* 1.5 * 2^23: adding it leaves no bits behind the point */
    x = smaller(splat(88.0f), larger(splat(-87.0f), x));
    vec n = (x * 1.44269504f + rounder) - rounder;
    vec r = x - n * 0.693145752f; /* ln 2, in a part with trailing zeros and the rest */
    r = r - n * 1.42860677e-6f;
    vec sum = r * (1.0f / 5040) + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    return sum * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}

#endif
