/*
 * linear for 5 to 64 rows on tensor cores (mma.m16n8k16, sm_80 and up): y = x W^T + b, f16 or bf16 throughout.
 *
 * A block of 8 warps owns 16 outputs and TILES tiles of 8 tokens; its warps take blocks of 32 inputs in turn and add their sums in
 * shared memory, in a fixed order. Grid: (blocks of 16 outputs, blocks of tokens). A second block of tokens finds the weights in the
 * L2: it is for batch-invariant products of any number of tokens.
 *
 * Weights are the 16-row operand, tokens the 8-column one. The sum over inputs may run in any order as long as both operands
 * agree, so a lane loads 16 consecutive bytes of a row, as they lie in memory, and they are the fragments of two products: no
 * shared memory, no transposition. UNROLL loads of two rows each are in flight before the first product.
 *
 * Bytes: weights once; x once per block, from the L2: TILES / 2 times the weights' bytes, which is the bottleneck from 16 tokens
 * up.
 */
#define WARPS 8

extern "C" __global__ void __launch_bounds__(WARPS * 32) skinny_mma(Extent extent, i64 outputs, i64 inputs, const X* x,
                                                                    i64 x_row, const u8* weight, i64 weight_row,
                                                                    const BIAS* bias, Y* y, i64 y_row) {
    launch_dependents_and_wait();
    const i64 first = (i64)blockIdx.y * (TILES * 8), tokens = extent.count() - first;
    if (tokens <= 0) return;
    x += first * x_row;
    y += first * y_row;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 output = (i64)blockIdx.x * 16, blocks = inputs / 32;
    i64 low = output + lane / 4, high = low + 8;
    const u8* low_row = weight + (low < outputs ? low : 0) * weight_row + lane % 4 * 16;
    const u8* high_row = weight + (high < outputs ? high : 0) * weight_row + lane % 4 * 16;
    const X* own = x + (i64)(lane / 4) * x_row + lane % 4 * 8;
    float sums[TILES][4] = {};

    for (i64 base = warp; base < blocks; base += WARPS * UNROLL) {
        Vector a[UNROLL], b[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            i64 block = base + u * WARPS;
            if (block < blocks) {
                a[u] = load_stream(low_row + block * 64);
                b[u] = load_stream(high_row + block * 64);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            i64 block = base + u * WARPS;
            if (block >= blocks) break;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                Vector v = {};
                if (tile * 8 + lane / 4 < tokens) v = load_vector(own + (i64)tile * 8 * x_row + block * 32);
                multiply(sums[tile], a[u].word[0], b[u].word[0], a[u].word[1], b[u].word[1], v.word[0], v.word[1]);
                multiply(sums[tile], a[u].word[2], b[u].word[2], a[u].word[3], b[u].word[3], v.word[2], v.word[3]);
            }
        }
    }

    __shared__ float partial[WARPS][TILES * 8][17];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        int token = tile * 8 + lane % 4 * 2;
        partial[warp][token][lane / 4] = sums[tile][0];
        partial[warp][token + 1][lane / 4] = sums[tile][1];
        partial[warp][token][lane / 4 + 8] = sums[tile][2];
        partial[warp][token + 1][lane / 4 + 8] = sums[tile][3];
    }
    __syncthreads();
    for (int item = threadIdx.x; item < TILES * 8 * 16; item += WARPS * 32) {
        int token = item / 16, at = item % 16;
        if (token >= tokens || output + at >= outputs) continue;
        float sum = 0.0f;
        for (int other = 0; other < WARPS; ++other) sum += partial[other][token][at];
        y[token * y_row + output + at] = narrow<Y>(sum + or_else(bias, output + at, 0.0f));
    }
}
