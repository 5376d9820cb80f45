/* A step's q turned in place by its rotary positions, its k turned on the way into the cache, its v written beside it.

   The arithmetic is that of the models (x * cos + rotate_half(x) * sin, every operation rounded to the dtype), to the
   bit: products and sums must not be contracted (compile with -fmad=false). One block is one token; no thread meets
   another, see cache_ops.cu. */

typedef long long i64;

struct Float32 {
    typedef float Stored;
    static __device__ float load(float x) { return x; }
    static __device__ float store(float x) { return x; }
};

struct BFloat16 {
    typedef unsigned short Stored;
    static __device__ float load(unsigned short x) {
        union { unsigned int bits; float value; } u;
        u.bits = (unsigned int)x << 16;
        return u.value;
    }
    static __device__ unsigned short store(float x) { /* to nearest, ties to even */
        union { unsigned int bits; float value; } u;
        u.value = x;
        if (x != x)
            return 0x7fc0;
        return (unsigned short)((u.bits + 0x7fffu + ((u.bits >> 16) & 1u)) >> 16);
    }
};

struct Float16 {
    typedef unsigned short Stored;
#ifdef __CUDACC__
    static __device__ float load(unsigned short x) {
        float out;
        asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
        return out;
    }
    static __device__ unsigned short store(float x) {
        unsigned short out;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
        return out;
    }
#else
    static float load(unsigned short x) {
        union { unsigned short bits; _Float16 value; } u;
        u.bits = x;
        return (float)u.value;
    }
    static unsigned short store(float x) {
        union { unsigned short bits; _Float16 value; } u;
        u.value = (_Float16)x;
        return u.bits;
    }
#endif
};

/* x, to [heads, head_dim]: the first `rotary` dimensions of every head are turned, halves paired, the rest is copied.
   `to` may be x: a thread reads both of a pair before it writes either. cos, sin [rotary]. */
template <typename T>
__device__ void turn(typename T::Stored *to, const typename T::Stored *x, const typename T::Stored *cos,
                     const typename T::Stored *sin, i64 heads, i64 head_dim, i64 rotary) {
    const unsigned int half = rotary / 2, work = head_dim - half, total = heads * work; /* 64-bit division is slow */
    for (unsigned int at = threadIdx.x; at < total; at += blockDim.x) {
        const unsigned int head = at / work, i = at % work;
        const typename T::Stored *from = x + head * head_dim;
        typename T::Stored *out = to + head * head_dim;
        if (i >= half) {
            out[i + half] = from[i + half];
            continue;
        }
        const float a = T::load(from[i]), b = T::load(from[half + i]);
        const float ac = T::load(T::store(a * T::load(cos[i])));
        const float bs = T::load(T::store(-b * T::load(sin[i])));
        const float bc = T::load(T::store(b * T::load(cos[half + i])));
        const float as = T::load(T::store(a * T::load(sin[half + i])));
        out[i] = T::store(ac + bs);
        out[half + i] = T::store(bc + as);
    }
}

/* Strides between tokens are in elements; within a token all is contiguous. slots [tokens]. */
template <typename T>
__device__ void rotate_and_write(typename T::Stored *q, i64 q_stride, const typename T::Stored *k, i64 k_stride,
                                 const typename T::Stored *v, i64 v_stride, const typename T::Stored *cos,
                                 const typename T::Stored *sin, i64 rotary, i64 heads, i64 kv_heads, i64 k_head_dim,
                                 i64 v_head_dim, const i64 *slots, typename T::Stored *k_cache,
                                 typename T::Stored *v_cache) {
    const i64 token = blockIdx.x, slot = slots[token];
    const typename T::Stored *c = cos + token * rotary, *s = sin + token * rotary;
    turn<T>(q + token * q_stride, q + token * q_stride, c, s, heads, k_head_dim, rotary);
    turn<T>(k_cache + slot * kv_heads * k_head_dim, k + token * k_stride, c, s, kv_heads, k_head_dim, rotary);
    for (i64 at = threadIdx.x; at < kv_heads * v_head_dim; at += blockDim.x)
        v_cache[slot * kv_heads * v_head_dim + at] = v[token * v_stride + at];
}

#define FOR_DTYPE(NAME, T)                                                                                            \
    extern "C" __global__ void rotate_and_write_##NAME(                                                               \
        T::Stored *q, i64 q_stride, const T::Stored *k, i64 k_stride, const T::Stored *v, i64 v_stride,               \
        const T::Stored *cos, const T::Stored *sin, i64 rotary, i64 heads, i64 kv_heads, i64 k_head_dim,              \
        i64 v_head_dim, const i64 *slots, T::Stored *k_cache, T::Stored *v_cache) {                                   \
        rotate_and_write<T>(q, q_stride, k, k_stride, v, v_stride, cos, sin, rotary, heads, kv_heads, k_head_dim,     \
                            v_head_dim, slots, k_cache, v_cache);                                                     \
    }

FOR_DTYPE(float32, Float32)
FOR_DTYPE(float16, Float16)
FOR_DTYPE(bfloat16, BFloat16)
