/*
 * Products of a few rows with packed integers of 4 or 8 bits, with what stands in front of them and behind, sm_80 and up:
 * y = f(norm(x) W^T + b) for activations of f16 or bf16, and with ACT8 y = f((x W^T) * scale of the row + b) for signed bytes.
 *
 * The plan is that of band.cu: a tile is 16 outputs by all tokens, blocks stay, teams of SPLIT warps take turns at tiles, and the
 * warps of a team at pieces of the inputs; they add up in shared memory, and with SLICES > 1 blocks share a tile through
 * scratch memory. What differs is the weights. A step is 16 rows by 64 bytes, and a piece two steps: 128 or 256 inputs, 2 KiB. 8
 * rows by 16 bytes are one line of 128 bytes in memory, so a piece is two runs of 1 KiB, copied into a ring of the warp's own with the numbers of its groups. (Lanes that copied the
 * very bytes they multiply, a quarter of four lines at a time, came to 2.1 TB/s.) Rows of a line change places by which line it
 * is: then 8 lanes meet no bank twice, copying or reading.
 *
 * Warps do not meet at the end of a tile. Each leaves its sums in one of TURNS places and says so at that place's barrier; the
 * warp of the team whose turn it is adds up a tile when it has done its part of the next. A place is taken again when the barrier
 * behind it shows that its sums have been read: three tiles on, so that hardly anyone ever waits.
 *
 * Integers become operands of mma.m16n8k16 by a few operations on two at a time: 4 bits in front of the exponent of 128 (bf16)
 * or 1024 (f16) are that number plus the integer. What that adds, zero points and minima are the same for all of a group, so
 * they are put right with the sum of the group's activations, in f32: w = s (q - z) + m makes sum(w x) = s sum(q x) + (m - s z)
 * sum(x). Signed bytes become what they are, exactly: see pair_of. With ACT8 bytes are multiplied as they are (m16n8k32).
 *
 * The order of inputs in a lane's 16 bytes is chosen in packing so that its operands of x are consecutive and so that the four
 * lanes of a row share a group: see weight/packing.rs.
 *
 * Bytes: integers and scales, once; x once per block, from the L2. Floor: those over read bandwidth.
 * Measured figures: docs/src/performance/quantisation-cuda.md.
 */
/* Inputs of a step and of a piece. */
#define SPAN (512 / BITS)
#define PIECE (2 * SPAN)
/* Groups of a step and of a piece, and inputs whose activations are summed together. */
#define STEP_GROUPS (GROUP == 0 || GROUP > SPAN ? 1 : SPAN / GROUP)
#define GROUPS (GROUP == 0 ? 1 : PIECE / GROUP)
#define SUMMED (GROUP == 0 ? SLICE : SPAN / STEP_GROUPS)
#define TILES ((TOKENS + 7) / 8)
/* Floats from token to token of the sums of a warp: the lanes of a warp meet no bank twice. */
#define SUM_ROW 20
/* Places for the sums of the tiles of a team. */
#define TURNS 4
#define TEAMS (WARPS / SPLIT)
#define ITEMS (8 * TOKENS)
#define ITEM_WARPS ((ITEMS + 31) / 32)
/* Numbers for a group of a row: its scale, and its zero point or minimum. */
#define NUMBERS (OFFSET ? 2 : 1)
/* Bytes of the numbers of 8 rows, of a group. */
#define LINE (8 * NUMBERS * SCALE_BYTES)
/* Copies of 16 bytes for the numbers of a piece, of 8 rows. */
#define COPIES (GROUP == 0 ? 0 : GROUPS * LINE / 16)
#define STAGE (2048 + 2 * COPIES * 16)
/* What a stored integer of 0 stands for as an operand, less what it means. */
#if BITS == 8
#define SHIFTED (OFFSET == 2 ? -128.0f : 0.0f)
#elif HALF
#define SHIFTED (OFFSET == 0 ? 1032.0f : 1024.0f)
#else
#define SHIFTED (OFFSET == 0 ? 136.0f : 128.0f)
#endif
#define NEEDS_SUMS (!ACT8 && (BITS == 4 || OFFSET != 0))

#if ACT8
typedef int Sum;
#else
typedef float Sum;
#endif

extern __shared__ __align__(128) u8 memory[];

