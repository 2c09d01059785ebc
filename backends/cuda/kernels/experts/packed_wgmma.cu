/*
 * grouped_linear and head_linear for packed weights and some tens of assignments per expert, by wgmma (sm_90a), activations f16 or
 * bf16.
 *
 * Weights are the 64-row operand, and come from registers; TOKENS assignments of an item are the columns. A block of two
 * warpgroups owns PRODUCTS times 128 rows of weights, which share the activations: the next 128 results or, with GATED, the same rows of
 * the up weight, so that a lane has both. A step is 64 bytes of every row. It passes through STAGES buffers in shared memory, which
 * asynchronous copies fill with integers, scales and offsets as they lie in memory, and with activations, gathered from the rows of
 * their tokens. Each warp dequantises the 16 rows that it supplies to a product, once for all assignments, half a step at a time while
 * the other half is multiplied.
 *
 * Numbers: an integer minus its zero point is exact. With one scale for a row, sums are scaled at the end. Otherwise weights are
 * rounded once to the type of the activations: times a scale that is the sum of two elements, or with minima in f32. Floats of 4
 * bits are exact: in bf16 they are 2^-32 of their value, so that one product brings them there from 2^-126. Scales must be within the
 * range of the type: in bf16 those of floats up to 2^33; in f16 those below 2^-14 lose bits, and those below 2^-24 are 0.
 *
 * Bytes: integers, scales and offsets, once per item; activations once per block, from the L2. Floor: the former, for the
 * distinct experts, over read bandwidth. Grid: (tiles of results, items).
 */
#define THREADS 256
/* Rows of a product. A block has PRODUCTS of them: with GATED, one of the gate and one of the up projection. */
#define ROWS 128
#define RESULTS (GATED ? ROWS : PRODUCTS * ROWS)
/* Units of 8 rows of a weight, and groups of a step. */
#define UNITS (ROWS / 8)
#define STEP_GROUPS (GROUP == 0 || GROUP > SPAN ? 1 : SPAN / GROUP)
/* Bytes of a step: activations of 64 inputs and of all, the scales and offsets of a unit; and of a stage, which has activations, the
 * integers of all weights, then their scales and offsets. */
#define X_HALF (TOKENS * 128)
#define X_BYTES (SPAN / 64 * X_HALF)
#define UNIT_NUMBERS (STEP_GROUPS * LINE)
#define STAGE_BYTES ((X_BYTES + PRODUCTS * UNITS * (512 + UNIT_NUMBERS) + 1023) / 1024 * 1024)
/* Units of a product that a warp copies; 16-byte vectors of scales and offsets of a unit, and those that a thread copies. */
#define OWN_UNITS (UNITS / 8)
#define UNIT_VECTORS (UNIT_NUMBERS / 16)
#define OWN_NUMBERS ((PRODUCTS * UNITS * UNIT_VECTORS + THREADS - 1) / THREADS)
/* Whether sums are scaled rather than weights. */
#define LATE (GROUP == 0 && OFFSET != 2)

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
    u32 factor;
    __device__ Numbers(const SCALE* own) : factor(small_factors(own->bits * 0x10001u)) {}
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
        return scaled_floats(word, k, factor);
#else
        return weights_of(pair_of(word, k));
#endif
    }
};

/* The factor of the sums of a row. */
__device__ inline float scale_of(const Weight& weight, i64 row) {
    return LATE ? weight.number(row, 0, 0) : SMALL ? SMALL_UNIT : 1.0f;
}

/*
 * ldmatrix loads a unit of a step: a lane gets word `lane % 4` of each of the four pieces of row `lane / 4`. So its weights belong to one
 * group, and the products of 16 inputs take two inputs of each lane at a time. Activations are stored in that order, by pairs.
 */
/* Where eight lanes, which have 16 bytes each of every 64 inputs, load them. */
__device__ inline int column_of(int half) {
    const int lane = threadIdx.x % 8;
    return BITS == 4 ? lane / 2 * 32 + half * 16 + lane % 2 * 8 : lane * 8;
}
/* Where a lane stores one of its four pairs: a vector of the row, and the pair in it. */
struct Slot { int vector, pair; };
__device__ inline Slot slot_of(int pair) {
    const int lane = threadIdx.x % 8;
    if (BITS == 8 && GROUP == 0) return {lane / 2 * 2 + pair % 2, lane % 2 * 2 + pair / 2};
    return {lane % 2 * 4 + pair, lane / 2};
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
            x[i] = assignment < 0 ? nullptr : inputs_of(p, assignment);
        }
        /* A pair at a time, to where the products of 16 inputs take them. */
        auto copy_x = [&](int step, u8* stage) {
            const int row = threadIdx.x / 8;
            const u32 rows = shared_address(stage) + row * 128;
#pragma unroll
            for (int half = 0; half < SPAN / 64; ++half) {
                const int column = step * SPAN + column_of(half);
#pragma unroll
                for (int i = 0; i < TOKENS / 32; ++i) {
                    if (!x[i]) continue;
                    const bool real = column < inputs;
                    const X* from = x[i] + (real ? column : 0);
#pragma unroll
                    for (int pair = 0; pair < 4; ++pair) {
                        const Slot slot = slot_of(pair);
                        const u32 to = rows + (slot.vector ^ row % 8) * 16 + slot.pair * 4 + half * X_HALF + i * 4096;
                        copy_pair_ahead(to, from + pair * 2, real);
                    }
                }
            }
        };
        /* The units that this warp copies, and the scales and offsets that this thread copies. Units behind the last of
         * the expert are replaced by the first of the tile. */
        const u8 *units[PRODUCTS * OWN_UNITS], *numbers[OWN_NUMBERS];
        auto unit_of = [&](int unit) {
            const i64 index = first / 8 + (GATED ? unit % UNITS : unit);
            return index * 8 < end ? index : first / 8;
        };
        auto weight_of = [&](int unit) -> const Weight& { return GATED && unit / UNITS ? p.other : p.weight; };
