/*
 * paged_attention and attention on CUDA cores, for all types and devices.
 *
 * A tile is TOKENS queries of a sequence by HEADS query heads that share a KV head: ROWS rows, at most 8. Grid: (tiles, KV heads
 * times tiles per head group, splits of the keys). Every block finds its sequence by scanning the lengths 32 at a time, so no
 * work list is needed and one launch serves prefill and decode.
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
 * Sequences of at least PROMPT queries are left to the prefill kernels; PROMPT is 0 if there is none for the call. When decode.cu
 * runs too, it takes the sequences of fewer than FEWEST queries. Sequences between these bounds are rare, so there may be fewer
 * blocks than tiles, and each block loops over tiles.
 *
 * Bytes: keys and values once per tile. Efficient for decode; long prefills would read them once per tile of 8 rows from the L2
 * and would not use tensor cores.
 */
#define ROWS (TOKENS * HEADS)
#define WARPS 4
#define KEYS (32 / LANES)
#define PARTS (WARPS * KEYS)
#define KEY_PIECES ((KEY_SIZE + LANES * 8 - 1) / (LANES * 8))
#define VALUE_PIECES ((VALUE_SIZE + LANES * 8 - 1) / (LANES * 8))
/* Sets of keys that are prefetched. Of large keys a lane has several pieces, which take its registers. */
#define AHEAD (KEY_PIECES > 1 ? 1 : ROWS > 4 ? 2 : 4)

/* Minimum number of keys per split. */
#define SHARE 32