/* Integers, then the numbers of groups; both in units of 8 rows. */
struct Packed {
    const u8* integers;
    const u8* numbers;
    i64 unit, number_unit;
};

#if __CUDA_ARCH__ >= 800
/* Starts copying 16 bytes that are read once: first to leave the L2. */
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

/*
 * 16 or 8 bytes of activations. Lanes without a token read nothing and hold anything: what comes of it is in columns of its own,
 * and goes nowhere. For one token that is a quarter of the reads, which are what shared memory does most.
 */
__device__ inline Vector load_x(bool real, u32 from) {
    Vector v;
    asm volatile("{\n.reg .pred real;\nsetp.ne.u32 real, %5, 0;\n@real ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "r"(from), "r"((u32)real));
    return v;
}
__device__ inline uint2 load_half_x(bool real, u32 from) {
    uint2 v;
    asm volatile("{\n.reg .pred real;\nsetp.ne.u32 real, %3, 0;\n@real ld.shared.v2.u32 {%0, %1}, [%2];\n}"
        : "=r"(v.x), "=r"(v.y) : "r"(from), "r"((u32)real));
    return v;
}

/* Waits for all but the newest STAGES - 2 pieces. */
__device__ inline void await_oldest() { asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory"); }

#if ACT8
__device__ inline void multiply(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#else
__device__ inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#if BITS == 4
/* Pair `i` of the integers of a word, each plus what SHIFTED says. */
__device__ inline u32 pair_of(u32 word, int i) {
    u32 result;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(result) : "r"(word >> (4 * i)), "n"(HALF ? 0x64006400 : 0x43004300));
    return result;
}
#define PAIRS 4
#else
#define PAIRS 2
/* Pair `i` of the signed bytes of a word. */
__device__ inline u32 pair_of(u32 word, int i) {
    u32 result;
#if HALF
    u32 raised = word ^ 0x80808080u;
    asm("prmt.b32 %0, %1, 0x64646464, %2;" : "=r"(result) : "r"(raised), "r"(i ? 0x4342 : 0x4140));
    asm("sub.f16x2 %0, %0, %1;" : "+r"(result) : "r"(0x64806480));
#else
    /* A byte is its low seven bits less 128 times its sign: 128 + the first, less 128 or 256. */
    u32 both = __byte_perm(word, 0, i ? 0x4342 : 0x4140), rest, sign;
    asm("lop3.b32 %0, %1, 0x007f007f, 0x43004300, 0xea;" : "=r"(rest) : "r"(both));
    asm("lop3.b32 %0, %1, 0x00800080, 0x43004300, 0xea;" : "=r"(sign) : "r"(both));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(sign), "r"(0xbf80bf80), "r"(rest));
#endif
    return result;
}
#endif

/* What the sum of a group comes to, given its sum of activations. */
__device__ inline float put_right(float scale, float second, float sum, float activations) {
#if OFFSET == 1
    return scale * (sum - (second + SHIFTED) * activations);
#elif OFFSET == 2
    return scale * (sum - SHIFTED * activations) + second * activations;
#elif BITS == 4
    return scale * (sum - SHIFTED * activations);
#else
    return scale * sum;
#endif
}
#endif

/* Scale, and zero point or minimum, of a row of a unit. */
__device__ inline void numbers_of(const u8* line, int row, float& scale, float& second) {
    const SCALE* own = (const SCALE*)line + row * NUMBERS;
    scale = widen(own[0]);
    second = OFFSET ? widen(own[NUMBERS - 1]) : 0.0f;
}
#endif

extern "C" __global__ void __launch_bounds__(BLOCK, 1) packed(Extent extent, i64 first_row, i64 tile_count, i64 inputs, const X* x, i64 x_row,
                                                              const float* x_scales, Packed weight, i64 immutable, Norm norm,
                                                              Sum* scratch, u32* counters, Epilogue e) {
#if __CUDA_ARCH__ >= 800
    __shared__ float row_sums[WARPS];
    __shared__ u64 all_barriers[TEAMS][TURNS];
    u8* activations = memory + WARPS * STAGES * STAGE;
    float* group_sums = (float*)(activations + TOKENS * X_PITCH);
    Sum* sums = (Sum*)(group_sums + (NEEDS_SUMS ? TOKENS * (SLICE / SUMMED) : 0));
    let_next_start();
    if (threadIdx.x < TEAMS * TURNS) make_barrier(all_barriers[0][threadIdx.x], SPLIT);
    if (!immutable) await_previous();

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (int)tile_count;
    /* The team, and which of it this warp is. */
    int team = warp / SPLIT, member = warp % SPLIT;
    int slice = blockIdx.x % SLICES, first = blockIdx.x / SLICES * TEAMS + team, groups = gridDim.x / SLICES * TEAMS;
    int begin = slice * SLICE, count = (int)inputs - begin < SLICE ? (int)inputs - begin : SLICE;
    int steps = (count + SPAN - 1) / SPAN, pieces = (steps + 1) / 2;
    int group = lane / 4, part = lane % 4, units = ((int)e.outputs + 7) / 8;

    /* What is copied next: tile, piece, and where its units and their numbers are. */
    u8* ring = memory + warp * STAGES * STAGE;
    const u32 ring_address = (u32)__cvta_generic_to_shared(ring) + lane / 8 * 128 + (lane % 8 ^ lane / 8 * 2) * 16;
    const u32 to_numbers = (u32)__cvta_generic_to_shared(ring) + 2048 + lane * 16 - ring_address;
    u32 to = ring_address;
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    int next_tile = member < pieces ? first : tiles, next_piece = member;
    const u8 *low_source, *high_source, *numbers, *high_numbers;
    /* Units of a tile. Rows that alternate take two neighbours. */
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
        asm volatile("cp.async.commit_group;" ::: "memory");
        to += STAGE;
        to = to == ring_address + STAGES * STAGE ? ring_address : to;
    };
    if (next_tile < tiles) aim();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) fetch();

    await_previous();
    i64 tokens = extent.count() - first_row;
    /* What belongs to the outputs of a pair. */
    struct Own { float scale[2], second[2]; };
    auto get_own = [&](const Rows& rows, int pair, i64 token) {
        Own own = {{1.0f, 1.0f}, {}};
#if GROUP == 0
        int low, high;
        units_of(rows, low, high);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int row = rows.step == 2 ? pair * 2 + i : i * 8 + pair;
            numbers_of(weight.numbers + (row < 8 ? low : high) * weight.number_unit, row % 8, own.scale[i], own.second[i]);
#if ACT8
            own.scale[i] *= x_scales[token];
#endif
        }
