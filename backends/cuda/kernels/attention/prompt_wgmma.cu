/*
 * Prefill attention by wgmma (sm_90a): f16 or bf16 throughout, head sizes that are multiples of 16, up to 128.
 *
 * A persistent block of three warpgroups per SM processes tiles of up to 128 rows (see prompt.cuh). Two producer warps of the
 * first group issue TMA copies, one of queries and keys, one of values: 128 keys at a time into ring buffers of STAGES stages,
 * page by page, in the layout that wgmma reads (rows of 128 bytes, swizzled; larger heads in two halves, which one copy brings if
 * WHOLE). What lies outside a tensor, page -1 included, is filled with zeros. Each of the two consumer groups owns 64 rows, with
 * scores, weights and results in registers. The groups alternate on the tensor cores, so that one multiplies while the other
 * computes softmax. Results are staged in the shared memory of their queries and written as whole rows.
 *
 * The warp that copies keys also schedules tiles: the first tile of a block has the number of the block; the next one comes from
 * an atomic counter, which is read before the last keys of the current tile, so the block that finishes first takes it. Queries
 * are double-buffered: those of the next tile arrive while the last results are written. The counter is incremented once per tile
 * and then reset to 0.
 *
 * Values past the end of a sequence are cleared before use, as they may be NaN. Masked scores have no weight, but a NaN among the
 * values of a sequence reaches all rows of a tile.
 *
 * Operations: 4 * KEY_SIZE per row and visible key, if VALUE_SIZE is equal; a 128-row tile computes whole squares of 128 keys.
 * Bytes: 64 KiB of keys and values from the L2 per 128 keys of a tile, against 2048 cycles of tensor cores. The floor is the rate
 * of the tensor cores: 4096 operations per cycle and SM; the 16384 exponentials of an iteration take half as long and are hidden.
 * Measured on an H200, causal, 32 heads on 8, 128 elements, bf16: 590 TFLOP/s at 4096 tokens, 520 at 2048; an iteration takes
 * about 1.7 microseconds, the beginning and end of a tile about 3 together, which short prompts pay.
 */
#define STAGES 2
/* Query buffers: while one tile is computed, the queries of the next arrive. */
#define TILES 2
#define KEYS 128
#define GROUPS 2
#define THREADS ((GROUPS + 1) * 128)
#define KEY_HALVES ((KEY_SIZE + 63) / 64)
#define VALUE_HALVES ((VALUE_SIZE + 63) / 64)
/* Bytes of 128 rows of 64 elements. */
#define HALF_BYTES (KEYS * 128)
#define KEY_BYTES (KEY_HALVES * HALF_BYTES)
#define VALUE_BYTES (VALUE_HALVES * HALF_BYTES)
/* The queries of a tile, later its results. */
#define TILE_BYTES (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES)
/* Keys per copy, and copies per iteration: of both halves at once, or of each. */
#define BOX (PAGED && SLOTS < KEYS ? SLOTS : KEYS)
#define BOXES (KEYS / BOX)
/* Distances in bytes between groups of 8 keys, and between halves, of keys and of values. */
#define GROUP_STEP(halves) (WHOLE ? (halves) * 1024 : 1024)
#define HALF_STEP (WHOLE ? 1024 : HALF_BYTES)

struct Barriers {
    u64 queries_full[TILES], queries_free[TILES];
    u64 keys_full[STAGES], keys_free[STAGES], values_full[STAGES], values_free[STAGES];
};

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/*
 * The wgmma descriptor of a matrix in shared memory: address, distance of column blocks (values: 64 elements), distance of 8
 * rows, and the 128-byte swizzle.
 */
__device__ inline u64 matrix_at(u32 address, u32 halves, u32 groups) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(halves >> 4) << 16 | (u64)(groups >> 4) << 32 | 1ull << 62;
}

#if HALF
#define KIND "f32.f16.f16"
#else
#define KIND "f32.bf16.bf16"
#endif

#define SUM(x) "+f"(x)

/* d = or += 64 rows of queries times 128 keys, 16 elements of each. */
__device__ inline void score_step(float (&d)[64], u64 queries, u64 keys, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, " BEHIND(128, FLAG) ", 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16." KIND " " NAMES(128) ", " BEHIND(128, DESCRIPTORS) ", add, 1, 1, 0, 0;\n}"
        : PLACES(128) : "l"(queries), "l"(keys), "r"(add));
}

/* All scores of an iteration, for 64 rows. */
__device__ inline void score(float (&d)[64], u32 queries, u32 keys) {
#pragma unroll
    for (int step = 0; step < KEY_SIZE / 16; ++step) {
        u32 half = step / 4, at = step % 4 * 32;
        score_step(d, matrix_at(queries + half * HALF_BYTES + at, HALF_BYTES, 1024),
                   matrix_at(keys + half * HALF_STEP + at, HALF_STEP, GROUP_STEP(KEY_HALVES)), step > 0);
    }
}

