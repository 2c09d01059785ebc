/*
 * paged_attention of single tokens, for few tiles: the keys of a tile are split until all SMs have work. token.cuh defines tiles
 * and the work of a warp; decode_even.cu is for many tiles.
 *
 * Grid: (KV heads times tiles per head group, rows, splits of the keys), blocks of 4 warps. With SINGLES the grid has sequences
 * instead of rows, and sequences of several tokens, the prefill of the step, are skipped. In this order neighbouring blocks read
 * the heads of the same pages at about the same time; these are contiguous, and whole pages are read faster than 4 KiB pieces in
 * random order.
 *
 * A warp processes 16 keys at a time, a unit: unit `u` belongs to warp `u % 4` of split `u / 4 % live`, where `live`, the number
 * of active splits, depends on the length. So the first unit of a warp does not depend on the length, and its page is looked up
 * together with it.
 *
 * Each warp keeps the running maximum, sum and weighted values of its keys; the block merges its warps in shared memory, and the
 * CLUSTER splits of a cluster are merged through distributed shared memory: each block sends every other block the elements which
 * that block merges. Several clusters are merged through scratch memory by the block that ends last, in the order of the splits;
 * it resets the counter of finished blocks to 0.
 *
 * With QUANTISED, the number of blocks of a row, rows are also quantised as by quant_per_token, each by the block of the row that
 * ends last. This replaces a launch that would wait for all rows.
 *
 * Bytes: keys and values once. Floor for few keys: a chain of dependent reads (lengths and page, keys, other blocks' results, and
 * the wait for the preceding kernel). Measured figures: docs/src/performance/cuda.md.
 */