#endif
        return own;
    };
    /* Inputs behind the last, to the end of a step, are zeros. */
    for (int item = threadIdx.x; item < TOKENS * ((steps * SPAN - count) * (int)sizeof(X) / 16); item += BLOCK) {
        int filled = (steps * SPAN - count) * (int)sizeof(X) / 16;
        *(Vector*)(activations + item / filled * X_PITCH + count * (int)sizeof(X) + item % filled * 16) = Vector{};
    }
#if ACT8
    int vectors = (count + 15) / 16;
#pragma unroll 4
    for (int item = threadIdx.x; item < TOKENS * vectors; item += BLOCK) {
        int token = item / vectors, at = item % vectors;
        *(Vector*)(activations + token * X_PITCH + at * 16) = load_vector(x + token * x_row + begin + at * 16);
    }
#else
    stage(x, x_row, inputs, begin, count, norm, activations, row_sums);
#endif
    __syncthreads();
#if NEEDS_SUMS
    /* Sums of the activations of every group. */
#if GROUP == 0
    for (int token = warp; token < TOKENS; token += WARPS) {
        float sum = 0.0f;
        for (int at = lane; at < steps * SPAN / 8; at += 32) {
            Vector v = *(const Vector*)(activations + token * X_PITCH + at * 16);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += Lanes<X>::get(v, i);
        }
        sum = warp_sum(sum);
        if (lane == 0) group_sums[token] = sum;
    }
