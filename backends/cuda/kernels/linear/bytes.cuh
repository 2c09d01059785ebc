/*
 * Packed weights times activations as bytes: m16n8k32 or, for groups of 16, m16n8k16, summed exactly in integers.
 *
 * With DIGITS 1 activations are bytes (linear_w8a8) and a token is a column. With DIGITS 3 they are f16 or bf16 and are split
 * into three bytes each (digits.cuh), one column per byte. Values within 2^14 of the largest of a span are exact for bf16 (2^11
 * for f16); of smaller ones, bits below 2^-22 of the largest are dropped, far less than f32 sums lose. Two tokens of 3 columns
 * and one unused column each form a tile; two neighbouring lanes have the sums of a token.
 *
 * 8-bit weights are multiplied as they are. 4-bit weights become bytes by a shift and a mask, as unsigned integers, or, if the
 * zero point is constant, by an exclusive or, as 16 times their value. The order of inputs is that of the packed integers, since
 * activations can be stored in any order: of 8 columns of 4 bits first those of the even bytes, 0 4 1 5, then of the odd bytes, 2
 * 6 3 7. For zero points and minima, w = s (q - z) + m gives sum(w x) = s sum(q x) + (m - s z) sum(x), where sum(x) is over a
 * group, in f32.
 */
#if DIGITS
/* Inputs of a unit (a lane's bytes of two 16-byte steps), and of a span (which shares a power of two). */
#define UNIT 64
#define SHARING 128
#define SPANS (SLICE / SHARING)
#define UNIT_GROUPS (GROUP == 0 || GROUP > UNIT ? 1 : UNIT / GROUP)
/* Products of a unit, and products whose sum is scaled together. */
#define PRODUCTS (GROUP == 16 ? 4 : 2)
#define TOGETHER (PRODUCTS * (GROUP == 0 ? SHARING : GROUP) / UNIT)
/* Columns per token, tiles of 8 columns, and tokens that fit into those. */
#define COLUMNS (DIGITS == 1 ? 1 : 4)
#define TILES ((TOKENS * COLUMNS + 7) / 8)
#define PLACES (8 / COLUMNS * TILES)
#define NEEDS_SUMS (DIGITS == 3 && OFFSET != 0)

