/*
 * Products of a few rows with packed integers of 4 or 8 bits, with the preceding norm and the epilogue, sm_80 and up: y =
 * f(norm(x) W^T + b) for activations of f16 or bf16, and with DIGITS 1 y = f((x W^T) * scale of the row + b) for signed bytes.
 *
 * TOKENS is the number of tokens, rounded up to 8 or 16 if there are more than 4: `rows` is their number.
 *
 * The structure is that of decode_gemm.cu: a tile is 16 outputs by all tokens, blocks are persistent, teams of SPLIT warps take
 * tiles in turn, and the warps of a team take k tiles in turn; sums are added in shared memory, and with SLICES > 1 the slices of
 * a tile are added from scratch memory, where no block waits for another. The difference is the weights. A step is 16 rows by 64
 * bytes, and a k tile two steps: 128 or 256 inputs, 2 KiB. 8 rows by 16 bytes are one line of 128 bytes in memory, so a k tile is
 * two contiguous runs of 1 KiB, copied into the warp's own ring buffer together with the scales and offsets of its groups. (When
 * lanes copied only the bytes they multiply, a quarter of four lines at a time, the kernel reached 2.1 TB/s.) The rows of a line
 * are permuted by the index of the line, so that 8 lanes have no bank conflicts in copies or reads.
 *
 * There is no block barrier at the end of a tile. Each warp writes its sums to one of TURNS buffers, and its lanes arrive at the
 * mbarrier of that buffer; the warps of a team take turns in finishing tiles, and a warp does so after its part of the next tile.
 * A buffer is reused three tiles later, when the mbarrier of the following buffer shows that its sums have been read, so warps
 * hardly ever wait.
 *
 * How a warp multiplies depends on the number of tokens. For one token, converting integers to the type of the activations would
 * be most of the work and the bottleneck; so for few tokens the activations are converted instead, once, to three bytes each:
 * bytes.cuh. For more tokens, integers are converted: halves.cuh. The order of inputs in a lane's 16 bytes is chosen in packing
 * so that its operands of x are consecutive and the four lanes of a row share a group: see weight/packing.rs.
 *
 * Ring buffers are filled before the preceding kernels have finished, but only two stages (of 16 warps): the reads of an SM
 * queue, and activations would arrive 5 us late behind all stages. The other stages follow after the loads of the activations
 * were issued.
 *
 * Bytes: integers and scales, once; x once per block, from the L2. Floor: those over read bandwidth. Measured figures:
 * docs/src/performance/quantisation-cuda.md.
 */
/* Buffers for the sums of a team's tiles. */
#define TURNS 4
#define TEAMS (WARPS / SPLIT)
#define ITEMS (8 * TOKENS)
#define ITEM_WARPS ((ITEMS + 31) / 32)

/* Stages that are filled before activations are requested: about as much as memory can deliver until then. */
#define EARLY (32 / WARPS < STAGES - 1 ? 32 / WARPS : STAGES - 1)

extern __shared__ __align__(128) u8 memory[];

/* Integers, and scales and offsets of groups; both in units of 8 rows. */
struct Packed {
    const u8* integers;
    const u8* numbers;
    i64 unit, number_unit;
};

#if __CUDA_ARCH__ >= 800
/* Starts copying 16 bytes that are read once, so they are marked evict-first in the L2. */
__device__ inline void copy_ahead(u32 to, const u8* from, u64 once) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "l"(once) : "memory");
}

__device__ inline void make_barrier(u64& barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"((u32)__cvta_generic_to_shared(&barrier)), "r"(arrivals) : "memory");
}
__device__ inline void arrive(u64& barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}"
        :: "r"((u32)__cvta_generic_to_shared(&barrier)) : "memory");
}
/* Waits for the end of a phase, counted from 0. */
__device__ inline void await(u64& barrier, u32 phase) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
            : "=r"(done) : "r"((u32)__cvta_generic_to_shared(&barrier)), "r"(phase % 2) : "memory");
    } while (!done);
}

#endif

