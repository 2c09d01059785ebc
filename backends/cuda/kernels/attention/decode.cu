/*
 * paged_attention of single tokens, on tensor cores (mma.m16n8k16, sm_80 and up): f16 or bf16 throughout.
 *
 * A tile is one row by HEADS query heads that share a KV head (at most 16: the rows of the product). Grid: (rows, KV heads
 * times parts of their groups, splits of the keys), blocks of 4 warps. With SINGLES the grid has sequences in place of rows, and
 * only those of one token are taken: the others of the step are prompts.
 *
 * Keys are taken 16 at a time, by one warp: of the units of 16 keys, unit `u` belongs to warp `u % 4` of split `u / 4 % live`,
 * with as many splits live as the length is worth. So the first unit of a warp does not depend on the length, and its page is
 * looked up along with it.
 *
 * The sums over a head's elements may run in any order, so a lane's 16 bytes of a key are fragments of two products. Values are
 * wanted in pairs of neighbouring keys: a lane takes 8 elements of 4 keys and pairs them up in registers. Keys and values pass
 * through a ring of the warp's own in shared memory, STAGES units of 8 KiB (with heads of 128), filled by asynchronous copies of
 * whole rows: lanes that copied only what they take themselves asked the L2 for half lines, and it was that which bounded them.
 * Pieces of 16 bytes are swapped within a row so that 8 lanes meet no bank twice.
 *
 * Each warp keeps the running maximum, sum and weighted values of its keys; the block merges its warps in shared memory, and
 * CLUSTER splits merge theirs through each other's shared memory, each some of the elements. What is left of many keys is
 * merged through scratch memory by the block that comes last, in the order of the splits; the counter that finds it is back at
 * 0 afterwards.
 *
 * Bytes: keys and values once. Floor for few keys: a chain of dependent reads (lengths and page, keys, other blocks'
 * results, and the wait in front). Measured figures: docs/src/performance/cuda.md.
 */
#define WARPS 4
#define UNIT 16
/* Vectors of a row: those that are copied (the last may be zeros), and from row to row in shared memory. */
#define KEY_PIECES (4 * KEY_BLOCKS)
#define KEY_PITCH ((KEY_PIECES + 7) / 8 * 8)
#define VALUE_PIECES (8 * VALUE_BLOCKS)
#define STAGE (UNIT * (KEY_PITCH + VALUE_PIECES))
/* Where vector `piece` of a row is: lanes of 2 rows read keys together, lanes of every second row of 8 values. */
#define KEY_AT(row, piece) ((row) * KEY_PITCH + ((piece) ^ (row) % 2 * 4))
#define VALUE_AT(row, piece) (UNIT * KEY_PITCH + (row) * VALUE_PIECES + ((piece) ^ (row) / 2 % 4 * 2))
#define KEY_BLOCKS ((KEY_SIZE + 31) / 32)
#define VALUE_BLOCKS ((VALUE_SIZE + 63) / 64)
/* Whether there are query heads in the upper 8 rows of a product. */
#define UPPER (HEADS > 8)
#define VALUE_ROW (VALUE_SIZE + 4)

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
    i64 splits;
    float* partial;
    u32* counters;
};

__device__ inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
#if HALF
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

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

extern __shared__ __align__(16) Vector ring[];

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(1, 1, CLUSTER)
__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/* 16 bytes of another block's shared memory, at the place that `at` is in one's own. */
__device__ inline float4 load_from(const float* at, int rank) {
    u32 address = (u32)__cvta_generic_to_shared(at);
    float4 v;
    asm volatile("{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(rank) : "memory");
    return v;
}
#else
#define CLUSTERED
__device__ inline void meet_cluster() { __syncthreads(); }
__device__ inline float4 load_from(const float* at, int) { return *(const float4*)at; }
#endif

/* Starts copying 16 bytes, or writes zeros. */
__device__ inline void copy_ahead(Vector* to, const void* from, bool real) {
#if __CUDA_ARCH__ >= 800
    u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(address), "l"(from), "r"(real ? 16 : 0) : "memory");
#endif
}

