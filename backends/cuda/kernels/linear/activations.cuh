/*
 * Activations of a few rows, normed on the way into shared memory: what the kernels at memory speed begin with.
 */
#define BLOCK (WARPS * 32)

#if __CUDA_ARCH__ >= 800 && !ACT8
/* 8 elements, rounded and put together. */
__device__ inline Vector pack(const float (&from)[8]) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = (u32)narrow<X>(from[2 * i]).bits | (u32)narrow<X>(from[2 * i + 1]).bits << 16;
    return v;
}

/* A vector of 8 of a norm's parameters. */
template <typename T> __device__ inline void load_eight(const T* from, i64 at, float missing, float (&out)[8]) {
    if (!from) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = missing;
        return;
    }
#pragma unroll
    for (int part = 0; part < 8 / Lanes<T>::count; ++part) {
        Vector v = load_vector(from + at + part * Lanes<T>::count);
#pragma unroll
        for (int i = 0; i < Lanes<T>::count; ++i) out[part * Lanes<T>::count + i] = Lanes<T>::get(v, i);
    }
}
#endif

struct Norm {
    const G* gain;
    const SHIFT* shift;
    float eps, offset;
};

#if __CUDA_ARCH__ >= 800 && !ACT8
/* Norms 8 elements, given the weights and biases that are theirs. */
__device__ inline void scale_eight(const Norm& norm, const float (&gain)[8], const float (&shift)[8], float mean, float rest,
                                   float scale, float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#if NORM == 2
        values[i] = ((values[i] - mean) - rest) * scale * gain[i] + shift[i];
#else
        values[i] = values[i] * scale * (gain[i] + norm.offset);
#endif
    }
}

__device__ inline void widen_eight(const Vector& v, float (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = Lanes<X>::get(v, i);
}

/* The sum over the block, or over one warp where each has a row of its own. */
__device__ inline float sum_of_row(float x, float* scratch) {
    x = warp_sum(x);
#if TOKENS == 1
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) x += scratch[i];
#endif
    return x;
}

/*
 * Puts the normed activations, inputs `begin` to `begin + count` of them, into shared memory. Rows past the extent too: there
 * is memory for them, what comes of them goes nowhere, and so no read has to wait for the extent.
 */
__device__ inline void stage(const X* x, i64 x_row, i64 inputs, i64 begin, i64 count, const Norm& norm, u8* to, float* scratch) {
#if NORM && TOKENS == 1 && OWN > 0
    /* One short row: everything is read at once, and stays in registers. */
    float values[OWN][8], gain[OWN][8], shift[OWN][8];
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        i64 at = (threadIdx.x + o * BLOCK) * 8;
        Vector v = {};
        if (at < inputs) {
            v = load_vector(x + at);
            load_eight(norm.gain, at, 1.0f, gain[o]);
#if NORM == 2
            load_eight(norm.shift, at, 0.0f, shift[o]);
#endif
        }
        widen_eight(v, values[o]);
    }
    float mean = 0.0f, rest = 0.0f, squares = 0.0f;
#if NORM == 2
    float sum = 0.0f, left = 0.0f;
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += values[o][i];
    }
    mean = sum_of_row(sum, scratch) / (float)inputs;
#endif
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        if ((threadIdx.x + o * BLOCK) * 8 >= inputs) break;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float value = values[o][i] - mean;
            squares += value * value;
#if NORM == 2
            left += value;
#endif
        }
    }
    squares = sum_of_row(squares, scratch) / (float)inputs;
#if NORM == 2
    /* What the mean lost to rounding is found again. */
    rest = sum_of_row(left, scratch) / (float)inputs;
    squares -= rest * rest;
    squares = squares > 0.0f || is_nan(squares) ? squares : 0.0f;
#endif
    float scale = 1.0f / sqrtf(squares + norm.eps);
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        i64 at = (threadIdx.x + o * BLOCK) * 8;
        if (at >= begin + count) break;
        if (at < begin) continue;
        scale_eight(norm, gain[o], shift[o], mean, rest, scale, values[o]);
        *(Vector*)(to + (at - begin) * 2) = pack(values[o]);
    }
#elif NORM
    /* One row is shared by all warps; of more, each warp has its own. */
    const int lanes = TOKENS == 1 ? BLOCK : 32, first = TOKENS == 1 ? threadIdx.x : threadIdx.x % 32;
    for (i64 token = TOKENS == 1 ? 0 : threadIdx.x / 32; token < TOKENS; token += TOKENS == 1 ? 1 : WARPS) {
        const X* row = x + token * x_row;
        u8* to_row = to + token * X_PITCH;
        float mean = 0.0f, rest = 0.0f, squares = 0.0f;
#if NORM == 2
        float sum = 0.0f;
#pragma unroll 4
        for (i64 at = first; at < inputs / 8; at += lanes) {
            float values[8];
            widen_eight(load_vector(row + at * 8), values);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += values[i];
        }
        mean = sum_of_row(sum, scratch) / (float)inputs;
        float left = 0.0f;
#endif
#pragma unroll 4
        for (i64 at = first; at < inputs / 8; at += lanes) {
            float values[8];
            widen_eight(load_vector(row + at * 8), values);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float value = values[i] - mean;
                squares += value * value;
#if NORM == 2
                left += value;
#endif
            }
        }
        squares = sum_of_row(squares, scratch) / (float)inputs;
#if NORM == 2
        /* What the mean lost to rounding is found again. */
        rest = sum_of_row(left, scratch) / (float)inputs;
        squares -= rest * rest;
        squares = squares > 0.0f || is_nan(squares) ? squares : 0.0f;
#endif
        float scale = 1.0f / sqrtf(squares + norm.eps);
#pragma unroll 2
        for (i64 at = first; at < count / 8; at += lanes) {
            float values[8], gain[8], shift[8];
            widen_eight(load_vector(row + begin + at * 8), values);
            load_eight(norm.gain, begin + at * 8, 1.0f, gain);
#if NORM == 2
            load_eight(norm.shift, begin + at * 8, 0.0f, shift);
#endif
            scale_eight(norm, gain, shift, mean, rest, scale, values);
            *(Vector*)(to_row + at * 16) = pack(values);
        }
    }
#else
    int pieces = (int)(count / 8);
#pragma unroll 4
    for (int item = threadIdx.x; item < TOKENS * pieces; item += BLOCK) {
        int token = item / pieces, at = item % pieces;
        *(Vector*)(to + token * X_PITCH + at * 16) = load_vector(x + token * x_row + begin + at * 8);
    }
#endif
}
#endif

