/* How a row is quantised: its largest value, 127 of which the scale is, and integers by it. */

/* The largest of a warp, in every lane; none is below 0 or NaN, so that their bits compare as they do. */
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

/* To 2^-23 relative. */
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
 * The same without a division, given about 1 / scale: up to 127 the product is within 4e-5 of the quotient, so both are rounded to the
 * same integer where the product is no closer than that to the middle of two. The others are divided, and what is not finite.
 */
__device__ inline int quantise(float value, float scale, float inverse) {
    float q = value * inverse, integer = rintf(q);
    return fabsf(q - integer) < 0.4999f ? (int)fminf(fmaxf(integer, -127.0f), 127.0f) : quantise(value, scale);
}
