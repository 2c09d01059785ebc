/*
 * What decode_even.cu has: units of 16 keys in shared memory, and what a warp makes of one on tensor cores (mma.m16n8k16, sm_80 and
 * up), f16 or bf16 throughout. Query heads are the rows of a product here, in token.cuh its columns.
 *
 * A tile is one row by HEADS query heads that share a KV head (at most 16: the rows of the product). The sums over a head's
 * elements may run in any order, so a lane's 16 bytes of a key are fragments of two products. Values are wanted in pairs of
 * neighbouring keys: a lane takes 8 elements of 4 keys and pairs them up in registers. Keys and values pass through a ring of the
 * warp's own, units of 8 KiB (with heads of 128), filled by asynchronous copies of whole rows: lanes that copied only what they
 * take themselves asked the L2 for half lines, and it was that which bounded them. Pieces of 16 bytes are swapped within a row so
 * that 8 lanes meet no bank twice.
 */
#define UNIT 16
#define KEY_BLOCKS ((KEY_SIZE + 31) / 32)
#define VALUE_BLOCKS ((VALUE_SIZE + 63) / 64)
/* Vectors of a row: those that are copied (the last may be zeros), and from row to row in shared memory. */
#define KEY_PIECES (4 * KEY_BLOCKS)
#define KEY_PITCH ((KEY_PIECES + 7) / 8 * 8)
#define VALUE_PIECES (8 * VALUE_BLOCKS)
#define STAGE (UNIT * (KEY_PITCH + VALUE_PIECES))
/* Where vector `piece` of a row is: lanes of 2 rows read keys together, lanes of every second row of 8 values. */
#define KEY_AT(row, piece) ((row) * KEY_PITCH + ((piece) ^ (row) % 2 * 4))
#define VALUE_AT(row, piece) (UNIT * KEY_PITCH + (row) * VALUE_PIECES + ((piece) ^ (row) / 2 % 4 * 2))
/* Whether there are query heads in the upper 8 rows of a product; halves of 8 rows. */
#define UPPER (HEADS > 8)
#define HALVES (1 + UPPER)

struct Strides { i64 page, head, slot; };

struct Arguments {
    const Q* query;
    i64 query_row;
    const Q* keys;
    Strides key_strides;
    const Q* values;
    Strides value_strides;
    const int* query_start;
    const int* query_length;
    const int* kv_length;
    i64 sequences;
    const int* table;
    i64 table_row, table_columns, pages;
    const float* alibi;
    const float* sinks;
    i64 group, parts, window;
    Q* y;
    i64 y_row;
    float* log_sum_exp;
    i64 log_row;
};

/* The first query head of a column of the grid of KV heads and parts of their groups. */
__device__ inline int first_head(const Arguments& a, int column) {
    return column / (int)a.parts * (int)a.group + column % (int)a.parts * HEADS;
}

/* The keys of a sequence that a row sees, from `from` on and below `to`, and where their pages stand. */
struct Span {
    const int* table;
    int from, to;
};

__device__ inline u32 pair(float low, float high) { return (u32)narrow<Q>(low).bits | (u32)narrow<Q>(high).bits << 16; }

