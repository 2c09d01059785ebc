/*
 * linear for up to 128 rows by wgmma (sm_90a), with its epilogue: y = f(x W^T + b), f16 or bf16; with INTEGERS linear_w8a8: y =
 * f((x W^T) * row scale * output scale + b), x and W of 8 bits, exact sums in 32 bits.
 *
 * Weights are the 64-row operand: a block computes a tile of PARTS * 64 outputs by all rows of x. A producer thread copies k
 * tiles of 128 bytes by TMA into a ring buffer of STAGES stages, swizzled by 128 bytes (8-bit weights are stored in memory as
 * wgmma reads them: 8 outputs by 16 inputs are one line, see weight/packing.rs); a consumer warpgroup multiplies, with sums in
 * registers. Immutable weights are loaded before the preceding kernels have finished: up to the whole ring buffer, which for
 * products of few blocks is all shared memory of an SM. These loads are issued at a PACE slightly above the rate of memory, so
 * that reads of the preceding kernels do not queue behind all of them.
 *
 * If there are too few outputs to occupy all SMs, SPLIT blocks of a cluster split the inputs of a tile (split-K). At the end each
 * block sends its sums to the blocks that finish them, 8 rows of x each in turn, through distributed shared memory: into separate
 * memory if APART, otherwise into the ring buffer once no block needs it any more. Sums are added in the order of the inputs, so
 * the result is deterministic.
 *
 * Heads of queries, keys and values are finished here if the elements of their rotary pairs are half a HEAD apart: TMA then loads
 * weights in an order in which those are 8 rows apart, so that one lane has both.
 *
 * Bytes: the weights, once; x once for each tile, from the L2. Floor: the weights over read bandwidth.
 *
 * Tried on an H200 without gain: multicast of x to clusters of two tiles; larger tiles of several warpgroups (2% faster for the
 * gate of a large model, slower elsewhere); blocks that begin at different inputs (x is cheapest when all blocks read the same
 * part of it); clusters of four with one block per SM (30 of them fit at a time, not 33); half the ring buffer, so that blocks of
 * the next product start early (faster for more than 132 blocks, slower for fewer). Measured figures:
 * docs/src/performance/cuda.md.
 */
/* Bytes of a row's inputs in a k tile, of an input, and of 64 rows of a k tile. */
#define TURN 128
#define INPUT (INTEGERS ? 1 : 2)
#define PART_BYTES (64 * TURN)
#define W_BYTES (PARTS * PART_BYTES)
#define X_BYTES (TOKENS * TURN)
#define SLOT (W_BYTES + X_BYTES)
#define CONSUMERS 128
#define THREADS (CONSUMERS + 32)
/* Clocks between requests for parts of a k tile of weights before the kernel's start: 8 KiB for each of 132 blocks, at 1.98 GHz
 * 7 TB/s. */
#define PACE 300
/* Bytes of the sums of eight rows. */
#define SUMS (PARTS * CONSUMERS * 16)
/* Distance between the two outputs of a lane, and number of consecutive outputs of a warp. */
#if EPILOGUE == HEADS
#define SECOND (HEAD / 2)
#define IN_A_ROW 8
#else
#define SECOND 8
#define IN_A_ROW 16
#endif

/* `vacant`: no block of the cluster needs its ring buffer any more, so sums may be written there if they are not APART.
 * `received`: the sums have arrived. */
struct Barriers { u64 full[STAGES], free[STAGES], vacant, received; };

#if INTEGERS
struct Scales {
    const float* rows;
    const W_SCALE* outputs;
};
#endif

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Copies a box of weights, given k tile and first output. Weights are read once, so they are marked evict-first in the L2. */
__device__ inline void copy_weights(const TensorMap& map, u32 to, u64& barrier, int turn, int output, u64 once) {
#if EPILOGUE == HEADS
    int in_turn = INTEGERS ? turn * (TURN / 16) : turn * TURN;
    copy_box_by(once, map, to, barrier, INTEGERS ? 0 : in_turn, INTEGERS ? in_turn : 0, 0, output % HEAD / 8, output / HEAD);
#elif INTEGERS
    copy_box_by(once, map, to, barrier, 0, turn * (TURN / 16), output / 8);
#else
    copy_box_by(once, map, to, barrier, turn * TURN, output);
#endif
}

