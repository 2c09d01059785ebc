/*
 * linear_w8a8 on Hopper's tensor cores (sm_90a): y = (x W^T) * row scale * output scale + bias, x and W of 8 bits, sums exact
 * in 32 bits.
 *
 * A block owns tiles of GROUPS * 64 rows by OUTPUTS outputs and stays on its multiprocessor for all of them. One thread
 * fetches: 128 inputs at a time into a ring of STAGES, by the bulk copy engine. GROUPS warpgroups multiply, each 64 rows with
 * all outputs, sums in registers; the ring runs on across the ends of tiles, so the next tile arrives while a group writes.
 * Of few rows only X_ROWS are fetched; the rest of the tile is whatever lies there, and goes nowhere.
 *
 * Rows of x are swizzled by 128 bytes on the way. Weights lie in memory as wgmma reads them: 8 outputs by 16 inputs are one
 * line of 128 bytes (see weight.rs). Inputs past the last, and rows and outputs past theirs, arrive as zeros. Tiles are walked
 * in bands of BAND tiles of rows, so that those under way at a time share operands in the L2.
 *
 * Operations: 2 * rows * outputs * inputs; the floor is the rate of the tensor cores, 16384 a cycle and multiprocessor, or for
 * few rows the bytes of the weights. Clusters of blocks that share what they read were tried and are slower, by a quarter at
 * 4096 rows and more for fewer: the L2 is no bound, and the blocks of a cluster wait for one another. Groups that begin some
 * turns apart, so that one has the tensor cores while the other writes, are no faster.
 * Measured figures: docs/src/performance/quantisation-cuda.md.
 */
#define ROWS (GROUPS * 64)
#define BLOCK ((GROUPS + 1) * 128)
#define BAND 8
/* Inputs of a turn, and bytes of a slot. */
#define DEPTH 128
#define X_BYTES (X_ROWS * DEPTH)
#define W_BYTES (OUTPUTS * DEPTH)
#define SLOT (X_BYTES + W_BYTES)

struct Barriers { u64 full[STAGES], free[STAGES]; };

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* A box of rows of x: input, row. */
__device__ inline void copy_rows(const TensorMap& map, u32 to, u64& barrier, int input, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(input), "r"(row) : "memory");
}

/* A box of lines of weights: byte of a line, 16 inputs, 8 outputs. */
__device__ inline void copy_lines(const TensorMap& map, u32 to, u64& barrier, int line, int unit) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(0), "r"(line), "r"(unit) : "memory");
}

/* What wgmma is told of lines: the next 16 inputs are 128 bytes on, the next 8 outputs 1024. */
__device__ inline u64 lines_at(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(128 >> 4) << 16 | (u64)(1024 >> 4) << 32;
}

/* Sixteen registers in a list, and as operands. */
#define NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PLACES(i) \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), \
    "+r"(d[i + 7]), "+r"(d[i + 8]), "+r"(d[i + 9]), "+r"(d[i + 10]), "+r"(d[i + 11]), "+r"(d[i + 12]), "+r"(d[i + 13]), \
    "+r"(d[i + 14]), "+r"(d[i + 15])
#if OUTPUTS == 48
#define NAMES NAMES_0 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define ALL PLACES(0), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23])
#define OPERANDS "%24, %25"
#define FLAG "%26"
#elif OUTPUTS == 32
#define NAMES NAMES_0
#define ALL PLACES(0)
#define OPERANDS "%16, %17"
#define FLAG "%18"
#elif OUTPUTS == 64
#define NAMES NAMES_0 ", " NAMES_1
#define ALL PLACES(0), PLACES(16)
#define OPERANDS "%32, %33"
#define FLAG "%34"
#elif OUTPUTS == 96
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2
#define ALL PLACES(0), PLACES(16), PLACES(32)
#define OPERANDS "%48, %49"
#define FLAG "%50"
#elif OUTPUTS == 128
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3
#define ALL PLACES(0), PLACES(16), PLACES(32), PLACES(48)
#define OPERANDS "%64, %65"
#define FLAG "%66"
#elif OUTPUTS == 192
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4 ", " NAMES_5
#define ALL PLACES(0), PLACES(16), PLACES(32), PLACES(48), PLACES(64), PLACES(80)
#define OPERANDS "%96, %97"
#define FLAG "%98"
#elif OUTPUTS == 224
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4 ", " NAMES_5 ", " NAMES_6
#define ALL PLACES(0), PLACES(16), PLACES(32), PLACES(48), PLACES(64), PLACES(80), PLACES(96)
#define OPERANDS "%112, %113"
#define FLAG "%114"
#elif OUTPUTS == 256
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4 ", " NAMES_5 ", " NAMES_6 ", " NAMES_7
#define ALL PLACES(0), PLACES(16), PLACES(32), PLACES(48), PLACES(64), PLACES(80), PLACES(96), PLACES(112)
#define OPERANDS "%128, %129"
#define FLAG "%130"
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

