/*
 * linear with packed integers of 4 or 8 bits by wgmma (sm_90a), for some tens to hundreds of rows: y = x W^T + b, or that added
 * to a residual, x of f16 or bf16.
 *
 * Weights are the 64-row operand, and come from registers. A block computes a tile of GROUPS * 64 outputs by TOKENS rows of x. A
 * producer thread copies k tiles of 128 inputs by TMA into a ring buffer of STAGES stages: integers with their scales and offsets
 * as they lie in memory, x swizzled by 128 bytes. Immutable weights are loaded before the preceding kernels have finished. Four
 * consumer warpgroups multiply: GROUPS of them divide the outputs of a tile, and SHARES such sets take k tiles in turn. Each
 * warpgroup dequantises its 64 outputs, 16 * AT_ONCE inputs at a time, while wgmma multiplies the previous ones.
 *
 * A lane needs the inputs 2 p and 2 p + 1 of every 8, where p is its index within four lanes. Packing puts these into one word,
 * which the four lanes read together and each takes its own pair from, so x is read in its natural order.
 *
 * A mask and an exponent turn two integers into two floats, exactly, minus their zero points. If there is one scale for a row, or
 * for a k tile while registers suffice, integers are multiplied unscaled and their sums scaled. Otherwise weights are rounded
 * once: scaled by a scale that is the sum of two elements, and with minima in f32. Measured: dequantisation takes as many
 * instructions as an SM can issue during the products, so every instruction counts. The last operation on each element comes
 * after the wait for the previous products: if operands are written while products are in flight, the compiler serialises all
 * products.
 *
 * If there are too few outputs to occupy all SMs, SPLIT blocks of a cluster split the inputs of a tile (split-K). At the end each
 * sends its sums to the blocks that finish them, 8 rows of x each in turn, through distributed shared memory; they are added in
 * the order of the inputs, so the result is deterministic. Clusters that are not all resident at once take longer.
 *
 * Bytes: integers, scales and offsets, once for all tiles of rows (the second tile finds them in the L2); x once for each tile of
 * outputs, from the L2. Floor: the former over read bandwidth, or the products over the rate of the tensor cores. Measured
 * figures: docs/src/performance/quantisation-cuda.md.
 */
/* Consumer warpgroups, their threads, and those including the producer warpgroup, whose registers go to the others. */
#define SHARES (4 / GROUPS)
#define CONSUMERS 512
#define BLOCK (CONSUMERS + 128)
#define OUTPUTS (GROUPS * 64)
/* Inputs of a k tile; they are BITS lines of 16 bytes of 8 outputs. */
#define DEPTH 128
#define W_BYTES (OUTPUTS * BITS * 16)
/* Rows of x, 64 inputs each. */
#define X_HALF (TOKENS * 128)
/* Groups of a k tile, and of half of one. Scales and offsets per group of a row, and their bytes for 8 rows. */
#define TURN_GROUPS (GROUP ? DEPTH / (GROUP ? GROUP : 1) : 0)
#define HALF_GROUPS (TURN_GROUPS > 2 ? TURN_GROUPS / 2 : 1)
#define LINE (8 * NUMBERS * SCALE_BYTES)
#define NUMBER_BYTES (OUTPUTS / 8 * TURN_GROUPS * LINE)
#define ARRIVING (2 * X_HALF + W_BYTES + NUMBER_BYTES)
#define SLOT ((ARRIVING + 1023) / 1024 * 1024)
/*
 * Whether elements are computed in f32; and whether an integer minus its zero point is exact in an element, so that sums are
 * scaled instead: all at the end, or those of each k tile.
 */
#define WIDE (OFFSET == 2)
#define SHORT (BITS == 4 ? !WIDE : OFFSET == 0)
#define EXACT (SHORT && GROUP == 0)
#define BY_TURN (SHORT && GROUP == DEPTH && TOKENS <= 64)
#define INTEGERS (EXACT || BY_TURN)
/* Bytes of the sums of eight rows. */
#define SUMS (GROUPS * 128 * 16)