#define WARPS 4
#define VALUE_ROW (VALUE_SIZE + 4)
/* Results of a tile, 4 elements each. */
#define ITEMS (HEADS * (VALUE_SIZE / 4))

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(1, 1, CLUSTER)
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/* Store to the shared memory of another block of the cluster, at the offset that `at` has in this block's. */
__device__ inline void store_to(float4* at, float4 v, int rank) {
    asm volatile("{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};\n}"
        :: "r"((u32)__cvta_generic_to_shared(at)), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ inline void store_to(float2* at, float2 v, int rank) {
    asm volatile("{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.v2.f32 [there], {%2, %3};\n}"
        :: "r"((u32)__cvta_generic_to_shared(at)), "r"(rank), "f"(v.x), "f"(v.y) : "memory");
}
#else
#define CLUSTERED
__device__ inline void arrive_at_cluster() {}
__device__ inline void await_cluster() { __syncthreads(); }
__device__ inline void store_to(float4* at, float4 v, int) { *at = v; }
__device__ inline void store_to(float2* at, float2 v, int) { *at = v; }
#endif

/* The work of a block: the token's row and position, and its sequence. */
struct Tile { int sequence, row, position, keys; };

#if SINGLES
/* The row of a sequence with exactly one row; false for all others. */
__device__ bool find_tile(const AttentionParams& a, Extent::Loaded loaded, int sequence, Tile& tile) {
    int length = a.query_length[sequence];
    tile.sequence = sequence;
    tile.row = a.query_start[sequence];
    tile.keys = a.kv_length[sequence];
    tile.position = tile.keys - 1;
    return sequence < (int)a.sequences.count(loaded) && length == 1 && tile.row >= 0;
}
#else
/* The sequence of a row; false if it belongs to none. The sequence with the row's own index is tried first. */
__device__ bool find_tile(const AttentionParams& a, Extent::Loaded loaded, int row, Tile& tile) {
    int lane = threadIdx.x % 32, guess = row < (int)a.sequences.rows ? row : 0;
    int start = 0, length = 0, total = 0;
    if (a.sequences.rows > 0) {
        start = a.query_start[guess];
        length = a.query_length[guess];
        total = a.kv_length[guess];
    }
    const int sequences = (int)a.sequences.count(loaded);
    tile.row = row;
    if (guess < sequences && start <= row && row - start < length) {
        tile.sequence = guess;
        tile.keys = total;
        tile.position = total - length + row - start;
        return true;
    }
    for (int base = 0; base < sequences; base += 32) {
        int here = base + lane;
        bool own = false;
        if (here < sequences) {
            start = a.query_start[here];
            length = a.query_length[here];
            own = start <= row && row - start < length;
        }
        u32 found = __ballot_sync(0xffffffffu, own);
        if (found) {
            int owner = __ffs(found) - 1;
            tile.sequence = base + owner;
            tile.keys = a.kv_length[tile.sequence];
            tile.position = tile.keys - __shfl_sync(0xffffffffu, length - row + start, owner);
            return true;
        }
    }
    return false;
}
#endif

/* Adds a partial result, with its own maximum and sum, to a total whose maximum is known. */
__device__ inline void merge(float4& merged, float& total, float largest, float maximum, float amount, float4 part) {
    if (amount == 0.0f) return;
    float factor = power(maximum - largest);
    total += amount * factor;
    merged.x += part.x * factor;
    merged.y += part.y * factor;
    merged.z += part.z * factor;
    merged.w += part.w * factor;
}

/* The number of active splits for this many units: up to one cluster, as many as there is work for, or twice as many; beyond
 * that, whole clusters. */
__device__ inline int live_splits(int units, int splits) {
    int live = (units + WARPS - 1) / WARPS;
    if (live > CLUSTER) live = CLUSTER > 1 && live <= 2 * CLUSTER ? CLUSTER : (live + CLUSTER - 1) / CLUSTER * CLUSTER;
    return live < 1 ? 1 : live > splits ? splits : live;
}

/*
 * Prefetches the first AHEAD units of each warp into the L2 while the preceding kernel still runs, because that one often leaves memory
 * idle. Lengths and pages may be stale here, as a preceding kernel may write them: they are read bypassing the L1, used only as hints of
 * what to prefetch, and pages are checked. Only the FIRST blocks can be resident before the preceding kernel ends.
 */
__device__ inline void fetch_ahead(const AttentionParams& a, int splits) {
#if AHEAD && __CUDA_ARCH__ >= 900
    int lane = threadIdx.x % 32, sequence = blockIdx.y;
    if (lane >= AHEAD || sequence >= a.sequences.rows || (SINGLES && __ldcg(a.query_length + sequence) != 1)) return;
    int keys = __ldcg(a.kv_length + sequence);
    int units = (keys + UNIT - 1) / UNIT, live = live_splits(units, splits);
    int unit = blockIdx.z * WARPS + threadIdx.x / 32 + lane * live * WARPS, entry = unit * UNIT / SLOTS;
    if (blockIdx.z >= live || unit >= units || entry >= (int)a.table_columns) return;
    int page = __ldcg(a.table.row(sequence) + entry), slot = unit * UNIT % SLOTS;
    if (page < 0 || page >= (int)a.pages) return;
    ask_l2(a, page, blockIdx.x / (int)a.parts, slot);
#endif
}

/* Writes 4 elements of a row from the sum of weighted values. */
__device__ inline void finish(const AttentionParams& a, i64 row, int head, int at, float maximum, float sum, float4 values) {
    Ending ending(a, head, maximum, sum);
    Q* y = a.y.row(row) + head * VALUE_SIZE + at;
    y[0] = narrow<Q>(ending.of(values.x));
    y[1] = narrow<Q>(ending.of(values.y));
    y[2] = narrow<Q>(ending.of(values.z));
    y[3] = narrow<Q>(ending.of(values.w));
    if (a.log_sum_exp.first && at == 0) a.log_sum_exp.at(row, head) = ending.log();
}

#if QUANTISED
/* Elements of a row, and vectors of 8 elements per thread. */
#define COLUMNS (QUANTISED * HEADS * VALUE_SIZE)
#define OWN ((COLUMNS + WARPS * 32 * 8 - 1) / (WARPS * 32 * 8))

/* Quantises a row, by the block of the row that ends last. The other blocks exit, which frees their SMs for the next kernel. */
__device__ inline void quantise_row(const AttentionParams& a, const QuantisedRows& quantised, int row) {
    __shared__ float tops[WARPS];
    __shared__ bool last;
    int lane = threadIdx.x % 32;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = quantised.counters + blockIdx.y;
        last = atomicAdd(counter, 1u) == QUANTISED - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    Vector read[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        int at = (i * WARPS * 32 + threadIdx.x) * 8;
        read[i] = {};
        if (at < COLUMNS) {
            uint4 v = __ldcg((const uint4*)(a.y.row(row) + at));
            read[i] = {{v.x, v.y, v.z, v.w}};
        }
    }
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) most = fmaxf(most, fabsf(Lanes<Q>::get(read[i], k)));
    }
    most = warp_maximum(most);
    if (lane == 0) tops[threadIdx.x / 32] = most;
    __syncthreads();
    float scale = warp_maximum(tops[lane % WARPS]) / 127.0f, inverse = reciprocal(scale);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        int at = (i * WARPS * 32 + threadIdx.x) * 8;
        if (at >= COLUMNS) break;
        float value[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] = Lanes<Q>::get(read[i], k);
        *(uint2*)(quantised.y.row(row) + at) = quantise_eight(value, scale, inverse);
    }
    if (threadIdx.x == 0) quantised.scales[row] = scale;
}
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(WARPS * 32) decode(const __grid_constant__ DecodeParams p) {
    const AttentionParams& a = p.attention;
    __shared__ float maxima[WARPS][HEADS], amounts[WARPS][HEADS];
    __shared__ __align__(16) float sums[WARPS][HEADS][VALUE_ROW];
    /*
     * The buffer through which blocks of a cluster send elements, with their maximum and sum, to the block that merges them. A
     * block without a cluster uses the memory of its first warp's results instead, where each thread has already read what it
     * overwrites.
     */
#if CLUSTER > 1
    __shared__ float4 left[ITEMS + CLUSTER];
    __shared__ float2 left_scales[ITEMS + CLUSTER];
    auto left_at = [&](int place, int, int) { return left + place; };
    auto scales_at = [&](int place, int) { return left_scales + place; };
#else
    auto left_at = [&](int, int head, int at) { return (float4*)&sums[0][head][at]; };
    auto scales_at = [&](int, int head) { return (float2*)&sums[0][head][VALUE_SIZE]; };
#endif
    __shared__ bool last;
    launch_dependents();
    if (blockIdx.y * gridDim.x + blockIdx.x < FIRST) fetch_ahead(a, (int)p.splits);
    wait_for_predecessor();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    int split = blockIdx.z, splits = (int)p.splits, first_unit = split * WARPS + warp;

    const Extent::Loaded loaded_tokens = a.tokens.load(), loaded_sequences = a.sequences.load();
    /* Loads the first page of the most likely sequence together with the lengths. */
    int guess = blockIdx.y < a.sequences.rows ? blockIdx.y : 0, entry = first_unit * UNIT / SLOTS, guessed = -1;
    if (SLOTS % UNIT == 0 && a.sequences.rows > 0 && entry < (int)a.table_columns) guessed = a.table.at(guess, entry);
    /* The address of a row's queries does not depend on the sequence. */
    const int first = first_head(a, blockIdx.x);
    Queries queries;
    if (!SINGLES) queries.read(a, blockIdx.y, first);
    Tile tile;
    if (!find_tile(a, loaded_sequences, blockIdx.y, tile)) return;
    bool real = tile.row < a.tokens.count(loaded_tokens);
    if (SINGLES && !real) return;
    int from = 0, to_key = tile.keys;
    if (MASK == 1) to_key = tile.position + 1 < to_key ? tile.position + 1 : to_key;
    if (WINDOW && tile.position - (int)a.window + 1 > 0) from = tile.position - (int)a.window + 1;
    if (to_key > (int)a.table_columns * SLOTS) to_key = (int)a.table_columns * SLOTS;
    int units = to_key > from ? (to_key + UNIT - 1) / UNIT : 0, live = live_splits(units, splits);
    if (split >= live) return;
    /* Blocks of the cluster must have begun before others write to their shared memory. Exited blocks count as arrived. */
    arrive_at_cluster();

    int kv_head = blockIdx.x / (int)a.parts;
    if (SINGLES) queries.read(a, tile.row, first);
    Running running;
    running.clear();

    Span span = {a.table.row(tile.sequence), from, to_key};
    /* Pages are looked up STAGES units ahead. 2 bits for each stage say which of a lane's keys exist. */
    const int step = live * WARPS;
    Vector* own = ring + warp * STAGES * STAGE;
    int pages[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        int unit = first_unit + i * step;
        bool known = i == 0 && guess == tile.sequence;
        pages[i] = SLOTS % UNIT != 0 || unit >= units ? -1 : known ? guessed : span.table[unit * UNIT / SLOTS];
    }
    u32 present = 0;
    auto fetch = [&](int unit, int stage, int page) {
        present &= ~(3u << (2 * stage));
        present |= fetch_unit(a, span, kv_head, unit, page, own + stage * STAGE) << (2 * stage);
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES; ++i) fetch(first_unit + i * step, i, pages[i]);

    int stage = 0;
    for (int unit = first_unit; unit < units; unit += step) {
        int base = unit * UNIT, later = unit + STAGES * step;
        int page_later = SLOTS % UNIT == 0 && later < units ? span.table[later * UNIT / SLOTS] : -1;
        u32 there = present >> (2 * stage) & 3;
        await_copies<STAGES - 1>();
        __syncwarp();
        running.take(own + stage * STAGE, there, tile.position - base, a.scale, a.softcap, queries);
        /* Refills the stage just read, once all lanes have read it. */
        __syncwarp();
        fetch(later, stage, page_later);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

#pragma unroll
    for (int item = 0; item < EIGHTS * 2; ++item) {
        int eight = item / 2, i = item % 2, head = eight * 8 + part * 2 + i;
        float amount = sum_of_eight(running.sum[eight][i]);
        if (head >= HEADS) continue;
        if (group == 0) {
            maxima[warp][head] = running.shift[eight][i];
            amounts[warp][head] = amount;
        }
#pragma unroll
        for (int n = 0; n < VALUE_STEPS * 2; ++n) {
            if (n * 8 < VALUE_SIZE) sums[warp][head][n * 8 + group] = running.values[eight][n / 2][n % 2 * 2 + i];
        }
    }
    __syncthreads();

    /* Merges the block's warps, then the cluster's blocks, which share the elements of the result. */
    int rank = split % CLUSTER, clusters = (live + CLUSTER - 1) / CLUSTER, members = clusters > 1 ? CLUSTER : live;
    const int each = (ITEMS + members - 1) / members;
    await_cluster();
    for (int item = threadIdx.x; item < ITEMS; item += WARPS * 32) {
        int head = item / (VALUE_SIZE / 4), at = item % (VALUE_SIZE / 4) * 4, owner = item / each;
        float largest = -infinity(), total = 0.0f;
        float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = maxima[w][head] > largest ? maxima[w][head] : largest;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) merge(merged, total, largest, maxima[w][head], amounts[w][head], *(const float4*)&sums[w][head][at]);
        int place = rank * each + item - owner * each;
        store_to(left_at(place, head, at), merged, owner);
        /* A block without a cluster needs only one entry per head. */
        if (CLUSTER > 1 || at == 0) store_to(scales_at(place, head), make_float2(largest, total), owner);
    }
    __syncwarp();
    arrive_at_cluster();
    await_cluster();

    i64 slot = (i64)blockIdx.y * gridDim.x + blockIdx.x;
    float* partial = p.partial + slot * (splits / CLUSTER) * (HEADS * VALUE_ROW);
    for (int own = threadIdx.x; own < each && rank * each + own < ITEMS; own += WARPS * 32) {
        int item = rank * each + own, head = item / (VALUE_SIZE / 4), at = item % (VALUE_SIZE / 4) * 4;
        float largest = -infinity(), total = 0.0f;
        float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float2 scales[CLUSTER];
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            if (m >= members) break;
            scales[m] = *scales_at(m * each + own, head);
        }
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            if (m >= members) break;
            largest = scales[m].x > largest ? scales[m].x : largest;
        }
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            if (m >= members) break;
            merge(merged, total, largest, scales[m].x, scales[m].y, *left_at(m * each + own, head, at));
        }
        if (clusters == 1) {
            if (real) finish(a, tile.row, first + head, at, largest, total, merged);
        } else {
            float* out = partial + (split / CLUSTER * HEADS + head) * VALUE_ROW;
            __stcg((float4*)(out + at), merged);
            /* Every block that merges a part of the head writes the same value, so that no block waits for another. */
            if (at == 0 || own == 0) __stcg((float4*)(out + VALUE_SIZE), make_float4(largest, total, 0.0f, 0.0f));
        }
    }
#if QUANTISED
    if (real) quantise_row(a, p.quantised, tile.row);
    return;
#endif
    if (clusters == 1) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = p.counters + slot * CLUSTER + rank;
        last = atomicAdd(counter, 1u) == clusters - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    if (!last || !real) return;
    __threadfence();
    for (int own = threadIdx.x; own < each && rank * each + own < ITEMS; own += WARPS * 32) {
        int item = rank * each + own, head = item / (VALUE_SIZE / 4), at = item % (VALUE_SIZE / 4) * 4;
        const float* from = partial + head * VALUE_ROW;
        const int next = HEADS * VALUE_ROW;
        float largest = -infinity(), total = 0.0f;
#pragma unroll 8
        for (int c = 0; c < clusters; ++c) {
            float its = __ldcg(from + c * next + VALUE_SIZE);
            largest = its > largest ? its : largest;
        }
        float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int c = 0; c < clusters; ++c) {
            float2 its = __ldcg((const float2*)(from + c * next + VALUE_SIZE));
            merge(merged, total, largest, its.x, its.y, __ldcg((const float4*)(from + c * next + at)));
        }
        finish(a, tile.row, first + head, at, largest, total, merged);
    }
}
