/*
 * quant_per_token, alone or fused with a preceding norm or activation: scales[m] = max_k |v[m, k]| / 127, y = round(v / scale),
 * where v is the row, normalised or activated without intermediate rounding. FRONT is the preceding op: 0 none, 1 rms_norm, 2
 * layer_norm, 3 a function of each element, 4 a function of the first half times the second (LAYOUT as in activation.cu).
 *
 * One block per row. With OWN > 0 a thread keeps its elements in registers, OWN times 8 of them, loaded 16 bytes at a time;
 * otherwise they are recomputed for each pass, element by element. The order of sums and maxima depends only on the row's length.
 * Grid: (rows). Bytes: the row once, and one byte per element of the result.
 */
#define NOTHING 0
#define RMS 1
#define LAYER 2
#define ACTIVATED 3
#define GATED 4

/* A value of one input, or of two with GATED. */
__device__ inline float activate(float x, float other, float limit) {
#if FRONT == ACTIVATED || FRONT == GATED
    if (limit > 0.0f && x > limit) x = limit;
    x = apply(x);
#endif
#if FRONT == GATED
    if (limit > 0.0f && other > limit) other = limit;
    if (limit > 0.0f && other < -limit) other = -limit;
    x *= other;
#endif
    return x;
}

/*
 * The maximum and the sum of a block, in every thread; the sum in the same order every time. `turn` alternates between 0 and 1
 * and selects one of two buffers: between a read of a buffer and the next write there is a barrier.
 */
__device__ inline float2 block_maximum_and_sum(float most, float sum, int turn) {
    __shared__ float2 partial[2][32];
    int lane = threadIdx.x % 32;
    most = warp_maximum(most);
    sum = warp_sum(sum);
    if (lane == 0) partial[turn][threadIdx.x / 32] = make_float2(most, sum);
    __syncthreads();
    float2 both = lane < (blockDim.x + 31) / 32 ? partial[turn][lane] : make_float2(0.0f, 0.0f);
    return make_float2(warp_maximum(both.x), warp_sum(both.y));
}

/* The maximum of a block, in every thread. */
__device__ inline float block_maximum(float x, int turn) {
    __shared__ float partial[2][32];
    int lane = threadIdx.x % 32;
    x = warp_maximum(x);
    if (lane == 0) partial[turn][threadIdx.x / 32] = x;
    __syncthreads();
    return warp_maximum(lane < (blockDim.x + 31) / 32 ? partial[turn][lane] : 0.0f);
}

extern "C" __global__ void __launch_bounds__(1024) quantise_rows(const __grid_constant__ QuantiseRowsParams p) {
    launch_dependents_and_wait();
#if OWN > 0
    float value[OWN][8];
    /* A row, activated. */
    auto read = [&](i64 row) {
        const X* own = p.x.row(row);
        const X* second = FRONT == GATED && LAYOUT == 1 ? p.up.row(row) : own + p.columns;
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
            i64 at = ((i64)o * blockDim.x + threadIdx.x) * 8;
#pragma unroll
            for (int k = 0; k < 8; ++k) value[o][k] = 0.0f;
            if (at >= p.columns) continue;
#if FRONT == GATED
            float first[8], gate[8];
#if LAYOUT == 3
            load_eight(own + 2 * at, first);
            load_eight(own + 2 * at + 8, gate);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                float a = k < 4 ? first[k % 4 * 2] : gate[k % 4 * 2], b = k < 4 ? first[k % 4 * 2 + 1] : gate[k % 4 * 2 + 1];
                value[o][k] = activate(a, b, p.limit);
            }
#else
            load_eight(own + at, first);
            load_eight(second + at, gate);
#pragma unroll
            for (int k = 0; k < 8; ++k) value[o][k] = activate(first[k], gate[k], p.limit);
#endif
#else
            load_eight(own + at, value[o]);
#if FRONT == ACTIVATED
#pragma unroll
            for (int k = 0; k < 8; ++k) value[o][k] = activate(value[o][k], 0.0f, p.limit);
#endif
#endif
        }
    };
    /* The first row of a block has memory whether it is within the extent or not, so it is loaded together with the extent. */
    const Extent::Loaded loaded = p.extent.load();
    read(blockIdx.x);
#if FRONT == RMS
    float weight[OWN][8];
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        i64 at = ((i64)o * blockDim.x + threadIdx.x) * 8;
        if (at < p.columns) load_eight(p.weight + at, weight[o]);
#pragma unroll
        for (int k = 0; k < 8; ++k) weight[o][k] = at < p.columns ? weight[o][k] + p.weight_offset : 0.0f;
    }
#endif
    i64 rows = p.extent.count(loaded);
#else
    i64 rows = p.extent.count();
