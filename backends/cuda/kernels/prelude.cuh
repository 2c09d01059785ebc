/*
 * What every kernel of the CUDA backend may use. Compiled by NVRTC without any header of CUDA's.
 *
 * Element types are structs, so that no arithmetic happens in them by accident: values are widened to float when they are
 * read and rounded once when they are written. No fast mathematics, no flushing of subnormal numbers.
 */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
typedef float f32;

/* 16 bytes, the widest load there is. */
struct alignas(16) Vector { u32 word[4]; };

/* How many rows are real: the smallest of those said in device memory, at most `rows`. Those that say something come first. */
struct Extent {
    const int* said[8];
    i64 rows;

    /* What the first two say: there are seldom more. */
    struct Asked { int first, second; };

    __device__ i64 count() const { return count(ask()); }
    /*
     * The same in two steps: asks, and goes on. A warp stops at the first instruction that needs what it has asked for, so reads that
     * begin between the two do not wait for the extent.
     */
    __device__ Asked ask() const { return {ask_for(said[0]), ask_for(said[1])}; }
    __device__ i64 count(Asked asked) const {
        if (!said[0]) return rows;
        int least = asked.first < asked.second ? asked.first : asked.second;
        for (int i = 2; i < 8 && said[i]; ++i) {
            int here = *said[i];
            least = here < least ? here : least;
        }
        least = least < 0 ? 0 : least;
        return least < rows ? least : rows;
    }

private:
    /* The largest number, where there is nothing to read. */
    static __device__ int ask_for(const int* from) {
        int x;
        asm volatile("{\n.reg .pred there;\nsetp.ne.u64 there, %1, 0;\nmov.s32 %0, 0x7fffffff;\n@there ld.global.s32 %0, [%1];\n}"
            : "=r"(x) : "l"(from) : "memory");
        return x;
    }
};

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }
__device__ inline bool is_nan(float x) { return x != x; }

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ inline float widen(f16 x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
}

template <typename T> __device__ inline T narrow(float x);
template <> __device__ inline float narrow<float>(float x) { return x; }
template <> __device__ inline f16 narrow<f16>(float x) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
}
template <> __device__ inline bf16 narrow<bf16>(float x) {
    bf16 result;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#else
    u32 bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    result.bits = nan ? 0x7fff : (u16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
#endif
    return result;
}

/* An optional vector: element `i`, or what stands for it. */
template <typename T> __device__ inline float or_else(const T* vector, i64 i, float missing) {
    return vector ? widen(vector[i]) : missing;
}

/* Element `i` of 16 bytes of T, widened. Index with constants only. */
template <typename T> struct Lanes;
template <> struct Lanes<float> {
    static constexpr int count = 4;
    static __device__ inline float get(const Vector& v, int i) { return __uint_as_float(v.word[i]); }
};
template <> struct Lanes<bf16> {
    static constexpr int count = 8;
    static __device__ inline float get(const Vector& v, int i) {
        u32 word = v.word[i / 2];
        return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    }
};
template <> struct Lanes<f16> {
    static constexpr int count = 8;
    static __device__ inline float get(const Vector& v, int i) {
        u32 word = v.word[i / 2];
        f16 half = {(u16)(i % 2 ? word >> 16 : word & 0xffffu)};
        return widen(half);
    }
};

__device__ inline Vector load_vector(const void* from) { return *(const Vector*)from; }

/* To global memory, at once: stores of its words the compiler puts together again, but not always. */
__device__ inline void store_vector(void* to, const Vector& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
        :: "l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]) : "memory");
}

/* Weights are read once: past the L1, and first to leave the L2. */
__device__ inline Vector load_stream(const void* from) {
    Vector v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(from));
    return v;
}

/* 8 neighbouring elements, widened. They begin at a multiple of 16 bytes. */
template <typename T> __device__ inline void load_eight(const T* from, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += Lanes<T>::count) {
        Vector v = load_vector(from + i);
#pragma unroll
        for (int j = 0; j < Lanes<T>::count; ++j) x[i + j] = Lanes<T>::get(v, j);
    }
}

/* 8 neighbouring elements as they are in memory: on their way until they are widened. */
template <typename T> struct Eight {
    Vector of[8 / Lanes<T>::count];

    __device__ inline void read(const T* from) {
#pragma unroll
        for (int i = 0; i < 8 / Lanes<T>::count; ++i) of[i] = load_vector(from + i * Lanes<T>::count);
    }
    __device__ inline void widen_to(float (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = Lanes<T>::get(of[i / Lanes<T>::count], i % Lanes<T>::count);
    }
};

/* 8 neighbouring elements, each rounded once. */
template <typename T> __device__ inline void store_eight(T* to, const float (&x)[8]) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = narrow<T>(x[i * 2]).bits | (u32)narrow<T>(x[i * 2 + 1]).bits << 16;
    store_vector(to, v);
}
__device__ inline void store_eight(float* to, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        Vector v;
#pragma unroll
        for (int j = 0; j < 4; ++j) v.word[j] = __float_as_uint(x[i + j]);
        store_vector(to + i, v);
    }
}

__device__ inline float warp_sum(float x) {
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

/* The sum over a block, in every thread and in the same order every time. Up to 1024 threads; all must call. */
__device__ inline float block_sum(float x) {
    __shared__ float partial[32];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    int warps = (blockDim.x + 31) / 32;
    float total = threadIdx.x % 32 < warps ? partial[threadIdx.x % 32] : 0.0f;
    return warp_sum(total);
}

/*
 * Counts a block in at a counter and returns how many were counted before. What this warp wrote before is visible to the block
 * that finds itself the last, once that block has passed a __threadfence(). The caller need not look at the result at once.
 */
__device__ inline u32 count_slice(u32* counter) {
    u32 before;
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/*
 * Programmatic dependent launch, from sm_90 on. A kernel lets the next one start at once, which then may do what depends on
 * nothing (set up, read weights that never change), and waits until the one before has finished and its writes are visible.
 *
 * Every thread that touches anything a kernel before may write, or writes memory a kernel before may read, comes behind
 * await_previous() or behind a barrier that such a thread has passed. That orders all kernels of a stream, not neighbours
 * alone: a kernel finishes only when its threads have waited, so when it has finished, so has the one before it, and so on.
 */
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* What kernels begin with that have nothing to do ahead of their turn. */
__device__ inline void take_turn() {
    let_next_start();
    await_previous();
}

/* Loops over the columns of a plane with the first dimension of the grid, over rows with the second. */
#define FOR_ROWS(row, rows) for (i64 row = blockIdx.y; row < (rows); row += gridDim.y)
#define FOR_COLUMNS(column, columns) \
    for (i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x; column < (columns); column += (i64)gridDim.x * blockDim.x)