/* The scales and offsets of integers, in units of 8 outputs; and the results. */
struct Results {
    const u8* numbers;
    i64 number_unit;
    const BIAS* bias;
    Y* y;
    i64 y_row;
    /* With ADDED: the residual. */
    const Y* added;
    i64 added_row;
};

/*
 * Phases have only a parity, so a share could mistake a phase that has not begun for one that is over, if the previous k tile, of
 * another share, had not arrived. Therefore each `full` barrier belongs to one share; k tiles use the barriers in turn.
 */
#define FULL (STAGES * SHARES)

/* `vacant`: no block of the cluster needs its ring buffer any more, so sums may be written there. `received`: the sums have
 * arrived. */
struct Barriers { u64 full[FULL], free[STAGES], vacant, received; };

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* d += 64 outputs times all rows, 16 inputs of each. */
__device__ inline void multiply(float (&d)[TOKENS / 2], const u32 (&a)[4], u64 x) {
    asm volatile(PRODUCT BEHIND(TOKENS, FROM_REGISTERS) ", 1, 1, 1, 0;"
        : PLACES(TOKENS) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

/* A pair of elements of the type of x. */
__device__ inline u32 round_pair(float low, float high) {
    u32 both;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

/* How a lane extracts its pair from a word: the shift, or which two of four bytes. */
struct Pick { u32 shift, low, high; };

/* A pair of equal elements of the type of x. */
__device__ inline u32 twice(float x) { return round_pair(x, x); }

#if HALF
#define PAIR_TYPE "f16x2"
#else
#define PAIR_TYPE "bf16x2"
#endif
__device__ inline u32 fused(u32 a, u32 b, u32 c) {
    u32 result;
    asm volatile("fma.rn." PAIR_TYPE " %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}
__device__ inline u32 product(u32 a, u32 b) {
    u32 result;
    asm("mul.rn." PAIR_TYPE " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
/* Exact sums of small integers. */
__device__ inline u32 sum(u32 a, u32 b) {
    u32 result;
#if HALF
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(0x3f803f80), "r"(b));
#endif
    return result;
}

/* The scale and offset by which an integer is dequantised. `line` holds those of 8 rows. */
#if WIDE
struct Numbers { float scale, rest; };

__device__ inline Numbers numbers_of(const u8* line, int row) {
    const SCALE* own = (const SCALE*)line + row * NUMBERS;
    float scale = widen(own[0]), second = widen(own[1]);
    /* 4-bit integers come with an added 128. Their product with a scale of up to 16 bits is exact. */
    return {scale, BITS == 4 ? second - 128.0f * scale : second};
}
#elif INTEGERS
/* What is added to an integer, exactly, and the scale of sums. */
struct Numbers { u32 less; float scale; };

__device__ inline Numbers numbers_of(const u8* line, int row) {
    const SCALE* own = (const SCALE*)line + row * NUMBERS;
    float zero = OFFSET ? widen(own[NUMBERS - 1]) : 8.0f, raised = HALF ? 1024.0f : 128.0f;
    return {BITS == 4 ? twice(-raised - zero) : 0, widen(own[0])};
}
#else
/* The integer plus `less`, exactly, times a scale in two parts: rounded once, and corrected by the second part. */
struct Numbers { u32 less, scale, finer; };

__device__ inline Numbers numbers_of(const u8* line, int row) {
    const SCALE* own = (const SCALE*)line + row * NUMBERS;
    float scale = widen(own[0]), second = OFFSET ? widen(own[NUMBERS - 1]) : BITS == 4 ? 8.0f : 0.0f;
    u32 first = twice(scale);
#if HALF
    float rest = scale - widen(f16{(u16)first}), less = BITS == 4 ? 1024.0f : 0.0f;
#else
    float rest = scale - widen(bf16{(u16)first}), less = BITS == 4 ? 128.0f : 0.0f;
#endif
    return {twice(-less - second), first, twice(rest)};
}
#endif

/* Two elements except for the last operation. */
struct Half { u32 first, second; };

/* This lane's pair of the integers of a word. */
__device__ inline Half begin_pair(u32 word, const Pick& pick, const Numbers& numbers) {
#if BITS == 4 && WIDE
    /* Inserts the integer below the exponent of 128. */
    u32 own = word >> pick.shift, low, high;
    asm("lop3.b32 %0, %1, 0x000f0000, 0x43000000, 0xea;" : "=r"(low) : "r"(own << 16));
    asm("lop3.b32 %0, %1, 0x000f0000, 0x43000000, 0xea;" : "=r"(high) : "r"(own));
    return {__float_as_uint(__fmaf_rn(numbers.scale, __uint_as_float(low), numbers.rest)),
            __float_as_uint(__fmaf_rn(numbers.scale, __uint_as_float(high), numbers.rest))};
#elif WIDE
    /* Inserts the byte below the exponent of 2^23. */
    u32 raised = word ^ 0x80808080u;
    float low = __uint_as_float(__byte_perm(raised, 0x4b000000u, pick.low)) - 8388608.0f;
    float high = __uint_as_float(__byte_perm(raised, 0x4b000000u, pick.high)) - 8388608.0f;
    return {__float_as_uint(__fmaf_rn(numbers.scale, low, numbers.rest)),
            __float_as_uint(__fmaf_rn(numbers.scale, high, numbers.rest))};
#else
    u32 integers;
#if BITS == 4
    /* Inserts the integers below the exponent of 128, or of 1024. */
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(integers) : "r"(word >> pick.shift), "n"(HALF ? 0x64006400 : 0x43004300));
#elif HALF
    integers = __byte_perm(word ^ 0x80808080u, 0x64646464u, pick.low);
    if (INTEGERS) return {integers, 0xe480e480u};
    integers = sum(integers, 0xe480e480u);
#else
    /* A byte is its low seven bits minus 128 times its sign bit: 128 plus the low bits, minus 128 or 256. */
    u32 both = __byte_perm(word, 0, pick.low), rest, sign;
    asm("lop3.b32 %0, %1, 0x007f007f, 0x43004300, 0xea;" : "=r"(rest) : "r"(both));
    asm("lop3.b32 %0, %1, 0x00800080, 0x43004300, 0xea;" : "=r"(sign) : "r"(both));
    if (INTEGERS) return {sign, rest};
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(integers) : "r"(sign), "r"(0xbf80bf80), "r"(rest));
#endif
#if INTEGERS
    return {integers, numbers.less};
#else
    if (BITS == 4 || OFFSET) integers = sum(integers, numbers.less);
    return {integers, product(integers, numbers.finer)};
#endif
#endif
}

/* The last operation. Operands of wgmma must not be written while products are in flight, or the compiler serialises these. */
__device__ inline u32 end_pair(const Half& half, const Numbers& numbers) {
#if WIDE
    u32 both;
#if HALF
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "r"(half.second), "r"(half.first));
#else
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "r"(half.second), "r"(half.first));
#endif
    return both;
#elif INTEGERS && HALF
    return fused(half.first, 0x3c003c00u, half.second);
#elif INTEGERS
    /* For 8 bits the first element is the subtrahend. */
    return fused(half.first, BITS == 8 ? 0xbf80bf80u : 0x3f803f80u, half.second);
#else
    return fused(half.first, numbers.scale, half.second);
#endif
}

__device__ inline Pick pick_of(int part) {
#if BITS == 4
    return {(u32)part * 4, 0, 0};
#elif WIDE
    u32 low = 0x7540u + part % 2 * 2;
    return {0, low, low + 1};
#else
    return {0, part % 2 ? 0x4342u : 0x4140u, 0};
#endif
}

/*
 * The words of half a k tile that this lane takes pairs from: by product of 16 inputs, by its two groups of eight, by two rows 8
 * apart. `from` is the address of the lane's rows: 16 bytes of the first line.
 */
struct Words {
    u32 of[4][2][2];

    __device__ inline Words(const u8* from, int half, int part) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const u8* unit = from + row * (BITS * 128);
#if BITS == 4
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
                uint2 v = *(const uint2*)(unit + piece * 128 + half * 8);
                of[piece / 2][piece % 2][row] = v.x;
                of[2 + piece / 2][piece % 2][row] = v.y;
            }
#elif GROUP == 0
#pragma unroll
            for (int product = 0; product < 4; ++product) {
#pragma unroll
                for (int eight = 0; eight < 2; ++eight) {
                    of[product][eight][row] = *(const u32*)(unit + (half * 4 + product) * 128 + (eight * 2 + part / 2) * 4);
                }
            }
#else
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {
                Vector v = *(const Vector*)(unit + (half * 4 + eight * 2 + part / 2) * 128);
#pragma unroll
                for (int product = 0; product < 4; ++product) of[product][eight][row] = v.word[product];
            }
#endif
        }
    }
};