extern "C" __global__ void __launch_bounds__(BLOCK, 1) packed(Extent extent, i64 first_row, i64 rows, i64 tile_count, i64 inputs, const X* x, i64 x_row,
                                                              const float* x_scales, Packed weight, i64 immutable, Norm norm,
                                                              Sum* scratch, u32* counters, EpilogueParams e) {
#if __CUDA_ARCH__ >= 800
    __shared__ float row_sums[WARPS];
    __shared__ u64 all_barriers[TEAMS][TURNS];
    Product product(memory + WARPS * STAGES * STAGE);
    Sum* sums = (Sum*)(memory + WARPS * STAGES * STAGE + Product::bytes);
    launch_dependents();
    if (threadIdx.x < TEAMS * TURNS) make_barrier(all_barriers[0][threadIdx.x], SPLIT * 32);
    if (!immutable) wait_for_predecessor();

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (int)tile_count;
    /* The team, and the warp's index in it. */
    int team = warp / SPLIT, member = warp % SPLIT;
    int slice = blockIdx.x % SLICES, together = gridDim.x / SLICES;
    /* Neighbouring tiles go to different blocks, so the number of tiles per block differs by at most one. */
    int first = team * together + blockIdx.x / SLICES, groups = together * TEAMS;
    int begin = slice * SLICE, count = (int)inputs - begin < SLICE ? (int)inputs - begin : SLICE;
    int steps = (count + SPAN - 1) / SPAN, pieces = (steps + 1) / 2;
    int units = ((int)e.outputs + 7) / 8;

    /* The next copy: tile, k tile, and the addresses of its units and of their scales and offsets. */
    u8* ring = memory + warp * STAGES * STAGE;
    const u32 ring_address = (u32)__cvta_generic_to_shared(ring) + lane / 8 * 128 + (lane % 8 ^ lane / 8 * 2) * 16;
    const u32 to_numbers = (u32)__cvta_generic_to_shared(ring) + 2048 + lane * 16 - ring_address;
    u32 to = ring_address;
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    int next_tile = member < pieces ? first : tiles, next_piece = member;
    const u8 *low_source, *high_source, *numbers, *high_numbers;
    /* Units of a tile. Alternating rows take two neighbouring units. */
    auto units_of = [&](const Rows& rows, int& low, int& high) {
        low = rows.low / 8;
        high = rows.step == 2 ? low + 1 : rows.high / 8;
        low = low < units ? low : units - 1;
        high = high < units ? high : units - 1;
    };
    auto aim = [&]() {
        Rows rows = rows_of(e, next_tile);
        int low, high;
        units_of(rows, low, high);
        u32 unit = (u32)weight.unit, from = (u32)(begin / PIECE + member);
        low_source = weight.integers + ((u64)(u32)low * unit + (from * 1024 + lane * 16));
        high_source = weight.integers + ((u64)(u32)high * unit + (from * 1024 + lane * 16));
        if (COPIES > 0) {
            unit = (u32)weight.number_unit;
            from = from * (GROUPS * LINE) + lane % (COPIES ? COPIES : 1) * 16;
            numbers = weight.numbers + ((u64)(u32)(lane < COPIES ? low : high) * unit + from);
            if (COPIES == 32) high_numbers = weight.numbers + ((u64)(u32)high * unit + from);
        }
    };
    auto fetch = [&]() {
        if (next_tile < tiles) {
            copy_ahead(to, low_source, once);
            copy_ahead(to + 1024, high_source, once);
            if (2 * next_piece + 1 < steps) {
                copy_ahead(to + 512, low_source + 512, once);
                copy_ahead(to + 1536, high_source + 512, once);
            }
            if (COPIES > 0 && lane < 2 * COPIES) copy_ahead(to + to_numbers, numbers, once);
            if (COPIES == 32) copy_ahead(to + to_numbers + 512, high_numbers, once);
            low_source += SPLIT * 1024;
            high_source += SPLIT * 1024;
            numbers += SPLIT * GROUPS * LINE;
            if (COPIES == 32) high_numbers += SPLIT * GROUPS * LINE;
            next_piece += SPLIT;
            if (next_piece >= pieces) {
                next_piece = member;
                next_tile += groups;
                if (next_tile < tiles) aim();
            }
        }
        commit_copies();
        to += STAGE;
        to = to == ring_address + STAGES * STAGE ? ring_address : to;
    };
    if (next_tile < tiles) aim();
#pragma unroll 1
    for (int i = 0; i < EARLY; ++i) fetch();

    wait_for_predecessor();
    Extent::Loaded loaded = extent.load();
    /* Operands of the epilogue for the outputs of a pair. */
    struct Own { float scale[2], second[2]; };
    auto get_own = [&](const Rows& rows, int pair, i64 token) {
        Own own = {{1.0f, 1.0f}, {}};
#if GROUP == 0
        int low, high;
        units_of(rows, low, high);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int row = row_of(pair, i, rows.step == 2);
            numbers_of(weight.numbers + (row < 8 ? low : high) * weight.number_unit, row % 8, own.scale[i], own.second[i]);
#if DIGITS == 1
            own.scale[i] *= x_scales[token];
#endif
        }
#endif
        return own;
    };
    product.prepare(x, x_row, (int)rows - 1, inputs, begin, count, pieces, norm, row_sums, [&]() {
#pragma unroll 1
        for (int i = EARLY; i < STAGES - 1; ++i) fetch();
    });
    i64 tokens = extent.count(loaded) - first_row;

    int turn = 0;
    const u8 *here = ring, *ring_end = ring + STAGES * STAGE;
    /* The row, for this lane, that is row `i` of a k tile's 16. */
    auto place_of = [&](int i) { return i / 8 * 1024 + lane % 4 * 128 + (i % 8 ^ lane % 4 * 2) * 16; };
