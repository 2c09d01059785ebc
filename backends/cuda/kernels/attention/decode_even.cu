/*
 * paged_attention of single tokens, for many tiles: balances keys over persistent warps. token.cuh defines tiles and the work of
 * a warp; decode.cu is for few tiles.
 *
 * Work is counted in units of 16 keys. All units of the step form one sequence: for each entry, for each column (KV heads times
 * tiles per head group), the units of its keys. An entry is a row or, with SINGLES, a sequence; then only sequences of one token
 * are processed, the others are prefill. Grid: one persistent block per SM. Every warp takes an equal, contiguous share of the
 * units, so all warps finish together whatever the lengths of the sequences. A warp's ring buffer runs on across tile boundaries:
 * the next keys are loading while results are written.
 *
 * To find its share, each block first computes the prefix sum of the units of all entries, in shared memory.
 *
 * If several warps share a tile, each writes a partial result to scratch memory, and the warp that finishes last merges them in
 * order. A share has at most one incomplete tile at its start and one at its end, so each warp has two slots in scratch memory.
 * The merging warp resets the counter to 0.
 *
 * Bytes: keys and values once. Measured figures: docs/src/performance/cuda.md.
 */
#define THREADS (WARPS * 32)
/* Entries per thread in the prefix sum. */
#define ENTRIES_EACH ((ENTRIES + THREADS - 1) / THREADS)
/* Minimum number of units per share: smaller shares cost more to merge than they save. */
#define FEWEST 4
#define NONE (-2147483647 - 1)
/* Floats of a tile's partial result: vectors of 4 per lane, then the shift and the sum of every head. */
#define FOURS (EIGHTS * VALUE_STEPS)
#define PLACE (FOURS * 128 + EIGHTS * 16)

/* The entries of the step. */
struct Entries {
    /* Inclusive prefix sum of the units of a column, by entry. */
    int ends[ENTRIES];
    /* Position of the token, or NONE; and the row of a sequence, or the sequence of a row. */
    int position[ENTRIES], other[ENTRIES];
};

/* The keys that a token attends to. */
__device__ inline Span span_of(const AttentionParams& a, int position) {
    Span span = {nullptr, 0, position + 1};
    if (WINDOW && position - (int)a.window + 1 > 0) span.from = position - (int)a.window + 1;
    if (span.to > (int)a.table_columns * SLOTS) span.to = (int)a.table_columns * SLOTS;
    return span;
}

/* The number of units of a token's keys: at least one, because a warp must write its row. */
__device__ inline int units_of(const Span& span) {
    int units = span.to > span.from ? (span.to + UNIT - 1) / UNIT - span.from / UNIT : 0;
    return units > 1 ? units : 1;
}

/* Collects all entries and computes the prefix sum of their units. All threads of the block must call. */
__device__ inline void gather(const AttentionParams& a, i64 tokens, i64 sequences, Entries& all) {
    __shared__ int of_warp[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < ENTRIES; i += THREADS) all.position[i] = NONE;
    __syncthreads();
    for (int sequence = threadIdx.x; sequence < (int)sequences; sequence += THREADS) {
        int start = a.query_start[sequence], length = a.query_length[sequence], total = a.kv_length[sequence];
#if SINGLES
        if (length != 1 || start < 0 || start >= tokens) continue;
        all.position[sequence] = total - 1;
        all.other[sequence] = start;
#else
        for (int i = start < 0 ? -start : 0; i < length && start + i < tokens; ++i) {
            all.position[start + i] = total - length + i;
            all.other[start + i] = sequence;
        }
#endif
    }
    __syncthreads();
    int units[ENTRIES_EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < ENTRIES_EACH; ++i) {
        int entry = threadIdx.x * ENTRIES_EACH + i, position = entry < ENTRIES ? all.position[entry] : NONE;
        units[i] = position == NONE ? 0 : units_of(span_of(a, position));
        sum += units[i];
    }
    int upto = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        int before = __shfl_up_sync(0xffffffffu, upto, distance);
        if (lane >= distance) upto += before;
    }
    if (lane == 31) of_warp[warp] = upto;
    __syncthreads();
    int before = upto - sum;
    for (int w = 0; w < warp; ++w) before += of_warp[w];
#pragma unroll
    for (int i = 0; i < ENTRIES_EACH; ++i) {
        int entry = threadIdx.x * ENTRIES_EACH + i;
        before += units[i];
        if (entry < ENTRIES) all.ends[entry] = before;
    }
    __syncthreads();
}

