/*
 * linear_w8a8 by mma.sync, for every device and every layout: y = (x W^T) * row scale * output scale + bias, x and W of 8 bits,
 * exact sums in 32 bits. m16n8k32 from sm_80 on; on sm_75 four m8n8k16, which use the same register layout.
 *
 * A block of 8 warps owns 128 rows by 64 outputs, a warp 32 by 32; k tiles of 64 inputs pass through shared memory, with the next
 * one loading into registers. Weights are used as stored: 8 outputs by 16 inputs are a line of 128 bytes, in which each lane
 * finds its operand at its own word. Rows of x are 80 bytes apart, so that lanes have no bank conflicts. Grid: (blocks of
 * outputs, blocks of rows). Operations: 2 * rows * outputs * inputs.
 */
#define ROWS 128
#define OUTPUTS 64
#define DEPTH 64
#define X_PITCH 80

__device__ inline void multiply(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1]) : "r"(a[i]), "r"(i < 2 ? b0 : b1));
    }
#endif
}

/* 16 inputs of a row of x from `input` on; zeros past the last, and for rows that do not exist. */
__device__ inline Vector load_inputs(const u8* x, i64 x_row, i64 row, i64 rows, i64 input, i64 inputs) {
    Vector v = {};
    if (row >= rows || input >= inputs) return v;
    const u8* from = x + row * x_row + input;
#if X_VECTORS
    return load_vector(from);
#else
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if (input + i < inputs) v.word[i / 4] |= (u32)from[i] << i % 4 * 8;
    }
    return v;
#endif
}

extern "C" __global__ void __launch_bounds__(256) int8_mma(Extent extent, i64 outputs, i64 inputs, const u8* x, i64 x_row,
                                                           const u8* weight, i64 unit_bytes, Results r) {
    launch_dependents_and_wait();
    __shared__ __align__(16) u8 x_tile[ROWS * X_PITCH];
    __shared__ __align__(16) u8 weight_tile[OUTPUTS * DEPTH];
    i64 rows = extent.count(), units = (outputs + 7) / 8, steps = (inputs + DEPTH - 1) / DEPTH;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    i64 unit = (i64)blockIdx.x * (OUTPUTS / 8) + warp;
    for (i64 base = (i64)blockIdx.y * ROWS; base < rows; base += (i64)gridDim.y * ROWS) {
        int sums[2][4][4] = {};
        Vector x_next[2], weight_next;
        auto fetch = [&](i64 step) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int item = i * 256 + threadIdx.x;
                x_next[i] = load_inputs(x, x_row, base + item / 4, rows, step * DEPTH + item % 4 * 16, inputs);
            }
            weight_next = Vector{};
            if (unit < units) weight_next = load_vector(weight + unit * unit_bytes + step * 512 + lane * 16);
        };
        if (steps > 0) fetch(0);
        for (i64 step = 0; step < steps; ++step) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int item = i * 256 + threadIdx.x;
                *(Vector*)(x_tile + item / 4 * X_PITCH + item % 4 * 16) = x_next[i];
            }
            *(Vector*)(weight_tile + warp * 512 + lane * 16) = weight_next;
            __syncthreads();
            if (step + 1 < steps) fetch(step + 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 a[2][4];
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const u8* own = x_tile + (warp / 2 * 32 + m * 16 + group) * X_PITCH + half * 32 + part * 4;
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[m][i] = *(const u32*)(own + i % 2 * (8 * X_PITCH) + i / 2 * 16);
                }
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const u32* line = (const u32*)(weight_tile + (warp % 2 * 4 + n) * 512 + half * 256) + lane;
                    u32 b0 = line[0], b1 = line[32];
#pragma unroll
                    for (int m = 0; m < 2; ++m) multiply(sums[m][n], a[m], b0, b1);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    i64 row = base + warp / 2 * 32 + m * 16 + group + i / 2 * 8;
                    i64 output = (i64)blockIdx.x * OUTPUTS + warp % 2 * 32 + n * 8 + part * 2 + i % 2;
                    if (row >= rows || output >= outputs) continue;
                    float y = (float)sums[m][n][i] * (r.row_scales[row] * widen(r.output_scales[output]));
                    y += or_else(r.bias, output, 0.0f);
#if ADDED
                    y = widen(r.added[row * r.added_row + output]) + r.alpha * y;
#endif
                    r.y[row * r.y_row + output] = narrow<Y>(y);
                }
            }
        }
    }
}
