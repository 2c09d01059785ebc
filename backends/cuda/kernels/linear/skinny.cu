/*
 * linear with dense weights for a few rows on CUDA cores: y = x W^T + b, and with NORM y = rms_norm(x) W^T + b.
 *
 * SPLIT warps share ROWS outputs (one, or two if several tokens amortise the reads of x) and up to TOKENS tokens; a block has 4
 * warps. Grid: (blocks of outputs, blocks of tokens). A lane loads 16 bytes of a weight row at a time, with UNROLL loads in
 * flight before the first use: at batch 1 that is 32 lanes * 16 bytes * 8 = 4 KiB per warp, 60 KiB or more per SM, which
 * saturates HBM3e. x comes through the L1, which all warps of an SM share. Shared memory only holds the partial sums of the SPLIT
 * warps, which are added in a fixed order.
 *
 * The norm needs no additional pass: y = sum_k(x_k g_k W_nk) / rms(x), and each warp that reads x also adds up its squares.
 *
 * Bytes: the weights once per block of tokens (from memory once, then from the L2), x from the L2. Floor at batch 1: weight bytes
 * over read bandwidth. Measured figures: docs/src/performance/cuda.md.
 */
#define WARPS 4

extern "C" __global__ void __launch_bounds__(WARPS * 32) skinny(Extent extent, i64 outputs, i64 inputs, const X* x, i64 x_row,
                                                                Weight weight, const BIAS* bias, Y* y, i64 y_row
#if NORM
                                                                , const G* gain, float eps, float offset
#endif
) {
    launch_dependents_and_wait();
    i64 first = (i64)blockIdx.y * TOKENS, tokens = extent.count() - first;
    if (tokens <= 0) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % SPLIT;
    i64 output = ((i64)blockIdx.x * (WARPS / SPLIT) + warp / SPLIT) * ROWS;
    i64 pieces = (inputs + WIDTH - 1) / WIDTH;

    float sum[ROWS][TOKENS] = {};
#if NORM
    float squares[TOKENS] = {};
#endif
    const u8* row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row[r] = weight.elements + (output + r < outputs ? output + r : 0) * weight.row_bytes;
    x += first * x_row;

    for (i64 base = part * 32 + lane; base < pieces; base += SPLIT * 32 * UNROLL) {
        Vector piece[UNROLL][ROWS];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            i64 at = base + u * SPLIT * 32;
            if (at < pieces) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) piece[u][r] = load_stream(row[r] + at * 16);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            i64 at = base + u * SPLIT * 32;
            if (at >= pieces) break;
            float w[ROWS][WIDTH];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) w[r][i] = Elements::get(piece[u][r], i);
            }
#if NORM
            float g[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) g[i] = at * WIDTH + i < inputs ? widen(gain[at * WIDTH + i]) + offset : 0.0f;
#endif
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                if (t >= tokens) break;
                float own[WIDTH];
                load_x(x + t * x_row + at * WIDTH, inputs - at * WIDTH, own);
#if NORM
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    squares[t] += own[i] * own[i];
                    own[i] *= g[i];
                }
#endif
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) sum[r][t] += own[i] * w[r][i];
                }
            }
        }
    }

#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r][t] = warp_sum(sum[r][t]);
#if NORM
        squares[t] = warp_sum(squares[t]);
#endif
    }
#if SPLIT > 1
    __shared__ float partial[WARPS][TOKENS][ROWS + 1];
    if (lane == 0) {
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) partial[warp][t][r] = sum[r][t];
#if NORM
            partial[warp][t][ROWS] = squares[t];
#endif
        }
    }
    __syncthreads();
    if (part != 0) return;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        for (int other = 1; other < SPLIT; ++other) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r][t] += partial[warp + other][t][r];
#if NORM
            squares[t] += partial[warp + other][t][ROWS];
#endif
        }
    }
#endif
    if (lane != 0) return;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        if (t >= tokens) break;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (output + r >= outputs) break;
            float result = sum[r][t];
#if NORM
            result *= 1.0f / sqrtf(squares[t] / (float)inputs + eps);
#endif
            y[(first + t) * y_row + output + r] = narrow<Y>(result + or_else(bias, output + r, 0.0f));
        }
    }
}
