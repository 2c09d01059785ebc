/*
 * linear_w8a8 by wgmma (sm_90a): y = (x W^T) * row scale * output scale + bias, x and W of 8 bits, exact sums in 32 bits.
 *
 * A persistent block computes tiles of GROUPS * 64 rows by OUTPUTS outputs. A producer thread copies k tiles of 128 inputs by TMA
 * into a ring buffer of STAGES stages. GROUPS consumer warpgroups multiply, each 64 rows with all outputs, with sums in
 * registers; the ring buffer runs on across tile boundaries, so the next tile is loading while a group writes. For few rows only
 * X_ROWS are copied; the other rows of the tile hold arbitrary data, and their results are discarded.
 *
 * Gate and up are the two halves of a tile's outputs, so that a thread has both in registers. Scales of outputs, and residuals,
 * are read before the last products are waited for.
 *
 * Rows of x are swizzled by 128 bytes by the copy. Weights are stored in memory as wgmma reads them: 8 outputs by 16 inputs are
 * one line of 128 bytes (see weight.rs). Inputs, rows and outputs past the last are read as zeros. Tiles are visited in bands of
 * BAND tiles of rows, so that concurrent tiles share operands in the L2.
 *
 * Operations: 2 * rows * outputs * inputs; the floor is the rate of the tensor cores, 16384 per cycle and SM, or for few rows the
 * bytes of the weights. Clusters with multicast were slower, by a quarter at 4096 rows and more for fewer: the L2 is not the
 * bottleneck, and the blocks of a cluster wait for one another. Staggering the groups, so that one uses the tensor cores while
 * the other writes, was no faster. Measured figures: docs/src/performance/quantisation-cuda.md.
 */
#define ROWS (GROUPS * 64)
#define BLOCK ((GROUPS + 1) * 128)
/* Sums are integers. */
#define SUM(x) "+r"(x)
/* Inputs of a k tile, and bytes of a stage. */
#define DEPTH 128
#define X_BYTES (X_ROWS * DEPTH)
#define W_BYTES (OUTPUTS * DEPTH)
#define SLOT (X_BYTES + W_BYTES)
/* Results of a tile's row. */
#define RESULTS (GATED ? OUTPUTS / 2 : OUTPUTS)

struct Barriers { u64 full[STAGES], free[STAGES]; };

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* d = or += 64 rows times all outputs, 32 inputs each. */
__device__ inline void multiply(int (&d)[OUTPUTS / 2], u64 x, u64 weight, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, " BEHIND(OUTPUTS, FLAG) ", 0;\n"
        "wgmma.mma_async.sync.aligned.m64n" TEXT(OUTPUTS) "k32.s32.s8.s8 " NAMES(OUTPUTS) ", " BEHIND(OUTPUTS, DESCRIPTORS) ", add;\n}"
        : PLACES(OUTPUTS) : "l"(x), "l"(weight), "r"(add));
}

/* Packs two results; f32 stays two words. */
__device__ inline u32 pack(float a, float b) {
#if WIDE_Y
    return 0;
#else
    return (u32)narrow<Y>(a).bits | (u32)narrow<Y>(b).bits << 16;
#endif
}

/* The residual is read as results are written, 16 bytes at a time. */
#define ADDED_VECTORS (ADDED && Y_VECTORS && !WIDE_Y)
/* Results of a row are written in groups of 32, the last of which may be half. */
#define PIECES ((RESULTS + 31) / 32)

#if ADDED_VECTORS
typedef Residuals<RESULTS> Added;
#else
struct Added {};
#endif

/* The types of scales of outputs. */
#define SCALES_F32 0
#define SCALES_F16 1

/*
 * Loads the scales of a tile's outputs, for the threads of a group, which synchronise at barrier `meeting`: before, so that none
 * still reads the previous tile's scales, and after.
 */
