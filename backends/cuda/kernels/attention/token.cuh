/*
 * Shared code of the decode kernels (decode.cu, decode_even.cu): units of 16 keys in shared memory, and how a warp processes a
 * unit on tensor cores (mma.m16n8k16, sm_80 and up), f16 or bf16 throughout.
 *
 * A tile is one row by HEADS query heads that share a KV head, at most 16. The 16 keys of a unit are the rows of the score
 * product, 16 elements of its values those of the value product, and 8 heads the columns of both: only heads are padded. Keys and
 * values pass through a ring buffer per warp, in units of 8 KiB (for heads of 128), filled by asynchronous copies of whole rows.
 * (When each lane copied only what it needs itself, the L2 was asked for half lines and became the bottleneck.) A row consists of
 * segments of 128 bytes, swizzled as by TMA: vector `i` of row `r` is at `i ^ r % 8`, so that 8 rows have no bank conflicts.
 */
#define UNIT 16
/* Steps of 16 elements, and segments of 64. */
#define KEY_STEPS ((KEY_SIZE + 15) / 16)
#define VALUE_STEPS ((VALUE_SIZE + 15) / 16)
#define KEY_HALVES ((KEY_SIZE + 63) / 64)
#define VALUE_HALVES ((VALUE_SIZE + 63) / 64)
/* Vectors of a row that are copied (the last may be zeros), of a segment of all rows, and of a unit. */
#define KEY_VECTORS (2 * KEY_STEPS)
#define VALUE_VECTORS (2 * VALUE_STEPS)
#define PIECE (UNIT * 8)
#define STAGE (PIECE * (KEY_HALVES + VALUE_HALVES))
/* The index of vector `i` of a row. */
#define KEY_AT(row, i) ((i) / 8 * PIECE + (row) * 8 + ((i) % 8 ^ (row) % 8))
#define VALUE_AT(row, i) (KEY_HALVES * PIECE + KEY_AT(row, i))
/* Products of 8 heads. */
#define EIGHTS ((HEADS + 7) / 8)

/* The first query head of a column of the grid (KV heads times tiles per head group). */
__device__ inline int first_head(const AttentionParams& a, int column) {
    return column / (int)a.parts * (int)a.group + column % (int)a.parts * HEADS;
}

/* The keys of a sequence that a row attends to, `from` up to and excluding `to`, and their block table. */
struct Span {
    const int* table;
    int from, to;
};

/* ldmatrix: four matrices of 8 rows of 16 bytes at the addresses of the lanes; or transposed. */
template <bool Transposed> __device__ inline void load_matrices(u32 (&m)[4], u32 address) {
    if (Transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
    }
}

