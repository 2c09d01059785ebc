/*
 * Shared code of the prefill kernels: which sequences are prefills, their tiles, masking, and writing a row.
 *
 * A prefill is a sequence of at least PROMPT queries in this step; shorter ones are left to the decode kernels. A tile is TOKENS
 * consecutive queries by HEADS query heads that share a KV head; row r is query r / HEADS of head r % HEADS. Keys and values are
 * read once for all rows. Every block finds its tiles by scanning the lengths 32 at a time, so no work list is needed. The tiles
 * of a sequence are counted from its end, where a causal mask leaves the most work.
 *
 * Scores are kept in base 2: exp(scale * x) is 2^(scale * log2(e) * x), which the hardware computes. Weights are rounded to the
 * type of the values. The largest f16 weight is 2^15 instead of 1, so that weights become subnormal and lose bits only when they
 * are 2^29 times smaller than the largest (2^14 with 1), where even a large value cannot make them matter.
 */
#define ROWS (TOKENS * HEADS)
#define LOG2E 1.4426950408889634f
/* Log2 of the largest weight. */
#define LARGEST (HALF ? 15 : 0)

/* A tile. Rows and positions fit into 32 bits, as the sizes of tensors and the lengths of sequences do. */
struct Tile {
    const int* pages;    /* of the sequence */
    int row;             /* of its first query in the batch */
    int count;           /* queries in it */
    int position;        /* of its first query */
    int before;          /* tokens of the sequence that are older than this step's */
    int total;           /* tokens of the sequence */
    int start;           /* row of the sequence's first query */
    int kv_head, head;   /* the KV head, and the first query head */
    int from, to;        /* keys that any of its queries sees: from .. to */
};

/* The number of tiles of a sequence with `queries` queries. */
__device__ inline i64 tiles_of(const AttentionParams& a, int length) {
    return length >= PROMPT ? (length + TOKENS - 1) / TOKENS * (a.kv_heads * a.parts) : 0;
}

/* The number of tiles of all sequences. Whole warps must call. */
__device__ inline i64 count_tiles(const AttentionParams& a, i64 sequences) {
    i64 tiles = 0;
#pragma unroll 4
    for (i64 sequence = threadIdx.x % 32; sequence < sequences; sequence += 32) tiles += tiles_of(a, a.query_length[sequence]);
#pragma unroll
    for (int distance = 16; distance; distance /= 2) tiles += __shfl_xor_sync(0xffffffffu, tiles, distance);
    return tiles;
}

/* Sets the range of keys that any query of a tile attends to. */
__device__ inline void bound_keys(const AttentionParams& a, Tile& tile) {
    tile.from = 0;
    tile.to = tile.total;
    int end = tile.position + tile.count;
    if (MASK == 1) tile.to = end < tile.to ? end : tile.to;
#if WINDOW
    i64 earliest = tile.position - a.window + 1, latest = end - 1 + a.window;
    tile.from = earliest > 0 ? (int)earliest : 0;
    if (!PAGED && latest < tile.to) tile.to = (int)latest;
#endif
    if (PAGED && tile.to > a.table_columns * SLOTS) tile.to = (int)(a.table_columns * SLOTS);
}

/* The state of a search: `base` is the number of tiles of the sequences already passed. */
struct Search { i64 base = 0, before = 0; };

/* Finds tile `number`; returns false if there are fewer. The numbers of one search must not decrease. Whole warps must call. */
__device__ inline bool find_tile(const AttentionParams& a, i64 sequences, int tokens, i64 number, Search& search, Tile& tile) {
    int lane = threadIdx.x % 32;
    i64 heads = a.kv_heads * a.parts;
    number -= search.before;
    for (; search.base < sequences; search.base += 32) {
        i64 base = search.base;
        int length = base + lane < sequences ? a.query_length[base + lane] : 0;
        i64 items = tiles_of(a, length), upto = items;
        for (int distance = 1; distance < 32; distance *= 2) {
            i64 before = __shfl_up_sync(0xffffffffu, upto, distance);
            if (lane >= distance) upto += before;
        }
        u32 reached = __ballot_sync(0xffffffffu, upto > number);
        if (reached) {
            int owner = __ffs(reached) - 1;
            /* The number of tiles of a step is below 2^31. */
            u32 item = (u32)(number - __shfl_sync(0xffffffffu, upto - items, owner)), head = item % (u32)heads;
            i64 sequence = base + owner;
            int own = __shfl_sync(0xffffffffu, length, owner);
            int first = ((own + TOKENS - 1) / TOKENS - 1 - (int)(item / (u32)heads)) * TOKENS;
            tile.pages = a.table.row(sequence);
            tile.start = a.query_start[sequence];
            tile.row = tile.start + first;
            tile.count = own - first < TOKENS ? own - first : TOKENS;
#if PAGED
            tile.total = a.kv_length[sequence];
            tile.before = tile.total - own;
#else
            /* Rows past the extent do not exist. */
            tile.total = own < tokens - tile.start ? own : tokens - tile.start;
            tile.before = 0;
#endif
            tile.position = tile.before + first;
            tile.kv_head = (int)(head / (u32)a.parts);
            tile.head = (int)(tile.kv_head * a.group + head % (u32)a.parts * HEADS);
            bound_keys(a, tile);
            return true;
        }
        i64 here = __shfl_sync(0xffffffffu, upto, 31);
        number -= here;
        search.before += here;
    }
    return false;
}

