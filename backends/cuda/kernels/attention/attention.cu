/*
 * paged_attention and attention on CUDA cores, for all types and devices.
 *
 * A tile is some queries of a sequence by some query heads that share a KV head: ROWS rows, at most 8. Grid: (tiles, KV heads times
 * tiles per head group, splits of the keys). Every block finds its sequence by scanning the lengths 32 at a time, so no work list
 * is needed and one launch serves prefill and decode.
 *
 * There is one kernel for many calls: pages, the sizes of heads and tiles, causal masks and windows are parameters. With EXTRAS, so
 * are explicit masks, soft caps and ALiBi, which cost time even where a call has none.
 *
 * A block of 4 warps iterates over its share of the keys. LANES lanes read a key, 8 elements (16 bytes of half precision) each. A
 * warp reads 32 / LANES keys at once and prefetches two such sets, from the cache directly into registers: the KV cache is read
 * once per tile and needs no shared memory. Each group of lanes keeps the running maximum, sum and weighted values of every row;
 * at the end they are merged in shared memory, in a fixed order. With SHARED_VALUES a value is the first elements of its key, which is
 * read once.
 *
 * With more than one split, blocks write unnormalised results to scratch memory, and the block that finishes last merges them; it
 * also resets the counter of finished blocks to 0. The number of splits of a row depends only on the length of its sequence.
 *
 * Sequences of at least `prompt` queries are left to the prefill kernels; `prompt` is 0 if there is none for the call. When
 * decode.cu runs too, it takes the sequences of fewer than `fewest` queries. Sequences between these bounds are rare, so there may
 * be fewer blocks than tiles, and each block loops over tiles.
 *
 * Bytes: keys and values once per tile. Efficient for decode; long prefills would read them once per tile of 8 rows from the L2
 * and would not use tensor cores.
 */
#define WARPS 4
/* The kinds of masks. */
#define CAUSAL 1
#define EXPLICIT 3
#define KEYS (32 / LANES)
#define PARTS (WARPS * KEYS)
/* Elements of a value, rounded up to those that its lanes hold. */
#define VALUES (VALUE_PIECES * LANES * 8)
/* Sets of keys that are prefetched. Of large keys a lane has several pieces, which take its registers. */
#define AHEAD (KEY_PIECES > 1 ? 1 : ROWS > 4 ? 2 : 4)

/* Minimum number of keys per split. */
#define SHARE 32

/* Blocks per SM: their loads hide each other's latency. As many as there are registers for. */
#define BLOCKS (EXTRAS || KEY_PIECES > 1 || ROWS > 4 ? 2 : ROWS > 2 ? 3 : 4)

/* 8 elements of a row of `size`, from element `at` on; past the end `out` stays as it is. With `Vectors` sizes are multiples of 8. */
template <typename T, bool Vectors> __device__ inline void load(const T* row, int at, int size, float (&out)[8]) {
    if (Vectors) {
        if (at >= size) return;
#pragma unroll
        for (int i = 0; i < 8 / Lanes<T>::count; ++i) {
            Vector v = load_vector(row + at + i * Lanes<T>::count);
#pragma unroll
            for (int j = 0; j < Lanes<T>::count; ++j) out[i * Lanes<T>::count + j] = Lanes<T>::get(v, j);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (at + i < size) out[i] = widen(row[at + i]);
        }
    }
}

/* The tile of a block. */
struct Tile { i64 start, length, total, first, count; };

/* Finds tile `number` by scanning the lengths of the sequences; returns false if there are fewer tiles. */
__device__ bool find_tile(const PlainAttentionParams& p, i64 sequences, i64 number, i64& sequence, Tile& tile) {
    const AttentionParams& a = p.attention;
    const int lane = threadIdx.x % 32, tokens = (int)p.tile_tokens;
    for (i64 base = 0; base < sequences; base += 32) {
        i64 length = base + lane < sequences ? a.query_length[base + lane] : 0;
        if (length < p.fewest || (p.prompt > 0 && length >= p.prompt)) length = 0;
        i64 tiles = length > 0 ? ((u32)length + tokens - 1) / tokens : 0, upto = tiles;
        for (int distance = 1; distance < 32; distance *= 2) {
            i64 before = __shfl_up_sync(0xffffffffu, upto, distance);
            if (lane >= distance) upto += before;
        }
        u32 reached = __ballot_sync(0xffffffffu, upto > number);
        if (reached) {
            int owner = __ffs(reached) - 1;
            i64 first = number - __shfl_sync(0xffffffffu, upto - tiles, owner);
            sequence = base + owner;
            tile.start = a.query_start[sequence];
            tile.length = a.query_length[sequence];
            tile.total = a.kv_length[sequence];
            tile.first = first * tokens;
            tile.count = tile.length - tile.first < tokens ? tile.length - tile.first : tokens;
            return true;
        }
        number -= __shfl_sync(0xffffffffu, upto, 31);
    }
    return false;
}

