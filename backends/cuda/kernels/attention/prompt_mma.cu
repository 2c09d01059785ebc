/*
 * Prefill attention on tensor cores by mma.sync (m16n8k16; two m16n8k8 on sm_75): f16 or bf16 throughout (sm_75: f16), head sizes
 * that are multiples of 8, up to 256.
 *
 * A block of 4 warps owns a tile of up to ROW_TILES * 64 rows (see prompt.cuh), each warp ROW_TILES * 16 of them, and iterates
 * over KEYS keys at a time. Queries stay in shared memory; keys and values arrive by asynchronous copies: values while scores are
 * computed, the next keys while values are weighted. Scores, weights and results stay in registers: the accumulator layout of the
 * scores is the operand layout of the weights in the next product. Rows are padded by 16 bytes, so that ldmatrix has no bank
 * conflicts. Keys and values past the end of the sequence are read as zeros and contribute nothing. Masked scores have no weight,
 * but a NaN among the values of a tile reaches all its rows.
 *
 * Grid: (tiles times KV heads times tiles per head group). Operations: 4 * KEY_SIZE per row and visible key, if VALUE_SIZE is
 * equal. Bytes: keys and values once per tile, mostly from the L2. The floor is the rate of mma.sync, on Hopper about 60% of
 * wgmma's. Measured on an H200, causal, 32 heads on 8, 128 elements, bf16: 253 TFLOP/s at 4096 tokens.
 */
#define WARPS 4
#define THREADS (WARPS * 32)
#define CAPACITY (ROW_TILES * 16 * WARPS)
#define KEY_STEPS ((KEY_SIZE + 15) / 16)
#define VALUE_TILES ((VALUE_SIZE + 15) / 16 * 2)
#define KEY_CHUNKS (KEY_STEPS * 2)
#define VALUE_CHUNKS VALUE_TILES
/* Row stride in shared memory, in bytes. */
#define KEY_PITCH ((KEY_CHUNKS + 1) * 16)
#define VALUE_PITCH ((VALUE_CHUNKS + 1) * 16)

__device__ inline u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ inline void load_matrices(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

__device__ inline void load_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

__device__ inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif HALF
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

/* Copies 16 bytes into shared memory, or writes zeros. */
__device__ inline void copy(void* to, const void* from, bool real) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(shared_address(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
#else
    Vector zero = {};
    *(Vector*)to = real ? load_vector(from) : zero;
#endif
}

/* Commits a group of copies, and waits for all groups. */
__device__ inline void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/* Copies keys or values `key` to `key + KEYS - 1` of the tile's KV head: rows of SIZE elements, padded with zeros to CHUNKS * 16
 * bytes. */
template <int Size, int Chunks, int Pitch>
__device__ inline void fetch(const AttentionParams& a, const Tile& tile, const Q* base, const Strides& strides, int key, u8* to) {
    constexpr int count = (KEYS * Chunks + THREADS - 1) / THREADS;
    base += tile.kv_head * strides.head;
    /* All page numbers are loaded first, so that their latencies overlap. */
    int pages[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
        int at = key + (threadIdx.x + i * THREADS) / Chunks;
#if PAGED
        u32 entry = (u32)at / SLOTS;
        pages[i] = at < tile.total && entry < a.table_columns ? tile.pages[entry] : -1;
#else
        pages[i] = at < tile.total ? 0 : -1;
#endif
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
        int item = threadIdx.x + i * THREADS, row = item / Chunks, chunk = item % Chunks;
        bool real = pages[i] >= 0 && (Size % 16 == 0 || chunk * 8 < Size) && (!PAGED || pages[i] < a.pages);
#if PAGED
        i64 offset = pages[i] * strides.page + (u32)(key + row) % SLOTS * strides.slot;
#else
        i64 offset = (i64)(tile.start + key + row) * strides.slot;
#endif
        if (KEYS * Chunks % THREADS && item >= KEYS * Chunks) break;
        copy(to + row * Pitch + chunk * 16, real ? base + offset + chunk * 8 : base, real);
    }
}

/* Transposes four words in each of four neighbouring lanes. */
__device__ inline void transpose(u32 (&word)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            /* Exchanges a word between the lower and the upper lane of a pair. */
            int low = bit == 1 ? i * 2 : i, high = low + bit;
            u32 got = __shfl_xor_sync(0xffffffffu, upper ? word[low] : word[high], bit);
            word[low] = upper ? got : word[low];
            word[high] = upper ? word[high] : got;
        }
    }
}

/*
 * Writes row `r` of a thread's two, times `factor`: TILES columns of 8 values, of which four threads hold two each. Whole warps
 * must call, also for rows that do not exist.
 */
template <int Tiles>
__device__ inline void write_row(const AttentionParams& a, bool real, int row, int head, int r, float factor, const float* values) {
    Q* to = a.y.row(row) + (i64)head * VALUE_SIZE;
    int part = threadIdx.x % 4;
#if VECTORS
    constexpr int whole = Tiles / 4 * 4;
#pragma unroll
    for (int j = 0; j < whole; j += 4) {
        Vector v;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* own = values + (j + i) * 4 + r * 2;
            v.word[i] = pack(own[0] * factor, own[1] * factor);
        }
        transpose(v.word);
        if (real && (j + part) * 8 < VALUE_SIZE) store_vector(to + (j + part) * 8, v);
    }
#else
    constexpr int whole = 0;
