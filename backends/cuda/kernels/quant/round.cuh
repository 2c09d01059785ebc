/* Quantises a row: its maximum, its scale (maximum / 127), and the rounded integers. */

/* The maximum over a warp, in every lane. No value is negative or NaN, so their bits compare as integers. */
__device__ inline float warp_maximum(float x) {
#if __CUDA_ARCH__ >= 800
    u32 most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(__float_as_uint(x)));
    return __uint_as_float(most);
#else
    for (int distance = 16; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
#endif
}

/* With a relative error of 2^-23. */
__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline int quantise(float value, float scale) {
    float q = scale > 0.0f ? rintf(value / scale) : 0.0f;
    return (int)fminf(fmaxf(q, -127.0f), 127.0f);
}

/*
 * Rounds eight values to bytes, given about 1 / scale. Up to 127 the product with it is within 4e-5 of the quotient, so both
 * round to the same integer unless the product is that close to the middle between two integers. If all eight are far enough from
 * it, no division is needed; otherwise all eight are divided, also if one is not finite. Adding 1.5 * 2^23 leaves the integer in
 * the last bits.
 */
__device__ inline uint2 quantise_eight(const float (&value)[8], float scale, float inverse) {
    const float shift = 12582912.0f;
    u32 bytes[8];
    bool sure = true;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        float sum = __fmaf_rn(value[k], inverse, shift);
        sure &= fabsf(__fmaf_rn(value[k], inverse, -__fadd_rn(sum, -shift))) < 0.4999f;
        bytes[k] = __float_as_uint(sum);
    }
    if (!sure) {
#pragma unroll
        for (int k = 0; k < 8; ++k) bytes[k] = (u32)quantise(value[k], scale);
    }
    u32 words[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        u32 low = __byte_perm(bytes[h * 4], bytes[h * 4 + 1], 0x0040), high = __byte_perm(bytes[h * 4 + 2], bytes[h * 4 + 3], 0x0040);
        words[h] = __byte_perm(low, high, 0x5410);
    }
    return make_uint2(words[0], words[1]);
}