/* The keys that a token at position n attends to: n - back to n + forward. */
struct Span {
    int back, forward;
    __device__ explicit Span(const PlainAttentionParams& p) {
        const int any = 0x7fffffff;
        const i64 window = p.attention.window;
        const int reach = window > 0 && window <= any ? (int)window - 1 : any;
        back = reach;
        forward = p.mask == CAUSAL ? 0 : p.paged ? any : reach;
    }
    /* One comparison checks both ends. */
    __device__ bool has(int position, int key) const {
        return (u32)key - (u32)position + (u32)back <= (u32)back + (u32)forward;
    }
};

#if EXTRAS
/* Whether the explicit mask has the bit for key `key` of the token in row `row` of the batch; keys before the queries have none. */
__device__ inline bool is_marked(const AttentionParams& a, const Tile& tile, i64 row, i64 key) {
    i64 bit = key - (tile.total - tile.length);
    return bit < 0 || (bit < a.mask_columns * 32 && (a.mask.at(row, bit / 32) >> (bit % 32) & 1));
}
#endif

/* Writes a row, given its sum of weighted values. */
__device__ void finish(const PlainAttentionParams& p, i64 row, i64 head, float maximum, float sum, const float* values) {
    const AttentionParams& a = p.attention;
    const int size = (int)p.value_size;
    bool empty = sum == 0.0f;
    if (a.sinks && !empty) {
        float sink = a.sinks[head], larger = maximum > sink ? maximum : sink;
        float shrink = expf(maximum - larger);
        sum = sum * shrink + expf(sink - larger);
        maximum = larger;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < size; i += 32) {
            a.y.at(row, head * size + i) = narrow<Q>(values[i] * shrink / sum);
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < size; i += 32) {
            a.y.at(row, head * size + i) = narrow<Q>(empty ? 0.0f : values[i] / sum);
        }
    }
    if (a.log_sum_exp.first && threadIdx.x % 32 == 0) {
        a.log_sum_exp.at(row, head) = empty ? -infinity() : maximum + logf(sum);
    }
}

