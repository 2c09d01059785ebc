/*
 * matmul: batched product of two tensors, y[g] = a[g] b[g], b transposed or not.
 *
 * A block of 256 threads owns 64 by 64 elements of a group's result, a thread 4 by 4 of them; 16 inputs at a time go through
 * shared memory as f32. Grid: (blocks of columns, blocks of rows, groups up to 65535). Plain f32 arithmetic.
 */
extern "C" __global__ void __launch_bounds__(256) matmul(Extent extent, i64 rows, i64 columns, i64 inputs, const X* a,
                                                         i64 a_group, i64 a_row, const X* b, i64 b_group, i64 b_row, Y* y,
                                                         i64 y_group, i64 y_row) {
    launch_dependents_and_wait();
    __shared__ float left[16][65], right[16][65];
    i64 groups = extent.count();
    int column = threadIdx.x % 16, line = threadIdx.x / 16;
    i64 output = (i64)blockIdx.x * 64;
    for (i64 group = blockIdx.z; group < groups; group += gridDim.z) {
        for (i64 row = (i64)blockIdx.y * 64; row < rows; row += (i64)gridDim.y * 64) {
            float sum[4][4] = {};
            for (i64 base = 0; base < inputs; base += 16) {
                for (int item = threadIdx.x; item < 64 * 16; item += 256) {
                    int k = item % 16, at = item / 16;
                    bool inside = base + k < inputs;
                    left[k][at] = inside && row + at < rows ? widen(a[group * a_group + (row + at) * a_row + base + k]) : 0.0f;
                    i64 where = TRANSPOSED ? (output + at) * b_row + base + k : (base + k) * b_row + output + at;
                    right[k][at] = inside && output + at < columns ? widen(b[group * b_group + where]) : 0.0f;
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
                    i64 at = row + line + i * 16, to = output + column + j * 16;
                    if (at < rows && to < columns) y[group * y_group + at * y_row + to] = narrow<Y>(sum[i][j]);
                }
            }
        }
    }
}