/* The wgmma descriptor of weights: 32 bytes of inputs each, number `step` of a k tile. */
__device__ inline u64 weights_at(u32 part, int step) {
#if INTEGERS
    return lines_at(part + step * 256);
#else
    return swizzled_at(part + step * 32);
#endif
}

__device__ inline void hold_all(Sum (&d)[PARTS][TOKENS / 2]) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) hold(d[p]);
}

#if INTEGERS
#define SIGNS ", add"
#else
#define SIGNS ", add, 1, 1, 0, 0"
#endif

/* d = or += 64 outputs times all rows, 32 bytes of inputs each. */
__device__ inline void multiply(Sum (&d)[TOKENS / 2], u64 weight, u64 x, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, " BEHIND(TOKENS, FLAG) ", 0;\n" PRODUCT BEHIND(TOKENS, DESCRIPTORS) SIGNS ";\n}"
        : PLACES(TOKENS) : "l"(weight), "l"(x), "r"(add));
}

/* The first output of a part of a tile. */
__device__ inline int part_at(const EpilogueParams& e, int tile, int part) {
#if EPILOGUE == GATED
    return part * (int)(e.outputs / 2) + tile * 64;
#elif EPILOGUE == HEADS
    int at = (tile * PARTS + part) * 64;
    return at / HEAD * HEAD + at % HEAD / 2;
#else
    return (tile * PARTS + part) * 64;
#endif
}

/* Biases of a lane's two outputs in each part. */
struct Biases {
    float of[PARTS][2];

    __device__ Biases(const EpilogueParams& e, int tile, int output) {
#pragma unroll
        for (int b = 0; b < PARTS; ++b) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int at = part_at(e, tile, b) + output + h * SECOND;
                of[b][h] = at < (int)e.outputs ? or_else(e.bias, at, 0.0f) : 0.0f;
            }
        }
    }
};

#if INTEGERS
/* Scales of a lane's two outputs in each part. */
struct OutputScales {
    float of[PARTS][2];

    __device__ OutputScales(const EpilogueParams& e, const Scales& scales, int tile, int output) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int at = part_at(e, tile, p) + output + h * SECOND;
                of[p][h] = at < (int)e.outputs ? widen(scales.outputs[at]) : 0.0f;
            }
        }
    }
};
#endif

/* The residual of eight rows: two neighbouring outputs of a lane's row, and those 8 further, in each part. */
struct Added { u32 words[PARTS][2]; };

/*
 * `first` is the first of a warp's 16 outputs in a part, `row` the first of eight rows. The number of results is a multiple of
 * 16, so a warp's results all exist or none. For 16-bit results, lanes exchange elements so that a lane writes two neighbours of
 * one row.
 */
__device__ inline void read_added(const EpilogueParams& e, Added& added, int tile, int first, int row, int rows, int lane) {
#if EPILOGUE == ADDED && !WIDE_Y
    row += lane / 4;
#pragma unroll
    for (int b = 0; b < PARTS; ++b) {
        int output = part_at(e, tile, b) + first;
        const Y* from = e.added + row * e.added_row + output + lane % 4 * 2;
        bool there = row < rows && output < (int)e.outputs;
#pragma unroll
        for (int h = 0; h < 2; ++h) added.words[b][h] = there ? *(const u32*)(from + h * 8) : 0;
    }
#endif
}

#if EPILOGUE == HEADS
/* The positions of rows in their sequences, and their cache slots. */
struct Stands { int position[TOKENS], slot[TOKENS]; };

/* The rotary frequencies of a lane's pairs in each part. */
struct Frequencies {
    float of[PARTS];

    __device__ Frequencies(const EpilogueParams& e, int tile, int output) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) of[p] = ROPE ? e.frequencies[part_at(e, tile, p) % HEAD + output] : 0.0f;
    }
};

/*
 * Finishes sums of eight rows of heads: writes queries to the result, keys and values to their cache slots. A lane has two rows
 * of one element of its pair in d[..][0] and [1], and of the other in [2] and [3]; it writes two neighbours of one row.
 */