/* Computes a tile, or one split of it. All threads of the block must call. */
__device__ void attend(const PlainAttentionParams& p, i64 number, i64 sequence, const Tile& tile, i64 tokens) {
    const AttentionParams& a = p.attention;
    __shared__ float maxima[PARTS][ROWS], sums[PARTS][ROWS];
    __shared__ float values[PARTS][ROWS][VALUES];
    __shared__ bool last;
    const int heads = (int)p.heads, key_size = (int)p.key_size, value_size = (int)p.value_size;

    /* The range of keys that any row of the tile attends to. */
    i64 before = tile.total - tile.length, from = 0, to = tile.total;
    if (p.mask == CAUSAL) to = before + tile.first + tile.count < to ? before + tile.first + tile.count : to;
    if (a.window > 0) {
        i64 earliest = before + tile.first - a.window + 1, latest = before + tile.first + tile.count - 1 + a.window;
        /* A multiple of the keys of an iteration, so that lanes take the same keys for a row in any tile. */
        from = earliest > 0 ? earliest / (PARTS * AHEAD) * (PARTS * AHEAD) : 0;
        if (!p.paged && latest < to) to = latest;
    }
    if (p.paged && to > a.table_columns * a.slots) to = a.table_columns * a.slots;
    i64 length = to > from ? to - from : 0;
    i64 share = (length + p.splits - 1) / p.splits;
    share = share < SHARE ? SHARE : (share + 15) / 16 * 16;
    i64 splits = length > 0 ? (length + share - 1) / share : 1;
    if (blockIdx.z >= splits) return;
    i64 begin = from + blockIdx.z * share, end = begin + share < to ? begin + share : to;

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = lane % LANES, group = lane / LANES;
    i64 kv_head = blockIdx.y / a.parts, first_head = kv_head * a.group + blockIdx.y % a.parts * heads;
    float query[ROWS][KEY_PIECES][8], weighted[ROWS][VALUE_PIECES][8], maximum[ROWS], sum[ROWS];
    /* The token of a row, from the first of the tile on. */
    int token_of[ROWS];
#if EXTRAS
    float slope[ROWS];
#endif
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int token = r / heads;
        i64 head = first_head + (r - token * heads), row = tile.start + tile.first + token;
        token_of[r] = token;
        bool real = token < tile.count && row >= 0 && row < tokens;
        maximum[r] = -infinity();
        sum[r] = 0.0f;
#if EXTRAS
        slope[r] = a.alibi ? a.alibi[head] : 0.0f;
#endif
#pragma unroll
        for (int piece = 0; piece < KEY_PIECES; ++piece) {
#pragma unroll
            for (int i = 0; i < 8; ++i) query[r][piece][i] = 0.0f;
            if (real) load<Q, QUERY_VECTORS>(a.query.row(row) + head * key_size, (piece * LANES + mine) * 8, key_size, query[r][piece]);
        }
#pragma unroll
        for (int piece = 0; piece < VALUE_PIECES; ++piece) {
#pragma unroll
            for (int i = 0; i < 8; ++i) weighted[r][piece][i] = 0.0f;
        }
    }

    const Span span(p);
    const int first_position = (int)(before + tile.first), count = (int)tile.count;
    for (i64 base = begin; base < end; base += PARTS * AHEAD) {
        float key[AHEAD][KEY_PIECES][8], value[AHEAD][VALUE_PIECES][8];
        bool there[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            i64 at = base + (u * WARPS + warp) * KEYS + group;
            there[u] = at < end;
            const K* key_row = a.keys;
            const K* value_row = a.values;
            if (there[u]) {
                /* Without pages a key is the row of its token. */
                i64 page = 0, slot = tile.start + at;
                if (p.paged) {
                    u32 entry = (u32)at / (u32)a.slots;
                    page = a.table.at(sequence, entry);
                    slot = (u32)at - entry * (u32)a.slots;
                    there[u] = page >= 0 && page < a.pages;
                } else {
                    there[u] = slot >= 0 && slot < tokens;
                }
                key_row += page * a.key_strides.page + kv_head * a.key_strides.head + slot * a.key_strides.slot;
                value_row += page * a.value_strides.page + kv_head * a.value_strides.head + slot * a.value_strides.slot;
            }
#pragma unroll
            for (int piece = 0; piece < KEY_PIECES; ++piece) {
#pragma unroll
                for (int i = 0; i < 8; ++i) key[u][piece][i] = 0.0f;
                if (there[u]) load<K, CACHE_VECTORS>(key_row, (piece * LANES + mine) * 8, key_size, key[u][piece]);
            }
#pragma unroll
            for (int piece = 0; piece < VALUE_PIECES; ++piece) {
#pragma unroll
                for (int i = 0; i < 8; ++i) value[u][piece][i] = SHARED_VALUES ? key[u][piece][i] : 0.0f;
                if (there[u] && !SHARED_VALUES) load<K, CACHE_VECTORS>(value_row, (piece * LANES + mine) * 8, value_size, value[u][piece]);
            }
        }
        int nearest = (int)(base + warp * KEYS + group);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float scores[AHEAD], top = maximum[r];
            int token = token_of[r], position = first_position + token;
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                float score = 0.0f;
#pragma unroll
                for (int piece = 0; piece < KEY_PIECES; ++piece) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) score += query[r][piece][i] * key[u][piece][i];
                }
                for (int distance = LANES / 2; distance; distance /= 2) score += __shfl_xor_sync(0xffffffffu, score, distance);
                int at = nearest + u * (WARPS * KEYS);
                bool seen = there[u] && token < count && span.has(position, at);
                score *= a.scale;
#if EXTRAS
                if (p.mask == EXPLICIT) seen = seen && is_marked(a, tile, tile.start + tile.first + token, at);
                if (a.softcap > 0.0f) score = a.softcap * tanhf(score / a.softcap);
                if (a.alibi) {
                    int distance = position - at;
                    if (!p.paged && distance < 0) distance = -distance;
                    score -= slope[r] * (float)distance;
                }
#endif
                scores[u] = seen ? score : -infinity();
                top = scores[u] > top ? scores[u] : top;
            }
            if (top > maximum[r]) {
                float shrink = expf(maximum[r] - top);
                maximum[r] = top;
                sum[r] *= shrink;
#pragma unroll
                for (int piece = 0; piece < VALUE_PIECES; ++piece) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) weighted[r][piece][i] *= shrink;
                }
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                /* Masked keys must not contribute, not even with a NaN. */
                if (scores[u] == -infinity()) continue;
                float weight = expf(scores[u] - top);
                sum[r] += weight;
#pragma unroll
                for (int piece = 0; piece < VALUE_PIECES; ++piece) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) weighted[r][piece][i] += weight * value[u][piece][i];
                }
            }
        }
    }

    int part = warp * KEYS + group;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (mine == 0) {
            maxima[part][r] = maximum[r];
            sums[part][r] = sum[r];
        }