/* The largest and the sum over the 4 lanes that share a row of a product. */
__device__ inline float largest_of_four(float x) {
    float other = __shfl_xor_sync(0xffffffffu, x, 1);
    x = other > x ? other : x;
    other = __shfl_xor_sync(0xffffffffu, x, 2);
    return other > x ? other : x;
}
__device__ inline float sum_of_four(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/*
 * Starts copying the keys and values of a unit to `to`. Its page is known where no unit lies in two; else each key's is looked
 * up. Tells which of the keys that a lane weighs are there: 4 bits.
 */
__device__ inline u32 fetch_unit(const Arguments& a, const Span& span, int kv_head, int unit, int page, Vector* to) {
    int lane = threadIdx.x % 32, part = lane % 4, base = unit * UNIT;
    const Q* head_keys = a.keys + kv_head * a.key_strides.head;
    const Q* head_values = a.values + kv_head * a.value_strides.head;
    bool whole = SLOTS % UNIT == 0 && KEY_SIZE % 32 == 0 && VALUE_SIZE % 64 == 0 && base >= span.from && base + UNIT <= span.to;
    if (whole && page >= 0 && page < (int)a.pages) {
        const Q* keys = head_keys + page * a.key_strides.page + base % SLOTS * a.key_strides.slot;
        const Q* values = head_values + page * a.value_strides.page + base % SLOTS * a.value_strides.slot;
#pragma unroll
        for (int i = 0; i < UNIT * KEY_PIECES / 32; ++i) {
            int item = i * 32 + lane, row = item / KEY_PIECES, piece = item % KEY_PIECES;
            copy_ahead(to + KEY_AT(row, piece), keys + row * (int)a.key_strides.slot + piece * 8, true);
        }
#pragma unroll
        for (int i = 0; i < UNIT * VALUE_PIECES / 32; ++i) {
            int item = i * 32 + lane, row = item / VALUE_PIECES, piece = item % VALUE_PIECES;
            copy_ahead(to + VALUE_AT(row, piece), values + row * (int)a.value_strides.slot + piece * 8, true);
        }
        return 15;
    }
    if (base >= span.to) return 0;
    auto page_at = [&](int at) {
        if (at < span.from || at >= span.to) return -1;
        int its = SLOTS % UNIT == 0 ? page : span.table[at / SLOTS];
        return its < (int)a.pages ? its : -1;
    };
    for (int item = lane; item < UNIT * KEY_PIECES; item += 32) {
        int row = item / KEY_PIECES, piece = item % KEY_PIECES, at = base + row, its = page_at(at);
        bool real = its >= 0 && piece * 8 < KEY_SIZE;
        const Q* it = head_keys + its * a.key_strides.page + at % SLOTS * a.key_strides.slot + piece * 8;
        copy_ahead(to + KEY_AT(row, piece), real ? it : head_keys, real);
    }
    for (int item = lane; item < UNIT * VALUE_PIECES; item += 32) {
        int row = item / VALUE_PIECES, piece = item % VALUE_PIECES, at = base + row, its = page_at(at);
        bool real = its >= 0 && piece * 8 < VALUE_SIZE;
        const Q* it = head_values + its * a.value_strides.page + at % SLOTS * a.value_strides.slot + piece * 8;
        copy_ahead(to + VALUE_AT(row, piece), real ? it : head_values, real);
    }
    u32 there = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) there |= (u32)(page_at(base + 2 * part + i % 2 + i / 2 * 8) >= 0) << i;
    return there;
}

/* The queries of a tile, as a lane multiplies them: heads `lane / 4` and 8 more. */
struct Queries {
    Vector of[HALVES][KEY_BLOCKS];
    float slope[HALVES];

    __device__ inline void read(const Arguments& a, i64 row, int first) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            int head = lane / 4 + 8 * half;
            slope[half] = ALIBI && head < HEADS ? a.alibi[first + head] : 0.0f;
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
                int at = block * 32 + lane % 4 * 8;
                of[half][block] = Vector{};
                if (head < HEADS && at < KEY_SIZE) of[half][block] = load_vector(a.query + row * a.query_row + (first + head) * KEY_SIZE + at);
            }
        }
    }
};

/*
 * What a warp knows of a tile's keys so far: for each head the largest score, the sum of weights (of a lane's keys) and the
 * weighted values. A lane has elements j of piece `2 * (lane % 4) + n` of every block of 64 of head `lane / 4 + 8 * half` in
 * values[block][j][2 * half + n].
 */
struct Running {
    float values[VALUE_BLOCKS][8][4], maximum[HALVES], sum[HALVES];

