/*
 * Packed weights times f16 or bf16 activations: m16n8k16, one column per token.
 *
 * Integers are converted two at a time by a few bit operations: 4 bits inserted below the exponent of 128 (bf16) or 1024 (f16)
 * are that number plus the integer. This offset, zero points and minima are constant within a group, so they are corrected with
 * the sum of the group's activations, in f32: w = s (q - z) + m gives sum(w x) = s sum(q x) + (m - s z) sum(x). Signed bytes are
 * converted exactly, and so are floats of 4 bits: see pair_of.
 */
#if !DIGITS
/* Groups of a step, and inputs whose activations are summed together. */
#define STEP_GROUPS (GROUP == 0 || GROUP > SPAN ? 1 : SPAN / GROUP)
#define SUMMED (GROUP == 0 ? SLICE : SPAN / STEP_GROUPS)
#define TILES ((TOKENS + 7) / 8)
#define NEEDS_SUMS (!FLOATS && (BITS == 4 || OFFSET != 0))

#if __CUDA_ARCH__ >= 800
struct Product {
    u8* activations;
    /* The sums of the activations of every group. */
    float* sums;
    u32 own_x;
    int group, part;
    Sum total[TILES][4];

    static constexpr int bytes = TOKENS * (X_PITCH + (NEEDS_SUMS ? SLICE / SUMMED * 4 : 0));

    __device__ Product(u8* shared) {
        group = threadIdx.x % 32 / 4;
        part = threadIdx.x % 4;
        activations = shared;
        sums = (float*)(shared + TOKENS * X_PITCH);
        own_x = (u32)__cvta_generic_to_shared(shared) + group * X_PITCH;
    }

    /* Reads activations, inputs `begin` to `begin + count`, padded with zeros to the end of a k tile. */
    template <typename Meanwhile>
    __device__ void prepare(const X* x, i64 x_row, int last, i64 inputs, int begin, int count, int pieces, const Norm& norm, float* scratch,
                            const Meanwhile& meanwhile) {
        stage<true>(x, x_row, last, inputs, begin, count, norm, scratch, [&](int token, int at, bool real, const Vector& eight) {
            if (at < 0 || at >= pieces * (PIECE / 8)) return;
            *(Vector*)(activations + token * X_PITCH + at * 16) = real ? eight : Vector{};
        }, meanwhile);
        __syncthreads();
#if NEEDS_SUMS
#if GROUP == 0
        for (int token = threadIdx.x / 32; token < TOKENS; token += WARPS) {
            float sum = 0.0f;
            for (int at = threadIdx.x % 32; at < pieces * (PIECE / 8); at += 32) {
                Vector v = *(const Vector*)(activations + token * X_PITCH + at * 16);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum += Lanes<X>::get(v, i);
            }
            sum = warp_sum(sum);
            if (threadIdx.x % 32 == 0) sums[token] = sum;
        }
#else
        /* Each thread adds 8 of them, then the lanes of a group add up. */
        const int vectors = TOKENS * (SLICE / 8), lanes = SUMMED / 8;
        for (int item = threadIdx.x; item < (vectors + 31) / 32 * 32; item += BLOCK) {
            int token = item / (SLICE / 8), at = item % (SLICE / 8);
            float sum = 0.0f;
            if (item < vectors) {
                Vector v = *(const Vector*)(activations + token * X_PITCH + at * 16);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum += Lanes<X>::get(v, i);
            }
#pragma unroll
            for (int distance = lanes / 2; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            if (item < vectors && item % lanes == 0) sums[item / lanes] = sum;
        }
#endif
        __syncthreads();
#endif
    }

    __device__ void begin() {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) total[t][i] = 0.0f;
        }
    }

    /* Adds the product of a k tile, whose last step may not exist. */
    __device__ void add(const Vector (&first)[2], const Vector (&second)[2], const u8* numbers, bool alternate, int piece, int steps) {
#if GROUP > 0
        float scale[GROUPS][2], offset[GROUPS][2];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int row = row_of(group, i, alternate);
                numbers_of(numbers + row / 8 * (COPIES * 16) + g * LINE, row % 8, scale[g][i], offset[g][i]);
            }
        }
#endif
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int step = piece * 2 + half;
            if (half == 1 && step >= steps) break;
            /* Two alternating accumulators, so that fewer products wait for the previous one. */
            float c[TILES][2][4] = {};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                u32 low[PAIRS], high[PAIRS];
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) {
                    low[i] = pair_of(first[half].word[w], i);
                    high[i] = pair_of(second[half].word[w], i);
                }
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    u32 x_here = own_x + 8 * t * X_PITCH + step * (SPAN * 2);
#if BITS == 4
                    Vector v = load_x(8 * t + group < TOKENS, x_here + w * 64 + part * 16);
                    multiply(c[t][0], low[0], high[0], low[1], high[1], v.word[0], v.word[1]);
                    multiply(c[t][1], low[2], high[2], low[3], high[3], v.word[2], v.word[3]);
#else
                    u32 at = GROUP == 0 ? part * 32 + w * 8 : w * 32 + part * 8;
                    uint2 v = load_half_x(8 * t + group < TOKENS, x_here + at);
                    multiply(c[t][w % 2], low[0], high[0], low[1], high[1], v.x, v.y);
#endif
                }
#if GROUP > 0
                /* Words of a group. */
                const int words = 4 / STEP_GROUPS;
                if ((w + 1) % words == 0) {
                    const int g = GROUP > SPAN ? 0 : half * STEP_GROUPS + w / words;
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        float around[2] = {};
#if NEEDS_SUMS
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            int token = 8 * t + 2 * part + i;
                            token = token < TOKENS ? token : TOKENS - 1;
                            around[i] = sums[token * (SLICE / SUMMED) + step * STEP_GROUPS + w / words];
                        }
#endif
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float sum = words == 1 && BITS == 8 ? c[t][w % 2][i] : c[t][0][i] + c[t][1][i];
                            total[t][i] += put_right(sum, scale[g][i / 2], offset[g][i / 2], around[i % 2]);
                            c[t][0][i] = c[t][1][i] = 0.0f;
                        }
                    }
                }
#endif
            }
#if GROUP == 0
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
#pragma unroll
                for (int i = 0; i < 4; ++i) total[t][i] += c[t][0][i] + c[t][1][i];
            }
#endif
        }
    }

    /* Writes the sums of a warp: for each token a row of SUM_ROW with 16 outputs. */
    __device__ void leave(Sum* to) const {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int token = 8 * t + 2 * part + i;
                if (token >= TOKENS) break;
                to[token * SUM_ROW + group] = total[t][i];
                to[token * SUM_ROW + group + 8] = total[t][2 + i];
            }
        }
    }

    /* Scales and corrects the sum of a group, given its sum of activations. */
    __device__ static float put_right(float sum, float scale, float second, float activations) {
#if OFFSET == 1
        return scale * (sum - (second + SHIFTED) * activations);
#elif OFFSET == 2
        return scale * (sum - SHIFTED * activations) + second * activations;
#elif NEEDS_SUMS
        return scale * (sum - SHIFTED * activations);
#else
        return scale * sum;
#endif
    }

    /* Corrects a sum over all inputs, where a row is one group. */
    __device__ float put_right(float sum, float scale, float second, int token) const {
        return put_right(sum, scale, second, NEEDS_SUMS ? sums[token] : 0.0f);
    }
};
#endif
#endif
