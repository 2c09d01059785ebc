/*
 * The elements of a token that a thread normalises together: how it loads them.
 */
#if __CUDA_ARCH__ >= 900
/* Consecutive elements of the token that a thread normalises together: few, so that many threads take part. */
#define TOGETHER (PLANES ? 8 : HIDDEN <= 2 * MULTIPLIERS ? 2 : HIDDEN <= 4 * MULTIPLIERS ? 4 : 8)
#define OWN ((HIDDEN + TOGETHER * MULTIPLIERS - 1) / (TOGETHER * MULTIPLIERS))
struct Some { u32 word[TOGETHER / 2]; };

__device__ inline Some load_some(const void* from) {
    Some v;
    if constexpr (TOGETHER == 2) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v.word[0]) : "l"(from));
    } else if constexpr (TOGETHER == 4) {
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
            : "=r"(v.word[0]), "=r"(v.word[TOGETHER / 2 - 1]) : "l"(from));
    } else {
        Vector all = load_fresh(from);
#pragma unroll
        for (int i = 0; i < TOGETHER / 2; ++i) v.word[i] = all.word[i % 4];
    }
    return v;
}
__device__ inline bool lacks(const Some& v) {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < TOGETHER / 2; ++i) found |= (~v.word[i] - 0x00010001u) & v.word[i];
    return found & 0x80008000u;
}
/* Loads this thread's elements of the row at `from` until none is missing. All that are missing are loaded in each round: one after the
 * other they would take a trip each. */
__device__ inline void await_some(const u8* from, Some (&own)[OWN], u64 name) {
    u32 polls = 0;
    bool all;
    do {
        all = true;
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
            if (lacks(own[o])) {
                all = false;
                own[o] = load_some(from + (threadIdx.x + o * MULTIPLIERS) * (TOGETHER * 2));
            }
        }
        count_poll(polls, name);
    } while (!all);
}
__device__ inline float element(const Some& v, int i) {
    X x = {(u16)(i % 2 ? v.word[i / 2] >> 16 : v.word[i / 2] & 0xffffu)};
    return widen(x);
}
/* Loads parameters of a norm. */
template <typename T> __device__ inline void load_together(const T* from, float missing, float (&out)[TOGETHER]) {
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) out[i] = missing;
    if (!from) return;
    if constexpr (TOGETHER == 8) {
        load_eight(from, out);
    } else {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) out[i] = widen(from[i]);
    }
}
#endif
