/*
 * The exchange of results between blocks, and small functions that all parts of the decoder kernel use.
 */
#if __CUDA_ARCH__ >= 900
/* Loads results of other blocks, bypassing the L1. */
__device__ inline Vector load_fresh(const void* from) {
    Vector v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(from));
    return v;
}
__device__ inline float2 load_fresh_pair(const void* from) {
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
    return v;
}
__device__ inline void leave(X* to, X value) {
    /* Arithmetic produces NaNs with other bits; this costs nothing and makes sure that no result equals the sentinel. */
    u16 bits = value.bits == 0xffffu ? 0x7fffu : value.bits;
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" :: "l"(to), "h"(bits) : "memory");
}
__device__ inline u32 certain(u32 pair) {
    u32 low = (pair & 0xffffu) == 0xffffu ? 0x8000u : 0u, high = pair >= 0xffff0000u ? 0x80000000u : 0u;
    return pair & ~(low | high);
}
__device__ inline void leave(X* to, uint2 four) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};"
        :: "l"(to), "r"(certain(four.x)), "r"(certain(four.y)) : "memory");
}
__device__ inline float certain(float x) { return __float_as_uint(x) == 0xffffffffu ? __uint_as_float(0x7fffffffu) : x; }
__device__ inline void leave(float* to, float a, float b, float c, float d) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};"
        :: "l"(to), "f"(certain(a)), "f"(certain(b)), "f"(certain(c)), "f"(certain(d)) : "memory");
}

__device__ inline void leave(float* to, float value) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" :: "l"(to), "f"(certain(value)) : "memory");
}

/* Whether one of 8 elements is still the sentinel. */
__device__ inline bool lacks(const Vector& v) {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= (~v.word[i] - 0x00010001u) & v.word[i];
    return found & 0x80008000u;
}
__device__ inline u32 larger_of(u32 a, u32 b) { return a > b ? a : b; }
__device__ inline u32 largest_word(const Vector& v) {
    return larger_of(larger_of(v.word[0], v.word[1]), larger_of(v.word[2], v.word[3]));
}

__device__ inline X load_fresh_one(const X* from) {
    X value;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(value.bits) : "l"(from));
    return value;
}

__device__ inline float load_fresh_float(const float* from) {
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(from));
    return value;
}

/* Calls `use` with the index and the value of each 8 of COUNT elements of other blocks, by all consumer warps, once they are complete. From
 * COUNT to END it calls `use` with zeros. */
template <int COUNT, int END = COUNT, typename Use> __device__ inline void for_vectors(const X* x, u64 name, Use use) {
#pragma unroll 1
    for (int base = threadIdx.x * 8; base < END; base += VECTORS_AT_ONCE * MULTIPLIERS * 8) {
        Vector own[VECTORS_AT_ONCE];
#pragma unroll
        for (int o = 0; o < VECTORS_AT_ONCE; ++o) {
            int at = base + o * MULTIPLIERS * 8;
            own[o] = Vector{};
            if (at < COUNT) own[o] = load_fresh(x + at);
        }
        u32 polls = 0;
        bool all;
        do {
            all = true;
#pragma unroll
            for (int o = 0; o < VECTORS_AT_ONCE; ++o) {
                if (lacks(own[o])) {
                    all = false;
                    own[o] = load_fresh(x + base + o * MULTIPLIERS * 8);
                }
            }
            count_poll(polls, name);
        } while (!all);
#pragma unroll
        for (int o = 0; o < VECTORS_AT_ONCE; ++o) {
            int at = base + o * MULTIPLIERS * 8;
            if (at >= END) break;
            use(at, own[o]);
        }
    }
}

/* Writes the sentinel to `bytes` bytes, by `count` threads, of which this one begins at byte `at`. */
__device__ inline void clear(void* from, i64 bytes, i64 at, int count) {
    Vector ones = {{~0u, ~0u, ~0u, ~0u}};
#pragma unroll 1
    for (; at < bytes; at += count * 16) *(Vector*)((u8*)from + at) = ones;
}

/* A barrier of the consumer warps. */
__device__ inline void meet() { asm volatile("bar.sync 1, %0;" :: "n"(MULTIPLIERS) : "memory"); }

__device__ inline u32 pair_of(float low, float high) { return (u32)narrow<X>(low).bits | (u32)narrow<X>(high).bits << 16; }

/* Exponentials are powers of 2. */
#define LOG2_OF_E 1.44269504088896f
__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/*
 * The weight of a key whose score differs from the maximum by `below`, zero or negative: a power of 2. In f16 the largest weight is 2^15
 * instead of 1, so that weights keep all 11 bits until they are 2^29 times smaller: a large value can make up for a small weight. The
 * sum of the weights is larger by the same factor.
 */
__device__ inline float weight_of(float below) { return power(HALF ? below + 15.0f : below); }

/* A block's share of attention: the keys from `from` to below `keys`, in the units of 16 from `first` to below `units`; the part of the
 * heads; the split, of `live` splits; and the slot of the token in the cache. `end` is the first key after the token. */
struct Share {
    int end, from, keys, first, units, live, part, split, place;
    /* The number of results that the ranks had summed before this launch, modulo 2^32. */
    u32 launched;

    /* Sets what depends on the window: the number of keys before `end` that the token attends to, 0 for all. */
    __device__ void look(int window) {
        from = WINDOWS && window && window < end ? end - window : 0;
        first = WINDOWS ? from / UNIT : 0;
        units = keys > from ? (keys + UNIT - 1) / UNIT : first;
        live = (units - first + WARPS - 1) / WARPS;
        if (MERGED && units - first <= ALONE * WARPS) live = 1;
        live = live < 1 ? 1 : live > SPLITS ? SPLITS : live;
    }
};
#endif