/* d = or += 64 rows times all outputs, 32 inputs of each. */
__device__ inline void multiply(int (&d)[OUTPUTS / 2], u64 x, u64 weight, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, " FLAG ", 0;\n"
        "wgmma.mma_async.sync.aligned.m64n" TEXT(OUTPUTS) "k32.s32.s8.s8 {" NAMES "}, " OPERANDS ", add;\n}"
        : ALL : "l"(x), "l"(weight), "r"(add));
}

/* Counts through a ring. */
struct Place {
    int stage = 0;
    u32 phase = 0;
    __device__ inline void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/* The first row and output of a tile. */
struct Tile { int row, output; };

__device__ inline Tile tile_at(int number, int row_tiles, int output_tiles) {
    int per_band = BAND * output_tiles, band = number / per_band, at = number % per_band;
    int height = row_tiles - band * BAND < BAND ? row_tiles - band * BAND : BAND;
    return {(band * BAND + at % height) * ROWS, at / height * OUTPUTS};
}

/* Two results, put together; f32 stays two words. */
__device__ inline u32 pack(float a, float b) {
#if WIDE_Y
    return 0;
#else
    return (u32)narrow<Y>(a).bits | (u32)narrow<Y>(b).bits << 16;
#endif
}

/* Lane q of a quad has word q of four vectors; gets vector q. */
__device__ inline void transpose(u32 (&v)[4], int q) {
    bool odd = q & 1, high = q & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 other = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
        (odd ? v[i] : v[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 other = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2);
        (high ? v[i] : v[i + 2]) = other;
    }
}

/* Writes two rows of sums of this lane, 8 rows apart. */
__device__ inline void write(const Results& r, int (&d)[OUTPUTS / 2], int row, int first, int rows, int outputs, int lane) {
    int q = lane % 4;
    bool real[2] = {row < rows, row + 8 < rows};
    float own[2] = {real[0] ? r.row_scales[row] : 0.0f, real[1] ? r.row_scales[row + 8] : 0.0f};
#pragma unroll
    for (int block = 0; block < (OUTPUTS + 31) / 32; ++block) {
        u32 words[2][4];
        int base = first + block * 32;
        if (base >= outputs) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (block * 4 + i >= OUTPUTS / 8) {
                words[0][i] = words[1][i] = 0;
                continue;
            }
            int output = base + i * 8 + q * 2;
            float scale[2] = {}, bias[2] = {};
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (output + c < outputs) {
                    scale[c] = widen(r.output_scales[output + c]);
                    bias[c] = or_else(r.bias, output + c, 0.0f);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float y[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) y[c] = (float)d[(block * 4 + i) * 4 + h * 2 + c] * (own[h] * scale[c]) + bias[c];
#if ADDED
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if (real[h] && output + c < outputs) {
                        y[c] = widen(r.added[(row + h * 8) * r.added_row + output + c]) + r.alpha * y[c];
                    }
                }
#endif
#if WIDE_Y
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if (real[h] && output + c < outputs) r.y[(row + h * 8) * r.y_row + output + c] = narrow<Y>(y[c]);
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
            if (!real[h] || block * 4 + q >= OUTPUTS / 8) continue;
#if Y_VECTORS
            if (output + 8 <= outputs) *(Vector*)to = Vector{{words[h][0], words[h][1], words[h][2], words[h][3]}};
            else
#endif
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (output + i < outputs) to[i].bits = (u16)(words[h][i / 2] >> i % 2 * 16);
            }
        }
#endif
    }
}
#endif

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
int8_wgmma(Extent extent, i64 output_count, i64 input_count, const __grid_constant__ Results results,
           const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
    u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
    let_next_start();
    int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0) - 1;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(barriers.full[s], 1);
            make_barrier(barriers.free[s], GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    await_previous();
    int rows = (int)extent.count(), outputs = (int)output_count, inputs = (int)input_count;
    int row_tiles = (rows + ROWS - 1) / ROWS, output_tiles = (outputs + OUTPUTS - 1) / OUTPUTS;
    int tiles = row_tiles * output_tiles, turns = (inputs + DEPTH - 1) / DEPTH;
    if (group < 0) {
        #if GROUPS > 1
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
        if (threadIdx.x == 0) {
            Place place;
            for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
                Tile tile = tile_at(number, row_tiles, output_tiles);
                for (int turn = 0; turn < turns; ++turn, place.next()) {
                    u64& full = barriers.full[place.stage];
                    await(barriers.free[place.stage], place.phase ^ 1);
                    expect(full, SLOT);
                    u32 slot = ring + place.stage * SLOT;
                    copy_rows(x_map, slot, full, turn * DEPTH, tile.row);
                    copy_lines(weight_map, slot + X_BYTES, full, turn * (DEPTH / 16), tile.output / 8);
                }
            }
        }
    } else {
        #if GROUPS > 1
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
        Place place, older;
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
            products_wait<0>();
            hold(sums);
            if (leader) arrive(barriers.free[older.stage]);
            older.next();
            write(results, sums, tile.row + group * 64 + warp * 16 + lane / 4, tile.output, rows, outputs, lane);
        }
    }
#else
    take_turn();
#endif
}
