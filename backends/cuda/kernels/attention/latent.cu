/*
 * paged_attention over latents on tensor cores (mma.m16n8k16, sm_80 and up), f16 or bf16 throughout: large keys, up to 576 elements,
 * that begin with their values and that many query heads share. For single tokens and for prefills.
 *
 * A tile is TOKENS queries of a sequence by HEADS query heads: ROWS rows, in ROW_TILES products of 16. A block owns a tile, or with
 * SPLIT one split of its keys, and iterates over KEYS keys at a time. Latents pass through a ring buffer of STAGES stages in shared
 * memory, filled by asynchronous copies: each is read from memory once for all rows, and both products read it from there. Rows in
 * shared memory are swizzled in segments of 128 bytes, so that ldmatrix has no bank conflicts.
 *
 * Scores: a warp owns 16 rows and an equal part of the keys. The warps of a row exchange their maxima through shared memory. Values:
 * a warp owns all rows and an equal part of the value's columns, so that no latent is read twice. Weights, rounded to the type of the
 * cache, and the factors of earlier sums pass from the first division to the second through shared memory. So an iteration has three
 * barriers: after the copies, the maxima and the weights.
 *
 * FIND says which tiles a launch has: FIND_TILES those of sequences of at least PROMPT queries (prompt.cuh), FIND_ROWS each row,
 * FIND_SINGLES the row of each sequence that has only one. With SPLIT, blocks write unnormalised results to scratch memory, and
 * latent_combine merges them in the order of the splits. The number of splits of a row depends only on its number of keys.
 *
 * Grid: (tiles) for FIND_TILES, else (KV heads times tiles per head group, rows or sequences, splits). Bytes: the latents once per
 * tile and KV head. Floor: the latents over read bandwidth for up to about 64 rows, beyond that the rate of mma.sync.
 */
#define FIND_TILES 0
#define FIND_ROWS 1
#define FIND_SINGLES 2

#define THREADS (WARPS * 32)
/* Rows of a tile with their padding, and warps that share its rows. */
#define CAPACITY (ROW_TILES * 16)
#define KEY_WARPS (WARPS / ROW_TILES)
/* Products of 8 keys of a warp. */
#define EIGHTS (KEYS / KEY_WARPS / 8)
/* Vectors of 8 elements of a row in shared memory, its bytes, and steps of 32 elements. */
#define VECTORS_OF_KEY ((KEY_SIZE + 63) / 64 * 8)
#define PITCH (VECTORS_OF_KEY * 16)
#define STEPS ((KEY_SIZE + 31) / 32)
/* Products of 16 columns of a warp. */
#define COLUMN_TILES ((VALUE_SIZE / 16 + WARPS - 1) / WARPS)
/* Bytes of a row of weights, padded against bank conflicts. */
#define WEIGHT_PITCH (KEYS * 2 + 16)
/* Keys that a warp copies. */
#define OWN_KEYS (KEYS / WARPS)
/* Partial results of a row: values, maximum and sum, padded to whole vectors. */
#define PARTIAL_ROW (VALUE_SIZE + 4)
/* The minimum number of iterations of a split. */
#define LEAST_UNITS 4
#define LN2 0.6931471805599453f

extern __shared__ __align__(128) u8 memory[];

/* Vector `i` of a swizzled row. */
__device__ inline u8* vector_at(u8* rows, int row, int i) { return rows + row * PITCH + ((i & ~7) | ((i ^ row) & 7)) * 16; }