/* Transposes an 8 by 8 matrix of 16 bits, of which each lane has two neighbours of a row. */
__device__ inline u32 turned(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* Packs two values into one word, the first into its low half. */
__device__ inline u32 pair(float low, float high) {
    u32 both = 0;
#if __CUDA_ARCH__ >= 800
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
#endif
    return both;
}

/* Powers of 2, with a relative error of 2^-22. */
__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The maximum and the sum over the 8 lanes that share columns of a product. */
__device__ inline float largest_of_eight(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
__device__ inline float sum_of_eight(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

/* Prefetches a unit of a known page into the L2. */
__device__ inline void ask_l2(const AttentionParams& a, int page, int kv_head, int slot) {
#if __CUDA_ARCH__ >= 900
    auto ask = [&](const Q* from, const Strides& strides, int size) {
        const Q* it = from + page * strides.page + kv_head * strides.head + slot * strides.slot;
        if (strides.slot == size) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(it), "r"(UNIT * size * 2) : "memory");
    };
    ask(a.keys, a.key_strides, KEY_SIZE);
    ask(a.values, a.value_strides, VALUE_SIZE);
#endif
}

/*
 * Starts copying the keys and values of a unit to `to`. If a unit never spans two pages, its page is known; otherwise the page of
 * each key is looked up. Returns which of the keys that a lane weighs, `lane / 4` and `lane / 4 + 8`, exist: 2 bits.
 */
__device__ inline u32 fetch_unit(const AttentionParams& a, const Span& span, int kv_head, int unit, int page, Vector* to) {
    int lane = threadIdx.x % 32, base = unit * UNIT;
    const Q* head_keys = a.keys + kv_head * a.key_strides.head;
    const Q* head_values = a.values + kv_head * a.value_strides.head;
    bool whole = SLOTS % UNIT == 0 && KEY_SIZE % 16 == 0 && VALUE_SIZE % 16 == 0 && base >= span.from && base + UNIT <= span.to;
    if (whole && page >= 0 && page < (int)a.pages) {
        const Q* keys = head_keys + page * a.key_strides.page + base % SLOTS * a.key_strides.slot;
        const Q* values = head_values + page * a.value_strides.page + base % SLOTS * a.value_strides.slot;
#pragma unroll
        for (int i = 0; i < UNIT * KEY_VECTORS / 32; ++i) {
            int item = i * 32 + lane, row = item / KEY_VECTORS, vector = item % KEY_VECTORS;
            copy_ahead(to + KEY_AT(row, vector), keys + row * (int)a.key_strides.slot + vector * 8, true);
        }
#pragma unroll
        for (int i = 0; i < UNIT * VALUE_VECTORS / 32; ++i) {
            int item = i * 32 + lane, row = item / VALUE_VECTORS, vector = item % VALUE_VECTORS;
            copy_ahead(to + VALUE_AT(row, vector), values + row * (int)a.value_strides.slot + vector * 8, true);
        }
        return 3;
    }
    if (base >= span.to) return 0;
    auto page_at = [&](int at) {
        if (at < span.from || at >= span.to) return -1;
        int its = SLOTS % UNIT == 0 ? page : span.table[at / SLOTS];
        return its < (int)a.pages ? its : -1;
    };
    for (int item = lane; item < UNIT * KEY_VECTORS; item += 32) {
        int row = item / KEY_VECTORS, vector = item % KEY_VECTORS, at = base + row, its = page_at(at);
        bool real = its >= 0 && vector * 8 < KEY_SIZE;
        const Q* it = head_keys + its * a.key_strides.page + at % SLOTS * a.key_strides.slot + vector * 8;
        copy_ahead(to + KEY_AT(row, vector), real ? it : head_keys, real);
    }
    for (int item = lane; item < UNIT * VALUE_VECTORS; item += 32) {
        int row = item / VALUE_VECTORS, vector = item % VALUE_VECTORS, at = base + row, its = page_at(at);
        bool real = its >= 0 && vector * 8 < VALUE_SIZE;
        const Q* it = head_values + its * a.value_strides.page + at % SLOTS * a.value_strides.slot + vector * 8;
        copy_ahead(to + VALUE_AT(row, vector), real ? it : head_values, real);
    }
    int own = base + lane / 4;
    return (u32)(page_at(own) >= 0) | (u32)(page_at(own + 8) >= 0) << 1;
}

/* The queries of a tile as operands of a lane: elements of head `lane / 4` and of head `lane / 4 + 8`. */
struct Queries {
    u32 of[EIGHTS][KEY_STEPS][2];
    /* Of heads `2 * (lane % 4)` and the next, whose scores a lane has. */
    float slope[EIGHTS][2];

    __device__ inline void read(const AttentionParams& a, i64 row, int first) {
        int lane = threadIdx.x % 32, part = lane % 4;
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            int head = lane / 4 + 8 * eight;
            const Q* from = a.query.row(row) + (first + head) * KEY_SIZE + part * 2;
#pragma unroll
            for (int i = 0; i < KEY_STEPS * 2; ++i) {
                of[eight][i / 2][i % 2] = head < HEADS && i * 8 < KEY_SIZE ? *(const u32*)(from + i * 8) : 0;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int its = part * 2 + i + 8 * eight;
                slope[eight][i] = ALIBI && its < HEADS ? a.alibi[first + its] : 0.0f;
            }
        }
    }
};

/* Scores are kept in base 2: exp(scale * x) is 2^(scale * log2(e) * x), which the hardware computes. */
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
/* Less than every score, but finite, so that differences are finite. */
#define LOWEST -3.402823466e38f
/*
 * Scores are shifted lazily: a new shift sets the largest weight to 2^1, and only weights above 2^2 cause a new shift. In f16
 * weights keep all 11 bits until they are 2^26 times smaller than the largest, so that small weights of large values are not
 * lost.
 */
#define LARGEST (HALF ? 12 : 0)
#define BEYOND (HALF ? 15.0f : 8.0f)

/*
 * The running state of a warp for a tile: for each head the shift of the scores, which follows their maximum; the sum of the
 * weights of the lane's keys; and the weighted values. A lane has, of heads `2 * (lane % 4) + i` and 8 further, elements `lane /
 * 4` and 8 further of every 16: values[eight][step][i] and [2 + i].
 */
struct Running {
    float values[EIGHTS][VALUE_STEPS][4], shift[EIGHTS][2], sum[EIGHTS][2];

    __device__ inline void clear() {
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
#pragma unroll
            for (int i = 0; i < VALUE_STEPS * 4; ++i) values[eight][i / 4][i % 4] = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                shift[eight][i] = LOWEST;
                sum[eight][i] = 0.0f;
            }
        }
    }

    /* Raises the shift of each of eight heads if the largest of these scores requires it. */
    __device__ inline void move(int eight, const float (&scores)[4]) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = fmaxf(shift[eight][i], largest_of_eight(fmaxf(scores[i], scores[2 + i])) - LARGEST);
            factor[i] = power(shift[eight][i] - top);
            shift[eight][i] = top;
            sum[eight][i] *= factor[i];
        }