/* Stores four sums to shared memory. */
__device__ inline void put(u32 to, const float* d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(to), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]) : "memory");
}

/* The ring buffer position of a share's k tile. */
struct SharePlace {
    int stage, full;
    u32 phase = 0;
    __device__ inline SharePlace(int share) : stage(share), full(share) {}
    __device__ inline void next() {
        stage += SHARES;
        if (stage >= STAGES) stage -= STAGES;
        full += SHARES;
        if (full >= FULL) {
            full -= FULL;
            phase ^= 1;
        }
    }
};

/* Epilogue operands of a lane's two outputs, 8 apart; scales are those of whole rows. */
struct Own { float bias[2], scale[2]; };

/* Scales and adds the sums of a k tile, and resets them. */
__device__ inline void add_scaled(float (&sums)[TOKENS / 2], float (&of_turn)[TOKENS / 2], const float (&scale)[2]) {
    hold(of_turn);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
        sums[i] = __fmaf_rn(of_turn[i], scale[i % 4 / 2], sums[i]);
        of_turn[i] = 0.0f;
    }
}

/*
 * Finishes sums of eight rows of x, the first of which is `row`. `first` is the first of the 16 outputs of a warp; the number of
 * outputs is a multiple of 16, so a warp's outputs all exist or none. A lane has two rows of an output in d[0] and d[1], and of
 * the output 8 further in d[2] and d[3]. For 16-bit results it writes two neighbours of one row.
 */