/* Whether the query at `position`, row `row` of the batch, attends to key `key`. */
__device__ inline bool sees(const AttentionParams& a, const Tile& tile, int position, int row, int key) {
    bool seen = key < tile.to;
#if MASK == 1
    seen = seen && key <= position;
#elif MASK == 3
    int bit = key - tile.before;
    seen = seen && (bit < 0 || (bit < a.mask_columns * 32 && (a.mask.at(row, bit / 32) >> (bit % 32) & 1)));
#endif
#if WINDOW
    seen = seen && key > position - a.window && (PAGED || key < position + a.window);
#endif
    return seen;
}

/* Whether all queries `low` to `high` attend to all keys `key` to `key + keys - 1`. */
__device__ inline bool see_all(const AttentionParams& a, const Tile& tile, int low, int high, int key, int keys) {
    bool all = MASK != 3 && key + keys <= tile.to;
#if MASK == 1
    all = all && key + keys - 1 <= low;
#endif
#if WINDOW
    all = all && key > high - a.window && (PAGED || key + keys - 1 < low + a.window);
#endif
    return all;
}

/* Powers of 2, with a relative error of 2^-22. */
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Packs two values into one word, the first into its low half. */
__device__ inline u32 pack(float low, float high) {
    u32 both;
#if __CUDA_ARCH__ < 800
    both = narrow<Q>(low).bits | (u32)narrow<Q>(high).bits << 16;
#elif HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

/*
 * Online softmax. Scores of a thread for COLUMNS consecutive 8-key columns and 2 rows, in the accumulator layout of the product:
 * c[4 j + 2 i + k] is row i, key 8 j + k of the thread's pair. Updates the running maximum and sum of each row; `factor` is what
 * earlier sums are scaled by.
 */
struct Softmax {
    float maximum[2], sum[2];
    float slope[2];
    int position[2], row[2];

    template <int Columns>
    __device__ inline void step(const AttentionParams& a, const Tile& tile, bool masked, int key,
                                float (&c)[Columns * 4], float (&factor)[2]) {
        /* Below, `c` times `unit` are scores in base 2. */
        float unit = a.scale * LOG2E;
#if SOFTCAP || ALIBI
#pragma unroll
        for (int i = 0; i < Columns * 4; ++i) {
            float score = c[i] * a.scale;
#if SOFTCAP
            score = a.softcap * tanhf(score / a.softcap);
#endif
#if ALIBI
            int distance = position[i / 2 % 2] - (key + i / 4 * 8 + i % 2);
            if (!PAGED && distance < 0) distance = -distance;
            score -= slope[i / 2 % 2] * (float)distance;
#endif
            c[i] = score;
        }
        unit = LOG2E;
#endif
        if (masked) {
#if MASK != 3 && !WINDOW
            /* The same as below in fewer instructions, for the case that only keys past a bound are masked. */
            int seen[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                seen[r] = tile.to - key;
                if (MASK == 1) seen[r] = min(seen[r], position[r] + 1 - key);
            }
#pragma unroll
            for (int i = 0; i < Columns * 4; ++i) {
                if (i / 4 * 8 + i % 2 >= seen[i / 2 % 2]) c[i] = -infinity();
            }
#else
#pragma unroll
            for (int i = 0; i < Columns * 4; ++i) {
                int at = key + i / 4 * 8 + i % 2;
                if (!sees(a, tile, position[i / 2 % 2], row[i / 2 % 2], at)) c[i] = -infinity();
            }
#endif
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = maximum[r];
#pragma unroll
            for (int i = 0; i < Columns * 2; ++i) top = fmaxf(top, c[i / 2 * 4 + r * 2 + i % 2]);
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            /* While no key has been seen, all powers must be 0 instead of NaN. */
            float base = top == -infinity() ? 0.0f : top * unit, shifted = base - LARGEST;
            factor[r] = exp2_fast(maximum[r] * unit - base);
            maximum[r] = top;
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < Columns * 2; ++i) {
                float& x = c[i / 2 * 4 + r * 2 + i % 2];
                x = exp2_fast(x * unit - shifted);
                total += x;
            }
            sum[r] = sum[r] * factor[r] + total;
        }
    }

    /* The sum over the row's four threads, including the sink; the factor of its values; its log_sum_exp. */
    __device__ inline void finish(const AttentionParams& a, int r, int head, float& factor, float& log) {
        float total = sum[r];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        float top = maximum[r], unit = 1.0f / (1 << LARGEST);
        total *= unit;
#if !(SOFTCAP || ALIBI)
        top *= a.scale;
#endif
        factor = 0.0f;
        log = -infinity();
        if (total == 0.0f) return;
        float shrink = 1.0f;
        if (a.sinks) {
            float sink = a.sinks[head], larger = fmaxf(top, sink);
            shrink = expf(top - larger);
            total = total * shrink + expf(sink - larger);
            top = larger;
        }
        factor = shrink / total * unit;
        log = top + logf(total);
    }
};
