/* What the kernels in kernels/cuda need to be plain C++: threads that run one after another.

   The vector types count accesses to addresses that a device would refuse. */
#include <cstdint>
#include <cstring>
#include <utility>

#define __global__
#define __device__

extern "C" {
long long misaligned = 0;
}

template <int SIZE> struct alignas(SIZE) Vector {
    unsigned char bytes[SIZE];
    Vector(const Vector &) = default;
    Vector &operator=(const Vector &other) {
        misaligned += (uintptr_t)this % SIZE != 0 || (uintptr_t)&other % SIZE != 0;
        memcpy((void *)this, (const void *)&other, SIZE);
        return *this;
    }
};
typedef Vector<16> uint4;
typedef Vector<8> uint2;

struct Place {
    unsigned int x, y;
};
static Place threadIdx, blockIdx, blockDim, gridDim;

template <typename... P, std::size_t... I>
static void call(void (*kernel)(P...), const long long *arguments, std::index_sequence<I...>) {
    kernel(((P)arguments[I])...);
}

/* shape: blocks in x and y, threads in x and y. */
template <typename... P> static void run(void (*kernel)(P...), const long long *shape, const long long *arguments) {
    gridDim = {(unsigned)shape[0], (unsigned)shape[1]};
    blockDim = {(unsigned)shape[2], (unsigned)shape[3]};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
            for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++)
                for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
                    call(kernel, arguments, std::index_sequence_for<P...>());
}
