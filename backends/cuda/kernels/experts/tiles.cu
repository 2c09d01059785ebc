/*
 * grouped_linear and head_linear for many assignments on tensor cores (mma.m16n8k16, sm_80 and up): f16 or bf16 activations, dense weights of the
 * same type or packed integers.
 *
 * A block of 8 warps owns TOKENS assignments of an expert by 128 rows of its weight; a warp owns half of the assignments by 32
 * rows. Inputs pass in k tiles of 64 through STAGES buffers in shared memory. Activations are gathered from the rows of their
 * tokens by asynchronous copies; dense weights are copied the same way. Integers are loaded into registers one step ahead,
 * converted there to 16-bit numbers, each rounded once, and stored one step before they are multiplied. Rows are 128 bytes and
 * swizzled, so that ldmatrix has no bank conflicts. With GATED a warp has 16 rows of the gate's weight and the same 16 rows of
 * the up weight, so that a lane has both. Grid: (tiles of rows, items).
 *
 * Bytes: weights once per item from memory, or from the L2 if an expert has several items; per tile `(TOKENS + 128) * 2` bytes
 * per input from the L2. Floor: the weights of the distinct experts over read bandwidth, or the rate of mma.sync, on Hopper about
 * 60% of wgmma's.
 */
#define THREADS 256
#define WARPS 8
/* Weight rows of a tile, and results. */
#define ROWS 128
#define RESULTS (GATED ? ROWS / 2 : ROWS)
/* Inputs of a step. */
#define DEPTH 64
#define STAGE_BYTES ((TOKENS + ROWS) * 128)
/* Tiles of 16 assignments and of 8 rows of a warp. */
#define TOKEN_TILES (TOKENS / 32)
#define ROW_TILES 4

extern __shared__ __align__(128) u8 memory[];

#if __CUDA_ARCH__ >= 800
/* The swizzled address of 16 bytes of a row of a buffer. */
__device__ inline u8* vector_at(u8* rows, int row, int at) { return rows + row * 128 + ((at ^ (row % 8)) * 16); }

/* The index of a tile row in the weight. */
struct Row {
    const Weight* weight;
    /* Counted over all experts; rows past the last are replaced by the first row of the tile. */
    i64 index;
    bool real;
};
__device__ inline Row row_at(const GroupedLinearParams& p, int row, i64 first, i64 end) {
    const bool other = GATED && row % 32 >= 16;
    i64 index = first + (GATED ? row / 32 * 16 + row % 16 : row);
    return {other ? &p.other : &p.weight, index < end ? index : first, index < end};
}

#if FORMAT >= FORMAT_PACKED
/* Chunks of 64 inputs of a row that a thread unpacks: 8 bytes of 4 bits or 16 of 8 bits, four to a row. */
#define PIECES (ROWS * 4 / THREADS)
/* Groups that a chunk has inputs of. */
#define PIECE_GROUPS (GROUP == 32 && BITS == 4 ? 2 : GROUP == 32 ? 2 : GROUP == 16 ? 4 : 1)
/* Inputs of a group among the 64. */
#define GROUP_INPUTS (DEPTH / PIECE_GROUPS)

struct Pieces {
    u32 words[PIECES][BITS == 4 ? 2 : 4];
    SCALE numbers[PIECES][PIECE_GROUPS][NUMBERS];

