/*
 * Tensor-core products of expert weights with few assignments (mma.m16n8k16, sm_80 and up), for weights of any format; shared by
 * dense.cu and packed.cu.
 *
 * Persistent blocks of 8 warps. A tile is 16 rows of an expert's weight by the TOKENS = 8 TILES assignments of an item: weights
 * are the 16-row operand, assignments the 8-column one. A team of SPLIT warps owns a tile; its warps take steps of the inputs in
 * turn and add their sums in shared memory, in a fixed order. Each block has a contiguous range of tiles, so the item seldom
 * changes. Each lane copies 16 bytes of two rows at a time into a ring buffer of its warp (cp.async), with STAGES - 1 steps in
 * flight at any moment, across tile and item boundaries, so that the memory pipeline does not drain while sums are added.
 * Activations are gathered from the rows of their tokens, from the L2 into registers, one step ahead. Grid: (resident blocks).
 *
 * With GATED the result is a gated activation of two products: the lower 8 rows of a tile belong to the gate's weight, the upper
 * 8 are the same rows of the up weight; they are combined when sums are added.
 *
 * With SUMMED there is one token, and the result is the weighted sum of the products of its slots: a tile is 16 rows of each
 * slot's weight, one slot after the other, whose sums are multiplied by the weights of the slots in f32.
 */
#define WARPS 8
#define TEAMS (WARPS / SPLIT)
/* Results of a tile. */
#define RESULTS (GATED ? 8 : 16)
/* Weights that a tile is multiplied with, one after the other. */
#define SEGMENTS (SUMMED ? SLOTS : 1)

extern __shared__ __align__(128) u8 memory[];

#if __CUDA_ARCH__ >= 800
/* Barrier of a team's warps. The lanes of a warp need not arrive together. */
__device__ inline void meet(int team) {
    __syncwarp();
    if (SPLIT > 1) asm volatile("barrier.sync %0, %1;" :: "r"(team + 1), "n"(SPLIT * 32) : "memory");
}

/*
 * `Product` defines how the weights of a step are copied to a stage of the ring buffer and multiplied from there: `aim` selects
 * the first row of a tile, given the end of its expert's rows; `copy` copies a step; `load` loads the lane's activations of a
 * step into `Inputs`; `add` adds the product of a stage with those.
 */