__device__ inline void finish_heads(const EpilogueParams& e, float (&d)[PARTS][4], const Biases& biases, const Frequencies& frequencies,
                                    const Stands& stands, int tile, int first, int row, int rows, int lane) {
    const int queries = (int)e.query_heads, turned_heads = queries + (int)e.kv_heads, all = turned_heads + (int)e.kv_heads;
    int own = row + lane / 4, slot = stands.slot[own];
    bool placed = slot >= 0 && slot < e.pages * e.slots, turned = !ROPE || stands.position[own] >= 0;
    i64 page = (u32)slot / (u32)e.slots, in_page = (u32)slot % (u32)e.slots;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        int output = part_at(e, tile, p) + first, head = output / HEAD, at = output % HEAD + lane % 4 * 2;
        if (head >= all) break;
        bool is_query = head < queries, is_value = head >= turned_heads;
#pragma unroll
        for (int k = 0; k < 4; ++k) d[p][k] += biases.of[p][k / 2];
        if (ROPE && !is_value) {
            const float factor = is_query ? e.query_scale : e.key_scale;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float sine, cosine;
                turn_quickly(__fmul_rn((float)stands.position[row + lane % 4 * 2 + k], frequencies.of[p]), sine, cosine);
                turn_pair(d[p][k], d[p][k + 2], factor * sine, factor * cosine);
            }
        }
        CACHE* kept = is_value ? e.values + page * e.value_strides.page + (head - turned_heads) * e.value_strides.head +
                                     in_page * e.value_strides.slot
                               : e.keys + page * e.key_strides.page + (head - queries) * e.key_strides.head +
                                     in_page * e.key_strides.slot;
        Y* asked = e.y + own * e.y_row + head * HEAD;
        bool written = own < rows && (is_query ? turned : placed && (is_value || turned));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float a = d[p][h * 2], b = d[p][h * 2 + 1];
            u32 both = is_query ? narrow<Y>(a).bits | (u32)narrow<Y>(b).bits << 16
                                : narrow<CACHE>(a).bits | (u32)narrow<CACHE>(b).bits << 16;
            both = transposed(both);
            u32* to = is_query ? (u32*)(asked + at + h * SECOND) : (u32*)(kept + at + h * SECOND);
            if (written) *to = both;
        }
    }
}
#endif

/* Finishes sums of eight rows. A lane has two rows of an output in d[..][0] and [1], and of the output 8 further in [2] and [3].
 * */
__device__ inline void finish(const EpilogueParams& e, float (&d)[PARTS][4], const Biases& biases, const Added& added, int tile,
                              int first, int row, int rows, int lane) {
#pragma unroll
    for (int b = 0; b < PARTS; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[b][i] += biases.of[b][i / 2];
    }
    const int results = (int)(EPILOGUE == GATED ? e.outputs / 2 : e.outputs);
#pragma unroll
    for (int b = 0; b < (EPILOGUE == GATED ? 1 : PARTS); ++b) {
        float (&y)[4] = d[b];
        int output = part_at(e, tile, b) + first;
#if EPILOGUE == GATED || EPILOGUE == ACTIVATED
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (e.limit > 0.0f && y[i] > e.limit) y[i] = e.limit;
            y[i] = WIDE_Y ? apply(y[i]) : apply_quickly(y[i]);
#if EPILOGUE == GATED
            float up = d[PARTS - 1][i];
            if (e.limit > 0.0f && up > e.limit) up = e.limit;
            if (e.limit > 0.0f && up < -e.limit) up = -e.limit;
            y[i] *= up;
#endif
        }
#endif
#if WIDE_Y
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int at = row + lane % 4 * 2 + i % 2, column = output + lane / 4 + i / 2 * 8;
            if (at >= rows || column >= results) continue;
#if EPILOGUE == ADDED
            y[i] = widen(e.added[at * e.added_row + column]) + e.alpha * y[i];
#endif
            e.y[at * e.y_row + column] = narrow<Y>(y[i]);
        }