__device__ inline void stage_scales(const Results& r, i64 scale_type, float (&scales)[OUTPUTS], int first, int results, int meeting) {
    asm volatile("bar.sync %0, 128;" :: "r"(meeting) : "memory");
#pragma unroll
    for (int at = threadIdx.x % 128; at < OUTPUTS; at += 128) {
        bool second = GATED && at >= RESULTS;
        int output = first + at - (second ? RESULTS : 0);
        scales[at] = 0.0f;
        if (output >= results) continue;
        output += second ? results : 0;
        if (scale_type == SCALES_F32) scales[at] = ((const float*)r.output_scales)[output];
        else if (scale_type == SCALES_F16) scales[at] = widen(((const f16*)r.output_scales)[output]);
        else scales[at] = widen(((const bf16*)r.output_scales)[output]);
    }
    asm volatile("bar.sync %0, 128;" :: "r"(meeting) : "memory");
}

/* Scales and biases of two neighbouring outputs. */
struct Numbers {
    float scale[2], bias[2];

    __device__ Numbers(const Results& r, const float* scales, int output, int end) : scale{scales[0], scales[1]} {
#pragma unroll
        for (int c = 0; c < 2; ++c) bias[c] = output + c < end ? or_else(r.bias, output + c, 0.0f) : 0.0f;
    }

    __device__ float apply_to(int sum, float row_scale, int c) const { return (float)sum * (row_scale * scale[c]) + bias[c]; }
};

/* Writes two rows of this lane's sums, 8 rows apart; `first` is the first of the tile's results, `results` their number. */
__device__ inline void write(const Results& r, int (&d)[OUTPUTS / 2], const Added& added, const float* scales, int row, int first,
                             int rows, int results, int lane) {
    int q = lane % 4;
    bool real[2] = {row < rows, row + 8 < rows};
    float own[2] = {real[0] ? r.row_scales[row] : 0.0f, real[1] ? r.row_scales[row + 8] : 0.0f};
#pragma unroll
    for (int block = 0; block < PIECES; ++block) {
        u32 words[2][4];
        int base = first + block * 32;
        if (base >= results) break;
#if ADDED_VECTORS
        u32 others[2][4];
        added.as_sums(others, block, q);
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (block * 4 + i >= RESULTS / 8) {
                words[0][i] = words[1][i] = 0;
                continue;
            }
            int output = base + i * 8 + q * 2;
            int at = block * 32 + i * 8 + q * 2;
            Numbers numbers(r, scales + at, output, results);
#if GATED
            Numbers gated(r, scales + RESULTS + at, results + output, 2 * results);
#endif
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float y[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    int sum = (block * 4 + i) * 4 + h * 2 + c;
                    y[c] = numbers.apply_to(d[sum], own[h], c);
#if GATED
                    float other = gated.apply_to(d[OUTPUTS / 4 + sum], own[h], c);
                    if (r.limit > 0.0f && y[c] > r.limit) y[c] = r.limit;
                    if (r.limit > 0.0f && other > r.limit) other = r.limit;
                    if (r.limit > 0.0f && other < -r.limit) other = -r.limit;
                    y[c] = (WIDE_Y ? apply(y[c]) : apply_quickly(y[c])) * other;
#endif
                }
#if ADDED_VECTORS
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    u32 word = others[h][i];
                    y[c] = widen(Y{(u16)(c ? word >> 16 : word)}) + r.alpha * y[c];
                }
#elif ADDED
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if (real[h] && output + c < results) {
                        y[c] = widen(r.added[(row + h * 8) * r.added_row + output + c]) + r.alpha * y[c];
                    }
                }
#endif
#if WIDE_Y
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if (real[h] && output + c < results) r.y[(row + h * 8) * r.y_row + output + c] = narrow<Y>(y[c]);
                }
#else
                words[h][i] = pack(y[0], y[1]);
#endif
            }
        }