template <typename Product> __device__ inline void multiply_items(const GroupedLinearParams& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / SPLIT, member = warp % SPLIT;
    const int inputs = (int)p.inputs, steps = (inputs + Product::columns - 1) / Product::columns;
    const int tiles = (int)((p.covered + TEAMS * RESULTS - 1) / (TEAMS * RESULTS));
    float(*partial)[WARPS][TOKENS][17] = (float(*)[WARPS][TOKENS][17])(memory + WARPS * STAGES * Product::stage);
    u8* const ring = memory + warp * STAGES * Product::stage;

    const Extent::Loaded loaded = p.extent.load();
#if SUMMED
    /* Lane `i` has the expert of slot `i`, and its weight. */
    const int expert = lane < SLOTS ? expert_of(p, lane) : -1, items = 1;
    const float factor = lane < SLOTS ? p.factors.row(0)[lane] : 0.0f;
    const int all = (int)p.extent.count(loaded) * SLOTS;
    if (all == 0) return;
    auto expert_at = [&](int segment) { return __shfl_sync(0xffffffffu, expert, segment); };
#elif DIRECT
    const int items = (int)p.items, first_item = (int)((i64)blockIdx.x * items / gridDim.x);
    /* Loaded together with the extent. */
    const int early = expert_of(p, first_item);
    const int all = (int)p.extent.count(loaded) * SLOTS;
#else
    const int all = (int)p.extent.count(loaded) * SLOTS, items = count_items(p, all);
#endif
    const i64 units = (i64)items * tiles;
    /* Tiles of an item are consecutive. */
    const i64 begin = units * blockIdx.x / gridDim.x, end = units * (blockIdx.x + 1) / gridDim.x;

    /* The next copy: tile, its item, step and stage. */
    Product product(p);
    i64 next_unit = member < steps ? begin : end;
    int next_item = -1, next_step = member, next_stage = 0, next_segment = 0;
    Item ahead = {-1, 0, 0};
    auto find = [&](int number) {
#if SUMMED
        return Item{0, 0, 1};
#elif DIRECT
        if (number == first_item) return Item{number < all ? early : -1, number, 1};
#endif
        return find_item(p, number, all);
    };
    auto first_row = [&](int expert, i64 unit) {
        const i64 first = expert * p.outputs;
        return (Product::aligned ? first / 8 * 8 : first) + (unit % tiles * TEAMS + team) * RESULTS;
    };
    auto aim = [&]() {
        while (next_unit < end) {
            int number = (int)(next_unit / tiles);
#if SUMMED
            ahead.expert = -1;
            while (next_segment < SEGMENTS && (ahead.expert = expert_at(next_segment)) < 0) ++next_segment;
#else
            if (number != next_item) {
                next_item = number;
                ahead = find(number);
            }
#endif
            if (ahead.expert >= 0) {
                const i64 row = first_row(ahead.expert, next_unit), first = ahead.expert * p.outputs, stop = first + p.outputs;
                /* A team without a tile copies another tile, whose result is discarded. */
                product.aim(p, row < stop ? row : first, stop);
                return;
            }
            next_segment = 0;
            next_unit = SUMMED ? next_unit + 1 : (i64)(number + 1) * tiles;
        }
    };
    auto fetch = [&]() {
        if (next_unit < end) {
            product.copy(ring + next_stage * Product::stage, next_step);
            next_step += SPLIT;
            if (next_step >= steps) {
                next_step = member;
                if (++next_segment >= SEGMENTS) {
                    next_segment = 0;
                    ++next_unit;
                }
                aim();
            }
        }
        commit_copies();
        next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
    };
    aim();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) fetch();

    int current = -1, stage = 0, turn = 0;
    Item item = {-1, 0, 0};
    /* The assignments of the lane's columns, and their inputs. */
    int assignments[TILES];
    const X* x[TILES];
    for (i64 unit = begin; unit < end; ++unit) {
        int number = (int)(unit / tiles);
        if (number != current) {
            current = number;
            item = find(number);
            if (item.expert >= 0) {
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    assignments[tile] = assignment_of(p, item, tile * 8 + lane / 4, all);
                    x[tile] = assignments[tile] < 0 ? nullptr : inputs_of(p, assignments[tile]);
                }
            }
        }
        if (item.expert < 0) continue;
        if (unit % tiles == 0) copy_rest(p, item, threadIdx.x, WARPS * 32, all);
        float sums[TILES][4] = {};
        for (int segment = 0; segment < SEGMENTS; ++segment) {
#if SUMMED
            if (expert_at(segment) < 0) continue;
            float before[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                before[i] = sums[0][i];
                sums[0][i] = 0.0f;
            }
            x[0] = lane < 4 ? inputs_of(p, segment) : nullptr;
#endif
            typename Product::Inputs own;
            if (member < steps) product.load(x, member, own);
#pragma unroll 1
            for (int step = member; step < steps; step += SPLIT) {
                const typename Product::Inputs here = own;
                if (step + SPLIT < steps) product.load(x, step + SPLIT, own);
                await_copies<STAGES - 2>();
                __syncwarp();
                const typename Product::Weights weights(ring + stage * Product::stage);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                /* Refills the stage that was read one step ago. */
                fetch();
                product.add(weights, here, sums);
            }
#if SUMMED
            const float own_factor = __shfl_sync(0xffffffffu, factor, segment);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][i] = before[i] + own_factor * sums[0][i];
#endif
        }
        float(*sum_of)[TOKENS][17] = partial[turn++ % 2] + team * SPLIT;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            int token = tile * 8 + lane % 4 * 2;
            sum_of[member][token][lane / 4] = sums[tile][0];
            sum_of[member][token + 1][lane / 4] = sums[tile][1];
            sum_of[member][token][lane / 4 + 8] = sums[tile][2];
            sum_of[member][token + 1][lane / 4 + 8] = sums[tile][3];
        }
        /* Sums are read before the next barrier, and overwritten after it. */
        meet(team);
        const i64 first = item.expert * p.outputs, row = first_row(item.expert, unit);
#pragma unroll
        for (int base = 0; base < TOKENS * RESULTS; base += SPLIT * 32) {
            if (base + member * 32 >= TOKENS * RESULTS) break;
            const int i = base + member * 32 + lane, token = i / RESULTS, at = i % RESULTS;
            int assignment = __shfl_sync(0xffffffffu, assignments[0], token % 8 * 4);
#pragma unroll
            for (int tile = 1; tile < TILES; ++tile) {
                int other = __shfl_sync(0xffffffffu, assignments[tile], token % 8 * 4);
                assignment = token / 8 == tile ? other : assignment;
            }
            const i64 output = row + at - first;
            if (assignment < 0 || output < 0 || output >= p.outputs) continue;
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < SPLIT; ++other) sum += sum_of[other][token][at];
#if SUMMED
            for (int slot = 0; slot < SLOTS && p.bias; ++slot) {
                const int other = expert_of(p, slot);
                if (other >= 0) sum += p.factors.row(0)[slot] * widen(p.bias[other * p.outputs + output]);
            }
#else
            sum += or_else(p.bias, first + output, 0.0f);
#endif
#if GATED
            float up = 0.0f;
#pragma unroll
            for (int other = 0; other < SPLIT; ++other) up += sum_of[other][token][at + 8];
            sum = gated(sum, up + or_else(p.other_bias, first + output, 0.0f), p.limit, p.up_offset);
#endif
            outputs_of(p, assignment)[output] = narrow<Y>(sum);
        }
    }
    await_copies<0>();
}
#endif
