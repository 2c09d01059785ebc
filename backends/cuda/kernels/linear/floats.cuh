/*
 * Floats of 4 bits (E2M1: a sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 and 6) in packed weights.
 *
 * A word has eight, in pairs of neighbours. Their bits lie such that few operations move a pair to where a pair of bf16 has its
 * sign, the low end of its exponent, and the high end of its mantissa: bits 15, 8, 7 and 6 of either half. What results are the
 * floats times 2^-126, also if they are subnormal. Bits of element 2 p, from the sign; those of element 2 p + 1 are in the other
 * half of the word (weight/packing.rs has the same table):
 *
 *   pair 0: 15,  8,  7,  6, in place
 *   pair 1:  9,  2,  1,  0, six below
 *   pair 2: 19, 12, 11, 10, four above
 *   pair 3:  5, 30, 29, ten below; the mantissa at 4, two below
 */
__device__ inline u32 rotate_left(u32 word, int by) { return __funnelshift_l(word, word, by); }

/* A pair as bf16, times 2^-126. */
__device__ inline u32 small_floats(u32 word, int pair) {
    if (pair == 0) return word & 0x81c081c0u;
    if (pair == 1) return word << 6 & 0x81c081c0u;
    if (pair == 2) return rotate_left(word, 28) & 0x81c081c0u;
    return rotate_left(word, 10) & 0x81808180u | word << 2 & 0x00400040u;
}

#if __CUDA_ARCH__ >= 800
/* A pair as operand of mma.m16n8k16: as f16 with HALF, else as bf16. */
__device__ inline u32 pair_of_floats(u32 word, int pair) {
    u32 result, small = small_floats(word, pair);
#if HALF
    /* The exponent of f16 begins three bits above that of bf16; its smallest is 2^-14. */
    small = small & 0x80008000u | (small & 0x01c001c0u) << 3;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(result) : "r"(small), "r"(0x74007400));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(small), "r"(0x7e807e80), "r"(0x80008000));
#endif
    return result;
}
#endif

/* Whether the kernels of experts multiply weights that are 2^-32 of their value, made by one product from floats that are 2^-126 of
 * theirs. Scales are powers of two, so that is exact. */
#define SMALL (FLOATS && !HALF)
#if __CUDA_ARCH__ >= 800
/* The factors of the floats of two groups: their scales, powers of two up to 2^33, times 2^94. */
__device__ inline u32 small_factors(u32 scales) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(scales), "r"(0x6e806e80u), "r"(0x80008000u));
    return result;
}
/* A pair as bf16, times 2^-32 (SMALL_UNIT is the inverse) and the scale of its group: exact. One product, by a pair of its
 * group's factor, brings it there from 2^-126. */
#define SMALL_UNIT 4294967296.0f
__device__ inline u32 scaled_floats(u32 word, int pair, u32 factor) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(small_floats(word, pair)), "r"(factor), "r"(0x80008000u));
    return result;
}
#endif

/* A float of a word. */
__device__ inline float float_of(u32 word, int i) {
    u32 pair = small_floats(word, i / 2);
    return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16) * __uint_as_float(253u << 23);
}
