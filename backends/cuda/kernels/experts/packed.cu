/*
 * grouped_linear on tensor cores for packed integers and few assignments per expert, activations f16 or bf16: see tile.cuh.
 *
 * A step of a part is 16 rows by 64 bytes, two units of 8 rows: 64 inputs of 8 bits or 128 of 4. A lane copies 16 bytes of each
 * unit as they lie in memory, so a warp copies contiguous lines; some lanes copy the scales and offsets of the groups (see
 * weight/packing.rs). The rows of a line are permuted by the index of the line, so that 8 lanes have no bank conflicts in copies
 * or reads. Integers are converted to pairs in the type of the activations (pairs.cuh), minus their zero point, exactly; the sums
 * of a group are scaled in f32. Minima are multiplied by the sums of a group's activations, which are computed as a product with
 * a matrix of ones.
 *
 * Bytes: integers, scales and offsets once per item; activations from the L2. Floor: the former, for the distinct experts, over
 * read bandwidth.
 */
#if __CUDA_ARCH__ >= 800
/* Groups of a step. */
#define STEP_GROUPS (GROUP == 0 || GROUP > SPAN ? 1 : SPAN / GROUP)
/* Words of a lane that belong to one group. */
#define GROUP_WORDS (4 / STEP_GROUPS)
/* A pair of ones. */
#define ONES (HALF ? 0x3c003c00u : 0x3f803f80u)

/* Subtracts the same number from both elements of a pair; the number is given negated. */
__device__ inline u32 plus(u32 pair, u32 other) {
    u32 result;
#if HALF
    asm("add.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(other));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0x3f803f80u), "r"(other));
#endif
    return result;
}
/* A number as both elements of a pair. */
__device__ inline u32 twice(float x) { return narrow<X>(x).bits * 0x10001u; }

struct Integers {
    /* Bytes of the scales and offsets of a unit that a step needs, and of a part. */
    static constexpr int numbers = STEP_GROUPS * LINE, part_bytes = 1024 + 2 * numbers;
    static constexpr int columns = SPAN, stage = PARTS * part_bytes;
    static constexpr bool aligned = true;

    struct Inputs {
        u32 of[TILES][4][BITS == 4 ? 4 : 2];
    };
    struct Weights {
        Vector low, high;
        SCALE number[STEP_GROUPS][2][NUMBERS];
        __device__ Weights(const u8* part) {
            const int lane = threadIdx.x % 32, at = lane % 4 * 8 + (lane / 4 ^ lane % 4 * 2);
            low = ((const Vector*)part)[at];
            high = ((const Vector*)part)[at + 32];
#pragma unroll
            for (int g = 0; g < STEP_GROUPS; ++g) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const SCALE* own = (const SCALE*)(part + 1024 + i * numbers + g * LINE) + lane / 4 * NUMBERS;
#pragma unroll
                    for (int n = 0; n < NUMBERS; ++n) number[g][i][n] = own[n];
                }
            }
        }
    };
    /* What a lane copies of each part: of its lower unit, its upper unit, and the scales and offsets of one of them. */
    struct Source { const u8 *low, *high, *numbers; };
    Source sources[PARTS];
    int inputs;

    __device__ Integers(const GroupedLinearParams& p) : sources{}, inputs((int)p.inputs) {}
    __device__ void aim(const GroupedLinearParams& p, i64 row, i64 end) {
        const int lane = threadIdx.x % 32;
        const i64 begin = row / 8;
        const Weight& other = GATED ? p.other : p.weight;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            /* Units behind the last are replaced by the first, and their results are discarded. */
            i64 first = begin + (GATED ? part : 2 * part), second = GATED ? first : first + 1;
            if (first * 8 >= end) first = begin;
            if (second * 8 >= end) second = begin;
            const Weight& numbered = lane < 16 ? p.weight : other;
            sources[part] = {p.weight.elements + first * p.weight.row_bytes + lane * 16,
                             other.elements + second * other.row_bytes + lane * 16,
                             numbered.scales + (lane < 16 ? first : second) * numbered.scale_bytes + lane % 16 * 16};
        }
    }
    __device__ void copy(u8* stage, int step) const {
        const int lane = threadIdx.x % 32, at = lane / 8 * 8 + (lane % 8 ^ lane / 8 * 2);
        const i64 line = GROUP == 0 ? 0 : GROUP > SPAN ? step * SPAN / (GROUP ? GROUP : 1) : step * STEP_GROUPS;
#pragma unroll
        for (int part = 0; part < PARTS; ++part, stage += part_bytes) {
            copy_ahead((Vector*)stage + at, sources[part].low + (i64)step * 512, true);
            copy_ahead((Vector*)stage + at + 32, sources[part].high + (i64)step * 512, true);
            if (lane % 16 * 16 < numbers) {
                Vector* to = (Vector*)(stage + 1024 + lane / 16 * numbers) + lane % 16;
                copy_ahead(to, sources[part].numbers + line * LINE, true);
            }
        }
    }
    /* The lane's inputs for a word, four or two pairs. */
    __device__ int column_of(int step, int w) const {
        const int part = threadIdx.x % 4;
        return step * SPAN + (BITS == 4 ? w * 32 + part * 8 : GROUP == 0 ? part * 16 + w * 4 : w * 16 + part * 4);
    }
    __device__ void load(const X* const (&x)[TILES], int step, Inputs& to) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int column = column_of(step, w);
                const bool real = x[tile] && column < inputs;