/* What a block works on: the token's row and position, and its sequence. */
struct Tile { int sequence, row, position, keys; };

#if SINGLES
/* The row of a sequence that has one alone; false if it has none or several. */
__device__ bool find_tile(const Arguments& a, i64 sequences, int sequence, Tile& tile) {
    int length = a.query_length[sequence];
    tile.sequence = sequence;
    tile.row = a.query_start[sequence];
    tile.keys = a.kv_length[sequence];
    tile.position = tile.keys - 1;
    return sequence < (int)sequences && length == 1 && tile.row >= 0;
}
#else
/* The sequence a row belongs to; false if it belongs to none. Most likely it is the one of the same number. */
__device__ bool find_tile(const Arguments& a, i64 sequences, int row, Tile& tile) {
    int lane = threadIdx.x % 32, guess = row < (int)a.sequences ? row : 0;
    int start = 0, length = 0, total = 0;
    if (a.sequences > 0) {
        start = a.query_start[guess];
        length = a.query_length[guess];
        total = a.kv_length[guess];
    }
    tile.row = row;
    if (guess < (int)sequences && start <= row && row - start < length) {
        tile.sequence = guess;
        tile.keys = total;
        tile.position = total - length + row - start;
        return true;
    }
    for (int base = 0; base < (int)sequences; base += 32) {
        int here = base + lane;
        bool own = false;
        if (here < (int)sequences) {
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

/* Adds a part, with its own maximum and sum, to a whole whose maximum is known. */
__device__ inline void merge(float4& merged, float& total, float largest, float maximum, float amount, float4 part) {
    if (amount == 0.0f) return;
    float factor = expf(maximum - largest);
    total += amount * factor;
    merged.x += part.x * factor;
    merged.y += part.y * factor;
    merged.z += part.z * factor;
    merged.w += part.w * factor;
}

/* Writes 4 elements of a row from the sum of weighted values. */
__device__ inline void finish(const Arguments& a, i64 row, int head, int at, float maximum, float sum, float4 values) {
    bool empty = sum == 0.0f;
    float factor = empty ? 0.0f : 1.0f;
    if (a.sinks && !empty) {
        float sink = a.sinks[head], larger = maximum > sink ? maximum : sink;
        factor = expf(maximum - larger);
        sum = sum * factor + expf(sink - larger);
        maximum = larger;
    }
    Q* y = a.y + row * a.y_row + head * VALUE_SIZE + at;
    y[0] = narrow<Q>(empty ? 0.0f : values.x * factor / sum);
    y[1] = narrow<Q>(empty ? 0.0f : values.y * factor / sum);
    y[2] = narrow<Q>(empty ? 0.0f : values.z * factor / sum);
    y[3] = narrow<Q>(empty ? 0.0f : values.w * factor / sum);
    if (a.log_sum_exp && at == 0) {
        float log = empty ? -infinity() : maximum + logf(sum);
        if (a.sinks && empty) log = a.sinks[head];
        a.log_sum_exp[row * a.log_row + head] = log;
    }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(WARPS * 32) decode(Extent sequence_extent, Extent token_extent, float scale,
                                                                float softcap, Arguments a) {
    __shared__ float maxima[WARPS][HEADS], amounts[WARPS][HEADS];
    __shared__ __align__(16) float sums[WARPS][HEADS][VALUE_ROW];
    __shared__ bool last;
    take_turn();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    int split = blockIdx.z, splits = (int)a.splits, first_unit = split * WARPS + warp;

    /* The first page of the sequence that most likely is this block's, along with the lengths. */
    int guess = blockIdx.x < a.sequences ? blockIdx.x : 0, entry = first_unit * UNIT / SLOTS, guessed = -1;
    if (SLOTS % UNIT == 0 && a.sequences > 0 && entry < (int)a.table_columns) guessed = a.table[guess * a.table_row + entry];
    i64 tokens = token_extent.count();
    Tile tile;
    if (!find_tile(a, sequence_extent.count(), blockIdx.x, tile)) return;
    bool real = tile.row < tokens;
    if (SINGLES && !real) return;
    int from = 0, to_key = tile.keys;
    if (MASK == 1) to_key = tile.position + 1 < to_key ? tile.position + 1 : to_key;
    if (WINDOW && tile.position - (int)a.window + 1 > 0) from = tile.position - (int)a.window + 1;
    if (to_key > (int)a.table_columns * SLOTS) to_key = (int)a.table_columns * SLOTS;
    int units = to_key > from ? (to_key + UNIT - 1) / UNIT : 0, live = (units + WARPS - 1) / WARPS;
    /* Up to one cluster as many as there is work for, or twice the work; beyond that, whole clusters. */
    if (live > CLUSTER) live = CLUSTER > 1 && live <= 2 * CLUSTER ? CLUSTER : (live + CLUSTER - 1) / CLUSTER * CLUSTER;
    live = live < 1 ? 1 : live > splits ? splits : live;
    if (split >= live) return;

    int kv_head = blockIdx.y / (int)a.parts, first_head = kv_head * (int)a.group + blockIdx.y % (int)a.parts * HEADS;
    Vector query[1 + UPPER][KEY_BLOCKS];
    float slope[1 + UPPER];
#pragma unroll
    for (int half = 0; half < 1 + UPPER; ++half) {
        int head = group + 8 * half;
        slope[half] = ALIBI && head < HEADS ? a.alibi[first_head + head] : 0.0f;
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            int at = block * 32 + part * 8;
            query[half][block] = Vector{};
            if (head < HEADS && at < KEY_SIZE) {
                query[half][block] = load_vector(a.query + tile.row * a.query_row + (first_head + head) * KEY_SIZE + at);
            }
        }
    }
    float weighted[VALUE_BLOCKS][8][4] = {}, maximum[1 + UPPER], sum[1 + UPPER];
#pragma unroll
    for (int half = 0; half < 1 + UPPER; ++half) {
        maximum[half] = -infinity();
        sum[half] = 0.0f;
    }

    const int* table = a.table + tile.sequence * a.table_row;
    const Q* head_keys = a.keys + kv_head * a.key_strides.head;
    const Q* head_values = a.values + kv_head * a.value_strides.head;
    /* The page of a key, or -1 if there is none to be seen. */
    auto page_of = [&](int key) {
        if (key < from || key >= to_key) return -1;
        int page = table[key / SLOTS];
        return page < (int)a.pages ? page : -1;
    };
    /* Pages are looked up STAGES units ahead; which of the keys a lane weighs are there, 4 bits a stage. */
    const int step = live * WARPS;
    Vector* own = ring + warp * STAGES * STAGE;
    int pages[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        int unit = first_unit + i * step;
        bool known = i == 0 && guess == tile.sequence;
        pages[i] = SLOTS % UNIT != 0 || unit >= units ? -1 : known ? guessed : table[unit * UNIT / SLOTS];
    }
    u32 present = 0;
    auto fetch = [&](int unit, int stage, int next_page) {
        int base = unit * UNIT;
        Vector* to = own + stage * STAGE;
        bool whole = SLOTS % UNIT == 0 && KEY_SIZE % 32 == 0 && VALUE_SIZE % 64 == 0 && base >= from && base + UNIT <= to_key;
        present &= ~(15u << (4 * stage));
        if (whole && next_page >= 0 && next_page < (int)a.pages) {
            present |= 15u << (4 * stage);
            const Q* keys = head_keys + next_page * a.key_strides.page + base % SLOTS * a.key_strides.slot;
            const Q* values = head_values + next_page * a.value_strides.page + base % SLOTS * a.value_strides.slot;
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
        } else if (unit < units) {
            int here = next_page < (int)a.pages ? next_page : -1;
            auto page_at = [&](int at) {
                int page = SLOTS % UNIT == 0 ? here : page_of(at);
                return at >= from && at < to_key ? page : -1;
            };
            for (int item = lane; item < UNIT * KEY_PIECES; item += 32) {
                int row = item / KEY_PIECES, piece = item % KEY_PIECES, at = base + row, page = page_at(at);
                bool real = page >= 0 && piece * 8 < KEY_SIZE;
                const Q* it = head_keys + page * a.key_strides.page + at % SLOTS * a.key_strides.slot + piece * 8;
                copy_ahead(to + KEY_AT(row, piece), real ? it : head_keys, real);
            }
            for (int item = lane; item < UNIT * VALUE_PIECES; item += 32) {
                int row = item / VALUE_PIECES, piece = item % VALUE_PIECES, at = base + row, page = page_at(at);
                bool real = page >= 0 && piece * 8 < VALUE_SIZE;
                const Q* it = head_values + page * a.value_strides.page + at % SLOTS * a.value_strides.slot + piece * 8;
                copy_ahead(to + VALUE_AT(row, piece), real ? it : head_values, real);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                bool seen = page_at(base + 2 * part + i % 2 + i / 2 * 8) >= 0;
                present |= (u32)seen << (4 * stage + i);
            }
        }
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    };
#pragma unroll
    for (int i = 0; i < STAGES; ++i) fetch(first_unit + i * step, i, pages[i]);

    int stage = 0;
    for (int unit = first_unit; unit < units; unit += step) {
        int base = unit * UNIT, later = unit + STAGES * step;
        int page_later = SLOTS % UNIT == 0 && later < units ? table[later * UNIT / SLOTS] : -1;
        u32 there = present >> (4 * stage) & 15;
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
#endif
        __syncwarp();
        const Vector* mine = own + stage * STAGE;

        float scores[2][4] = {};
#pragma unroll
        for (int set = 0; set < 2; ++set) {
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
                const Vector& low = query[0][block];
                const Vector& high = query[UPPER][block];
                Vector its = mine[KEY_AT(8 * set + group, block * 4 + part)];
                multiply(scores[set], low.word[0], UPPER ? high.word[0] : 0, low.word[1], UPPER ? high.word[1] : 0, its.word[0], its.word[1]);
                multiply(scores[set], low.word[2], UPPER ? high.word[2] : 0, low.word[3], UPPER ? high.word[3] : 0, its.word[2], its.word[3]);
            }
        }
        float factor[1 + UPPER];
        u32 weights[1 + UPPER][2];
        bool changed = false;
#pragma unroll
        for (int half = 0; half < 1 + UPPER; ++half) {
            float its[4], top = -infinity();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float score = scores[i / 2][half * 2 + i % 2] * scale;
#if SOFTCAP
                score = softcap * tanhf(score / softcap);
#endif
#if ALIBI
                score -= slope[half] * (float)(tile.position - (base + 2 * part + i % 2 + i / 2 * 8));
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
        if (__any_sync(0xffffffffu, changed)) {
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; ++block) {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    weighted[block][j][0] *= factor[0];
                    weighted[block][j][1] *= factor[0];
                    weighted[block][j][2] *= factor[UPPER];
                    weighted[block][j][3] *= factor[UPPER];
                }
            }
        }
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; ++block) {
            Vector value[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                value[i] = mine[VALUE_AT(2 * part + i % 2 + i / 2 * 8, block * 8 + group)];
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                u32 choice = j % 2 ? 0x7632 : 0x5410;
                u32 first = __byte_perm(value[0].word[j / 2], value[1].word[j / 2], choice);
                u32 second = __byte_perm(value[2].word[j / 2], value[3].word[j / 2], choice);
                multiply(weighted[block][j], weights[0][0], UPPER ? weights[UPPER][0] : 0, weights[0][1],
                         UPPER ? weights[UPPER][1] : 0, first, second);
            }
        }
        /* Into the place just read, when all lanes have read it. */
        __syncwarp();
        fetch(later, stage, page_later);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

#pragma unroll
    for (int half = 0; half < 1 + UPPER; ++half) {
        int head = group + 8 * half;
        float amount = sum_of_four(sum[half]);
        if (head < HEADS) {
            if (part == 0) {
                maxima[warp][head] = maximum[half];
                amounts[warp][head] = amount;
            }
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; ++block) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    int at = block * 64 + (2 * part + n) * 8;
                    if (at >= VALUE_SIZE) continue;
#pragma unroll
                    for (int j = 0; j < 8; ++j) sums[warp][head][at + j] = weighted[block][j][half * 2 + n];
                }
            }
        }
    }
    __syncthreads();

    /* The block's result takes the place of the first warp's. */
    for (int item = threadIdx.x; item < HEADS * (VALUE_SIZE / 4); item += WARPS * 32) {
        int head = item / (VALUE_SIZE / 4), at = item % (VALUE_SIZE / 4) * 4;
        float largest = -infinity(), total = 0.0f;
        float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = maxima[w][head] > largest ? maxima[w][head] : largest;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) merge(merged, total, largest, maxima[w][head], amounts[w][head], *(const float4*)&sums[w][head][at]);
        *(float4*)&sums[0][head][at] = merged;
        if (at == 0) *(float4*)&sums[0][head][VALUE_SIZE] = make_float4(largest, total, 0.0f, 0.0f);
    }
    meet_cluster();

    /* The blocks of a cluster share its elements. */
    int rank = split % CLUSTER, clusters = (live + CLUSTER - 1) / CLUSTER, members = clusters > 1 ? CLUSTER : live;
    i64 slot = (i64)blockIdx.x * gridDim.y + blockIdx.y;
    float* partial = a.partial + slot * (splits / CLUSTER) * (HEADS * VALUE_ROW);
    for (int item = rank * (WARPS * 32) + threadIdx.x; item < HEADS * (VALUE_SIZE / 4); item += members * (WARPS * 32)) {
        int head = item / (VALUE_SIZE / 4), at = item % (VALUE_SIZE / 4) * 4;
        float largest = -infinity(), total = 0.0f;
        float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f), scales[CLUSTER];
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            if (m >= members) break;
            scales[m] = load_from(&sums[0][head][VALUE_SIZE], m);
        }
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            if (m >= members) break;
            largest = scales[m].x > largest ? scales[m].x : largest;
        }
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            if (m >= members) break;
            merge(merged, total, largest, scales[m].x, scales[m].y, load_from(&sums[0][head][at], m));
        }
        if (clusters == 1) {
            if (real) finish(a, tile.row, first_head + head, at, largest, total, merged);
        } else {
            float* out = partial + (split / CLUSTER * HEADS + head) * VALUE_ROW;
            __stcg((float4*)(out + at), merged);
            if (at == 0) __stcg((float4*)(out + VALUE_SIZE), make_float4(largest, total, 0.0f, 0.0f));
        }
    }
    /* No block goes while another may still read its shared memory. */
    if (CLUSTER > 1) meet_cluster();
    if (clusters == 1) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = a.counters + slot * CLUSTER + rank;
        last = atomicAdd(counter, 1u) == clusters - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    if (!last || !real) return;
    __threadfence();
    for (int item = rank * (WARPS * 32) + threadIdx.x; item < HEADS * (VALUE_SIZE / 4); item += members * (WARPS * 32)) {
        int head = item / (VALUE_SIZE / 4), at = item % (VALUE_SIZE / 4) * 4;
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
        finish(a, tile.row, first_head + head, at, largest, total, merged);
    }
}
