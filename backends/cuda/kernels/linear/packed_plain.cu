/*
 * linear with packed integers for a few rows on CUDA cores: y = x W^T + b for any types and every device.
 *
 * A warp owns a unit of 8 outputs and TOKENS tokens: 8 rows of four lanes. A lane loads 16 bytes of its row at a time
 * (weight/packing.rs says which columns those are) and the activations for them, which come through the L1; integers are
 * dequantised before they are multiplied. The four lanes of a row add up at the end, in a fixed order. Grid: (blocks of 4 units,
 * blocks of tokens).
 *
 * Bytes: integers, scales and offsets, once per block of tokens. Floor: those over read bandwidth; in practice the conversions
 * are the bottleneck.
 */
#define WARPS 4
/* Columns of 16 bytes, and of a step. */
#define OWN (128 / Weight::bits)
#define SPAN (4 * OWN)
/* Consecutive columns. */
#define RUN (Weight::bits == 4 ? 8 : Weight::group ? 4 : 16)

extern "C" __global__ void __launch_bounds__(WARPS * 32) packed_plain(Extent extent, i64 outputs, i64 inputs, const X* x,
                                                                      i64 x_row, Weight weight, const BIAS* bias, Y* y,
                                                                      i64 y_row) {
    launch_dependents_and_wait();
    i64 first = (i64)blockIdx.y * TOKENS, tokens = extent.count() - first;
    i64 unit = (i64)blockIdx.x * WARPS + threadIdx.x / 32, units = (outputs + 7) / 8;
    if (tokens <= 0 || unit >= units) return;
    int lane = threadIdx.x % 32, part = lane % 4;
    i64 output = unit * 8 + lane / 4;
    const u8* from = weight.elements + unit * weight.row_bytes + part * 128 + lane / 4 * 16;
    x += first * x_row;
    float sum[TOKENS] = {};
    for (i64 step = 0; step * SPAN < inputs; ++step) {
        Vector v = load_stream(from + step * 512);
#pragma unroll
        for (int run = 0; run < OWN / RUN; ++run) {
            i64 column = step * SPAN + (RUN == 16 ? part * 16 : run * (4 * RUN) + part * RUN);
            if (column >= inputs) break;
            i64 group = Weight::group ? column / (Weight::group ? Weight::group : 1) : 0;
            float scale = weight.number(output, group, 0), second = Weight::numbers == 2 ? weight.number(output, group, 1) : 0.0f;
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                const int at = run * RUN + i;
                float stored = Weight::element(v.word[at / Weight::per_word], at % Weight::per_word);
                float w = Weight::scaled(stored, scale, second);
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) {
                    if (t < tokens && column + i < inputs) sum[t] += widen(x[t * x_row + column + i]) * w;
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        sum[t] += __shfl_xor_sync(0xffffffffu, sum[t], 1);
        sum[t] += __shfl_xor_sync(0xffffffffu, sum[t], 2);
        if (part == 0 && t < tokens && output < outputs) {
            y[(first + t) * y_row + output] = narrow<Y>(sum[t] + or_else(bias, output, 0.0f));
        }
    }
}
