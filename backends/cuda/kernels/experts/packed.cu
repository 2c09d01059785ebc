/*
 * grouped_linear on tensor cores for packed integers and few assignments per expert, activations f16 or bf16: see tile.cuh.
 *
 * A step of a part is 16 rows by 64 bytes, two units of 8 rows: 64 inputs of 8 bits or 128 of 4. A lane copies 16 bytes of each
 * unit as they lie in memory, so a warp copies contiguous lines; some lanes copy the scales and offsets of the groups (see
 * weight/packing.rs). The rows of a line are permuted by the index of the line, so that 8 lanes have no bank conflicts in copies
 * or reads. Integers are converted to pairs in the type of the activations (pairs.cuh), minus their zero point, exactly; the sums
 * of a group are scaled in f32. Minima are multiplied by the sums of a group's activations, which are computed as a product with
 * a matrix of ones. Floats of 4 bits are scaled before they are multiplied if activations are bf16: exact for scales from 2^-98 to
 * 2^33.
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
    static constexpr float sum_factor = SMALL ? SMALL_UNIT : 1.0f;
    /* Bytes of the scales and offsets of a unit that a step needs, and of a part. */
    static constexpr int numbers = STEP_GROUPS * LINE, part_bytes = 1024 + 2 * numbers;
    static constexpr int columns = SPAN, stage = PARTS * part_bytes;
    static constexpr bool aligned = true;

    struct Inputs {
        u32 of[TILES][4][BITS == 4 ? 4 : 2];
    };
    struct Weights {
        Vector low, high;
#if SMALL
        /* The factors of the lane's row of either unit, for the four groups of a step. */
        u32 factors[2][2];
#else
        SCALE number[STEP_GROUPS][2][NUMBERS];
#endif
        __device__ Weights(u32 part) {
            const int lane = threadIdx.x % 32, at = lane % 4 * 8 + (lane / 4 ^ lane % 4 * 2);
            low = read_shared(part + at * 16);
            high = read_shared(part + at * 16 + 512);
#if SMALL
            /* Transposed matrices whose rows are the lines of two groups in turn: a lane gets both scales of its row. */
            u32 scales[4];
            load_transposed(scales, part + 1024 + (lane / 8 * 2 + lane % 2) * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) factors[i / 2][i % 2] = small_factors(scales[i]);
#else
#pragma unroll
            for (int g = 0; g < STEP_GROUPS; ++g) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const u32 own = part + lane / 4 * NUMBERS * sizeof(SCALE) + 1024 + i * numbers + g * LINE;
#pragma unroll
                    for (int n = 0; n < NUMBERS; ++n) number[g][i][n] = read_shared<SCALE>(own + n * sizeof(SCALE));
                }
            }
#endif
        }
#if SMALL
        __device__ u32 factor(int unit, int g) const { return __byte_perm(factors[unit][g / 2], 0, g % 2 ? 0x3232 : 0x1010); }
#endif
    };
    /* What a lane copies next: of the lower and the upper unit of each part, and vectors of the scales and offsets of all units. */
    static constexpr int unit_vectors = numbers / 16, vectors = PARTS * 2 * unit_vectors, number_copies = (vectors + 31) / 32;
    const u8 *low[PARTS], *high[PARTS], *number_sources[number_copies];
    int inputs;

    __device__ Integers(const GroupedLinearParams& p) : low{}, high{}, number_sources{}, inputs((int)p.inputs) {}
    __device__ void aim(const GroupedLinearParams& p, i64 row, i64 end, int step) {
        const int lane = threadIdx.x % 32, at = step * 512 + lane * 16;
        const i64 begin = row / 8;
        const Weight& other = GATED ? p.other : p.weight;
        /* Units behind the last are replaced by the first, and their results are discarded. */
        auto unit_of = [&](int part, int i) {
            const i64 unit = begin + (GATED ? part : 2 * part + i);
            return unit * 8 < end ? unit : begin;
        };
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            low[part] = p.weight.elements + unit_of(part, 0) * p.weight.row_bytes + at;
            high[part] = other.elements + unit_of(part, 1) * other.row_bytes + at;
        }
#pragma unroll
        for (int i = 0; i < number_copies; ++i) {
            const int vector = i * 32 + lane, of = vector / unit_vectors;
            const Weight& weight = of % 2 ? other : p.weight;
            number_sources[i] = weight.scales + unit_of(of / 2, of % 2) * weight.scale_bytes + vector % unit_vectors * 16;
        }
    }
    __device__ void copy(u32 stage, int step) {
        const int lane = threadIdx.x % 32, at = lane / 8 * 8 + (lane % 8 ^ lane / 8 * 2);
        const i64 line = GROUP == 0 ? 0 : GROUP > SPAN ? step * SPAN / (GROUP ? GROUP : 1) : step * STEP_GROUPS;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const u32 to = stage + part * part_bytes + at * 16;
            copy_ahead(to, low[part], true);
            copy_ahead(to + 512, high[part], true);
            low[part] += SPLIT * 512;
            high[part] += SPLIT * 512;
        }
#pragma unroll
        for (int i = 0; i < number_copies; ++i) {
            const int vector = i * 32 + lane, of = vector / unit_vectors;
            const u32 to = stage + of / 2 * part_bytes + 1024 + of % 2 * numbers + vector % unit_vectors * 16;
            if (vector < vectors) copy_ahead(to, number_sources[i] + line * LINE, true);
        }
    }
    /* The lane's inputs for a word, four or two pairs. */
    __device__ int column_of(int step, int w) const {
        const int part = threadIdx.x % 4;
        return step * SPAN + (BITS == 4 ? w * 32 + part * 8 : GROUP == 0 ? part * 16 + w * 4 : w * 16 + part * 4);
    }
    template <bool Whole> __device__ void load_step(const X* const (&x)[TILES], int step, Inputs& to) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int column = column_of(step, w);
                const bool real = Whole || column < inputs;
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
    /* Only the last step of a row is not whole. */
    __device__ void load(const X* const (&x)[TILES], int step, Inputs& to) const {
        if (WHOLE || (step + 1) * SPAN <= inputs) load_step<true>(x, step, to);
        else load_step<false>(x, step, to);
    }
    __device__ void add(u32 stage, int part, const Inputs& x, float (&sums)[TILES][4]) const {
        const Weights own(stage + part * part_bytes);
#if SMALL
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const u32 low = own.factor(0, w), high = own.factor(1, w);
#pragma unroll
            for (int k = 0; k < PAIRS; k += 2) {
                const u32 a[4] = {scaled_floats(own.low.word[w], k, low), scaled_floats(own.high.word[w], k, high),
                                  scaled_floats(own.low.word[w], k + 1, low), scaled_floats(own.high.word[w], k + 1, high)};
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    multiply(sums[tile], a[0], a[1], a[2], a[3], x.of[tile][w][k], x.of[tile][w][k + 1]);
                }
            }
        }
#else
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
#endif
    }
};
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) grouped_linear_packed(const __grid_constant__ GroupedLinearParams p) {
    launch_dependents_and_wait();
#if __CUDA_ARCH__ >= 800
    multiply_items<Integers>(p);
#endif
}
