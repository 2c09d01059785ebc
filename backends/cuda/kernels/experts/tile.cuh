/*
 * Tensor-core products of expert weights with few assignments (mma.m16n8k16, sm_80 and up), for weights of any format; shared by
 * dense.cu and packed.cu.
 *
 * Persistent blocks of 8 warps. A tile is PARTS times 16 rows of an expert's weight by the TOKENS = 8 TILES assignments of an item:
 * weights are the 16-row operand, assignments the 8-column one. A team of SPLIT warps owns a tile; its warps take steps of the inputs in
 * turn and add their sums in shared memory, in a fixed order. Each warp copies steps into a ring buffer of its own (cp.async), with
 * STAGES - 1 in flight at any moment, across tile and item boundaries, so that the memory pipeline does not drain while sums are
 * added.
 * Activations are gathered from the rows of their tokens, from the L2 into registers, one step ahead. A warp's load of them takes
 * as long as one of 1 KB of weights, so narrow weights have two parts, which share the activations. Grid: (resident blocks).
 *
 * With GATED the result is a gated activation of two products: the lower 8 rows of a part belong to the gate's weight, the upper
 * 8 are the same rows of the up weight; they are combined when sums are added.
 *
 * With SUMMED there is one token, and the result is the weighted sum of the products of its slots: a tile is 16 rows of each
 * slot's weight, one slot after the other, whose sums are multiplied by the weights of the slots in f32.
 */
#define WARPS 8
#define TEAMS (WARPS / SPLIT)
/* Results of a tile. */
#define RESULTS (GATED ? 8 * PARTS : 16 * PARTS)
/* Floats of a token's sums: those of all rows of a tile, and one more against bank conflicts. */
#define TOKEN_SUMS (16 * PARTS + 1)
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
 * Which tiles a team multiplies, in which order; a unit is a tile of an item, and a turn is a unit's turn in a team. The first units
 * are fixed: a contiguous range for each team, so that the item seldom changes. SMs do not read memory at the same speed (the fastest
 * need two thirds of the time of the slowest), so the others are taken from a counter, by whoever comes first, as many turns ahead as
 * the ring needs. The counter is 0 before and after a launch: each team takes until there is none left, so the number of takes is known,
 * and the last wraps it.
 */
struct Turns {
    /* Sixteenths of the units that are fixed. With fewer, items change more often. */
    static constexpr int share = 13;
    /* Units that a team remembers: more than `ahead`. */
    static constexpr int places = 8;
    u32* counter;
    volatile int* known;
    /* The first fixed unit, the number of the team's fixed units, of all units, and of those that are taken. */
    int begin, fixed, units, shared;
    /* Turns from the one in which a unit is taken to its own. */
    int ahead;
    /* Whether this lane takes units for the team, and whether there may be more. */
    bool leads, takes;

    __device__ Turns(const GroupedLinearParams& p, int units, int steps, int team, int member) : counter(p.taken), units(units) {
        __shared__ int places_of[TEAMS][places];
        known = places_of[team];
        const int teams = gridDim.x * TEAMS, own = blockIdx.x * TEAMS + team;
        const int of_member = SEGMENTS * ((steps + SPLIT - 1) / SPLIT);
        /* One turn for the answer, and as many as the copies are ahead. */
        ahead = 2 + (STAGES - 2) / (of_member > 0 ? of_member : 1);
        ahead = ahead < places ? ahead : places - 1;
        i64 all = (i64)units * share / 16;
        const i64 least = (i64)teams * ahead;
        all = all < least ? least < units ? least : units : all;
        begin = (int)(all * own / teams);
        fixed = (int)(all * (own + 1) / teams) - begin;
        shared = units - (int)all;
        leads = member == 0 && threadIdx.x % 32 == 0;
        takes = shared > 0;
    }
    /* Whether the unit of a turn is known during another. */
    __device__ bool knows(int turn, int now) const { return turn < fixed || turn < now + ahead; }
    /* The unit of a turn, or a number behind the last. */
    __device__ int unit(int turn) const { return turn < fixed ? begin + turn : shared > 0 ? known[turn % places] : units; }
    /* At the beginning of a turn: takes the unit of the turn that is `ahead` behind it. */
    __device__ u32 take(int turn) {
        u32 taken = shared;
        if (leads && takes && turn + ahead >= fixed) {
            taken = atomicInc(counter, shared + gridDim.x * TEAMS - 1);
            takes = taken < (u32)shared;
        }
        return taken;
    }
    /* Before the team meets at the end of the turn. */
    __device__ void tell(int turn, u32 taken) const {
        if (leads) known[(turn + ahead) % places] = taken < (u32)shared ? units - shared + (int)taken : units;
    }
};