/* d += 64 rows of weights times the values of 16 keys. */
__device__ inline void weigh_step(float (&d)[VALUE_SIZE / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 values) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n" TEXT(VALUE_SIZE) "k16." KIND " " NAMES(VALUE_SIZE) ", "
        BEHIND(VALUE_SIZE, FROM_REGISTERS) ", 1, 1, 1, 1;"
        : PLACES(VALUE_SIZE) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(values));
}

/* All values of an iteration. */
__device__ inline void weigh(float (&d)[VALUE_SIZE / 2], const u32 (&weights)[KEYS / 4], u32 values) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
        const u32* a = weights + step * 4;
        weigh_step(d, a[0], a[1], a[2], a[3],
                   matrix_at(values + step * 2 * GROUP_STEP(VALUE_HALVES), HALF_STEP, GROUP_STEP(VALUE_HALVES)));
    }
}

/* Named barriers; 0 is __syncthreads'. */
__device__ inline void turn_await(int group) { asm volatile("bar.sync %0, 256;" :: "r"(group + 1) : "memory"); }
__device__ inline void turn_pass(int group) { asm volatile("bar.arrive %0, 256;" :: "r"(GROUPS - group) : "memory"); }
__device__ inline void group_await(int group) { asm volatile("bar.sync %0, 128;" :: "r"(group + 3) : "memory"); }

/* The page of a lane's copies in an iteration, of BOX keys each, for both keys and values; irrelevant without pages. */
__device__ inline int page_at(const AttentionParams& a, const Tile& tile, int key, int lane) {
#if PAGED
    int at = key + lane % BOXES * BOX, entry = at / SLOTS;
    return at < tile.total && entry < a.table_columns ? tile.pages[entry] : -1;
#else
    return 0;
#endif
}

/* Copies one iteration's keys or values; each lane issues one copy. */
template <int Halves>
__device__ inline void fetch(const AttentionParams& a, const Tile& tile, const TensorMap& map, int key, int page, u32 to, u64& full, int lane) {
    if (lane == 0) expect(full, Halves * HALF_BYTES);
    __syncwarp();
    int box = lane % BOXES, half = lane / BOXES, at = key + box * BOX;
#if WHOLE
    /* Heads are numbered across all pages; for page -1 the number is out of range. */
    int head = (u32)page < (u32)a.pages ? page * (int)a.kv_heads + tile.kv_head : -1;
    if (half == 0) copy_box(map, to + box * BOX * Halves * 128, full, 0, 0, 0, at % SLOTS / 8, head);
#else
    u32 there = to + half * HALF_BYTES + box * BOX * 128;
    if (half >= Halves) return;
#if PAGED
    copy_box(map, there, full, half * 64, at % SLOTS, tile.kv_head, page);
#else
    copy_box(map, there, full, half * 64, tile.start + at, tile.kv_head, page);
#endif
#endif
}

/*
 * Writes a warp's 16 rows of results, times one factor per row. They are staged in the shared memory of the warp's queries, with
 * 16-byte vectors permuted within rows of 128 bytes to avoid bank conflicts, and written as whole rows.
 */