#pragma unroll
        for (int piece = 0; piece < VALUE_PIECES; ++piece) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int element = (piece * LANES + mine) * 8 + i;
                if (element < value_size) values[part][r][element] = weighted[r][piece][i];
            }
        }
    }
    __syncthreads();

    /* Each warp merges its lanes' rows; the result overwrites the first part. A lane has the factor of one part. */
    i64 slot = number * gridDim.y + blockIdx.y;
#pragma unroll 1
    for (int r = warp; r < ROWS; r += WARPS) {
        const float here = lane < PARTS ? maxima[lane][r] : -infinity(), amount = lane < PARTS ? sums[lane][r] : 0.0f;
        float largest = here, total = 0.0f;
        for (int distance = 16; distance; distance /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, largest, distance);
            largest = other > largest ? other : largest;
        }
        const float factor = amount == 0.0f ? 0.0f : expf(here - largest);
        const u32 full = __ballot_sync(0xffffffffu, amount != 0.0f);
#pragma unroll 4
        for (int source = 0; source < PARTS; ++source) {
            total += __shfl_sync(0xffffffffu, amount, source) * __shfl_sync(0xffffffffu, factor, source);
        }
        if (lane < PARTS) sums[lane][r] = factor;
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < value_size; i += 32) {
            float merged = 0.0f;
#pragma unroll 4
            for (int source = 0; source < PARTS; ++source) merged += full >> source & 1 ? values[source][r][i] * sums[source][r] : 0.0f;
            values[0][r][i] = merged;
        }
        __syncwarp();
        if (splits == 1) {
            i64 row = tile.start + tile.first + r / heads;
            if (r / heads < count && row >= 0 && row < tokens) finish(p, row, first_head + r % heads, largest, total, values[0][r]);
        } else {
            float* out = p.partial + ((slot * p.splits + blockIdx.z) * ROWS + r) * (value_size + 2);
#pragma unroll 1
            for (int i = lane; i < value_size; i += 32) out[2 + i] = values[0][r][i];
            if (lane == 0) {
                out[0] = largest;
                out[1] = total;
            }
        }
    }
    if (splits == 1) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(p.counters + slot, 1u) == splits - 1;
        if (last) p.counters[slot] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
#pragma unroll 1
    for (int r = warp; r < ROWS; r += WARPS) {
        i64 row = tile.start + tile.first + r / heads;
        if (r / heads >= count || row < 0 || row >= tokens) continue;
        const float* own = p.partial + (slot * p.splits * ROWS + r) * (value_size + 2);
        i64 step = ROWS * (value_size + 2);
        /* There are at most 32 splits, so each lane holds the maximum and the sum of one. */
        float here = lane < splits ? __ldcg(own + lane * step) : -infinity();
        float amount = lane < splits ? __ldcg(own + lane * step + 1) : 0.0f;
        float largest = here;
        for (int distance = 16; distance; distance /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, largest, distance);
            largest = other > largest ? other : largest;
        }
        float factor = amount == 0.0f ? 0.0f : expf(here - largest);
        float total = warp_sum(amount * factor);
#pragma unroll 1
        for (int start = 0; start < value_size; start += 32) {
            int i = start + lane;
            float merged = 0.0f;
#pragma unroll 8
            for (int s = 0; s < (int)splits; ++s) {
                float its = __shfl_sync(0xffffffffu, factor, s);
                bool empty = __shfl_sync(0xffffffffu, amount, s) == 0.0f;
                if (!empty && i < value_size) merged += __ldcg(own + s * step + 2 + i) * its;
            }
            if (i < value_size) values[0][r][i] = merged;
        }
        __syncwarp();
        finish(p, row, first_head + r % heads, largest, total, values[0][r]);
    }
}

/* Whether this kernel has any sequence to process. All threads of the block check a part each: a scan by one warp takes much
 * longer. */
__device__ inline bool any_tile(const PlainAttentionParams& p, i64 sequences) {
    bool any = false;
    for (i64 sequence = threadIdx.x; sequence < sequences; sequence += WARPS * 32) {
        i64 length = p.attention.query_length[sequence];
        any = any || (length >= p.fewest && length < p.prompt);
    }
    return __syncthreads_or(any);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) attention(const __grid_constant__ PlainAttentionParams p) {
    launch_dependents_and_wait();
    const AttentionParams& a = p.attention;
    i64 tokens = a.tokens.count(), sequences = a.sequences.count(), sequence;
    Tile tile;
    if (p.fewest > 1 && !any_tile(p, sequences)) return;
    for (i64 number = blockIdx.x; find_tile(p, sequences, number, sequence, tile); number += gridDim.x) {
        attend(p, number, sequence, tile, tokens);
        /* Where tiles are not rare, each tile has its own block. */
        if (p.fewest == 1) break;
        __syncthreads();
    }
}