#if FIND == FIND_TILES
/* The tile of a block. */
__device__ inline bool find(const AttentionParams& a, int tokens, int, int, Tile& tile) {
    Search search;
    return find_tile(a, a.sequences.count(), tokens, blockIdx.x, search, tile);
}
#else
/* The tile of a row, or of a sequence with one row, and a column of the grid. */
__device__ inline bool find(const AttentionParams& a, int tokens, int entry, int column, Tile& tile) {
    const int sequences = (int)a.sequences.count(), lane = threadIdx.x % 32;
    int sequence = -1;
#if FIND == FIND_SINGLES
    if (entry < sequences && a.query_length[entry] == 1) sequence = entry;
#else
    auto owns = [&](int number) {
        if (number >= sequences) return false;
        const int start = a.query_start[number];
        return start <= entry && entry - start < a.query_length[number];
    };
    /* The sequence with the row's own index is tried first. */
    if (owns(entry)) sequence = entry;
    for (int base = 0; sequence < 0 && base < sequences; base += 32) {
        const u32 found = __ballot_sync(0xffffffffu, owns(base + lane));
        if (found) sequence = base + __ffs(found) - 1;
    }
#endif
    if (sequence < 0) return false;
    tile.pages = a.table.row(sequence);
    tile.start = a.query_start[sequence];
    tile.row = FIND == FIND_SINGLES ? tile.start : entry;
    tile.count = 1;
    tile.total = a.kv_length[sequence];
    tile.before = tile.total - a.query_length[sequence];
    tile.position = tile.before + tile.row - tile.start;
    tile.kv_head = column / (int)a.parts;
    tile.head = (int)(tile.kv_head * a.group + column % (int)a.parts * HEADS);
    bound_keys(a, tile);
    return tile.row >= 0 && tile.row < tokens;
}
#endif

/* How the keys of a tile are divided: units of KEYS keys from key `begin` on, `share` of them for each of `live` splits. */
struct Division {
    int begin, units, share, live;

    __device__ inline Division(const Tile& tile, int splits) {
        begin = tile.from / KEYS * KEYS;
        units = tile.to > begin ? (tile.to - begin + KEYS - 1) / KEYS : 0;
        live = min(splits, units / LEAST_UNITS);
        live = live < 1 ? 1 : live;
        share = (units + live - 1) / live;
        live = share > 0 ? (units + share - 1) / share : 1;
    }
};

/* The factor of the weighted values of a row, and its log_sum_exp, from the maximum of its scores in base 2 and the sum of its
 * weights. */
