/*
 * grouped_linear and head_linear for packed weights and some tens of assignments per expert, by wgmma (sm_90a), activations f16 or
 * bf16.
 *
 * Weights are the 64-row operand, and come from registers; TOKENS assignments of an item are the columns. A block of two
 * warpgroups owns 128 results; with GATED a warpgroup multiplies 64 rows of the gate's weight and the same 64 of the up weight, so
 * that a lane has both. A step is 64 bytes of every row. It passes through STAGES buffers in shared memory: asynchronous copies
 * fill them with integers, scales and offsets as they lie in memory; activations are gathered from the rows of their tokens into
 * registers, and stored one step before they are multiplied. Each warp dequantises the 16 rows that it supplies to a product, once
 * for all assignments.
 *
 * A lane's 16 bytes of a row hold the inputs that packing gave them (weight/packing.rs). Their pairs become the operands as they
 * come, and activations are stored in the same order: two at a time, permuted within the 128 bytes of a row.
 *
 * Numbers: an integer minus its zero point is exact. With one scale for a row, sums are scaled at the end. Otherwise weights are
 * rounded once to the type of the activations: times a scale that is the sum of two elements, or with minima in f32. Floats of 4
 * bits are exact: in bf16 they are 2^-32 of their value, so that one product brings them there from 2^-126. Scales must be within the
 * range of the type: in bf16 those of floats up to 2^33; in f16 those below 2^-14 lose bits, and those below 2^-24 are 0.
 *
 * Bytes: integers, scales and offsets, once per item; activations once per 128 results, from the L2. Floor: the former, for the
 * distinct experts, over read bandwidth. Grid: (tiles of results, items).
 */
#define THREADS 256
/* Weights that a block multiplies: with GATED, those of the gate and of the up projection. */
#define WEIGHTS (GATED ? 2 : 1)
#define RESULTS 128
/* Units of 8 rows of a weight, and groups of a step. */
#define UNITS (RESULTS / 8)
#define STEP_GROUPS (GROUP == 0 || GROUP > SPAN ? 1 : SPAN / GROUP)
/* Bytes of a step: activations of 64 inputs and of all, the scales and offsets of a unit; and of a stage, which has activations, the
 * integers of all weights, then their scales and offsets. */
#define X_HALF (TOKENS * 128)
#define X_BYTES (SPAN / 64 * X_HALF)
#define UNIT_NUMBERS (STEP_GROUPS * LINE)
#define STAGE_BYTES ((X_BYTES + WEIGHTS * UNITS * (512 + UNIT_NUMBERS) + 1023) / 1024 * 1024)
/* Units of a weight that a warp copies; 16-byte vectors of scales and offsets of a unit, and those that a thread copies. */
#define OWN_UNITS (UNITS / 8)
#define UNIT_VECTORS (UNIT_NUMBERS / 16)
#define OWN_NUMBERS ((WEIGHTS * UNITS * UNIT_VECTORS + THREADS - 1) / THREADS)
/* Whether sums are scaled rather than weights. */
#define LATE (GROUP == 0 && OFFSET != 2)
/* Whether weights are 2^-32 of their value, made by one product from floats that are 2^-126 of theirs. */
#define SMALL (FLOATS && !HALF)

extern __shared__ __align__(1024) u8 memory[];

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
#define SUM(x) "+f"(x)
#if HALF
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k16.f32.f16.f16 " NAMES(TOKENS) ", "
#define PAIR_TYPE "f16x2"
#else
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k16.f32.bf16.bf16 " NAMES(TOKENS) ", "
#define PAIR_TYPE "bf16x2"
#endif

