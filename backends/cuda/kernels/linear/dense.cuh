/*
 * Dense weights on CUDA cores (skinny.cu, stream.cu): 16 bytes of a row at a time, and the matching elements of x.
 */
#if FORMAT == FORMAT_F32
#define WIDTH 4
typedef Lanes<float> Elements;
#elif FORMAT == FORMAT_F16
#define WIDTH 8
typedef Lanes<f16> Elements;
#else
#define WIDTH 8
typedef Lanes<bf16> Elements;
#endif

/* `WIDTH` elements of x; zeros past the end. */
__device__ inline void load_x(const X* from, i64 left, float (&out)[WIDTH]) {
#if X_VECTORS
#pragma unroll
    for (int i = 0; i < WIDTH / Lanes<X>::count; ++i) {
        Vector v = load_vector(from + i * Lanes<X>::count);
#pragma unroll
        for (int j = 0; j < Lanes<X>::count; ++j) out[i * Lanes<X>::count + j] = Lanes<X>::get(v, j);
    }
#else
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) out[i] = i < left ? widen(from[i]) : 0.0f;
#endif
}