#if SLICES > 1
    /*
     * Tiles whose counter this warp has incremented, and earlier tiles that it visits to add them up: the tile (-1: none), its
     * pair, the previous value of the counter, and whether this slice is to visit it. The value is used one iteration later, when
     * it has arrived.
     */
    struct Counted { int tile, item; u32 before; bool visits; };
    Counted counted = {-1, 0, 0, false}, visited = counted;
    auto add_up = [&](int tile, int item) {
        __threadfence();
        if (lane == 0) counters[tile * ITEM_WARPS + item / 32] = 0;
        int token = item / 8;
        if (item >= ITEMS || token >= tokens) return;
        Rows rows = rows_of(e, tile);
        Ready ready = get_ready(e, rows, item % 8, token);
        turn_ready(e, rows, ready);
        const float2* from = (const float2*)scratch + (i64)tile * SLICES * ITEMS + item;
#if DIGITS == 1
        Own own = get_own(rows, item % 8, token);
        int a = 0, b = 0;
#pragma unroll
        for (int other = 0; other < SLICES; ++other) {
            float2 its = __ldcg(from + other * ITEMS);
            a += __float_as_int(its.x);
            b += __float_as_int(its.y);
        }
        apply_epilogue(e, rows, ready, token, (float)a * own.scale[0], (float)b * own.scale[1]);
#else
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int other = 0; other < SLICES; ++other) {
            float2 its = __ldcg(from + other * ITEMS);
            a += its.x;
            b += its.y;
        }
        apply_epilogue(e, rows, ready, token, a, b);
#endif
    };
    /* Checks the counter values of the previous iteration, and visits its tile if this slice is to add it up. */
    auto settle = [&]() {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            Counted c = i ? counted : visited;
            (i ? counted : visited).tile = -1;
            if (c.tile < 0) continue;
            /* Every slice and the visitor have counted: this warp is the last. */
            if (__shfl_sync(0xffffffffu, c.before, 0) == SLICES) {
                add_up(c.tile, c.item);
            } else if (i && c.visits) {
                visited = c;
                if (lane == 0) visited.before = atomicAdd(counters + c.tile * ITEM_WARPS + c.item / 32, 1u);
            }
        }
    };