__device__ inline void finish(const AttentionParams& a, int head, float top, float total, float& factor, float& log) {
    const float unit = 1.0f / (1 << LARGEST);
    factor = 0.0f;
    log = -infinity();
    total *= unit;
    if (total == 0.0f) return;
    float maximum = top * LN2, shrink = 1.0f;
    if (a.sinks) {
        const float sink = a.sinks[head], larger = fmaxf(maximum, sink);
        shrink = expf(maximum - larger);
        total = total * shrink + expf(sink - larger);
        maximum = larger;
    }
    factor = shrink / total * unit;
    log = maximum + logf(total);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) latent(const __grid_constant__ LatentParams p) {
    launch_dependents_and_wait();
#if __CUDA_ARCH__ >= 800
    const AttentionParams& a = p.attention;
    u8* const queries = memory;
    u8* const ring = queries + CAPACITY * PITCH;
    u8* const weights = ring + STAGES * KEYS * PITCH;
    /* Maxima, and at the end sums, of the rows in each part of the keys; factors of earlier sums; final maxima. */
    float* const maxima = (float*)(weights + CAPACITY * WEIGHT_PITCH);
    float* const factors = maxima + KEY_WARPS * CAPACITY;
    float* const tops = factors + CAPACITY;
    /* Whether the keys of each stage exist. */
    u8* const present = (u8*)(tops + CAPACITY);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_tile = warp % ROW_TILES, key_warp = warp / ROW_TILES;
    const int tokens = (int)a.tokens.count();
    Tile tile;
    if (!find(a, tokens, blockIdx.y, blockIdx.x, tile)) return;
    const Division division(tile, SPLIT ? (int)p.splits : 1);
    const int split = FIND == FIND_TILES ? 0 : blockIdx.z;
    if (split >= division.live) return;
    const int first = split * division.share, end = min(first + division.share, division.units);

    for (int row = warp; row < CAPACITY; row += WARPS) {
        const int query = tile.row + row / HEADS;
        const bool real = row < ROWS && row / HEADS < tile.count && query >= 0 && query < tokens;
        const Q* from = real ? a.query.row(query) + (i64)(tile.head + row % HEADS) * KEY_SIZE : a.query.row(0);
        for (int i = lane; i < VECTORS_OF_KEY; i += 32) {
            const bool own = real && i * 8 < KEY_SIZE;
            copy_ahead((Vector*)vector_at(queries, row, i), own ? from + i * 8 : from, own);
        }
    }

    /* The page of the lane's key among those that its warp copies; negative if the key does not exist. */
    auto look_up = [&](int unit) {
        const int at = division.begin + unit * KEYS + warp * OWN_KEYS + lane;
        if (lane >= OWN_KEYS || at < tile.from || at >= tile.to) return -1;
        const int page = tile.pages[at / SLOTS];
        return page < (int)a.pages ? page : -1;
    };
    auto fetch = [&](int unit, int stage, int page) {
        if (unit >= end) return;
        u8* const to = ring + stage * KEYS * PITCH;
        if (lane < OWN_KEYS) present[stage * KEYS + warp * OWN_KEYS + lane] = page >= 0;
#pragma unroll
        for (int k = 0; k < OWN_KEYS; ++k) {
            const int its = __shfl_sync(0xffffffffu, page, k), row = warp * OWN_KEYS + k;
            const int slot = (division.begin + unit * KEYS + row) % SLOTS;
            const K* from = a.keys;
            if (its >= 0) from += its * a.key_strides.page + tile.kv_head * a.key_strides.head + slot * a.key_strides.slot;
#pragma unroll
            for (int i = 0; i < VECTORS_OF_KEY; i += 32) {
                const int vector = i + lane;
                const bool real = its >= 0 && vector * 8 < KEY_SIZE;
                if (vector < VECTORS_OF_KEY) copy_ahead((Vector*)vector_at(to, row, vector), real ? from + vector * 8 : a.keys, real);
            }
        }
    };
    int page = look_up(first);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        fetch(first + i, i, page);
        commit_copies();
        page = look_up(first + i + 1);
    }

    float sums[ROW_TILES][COLUMN_TILES * 2][4] = {};
    /* Of the two rows whose scores the lane has. */
    float maximum[2], sum[2];
    [[maybe_unused]] float slope[2];
    int position[2], token_row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row_tile * 16 + lane / 4 + r * 8, token = min(row / HEADS, tile.count - 1);
        maximum[r] = -infinity();
        sum[r] = 0.0f;
        position[r] = tile.position + token;
        token_row[r] = tile.row + token;
        slope[r] = ALIBI && row < ROWS ? a.alibi[tile.head + row % HEADS] : 0.0f;
    }
    int stage = 0;
    for (int unit = first; unit < end; ++unit) {
        await_copies<STAGES - 2>();
        /* After this barrier, all warps have read the stage before, which is refilled now. */
        __syncthreads();
        fetch(unit + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1, page);
        commit_copies();
        page = look_up(unit + STAGES);

        u8* const keys = ring + stage * KEYS * PITCH;
        /* Even and odd steps are added up apart, so that fewer products wait for each other. */
        float products[EIGHTS][2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 q[2][4];
            load_matrices(q[0], vector_at(queries, row_tile * 16 + lane % 16, step * 4 + lane / 16));
            load_matrices(q[1], vector_at(queries, row_tile * 16 + lane % 16, step * 4 + 2 + lane / 16));
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
                u32 k[4];
                load_matrices(k, vector_at(keys, (key_warp * EIGHTS + e) * 8 + lane % 8, step * 4 + lane / 8));
                multiply(products[e][0], q[0][0], q[0][1], q[0][2], q[0][3], k[0], k[1]);
                multiply(products[e][1], q[1][0], q[1][1], q[1][2], q[1][3], k[2], k[3]);
            }
        }
        const int key = division.begin + unit * KEYS;
        const bool masked = !see_all(a, tile, tile.position, tile.position + tile.count - 1, key, KEYS);
        float scores[EIGHTS][4], top[2] = {-infinity(), -infinity()};
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = (key_warp * EIGHTS + e) * 8 + lane % 4 * 2 + i % 2, at = key + column, r = i / 2;
                float score = (products[e][0][i] + products[e][1][i]) * a.scale;
#if SOFTCAP
                score = a.softcap * tanhf(score / a.softcap);
