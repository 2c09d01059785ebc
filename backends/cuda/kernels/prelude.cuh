/*
 * Functions and types for every kernel of the CUDA backend, included after types.cuh and params.cuh. Compiled by NVRTC without CUDA's
 * headers, without fast math, and without flushing of subnormal numbers.
 */

/* The number of valid rows: the smallest of the row counts, at most `rows`. */
struct Extent : ExtentParams {
    /* The first two row counts; there are rarely more. */
    struct Loaded { int first, second; };

    __device__ i64 count() const { return count(load()); }
    /*
     * The same in two steps: issues the loads, and goes on. A warp stalls at the first instruction that needs a loaded value, so loads
     * issued between the two steps do not wait for the extent.
     */
    __device__ Loaded load() const { return {load_count(counts[0]), load_count(counts[1])}; }
    __device__ i64 count(Loaded loaded) const {
        if (!counts[0]) return rows;
        int least = loaded.first < loaded.second ? loaded.first : loaded.second;
        for (int i = 2; i < 8 && counts[i]; ++i) {
            int here = *counts[i];
            least = here < least ? here : least;
        }
        least = least < 0 ? 0 : least;
        return least < rows ? least : rows;
    }

private:
    /* The largest number for a null address. */
    static __device__ int load_count(const int* from) {
        int x;
        asm volatile("{\n.reg .pred there;\nsetp.ne.u64 there, %1, 0;\nmov.s32 %0, 0x7fffffff;\n@there ld.global.s32 %0, [%1];\n}"
            : "=r"(x) : "l"(from) : "memory");
        return x;
    }
};

/* A row-major matrix. */
template <typename T> struct Matrix : MatrixParams {
    __device__ T* row(i64 index) const { return (T*)first + index * stride; }
    __device__ T& at(i64 row, i64 column) const { return ((T*)first)[row * stride + column]; }
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

/* An element in another type, rounded once. In the same type it keeps its bits, those of NaN included. */
template <typename To, typename From> struct Conversion {
    static __device__ To of(From x) { return narrow<To>(widen(x)); }
};
template <typename T> struct Conversion<T, T> {
    static __device__ T of(T x) { return x; }
};
template <typename To, typename From> __device__ inline To convert(From x) { return Conversion<To, From>::of(x); }

/* Element `i` of an optional vector, or the default if the vector is absent. */
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

/* Reads 16 bytes, or one element, at an address of shared memory. */
__device__ inline Vector read_shared(u32 from) {
    Vector v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "r"(from) : "memory");
    return v;
}
template <typename T> __device__ inline T read_shared(u32 from) {
    if constexpr (sizeof(T) == 4) {
        float x;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
        return x;
    } else {
        T x;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x.bits) : "r"(from) : "memory");
        return x;
    }
}

/* Stores 16 bytes to global memory by one instruction; the compiler does not always combine stores of words. */
__device__ inline void store_vector(void* to, const Vector& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
        :: "l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]) : "memory");
}

/* Loads weights, which are read once: bypasses the L1, and marks the line as evict-first in the L2. */
__device__ inline Vector load_stream(const void* from) {
    Vector v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(from));
    return v;
}

/* Loads 8 neighbouring elements, widened. The address is a multiple of 16 bytes. */
template <typename T> __device__ inline void load_eight(const T* from, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += Lanes<T>::count) {
        Vector v = load_vector(from + i);
#pragma unroll
        for (int j = 0; j < Lanes<T>::count; ++j) x[i + j] = Lanes<T>::get(v, j);
    }
}

/* 8 neighbouring elements as they are in memory. The load is in flight until they are widened. */
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

/* Stores 8 neighbouring elements, each rounded once. */
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
 * Increments a counter of finished blocks and returns its previous value. Earlier writes of this warp are visible to the block that
 * finishes last, once that block has passed a __threadfence(). The caller need not use the result at once.
 */
__device__ inline u32 count_slice(u32* counter) {
    u32 before;
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/*
 * Programmatic dependent launch, from sm_90 on. A kernel lets the next one start at once. The next one may set itself up and read
 * weights that never change, then waits until its predecessor has finished and the predecessor's writes are visible.
 *
 * Every thread that touches memory which an earlier kernel may write, or writes memory which an earlier kernel may read, first calls
 * wait_for_predecessor() or passes a barrier after such a thread. That orders all kernels of a stream, not neighbours alone: a kernel
 * finishes only when its threads have waited, so when it has finished, its predecessor has too, and so on.
 */
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* The first statement of kernels that have nothing to do before the wait. */
__device__ inline void launch_dependents_and_wait() {
    launch_dependents();
    wait_for_predecessor();
}

/* Loops over the columns of a plane with the first dimension of the grid, over rows with the second. */
#define FOR_ROWS(row, rows) for (i64 row = blockIdx.y; row < (rows); row += gridDim.y)
#define FOR_COLUMNS(column, columns) \
    for (i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x; column < (columns); column += (i64)gridDim.x * blockDim.x)