#endif
    u64* barriers = all_barriers[team];
    Sum* team_sums = sums + team * (TURNS * SPLIT * TOKENS * SUM_ROW);
    /* The pair that this thread finishes for the tile of an iteration; warps take turns. */
    auto item_of = [&](int turn) { return ((member - turn * ITEM_WARPS) & (SPLIT - 1)) * 32 + lane; };
    /* The epilogue operands of a tile, loaded ahead. */
    Ready ready = {};
    Own own = {};
    auto prepare = [&](int tile, int turn) {
        int item = item_of(turn);
        if (item >= ITEMS) return;
        Rows rows = rows_of(e, tile);
#if SLICES == 1
        if (item / 8 < tokens) {
            ready = get_ready(e, rows, item % 8, item / 8);
            own = get_own(rows, item % 8, item / 8);
        }
#elif DIGITS != 1
        own = get_own(rows, item % 8, 0);
#endif
    };
    /* Adds up the sums of a tile. */
    auto finish = [&](int tile, int turn) {
        int item = item_of(turn), token = item / 8;
        if (item / 32 >= ITEM_WARPS) return;
        await(barriers[turn % TURNS], turn / TURNS);
        Sum a = 0, b = 0;
        if (item < ITEMS) {
            const Sum* from = team_sums + ((turn % TURNS) * (SPLIT * TOKENS) + token) * SUM_ROW + item % 8;
#pragma unroll
            for (int other = 0; other < SPLIT; ++other) {
                a += from[other * (TOKENS * SUM_ROW)];
                b += from[other * (TOKENS * SUM_ROW) + 8];
            }
#if GROUP == 0 && DIGITS != 1
            /* Corrects the whole sum, if it was not corrected by group. */
            a = product.put_right(a, own.scale[0], own.second[0], token);
            b = product.put_right(b, own.scale[1], own.second[1], token);
#endif
        }
#if SLICES == 1
        if (item < ITEMS && token < tokens) {
            Rows rows = rows_of(e, tile);
            turn_ready(e, rows, ready);
#if DIGITS == 1
            apply_epilogue(e, rows, ready, token, (float)a * own.scale[0], (float)b * own.scale[1]);
#else
            apply_epilogue(e, rows, ready, token, a, b);
#endif
        }
#else
        settle();
        if (item < ITEMS) {
#if DIGITS == 1
            float2 both = make_float2(__int_as_float(a), __int_as_float(b));
#else
            float2 both = make_float2(a, b);
#endif
            __stcg((float2*)scratch + ((i64)tile * SLICES + slice) * ITEMS + item, both);
        }
        __syncwarp();
        counted = {tile, item, 0, turn % SLICES == slice};
        if (lane == 0) counted.before = count_slice(counters + tile * ITEM_WARPS + item / 32);
#endif
    };
    for (int tile = first; tile < tiles; tile += groups, ++turn) {
        Rows rows = rows_of(e, tile);
        if (turn > 0) prepare(tile - groups, turn - 1);
        bool alternate = rows.step == 2;
        int first_at = place_of(row_of(lane / 4, 0, alternate)), second_at = place_of(row_of(lane / 4, 1, alternate));
        product.begin();
        for (int piece = member; piece < pieces; piece += SPLIT) {
            await_copies<STAGES - 2>();
            __syncwarp();
            Vector own_first[2], own_second[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                own_first[half] = *(const Vector*)(here + first_at + half * 512);
                own_second[half] = *(const Vector*)(here + second_at + half * 512);
            }
            /* Refills the stage that was read one k tile ago. */
            fetch();
            product.add(own_first, own_second, here + 2048, alternate, piece, steps);
            here += STAGE;
            here = here == ring_end ? ring : here;
        }

        if (turn > 0) finish(tile - groups, turn - 1);
        if (turn >= TURNS) await(barriers[(turn + 1) % TURNS], (turn + 1) / TURNS - 1);
        Sum* partial = team_sums + (turn % TURNS) * (SPLIT * TOKENS * SUM_ROW);
        product.leave(partial + member * (TOKENS * SUM_ROW));
        /* Every lane arrives by itself, after its writes. */
        arrive(barriers[turn % TURNS]);
    }
    if (turn > 0) {
        int tile = first + (turn - 1) * groups;
        prepare(tile, turn - 1);
        finish(tile, turn - 1);
    }
#if SLICES > 1
#pragma unroll 1
    for (int i = 0; i < 2; ++i) settle();
#endif
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