/* 8 elements of a row of `size`, from element `at` on; zeros past the end. */
template <typename T, int Size, bool Vectors> __device__ inline void load(const T* row, int at, float (&out)[8]) {
    if (Vectors && Size % 8 == 0) {
        if (at < Size) {
#pragma unroll
            for (int i = 0; i < 8 / Lanes<T>::count; ++i) {
                Vector v = load_vector(row + at + i * Lanes<T>::count);
#pragma unroll
                for (int j = 0; j < Lanes<T>::count; ++j) out[i * Lanes<T>::count + j] = Lanes<T>::get(v, j);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = at + i < Size ? widen(row[at + i]) : 0.0f;
}

/* The tile of a block. */
struct Tile { i64 start, length, total, first, count; };

/* Finds tile `number` by scanning the lengths of the sequences; returns false if there are fewer tiles. */
__device__ bool find_tile(const AttentionParams& a, i64 sequences, i64 number, i64& sequence, Tile& tile) {
    int lane = threadIdx.x % 32;
    for (i64 base = 0; base < sequences; base += 32) {
        i64 length = base + lane < sequences ? a.query_length[base + lane] : 0;
        if (length < FEWEST || (PROMPT > 0 && length >= PROMPT)) length = 0;
        i64 tiles = length > 0 ? (length + TOKENS - 1) / TOKENS : 0, upto = tiles;
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
            tile.total = PAGED ? a.kv_length[sequence] : tile.length;
            tile.first = first * TOKENS;
            tile.count = tile.length - tile.first < TOKENS ? tile.length - tile.first : TOKENS;
            return true;
        }
        number -= __shfl_sync(0xffffffffu, upto, 31);
    }
    return false;
}

/* Whether the token at `position` (row `row` of the batch) attends to key `key`. */
__device__ inline bool sees(const AttentionParams& a, const Tile& tile, i64 position, i64 row, i64 key) {
#if MASK == 1
    bool seen = key <= position;
#elif MASK == 2
    bool seen = true;
#else
    i64 bit = key - (tile.total - tile.length);
    bool seen = bit < 0 || (bit < a.mask_columns * 32 && (a.mask.at(row, bit / 32) >> (bit % 32) & 1));
#endif
#if WINDOW
    seen = seen && key > position - a.window && (PAGED || key < position + a.window);
#endif
    return seen;
}

/* Writes a row, given its sum of weighted values. `shared` rows have VALUE_SIZE elements. */
__device__ void finish(const AttentionParams& a, i64 row, i64 head, float maximum, float sum, const float* values) {
    bool empty = sum == 0.0f;
    if (a.sinks && !empty) {
        float sink = a.sinks[head], larger = maximum > sink ? maximum : sink;
        float shrink = expf(maximum - larger);
        sum = sum * shrink + expf(sink - larger);
        maximum = larger;
        for (int i = threadIdx.x % 32; i < VALUE_SIZE; i += 32) {
            a.y.at(row, head * VALUE_SIZE + i) = narrow<Q>(values[i] * shrink / sum);
        }
    } else {
        for (int i = threadIdx.x % 32; i < VALUE_SIZE; i += 32) {
            a.y.at(row, head * VALUE_SIZE + i) = narrow<Q>(empty ? 0.0f : values[i] / sum);
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
    __shared__ float values[PARTS][ROWS][VALUE_SIZE];
    __shared__ bool last;

    /* The range of keys that any row of the tile attends to. */
    i64 before = tile.total - tile.length, from = 0, to = tile.total;
    if (MASK == 1) to = before + tile.first + tile.count < to ? before + tile.first + tile.count : to;
    if (a.window > 0) {
        i64 earliest = before + tile.first - a.window + 1, latest = before + tile.first + tile.count - 1 + a.window;
        from = earliest > 0 ? earliest : 0;
        if (!PAGED && latest < to) to = latest;
    }
    if (PAGED && to > a.table_columns * a.slots) to = a.table_columns * a.slots;
    i64 length = to > from ? to - from : 0;
    i64 share = (length + p.splits - 1) / p.splits;
    share = share < SHARE ? SHARE : (share + 15) / 16 * 16;
    i64 splits = length > 0 ? (length + share - 1) / share : 1;
    if (blockIdx.z >= splits) return;
    i64 begin = from + blockIdx.z * share, end = begin + share < to ? begin + share : to;

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = lane % LANES, group = lane / LANES;
    i64 kv_head = blockIdx.y / a.parts, first_head = kv_head * a.group + blockIdx.y % a.parts * HEADS;
    float query[ROWS][KEY_PIECES][8], weighted[ROWS][VALUE_PIECES][8], maximum[ROWS], sum[ROWS], slope[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        i64 token = r / HEADS, head = first_head + r % HEADS, row = tile.start + tile.first + token;
        bool real = token < tile.count && row >= 0 && row < tokens;
        maximum[r] = -infinity();
        sum[r] = 0.0f;
        slope[r] = a.alibi ? a.alibi[head] : 0.0f;
#pragma unroll
        for (int piece = 0; piece < KEY_PIECES; ++piece) {
#pragma unroll
            for (int i = 0; i < 8; ++i) query[r][piece][i] = 0.0f;
            if (real) load<Q, KEY_SIZE, QUERY_VECTORS>(a.query.row(row) + head * KEY_SIZE, (piece * LANES + mine) * 8, query[r][piece]);
        }
#pragma unroll
        for (int piece = 0; piece < VALUE_PIECES; ++piece) {
#pragma unroll
            for (int i = 0; i < 8; ++i) weighted[r][piece][i] = 0.0f;
        }
    }

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
#if PAGED
                u32 entry = (u32)at / (u32)a.slots;
                i64 page = a.table.at(sequence, entry), slot = (u32)at - entry * (u32)a.slots;
                there[u] = page >= 0 && page < a.pages;
                key_row += page * a.key_strides.page + kv_head * a.key_strides.head + slot * a.key_strides.slot;
                value_row += page * a.value_strides.page + kv_head * a.value_strides.head + slot * a.value_strides.slot;
#else
                there[u] = tile.start + at >= 0 && tile.start + at < tokens;
                key_row += (tile.start + at) * a.key_strides.slot + kv_head * a.key_strides.head;
                value_row += (tile.start + at) * a.value_strides.slot + kv_head * a.value_strides.head;
#endif
            }
#pragma unroll
            for (int piece = 0; piece < KEY_PIECES; ++piece) {
#pragma unroll
                for (int i = 0; i < 8; ++i) key[u][piece][i] = 0.0f;
                if (there[u]) load<K, KEY_SIZE, CACHE_VECTORS>(key_row, (piece * LANES + mine) * 8, key[u][piece]);
            }
#pragma unroll
            for (int piece = 0; piece < VALUE_PIECES; ++piece) {
#pragma unroll
                for (int i = 0; i < 8; ++i) value[u][piece][i] = SHARED_VALUES ? key[u][piece][i] : 0.0f;
                if (there[u] && !SHARED_VALUES) load<K, VALUE_SIZE, CACHE_VECTORS>(value_row, (piece * LANES + mine) * 8, value[u][piece]);
            }
        }
        int nearest = (int)(base + warp * KEYS + group);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float scores[AHEAD], top = maximum[r];
            int token = r / HEADS, position = (int)(before + tile.first) + token;
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
                bool seen = there[u] && token < tile.count && sees(a, tile, position, tile.start + tile.first + token, at);
                score *= a.scale;
#if SOFTCAP
                score = a.softcap * tanhf(score / a.softcap);
#endif
#if ALIBI
                int distance = position - at;
                if (!PAGED && distance < 0) distance = -distance;
                score -= slope[r] * (float)distance;
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
                if (element < VALUE_SIZE) values[part][r][element] = weighted[r][piece][i];
            }
        }
    }
    __syncthreads();

    /* Each warp merges its lanes' rows; the result overwrites the first part. */
    i64 slot = number * gridDim.y + blockIdx.y;
    for (int r = warp; r < ROWS; r += WARPS) {
        float largest = -infinity(), total = 0.0f;
        for (int source = 0; source < PARTS; ++source) largest = maxima[source][r] > largest ? maxima[source][r] : largest;
        float factor[PARTS];
#pragma unroll
        for (int source = 0; source < PARTS; ++source) {
            factor[source] = sums[source][r] == 0.0f ? 0.0f : expf(maxima[source][r] - largest);
            total += sums[source][r] * factor[source];
        }
        for (int i = lane; i < VALUE_SIZE; i += 32) {
            float merged = 0.0f;
#pragma unroll
            for (int source = 0; source < PARTS; ++source) merged += sums[source][r] == 0.0f ? 0.0f : values[source][r][i] * factor[source];
            values[0][r][i] = merged;
        }
        __syncwarp();
        if (splits == 1) {
            i64 row = tile.start + tile.first + r / HEADS;
            if (r / HEADS < tile.count && row >= 0 && row < tokens) finish(a, row, first_head + r % HEADS, largest, total, values[0][r]);
        } else {
            float* out = p.partial + ((slot * p.splits + blockIdx.z) * ROWS + r) * (VALUE_SIZE + 2);
            for (int i = lane; i < VALUE_SIZE; i += 32) out[2 + i] = values[0][r][i];
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
    for (int r = warp; r < ROWS; r += WARPS) {
        i64 row = tile.start + tile.first + r / HEADS;
        if (r / HEADS >= tile.count || row < 0 || row >= tokens) continue;
        const float* own = p.partial + (slot * p.splits * ROWS + r) * (VALUE_SIZE + 2);
        i64 step = ROWS * (VALUE_SIZE + 2);
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
        for (int start = 0; start < VALUE_SIZE; start += 32) {
            int i = start + lane;
            float merged = 0.0f;
#pragma unroll 8
            for (int s = 0; s < (int)splits; ++s) {
                float its = __shfl_sync(0xffffffffu, factor, s);
                bool empty = __shfl_sync(0xffffffffu, amount, s) == 0.0f;
                if (!empty && i < VALUE_SIZE) merged += __ldcg(own + s * step + 2 + i) * its;
            }
            if (i < VALUE_SIZE) values[0][r][i] = merged;
        }
        __syncwarp();
        finish(a, row, first_head + r % HEADS, largest, total, values[0][r]);
    }
}

/* Whether this kernel has any sequence to process. All threads of the block check a part each: a scan by one warp takes much
 * longer. */
__device__ inline bool any_tile(const AttentionParams& a, i64 sequences) {
    bool any = false;
    for (i64 sequence = threadIdx.x; sequence < sequences; sequence += WARPS * 32) {
        i64 length = a.query_length[sequence];
        any = any || (length >= FEWEST && length < PROMPT);
    }
    return __syncthreads_or(any);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) attention(const __grid_constant__ PlainAttentionParams p) {
    launch_dependents_and_wait();
    const AttentionParams& a = p.attention;
    i64 tokens = a.tokens.count(), sequences = a.sequences.count(), sequence;
    Tile tile;
    if (FEWEST > 1 && !any_tile(a, sequences)) return;
    for (i64 number = blockIdx.x; find_tile(a, sequences, number, sequence, tile); number += gridDim.x) {
        attend(p, number, sequence, tile, tokens);
        /* Where tiles are not rare, each tile has its own block. */
        if (FEWEST == 1) break;
        __syncthreads();
    }
}