    __device__ inline void load(const GroupedLinearParams& p, int step, i64 first, i64 end) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = threadIdx.x + i * THREADS, part = at % 4;
            const Row row = row_at(p, at / 4, first, end);
            const u8* unit = row.weight->elements + row.index / 8 * row.weight->row_bytes + part * 128 + row.index % 8 * 16;
#if BITS == 4
            const uint2 v = *(const uint2*)(unit + step / 2 * 512 + step % 2 * 8);
            words[i][0] = v.x;
            words[i][1] = v.y;
#else
            const Vector v = load_vector(unit + step * 512);
#pragma unroll
            for (int w = 0; w < 4; ++w) words[i][w] = v.word[w];
#endif
            const u8* line = row.weight->scales + row.index / 8 * row.weight->scale_bytes + row.index % 8 * (NUMBERS * SCALE_BYTES);
#pragma unroll
            for (int g = 0; g < PIECE_GROUPS; ++g) {
                const int group = GROUP == 0 ? 0 : (step * DEPTH + g * GROUP_INPUTS) / (GROUP ? GROUP : 1);
#pragma unroll
                for (int n = 0; n < NUMBERS; ++n) numbers[i][g][n] = ((const SCALE*)(line + (i64)group * LINE))[n];
            }
        }
    }
    /* Converts two neighbouring integers. Inputs past the last are multiplied by zeros, and their values are finite. */
    __device__ static inline u32 decode(u32 pair, float scale, float second) {
        float low = Lanes<X>::get(Vector{{pair, 0, 0, 0}}, 0), high = Lanes<X>::get(Vector{{pair, 0, 0, 0}}, 1);
        const float less = SHIFTED + (OFFSET == 1 ? second : 0.0f), more = OFFSET == 2 ? second : 0.0f;
        low = scale * (low - less) + more;
        high = scale * (high - less) + more;
        return narrow<X>(low).bits | (u32)narrow<X>(high).bits << 16;
    }
    __device__ inline void store(u8* rows) const {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = threadIdx.x + i * THREADS, row = at / 4, part = at % 4;
#if BITS == 4
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                const int g = PIECE_GROUPS == 2 ? w : 0;
                const float scale = widen(numbers[i][g][0]), second = NUMBERS == 2 ? widen(numbers[i][g][NUMBERS - 1]) : 0.0f;
                Vector v;
#pragma unroll
                for (int k = 0; k < 4; ++k) v.word[k] = decode(pair_of(words[i][w], k), scale, second);
                *(Vector*)vector_at(rows, row, w * 4 + part) = v;
            }
#else
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int g = PIECE_GROUPS == 4 ? w : PIECE_GROUPS == 2 ? w / 2 : 0;
                const float scale = widen(numbers[i][g][0]), second = NUMBERS == 2 ? widen(numbers[i][g][NUMBERS - 1]) : 0.0f;
                /* The first of four inputs. */
                const int column = GROUP == 0 ? part * 16 + w * 4 : w * 16 + part * 4;
                u32* to = (u32*)(vector_at(rows, row, column / 8) + column % 8 * 2);
                to[0] = decode(pair_of(words[i][w], 0), scale, second);
                to[1] = decode(pair_of(words[i][w], 1), scale, second);
            }
#endif
        }
    }
};
#endif