#if __CUDA_ARCH__ >= 800
#if BITS == 4 && OFFSET
#define STORED "u8"
#else
#define STORED "s8"
#endif
/* 16 rows by 32 inputs, or by 16. */
__device__ inline void multiply(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32." STORED ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void multiply_half(int (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32." STORED ".s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}

/* The factor of the sum of activations that corrects for the zero point of the stored integers. */
__device__ inline float shift_of(float scale, float second) {
#if OFFSET == 1
    return -scale * second;
#elif BITS == 8
    return second + 128.0f * scale;
#else
    return second;
#endif
}

#if DIGITS == 3
/* Splits activations into bytes, 8 at a time (see `stage`): a warp has two spans. */
struct Digits {
    u8* to;
    float *scales, *sums;
    int eights;

    __device__ void operator()(int token, int at, bool real, Vector v) const {
        if (!real) v = Vector{};
        const ThreeBytes<X, BITS> bytes(v);
#if NEEDS_SUMS
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += Lanes<X>::get(v, i);
#endif
        bool kept = at >= 0 && at < eights;
        u8* own = to + token * (DIGITS * X_PITCH) + at / 8 * UNIT;
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit, own += X_PITCH) {
            if (!kept) break;
#if BITS == 4
            *(uint2*)(own + at % 4 * 16 + at % 8 / 4 * 8) = make_uint2(bytes.words[digit][0], bytes.words[digit][1]);
#elif GROUP == 0
            *(uint2*)(own + at % 8 * 8) = make_uint2(bytes.words[digit][0], bytes.words[digit][1]);
#else
            u32* word = (u32*)(own + at % 2 * 32 + at % 8 / 2 * 4);
            word[0] = bytes.words[digit][0];
            word[4] = bytes.words[digit][1];
#endif
        }
        if (kept && at % 16 == 0) scales[at / 16 * PLACES + token] = bytes.scale();
#if NEEDS_SUMS
        /* Of a group, or of a span if the whole row is one group. */
        const int lanes = (GROUP ? GROUP : SHARING) / 8;
#pragma unroll
        for (int distance = lanes / 2; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (kept && at % lanes == 0) {
#if GROUP
            *(float2*)(sums + (at / lanes * PLACES + token) * 2) = make_float2(sum, 0.0f);
#else
            sums[token * (SPANS + 1) + 1 + at / lanes] = sum;
#endif
        }
#endif
    }
};
#endif

struct Product {
    u8* activations;
    /* By token and span. */
    float* scales;
    /* The sums of activations of every group, with a zero after it for the other lane; or of the whole slice, and of every span.
     * */
    float* sums;
    /* The addresses of this lane's operands, scales and sums. */
    u32 own_x;
    const float *own_scales, *own_sums;
    int group, part;
    /* 128 in every byte, in a register: a constant would cost an additional instruction at every use. */
    u32 eights;
    Sum total[TILES][4];

    static constexpr int spans = DIGITS == 1 ? 0 : SPANS * PLACES;
    static constexpr int summed = !NEEDS_SUMS ? 0 : PLACES * (GROUP ? SLICE / (GROUP ? GROUP : 1) * 2 : SPANS + 1);
    static constexpr int bytes = TOKENS * DIGITS * X_PITCH + (spans + summed) * 4;

    __device__ Product(u8* shared) {
        group = threadIdx.x % 32 / 4;
        part = threadIdx.x % 4;
        activations = shared;
        scales = (float*)(shared + TOKENS * DIGITS * X_PITCH);
        sums = scales + spans;
        /* Column `group` of a tile: a token, and its low, middle or high bytes; or none. */
        own_x = (u32)__cvta_generic_to_shared(shared) + part * 16 + (group / COLUMNS * DIGITS + group % COLUMNS) * X_PITCH;
        /* A lane has the sums of two columns of a token. Sums of tokens that do not exist are discarded. */
        own_scales = scales + part / 2;
        own_sums = sums + part;
        asm volatile("mov.b32 %0, 0x80808080;" : "=r"(eights));
    }

    /* Reads activations, inputs `begin` to `begin + count`, padded with zeros to the end of a k tile. */
    template <typename Meanwhile>
    __device__ void prepare(const X* x, i64 x_row, int last, i64 inputs, int begin, int count, int pieces, const Norm& norm, float* scratch,
                            const Meanwhile& meanwhile) {
#if DIGITS == 1
        meanwhile();
        int vectors = (count + 15) / 16, filled = pieces * (PIECE / 16) - vectors;
        for (int item = threadIdx.x; item < TOKENS * filled; item += BLOCK) {
            *(Vector*)(activations + item / filled * X_PITCH + (vectors + item % filled) * 16) = Vector{};
        }
#pragma unroll 4
        for (int item = threadIdx.x; item < TOKENS * vectors; item += BLOCK) {
            int token = item / vectors, at = item % vectors;
            *(Vector*)(activations + token * X_PITCH + at * 16) = load_vector(x + (token < last ? token : last) * x_row + begin + at * 16);
        }
#else
        stage<true>(x, x_row, last, inputs, begin, count, norm, scratch, Digits{activations, scales, sums, pieces * (PIECE / 8)}, meanwhile);
#endif
        __syncthreads();
#if NEEDS_SUMS && GROUP == 0
        for (int token = threadIdx.x / 32; token < TOKENS; token += WARPS) {
            float* own = sums + token * (SPANS + 1);
            float sum = 0.0f;
            for (int at = threadIdx.x % 32; at * SHARING < pieces * PIECE; at += 32) sum += own[1 + at];
            sum = warp_sum(sum);
            if (threadIdx.x % 32 == 0) own[0] = sum;
        }
        __syncthreads();
#endif
    }

    __device__ void begin() {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) total[t][i] = 0;
        }
    }

    /* The operands of unit `u` in a lane's 16 bytes of each of two steps. */
    __device__ void operands_of(const Vector (&own)[2], int u, u32 (&operands)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#if BITS == 8
            operands[i] = own[u].word[i];
#else
            u32 word = own[u / 2].word[u % 2 * 2 + i / 2];
#if OFFSET
            operands[i] = (i % 2 ? word >> 4 : word) & 0x0f0f0f0fu;
#else
            asm("lop3.b32 %0, %1, 0xf0f0f0f0, %2, 0x6a;" : "=r"(operands[i]) : "r"(i % 2 ? word : word * 16), "r"(eights));
#endif
#endif
        }
    }

    /* Adds the product of a k tile. For a last step that does not exist, the activations are zeros. */
    __device__ void add(const Vector (&first)[2], const Vector (&second)[2], const u8* numbers, bool alternate, int piece, int) {
        u32 x_here = own_x + piece * PIECE;
#if DIGITS == 3
        int c[TILES][4];
#endif
#pragma unroll
        for (int u = 0; u < PIECE / UNIT; ++u) {
            u32 low[4], high[4];
            operands_of(first, u, low);
            operands_of(second, u, high);
#if DIGITS == 3 && GROUP
            float scale[UNIT_GROUPS][2], shift[UNIT_GROUPS][2];
#pragma unroll
            for (int g = 0; g < UNIT_GROUPS; ++g) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int row = row_of(group, i, alternate);
                    float offset;
                    const u8* line = numbers + row / 8 * (COPIES * 16) + (u * UNIT / (GROUP ? GROUP : 1) + g) * LINE;
                    numbers_of(line, row % 8, scale[g][i], offset);
                    shift[g][i] = shift_of(scale[g][i], offset);
                }
            }