#if BITS == 4
                Vector v = {};
                if (real) v = load_vector(x[tile] + column);
#pragma unroll
                for (int i = 0; i < 4; ++i) to.of[tile][w][i] = v.word[i];
#else
                uint2 v = make_uint2(0, 0);
                if (real) v = *(const uint2*)(x[tile] + column);
                to.of[tile][w][0] = v.x;
                to.of[tile][w][1] = v.y;
#endif
            }
        }
    }
    __device__ void add(const u8* stage, int part, const Inputs& x, float (&sums)[TILES][4]) const {
        const Weights own(stage + part * part_bytes);
#pragma unroll
        for (int g = 0; g < STEP_GROUPS; ++g) {
            float scale[2], second[2] = {};
            u32 less[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                scale[i] = widen(own.number[g][i][0]);
                if (NUMBERS == 2) second[i] = widen(own.number[g][i][NUMBERS - 1]);
                less[i] = twice(-SHIFTED - (OFFSET == 1 ? second[i] : 0.0f));
            }
            float c[TILES][4] = {};
#if OFFSET == 2
            float around[TILES][4] = {};
#endif
#pragma unroll
            for (int i = 0; i < GROUP_WORDS; ++i) {
                const int w = g * GROUP_WORDS + i;
                u32 low[PAIRS], high[PAIRS];
#pragma unroll
                for (int k = 0; k < PAIRS; ++k) {
                    low[k] = pair_of(own.low.word[w], k);
                    high[k] = pair_of(own.high.word[w], k);
#if !FLOATS && (BITS == 4 || OFFSET)
                    low[k] = plus(low[k], less[0]);
                    high[k] = plus(high[k], less[1]);
#endif
                }
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const u32(&v)[BITS == 4 ? 4 : 2] = x.of[tile][w];
                    multiply(c[tile], low[0], high[0], low[1], high[1], v[0], v[1]);
#if BITS == 4
                    multiply(c[tile], low[2], high[2], low[3], high[3], v[2], v[3]);
#endif
#if OFFSET == 2
                    multiply(around[tile], ONES, ONES, ONES, ONES, v[0], v[1]);
#if BITS == 4
                    multiply(around[tile], ONES, ONES, ONES, ONES, v[2], v[3]);
#endif
#endif
                }
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[tile][i] += scale[i / 2] * c[tile][i];
#if OFFSET == 2
                    sums[tile][i] += second[i / 2] * around[tile][i];
#endif
                }
            }
        }
    }
};
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) grouped_linear_packed(const __grid_constant__ GroupedLinearParams p) {
    launch_dependents_and_wait();
#if __CUDA_ARCH__ >= 800
    multiply_items<Integers>(p);
#endif
}
