/*
 * linear for many rows by wgmma (sm_90a), with its epilogue: y = f(x W^T + b), f16 or bf16; results of a product alone also f32.
 *
 * A persistent block computes tiles of GROUPS * 64 rows by OUTPUTS outputs. A producer thread copies k tiles of 64 inputs by TMA
 * into a ring buffer of STAGES stages, swizzled by 128 bytes. GROUPS consumer warpgroups multiply, each 64 rows with all outputs,
 * with sums in registers; the ring buffer runs on across tile boundaries, so the next tile is loading while a group writes. Two
 * blocks of a cluster compute neighbouring rows of the same outputs: each loads half of the weights, by multicast to both.
 *
 * Gate and up are the two halves of a tile's outputs, so that a thread has both in registers. Results are written 16 bytes at a
 * time; the residual is read the same way, before the last products are waited for. A lane has two neighbouring columns of every
 * eight. If ORDERED, TMA loads the weights in an order in which a lane's columns are 8 neighbouring outputs of every 32;
 * otherwise lanes exchange them.
 *
 * Tiles are visited in bands of BAND rows of tiles, so that concurrent tiles share operands in the L2. Only tiles with rows
 * within the extent are computed.
 *
 * Operations: 2 * rows * outputs * inputs; the floor is the rate of the tensor cores, 4096 per cycle and SM, at the clock that
 * the power limit allows under this load. Measured figures: docs/src/performance/cuda.md.
 */
#define ROWS (GROUPS * 64)
#define BLOCK ((GROUPS + 1) * 128)
#define CLUSTER 2
#define SUM(x) "+f"(x)
/* Inputs of a k tile, and bytes of a stage. */
#define DEPTH 64
#define X_BYTES (ROWS * DEPTH * 2)
#define W_BYTES (OUTPUTS * DEPTH * 2)
#define SLOT (X_BYTES + W_BYTES)
/* Results of a tile's row. */
#define RESULTS (EPILOGUE == GATED ? OUTPUTS / 2 : OUTPUTS)
/* Results are written in groups of 32, the last of which may be half. */
#define PIECES ((RESULTS + 31) / 32)

struct Barriers { u64 full[STAGES], free[STAGES]; };

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Multicast copy of a box of weights to the same address in every block of the cluster, given input and row. */
__device__ inline void copy_to_all(const TensorMap& map, u32 to, u64& barrier, int input, int row) {
#if ORDERED
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %6, %6, %6, %4}], [%2], %5;"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(input), "r"(row / 32), "h"((u16)((1 << CLUSTER) - 1)), "r"(0)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(input), "r"(row), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
#endif
}

/*
 * Arrives at the barrier of another block of the cluster, to signal that the tensor cores have read a stage. Nothing was written,
 * so a release at cluster scope, which would wait for all of the thread's writes to memory, is not needed.
 */
__device__ inline void arrive_at(u64& barrier, int rank) {
    asm volatile(
        "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
        :: "r"(shared_address(&barrier)), "r"(rank) : "memory");
}

#if HALF
#define KIND "f32.f16.f16"
#else
#define KIND "f32.bf16.bf16"
#endif

/* d = or += 64 rows times all outputs, 16 inputs of each. */
__device__ inline void multiply(float (&d)[OUTPUTS / 2], u64 x, u64 weight, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, " BEHIND(OUTPUTS, FLAG) ", 0;\n"
        "wgmma.mma_async.sync.aligned.m64n" TEXT(OUTPUTS) "k16." KIND " " NAMES(OUTPUTS) ", " BEHIND(OUTPUTS, DESCRIPTORS) ", add, 1, 1, 0, 0;\n}"
        : PLACES(OUTPUTS) : "l"(x), "l"(weight), "r"(add));
}

#if EPILOGUE == ADDED
typedef Residuals<RESULTS> Added;
#elif EPILOGUE == HEADS
/* The positions in their sequences of a lane's two rows, and their cache slots. */
struct Added {
    int position[2], slot[2];

    __device__ inline void read(const EpilogueParams& e, int row, int rows) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            bool real = row + h * 8 < rows;
            position[h] = real && ROPE ? e.positions[row + h * 8] : 0;
            slot[h] = real ? e.places[row + h * 8] : -1;
        }
    }
};
#else
struct Added {};
#endif

#if EPILOGUE == HEADS
/*
 * Writes two rows of heads of HEAD elements, 8 rows apart: queries to the result, keys and values to their cache slots. A lane
 * has both elements of its pairs, which are half a head apart, and the same pairs of all heads of the tile.
 */