__device__ inline void finish(const Results& r, float (&d)[4], const Own& own, int first, int row, int rows, int outputs,
                              int lane) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = (EXACT ? d[i] * own.scale[i / 2] : d[i]) + own.bias[i / 2];
#if WIDE_Y
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        i64 at = row + lane % 4 * 2 + i % 2;
        int column = first + lane / 4 + i / 2 * 8;
        if (at >= rows || column >= outputs) continue;
#if ADDED
        y[i] += widen(r.added[at * r.added_row + column]);
#endif
        r.y[at * r.y_row + column] = narrow<Y>(y[i]);
    }
#else
    i64 at = row + lane / 4;
    int column = first + lane % 4 * 2;
    bool real = at < rows && first < outputs;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#if ADDED
        u32 word = transposed(real ? *(const u32*)(r.added + at * r.added_row + column + h * 8) : 0);
        y[h * 2] += widen(Y{(u16)word});
        y[h * 2 + 1] += widen(Y{(u16)(word >> 16)});
#endif
        u32 both = transposed(narrow<Y>(y[h * 2]).bits | (u32)narrow<Y>(y[h * 2 + 1]).bits << 16);
        if (real) *(u32*)(r.y + at * r.y_row + column + h * 8) = both;
    }
#endif
}
#endif

/* Blocks along x: SPLIT of a cluster, then tiles of rows, then tiles of outputs. */
extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(BLOCK, 1)
packed_wgmma(Extent extent, i64 output_count, i64 input_count, i64 row_tiles, i64 immutable,
             const __grid_constant__ Results results, const __grid_constant__ TensorMap x_map,
             const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap number_map) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
    launch_dependents();
    u8* ring_start = shared + (1024 - shared_address(shared) % 1024) % 1024;
    u32 ring = shared_address(ring_start);
    int split = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT / (int)row_tiles;
    int first_row = blockIdx.x / SPLIT % (int)row_tiles * TOKENS;
    int lane = threadIdx.x % 32, outputs = (int)output_count;
    /* The number of this block's k tiles, and the index of the first. */
    int turns = ((int)input_count + DEPTH - 1) / DEPTH, begin = turns * split / SPLIT;
    turns = turns * (split + 1) / SPLIT - begin;

    if (threadIdx.x == CONSUMERS) {
        for (int i = 0; i < FULL; ++i) make_barrier(barriers.full[i], 1);
        for (int stage = 0; stage < STAGES; ++stage) make_barrier(barriers.free[stage], GROUPS * 4);
        make_barrier(barriers.vacant, SPLIT * GROUPS * 4);
        make_barrier(barriers.received, SPLIT * GROUPS * 128);
        barriers_made();
    }
    __syncthreads();