#endif
    int turn = 0;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        float mean = 0.0f, rest = 0.0f, factor = 1.0f, most = 0.0f;
        signed char* to = p.y.row(row);
#if OWN > 0
        if (row != blockIdx.x) read(row);
#if FRONT == LAYER
        float sum = 0.0f;
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
#pragma unroll
            for (int k = 0; k < 8; ++k) sum += value[o][k];
        }
        mean = block_sum(sum) / (float)p.columns;
        float left = 0.0f;
#endif
#if FRONT == LAYER
        float squares = 0.0f;
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
            if (((i64)o * blockDim.x + threadIdx.x) * 8 >= p.columns) break;
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                float from_mean = value[o][k] - mean;
                squares += from_mean * from_mean;
                left += from_mean;
            }
        }
        squares = block_sum(squares) / (float)p.columns;
        /* Corrects the mean for its rounding error. */
        rest = block_sum(left) / (float)p.columns;
        squares -= rest * rest;
        squares = squares > 0.0f || is_nan(squares) ? squares : 0.0f;
        factor = 1.0f / sqrtf(squares + p.eps);
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
            i64 at = ((i64)o * blockDim.x + threadIdx.x) * 8;
            if (at >= p.columns) break;
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                value[o][k] = ((value[o][k] - mean) - rest) * factor * or_else(p.weight, at + k, 1.0f)
                    + or_else(p.bias, at + k, 0.0f);
            }
        }
#endif
#if FRONT == RMS
        /* The factor common to the whole row is applied last, so that a single reduction computes both the squares and the
         * maximum. */
        float squares = 0.0f;
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                squares += value[o][k] * value[o][k];
                value[o][k] *= weight[o][k];
                most = fmaxf(most, fabsf(value[o][k]));
            }
        }
        float2 both = block_maximum_and_sum(most, squares, turn);
        factor = 1.0f / sqrtf(both.y / (float)p.columns + p.eps);
        most = both.x * factor;
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
#pragma unroll
            for (int k = 0; k < 8; ++k) value[o][k] *= factor;
        }
#else
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
#pragma unroll
            for (int k = 0; k < 8; ++k) most = fmaxf(most, fabsf(value[o][k]));
        }
        most = block_maximum(most, turn);
#endif
        float scale = most / 127.0f, inverse = reciprocal(scale);
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
            i64 at = ((i64)o * blockDim.x + threadIdx.x) * 8;
            if (at >= p.columns) break;
            *(uint2*)(to + at) = quantise_eight(value[o], scale, inverse);
        }
#else
        const X* own = p.x.row(row);
        const X* second = FRONT == GATED && LAYOUT == 1 ? p.up.row(row) : own + p.columns;
        auto raw = [&](i64 i) {
#if FRONT == GATED
            float first = widen(own[LAYOUT == 3 ? 2 * i : i]);
            return activate(first, widen(LAYOUT == 3 ? own[2 * i + 1] : second[i]), p.limit);
#else
            return activate(widen(own[i]), 0.0f, p.limit);
#endif
        };
#if FRONT == LAYER
        float sum = 0.0f, left = 0.0f;
        for (i64 i = threadIdx.x; i < p.columns; i += blockDim.x) sum += raw(i);
        mean = block_sum(sum) / (float)p.columns;
#endif
#if FRONT == RMS || FRONT == LAYER
        float squares = 0.0f;
        for (i64 i = threadIdx.x; i < p.columns; i += blockDim.x) {
            float from_mean = raw(i) - mean;
            squares += from_mean * from_mean;
#if FRONT == LAYER
            left += from_mean;
#endif
        }
        squares = block_sum(squares) / (float)p.columns;
#if FRONT == LAYER
        rest = block_sum(left) / (float)p.columns;
        squares -= rest * rest;
        squares = squares > 0.0f || is_nan(squares) ? squares : 0.0f;
#endif
        factor = 1.0f / sqrtf(squares + p.eps);
#endif
        auto value = [&](i64 i) {
#if FRONT == RMS
            return raw(i) * factor * (widen(p.weight[i]) + p.weight_offset);
#elif FRONT == LAYER
            return ((raw(i) - mean) - rest) * factor * or_else(p.weight, i, 1.0f) + or_else(p.bias, i, 0.0f);
#else
            return raw(i);
#endif
        };
        for (i64 i = threadIdx.x; i < p.columns; i += blockDim.x) most = fmaxf(most, fabsf(value(i)));
        float scale = block_maximum(most, turn) / 127.0f;
        for (i64 i = threadIdx.x; i < p.columns; i += blockDim.x) to[i] = (signed char)quantise(value(i), scale);
#endif
        if (threadIdx.x == 0) p.scales[row] = scale;
    }
}