#pragma unroll
        for (int i = 0; i < PRODUCTS * OWN_UNITS; ++i) {
            const int unit = warp + i * 8;
            const Weight& weight = weight_of(unit);
            units[i] = weight.elements + unit_of(unit) * weight.row_bytes + lane * 16;
        }
#pragma unroll
        for (int i = 0; i < OWN_NUMBERS; ++i) {
            const int vector = threadIdx.x + i * THREADS, unit = vector / UNIT_VECTORS;
            const Weight& weight = weight_of(unit);
            numbers[i] = weight.scales + unit_of(unit) * weight.scale_bytes + vector % UNIT_VECTORS * 16;
        }
        auto copy_step = [&](int step, u8* stage) {
            if (step < steps) {
                copy_x(step, stage);
#pragma unroll
                for (int i = 0; i < PRODUCTS * OWN_UNITS; ++i) {
                    Vector* to = (Vector*)(stage + X_BYTES + (i * 8 + warp) * 512) + lane;
                    copy_ahead(to, units[i] + step * 512, true);
                }
                const int line = GROUP == 0 ? 0 : GROUP > SPAN ? step * SPAN / (GROUP ? GROUP : 1) : step * STEP_GROUPS;
#pragma unroll
                for (int i = 0; i < OWN_NUMBERS; ++i) {
                    const int vector = threadIdx.x + i * THREADS;
                    if (vector >= PRODUCTS * UNITS * UNIT_VECTORS) break;
                    copy_ahead((Vector*)(stage + X_BYTES + PRODUCTS * UNITS * 512) + vector, numbers[i] + line * LINE, true);
                }
            }
            commit_copies();
        };
#pragma unroll 1
        for (int step = 0; step < STAGES - 1; ++step) copy_step(step, memory + step * STAGE_BYTES);

        float sums[PRODUCTS][TOKENS / 2] = {};
        u32 a[SPAN / 16][4];
        int here = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            await_copies<STAGES - 2>();
            products_wait<0>();
            /* Products read through the async proxy what was copied. */
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            /* After this barrier, all warps have multiplied the previous step, whose buffer is refilled next. */
            __syncthreads();
            const int next = here + 1 == STAGES ? 0 : here + 1, last = here == 0 ? STAGES - 1 : here - 1;
            copy_step(step + STAGES - 1, memory + last * STAGE_BYTES);
            const u8* stage = memory + here * STAGE_BYTES;
            here = next;
            const u64 columns = swizzled_at(shared_address(stage));
#pragma unroll
            for (int which = 0; which < PRODUCTS; ++which) {
                const u8* lines = stage + X_BYTES + (which * UNITS + warp * 2) * 512;
                const u8* line = stage + X_BYTES + PRODUCTS * UNITS * 512 + (which * UNITS + warp * 2) * UNIT_NUMBERS +
                                 lane % 4 * STEP_GROUPS / 4 * LINE;
                const SCALE* row = (const SCALE*)line + lane / 4 * NUMBERS;
                const Numbers low_numbers(row), high_numbers((const SCALE*)((const u8*)row + UNIT_NUMBERS));
                u32 low[4], high[4];
                load_matrices(low, lines + lane * 16);
                load_matrices(high, lines + 512 + lane * 16);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    /* The products that read these registers before are two groups old. */
                    products_wait<1>();
#pragma unroll
                    for (int w = half * 2; w < half * 2 + 2; ++w) {
#pragma unroll
                        for (int k = 0; k < PAIRS; ++k) {
                            u32(&to)[4] = a[w * (PAIRS / 2) + k / 2];
                            to[k % 2 * 2] = low_numbers.weights_of(low[w], k);
                            to[k % 2 * 2 + 1] = high_numbers.weights_of(high[w], k);
                        }
                    }
                    products_begin();
#pragma unroll
                    for (int k = half * (SPAN / 32); k < (half + 1) * (SPAN / 32); ++k) {
                        multiply(sums[which], a[k], columns + (k / 4 * X_HALF + k % 4 * 32) / 16);
                    }
                    products_commit();
                }
            }
        }
        products_wait<0>();
        await_copies<0>();

#pragma unroll
        for (int which = 0; which < PRODUCTS; ++which) hold(sums[which]);
#pragma unroll
        for (int which = 0; which < RESULTS / ROWS; ++which) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const i64 index = first + which * ROWS + warp * 16 + lane / 4 + h * 8;
                if (index < own || index >= end) continue;
                const float scale = scale_of(p.weight, index), bias = or_else(p.bias, index, 0.0f);
#if GATED
                const float up_scale = scale_of(p.other, index), up_bias = or_else(p.other_bias, index, 0.0f);
#endif
#pragma unroll
                for (int i = 0; i < TOKENS / 4; ++i) {
                    const int assignment = assignments[i / 2 * 8 + lane % 4 * 2 + i % 2], at = i / 2 * 4 + h * 2 + i % 2;
                    if (assignment < 0) continue;
                    float sum = sums[which][at] * scale + bias;
#if GATED
                    sum = gated(sum, sums[1][at] * up_scale + up_bias, p.limit, p.up_offset);
#endif
                    outputs_of(p, assignment)[index - own] = narrow<Y>(sum);
                }
            }
        }
        /* The next item reuses the buffers and the list. */
        __syncthreads();
    }
#endif
}