#if SPLIT > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    /* The last warpgroup is the producer, by one thread. */
    if (__shfl_sync(0xffffffffu, (int)threadIdx.x / CONSUMERS, 0) == 1) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == CONSUMERS) {
            if (!immutable) wait_for_predecessor();
            u64 policy;
            if (row_tiles > 1) {
                asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
            } else {
                /* Weights are read once, so they are marked evict-first in the L2. */
                asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            }
            auto fetch_weights = [&](int turn) {
                u64& full = barriers.full[turn % FULL];
                expect(full, ARRIVING);
                u32 to = ring + turn % STAGES * SLOT + 2 * X_HALF;
                copy_box_by(policy, weight_map, to, full, 0, (begin + turn) * BITS, tile * (OUTPUTS / 8));
#if GROUP > 0
                copy_box_by(policy, number_map, to + W_BYTES, full, 0, (begin + turn) * TURN_GROUPS, tile * (OUTPUTS / 8));
#endif
            };
            auto fetch_rows = [&](int turn) {
                u32 to = ring + turn % STAGES * SLOT;
                int byte = (begin + turn) * (DEPTH * 2);
                copy_box(x_map, to, barriers.full[turn % FULL], byte, first_row);
                copy_box(x_map, to + X_HALF, barriers.full[turn % FULL], byte + 128, first_row);
            };
            int ahead = turns < STAGES ? turns : STAGES;
            for (int turn = 0; turn < ahead; ++turn) fetch_weights(turn);
            wait_for_predecessor();
            for (int turn = 0; turn < ahead; ++turn) fetch_rows(turn);
            for (int turn = ahead; turn < turns; ++turn) {
                await(barriers.free[turn % STAGES], turn / STAGES - 1 & 1);
                fetch_weights(turn);
                fetch_rows(turn);
            }
        }
        __syncwarp();
#if SPLIT > 1
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    wait_for_predecessor();
    int rows = (int)extent.count(), part = lane % 4;
    /* The share of this warpgroup, and the index of this warp in it. */
    int share = __shfl_sync(0xffffffffu, (int)threadIdx.x / (GROUPS * 128), 0), warp = threadIdx.x / 32 % (GROUPS * 4);
    /* The first of 16 outputs of a warp. */
    int first = tile * OUTPUTS + warp * 16;
    Own own = {};
    Numbers fixed[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int output = first + h * 8 + lane / 4;
        bool real = output < outputs;
        own.bias[h] = real ? or_else(results.bias, output, 0.0f) : 0.0f;
#if GROUP == 0
        const u8* numbers = results.numbers + output / 8 * results.number_unit;
        if (real) fixed[h] = numbers_of(numbers, output % 8);
        own.scale[h] = real ? widen(((const SCALE*)numbers)[output % 8 * NUMBERS]) : 0.0f;
#endif
    }
    Pick pick = pick_of(part);
    float sums[TOKENS / 2] = {};
#if BY_TURN
    float of_turn[TOKENS / 2] = {}, scale[2] = {};
#else
    float (&of_turn)[TOKENS / 2] = sums;
#endif
    int older = 0;
    SharePlace place(share);
    for (int turn = share; turn < turns; turn += SHARES, older = place.stage, place.next()) {
        await(barriers.full[place.full], place.phase);
        u64 x = swizzled_at(ring + place.stage * SLOT);
        const u8* integers = ring_start + place.stage * SLOT + 2 * X_HALF + warp * (2 * BITS * 128) + lane / 4 * 16;
#if GROUP > 0
        const u8* numbers = ring_start + place.stage * SLOT + 2 * X_HALF + W_BYTES + warp * (2 * TURN_GROUPS * LINE);
#endif
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Words words(integers, half, part);
            Numbers own_numbers[HALF_GROUPS][2];
#pragma unroll
            for (int g = 0; g < HALF_GROUPS; ++g) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#if GROUP > 0
                    int group = TURN_GROUPS > 1 ? half * HALF_GROUPS + g : 0;
                    own_numbers[g][h] = numbers_of(numbers + (h * TURN_GROUPS + group) * LINE, lane / 4);
#else
                    own_numbers[g][h] = fixed[h];
#endif
                }
            }
            /* All reads of the stage except those of wgmma are done: a proxy fence before TMA refills it, which is not ordered
             * with ordinary reads. */
            if (half == 1) reads_end();
