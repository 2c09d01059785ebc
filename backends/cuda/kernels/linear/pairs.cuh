/*
 * Converts packed integers to pairs of f16 or bf16, the operands of mma.m16n8k16, two at a time by a few bit operations: 4 bits
 * inserted below the exponent of 128 (bf16) or 1024 (f16) are that number plus the integer; signed bytes, and floats of 4 bits, are
 * converted to their value. All conversions are exact.
 */
#if !DIGITS
/* The operand value of a stored integer 0, minus its true value. */
#if BITS == 8
#define SHIFTED (OFFSET == 2 ? -128.0f : 0.0f)
#elif FLOATS
#define SHIFTED 0.0f
#elif HALF
#define SHIFTED (OFFSET == 0 ? 1032.0f : 1024.0f)
#else
#define SHIFTED (OFFSET == 0 ? 136.0f : 128.0f)
#endif

#if __CUDA_ARCH__ >= 800
#if FLOATS
/* Pair `i` of the floats of a word. */
__device__ inline u32 pair_of(u32 word, int i) { return pair_of_floats(word, i); }
#define PAIRS 4
#elif BITS == 4
/* Pair `i` of the integers of a word, each with the offset SHIFTED. */
__device__ inline u32 pair_of(u32 word, int i) {
    u32 result;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(result) : "r"(word >> (4 * i)), "n"(HALF ? 0x64006400 : 0x43004300));
    return result;
}
#define PAIRS 4
#else
#define PAIRS 2
/* Pair `i` of the signed bytes of a word. */
__device__ inline u32 pair_of(u32 word, int i) {
    u32 result;
#if HALF
    u32 raised = word ^ 0x80808080u;
    asm("prmt.b32 %0, %1, 0x64646464, %2;" : "=r"(result) : "r"(raised), "r"(i ? 0x4342 : 0x4140));
    asm("sub.f16x2 %0, %0, %1;" : "+r"(result) : "r"(0x64806480));
#else
    /* A byte is its low seven bits minus 128 times its sign bit: 128 plus the low bits, minus 128 or 256. */
    u32 both = __byte_perm(word, 0, i ? 0x4342 : 0x4140), rest, sign;
    asm("lop3.b32 %0, %1, 0x007f007f, 0x43004300, 0xea;" : "=r"(rest) : "r"(both));
    asm("lop3.b32 %0, %1, 0x00800080, 0x43004300, 0xea;" : "=r"(sign) : "r"(both));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(sign), "r"(0xbf80bf80), "r"(rest));
#endif
    return result;
}
#endif
#endif
#endif