#else
    /* A thread takes 8 of them, and lanes of a group add up. */
    const int vectors = TOKENS * (SLICE / 8), lanes = SUMMED / 8;
    for (int item = threadIdx.x; item < (vectors + 31) / 32 * 32; item += BLOCK) {
        int token = item / (SLICE / 8), at = item % (SLICE / 8);
        float sum = 0.0f;
        if (item < vectors) {
            Vector v = *(const Vector*)(activations + token * X_PITCH + at * 16);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += Lanes<X>::get(v, i);
        }
#pragma unroll
        for (int distance = lanes / 2; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (item < vectors && item % lanes == 0) group_sums[item / lanes] = sum;
    }
#endif
    __syncthreads();
#endif

    int turn = 0;
    const u8 *here = ring, *ring_end = ring + STAGES * STAGE;
    /* Where row `i` of a piece's 16 is, for this lane. */
    auto place_of = [&](int i) { return i / 8 * 1024 + part * 128 + (i % 8 ^ part * 2) * 16; };
    u32 own_x = (u32)__cvta_generic_to_shared(activations) + group * X_PITCH;
#if SLICES > 1
    /* The tile whose sums this warp will come back to, and which of its pairs. */
    int later = -1, later_item = 0;
    auto come_back = [&]() {
        if (later < 0) return;
        u32* counter = counters + later * ITEM_WARPS + later_item / 32;
        if (lane == 0) {
            u32 arrived;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
            } while (arrived != SLICES);
            *counter = 0;
        }
        __syncwarp();
        int token = later_item / 8;
        if (later_item < ITEMS && token < tokens) {
            Rows rows = rows_of(e, later);
            Ready ready = get_ready(e, rows, later_item % 8, token);
            turn_ready(e, rows, ready);
            const float2* from = (const float2*)scratch + (i64)later * SLICES * ITEMS + later_item;
#if ACT8
            Own own = get_own(rows, later_item % 8, token);
            int a = 0, b = 0;
#pragma unroll
            for (int other = 0; other < SLICES; ++other) {
                float2 its = __ldcg(from + other * ITEMS);
                a += __float_as_int(its.x);
                b += __float_as_int(its.y);
            }
            conclude(e, rows, ready, token, (float)a * own.scale[0], (float)b * own.scale[1]);
#else
            float a = 0.0f, b = 0.0f;
#pragma unroll
            for (int other = 0; other < SLICES; ++other) {
                float2 its = __ldcg(from + other * ITEMS);
                a += its.x;
                b += its.y;
            }
            conclude(e, rows, ready, token, a, b);
#endif
        }
        later = -1;
    };
#endif
    u64* barriers = all_barriers[team];
    Sum* team_sums = sums + team * (TURNS * SPLIT * TOKENS * SUM_ROW);
    /* Which pair of the tile of a turn is this thread's to finish: warps take turns. */
    auto item_of = [&](int turn) { return ((member - turn * ITEM_WARPS) & (SPLIT - 1)) * 32 + lane; };
    /* What finishing a tile takes beside its sums, read ahead. */
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
#elif !ACT8
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
#if GROUP == 0 && !ACT8
            /* Put right as a whole, where groups were not. */
            float activations = NEEDS_SUMS ? group_sums[token] : 0.0f;
            a = put_right(own.scale[0], own.second[0], a, activations);
            b = put_right(own.scale[1], own.second[1], b, activations);
#endif
        }
#if SLICES == 1
        if (item < ITEMS && token < tokens) {
            Rows rows = rows_of(e, tile);
            turn_ready(e, rows, ready);
#if ACT8
            conclude(e, rows, ready, token, (float)a * own.scale[0], (float)b * own.scale[1]);
#else
            conclude(e, rows, ready, token, a, b);
#endif
        }
#else
        come_back();
        if (item < ITEMS) {
#if ACT8
            float2 both = make_float2(__int_as_float(a), __int_as_float(b));
#else
            float2 both = make_float2(a, b);
#endif
            __stcg((float2*)scratch + ((i64)tile * SLICES + slice) * ITEMS + item, both);
        }
        __syncwarp();
        if (lane == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counters + tile * ITEM_WARPS + item / 32) : "memory");
        }
        if (turn % SLICES == slice) {
            later = tile;
            later_item = item;
        }
#endif
    };
    for (int tile = first; tile < tiles; tile += groups, ++turn) {
        Rows rows = rows_of(e, tile);
        if (turn > 0) prepare(tile - groups, turn - 1);
        Sum total[TILES][4] = {};
        int low_at = place_of(rows.step == 2 ? group * 2 : group), high_at = place_of(rows.step == 2 ? group * 2 + 1 : 8 + group);
        for (int piece = member; piece < pieces; piece += SPLIT) {
            await_oldest();
            __syncwarp();
            Vector a[2], b[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                a[half] = *(const Vector*)(here + low_at + half * 512);
                b[half] = *(const Vector*)(here + high_at + half * 512);
            }
#if GROUP > 0
            float scale[GROUPS][2], second[GROUPS][2];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int row = rows.step == 2 ? group * 2 + i : i * 8 + group;
                    numbers_of(here + 2048 + row / 8 * (COPIES * 16) + g * LINE, row % 8, scale[g][i], second[g][i]);
                }
            }