/* A position in the sequence of all units. */
struct Cursor {
    int at, entry, column, unit, units, position;
    Span span;

    __device__ inline void enter(const AttentionParams& a, const Entries& all) {
        position = all.position[entry];
        span = span_of(a, position);
        span.table = a.table.row(SINGLES ? entry : all.other[entry]);
        units = all.ends[entry] - (entry > 0 ? all.ends[entry - 1] : 0);
    }

    __device__ inline Cursor(const AttentionParams& a, const Entries& all, int columns, int number) {
        at = number;
        /* Binary search for the entry that contains the unit. */
        int low = 0, high = ENTRIES - 1;
        while (low < high) {
            int middle = (low + high) / 2;
            if (all.ends[middle] * columns > at) high = middle;
            else low = middle + 1;
        }
        entry = low;
        enter(a, all);
        int within = at - (all.ends[entry] - units) * columns;
        column = within / units;
        unit = within % units;
    }

    /* Advances to the next unit, which exists while `at` is less than the total. */
    __device__ inline void next(const AttentionParams& a, const Entries& all, int columns, int end) {
        ++at;
        if (++unit < units) return;
        unit = 0;
        if (++column < columns || at >= end) return;
        column = 0;
        do ++entry;
        while (all.ends[entry] == all.ends[entry - 1]);
        enter(a, all);
    }

    /* The unit's index within the sequence, and its page. */
    __device__ inline int number() const { return span.from / UNIT + unit; }
    __device__ inline int page(const AttentionParams& a) const {
        int index = number() * UNIT / SLOTS;
        return index < (int)a.table_columns ? span.table[index] : -1;
    }
};

/* Writes the final result of a tile. */
__device__ inline void finish(const AttentionParams& a, i64 row, int first, const Running& running, const float (&amount)[EIGHTS][2]) {
    int lane = threadIdx.x % 32, part = lane % 4, group = lane / 4;
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int head = eight * 8 + part * 2 + i;
            bool real = head < HEADS;
            Ending ending(a, first + (real ? head : 0), running.shift[eight][i], amount[eight][i]);
            factor[i] = ending.of(1.0f);
            if (real && a.log_sum_exp.first && group == 0) a.log_sum_exp.at(row, first + head) = ending.log();
        }
        /* A lane has one element of two heads; exchanged, it writes two elements of one head. */
        Q* y = a.y.row(row) + (first + eight * 8 + group) * VALUE_SIZE + part * 2;
#pragma unroll
        for (int n = 0; n < VALUE_STEPS * 2; ++n) {
            const float* both = running.values[eight][n / 2] + n % 2 * 2;
            u32 neighbours = turned(pair(both[0] * factor[0], both[1] * factor[1]));
            if (eight * 8 + group < HEADS && n * 8 < VALUE_SIZE) *(u32*)(y + n * 8) = neighbours;
        }
    }
}

/* Writes a partial result of a tile to scratch memory. */
__device__ inline void leave(float* place, const Running& running, const float (&amount)[EIGHTS][2]) {
    int lane = threadIdx.x % 32, part = lane % 4;
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        if (eight * 8 + part * 2 >= HEADS) continue;
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; ++step) {
            const float (&four)[4] = running.values[eight][step];
            __stcg((float4*)place + (eight * VALUE_STEPS + step) * 32 + lane, make_float4(four[0], four[1], four[2], four[3]));
        }
        float4 scales = make_float4(running.shift[eight][0], amount[eight][0], running.shift[eight][1], amount[eight][1]);
        if (lane < 4) __stcg((float4*)(place + FOURS * 128) + eight * 4 + part, scales);
    }
}

