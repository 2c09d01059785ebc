/*
 * grouped_linear and head_linear on CUDA cores: any activations, any weights, every device.
 *
 * A warp owns 8 rows of an expert's weight, four lanes each, and TOKENS of its assignments; a block has 4 warps. A lane loads 16
 * bytes of its row at a time (for packed integers, weight/packing.rs says which columns those are) and the activations for them,
 * which come through the L1. The four lanes of a row add up at the end, in a fixed order. If an expert does not begin at a unit
 * of 8 packed rows, a warp skips the rows of the neighbouring expert. Grid: (blocks of 32 rows, items).
 *
 * Bytes: the weights of an expert once per item. Floor: those of all distinct experts over read bandwidth.
 */
#define WARPS 4
#if FORMAT >= FORMAT_PACKED
#define OWN (128 / Weight::bits)
/* Consecutive columns. */
#define RUN (Weight::bits == 4 ? 8 : Weight::group ? 4 : 16)
#else
#define OWN WIDTH
#endif
/* Columns of the four lanes of a row. */
#define STEP (4 * OWN)

extern "C" __global__ void __launch_bounds__(WARPS * 32) grouped_linear_plain(const __grid_constant__ GroupedLinearParams p) {
    launch_dependents_and_wait();
    const int all = (int)p.extent.count() * SLOTS, lane = threadIdx.x % 32, part = lane % 4;
    const i64 inputs = p.inputs;
    Cursor cursor = {};
    for (int number = blockIdx.y; number < p.items; number += gridDim.y) {
        const Item item = find_item(p, cursor, number, all);
        if (item.expert < 0) {
            if (DIRECT) continue;
            return;
        }
        if (blockIdx.x == 0) copy_rest(p, item, threadIdx.x, WARPS * 32, all);
        const i64 first = item.expert * p.outputs, aligned = FORMAT >= FORMAT_PACKED ? first / 8 * 8 : first;
        const i64 row = aligned + ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * 8 + lane / 4;
        if (row - lane / 4 >= first + p.outputs) continue;
        const bool own = row >= first && row < first + p.outputs;
        /* Rows of other experts, and rows past the last, are not computed. */
        const i64 read = own ? row : first;
        /* Assignments that are missing are computed from the first token, and dropped. */
        const X* x[TOKENS];
        bool real[TOKENS];
        float sum[TOKENS] = {};
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            int assignment = assignment_of(p, item, t, all);
            real[t] = assignment >= 0;
            x[t] = inputs_of(p, real[t] ? assignment : 0);
        }
#if FORMAT >= FORMAT_PACKED
        const u8* from = p.weight.elements + read / 8 * p.weight.row_bytes + part * 128 + read % 8 * 16;
        for (i64 step = 0; step * STEP < inputs; ++step) {
            Vector v = load_stream(from + step * 512);
#pragma unroll
            for (int run = 0; run < OWN / RUN; ++run) {
                i64 column = step * STEP + (RUN == 16 ? part * 16 : run * (4 * RUN) + part * RUN);
                if (column >= inputs) break;
                i64 group = Weight::group ? column / (Weight::group ? Weight::group : 1) : 0;
                float scale = p.weight.number(read, group, 0);
                float second = Weight::numbers == 2 ? p.weight.number(read, group, 1) : 0.0f;
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    const int at = run * RUN + i;
                    float stored = Weight::element(v.word[at / Weight::per_word], at % Weight::per_word);
                    float w = Weight::scaled(stored, scale, second);
#pragma unroll
                    for (int t = 0; t < TOKENS; ++t) {
                        if (column + i < inputs) sum[t] += widen(x[t][column + i]) * w;
                    }
                }
            }
        }
#else
        const u8* from = p.weight.elements + read * p.weight.row_bytes + part * 16;
#pragma unroll 4
        for (i64 column = part * WIDTH; column < inputs; column += STEP, from += 64) {
            Vector v = load_stream(from);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                float own_x[WIDTH];
                load_x(x[t] + column, inputs - column, own_x);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) sum[t] += own_x[i] * Elements::get(v, i);
            }
        }
#endif
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            sum[t] += __shfl_xor_sync(0xffffffffu, sum[t], 1);
            sum[t] += __shfl_xor_sync(0xffffffffu, sum[t], 2);
            if (part != 0 || !own || !real[t]) continue;
            int assignment = assignment_of(p, item, t, all);
            outputs_of(p, assignment)[row - first] = narrow<Y>(sum[t] + or_else(p.bias, row, 0.0f));
        }
    }
}