#endif
#if ALIBI
                score -= slope[r] * (float)(position[r] - at);
#endif
                const bool seen = present[stage * KEYS + column] && (!masked || sees(a, tile, position[r], token_row[r], at));
                scores[e][i] = seen ? score * LOG2E : -infinity();
                top[r] = fmaxf(top[r], scores[e][i]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
            if (lane % 4 == 0) maxima[key_warp * CAPACITY + row_tile * 16 + lane / 4 + r * 8] = top[r];
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = row_tile * 16 + lane / 4 + r * 8;
            float highest = maximum[r];
#pragma unroll
            for (int w = 0; w < KEY_WARPS; ++w) highest = fmaxf(highest, maxima[w * CAPACITY + row]);
            /* While no key has been seen, all powers must be 0 instead of NaN. */
            const float base = highest == -infinity() ? 0.0f : highest, factor = exp2_fast(maximum[r] - base);
            maximum[r] = highest;
            sum[r] *= factor;
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
                const float low = exp2_fast(scores[e][r * 2] - base + LARGEST), high = exp2_fast(scores[e][r * 2 + 1] - base + LARGEST);
                sum[r] += low + high;
                *(u32*)(weights + row * WEIGHT_PITCH + ((key_warp * EIGHTS + e) * 8 + lane % 4 * 2) * 2) = pack(low, high);
            }
            if (key_warp == 0 && lane % 4 == 0) factors[row] = factor;
        }
        __syncthreads();

        float factor[ROW_TILES][2];
        bool moved = false;
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                factor[t][r] = factors[t * 16 + lane / 4 + r * 8];
                moved = moved || factor[t][r] != 1.0f;
            }
        }
        if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
                for (int n = 0; n < COLUMN_TILES * 8; ++n) sums[t][n / 4][n % 4] *= factor[t][n % 4 / 2];
            }
        }
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            u32 w[ROW_TILES][4];
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) {
                load_matrices(w[t], weights + (t * 16 + lane % 16) * WEIGHT_PITCH + (step * 2 + lane / 16) * 16);
            }
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; ++n) {
                const int column = warp * COLUMN_TILES + n;
                if (column * 16 >= VALUE_SIZE) break;
                u32 v[4];
                load_transposed(v, vector_at(keys, step * 16 + lane % 16, column * 2 + lane / 16));
#pragma unroll
                for (int t = 0; t < ROW_TILES; ++t) {
                    multiply(sums[t][n * 2], w[t][0], w[t][1], w[t][2], w[t][3], v[0], v[1]);
                    multiply(sums[t][n * 2 + 1], w[t][0], w[t][1], w[t][2], w[t][3], v[2], v[3]);
                }
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    await_copies<0>();

    /* The maxima of the last iteration were read before its last barrier. */
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row_tile * 16 + lane / 4 + r * 8;
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        if (lane % 4 == 0) maxima[key_warp * CAPACITY + row] = sum[r];
        if (lane % 4 == 0 && key_warp == 0) tops[row] = maximum[r];
    }
    __syncthreads();
    float* const partial = p.partial + (((i64)blockIdx.y * gridDim.x + blockIdx.x) * p.splits + split) * (HEADS * PARTIAL_ROW);
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = t * 16 + lane / 4 + r * 8, query = tile.row + row / HEADS, head = tile.head + row % HEADS;
            if (row >= ROWS || row / HEADS >= tile.count || query < 0 || query >= tokens) continue;
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < KEY_WARPS; ++w) total += maxima[w * CAPACITY + row];
            const bool first_lane = warp == 0 && lane % 4 == 0;
            const int left = warp * COLUMN_TILES * 16 + lane % 4 * 2;
            if (SPLIT && division.live > 1) {
                float* const to = partial + row * PARTIAL_ROW;
#pragma unroll
                for (int n = 0; n < COLUMN_TILES * 2; ++n) {
                    if (left + n * 8 < VALUE_SIZE) *(float2*)(to + left + n * 8) = make_float2(sums[t][n][r * 2], sums[t][n][r * 2 + 1]);
                }
                if (first_lane) *(float2*)(to + VALUE_SIZE) = make_float2(tops[row], total);
                continue;
            }
            float factor, log;
            finish(a, head, tops[row], total, factor, log);
            Q* const to = a.y.row(query) + (i64)head * VALUE_SIZE;