/* Merges the partial results of a tile. */
__device__ inline void add(const float* place, Running& running, float (&amount)[EIGHTS][2]) {
    int lane = threadIdx.x % 32, part = lane % 4;
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        if (eight * 8 + part * 2 >= HEADS) continue;
        float4 scales = __ldcg((const float4*)(place + FOURS * 128) + eight * 4 + part);
        float4 four[VALUE_STEPS];
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; ++step) four[step] = __ldcg((const float4*)place + (eight * VALUE_STEPS + step) * 32 + lane);
        float shift[2] = {scales.x, scales.z}, sum[2] = {scales.y, scales.w}, old[2], its[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = fmaxf(shift[i], running.shift[eight][i]);
            old[i] = power(running.shift[eight][i] - top);
            its[i] = power(shift[i] - top);
            running.shift[eight][i] = top;
            amount[eight][i] = amount[eight][i] * old[i] + sum[i] * its[i];
        }
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; ++step) {
            float (&own)[4] = running.values[eight][step];
            own[0] = own[0] * old[0] + four[step].x * its[0];
            own[1] = own[1] * old[1] + four[step].y * its[1];
            own[2] = own[2] * old[0] + four[step].z * its[0];
            own[3] = own[3] * old[1] + four[step].w * its[1];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_even(const __grid_constant__ DecodeEvenParams p) {
    const AttentionParams& a = p.attention;
    __shared__ Entries all;
    launch_dependents_and_wait();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = (int)p.columns;
    gather(a, a.tokens.count(), a.sequences.count(), all);
    int workers = gridDim.x * WARPS, worker = blockIdx.x * WARPS + warp;
    int total = all.ends[ENTRIES - 1] * columns, share = (total + workers - 1) / workers;
    share = share < FEWEST ? FEWEST : share;
    int begin = worker * share, end = begin + share < total ? begin + share : total;
    if (begin >= end) return;

    Vector* own = ring + warp * STAGES * STAGE;
    Cursor taken(a, all, columns, begin), fetched = taken;
    /* Which of the keys that a lane weighs exist: 2 bits per stage. */
    u32 present = 0;
    auto fetch = [&](int stage, int page) {
        present &= ~(3u << (2 * stage));
        if (fetched.at < end) {
            int kv_head = fetched.column / (int)a.parts;
            present |= fetch_unit(a, fetched.span, kv_head, fetched.number(), page, own + stage * STAGE) << (2 * stage);
            fetched.next(a, all, columns, end);
        }
        commit_copies();
    };
    int pages[STAGES];
    Cursor looked = taken;
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        pages[i] = looked.at < end ? looked.page(a) : -1;
        if (looked.at < end) looked.next(a, all, columns, end);
    }
#pragma unroll
    for (int i = 0; i < STAGES; ++i) fetch(i, pages[i]);

    Queries queries;
    Running running;
    int stage = 0;
    while (taken.at < end) {
        i64 row = SINGLES ? all.other[taken.entry] : taken.entry;
        int first = first_head(a, taken.column);
        if (taken.at == begin || taken.unit == 0) {
            queries.read(a, row, first);
            running.clear();
        }
        int page_later = fetched.at < end ? fetched.page(a) : -1;
        u32 there = present >> (2 * stage) & 3;
        await_copies<STAGES - 1>();
        __syncwarp();
        /* Nothing was copied for a token without keys. */
        bool any = taken.span.to > taken.span.from;
        if (any) running.take(own + stage * STAGE, there, taken.position - taken.number() * UNIT, a.scale, a.softcap, queries);
        /* Refills the stage just read, once all lanes have read it. */
        __syncwarp();
        fetch(stage, page_later);
        stage = stage == STAGES - 1 ? 0 : stage + 1;

        int tile = taken.at - taken.unit;
        if (taken.unit == taken.units - 1 || taken.at == end - 1) {
            float amount[EIGHTS][2];
#pragma unroll
            for (int i = 0; i < EIGHTS * 2; ++i) amount[i / 2][i % 2] = sum_of_eight(running.sum[i / 2][i % 2]);
            int first_worker = tile / share, last_worker = (tile + taken.units - 1) / share;
            bool whole = first_worker == last_worker;
            if (!whole) {
                leave(p.partial + (i64)(2 * worker + (worker == first_worker)) * PLACE, running, amount);
                __threadfence();
                __syncwarp();
                bool last = false;
                if (lane == 0) {
                    last = atomicAdd(p.counters + first_worker, 1u) == last_worker - first_worker;
                    if (last) p.counters[first_worker] = 0;
                }
                whole = __shfl_sync(0xffffffffu, last, 0);
                if (whole) {
                    __threadfence();
                    running.clear();
#pragma unroll
                    for (int i = 0; i < EIGHTS * 2; ++i) amount[i / 2][i % 2] = 0.0f;
                    for (int w = first_worker; w <= last_worker; ++w) add(p.partial + (i64)(2 * w + (w == first_worker)) * PLACE, running, amount);
                }
            }
            if (whole) finish(a, row, first, running, amount);
        }
        taken.next(a, all, columns, end);
    }
}
