/* Rows of tokens in and out of one layer's paged cache. A row is one token's K (or V): all its heads, contiguous.

   Everything but the rotary variant moves words and knows no dtype. A word is the largest of 16, 8, 4, 2 and 1 bytes
   that divides every address and length of the call (cache_ops_cuda.py finds it), so that no row needs a tail: where
   rows are not a multiple of 16 bytes, the second row is not aligned for 16 bytes either.

   blockIdx.y is the plane, 0 for K and 1 for V. threadIdx.y is the row within the block's, threadIdx.x its words.
   No thread meets another: the tests compile this file as plain C++, too, and run the threads one after another. */

typedef long long i64;

template <typename Word>
__device__ void copy_words(char *to, const char *from, i64 words) {
    for (i64 word = threadIdx.x; word < words; word += blockDim.x)
        ((Word *)to)[word] = ((const Word *)from)[word];
}

/* slab: [rows, k_words], then [rows, v_words]. slots [rows]: rows of the caches. */
template <typename Word>
__device__ void gather(const char *k_cache, const char *v_cache, i64 k_words, i64 v_words, const i64 *slots, i64 rows,
                       char *slab) {
    const i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows)
        return;
    const i64 size = sizeof(Word);
    if (blockIdx.y == 0)
        copy_words<Word>(slab + row * k_words * size, k_cache + slots[row] * k_words * size, k_words);
    else
        copy_words<Word>(slab + (rows * k_words + row * v_words) * size, v_cache + slots[row] * v_words * size, v_words);
}

/* k, v: rows at any stride, in bytes. A slab is such a k and v as well. */
template <typename Word>
__device__ void scatter(char *k_cache, char *v_cache, i64 k_words, i64 v_words, const i64 *slots, i64 rows,
                        const char *k, i64 k_stride, const char *v, i64 v_stride) {
    const i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows)
        return;
    const i64 size = sizeof(Word);
    if (blockIdx.y == 0)
        copy_words<Word>(k_cache + slots[row] * k_words * size, k + row * k_stride, k_words);
    else
        copy_words<Word>(v_cache + slots[row] * v_words * size, v + row * v_stride, v_words);
}

/* planes [gridDim.y][2]: address of a cache, bytes of one of its blocks. Copies block `source` onto `target` in each. */
template <typename Word>
__device__ void copy_block(const i64 *planes, i64 source, i64 target) {
    char *cache = (char *)planes[2 * blockIdx.y];
    const i64 bytes = planes[2 * blockIdx.y + 1], words = bytes / (i64)sizeof(Word);
    const Word *from = (const Word *)(cache + source * bytes);
    Word *to = (Word *)(cache + target * bytes);
    for (i64 word = (i64)blockIdx.x * blockDim.x + threadIdx.x; word < words; word += (i64)gridDim.x * blockDim.x)
        to[word] = from[word];
}

#define FOR_WORD(BYTES, WORD)                                                                                         \
    extern "C" __global__ void gather_##BYTES(const char *k_cache, const char *v_cache, i64 k_words, i64 v_words,     \
                                              const i64 *slots, i64 rows, char *slab) {                               \
        gather<WORD>(k_cache, v_cache, k_words, v_words, slots, rows, slab);                                          \
    }                                                                                                                 \
    extern "C" __global__ void scatter_##BYTES(char *k_cache, char *v_cache, i64 k_words, i64 v_words,                \
                                               const i64 *slots, i64 rows, const char *k, i64 k_stride,               \
                                               const char *v, i64 v_stride) {                                         \
        scatter<WORD>(k_cache, v_cache, k_words, v_words, slots, rows, k, k_stride, v, v_stride);                     \
    }                                                                                                                 \
    extern "C" __global__ void copy_block_##BYTES(const i64 *planes, i64 source, i64 target) {                        \
        copy_block<WORD>(planes, source, target);                                                                     \
    }

FOR_WORD(16, uint4)
FOR_WORD(8, uint2)
FOR_WORD(4, unsigned int)
FOR_WORD(2, unsigned short)
FOR_WORD(1, unsigned char)