#else
        int own = row + lane / 4;
        Y* to = e.y + own * e.y_row + output + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#if EPILOGUE == ADDED
            u32 word = transposed(added.words[b][h]);
            y[h * 2] = widen(Y{(u16)word}) + e.alpha * y[h * 2];
            y[h * 2 + 1] = widen(Y{(u16)(word >> 16)}) + e.alpha * y[h * 2 + 1];
#endif
            u32 both = transposed(narrow<Y>(y[h * 2]).bits | (u32)narrow<Y>(y[h * 2 + 1]).bits << 16);
            if (own < rows && output < results) *(u32*)(to + h * 8) = both;
        }
#endif
    }
}
#endif

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(THREADS, 2) batch_wgmma(Extent extent, i64 inputs, i64 immutable, const __grid_constant__ EpilogueParams e,
#if INTEGERS
                                          Scales scales,
#endif
                                          const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
#if INTEGERS
    __shared__ __align__(16) float row_scales[TOKENS];
#endif
#if EPILOGUE == HEADS
    __shared__ Stands stands;
#endif
    launch_dependents();
    u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
    int tile = blockIdx.x / SPLIT, split = blockIdx.x % SPLIT, lane = threadIdx.x % 32;
    /* The number of this block's k tiles, and the index of the first. */
    int turns = ((int)inputs * INPUT + TURN - 1) / TURN, begin = turns * split / SPLIT;
    turns = turns * (split + 1) / SPLIT - begin;
    const int ahead = turns < STAGES ? turns : STAGES;
    auto fetch_rows = [&](int stage, int turn) {
        copy_box(x_map, ring + stage * SLOT + W_BYTES, barriers.full[stage], (begin + turn) * TURN, 0);
    };

    if (threadIdx.x == CONSUMERS) {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(barriers.full[stage], 1);
            make_barrier(barriers.free[stage], 1);
        }
        make_barrier(barriers.vacant, SPLIT * (CONSUMERS / 32));
        make_barrier(barriers.received, SPLIT * CONSUMERS);
        barriers_made();
    }
    __syncthreads();
#if SPLIT > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    /* The last warp is the producer. */
    if (__shfl_sync(0xffffffffu, (int)threadIdx.x / CONSUMERS, 0) == 1) {
        if (lane == 0) {
            if (!immutable) wait_for_predecessor();
            u64 once;
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
            auto fetch_weights = [&](int stage, int turn) {
                expect(barriers.full[stage], SLOT);
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    u32 to = ring + stage * SLOT + p * PART_BYTES;
                    copy_weights(weight_map, to, barriers.full[stage], begin + turn, part_at(e, tile, p), once);
                }
            };
            const i64 start = clock64();
            for (int turn = 0; turn < ahead; ++turn) {
                while (immutable && clock64() - start < (i64)turn * (PARTS * PACE)) {}
                fetch_weights(turn, turn);
            }
            wait_for_predecessor();
            Place<STAGES> place;
            for (int turn = ahead; turn < turns; ++turn, place.next()) {
                await(barriers.free[place.stage], place.phase);
                fetch_weights(place.stage, turn);
                fetch_rows(place.stage, turn);
            }
        }
        __syncwarp();
#if SPLIT > 1
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
        return;
    }
    wait_for_predecessor();
    /* The producer may still be waiting for its pace. */
    if (threadIdx.x == 0) {
        for (int turn = 0; turn < ahead; ++turn) fetch_rows(turn, turn);
    }
    const Extent::Loaded loaded = extent.load();
    /* The first output of a warp in a part. */
    int own = threadIdx.x / 32 * IN_A_ROW;
    Biases biases(e, tile, own + lane / 4);
#if INTEGERS
    OutputScales output_scales(e, scales, tile, own + lane / 4);
#endif
    /*
     * Each thread loads the data of one row of x: scale, position, cache slot. Rows past the extent have memory, too, but are not
     * written. The values are shared with the other threads after the first products were issued, so that no product waits for
     * these loads.
     */
    const bool has_row = threadIdx.x < TOKENS, is_row = has_row && (int)threadIdx.x < (int)extent.rows;