#endif
#pragma unroll
    for (int j = whole; j < Tiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (real && j * 8 < VALUE_SIZE) to[j * 8 + part * 2 + i] = narrow<Q>(values[j * 4 + r * 2 + i] * factor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) prompt_mma(const __grid_constant__ AttentionParams a) {
    launch_dependents_and_wait();
    extern __shared__ __align__(16) u8 shared[];
    u8* queries = shared;
    u8* keys = queries + CAPACITY * KEY_PITCH;
    u8* values = keys + KEYS * KEY_PITCH;
    int tokens = (int)a.tokens.count(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Tile tile;
    Search search;
    if (!find_tile(a, a.sequences.count(), tokens, blockIdx.x, search, tile)) return;

    for (int item = threadIdx.x; item < CAPACITY * KEY_CHUNKS; item += THREADS) {
        int row = item / KEY_CHUNKS, chunk = item % KEY_CHUNKS, query = tile.row + row / HEADS;
        bool real = row < ROWS && row / HEADS < tile.count && query >= 0 && query < tokens && chunk * 8 < KEY_SIZE;
        const Q* from = a.query.row(0);
        if (real) from += (i64)query * a.query.stride + (i64)(tile.head + row % HEADS) * KEY_SIZE + chunk * 8;
        copy(queries + row * KEY_PITCH + chunk * 16, from, real);
    }

    Softmax softmax[ROW_TILES];
    float sums[ROW_TILES][VALUE_TILES][4] = {};
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = (warp * ROW_TILES + m) * 16 + lane / 4 + r * 8;
            int token = row / HEADS < tile.count ? row / HEADS : tile.count - 1;
            softmax[m].maximum[r] = -infinity();
            softmax[m].sum[r] = 0.0f;
            softmax[m].position[r] = tile.position + token;
            softmax[m].row[r] = tile.row + token;
            softmax[m].slope[r] = a.alibi ? a.alibi[tile.head + row % HEADS] : 0.0f;
        }
    }
    int lowest = tile.position + warp * ROW_TILES * 16 / HEADS;
    int highest = tile.position + tile.count - 1;
    int begin = tile.from / KEYS * KEYS;
    if (begin < tile.to) fetch<KEY_SIZE, KEY_CHUNKS, KEY_PITCH>(a, tile, a.keys, a.key_strides, begin, keys);

    /* The addresses for ldmatrix: the A operand and transposed matrices iterate rows first, the B operand columns first. */
    int matrix = lane / 8, left = (matrix % 2 * 8 + lane % 8), right = (matrix / 2 * 8 + lane % 8);
    u32 query_from = shared_address(queries) + (warp * ROW_TILES * 16 + left) * KEY_PITCH + matrix / 2 * 16;
    u32 key_from = shared_address(keys) + right * KEY_PITCH + matrix % 2 * 16;
    u32 value_from = shared_address(values) + left * VALUE_PITCH + matrix / 2 * 16;

    for (int key = begin; key < tile.to; key += KEYS) {
        await_copies();
        __syncthreads();
        fetch<VALUE_SIZE, VALUE_CHUNKS, VALUE_PITCH>(a, tile, a.values, a.value_strides, key, values);
        float scores[ROW_TILES][KEYS / 2] = {};
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            u32 q[ROW_TILES][4];
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) load_matrices(q[m], query_from + m * 16 * KEY_PITCH + step * 32);
#pragma unroll
            for (int pair = 0; pair < KEYS / 16; ++pair) {
                u32 k[4];
                load_matrices(k, key_from + pair * 16 * KEY_PITCH + step * 32);
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) {
                    multiply(*(float(*)[4])(scores[m] + pair * 8), q[m], k[0], k[1]);
                    multiply(*(float(*)[4])(scores[m] + pair * 8 + 4), q[m], k[2], k[3]);
                }
            }
        }
        await_copies();
        __syncthreads();
        if (key + KEYS < tile.to) fetch<KEY_SIZE, KEY_CHUNKS, KEY_PITCH>(a, tile, a.keys, a.key_strides, key + KEYS, keys);
        bool masked = !see_all(a, tile, lowest, highest, key, KEYS);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            float factor[2];
            softmax[m].step<KEYS / 8>(a, tile, masked, key + lane % 4 * 2, scores[m], factor);
#pragma unroll
            for (int j = 0; j < VALUE_TILES; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][j][i] *= factor[i / 2];
            }
        }
#pragma unroll
        for (int pair = 0; pair < KEYS / 16; ++pair) {
            u32 weights[ROW_TILES][4];
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) weights[m][i] = pack(scores[m][pair * 8 + i * 2], scores[m][pair * 8 + i * 2 + 1]);
            }
#pragma unroll
            for (int j = 0; j < VALUE_TILES / 2; ++j) {
                u32 v[4];
                load_transposed(v, value_from + pair * 16 * VALUE_PITCH + j * 32);
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) {
                    multiply(sums[m][j * 2], weights[m], v[0], v[1]);
                    multiply(sums[m][j * 2 + 1], weights[m], v[2], v[3]);
                }
            }
        }
    }

#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = (warp * ROW_TILES + m) * 16 + lane / 4 + r * 8, token = row / HEADS, head = tile.head + row % HEADS;
            int at = tile.row + token;
            float factor, log;
            softmax[m].finish(a, r, head, factor, log);
            bool real = row < ROWS && token < tile.count && at >= 0 && at < tokens;
            if (real && a.log_sum_exp.first && lane % 4 == 0) a.log_sum_exp.at(at, head) = log;
            write_row<VALUE_TILES>(a, real, at, head, r, factor, sums[m][0]);
        }
    }
}