#pragma unroll
        for (int i = 0; i < VALUE_STEPS * 4; ++i) values[eight][i / 4][i % 4] *= factor[i % 2];
    }

    /*
     * Processes a unit in shared memory. `there` says which keys count (3 for all, in all lanes), `before` is the distance from
     * the unit's first key to the token.
     */
    __device__ inline void take(const Vector* unit, u32 there, int before, float scale, float softcap, const Queries& queries) {
        int lane = threadIdx.x % 32, group = lane / 4;
        u32 at = (u32)__cvta_generic_to_shared(unit);
        /* The order of matrices for ldmatrix. Keys: rows, 8 rows further, and both for the next vector; values: rows, the next
         * vector, and both 8 rows further. */
        u32 key_at = at + lane % 16 * 128, key_vector = lane / 16 ^ lane % 8;
        u32 value_at = at + KEY_HALVES * PIECE * 16 + (lane % 8 + lane / 16 * 8) * 128, value_vector = lane / 8 % 2 ^ lane % 8;
        float scores[EIGHTS][4] = {};
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            u32 keys[4];
            load_matrices<false>(keys, key_at + step / 4 * (PIECE * 16) + (key_vector ^ step % 4 * 2) * 16);
#pragma unroll
            for (int eight = 0; eight < EIGHTS; ++eight) {
                multiply(scores[eight], keys[0], keys[1], keys[2], keys[3], queries.of[eight][step][0], queries.of[eight][step][1]);
            }
        }
        /* Below, scores times this are in base 2. */
        float base = scale * LOG2E;
#if SOFTCAP || ALIBI
        base = LOG2E;
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; ++i) {
            float& score = scores[i / 4][i % 4];
            score *= scale;
#if SOFTCAP
            score = softcap * tanhf(score / softcap);
#endif
#if ALIBI
            score -= queries.slope[i / 4][i % 2] * (float)(before - (group + i % 4 / 2 * 8));
#endif
        }
#endif
        bool all = __all_sync(0xffffffffu, there == 3);
        u32 weights[EIGHTS][2];
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            float its[4];
            auto hide = [&](float (&x)[4]) {
                if (all) return;
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = there >> (i / 2) & 1 ? x[i] : -infinity();
            };
#pragma unroll
            for (int i = 0; i < 4; ++i) its[i] = scores[eight][i] * base - shift[eight][i % 2];
            hide(its);
            if (__any_sync(0xffffffffu, fmaxf(fmaxf(its[0], its[1]), fmaxf(its[2], its[3])) > BEYOND)) {
#pragma unroll
                for (int i = 0; i < 4; ++i) its[i] = scores[eight][i] * base;
                hide(its);
                move(eight, its);
#pragma unroll
                for (int i = 0; i < 4; ++i) its[i] -= shift[eight][i % 2];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                its[i] = power(its[i]);
                sum[eight][i % 2] += its[i];
            }
            /* A lane has two heads of a key, and multiplies two keys of a head. */
            weights[eight][0] = turned(pair(its[0], its[1]));
            weights[eight][1] = turned(pair(its[2], its[3]));
        }
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; ++step) {
            u32 its[4];
            load_matrices<true>(its, value_at + step / 4 * (PIECE * 16) + (value_vector ^ step % 4 * 2) * 16);
#pragma unroll
            for (int eight = 0; eight < EIGHTS; ++eight) {
                multiply(values[eight][step], its[0], its[1], its[2], its[3], weights[eight][0], weights[eight][1]);
            }
        }
    }
};

/*
 * Finishes a row, given the shift and the sum of its weights: the factor and divisor of its weighted values, including the head's
 * sink, and the logarithm of the sum.
 */
struct Ending {
    float factor, maximum, sum, sink;
    bool empty;

    __device__ inline Ending(const AttentionParams& a, int head, float shift, float amount) {
        const float unit = 1.0f / (1 << LARGEST);
        float largest = (shift + LARGEST) * LN2;
        empty = amount == 0.0f;
        factor = empty ? 0.0f : unit;
        maximum = largest;
        sum = amount * unit;
        sink = a.sinks ? a.sinks[head] : -infinity();
        if (a.sinks && !empty) {
            maximum = largest > sink ? largest : sink;
            factor = unit * expf(largest - maximum);
            sum = amount * factor + expf(sink - maximum);
        }
    }
    __device__ inline float of(float value) const { return empty ? 0.0f : value * factor / sum; }
    __device__ inline float log() const { return empty ? sink : maximum + logf(sum); }
};

extern __shared__ __align__(128) Vector ring[];
