/*
 * grouped_linear with packed integers on tensor cores, activations f16 or bf16: see tile.cuh.
 *
 * A step is 16 rows by 64 bytes, two units of 8 rows: 64 inputs of 8 bits or 128 of 4. A lane loads 16 bytes of two rows, so a warp loads
 * lines without gaps, with the numbers of their groups (see weight/packing.rs). Integers become pairs of what activations are (pairs.cuh), less
 * what they are counted from, exactly; the sums of a group are scaled in f32. Minima are multiplied by the sums of a group's
 * activations, which are a product with a matrix of ones.
 *
 * Bytes: integers and numbers once per item; activations from the L2. Floor: the former, of the distinct experts, over read bandwidth.
 */
#if __CUDA_ARCH__ >= 800
/* Groups of a step. */
#define STEP_GROUPS (GROUP == 0 || GROUP > SPAN ? 1 : SPAN / GROUP)
/* Words of a lane that belong to a group. */
#define GROUP_WORDS (4 / STEP_GROUPS)
/* 1 as both halves of a pair. */
#define ONES (HALF ? 0x3c003c00u : 0x3f803f80u)

/* Both halves of a pair less the negative of a number. */
__device__ inline u32 plus(u32 pair, u32 other) {
    u32 result;
#if HALF
    asm("add.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(other));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0x3f803f80u), "r"(other));
#endif
    return result;
}
/* A number as both halves of a pair. */
__device__ inline u32 twice(float x) { return narrow<X>(x).bits * 0x10001u; }

struct Integers {
    struct Loaded {
        Vector low, high;
        SCALE numbers[STEP_GROUPS][2][NUMBERS];
    };
    static constexpr int columns = SPAN;
    static constexpr bool aligned = true;
    const u8 *low, *high, *low_numbers, *high_numbers;
    int inputs;

    __device__ Integers(const GroupedLinearParams& p, i64 row, i64 end) {
        int lane = threadIdx.x % 32;
        i64 first = row / 8, second = !GATED && (first + 1) * 8 < end ? first + 1 : first;
        const Weight& other = GATED ? p.other : p.weight;
        low = p.weight.elements + first * p.weight.row_bytes + lane % 4 * 128 + lane / 4 * 16;
        high = other.elements + second * other.row_bytes + lane % 4 * 128 + lane / 4 * 16;
        low_numbers = p.weight.scales + first * p.weight.scale_bytes + lane / 4 * (NUMBERS * SCALE_BYTES);
        high_numbers = other.scales + second * other.scale_bytes + lane / 4 * (NUMBERS * SCALE_BYTES);
        inputs = (int)p.inputs;
    }
    __device__ void load(int step, Loaded& to) const {
        to.low = load_stream(low + (i64)step * 512);
        to.high = load_stream(high + (i64)step * 512);
#pragma unroll
        for (int g = 0; g < STEP_GROUPS; ++g) {
            i64 line = GROUP == 0 ? 0 : (GROUP > SPAN ? step * SPAN / (GROUP ? GROUP : 1) : step * STEP_GROUPS + g) * (i64)LINE;
#pragma unroll
            for (int n = 0; n < NUMBERS; ++n) {
                to.numbers[g][0][n] = ((const SCALE*)(low_numbers + line))[n];
                to.numbers[g][1][n] = ((const SCALE*)(high_numbers + line))[n];
            }
        }
    }
    __device__ void add(int step, const Loaded& own, const X* const (&x)[TILES], float (&sums)[TILES][4]) const {
        const int part = threadIdx.x % 4;
#pragma unroll
        for (int g = 0; g < STEP_GROUPS; ++g) {
            float scale[2], second[2] = {};
            u32 less[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                scale[i] = widen(own.numbers[g][i][0]);
                if (OFFSET) second[i] = widen(own.numbers[g][i][NUMBERS - 1]);
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
#if BITS == 4 || OFFSET
                    low[k] = plus(low[k], less[0]);
                    high[k] = plus(high[k], less[1]);
#endif
                }
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
#if BITS == 4
                    int column = step * SPAN + w * 32 + part * 8;
                    Vector v = {};
                    if (x[tile] && column < inputs) v = load_vector(x[tile] + column);
                    multiply(c[tile], low[0], high[0], low[1], high[1], v.word[0], v.word[1]);
                    multiply(c[tile], low[2], high[2], low[3], high[3], v.word[2], v.word[3]);
#if OFFSET == 2
                    multiply(around[tile], ONES, ONES, ONES, ONES, v.word[0], v.word[1]);
                    multiply(around[tile], ONES, ONES, ONES, ONES, v.word[2], v.word[3]);
#endif
#else
                    int column = step * SPAN + (GROUP == 0 ? part * 16 + w * 4 : w * 16 + part * 4);
                    uint2 v = make_uint2(0, 0);
                    if (x[tile] && column < inputs) v = *(const uint2*)(x[tile] + column);
                    multiply(c[tile], low[0], high[0], low[1], high[1], v.x, v.y);
#if OFFSET == 2
                    multiply(around[tile], ONES, ONES, ONES, ONES, v.x, v.y);
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

extern "C" __global__ void __launch_bounds__(WARPS * 32) grouped_linear_packed(const __grid_constant__ GroupedLinearParams p) {
    launch_dependents_and_wait();
#if __CUDA_ARCH__ >= 800
    multiply_items<Integers>(p);
#endif
}
