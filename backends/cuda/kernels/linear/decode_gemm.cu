/*
 * A linear layer for up to 16 rows with the preceding norm and its epilogue, sm_80 and up: y = f(norm(x) W^T + b), f16 or bf16.
 *
 * A tile is 16 outputs (8 pairs: see epilogue.cuh) by all tokens; a persistent block of 8 warps owns a slice of the inputs and
 * loops over tiles, one block per SM. The k tiles of 64 inputs are distributed over the warps round-robin; sums are added in
 * shared memory, in a fixed order. Each warp has its own ring buffer in shared memory, STAGES k tiles of 2 KiB (16 rows of a
 * line), filled by asynchronous copies across tile boundaries: 80 KiB in flight on every SM, where 4.8 TB/s need 29, and one
 * barrier per tile.
 *
 * Activations are normalised, rounded to their own type as the norm's result would be, and kept in shared memory. Weights are the
 * 16-row operand of mma.m16n8k16, tokens the 8-column one. The sum over inputs may run in any order as long as both operands
 * agree, so a lane's 16 consecutive bytes of a row are the fragments of two products. Every second row of a k tile has its halves
 * swapped, and the row stride of activations is 64 bytes more than a multiple of 128, so that 8 lanes have no bank conflicts.
 *
 * With SLICES > 1 (split-K) a block writes its partial sums to scratch memory and increments the tile's counter. One of the
 * slices, in rotation, visits the tile again one iteration later and increments the counter once more. The block whose increment
 * is the last, usually the visitor, adds up all slices, in their order, so the result does not depend on which block that is. No
 * block ever waits for another, so the kernel makes progress however few of its blocks are resident. On sm_90 two slices are a
 * cluster, whose blocks are resident together: there the visitor may wait for the other block, which avoids an atomic operation
 * with a result, whose latency exceeds the time of a tile while memory is busy.
 *
 * The ring buffers are filled before the preceding kernel has finished (unless weights may change), so memory stays busy between
 * kernels. With PACED, after attention of one token, a warp has only two k tiles in flight until its ring buffer is full: the
 * reads of an SM queue, and attention's would wait behind 112 KiB of them.
 *
 * Bytes: the weights, once; x once per block, from the L2. Floor: the weights over read bandwidth. Measured figures:
 * docs/src/performance/cuda.md.
 */
/* Inputs of a k tile, and its bytes. */
#define PIECE 64
#define STAGE (16 * PIECE * 2)
/* Tiles of 8 tokens. */
#define TILES ((TOKENS + 7) / 8)
/* Floats between the sums of consecutive tokens of a warp, chosen so that lanes have no bank conflicts. */
#define SUM_ROW 20
#define ITEMS (8 * TOKENS)
#define ITEM_WARPS ((ITEMS + 31) / 32)
/* Whether the slices of a tile are a cluster. Its blocks are one TPC of two SMs, so clusters leave no SM idle. */
#define PAIRED (SLICES == 2 && __CUDA_ARCH__ >= 900)
#if PAIRED
#define CLUSTERED __cluster_dims__(2, 1, 1)
#else
#define CLUSTERED
#endif

extern __shared__ __align__(128) u8 memory[];