#pragma unroll
            for (int step = 0; step < 4 / AT_ONCE; ++step) {
                Half halves[AT_ONCE][4];
#pragma unroll
                for (int i = 0; i < 4 * AT_ONCE; ++i) {
                    int product = step * AT_ONCE + i / 4;
                    Half& made = halves[i / 4][i % 4];
                    made = begin_pair(words.of[product][i % 4 / 2][i % 2], pick, own_numbers[product * HALF_GROUPS / 4][i % 2]);
                    asm volatile("" : "+r"(made.first) :: "memory");
                    if (!INTEGERS || BITS == 8) asm volatile("" : "+r"(made.second) :: "memory");
                }
                products_wait<0>();
#if BY_TURN
                if (half == 0 && step == 0) {
                    add_scaled(sums, of_turn, scale);
#pragma unroll
                    for (int h = 0; h < 2; ++h) scale[h] = own_numbers[0][h].scale;
                }
#endif
#if SHARES == 1
                if (half == 0 && step == 0 && turn > 0) {
                    __syncwarp();
                    if (lane == 0) arrive(barriers.free[older]);
                }
#endif
                u32 weights[AT_ONCE][4];
#pragma unroll
                for (int i = 0; i < 4 * AT_ONCE; ++i) {
                    int product = step * AT_ONCE + i / 4;
                    weights[i / 4][i % 4] = end_pair(halves[i / 4][i % 4], own_numbers[product * HALF_GROUPS / 4][i % 2]);
                }
                products_begin();
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    multiply(of_turn, weights[k], x + (half * X_HALF + (step * AT_ONCE + k) * 32) / 16);
                }
                products_commit();
            }
        }
#if SHARES > 1
        /* Releases the stage now, because this share's next k tile is later. */
        products_wait<0>();
        __syncwarp();
        if (lane == 0) arrive(barriers.free[place.stage]);
#endif
    }
    products_wait<0>();
#if BY_TURN
    add_scaled(sums, of_turn, scale);
#else
    hold(sums);
#endif
    u32 place_of_sums = ring + threadIdx.x % (GROUPS * 128) * 16;
#if SHARES > 1
    /* The ring buffer is free: the sums of all shares but the first are written there, and added in order. */
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");
    if (share > 0) {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) put(place_of_sums + ((share - 1) * EIGHTS + i) * SUMS, &sums[i * 4]);
    }
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");
    if (share == 0) {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
            for (int other = 0; other < SHARES - 1; ++other) add(&sums[i * 4], place_of_sums + (other * EIGHTS + i) * SUMS);
        }
    }
#endif
#if SPLIT == 1
    if (share > 0) return;
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        float d[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] = sums[eight * 4 + i];
        finish(results, d, own, first, first_row + eight * 8, rows, outputs, lane);
    }
#else
    /* The groups of eight rows that this block finishes: split, split + SPLIT, ... */
    int count = (EIGHTS - split + SPLIT - 1) / SPLIT;
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (share > 0) return;
    meet(barriers.vacant, lane);
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        send(address_at(place_of_sums + (i / SPLIT * SPLIT + split) * SUMS, i % SPLIT), &sums[i * 4]);
    }
    meet_behind_writes(barriers.received);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (i >= count) break;
        float d[4] = {};
#pragma unroll
        for (int other = 0; other < SPLIT; ++other) add(d, place_of_sums + (i * SPLIT + other) * SUMS);
        finish(results, d, own, first, first_row + (i * SPLIT + split) * 8, rows, outputs, lane);
    }
#endif
#else
    launch_dependents_and_wait();
#endif
}