__device__ inline void write(const EpilogueParams& e, float (&d)[OUTPUTS / 2], const Added& added, int row, int first, int rows, int q) {
    constexpr int heads = OUTPUTS / HEAD, pieces = HEAD / 64;
    int queries = (int)e.query_heads, turned_heads = queries + (int)e.kv_heads, all = turned_heads + (int)e.kv_heads;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        i64 token = row + h * 8;
        int slot = added.slot[h];
        bool placed = slot >= 0 && slot < e.pages * e.slots, turned = !ROPE || added.position[h] >= 0;
        if (token >= rows) continue;
        i64 page = (u32)slot / (u32)e.slots, in_page = (u32)slot % (u32)e.slots;
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
            int at = piece * 32 + q * 8;
            float sine[8], cosine[8];
            if (ROPE) {
                float frequency[8];
                load_eight(e.frequencies + at, frequency);
#pragma unroll
                for (int k = 0; k < 8; ++k) turn_quickly(__fmul_rn((float)added.position[h], frequency[k]), sine[k], cosine[k]);
            }
#pragma unroll
            for (int i = 0; i < heads; ++i) {
                int head = first / HEAD + i;
                bool is_query = head < queries, is_value = head >= turned_heads;
                float factor = is_query ? e.query_scale : e.key_scale, low[8], high[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    int one = ((i * HEAD / 32 + piece) * 4 + k / 2) * 4 + h * 2 + k % 2, other = one + HEAD / 4;
                    low[k] = d[one];
                    high[k] = d[other];
                    if (BIASED && head < all) {
                        low[k] += widen(e.bias[head * HEAD + at + k]);
                        high[k] += widen(e.bias[head * HEAD + at + HEAD / 2 + k]);
                    }
                    if (ROPE && !is_value) turn_pair(low[k], high[k], factor * sine[k], factor * cosine[k]);
                }
                if (is_query && turned) {
                    Y* to = e.y + token * e.y_row + head * HEAD + at;
                    store_eight(to, low);
                    store_eight(to + HEAD / 2, high);
                } else if (!is_query && head < all && placed && (is_value || turned)) {
                    CACHE* to = is_value ? e.values + page * e.value_strides.page + (head - turned_heads) * e.value_strides.head +
                                               in_page * e.value_strides.slot
                                         : e.keys + page * e.key_strides.page + (head - queries) * e.key_strides.head +
                                               in_page * e.key_strides.slot;
                    store_eight(to + at, low);
                    store_eight(to + at + HEAD / 2, high);
                }
            }
        }
    }
}
#else

/* Finishes and writes two rows of this lane's sums, 8 rows apart. The number of results is a multiple of 8. */
__device__ inline void write(const EpilogueParams& e, float (&d)[OUTPUTS / 2], const Added& added, int row, int first, int rows, int q) {
    const int results = (int)(EPILOGUE == GATED ? e.outputs / 2 : e.outputs);
#pragma unroll
    for (int block = 0; block < PIECES; ++block) {
        int base = first + block * 32;
        if (base >= results) break;
        u32 words[2][4];
#if EPILOGUE == ADDED
        u32 others[2][4];
        added.as_sums<ORDERED != 0>(others, block, q);
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (block * 32 + i * 8 >= RESULTS) {
                words[0][i] = words[1][i] = 0;
                continue;
            }
            int output = base + (ORDERED ? q * 8 + i * 2 : i * 8 + q * 2);
            /* The biases of both halves, if there are two. */
            float bias[2][2] = {};
            if (BIASED && output < results) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    bias[0][c] = widen(e.bias[output + c]);
                    bias[1][c] = EPILOGUE == GATED ? widen(e.bias[results + output + c]) : 0.0f;
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float y[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    int at = (block * 4 + i) * 4 + h * 2 + c;
                    y[c] = BIASED ? d[at] + bias[0][c] : d[at];
#if EPILOGUE == ADDED
                    u32 word = others[h][i];
                    y[c] = widen(Y{(u16)(c ? word >> 16 : word)}) + e.alpha * y[c];
#elif EPILOGUE == ACTIVATED || EPILOGUE == GATED
                    if (LIMITED && y[c] > e.limit) y[c] = e.limit;
                    y[c] = apply_quickly(y[c]);
#endif
#if EPILOGUE == GATED
                    float up = BIASED ? d[OUTPUTS / 4 + at] + bias[1][c] : d[OUTPUTS / 4 + at];
                    if (LIMITED && up > e.limit) up = e.limit;
                    if (LIMITED && up < -e.limit) up = -e.limit;
                    y[c] *= up;
#endif
                }
#if WIDE_Y
                /* Results of 32 bits are written as they are. */
                if (row + h * 8 < rows && output < results) *(float2*)(e.y + (row + h * 8) * e.y_row + output) = float2{y[0], y[1]};
#else
                words[h][i] = (u32)narrow<Y>(y[0]).bits | (u32)narrow<Y>(y[1]).bits << 16;
#endif
            }
        }
