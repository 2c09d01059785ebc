/*
 * The function of an activation. FUNCTION is 1 relu, 2 silu, 3 gelu with erf, 4 gelu with tanh. Comparisons are written so that
 * NaN goes through.
 */
__device__ inline float apply(float x) {
#if FUNCTION == 1
    return x < 0.0f ? 0.0f : x;
#elif FUNCTION == 2
    return x / (1.0f + expf(-x));
#elif FUNCTION == 3
    return 0.5f * x * (x < -1.0f ? erfcf(x * -0.70710678118654752f) : 1.0f + erff(x * 0.70710678118654752f));
#else
    /* (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)): no cancellation for large negative x. */
    float z = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * z));
#endif
}
