/*
 * Products of an expert's weight with a few of its assignments on tensor cores (mma.m16n8k16, sm_80 and up), for weights of any
 * format: what dense.cu and packed.cu share.
 *
 * A team of SPLIT warps owns 16 rows of a weight and TOKENS = 8 TILES assignments; a block has 8 warps. Weights are the 16-row operand,
 * assignments the 8-column one. The warps of a team take turns at steps of the inputs and add their sums in shared memory, in a
 * fixed order. Weights are loaded UNROLL steps ahead, into registers, in the order in which they lie in memory; activations are
 * gathered from the rows of their tokens, from the L2. Grid: (blocks of TEAMS tiles, items).
 *
 * With GATED the result is a gated activation of two products: the lower 8 rows of a tile are of the gate's weight, the upper 8 are the same
 * rows of the other one, and they meet when sums are added up.
 */
#define WARPS 8
#define TEAMS (WARPS / SPLIT)
/* Results of a tile. */
#define RESULTS (GATED ? 8 : 16)

#if __CUDA_ARCH__ >= 800
/*
 * `Product` is constructed from the parameters, the first row of a tile and the end of its expert's rows (of a tile that is not there, the
 * expert's first row), loads the weights of a step into
 * a `Product::Loaded`, and adds the product of a step with the activations of each tile to sums. `x` are the inputs of the lane's
 * assignments, null where there is none.
 */
template <typename Product> __device__ inline void multiply_items(const GroupedLinearParams& p) {
    __shared__ float partial[WARPS][TOKENS][17];
    __shared__ int assignments[TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / SPLIT, member = warp % SPLIT;
    const int all = (int)p.extent.count() * SLOTS, inputs = (int)p.inputs;
    const int steps = (inputs + Product::columns - 1) / Product::columns;
    for (int number = blockIdx.y; number < p.items; number += gridDim.y) {
        const Item item = find_item(p, number, all);
        if (item.expert < 0) {
            if (DIRECT) continue;
            return;
        }
        const i64 first = item.expert * p.outputs;
        const i64 row = (Product::aligned ? first / 8 * 8 : first) + ((i64)blockIdx.x * TEAMS + team) * RESULTS;
        const bool real = row < first + p.outputs;
        Product product(p, real ? row : first, first + p.outputs);
        float sums[TILES][4] = {};
        const X* x[TILES];
        for (int base = member; base < steps; base += SPLIT * UNROLL) {
            typename Product::Loaded loaded[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (base + u * SPLIT < steps && real) product.load(base + u * SPLIT, loaded[u]);
            }
            /* Behind the first weights, so that the two reads that follow each other cost no time of their own. */
            if (base == member) {
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    int assignment = assignment_of(p, item, tile * 8 + lane / 4, all);
                    x[tile] = assignment < 0 ? nullptr : inputs_of(p, assignment);
                    if (warp == 0 && lane % 4 == 0) assignments[tile * 8 + lane / 4] = assignment;
                }
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (base + u * SPLIT >= steps || !real) break;
                product.add(base + u * SPLIT, loaded[u], x, sums);
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            int token = tile * 8 + lane % 4 * 2;
            partial[warp][token][lane / 4] = sums[tile][0];
            partial[warp][token + 1][lane / 4] = sums[tile][1];
            partial[warp][token][lane / 4 + 8] = sums[tile][2];
            partial[warp][token + 1][lane / 4 + 8] = sums[tile][3];
        }
        __syncthreads();
        for (int i = member * 32 + lane; i < item.count * RESULTS; i += SPLIT * 32) {
            int token = i / RESULTS, at = i % RESULTS, assignment = assignments[token];
            i64 output = row + at - first;
            if (assignment < 0 || output < 0 || output >= p.outputs) continue;
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < SPLIT; ++other) sum += partial[team * SPLIT + other][token][at];
            sum += or_else(p.bias, first + output, 0.0f);
#if GATED
            float up = 0.0f;
#pragma unroll
            for (int other = 0; other < SPLIT; ++other) up += partial[team * SPLIT + other][token][at + 8];
            sum = gated(sum, up + or_else(p.other_bias, first + output, 0.0f), p.limit, p.up_offset);
#endif
            outputs_of(p, assignment)[output] = narrow<Y>(sum);
        }
        __syncthreads();
    }
}
#endif
