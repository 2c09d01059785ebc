/*
 * Splits f16 or bf16 activations into three bytes each, for products with integers: the 128 values of a span are v * 2^k with a
 * common k, v = 65536 h + 256 m + l, and the largest v has 22 bits. Integer sums start at the bits of 1.5 * 2^23; since they stay
 * below 2^22, the final bits are valid floats.
 */
#if __CUDA_ARCH__ >= 800
/* 1.5 * 2^23. */
#define RAISED 0x4b400000
#define RAISED_BY 12582912.0f

/* The larger of two pairs of magnitudes; NaN is larger than all numbers. */
__device__ inline u32 larger_pair(u32 a, u32 b) {
    u32 result;
#if HALF
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#endif
    return result;
}

/*
 * The low, middle and high bytes of each lane's 8 activations, in the order in which weights of this bit width are multiplied.
 * Whole warps must call; each half warp has a span.
 */
template <typename T, int Bits> struct ThreeBytes {
    u32 words[3][2];
    u32 exponent, bounded;

    __device__ inline ThreeBytes(const Vector& v) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) most = larger_pair(most, v.word[i] & 0x7fff7fffu);
        most = larger_pair(most, most >> 16) & 0xffff;
        /* Magnitudes have the order of their bits, NaN last. */
        bool upper = threadIdx.x % 32 >= 16;
        u32 low = __reduce_max_sync(0xffffffffu, upper ? 0 : most), high = __reduce_max_sync(0xffffffffu, upper ? most : 0);
        T largest = {(u16)(upper ? high : low)};
        exponent = __float_as_uint(widen(largest)) >> 23;
        /* Bounded so that the factor does not overflow: what is dropped then is below the smallest normal number. */
        bounded = exponent < 22 ? 22 : exponent;
        float factor = __uint_as_float((275 - bounded) << 23);
        u32 value[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            /* As an integer in the low bits of a float, plus 128 for every byte. */
            value[i] = __float_as_uint(__fmaf_rn(Lanes<T>::get(v, i), factor, RAISED_BY)) + (0x808080 - 0x400000);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = Bits == 4 ? 2 * half : 4 * half, j = Bits == 4 ? i + 1 : i + 2, next = Bits == 4 ? 4 : 1;
            u32 a = value[i], b = value[i + next], c = value[j], d = value[j + next];
            u32 first = __byte_perm(a, b, 0x5140), second = __byte_perm(c, d, 0x5140);
            words[0][half] = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
            words[1][half] = __byte_perm(first, second, 0x7632) ^ 0x80808080u;
            words[2][half] = __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410) ^ 0x80808080u;
        }
    }
    /* The factor of a product; NaN if an activation of the span is not finite. */
    __device__ inline float scale() const { return __uint_as_float(exponent == 255 ? 0x7fc00000u : (bounded - 21) << 23); }
};
#endif
