/*
 * linear for any number of rows, types and formats: the fallback if cuBLASLt is missing or has no kernel for the types.
 *
 * A block of 256 threads owns 64 tokens by 64 outputs, a thread 4 by 4 of them; k tiles of 16 inputs pass through shared memory
 * as f32. Grid: (blocks of outputs, blocks of tokens). Plain f32 arithmetic: general, not fast.
 */
extern "C" __global__ void __launch_bounds__(256) tiled(Extent extent, i64 outputs, i64 inputs, const X* x, i64 x_row,
                                                        Weight weight, const BIAS* bias, Y* y, i64 y_row) {
    launch_dependents_and_wait();
    __shared__ float left[16][65], right[16][65];
    i64 rows = extent.count();
    int column = threadIdx.x % 16, line = threadIdx.x / 16;
    i64 output = (i64)blockIdx.x * 64;
    for (i64 token = (i64)blockIdx.y * 64; token < rows; token += (i64)gridDim.y * 64) {
        float sum[4][4] = {};
        for (i64 base = 0; base < inputs; base += 16) {
            for (int item = threadIdx.x; item < 64 * 16; item += 256) {
                int k = item % 16, at = item / 16;
                bool inside = base + k < inputs;
                left[k][at] = inside && token + at < rows ? widen(x[(token + at) * x_row + base + k]) : 0.0f;
                right[k][at] = inside && output + at < outputs ? weight.at(output + at, base + k) : 0.0f;
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < 16; ++k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) sum[i][j] += left[k][line + i * 16] * right[k][column + j * 16];
                }
            }
            __syncthreads();
        }
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 4; ++j) {
                i64 row = token + line + i * 16, at = output + column + j * 16;
                if (row < rows && at < outputs) y[row * y_row + at] = narrow<Y>(sum[i][j] + or_else(bias, at, 0.0f));
            }
        }
    }
}
