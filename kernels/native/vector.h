/* One vector width for every kernel, chosen by the compiler's flags: 16, 8 or 4 floats. */
#ifndef PDSERVE_VECTOR_H
#define PDSERVE_VECTOR_H

#include <stdint.h>
#include <string.h>

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

/* The first `count` floats, zeros behind them. */
INLINE vec load_part(const float *from, int64_t count) {
    vec value = {0};
    memcpy(&value, from, (size_t)count * sizeof(float));
    return value;
}
INLINE void store_part(float *to, vec value, int64_t count) { memcpy(to, &value, (size_t)count * sizeof(float)); }
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

#endif