#if EPILOGUE == HEADS
    Frequencies frequencies(e, tile, own + lane / 4);
    const int position = ROPE && is_row ? e.positions[threadIdx.x] : 0, slot = is_row ? e.places[threadIdx.x] : -1;
#endif
#if INTEGERS
    const float row_scale = is_row ? scales.rows[threadIdx.x] : 0.0f;
#endif
    /* The sums of eight rows from `row` on, as floats. */
    auto number = [&](int row, float (&d)[PARTS][4], const Sum (&sums)[PARTS][4]) {
#if INTEGERS
        float2 scale = *(const float2*)(row_scales + row + lane % 4 * 2);
#endif
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#if INTEGERS
                d[p][k] = (float)sums[p][k] * ((k % 2 ? scale.y : scale.x) * output_scales.of[p][k / 2]);
#else
                d[p][k] = sums[p][k];
#endif
            }
        }
    };
    Sum sums[PARTS][TOKENS / 2];
    Place<STAGES> place, older;
    for (int turn = 0; turn < turns; ++turn, place.next()) {
        await(barriers.full[place.stage], place.phase);
        u32 weight = ring + place.stage * SLOT, x = weight + W_BYTES;
        hold_all(sums);
        products_begin();
#pragma unroll
        for (int step = 0; step < TURN / 32; ++step) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                multiply(sums[p], weights_at(weight + p * PART_BYTES, step), swizzled_at(x + step * 32), turn > 0 || step > 0);
            }
        }
        products_commit();
        if (turn > 0) {
            products_wait<1>();
            if (threadIdx.x == 0) arrive(barriers.free[older.stage]);
            older.next();
        }
    }
    const int rows = (int)extent.count(loaded);
#if INTEGERS
    if (has_row) row_scales[threadIdx.x] = row_scale;
#endif
#if EPILOGUE == HEADS
    if (has_row) {
        stands.position[threadIdx.x] = position;
        stands.slot[threadIdx.x] = slot;
    }
#endif
#if INTEGERS || EPILOGUE == HEADS
    asm volatile("bar.sync 1, " TEXT(CONSUMERS) ";" ::: "memory");
#endif
    /* Finishes the eight rows from `row` on. */
    auto finish_eight = [&](float (&d)[PARTS][4], const Added& added, int row) {
#if EPILOGUE == HEADS
        finish_heads(e, d, biases, frequencies, stands, tile, own, row, rows, lane);
#else
        finish(e, d, biases, added, tile, own, row, rows, lane);
#endif
    };
#if SPLIT == 1
    products_wait<0>();
    hold_all(sums);
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        float d[PARTS][4];
        Sum own_sums[PARTS][4];
        Added added;
        read_added(e, added, tile, own, eight * 8, rows, lane);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
#pragma unroll
            for (int i = 0; i < 4; ++i) own_sums[p][i] = sums[p][eight * 4 + i];
        }
        number(eight * 8, d, own_sums);
        finish_eight(d, added, eight * 8);
    }
#else
    /* The groups of eight rows that this block finishes: split, split + SPLIT, ... */
    int count = (EIGHTS - split + SPLIT - 1) / SPLIT;
    Added added[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) read_added(e, added[i], tile, own, (i * SPLIT + split) * 8, i < count ? rows : 0, lane);
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    products_wait<0>();
    hold_all(sums);
#if !APART
    meet(barriers.vacant, lane);
#endif
    u32 place_of_sums = ring + (APART ? STAGES * SLOT : 0) + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        u32 there = address_at(place_of_sums + (i / SPLIT * SPLIT + split) * SUMS, i % SPLIT);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) send(there + p * (CONSUMERS * 16), &sums[p][i * 4]);
    }
    meet_behind_writes(barriers.received);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (i >= count) break;
        float d[PARTS][4];
        Sum all[PARTS][4] = {};
#pragma unroll
        for (int other = 0; other < SPLIT; ++other) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                add(all[p], place_of_sums + (i * SPLIT + other) * SUMS + p * (CONSUMERS * 16));
            }
        }
        number((i * SPLIT + split) * 8, d, all);
        finish_eight(d, added[i], (i * SPLIT + split) * 8);
    }
#endif
#else
    launch_dependents_and_wait();
#endif
}