#if !WIDE_Y
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            transpose(words[h], q);
            int output = base + q * 8;
            Y* to = r.y + (row + h * 8) * r.y_row + output;
            if (!real[h] || block * 4 + q >= RESULTS / 8) continue;
#if Y_VECTORS
            if (output + 8 <= results) *(Vector*)to = Vector{{words[h][0], words[h][1], words[h][2], words[h][3]}};
            else
#endif
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (output + i < results) to[i].bits = (u16)(words[h][i / 2] >> i % 2 * 16);
            }
        }
#endif
    }
}
#endif

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
int8_wgmma(Extent extent, i64 output_count, i64 input_count, i64 scale_type, const __grid_constant__ Results results,
           const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
    __shared__ __align__(8) float scales[GROUPS][OUTPUTS];
    u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
    launch_dependents();
    int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0) - 1;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(barriers.full[s], 1);
            make_barrier(barriers.free[s], GROUPS);
        }
        barriers_made();
    }
    __syncthreads();
    wait_for_predecessor();
    int rows = (int)extent.count(), outputs = (int)output_count, inputs = (int)input_count;
    int count = GATED ? outputs / 2 : outputs;
    int row_tiles = (rows + ROWS - 1) / ROWS, output_tiles = (count + RESULTS - 1) / RESULTS;
    int tiles = row_tiles * output_tiles, turns = (inputs + DEPTH - 1) / DEPTH;
    if (group < 0) {
        #if GROUPS > 1
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
        if (threadIdx.x == 0) {
            Place<STAGES> place;
            for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
                Tile tile = tile_at(number, row_tiles, output_tiles);
                for (int turn = 0; turn < turns; ++turn, place.next()) {
                    u64& full = barriers.full[place.stage];
                    await(barriers.free[place.stage], place.phase ^ 1);
                    expect(full, SLOT);
                    u32 slot = ring + place.stage * SLOT;
                    copy_box(x_map, slot, full, turn * DEPTH, tile.row * ROWS);
                    /* The dimensions: byte of a line, group of 16 inputs, group of 8 outputs. */
                    copy_box(weight_map, slot + X_BYTES, full, 0, turn * (DEPTH / 16), tile.output * (RESULTS / 8));
#if GATED
                    copy_box(weight_map, slot + X_BYTES + W_BYTES / 2, full, 0, turn * (DEPTH / 16), count / 8 + tile.output * (RESULTS / 8));
#endif
                }
            }
        }
    } else {
        #if GROUPS > 1
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
        Place<STAGES> place, older;
        int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        bool leader = threadIdx.x % 128 == 0;
        for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
            Tile tile = tile_at(number, row_tiles, output_tiles);
            int sums[OUTPUTS / 2];
            for (int turn = 0; turn < turns; ++turn, place.next()) {
                await(barriers.full[place.stage], place.phase);
                u32 x = ring + place.stage * SLOT + group * (64 * DEPTH), weight = ring + place.stage * SLOT + X_BYTES;
                hold(sums);
                products_begin();
#pragma unroll
                for (int part = 0; part < DEPTH / 32; ++part) {
                    multiply(sums, swizzled_at(x + part * 32), lines_at(weight + part * 256), turn > 0 || part > 0);
                }
                products_commit();
                if (turn > 0) {
                    products_wait<1>();
                    if (leader) arrive(barriers.free[older.stage]);
                    older.next();
                }
            }
            int row = tile.row * ROWS + group * 64 + warp * 16 + lane / 4, first = tile.output * RESULTS;
            Added added;
#if ADDED_VECTORS
            added.read(results.added, results.added_row, row, rows, first, count, lane % 4);
#endif
            stage_scales(results, scale_type, scales[group], first, count, group + 1);
            products_wait<0>();
            hold(sums);
            if (leader) arrive(barriers.free[older.stage]);
            older.next();
            write(results, sums, added, scales[group], row, first, rows, count, lane);
        }
    }
#else
    launch_dependents_and_wait();
#endif
}