#if !WIDE_Y
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!ORDERED) transpose(words[h], q);
            int output = base + q * 8;
            Y* to = e.y + (row + h * 8) * e.y_row + output;
            if (row + h * 8 < rows && output < results && block * 32 + q * 8 < RESULTS) {
                *(Vector*)to = Vector{{words[h][0], words[h][1], words[h][2], words[h][3]}};
            }
        }
#endif
    }
}
#endif
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(BLOCK, 1)
tile_wgmma(Extent extent, i64 input_count, const __grid_constant__ EpilogueParams e, const __grid_constant__ TensorMap x_map,
           const __grid_constant__ TensorMap weight_map) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
    u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
    launch_dependents();
    int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0) - 1;
    int rank = blockIdx.x % CLUSTER;
    if (threadIdx.x == 0) {
        prefetch_map(x_map);
        prefetch_map(weight_map);
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(barriers.full[s], 1);
            make_barrier(barriers.free[s], GROUPS * CLUSTER);
        }
        barriers_made();
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    wait_for_predecessor();
    int rows = (int)extent.count(), inputs = (int)input_count;
    const int results = (int)(EPILOGUE == GATED ? e.outputs / 2 : e.outputs);
    int row_tiles = (rows + ROWS * CLUSTER - 1) / (ROWS * CLUSTER), result_tiles = (results + RESULTS - 1) / RESULTS;
    int tiles = row_tiles * result_tiles, turns = (inputs + DEPTH - 1) / DEPTH;
    int begin = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    if (group < 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            Place<STAGES> place;
            for (int number = begin; number < tiles; number += step) {
                Tile tile = tile_at(number, row_tiles, result_tiles);
                int row = (tile.row * CLUSTER + rank) * ROWS, result = tile.output * RESULTS;
                /* The half of the tile's outputs that this block copies. */
                int output = result + (rank == 0 ? 0 : EPILOGUE == GATED ? results : OUTPUTS / 2);
                for (int turn = 0; turn < turns; ++turn, place.next()) {
                    u64& full = barriers.full[place.stage];
                    await(barriers.free[place.stage], place.phase ^ 1);
                    expect(full, SLOT);
                    u32 slot = ring + place.stage * SLOT;
                    copy_box(x_map, slot, full, turn * (DEPTH * 2), row);
                    copy_to_all(weight_map, slot + X_BYTES + rank * (W_BYTES / 2), full, turn * (DEPTH * 2), output);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        Place<STAGES> place, older;
        int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        auto release = [&]() {
            if (threadIdx.x % 128 < CLUSTER) arrive_at(barriers.free[older.stage], threadIdx.x % 128);
            older.next();
        };
        for (int number = begin; number < tiles; number += step) {
            Tile tile = tile_at(number, row_tiles, result_tiles);
            int row = ((tile.row * CLUSTER + rank) * GROUPS + group) * 64 + warp * 16 + lane / 4, first = tile.output * RESULTS;
            float sums[OUTPUTS / 2];
            for (int turn = 0; turn < turns; ++turn, place.next()) {
                await(barriers.full[place.stage], place.phase);
                u32 x = ring + place.stage * SLOT + group * (64 * DEPTH * 2), weight = ring + place.stage * SLOT + X_BYTES;
                hold(sums);
                products_begin();
#pragma unroll
                for (int part = 0; part < DEPTH / 16; ++part) {
                    multiply(sums, swizzled_at(x + part * 32), swizzled_at(weight + part * 32), turn > 0 || part > 0);
                }
                products_commit();
                if (turn > 0) {
                    products_wait<1>();
                    release();
                }
            }
            Added added;
#if EPILOGUE == ADDED
            added.read(e.added, e.added_row, row, rows, first, e.outputs, lane % 4);
#elif EPILOGUE == HEADS
            added.read(e, row, rows);
#endif
            products_wait<0>();
            hold(sums);
            release();
            write(e, sums, added, row, first, rows, lane % 4);
        }
    }
    /* A block must not exit while the other block may still write to its shared memory or arrive at its barriers. */
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    launch_dependents_and_wait();
#endif
}