/*
 * `Product` defines how the weights of a step are copied to a stage of the ring buffer and multiplied from there: `aim` selects
 * the first row of a tile, given the end of its expert's rows, and the first step; `copy` copies that step, then every SPLIT-th;
 * `load` loads the lane's activations of a step into `Inputs`; `add` adds the product of a part of a stage with those. Sums are
 * multiplied by `sum_factor` at the end.
 */
template <typename Product> __device__ inline void multiply_items(const GroupedLinearParams& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / SPLIT, member = warp % SPLIT;
    const int inputs = (int)p.inputs, steps = (inputs + Product::columns - 1) / Product::columns;
    const int tiles = (int)((p.covered + RESULTS - 1) / RESULTS);
    float(*partial)[WARPS][TOKENS][TOKEN_SUMS] = (float(*)[WARPS][TOKENS][TOKEN_SUMS])(memory + WARPS * STAGES * Product::stage);
    /* The warp's ring buffer. The compiler cannot know the address, so it keeps it rather than compute it in each step. */
    u32 ring = (u32)__cvta_generic_to_shared(memory + warp * STAGES * Product::stage);
    asm volatile("" : "+r"(ring));
    const u32 ring_end = ring + STAGES * Product::stage;

    const Extent::Loaded loaded = p.extent.load();
#if SUMMED
    /* Lane `i` has the expert of slot `i`, and its weight. */
    const int expert = lane < SLOTS ? expert_of(p, lane) : -1, items = 1;
    const float factor = lane < SLOTS ? p.factors.row(0)[lane] : 0.0f;
    const int all = (int)p.extent.count(loaded) * SLOTS;
    if (all == 0) return;
    auto expert_at = [&](int segment) { return __shfl_sync(0xffffffffu, expert, segment); };
#elif DIRECT
    const int items = (int)p.items, all = (int)p.extent.count(loaded) * SLOTS;
#else
    const int all = (int)p.extent.count(loaded) * SLOTS, items = count_items(p, all);
#endif
    const int units = items * tiles;
    Turns turns(p, units, steps, team, member);

    /* The next copy: turn, its item, step and stage. */
    Product product(p);
    Cursor next_cursor = {}, cursor = {};
    Item next_item = {-1, 0, 0}, item = {-1, 0, 0};
    int next_number = -1, number = -1, next_turn = 0, next_step = member, next_segment = 0, turn = 0, filled = 0;
    u32 next_stage = ring, stage = ring;
    bool aimed = false;
    auto find = [&](Cursor& from, int number) {
#if SUMMED
        return Item{0, 0, 1};
#else
        return find_item(p, from, number, all);
#endif
    };
    auto first_row = [&](int expert, int unit) {
        const i64 first = expert * p.outputs;
        return (Product::aligned ? first / 8 * 8 : first) + (i64)(unit % tiles) * RESULTS;
    };
    auto aim = [&]() {
        while (turns.knows(next_turn, turn)) {
            const int unit = turns.unit(next_turn);
            if (unit >= units) return;
#if SUMMED
            int expert = -1;
            while (next_segment < SEGMENTS && (expert = expert_at(next_segment)) < 0) ++next_segment;
#else
            if (unit / tiles != next_number) {
                next_number = unit / tiles;
                next_item = find(next_cursor, next_number);
            }
            const int expert = next_item.expert;
#endif
            if (expert >= 0) {
                const i64 row = first_row(expert, unit), first = expert * p.outputs, stop = first + p.outputs;
                /* A tile behind the last row copies the first, and its result is discarded. */
                product.aim(p, row < stop ? row : first, stop, next_step);
                aimed = true;
                return;
            }
            next_segment = 0;
            ++next_turn;
        }
    };
    auto fetch = [&]() {
        if (!aimed && member < steps) aim();
        if (aimed) {
            product.copy(next_stage, next_step);
            next_stage = next_stage + Product::stage == ring_end ? ring : next_stage + Product::stage;
            ++filled;
            next_step += SPLIT;
            if (next_step >= steps) {
                aimed = false;
                next_step = member;
                if (++next_segment >= SEGMENTS) {
                    next_segment = 0;
                    ++next_turn;
                }
            }
        }
        commit_copies();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) fetch();

    /* The assignments of the lane's columns, and their inputs. */
    int assignments[TILES];
    const X* x[TILES];
    for (;; ++turn) {
        const int unit = turns.unit(turn);
        if (unit >= units) break;
        const u32 taken = turns.take(turn);
        if (unit / tiles != number) {
            number = unit / tiles;
            item = find(cursor, number);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                assignments[tile] = item.expert < 0 ? -1 : assignment_of(p, item, tile * 8 + lane / 4, all);
                /* Columns without an assignment multiply the first token, and their results are discarded. */
                x[tile] = inputs_of(p, assignments[tile] < 0 ? 0 : assignments[tile]);
            }
        }
        float sums[PARTS][TILES][4] = {};
        if (item.expert >= 0) {
            if (unit % tiles == 0) copy_rest(p, item, member * 32 + lane, SPLIT * 32, all);
            for (int segment = 0; segment < SEGMENTS; ++segment) {
#if SUMMED
                if (expert_at(segment) < 0) continue;
                float before[PARTS][4];
#pragma unroll
                for (int i = 0; i < PARTS * 4; ++i) {
                    before[i / 4][i % 4] = sums[i / 4][0][i % 4];
                    sums[i / 4][0][i % 4] = 0.0f;
                }
                x[0] = inputs_of(p, segment);
#endif
                typename Product::Inputs own;
                if (member < steps) product.load(x, member, own);
#pragma unroll 1
                for (int step = member; step < steps; step += SPLIT) {
                    const typename Product::Inputs here = own;
                    if (step + SPLIT < steps) product.load(x, step + SPLIT, own);
                    /* Groups without copies come between if the next unit was not known in time, and at the end. */
                    if (filled == STAGES - 1) {
                        await_copies<STAGES - 2>();
                    } else {
                        await_copies<0>();
                    }
                    __syncwarp();
                    const u32 weights = stage;
                    stage = stage + Product::stage == ring_end ? ring : stage + Product::stage;
                    --filled;
                    /* Refills the stage that was read one step ago. */
                    fetch();
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) product.add(weights, part, here, sums[part]);
                }
#if SUMMED
                const float own_factor = __shfl_sync(0xffffffffu, factor, segment);
#pragma unroll
                for (int i = 0; i < PARTS * 4; ++i) {
                    sums[i / 4][0][i % 4] = before[i / 4][i % 4] + own_factor * sums[i / 4][0][i % 4];
                }
#endif
            }
        }
        float(*sum_of)[TOKENS][TOKEN_SUMS] = partial[turn % 2] + team * SPLIT;
#pragma unroll
        for (int i = 0; i < PARTS * TILES; ++i) {
            /* The rows of a part, 8 apart: with GATED, those of the gate of all parts come first. */
            const int part = i / TILES, tile = i % TILES, token = tile * 8 + lane % 4 * 2;
            const int low = lane / 4 + part * (GATED ? 8 : 16), high = low + (GATED ? RESULTS : 8);
            sum_of[member][token][low] = Product::sum_factor * sums[part][tile][0];
            sum_of[member][token + 1][low] = Product::sum_factor * sums[part][tile][1];
            sum_of[member][token][high] = Product::sum_factor * sums[part][tile][2];
            sum_of[member][token + 1][high] = Product::sum_factor * sums[part][tile][3];
        }
        turns.tell(turn, taken);
        /* Sums are read before the next barrier, and overwritten after it. */
        meet(team);
        if (item.expert < 0) continue;
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
            for (int other = 0; other < SPLIT; ++other) up += sum_of[other][token][at + RESULTS];
            sum = gated(sum, up + or_else(p.other_bias, first + output, 0.0f), p.limit, p.up_offset);
#endif
            outputs_of(p, assignment)[output] = narrow<Y>(sum);
        }
    }
    await_copies<0>();
}
#endif
