/*
 * Loads and normalises the activations of a few rows into shared memory: the first step of the bandwidth-bound GEMM kernels.
 */
#define BLOCK (WARPS * 32)

#if __CUDA_ARCH__ >= 800 && DIGITS != 1
/* Rounds 8 elements and packs them. */
__device__ inline Vector pack(const float (&from)[8]) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = (u32)narrow<X>(from[2 * i]).bits | (u32)narrow<X>(from[2 * i + 1]).bits << 16;
    return v;
}

/* A vector of 8 parameters of a norm. */
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

#if __CUDA_ARCH__ >= 800 && DIGITS != 1
/* Prefetches a norm's parameters into the L1 while the preceding kernel still runs, if they never change. */
template <typename T> __device__ inline void bring(const T* from, int count) {
    const int line = 128 / sizeof(T);
    for (int at = threadIdx.x * line; from && at < count; at += BLOCK * line) {
        asm volatile("prefetch.global.L1 [%0];" :: "l"(from + at));
    }
}
__device__ inline void bring_parameters(const Norm& norm, int inputs) {
    bring(norm.gain, inputs);
    if (NORM == 2) bring(norm.shift, inputs);
}

/* Normalises 8 elements, given their weights and biases. */
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

/* Warps per row in the norm, for at most 8 rows. */
#define ROW_WARPS (TOKENS == 1 ? WARPS : TOKENS == 2 ? WARPS / 2 : TOKENS <= 4 ? WARPS / 4 : WARPS / 8)

/* The sum over the warps of a row, in the same order every time. All threads of the block must call. */
__device__ inline float sum_of_row(float x, float* scratch) {
    x = warp_sum(x);
#if ROW_WARPS > 1
    int warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[warp] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_WARPS; ++i) x += scratch[warp / ROW_WARPS * ROW_WARPS + i];
#endif
    return x;
}

/*
 * Reads the activations, inputs `begin` to `begin + count`, normalises them and passes them to `put(token, at, real, vector)`, 8
 * at a time; `at` is the index of the vector from `begin`. The lanes of a warp call `put` together, for consecutive vectors. With
 * `Whole`, `put` is called up to a multiple of 32 vectors; vectors before the first or past the last have `real` false. Rows past
 * the extent are read too, because their memory exists, and their results are discarded; so no read has to wait for the extent.
 *
 * Of rows past `last`, which do not exist, row `last` is read instead, and their results are discarded.
 *
 * `meanwhile` is called once, after the first loads were issued, so that its own memory requests do not delay them.
 */
template <bool Whole, typename Put, typename Meanwhile>
__device__ inline void stage(const X* x, i64 x_row, int last, i64 inputs, i64 begin, i64 count, const Norm& norm, float* scratch,
                             const Put& put, const Meanwhile& meanwhile) {
    const int eights = (int)(count / 8);
    [[maybe_unused]] const int whole = (eights + 31) / 32 * 32;
#if NORM
    const int lanes = 32 * ROW_WARPS, token = threadIdx.x / lanes, first = threadIdx.x % lanes;
    const bool mine = token < TOKENS;
    const X* row = x + (token < last ? token : last) * x_row;
    float mean = 0.0f, rest = 0.0f, squares = 0.0f, sum = 0.0f, left = 0.0f;
    auto add_up = [&](const Vector& v) {
        float values[8];
        widen_eight(v, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += values[i];
    };
    auto add_squares = [&](const Vector& v) {
        float values[8];
        widen_eight(v, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float value = values[i] - mean;
            squares += value * value;
            left += value;
        }
    };
    struct Parameters { float gain[8], shift[8]; };
    auto load_parameters = [&](i64 at, Parameters& own) {
        load_eight(norm.gain, at * 8, 1.0f, own.gain);
#if NORM == 2
        load_eight(norm.shift, at * 8, 0.0f, own.shift);
#endif
    };
    float scale;
    /* The scale of a row, from the sum in `squares`. */
    auto conclude_row = [&]() {
        squares = sum_of_row(squares, scratch) / (float)inputs;
#if NORM == 2
        /* Corrects the mean for its rounding. */
        rest = sum_of_row(left, scratch) / (float)inputs;
        squares -= rest * rest;
        squares = squares > 0.0f || is_nan(squares) ? squares : 0.0f;
#endif
        scale = 1.0f / sqrtf(squares + norm.eps);
    };
    auto put_normed = [&](const Vector& v, const Parameters& own, int at, bool real) {
        float values[8];
        widen_eight(v, values);
        scale_eight(norm, own.gain, own.shift, mean, rest, scale, values);
        put(token, at, real, pack(values));
    };
    const int all = (int)(inputs / 8), skipped = (int)(begin / 8);
#if OWN > 0
    /* A short row is loaded at once and stays in registers; so do the norm's parameters if there are few. */
    Vector held[OWN];
    Parameters parameters[OWN <= 2 ? OWN : 1];
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        int at = first + o * lanes;
        held[o] = Vector{};
        if (mine && at < all) {
            held[o] = load_vector(row + at * 8);
            if (OWN <= 2) load_parameters(at, parameters[o]);
        }
    }
    meanwhile();
#if NORM == 2
#pragma unroll
    for (int o = 0; o < OWN; ++o) add_up(held[o]);
    mean = sum_of_row(sum, scratch) / (float)inputs;
#endif
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        if (first + o * lanes < all) add_squares(held[o]);
    }
    conclude_row();
#pragma unroll
    for (int o = 0; o < OWN && mine; ++o) {
        int at = first + o * lanes;
        if (OWN > 2 && at < all) load_parameters(at, parameters[0]);
        put_normed(held[o], parameters[OWN <= 2 ? o : 0], at - skipped, at >= skipped && at < skipped + eights);
    }
#else
    /* A single condition per iteration lets the compiler overlap the loads of several iterations; two conditions, or an outer
     * branch, prevent it. */
    const int end = mine ? all : 0, end_here = !mine ? 0 : Whole ? whole : eights;
#if NORM == 2
#pragma unroll 4
    for (int at = first; at < end; at += lanes) add_up(load_vector(row + at * 8));
    mean = sum_of_row(sum, scratch) / (float)inputs;
#endif
#pragma unroll 4
    for (int at = first; at < end; at += lanes) add_squares(load_vector(row + at * 8));
    meanwhile();
    conclude_row();
#pragma unroll 2
    for (int at = first; at < end_here; at += lanes) {
        Vector v = {};
        Parameters own = {};
        if (!Whole || at < eights) {
            v = load_vector(row + begin + at * 8);
            load_parameters(skipped + at, own);
        }
        put_normed(v, own, at, at < eights);
    }
#endif
#else
    /* Four loads are in flight before the first is used. */
    const int items = TOKENS * whole;
    bool begun = false;
    for (int first = threadIdx.x; first < items; first += 4 * BLOCK) {
        Vector v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int item = first + i * BLOCK, token = item / whole, at = item % whole;
            v[i] = Vector{};
            if (item < items && at < eights) v[i] = load_vector(x + (token < last ? token : last) * x_row + begin + at * 8);
        }
        if (!begun) meanwhile();
        begun = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int item = first + i * BLOCK, at = item % whole;
            if (item < items) put(item / whole, at, at < eights, v[i]);
        }
    }
    if (!begun) meanwhile();
#endif
}
#endif