#if __CUDA_ARCH__ >= 800
/* Starts copying 16 bytes of weights, or writes zeros. Weights are read once, so they are marked evict-first in the L2. */
__device__ inline void copy_ahead(u32 to, const u8* from, bool real, u64 once) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
        :: "r"(to), "l"(from), "r"(real ? 16 : 0), "l"(once) : "memory");
}
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(BLOCK, 1) decode_gemm(Extent extent, i64 tile_count, i64 inputs, const X* x, i64 x_row,
                                                            const u8* weight, i64 weight_row, i64 immutable, Norm norm,
                                                            float* scratch, u32* counters, EpilogueParams e) {
#if __CUDA_ARCH__ >= 800
    __shared__ float row_sums[WARPS];
    u8* activations = memory + WARPS * STAGES * STAGE;
    float* sums = (float*)(activations + TOKENS * X_PITCH);
    launch_dependents();
    if (!immutable) wait_for_predecessor();

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outputs = (int)e.outputs, tiles = (int)tile_count;
    int slice = blockIdx.x % SLICES, first = blockIdx.x / SLICES, groups = gridDim.x / SLICES;
    int begin = slice * SLICE, count = (int)inputs - begin < SLICE ? (int)inputs - begin : SLICE;
    int pieces = (count + PIECE - 1) / PIECE;

    /* The next copy: tile, k tile, and the rows that this lane copies, 4 of 16. */
    u8* ring = memory + warp * STAGES * STAGE;
    u32 ring_address = (u32)__cvta_generic_to_shared(ring) + lane / 8 * (PIECE * 2) + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    int next_tile = warp < pieces ? first : tiles, next_piece = warp;
    const u8* source[4];
    auto aim = [&]() {
        Rows rows = rows_of(e, next_tile);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = i * 4 + lane / 8, output = (i < 2 ? rows.low : rows.high) + row % 8 * rows.step;
            output = output < outputs ? output : outputs - 1;
            source[i] = weight + output * weight_row + (begin + lane % 8 * 8) * 2;
        }
    };
    auto fetch = [&](int slot) {
        if (next_tile < tiles) {
            bool real = next_piece * PIECE + lane % 8 * 8 < count;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                copy_ahead(ring_address + slot * STAGE + i * (4 * PIECE * 2), source[i] + next_piece * (PIECE * 2), real, once);
            }
            next_piece += WARPS;
            if (next_piece >= pieces) {
                next_piece = warp;
                next_tile += groups;
                if (next_tile < tiles) aim();
            }
        }
        commit_copies();
    };
    if (next_tile < tiles) aim();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (PACED && i > 1) await_copies<1>();
        fetch(i);
    }

#if NORM
    if (immutable) bring_parameters(norm, (int)inputs);
#endif
    wait_for_predecessor();
    Extent::Loaded loaded = extent.load();
#if SLICES == 1
    /* The pair that this thread finishes; warps take turns. The epilogue operands of the first pair are loaded together with the
     * activations. */
    int item = threadIdx.x, pair = item % 8;
    bool finishes = item < ITEMS;
    Ready ready = {};
    if (finishes && first < tiles) ready = get_ready(e, rows_of(e, first), pair, item / 8);
#endif
    stage<false>(x, x_row, TOKENS - 1, inputs, begin, count, norm, row_sums, [&](int token, int at, bool real, const Vector& eight) {
        if (real) *(Vector*)(activations + token * X_PITCH + at * 16) = eight;
    }, [] {});
    i64 tokens = extent.count(loaded);
    __syncthreads();

    int group = lane / 4, part = lane % 4, slot = 0, turn = 0;
    const u8* own_x = activations + group * X_PITCH + part * 16;
    const u8* low = ring + group * (PIECE * 2);
#if SLICES > 1
    /*
     * Tiles whose counter this warp has incremented, and earlier tiles that it visits to add them up: the tile (-1: none), its
     * pair, the previous value of the counter, and whether this slice is to visit it. The value is used one iteration later, when
     * it has arrived.
     */
    struct Counted { int tile, item; u32 before; bool visits; };
    Counted counted = {-1, 0, 0, false};
    auto add_up = [&](int tile, int item) {
#if !PAIRED
        __threadfence();
#endif
        if (lane == 0) counters[tile * ITEM_WARPS + item / 32] = 0;
        int token = item / 8;
        if (item >= ITEMS || token >= tokens) return;
        Rows rows = rows_of(e, tile);
        Ready ready = get_ready(e, rows, item % 8, token);
        turn_ready(e, rows, ready);
        const float2* from = (const float2*)scratch + (i64)tile * SLICES * ITEMS + item;
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int other = 0; other < SLICES; ++other) {
            float2 its = __ldcg(from + other * ITEMS);
            a += its.x;
            b += its.y;
        }
        apply_epilogue(e, rows, ready, token, a, b);
    };