__device__ inline void write_rows(const AttentionParams& a, const Tile& tile, int tokens, int first, u32 place, const float (&factor)[2],
                                  const float (&sums)[VALUE_SIZE / 2]) {
    constexpr int chunks = VALUE_SIZE / 8;
    /* Computed here, so that it does not occupy registers during the main loop. */
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    int own = lane % 16;
#pragma unroll
    for (int j = 0; j < chunks; j += 2) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = pack(sums[j * 4 + i * 2] * factor[i % 2], sums[j * 4 + i * 2 + 1] * factor[i % 2]);
        int chunk = j + lane / 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
            :: "r"(place + chunk / 8 * HALF_BYTES + own * 128 + (chunk ^ own) % 8 * 16), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3]) : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < chunks / 2; ++i) {
        int item = lane + i * 32, row = item / chunks, chunk = item % chunks;
        int token = (first + row) / HEADS, head = tile.head + (first + row) % HEADS, at = tile.row + token;
        const Vector v = read_shared(place + chunk / 8 * HALF_BYTES + row * 128 + (chunk ^ row) % 8 * 16);
        if (first + row >= ROWS || token >= tile.count || at < 0 || at >= tokens) continue;
        Q* to = a.y.row(at) + (i64)head * VALUE_SIZE + chunk * 8;
#if VECTORS
        store_vector(to, v);
#else
#pragma unroll
        for (int k = 0; k < 8; ++k) to[k].bits = (u16)(v.word[k / 2] >> k % 2 * 16);
#endif
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) prompt_wgmma(const __grid_constant__ PromptWgmmaParams p) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    const AttentionParams& a = p.attention;
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Barriers barriers;
    /* The tiles as found; a tile without queries means that there are no more. */
    __shared__ Tile found[TILES];
    u32 queries = (shared_address(shared) + 1023) / 1024 * 1024, keys = queries + TILES * TILE_BYTES, values = keys + STAGES * KEY_BYTES;
    int lane = threadIdx.x % 32, group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0) - 1;
    launch_dependents();
    if (threadIdx.x == 0) {
        prefetch_map(p.query_map);
        prefetch_map(p.key_map);
        prefetch_map(p.value_map);
        for (int s = 0; s < TILES; ++s) {
            make_barrier(barriers.queries_full[s], 1);
            make_barrier(barriers.queries_free[s], GROUPS * 4 + 1);
        }
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(barriers.keys_full[s], 1);
            make_barrier(barriers.keys_free[s], GROUPS);
            make_barrier(barriers.values_full[s], 1);
            make_barrier(barriers.values_free[s], GROUPS);
        }
        barriers_made();
    }
    __syncthreads();
    wait_for_predecessor();
    i64 sequences = a.sequences.count();
    int tokens = (int)a.tokens.count();
    Tile tile;
    if (group < 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x >= 64) return;
        Place<STAGES> place;
        Place<TILES> next;
        if (threadIdx.x >= 32) {
            /* Values are copied by a separate warp, so that keys do not wait for a free stage of values. */
            for (;; next.next()) {
                await(barriers.queries_full[next.stage], next.phase);
                tile = found[next.stage];
                if (tile.count == 0) return;
                int key = tile.from / KEYS * KEYS, page = page_at(a, tile, key, lane);
                for (; key < tile.to; key += KEYS, place.next()) {
                    int s = place.stage;
                    await(barriers.values_free[s], place.phase ^ 1);
                    fetch<VALUE_HALVES>(a, tile, p.value_map, key, page, values + s * VALUE_BYTES, barriers.values_full[s], lane);
                    page = page_at(a, tile, key + KEYS, lane);
                }
                __syncwarp();
                if (lane == 0) arrive(barriers.queries_free[next.stage]);
            }
        }
        Search search;
        i64 number = blockIdx.x;
        u32 tiles = 0;
        for (;; next.next()) {
            bool any = find_tile(a, sequences, tokens, number, search, tile);
            u64& full = barriers.queries_full[next.stage];
            await(barriers.queries_free[next.stage], next.phase ^ 1);
            if (!any) tile.count = 0;
            if (lane == 0) {
                found[next.stage] = tile;
                if (any) {
                    expect(full, KEY_HALVES * ROWS * 128);
                    for (int half = 0; half < KEY_HALVES; ++half) {
                        copy_box(p.query_map, queries + next.stage * TILE_BYTES + half * HALF_BYTES, full, half * 64, tile.head, tile.row);
                    }
                } else {
                    arrive(full);
                }
            }
            if (!any) break;
            /* The number of the next tile is requested before the last keys of this one, not earlier: another block may finish
             * sooner. */
            bool asked = false;
            u32 taken = 0;
            auto ask = [&]() {
                if (tiles == 0) tiles = (u32)count_tiles(a, sequences);
                if (lane == 0) taken = atomicInc(p.counter, tiles - 1);
                asked = true;
            };
            int key = tile.from / KEYS * KEYS, page = page_at(a, tile, key, lane);
            for (; key < tile.to; key += KEYS, place.next()) {
                int s = place.stage;
                await(barriers.keys_free[s], place.phase ^ 1);
                fetch<KEY_HALVES>(a, tile, p.key_map, key, page, keys + s * KEY_BYTES, barriers.keys_full[s], lane);
                /* The next tile is known by the time a stage is free for its keys. */
                page = page_at(a, tile, key + KEYS, lane);
                if (!asked && key + 2 * KEYS >= tile.to) ask();
            }
            if (!asked) ask();
            number = gridDim.x + (i64)__shfl_sync(0xffffffffu, taken, 0);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        bool leader = threadIdx.x % 128 == 0;
        int rows_before = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
        Place<STAGES> place, older;
        if (group == 1) turn_pass(group);
        Place<TILES> next;
        for (;; next.next()) {
            await(barriers.queries_full[next.stage], next.phase);
            tile = found[next.stage];
            if (tile.count == 0) break;
            u32 own_queries = queries + next.stage * TILE_BYTES + group * 64 * 128;
            Softmax softmax;
            float sums[VALUE_SIZE / 2], scores[KEYS / 2], factor[2];
            u32 weights[KEYS / 4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int row = rows_before + r * 8, token = row / HEADS < tile.count ? row / HEADS : tile.count - 1;
                softmax.maximum[r] = -infinity();
                softmax.sum[r] = 0.0f;
                softmax.position[r] = tile.position + token;
                softmax.row[r] = tile.row + token;
                softmax.slope[r] = a.alibi ? a.alibi[tile.head + row % HEADS] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < VALUE_SIZE / 2; ++i) sums[i] = 0.0f;
            int lowest = tile.position + group * 64 / HEADS, highest = tile.position + tile.count - 1;
            int begin = tile.from / KEYS * KEYS;
            int turns = __shfl_sync(0xffffffffu, tile.to > begin ? (tile.to - begin + KEYS - 1) / KEYS : 0, 0);
            if (turns > 0) {
                /* The first scores. */
                await(barriers.keys_full[place.stage], place.phase);
                turn_await(group);
                hold(scores);
                products_begin();
                score(scores, own_queries, keys + place.stage * KEY_BYTES);
                products_commit();
                turn_pass(group);
                products_wait<0>();
                hold(scores);
                if (leader) arrive(barriers.keys_free[place.stage]);
                bool masked = !see_all(a, tile, lowest, highest, begin, KEYS);
                softmax.step<KEYS / 8>(a, tile, masked, begin + lane % 4 * 2, scores, factor);
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) weights[i] = pack(scores[i * 2], scores[i * 2 + 1]);
                place.next();
            }
            for (int turn = 1; turn < turns; ++turn) {
                /* Scores of this iteration, and the values of the previous one. */
                int key = begin + turn * KEYS;
                await(barriers.keys_full[place.stage], place.phase);
                await(barriers.values_full[older.stage], older.phase);
                turn_await(group);
                hold(scores);
                hold(sums);
                products_begin();
                score(scores, own_queries, keys + place.stage * KEY_BYTES);
                products_commit();
                weigh(sums, weights, values + older.stage * VALUE_BYTES);
                products_commit();
                turn_pass(group);
                products_wait<1>();
                hold(scores);
                if (leader) arrive(barriers.keys_free[place.stage]);
                bool masked = !see_all(a, tile, lowest, highest, key, KEYS);
                softmax.step<KEYS / 8>(a, tile, masked, key + lane % 4 * 2, scores, factor);
                products_wait<0>();
                hold(sums);
                if (leader) arrive(barriers.values_free[older.stage]);
                older.next();
#pragma unroll
                for (int i = 0; i < VALUE_SIZE / 2; ++i) sums[i] *= factor[i / 2 % 2];
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) weights[i] = pack(scores[i * 2], scores[i * 2 + 1]);
                place.next();
            }
            float shrink[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int row = rows_before + r * 8, token = row / HEADS, head = tile.head + row % HEADS, at = tile.row + token;
                float log;
                softmax.finish(a, r, head, shrink[r], log);
                bool real = row < ROWS && token < tile.count && at >= 0 && at < tokens;
                if (real && a.log_sum_exp.first && lane % 4 == 0) a.log_sum_exp.at(at, head) = log;
            }
            /* All warps of the group have waited for their last scores, so the queries are no longer read. */
            group_await(group);
            if (turns > 0) {
                await(barriers.values_full[older.stage], older.phase);
                u32 last = values + older.stage * VALUE_BYTES;
                int end = tile.total - (tile.to - 1) / KEYS * KEYS;
                if (end < KEYS) {
                    /* Both groups clear the rows past the end; each fences its own zeros. */
                    for (int item = threadIdx.x % 128; item < (KEYS - end) * 8 * VALUE_HALVES; item += 128) {
                        int half = item / ((KEYS - end) * 8), at = item % ((KEYS - end) * 8), row = end + at / 8;
                        u32 there = last + half * HALF_STEP + row / 8 * GROUP_STEP(VALUE_HALVES) + row % 8 * 128 + at % 8 * 16;
                        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" :: "r"(there), "r"(0) : "memory");
                    }
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    group_await(group);
                }
                hold(sums);
                products_begin();
                weigh(sums, weights, last);
                products_commit();
                products_wait<0>();
                hold(sums);
                if (leader) arrive(barriers.values_free[older.stage]);
                older.next();
            }
            int first = group * 64 + threadIdx.x / 32 % 4 * 16;
            write_rows(a, tile, tokens, first, queries + next.stage * TILE_BYTES + first * 128, shrink, sums);
            reads_end();
            __syncwarp();
            if (lane == 0) arrive(barriers.queries_free[next.stage]);
        }
        if (group == 0) turn_await(group);
    }
#else
    launch_dependents_and_wait();
#endif
}