    __device__ inline void clear() {
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; ++block) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) values[block][j][i] = 0.0f;
            }
        }
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            maximum[half] = -infinity();
            sum[half] = 0.0f;
        }
    }

    __device__ inline void scale_by(const float (&factor)[HALVES]) {
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; ++block) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) values[block][j][i] *= factor[UPPER ? i / 2 : 0];
            }
        }
    }

    /* Takes a unit that is in shared memory. `there` says which keys count, `before` is how far in front of the token it begins. */
    __device__ inline void take(const Vector* unit, u32 there, int before, float scale, float softcap, const Queries& queries) {
        int lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
        float scores[2][4] = {};
#pragma unroll
        for (int set = 0; set < 2; ++set) {
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
                const Vector& low = queries.of[0][block];
                const Vector& high = queries.of[UPPER][block];
                Vector its = unit[KEY_AT(8 * set + group, block * 4 + part)];
                multiply(scores[set], low.word[0], UPPER ? high.word[0] : 0, low.word[1], UPPER ? high.word[1] : 0, its.word[0], its.word[1]);
                multiply(scores[set], low.word[2], UPPER ? high.word[2] : 0, low.word[3], UPPER ? high.word[3] : 0, its.word[2], its.word[3]);
            }
        }
        float factor[HALVES];
        u32 weights[HALVES][2];
        bool changed = false;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            float its[4], top = -infinity();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float score = scores[i / 2][half * 2 + i % 2] * scale;
#if SOFTCAP
                score = softcap * tanhf(score / softcap);
#endif
#if ALIBI
                score -= queries.slope[half] * (float)(before - (2 * part + i % 2 + i / 2 * 8));
#endif
                its[i] = there >> i & 1 ? score : -infinity();
                top = its[i] > top ? its[i] : top;
            }
            top = largest_of_four(top);
            float larger = top > maximum[half] ? top : maximum[half];
            /* Where nothing was seen yet, anything finite will do: the weights are 0. */
            float shift = larger == -infinity() ? 0.0f : larger;
            factor[half] = expf(maximum[half] - shift);
            changed = changed || larger != maximum[half];
            maximum[half] = larger;
            sum[half] *= factor[half];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                its[i] = expf(its[i] - shift);
                sum[half] += its[i];
            }
            weights[half][0] = pair(its[0], its[1]);
            weights[half][1] = pair(its[2], its[3]);
        }
        if (__any_sync(0xffffffffu, changed)) scale_by(factor);
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; ++block) {
            Vector value[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) value[i] = unit[VALUE_AT(2 * part + i % 2 + i / 2 * 8, block * 8 + group)];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                u32 choice = j % 2 ? 0x7632 : 0x5410;
                u32 first = __byte_perm(value[0].word[j / 2], value[1].word[j / 2], choice);
                u32 second = __byte_perm(value[2].word[j / 2], value[3].word[j / 2], choice);
                multiply(values[block][j], weights[0][0], UPPER ? weights[UPPER][0] : 0, weights[0][1],
                         UPPER ? weights[UPPER][1] : 0, first, second);
            }
        }
    }
};

/* How a row ends: what its weighted values are multiplied and divided by, with the head's sink, and the logarithm of its sum. */
struct Ending {
    float factor, maximum, sum, sink;
    bool empty;

    __device__ inline Ending(const Arguments& a, int head, float largest, float amount) {
        empty = amount == 0.0f;
        factor = empty ? 0.0f : 1.0f;
        maximum = largest;
        sum = amount;
        sink = a.sinks ? a.sinks[head] : -infinity();
        if (a.sinks && !empty) {
            maximum = largest > sink ? largest : sink;
            factor = expf(largest - maximum);
            sum = amount * factor + expf(sink - maximum);
        }
    }
    __device__ inline float of(float value) const { return empty ? 0.0f : value * factor / sum; }
    __device__ inline float log() const { return empty ? sink : maximum + logf(sum); }
};

extern __shared__ __align__(16) Vector ring[];