#if PAIRED
    /* Adds up the tile that this warp visits, once both slices have incremented its counter. */
    auto settle = [&]() {
        int tile = counted.tile, item = counted.item;
        counted.tile = -1;
        if (tile < 0 || !counted.visits) return;
        u32 polls = 0;
        while (lane == 0) {
            u32 arrived;
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                : "=r"(arrived) : "l"(counters + tile * ITEM_WARPS + item / 32) : "memory");
            if (arrived == SLICES) break;
            count_poll(polls, wait_name("slices"));
        }
        __syncwarp();
        add_up(tile, item);
    };
#else
    Counted visited = counted;
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
#endif
    for (int tile = first; tile < tiles; tile += groups, ++turn) {
#if SLICES == 1
        Rows rows = rows_of(e, tile);
        if (turn > 0) {
            item = ((warp - turn * ITEM_WARPS) & (WARPS - 1)) * 32 + lane;
            finishes = item < ITEMS;
            if (finishes) ready = get_ready(e, rows, pair, item / 8);
        }
        if (finishes) turn_ready(e, rows, ready);
#else
        int item = ((warp - turn * ITEM_WARPS) & (WARPS - 1)) * 32 + lane, pair = item % 8;
#endif
        int token = item / 8;
        float c[TILES][4] = {};
        for (int piece = warp; piece < pieces; piece += WARPS) {
            await_copies<STAGES - 2>();
            __syncwarp();
            /* Refills the stage that was read one k tile ago. */
            fetch(slot == 0 ? STAGES - 1 : slot - 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (half == 1 && piece * PIECE + 32 >= count) break;
                const u8* here = low + slot * STAGE + ((half * 4 + part) ^ group % 2 * 4) * 16;
                Vector a = *(const Vector*)here, b = *(const Vector*)(here + 8 * PIECE * 2);
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    Vector v = {};
                    if (TOKENS >= 8 * (t + 1) || 8 * t + group < TOKENS) {
                        v = *(const Vector*)(own_x + 8 * t * X_PITCH + piece * (PIECE * 2) + half * 64);
                    }
                    multiply(c[t], a.word[0], b.word[0], a.word[1], b.word[1], v.word[0], v.word[1]);
                    multiply(c[t], a.word[2], b.word[2], a.word[3], b.word[3], v.word[2], v.word[3]);
                }
            }
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }

        float* partial = sums + (turn % 2) * (WARPS * TOKENS * SUM_ROW);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            int at = 8 * t + 2 * part;
            float* to = partial + (warp * TOKENS + at) * SUM_ROW + group;
            if (at < TOKENS) {
                to[0] = c[t][0];
                to[8] = c[t][2];
            }
            if (at + 1 < TOKENS) {
                to[SUM_ROW] = c[t][1];
                to[SUM_ROW + 8] = c[t][3];
            }
        }
        /* The tile after next overwrites these sums, after the next barrier. */
        __syncthreads();
        if (item / 32 >= ITEM_WARPS) continue;
        float a = 0.0f, b = 0.0f;
        if (item < ITEMS) {
#pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                const float* from = partial + (other * TOKENS + token) * SUM_ROW + pair;
                a += from[0];
                b += from[8];
            }
        }
#if SLICES == 1
        if (finishes && token < tokens) apply_epilogue(e, rows, ready, token, a, b);
#else
        settle();
        if (item < ITEMS) __stcg((float2*)scratch + ((i64)tile * SLICES + slice) * ITEMS + item, make_float2(a, b));
        __syncwarp();
        counted = {tile, item, 0, turn % SLICES == slice};
#if PAIRED
        if (lane == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counters + tile * ITEM_WARPS + item / 32) : "memory");
        }
#else
        if (lane == 0) counted.before = count_slice(counters + tile * ITEM_WARPS + item / 32);
#endif
#endif
    }
#if SLICES > 1
#pragma unroll 1
    for (int i = 0; i < 2; ++i) settle();
#endif
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