#endif
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                bool real = group % COLUMNS < DIGITS && (8 * t + group) / COLUMNS < TOKENS;
                Vector v = load_x(real, x_here + t * (8 / COLUMNS * DIGITS * X_PITCH) + u * UNIT);
#if DIGITS == 1
                multiply(total[t], low[0], high[0], low[1], high[1], v.word[0], v.word[1]);
                multiply(total[t], low[2], high[2], low[3], high[3], v.word[2], v.word[3]);
#else
#pragma unroll
                for (int k = 0; k < PRODUCTS; ++k) {
                    const int number = u * PRODUCTS + k;
                    if (number % TOGETHER == 0) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) c[t][i] = RAISED;
                    }
#if GROUP == 16
                    multiply_half(c[t], low[k], high[k], v.word[k]);
#else
                    multiply(c[t], low[2 * k], high[2 * k], low[2 * k + 1], high[2 * k + 1], v.word[2 * k], v.word[2 * k + 1]);
#endif
                    if (number % TOGETHER != TOGETHER - 1) continue;
                    float x_scale = own_scales[(piece * (PIECE / SHARING) + u / 2) * PLACES + 2 * t], both[2] = {x_scale, x_scale};
#if GROUP
                    both[0] *= scale[k * UNIT_GROUPS / PRODUCTS][0];
                    both[1] *= scale[k * UNIT_GROUPS / PRODUCTS][1];
#endif
#pragma unroll
                    for (int i = 0; i < 4; ++i) total[t][i] += both[i / 2] * (__int_as_float(c[t][i]) - RAISED_BY);
#if NEEDS_SUMS && GROUP
                    /* Together with the low bytes only. */
                    float sum = own_sums[(piece * GROUPS + number / TOGETHER) * (2 * PLACES) + 4 * t];
                    total[t][0] += shift[k * UNIT_GROUPS / PRODUCTS][0] * sum;
                    total[t][2] += shift[k * UNIT_GROUPS / PRODUCTS][1] * sum;
#endif
                }
#endif
            }
        }
    }

    /* Writes the sums of a warp: for each token a row of SUM_ROW with 16 outputs. */
    __device__ void leave(Sum* to) const {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#if DIGITS == 1
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int token = 8 * t + 2 * part + i;
                if (token >= TOKENS) break;
                to[token * SUM_ROW + group] = total[t][i];
                to[token * SUM_ROW + group + 8] = total[t][2 + i];
            }
#else
            /* Two lanes exchange rows: one has the low and middle bytes of two rows, the other the high ones. */
            bool odd = part % 2;
            float low = odd ? total[t][0] * 65536.0f : total[t][0] + total[t][1] * 256.0f;
            float high = odd ? total[t][2] * 65536.0f : total[t][2] + total[t][3] * 256.0f;
            float other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
            float sum = (odd ? high : low) + other;
#if BITS == 4 && OFFSET == 0
            sum *= 0.0625f;
#endif
            int token = 2 * t + part / 2;
            if (token < TOKENS) to[token * SUM_ROW + group + (odd ? 8 : 0)] = sum;
#endif
        }
    }

    /* Corrects a sum over all inputs, where a row is one group. */
    __device__ float put_right(float sum, float scale, float second, int token) const {
        return scale * sum + (NEEDS_SUMS ? shift_of(scale, second) * sums[token * (SPANS + 1)] : 0.0f);
    }
};
#endif
#endif