#endif
            /* Into the place that was read a piece ago. */
            fetch();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int step = piece * 2 + half;
                if (half == 1 && step >= steps) break;
#if ACT8
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    Vector v = load_x(8 * t + group < TOKENS, own_x + 8 * t * X_PITCH + step * SPAN + part * 16);
                    multiply(total[t], a[half].word[0], b[half].word[0], a[half].word[1], b[half].word[1], v.word[0], v.word[1]);
                    multiply(total[t], a[half].word[2], b[half].word[2], a[half].word[3], b[half].word[3], v.word[2], v.word[3]);
                }
#else
                /* Two sums in turn, so that fewer products wait for the one before. */
                float c[TILES][2][4] = {};
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    u32 low[PAIRS], high[PAIRS];
#pragma unroll
                    for (int i = 0; i < PAIRS; ++i) {
                        low[i] = pair_of(a[half].word[w], i);
                        high[i] = pair_of(b[half].word[w], i);
                    }
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        u32 x_here = own_x + 8 * t * X_PITCH + step * (SPAN * 2);
#if BITS == 4
                        Vector v = load_x(8 * t + group < TOKENS, x_here + w * 64 + part * 16);
                        multiply(c[t][0], low[0], high[0], low[1], high[1], v.word[0], v.word[1]);
                        multiply(c[t][1], low[2], high[2], low[3], high[3], v.word[2], v.word[3]);
#else
                        u32 at = GROUP == 0 ? part * 32 + w * 8 : w * 32 + part * 8;
                        uint2 v = load_half_x(8 * t + group < TOKENS, x_here + at);
                        multiply(c[t][w % 2], low[0], high[0], low[1], high[1], v.x, v.y);
#endif
                    }
#if GROUP > 0
                    /* Words of a group. */
                    const int words = 4 / STEP_GROUPS;
                    if ((w + 1) % words == 0) {
                        const int g = GROUP > SPAN ? 0 : half * STEP_GROUPS + w / words;
#pragma unroll
                        for (int t = 0; t < TILES; ++t) {
                            float around[2] = {};
#if NEEDS_SUMS
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                int own_token = 8 * t + 2 * part + i;
                                own_token = own_token < TOKENS ? own_token : TOKENS - 1;
                                around[i] = group_sums[own_token * (SLICE / SUMMED) + step * STEP_GROUPS + w / words];
                            }
#endif
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                float sum = words == 1 && BITS == 8 ? c[t][w % 2][i] : c[t][0][i] + c[t][1][i];
                                total[t][i] += put_right(scale[g][i / 2], second[g][i / 2], sum, around[i % 2]);
                                c[t][0][i] = c[t][1][i] = 0.0f;
                            }
                        }
                    }
#endif
                }
#if GROUP == 0
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) total[t][i] += c[t][0][i] + c[t][1][i];
                }
#endif
#endif
            }
            here += STAGE;
            here = here == ring_end ? ring : here;
        }

        if (turn > 0) finish(tile - groups, turn - 1);
        if (turn >= TURNS) await(barriers[(turn + 1) % TURNS], (turn + 1) / TURNS - 1);
        Sum* partial = team_sums + (turn % TURNS) * (SPLIT * TOKENS * SUM_ROW);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            int at = 8 * t + 2 * part;
            Sum* to = partial + (member * TOKENS + at) * SUM_ROW + group;
            if (at < TOKENS) {
                to[0] = total[t][0];
                to[8] = total[t][2];
            }
            if (at + 1 < TOKENS) {
                to[SUM_ROW] = total[t][1];
                to[SUM_ROW + 8] = total[t][3];
            }
        }
        __syncwarp();
        if (lane == 0) arrive(barriers[turn % TURNS]);
    }
    if (turn > 0) {
        int tile = first + (turn - 1) * groups;
        prepare(tile, turn - 1);
        finish(tile, turn - 1);
    }
#if SLICES > 1
    come_back();
#endif
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
