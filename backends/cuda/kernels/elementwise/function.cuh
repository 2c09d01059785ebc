/*
 * Activation functions. FUNCTION is 1 relu, 2 silu, 3 gelu with erf, 4 gelu with tanh, 5 x / (1 + exp(-1.702 x)), 6 tanh.
 * Comparisons are written so that NaN propagates.
 */
__device__ inline float apply(float x) {
#if FUNCTION == 1
    return x < 0.0f ? 0.0f : x;
#elif FUNCTION == 2
    return x / (1.0f + expf(-x));
#elif FUNCTION == 3
    return 0.5f * x * (x < -1.0f ? erfcf(x * -0.70710678118654752f) : 1.0f + erff(x * 0.70710678118654752f));
#elif FUNCTION == 5
    return x / (1.0f + expf(-1.702f * x));
#elif FUNCTION == 4
    /* (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)): no cancellation for large negative x. */
    float z = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * z));
#elif FUNCTION == 6
    return tanhf(x);
#else
#error FUNCTION is not the number of an activation
#endif
}

/* The function of a gate times the up element plus an offset, both clamped if there is a limit. */
__device__ inline float gated(float gate, float up, float limit, float up_offset) {
    if (limit > 0.0f) {
        if (gate > limit) gate = limit;
        if (up > limit) up = limit;
        if (up < -limit) up = -limit;
    }
    return apply(gate) * (up + up_offset);
}

/*
 * The same for 16-bit results, with a relative error of 2^-16: uses the hardware's powers of 2 and reciprocals. A power so small
 * that it is flushed to zero makes no difference in a sum with 1; gelu with erf is zero from x = -13 on, where it is below 2^-120.
 */
__device__ inline float apply_quickly(float x) {
#if FUNCTION == 2 || FUNCTION == 4 || FUNCTION == 5
    float power = -1.4426950408889634f * x, result;
#if FUNCTION == 4
    power *= 2.0f * 0.79788456080286536f * (1.0f + 0.044715f * x * x);
#elif FUNCTION == 5
    power *= 1.702f;
#endif
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(power));
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return x * result;
#elif FUNCTION == 3
    /*
     * With z = |x| / sqrt(2) and t = 1 / (1 + z / 2), erfc(z) / 2 = t 2^(q(t) - z^2 log2 e). q is a polynomial of degree 5, fitted for
     * the least relative error of erfc, 2^-17, over z from 0 to 10.5. Unlike erff and erfcf, this has no branches.
     */
    float t, power, tail;
    asm("rcp.approx.f32 %0, %1;" : "=f"(t) : "f"(1.0f + 0.35355339059327379f * fabsf(x)));
    power = 0.33007461f;
    power = power * t - 1.0231460f;
    power = power * t + 0.68454874f;
    power = power * t + 0.36708412f;
    power = power * t + 1.4686830f;
    power = power * t - 2.8272336f;
    power = power - 0.72134752044448170f * x * x;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(tail) : "f"(power));
    tail *= t;
    return x * (x < 0.0f ? tail : 1.0f - tail);
#else
    return apply(x);
#endif
}