#pragma unroll
            for (int n = 0; n < COLUMN_TILES * 2; ++n) {
                if (left + n * 8 >= VALUE_SIZE) break;
                const float low = sums[t][n][r * 2] * factor, high = sums[t][n][r * 2 + 1] * factor;
#if VECTORS
                *(u32*)(to + left + n * 8) = pack(low, high);
#else
                to[left + n * 8] = narrow<Q>(low);
                to[left + n * 8 + 1] = narrow<Q>(high);
#endif
            }
            if (first_lane && a.log_sum_exp.first) a.log_sum_exp.at(query, head) = log;
        }
    }
#endif
}

#if FIND != FIND_TILES
/* Warps of a block of latent_combine, each with every eighth split, and values of a block. */
#define MERGERS 8
#define PART 128
#define PARTS ((VALUE_SIZE + PART - 1) / PART)

/*
 * Merges the splits of rows that have several. A block has 128 values of a head of a row. Grid: (KV heads times tiles per head group
 * times HEADS times parts of the values, rows or sequences).
 */
extern "C" __global__ void __launch_bounds__(MERGERS * 32) latent_combine(const __grid_constant__ LatentParams p) {
    launch_dependents_and_wait();
    const AttentionParams& a = p.attention;
    __shared__ float4 shared[MERGERS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = blockIdx.x % PARTS, own = blockIdx.x / PARTS % HEADS;
    const int column = blockIdx.x / PARTS / HEADS, columns = gridDim.x / PARTS / HEADS;
    Tile tile;
    if (!find(a, (int)a.tokens.count(), blockIdx.y, column, tile)) return;
    const Division division(tile, (int)p.splits);
    if (division.live == 1) return;
    const float* from = p.partial + ((i64)blockIdx.y * columns + column) * p.splits * (HEADS * PARTIAL_ROW) + own * PARTIAL_ROW;
    const int next = HEADS * PARTIAL_ROW, at = part * PART + lane * 4;

    float top = -infinity(), total = 0.0f;
    for (int s = lane; s < division.live; s += 32) top = fmaxf(top, __ldcg(from + (i64)s * next + VALUE_SIZE));
#pragma unroll
    for (int distance = 16; distance; distance /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
    const float base = top == -infinity() ? 0.0f : top;
    for (int s = lane; s < division.live; s += 32) {
        const float2 its = __ldcg((const float2*)(from + (i64)s * next + VALUE_SIZE));
        total += its.y * exp2_fast(its.x - base);
    }
    total = warp_sum(total);
    float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    auto add = [&](float4 values, float factor) {
        merged.x += values.x * factor;
        merged.y += values.y * factor;
        merged.z += values.z * factor;
        merged.w += values.w * factor;
    };
    if (at < VALUE_SIZE) {
#pragma unroll 4
        for (int s = warp; s < division.live; s += MERGERS) {
            const float its = __ldcg(from + (i64)s * next + VALUE_SIZE);
            add(__ldcg((const float4*)(from + (i64)s * next + at)), exp2_fast(its - base));
        }
    }
    shared[warp][lane] = merged;
    __syncthreads();
    if (warp > 0 || at >= VALUE_SIZE) return;
#pragma unroll
    for (int w = 1; w < MERGERS; ++w) add(shared[w][lane], 1.0f);
    const int head = tile.head + own;
    float factor, log;
    finish(a, head, top, total, factor, log);
    Q* const to = a.y.row(tile.row) + (i64)head * VALUE_SIZE + at;
    to[0] = narrow<Q>(merged.x * factor);
    to[1] = narrow<Q>(merged.y * factor);
    to[2] = narrow<Q>(merged.z * factor);
    to[3] = narrow<Q>(merged.w * factor);
    if (at == 0 && a.log_sum_exp.first) a.log_sum_exp.at(tile.row, head) = log;
}
#endif