/* The product of a tile's buffers. */
__device__ inline void multiply_stage(u8* tokens, u8* rows, int token, int row, float (&sums)[TOKEN_TILES][ROW_TILES][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
        u32 weights[ROW_TILES / 2][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES / 2; ++r) {
            load_matrices(weights[r], vector_at(rows, row + r * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
        }
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) {
            u32 own[4];
            load_matrices(own, vector_at(tokens, token + t * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                multiply(sums[t][r], own[0], own[1], own[2], own[3], weights[r / 2][r % 2 * 2], weights[r / 2][r % 2 * 2 + 1]);
            }
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_linear_tiles(const __grid_constant__ GroupedLinearParams p) {
    launch_dependents_and_wait();
#if __CUDA_ARCH__ >= 800
    __shared__ int assignments[TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int all = (int)p.extent.count() * SLOTS, inputs = (int)p.inputs, steps = (inputs + DEPTH - 1) / DEPTH;
    Cursor cursor = {};
    for (int number = blockIdx.y; number < p.items; number += gridDim.y) {
        const Item item = find_item(p, cursor, number, all);
        if (item.expert < 0) return;
        if (blockIdx.x == 0) copy_rest(p, item, threadIdx.x, THREADS, all);
        /* The expert's first row, the tile's first row, and the end of the expert's rows. */
        const i64 own = item.expert * p.outputs, end = own + p.outputs;
        const i64 first = (FORMAT >= FORMAT_PACKED ? own / 8 * 8 : own) + (i64)blockIdx.x * RESULTS;
        if (first >= end) return;
        for (int i = threadIdx.x; i < TOKENS; i += THREADS) assignments[i] = assignment_of(p, item, i, all);
        __syncthreads();

        /* A thread copies the same vector of every row, for rows 32 apart. */
        const int vector = threadIdx.x % 8;
        const X* x[TOKENS / 32];
#pragma unroll
        for (int i = 0; i < TOKENS / 32; ++i) {
            int assignment = assignments[threadIdx.x / 8 + i * 32];
            x[i] = assignment < 0 ? nullptr : inputs_of(p, assignment) + vector * 8;
        }
        auto stage_of = [&](int step) { return memory + step % STAGES * STAGE_BYTES; };
        /* Issues the copies of a step, or commits an empty group. */
        auto copy_step = [&](int step) {
            u8* stage = stage_of(step);
            const bool whole = step < steps && step * DEPTH + vector * 8 < inputs;
            if (step < steps) {
#pragma unroll
                for (int i = 0; i < TOKENS / 32; ++i) {
                    const bool real = whole && x[i];
                    const void* from = real ? (const void*)(x[i] + step * DEPTH) : p.x.first;
                    copy_ahead((Vector*)vector_at(stage, threadIdx.x / 8 + i * 32, vector), from, real);
                }
#if FORMAT < FORMAT_PACKED
#pragma unroll
                for (int i = 0; i < ROWS / 32; ++i) {
                    const Row row = row_at(p, threadIdx.x / 8 + i * 32, first, end);
                    const bool real = whole && row.real;
                    const u8* from = row.weight->elements + row.index * row.weight->row_bytes + (real ? step * 128 + vector * 16 : 0);
                    copy_ahead((Vector*)vector_at(stage + TOKENS * 128, threadIdx.x / 8 + i * 32, vector), from, real);
                }
#endif
            }
            commit_copies();
        };
#pragma unroll
        for (int step = 0; step < STAGES - 1; ++step) copy_step(step);
#if FORMAT >= FORMAT_PACKED
        Pieces pieces;
        pieces.load(p, 0, first, end);
        pieces.store(stage_of(0) + TOKENS * 128);
        if (steps > 1) pieces.load(p, 1, first, end);
#endif
        const int token = warp / 4 * (TOKENS / 2), row = warp % 4 * 32;
        float sums[TOKEN_TILES][ROW_TILES][4] = {};
        for (int step = 0; step < steps; ++step) {
            await_copies<STAGES - 2>();
            /* After this barrier, all warps have multiplied the previous step, whose buffer is refilled next. */
            __syncthreads();
#if FORMAT >= FORMAT_PACKED
            if (step + 1 < steps) pieces.store(stage_of(step + 1) + TOKENS * 128);
            if (step + 2 < steps) pieces.load(p, step + 2, first, end);
#endif
            copy_step(step + STAGES - 1);
            multiply_stage(stage_of(step), stage_of(step) + TOKENS * 128, token, row, sums);
        }
        await_copies<0>();

#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int assignment = assignments[token + t * 16 + lane / 4 + h * 8];
                if (assignment < 0) continue;
                Y* y = outputs_of(p, assignment);
#pragma unroll
                for (int r = 0; r < (GATED ? ROW_TILES / 2 : ROW_TILES); ++r) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        i64 index = first + (GATED ? warp % 4 * 16 : row) + r * 8 + lane % 4 * 2 + i;
                        if (index < own || index >= end) continue;
                        float sum = sums[t][r][h * 2 + i] + or_else(p.bias, index, 0.0f);
#if GATED
                        sum = gated(sum, sums[t][r + 2][h * 2 + i] + or_else(p.other_bias, index, 0.0f), p.limit, p.up_offset);
#endif
                        y[index - own] = narrow<Y>(sum);
                    }
                }
            }
        }
        /* The next item reuses the buffers and the list. */
        __syncthreads();
    }
#endif
}