/* d += 64 rows times all assignments, 16 inputs of each. */
__device__ inline void multiply(float (&d)[TOKENS / 2], const u32 (&a)[4], u64 x) {
    asm volatile(PRODUCT BEHIND(TOKENS, FROM_REGISTERS) ", 1, 1, 1, 0;"
        : PLACES(TOKENS) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
__device__ inline u32 fused(u32 a, u32 b, u32 c) {
    u32 result;
    asm("fma.rn." PAIR_TYPE " %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}
/* A number as both elements of a pair; minus zeros; and ones. */
__device__ inline u32 twice(float x) { return narrow<X>(x).bits * 0x10001u; }
#define MINUS_ZEROS 0x80008000u
#define ONES (HALF ? 0x3c003c00u : 0x3f803f80u)

/* The scale and offset of a group of a row, and how a pair of its integers (pairs.cuh) becomes a pair of weights. */
struct Numbers {
#if OFFSET == 2
    float scale, rest;
    __device__ Numbers(const SCALE* own) : scale(widen(own[0])), rest(widen(own[NUMBERS - 1]) - SHIFTED * scale) {}
    __device__ u32 weights_of(u32 pair) const {
        const Vector v = {{pair, 0, 0, 0}};
        const float low = scale * Lanes<X>::get(v, 0) + rest, high = scale * Lanes<X>::get(v, 1) + rest;
        return narrow<X>(low).bits | (u32)narrow<X>(high).bits << 16;
    }
#elif SMALL
    u32 scale;
    /* Times 2^94. */
    __device__ Numbers(const SCALE* own) : scale(fused(own->bits * 0x10001u, 0x6e806e80u, MINUS_ZEROS)) {}
#else
    u32 less, scale, finer;
    __device__ Numbers(const SCALE* own) {
        const float whole = widen(own[0]);
        less = twice(-SHIFTED - (OFFSET == 1 ? widen(own[NUMBERS - 1]) : 0.0f));
        scale = twice(whole);
        finer = twice(whole - Lanes<X>::get(Vector{{scale, 0, 0, 0}}, 0));
    }
    __device__ u32 weights_of(u32 pair) const {
        if (!FLOATS && (BITS == 4 || OFFSET)) pair = fused(pair, ONES, less);
        if (LATE) return pair;
        /* Scales of floats are powers of two. */
        return fused(pair, scale, FLOATS ? MINUS_ZEROS : fused(pair, finer, MINUS_ZEROS));
    }
#endif
    /* Pair `k` of a word. */
    __device__ u32 weights_of(u32 word, int k) const {
#if SMALL
        return fused(small_floats(word, k), scale, MINUS_ZEROS);
#else
        return weights_of(pair_of(word, k));
#endif
    }
};

/* Where a pair of 64 inputs is stored, counted in pairs: as the products of 16 take them from the lanes' words. */
__device__ inline int place_of(int pair) {
    if (BITS == 4) return pair / 16 * 16 + pair % 4 * 4 + pair % 16 / 4;
    if (GROUP == 0) return pair % 8 / 2 * 8 + pair % 2 * 4 + pair / 8;
    return pair / 8 * 8 + pair % 2 * 4 + pair % 8 / 2;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_linear_wgmma(const __grid_constant__ GroupedLinearParams p) {
    launch_dependents_and_wait();
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    __shared__ int assignments[TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int all = (int)p.extent.count() * SLOTS, inputs = (int)p.inputs, steps = (inputs + SPAN - 1) / SPAN;
    Cursor cursor = {};
    for (int number = blockIdx.y; number < p.items; number += gridDim.y) {
        const Item item = find_item(p, cursor, number, all);
        if (item.expert < 0) return;
        if (blockIdx.x == 0) copy_rest(p, item, threadIdx.x, THREADS, all);
        /* The expert's first row, the tile's first row, and the end of the expert's rows. */
        const i64 own = item.expert * p.outputs, end = own + p.outputs, first = own / 8 * 8 + (i64)blockIdx.x * RESULTS;
        if (first >= end) continue;
        for (int i = threadIdx.x; i < TOKENS; i += THREADS) assignments[i] = assignment_of(p, item, i, all);
        __syncthreads();

        /* Eight lanes have 64 inputs of a row, so a warp has four rows of every 32. */
        const X* x[TOKENS / 32];
#pragma unroll
        for (int i = 0; i < TOKENS / 32; ++i) {
            const int assignment = assignments[i * 32 + threadIdx.x / 8];
            x[i] = assignment < 0 ? nullptr : inputs_of(p, assignment) + lane % 8 * 8;
        }
        Vector held[SPAN / 64][TOKENS / 32];
        auto load_x = [&](int step) {
#pragma unroll
            for (int half = 0; half < SPAN / 64; ++half) {
                const int column = step * SPAN + half * 64;
#pragma unroll
                for (int i = 0; i < TOKENS / 32; ++i) {
                    held[half][i] = Vector{};
                    if (x[i] && column + lane % 8 * 8 < inputs) held[half][i] = load_vector(x[i] + column);
                }
            }
        };
        auto store_x = [&](u8* stage) {
            const int row = threadIdx.x / 8;
            u8* rows = stage + row * 128;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const int place = place_of(lane % 8 * 4 + pair);
                u8* to = rows + (place / 4 ^ row % 8) * 16 + place % 4 * 4;
#pragma unroll
                for (int i = 0; i < SPAN / 64 * (TOKENS / 32); ++i) {
                    const int half = i / (TOKENS / 32), rows_of_32 = i % (TOKENS / 32);
                    *(u32*)(to + half * X_HALF + rows_of_32 * 4096) = held[half][rows_of_32].word[pair];
                }
            }
        };
        /* The units that this warp copies of each weight, and the scales and offsets that this thread copies. Units behind the last of
         * the expert are replaced by the first of the tile. */
        const u8 *units[WEIGHTS][OWN_UNITS], *numbers[OWN_NUMBERS];
        auto unit_of = [&](int unit) { return first / 8 + ((first / 8 + unit) * 8 < end ? unit : 0); };
#pragma unroll
        for (int i = 0; i < WEIGHTS * OWN_UNITS; ++i) {
            const Weight& weight = i / OWN_UNITS ? p.other : p.weight;
            units[i / OWN_UNITS][i % OWN_UNITS] = weight.elements + unit_of(warp + i % OWN_UNITS * 8) * weight.row_bytes + lane * 16;
        }
#pragma unroll
        for (int i = 0; i < OWN_NUMBERS; ++i) {
            const int vector = threadIdx.x + i * THREADS, unit = vector / UNIT_VECTORS;
            const Weight& weight = unit / UNITS ? p.other : p.weight;
            numbers[i] = weight.scales + unit_of(unit % UNITS) * weight.scale_bytes + vector % UNIT_VECTORS * 16;
        }
        auto copy_step = [&](int step, u8* stage) {
            if (step < steps) {
#pragma unroll
                for (int i = 0; i < WEIGHTS * OWN_UNITS; ++i) {
                    /* Rows of a line are permuted by its index, so that 8 lanes have no bank conflicts. */
                    Vector* to = (Vector*)(stage + X_BYTES + (i * 8 + warp) * 512) + lane / 8 * 8 + (lane % 8 ^ lane / 8 * 2);
                    copy_ahead(to, units[i / OWN_UNITS][i % OWN_UNITS] + step * 512, true);
                }
                const int line = GROUP == 0 ? 0 : GROUP > SPAN ? step * SPAN / (GROUP ? GROUP : 1) : step * STEP_GROUPS;
#pragma unroll
                for (int i = 0; i < OWN_NUMBERS; ++i) {
                    const int vector = threadIdx.x + i * THREADS;
                    if (vector >= WEIGHTS * UNITS * UNIT_VECTORS) break;
                    copy_ahead((Vector*)(stage + X_BYTES + WEIGHTS * UNITS * 512) + vector, numbers[i] + line * LINE, true);
                }
            }
            commit_copies();
        };
#pragma unroll 1
        for (int step = 0; step < STAGES - 1; ++step) copy_step(step, memory + step * STAGE_BYTES);
        load_x(0);
        store_x(memory);
        load_x(1);

        float sums[WEIGHTS][TOKENS / 2] = {};
        int here = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            await_copies<STAGES - 2>();
            /* Products read through the async proxy what was stored. */
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            /* After this barrier, all warps have multiplied the previous step, whose buffer is refilled next. */
            __syncthreads();
            const int next = here + 1 == STAGES ? 0 : here + 1, last = here == 0 ? STAGES - 1 : here - 1;
            store_x(memory + next * STAGE_BYTES);
            load_x(step + 2);
            copy_step(step + STAGES - 1, memory + last * STAGE_BYTES);
            const u8* stage = memory + here * STAGE_BYTES;
            here = next;
            const u64 columns = swizzled_at(shared_address(stage));
#pragma unroll
            for (int which = 0; which < WEIGHTS; ++which) {
                const u8* own_numbers = stage + X_BYTES + WEIGHTS * UNITS * 512 + (which * UNITS + warp * 2) * UNIT_NUMBERS;
                const Vector* lines = (const Vector*)(stage + X_BYTES + (which * UNITS + warp * 2) * 512);
                const int at = lane % 4 * 8 + (lane / 4 ^ lane % 4 * 2);
                const Vector low = lines[at], high = lines[at + 32];
                u32 a[SPAN / 16][4];
#pragma unroll
                for (int g = 0; g < STEP_GROUPS; ++g) {
                    const SCALE* row = (const SCALE*)(own_numbers + g * LINE) + lane / 4 * NUMBERS;
                    const Numbers low_numbers(row), high_numbers((const SCALE*)((const u8*)row + UNIT_NUMBERS));
#pragma unroll
                    for (int w = g * (4 / STEP_GROUPS); w < (g + 1) * (4 / STEP_GROUPS); ++w) {
#pragma unroll
                        for (int k = 0; k < PAIRS; ++k) {
                            u32(&to)[4] = a[w * (PAIRS / 2) + k / 2];
                            to[k % 2 * 2] = low_numbers.weights_of(low.word[w], k);
                            to[k % 2 * 2 + 1] = high_numbers.weights_of(high.word[w], k);
                        }
                    }
                }
                products_begin();
#pragma unroll
                for (int k = 0; k < SPAN / 16; ++k) multiply(sums[which], a[k], columns + (k / 4 * X_HALF + k % 4 * 32) / 16);
                products_commit();
                products_wait<0>();
            }
        }
        await_copies<0>();

        const int row = warp * 16 + lane / 4;
        float scale[WEIGHTS][2];
#pragma unroll
        for (int i = 0; i < WEIGHTS * 2; ++i) {
            const Weight& weight = i / 2 ? p.other : p.weight;
            const i64 index = first + row + i % 2 * 8;
            scale[i / 2][i % 2] = LATE ? weight.number(index < end ? index : first, 0, 0) : SMALL ? 4294967296.0f : 1.0f;
        }
#pragma unroll
        for (int which = 0; which < WEIGHTS; ++which) hold(sums[which]);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) {
            const int assignment = assignments[i / 4 * 8 + lane % 4 * 2 + i % 2], h = i % 4 / 2;
            const i64 index = first + row + h * 8;
            if (assignment < 0 || index < own || index >= end) continue;
            float sum = sums[0][i] * scale[0][h] + or_else(p.bias, index, 0.0f);
#if GATED
            sum = gated(sum, sums[1][i] * scale[1][h] + or_else(p.other_bias, index, 0.0f), p.limit, p.up_offset);
#endif
            outputs_of(p, assignment)[index - own] = narrow<Y>(sum);
        }
        /* The next item reuses the buffers and the list. */
        __syncthreads();
    }
#endif
}
