/*
 * All layers of a decoder for one token, in one launch, sm_90 and up, f16 or bf16: for each layer norm with query, key and value;
 * attention; output with residual; norm with the first half of the MLP; its second half with residual. In front of them, where the
 * program has it there, the token's row of a table.
 *
 * With EXPERTS the MLP is a mixture: behind the norm comes the router's product, whose logits blocks exchange like all else. The
 * warp that copies weights waits for them, chooses the experts (choose.cuh), as in every block, and copies theirs. They are one MLP: the
 * outputs of the first half are those of the chosen experts, one behind the other, multiplied by the weight of their expert, and the
 * second half reads a row of each expert behind the other.
 *
 * Blocks stay for all layers, at most one on a multiprocessor, and all must be there at once: the launch is cooperative.
 *
 * Nobody waits at a barrier of the grid, and nothing is fenced. What a block leaves for others (`exchange`) is all ones, which
 * no arithmetic makes, until it is written; who needs it reads it until none of it is. So a result takes one way to the L2 and
 * one back. Each layer has memory of its own. Who has the token in the middle of a layer before it knows that all blocks are done
 * with the layer before: each part of that token took its part of the one in front of the layer; to make that, all of the inner one
 * before was needed, to which every block contributed when it had done all else. So that layer is set to ones again, for the next
 * launch; the block that ends last does so with the last layer.
 *
 * Products are of tiles: one run of neighbouring outputs, or two, where results come of pairs. A warp beside those that multiply
 * copies weights into a ring of slots, run by run, in the order of all products of all layers, and waits for nobody but the
 * readers of the ring: memory works while blocks wait for each other. A run is as many outputs as lie in a slot as in memory, one
 * behind the other, so that it takes one copy, or four at an even pace: a copy costs its multiprocessor 70 ns however short it is.
 * Tiles go to blocks in turn, the next product goes on where the one before ended, so all have equally much to read.
 *
 * Weights are the 16-row operand of mma.m16n8k16, as they are read: the 16 bytes of a lane are all of its part. As there is one
 * token, the 8 columns of the other operand are free to hold different inputs; of the result a row counts in the column of its own.
 * So the rows of a run of 8, 4 or 2 outputs are 2, 4 or 8 sets of 32 inputs of each, which lie beside each other and so in
 * different banks, and half of each set in a row of its own (`weights.cuh`).
 *
 * Where blocks have several runs of a product, two teams of four warps take them in turn: from run to run a warp waits for what it
 * reads and for what it multiplied, and meanwhile the other team reads.
 *
 * Packed integers of 4 or 8 bits are multiplied by bytes of activations instead: packed.cuh.
 *
 * Attention: blocks take a part of the heads of a KV head and a split of the keys, their warps units of 16 keys, as in
 * attention/decode.cu. Where all heads together have few elements, who multiplies with the result merges the splits for himself.
 * Else reading all splits takes longer than one more way through the L2: those that have them merge them, each a part. Where one
 * block has all keys, there is nothing to merge.
 *
 * Bytes: all weights, keys and values once. Floor: those over read bandwidth, or for small models five ways through the L2 for
 * each layer. Measured figures: docs/src/performance/cuda.md.
 */
#if __CUDA_ARCH__ >= 900
__device__ inline float apply(float x) {
#if FUNCTION == 1
    return x < 0.0f ? 0.0f : x;
#elif FUNCTION == 2
    return __fdividef(x, 1.0f + __expf(-x));
#elif FUNCTION == 3
    return 0.5f * x * (x < -1.0f ? erfcf(x * -0.70710678118654752f) : 1.0f + erff(x * 0.70710678118654752f));
#elif FUNCTION == 5
    return __fdividef(x, 1.0f + __expf(-1.702f * x));
#elif FUNCTION == 4
    /* (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)): no cancellation for large negative x. */
    float z = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-2.0f * z));
#else
#error FUNCTION is not the number of an activation
#endif
}

/* This block's part of a product, with what is in front of it and behind it. */
template <int P>
__device__ inline void run_product(const Model& m, const Layer& layer, const Thread& t, const Share& share, int l, int& turn,
                                   Ring& ring, u32 barriers, u8* mine, const float* partial, const float2* sines,
                                   float2* scratch) {
    constexpr int TILES = TILES_OF[P], RUNS = RUNS_OF[P], RUN = ROWS_OF[P];
    /* Warps that finish a tile together: one for each 8 outputs of its runs. */
    constexpr int FINISHERS = RUN > 8 ? RUN / 8 : 1;
    /* Lanes of a warp that have the same output of a run in the end. */
    constexpr int SHARERS = Factors<P>::SHARERS;
    /* The router reads what the first half of the MLP does. */
    const Product& p = m.products[P == ROUTER ? UP : P];
    int first = first_of(turn);
    turn = turn_after(turn, TILES);
    if (first >= TILES) return;
    u8* activations = memory + ACTIVATIONS_AT;
    float* sums = (float*)(memory + SUMS_AT);
    mine += (i64)l * LAYER_BYTES;
    /* Where residuals come from, and where results go. */
    const X* before = P == OUTPUT ? l ? (const X*)mine : m.x : (const X*)(mine + MIDDLE_AT);
    i64 after = (i64)l * LAYER_BYTES + (P == INPUT ? QUERIES_AT : P == OUTPUT ? MIDDLE_AT : P == UP ? INNER_AT : LAYER_BYTES);
    bool ended = P == DOWN && l == (int)m.layers - 1, leaves = t.lane % SHARERS == 0;
    const BIAS* bias = P == ROUTER ? nullptr : layer.biases[P == ROUTER ? UP : P];
    /* What is needed to finish a tile, or a part of one: each warp has its own. It is read ahead. */
    bool finishes;
    Rows rows;
    int low, high;
    float add_low, add_high, sine, cosine;
#if BITS && !GROUP
    float scale_low, scale_high;
#endif
    X* cache;
    X residual;
    X* to;
    auto read_ahead = [&](int tile) {
        int own = tile + t.warp / FINISHERS * GRID;
        finishes = own < TILES;
        rows = rows_of<P>(own);
        int place = t.warp % FINISHERS * 8 + t.lane / SHARERS;
        low = rows.low + place;
        high = rows.high + place;
        add_low = add_high = sine = 0.0f;
        cosine = 1.0f;
        cache = nullptr;
        if (P == INPUT) {
            const int queries = HEADS * HEAD, keys = KV_HEADS * HEAD;
#if ROPE && !HEAD_NORMS
            if (rows.turned) {
                float2 turned = sines[low % HEAD];
                float scale = low < queries ? m.query_scale : m.key_scale;
                sine = scale * turned.x;
                cosine = scale * turned.y;
            }
#endif
            /* With head norms the warp that holds a whole head writes the key to the cache: write_key in attend.cuh. */
            if (leaves && low >= queries + (HEAD_NORMS ? keys : 0) && share.place >= 0) {
                bool is_value = HEAD_NORMS || low >= queries + keys;
                int at = low - queries - (is_value ? keys : 0);
                const Strides& strides = is_value ? m.value_strides : m.key_strides;
                cache = (is_value ? layer.values : layer.keys) + share.place / SLOTS * strides.page + at / HEAD * strides.head
                    + share.place % SLOTS * strides.slot + at % HEAD;
            }
        }
        residual = X{0};
        if (finishes) {
            add_low = or_else(bias, low, 0.0f);
            if (RUNS == 2) add_high = or_else(bias, high, 0.0f);
            if (P == OUTPUT || P == DOWN) residual = load_fresh_one(before + low);
        }
#if BITS && !GROUP
        const SCALE* scales = (const SCALE*)(layer.weights[P] + NUMBERS_AT(P));
        scale_low = finishes ? widen(scales[low]) : 0.0f;
        scale_high = finishes && RUNS == 2 ? widen(scales[high]) : 0.0f;
#endif
        to = (X*)(m.exchange + after) + low;
    };
    read_ahead(first);
    Factors<P> factors;
    /* Where there are two teams, the slots of this one, and which run of the block comes next for it. */
    constexpr int TEAMS = TEAMS_OF[P];
    const int team = t.warp / (WARPS / TEAMS), runs = ((TILES - 1 - first) / GRID + 1) * RUNS;
    Ring own_ring = ring;
    int run = team;
    if constexpr (TEAMS == 1) {
        factors.take_ahead(t, ring, barriers);
    } else {
        own_ring.skip(team);
        ring.skip(runs);
        factors.take_ahead(t, own_ring, barriers, run < runs);
    }
    if (P == ROUTER || (EXPERTS && P == UP)) {
        /* Staged for both of them. */
    } else if (P == INPUT || P == UP) {
        bool there = P == INPUT && l == 0;
        const X* x = there ? m.x : (const X*)(mine + (P == UP ? MIDDLE_AT : 0));
        stage_normed(p, layer.norm_weights[P / 2], layer.norm_biases[P / 2], x, there, activations, scratch);
    } else if (P == OUTPUT) {
        if (MERGED) {
            stage_plain<HEADS * HEAD>((const X*)(mine + MERGED_AT), activations);
        } else {
            stage_merged(partial, share.live, activations);
        }
    } else {
        stage_plain<INNER>((const X*)(mine + INNER_AT), activations);
    }
    meet();
    factors.take_inputs(t, activations);
    int tile = first;
#pragma unroll 1
    while (true) {
        const float* from = sums + t.warp * (RUNS * SUMS_OF[P]) + t.lane * (4 / TEAMS);
        u32 own_sum = (u32)__cvta_generic_to_shared(sums + Factors<P>::place(t));
        asm volatile("" : "+l"(to), "+l"(from), "+r"(own_sum));
        int tiles = 0;
        if constexpr (TEAMS == 1) {
#pragma unroll 1
            for (; tile < TILES && tiles < WARPS / FINISHERS; ++tiles, tile += GRID) {
                factors.multiply_tile(own_sum, tile + GRID < TILES, activations, t, ring, barriers);
                own_sum += FINISHERS * RUNS * (SUMS_OF[P] * 4);
            }
        } else {
            static_assert(FINISHERS == 1, "a warp finishes a tile");
            int left = (TILES - 1 - tile) / GRID + 1;
            tiles = left < WARPS ? left : WARPS;
            tile += tiles * GRID;
            own_sum += team * (SUMS_OF[P] * 4);
#pragma unroll 1
            for (int end = run - team + tiles * RUNS; run < end; run += TEAMS, own_sum += TEAMS * (SUMS_OF[P] * 4)) {
                factors.multiply_run(own_sum, run + TEAMS < runs, activations, t, own_ring, barriers);
            }
        }
        meet();
        if (t.warp < tiles * FINISHERS) {
            float a = sum_of_sharers<SHARERS, TEAMS>(from);
            float b = RUNS == 2 ? sum_of_sharers<SHARERS, TEAMS>(from + SUMS_OF[P]) : 0.0f;
#if BITS && !GROUP
            a *= scale_low;
            b *= scale_high;
#endif
            if (P == OUTPUT || P == DOWN) {
                if (P == DOWN || l > 0) {
                    for (u32 polls = 0; residual.bits == 0xffffu; count_poll(polls, wait_name("residual"))) residual = load_fresh_one(before + low);
                }
                X y = narrow<X>(widen(residual) + p.alpha * (a + add_low));
                if (!ended && leaves) leave(to, y);
                if (ended && leaves) m.y[low] = y;
            } else if (P == ROUTER) {
                if (leaves) leave((float*)(m.exchange + (i64)l * LAYER_BYTES + LOGITS_AT) + low, ROUNDED_LOGITS ? widen(narrow<X>(a)) : a);
            } else if (P == UP) {
                a += add_low;
                b += add_high;
                if (p.limit > 0.0f) {
                    if (a > p.limit) a = p.limit;
                    if (b > p.limit) b = p.limit;
                    if (MIDDLE == GATED && b < -p.limit) b = -p.limit;
                }
                if (MIDDLE == GATED) {
                    float inner = apply(a) * b;
#if EXPERTS
                    /* The weighted sum of the experts is one product of what is weighted. */
                    inner *= Choice(m.rule, (u32*)(memory + CHOICE_AT)).weights[low / EXPERT_INNER];
#endif
                    X y = narrow<X>(inner);
                    if (leaves) leave(to, y);
                } else {
                    X y = narrow<X>(apply(a)), other = narrow<X>(apply(b));
                    if (leaves) {
                        leave(to, y);
                        if (RUNS == 2) leave(to + (high - low), other);
                    }
                }
            } else {
                a += add_low;
                b += add_high;
                if (rows.turned) {
                    float other = a * cosine - b * sine;
                    b = b * cosine + a * sine;
                    a = other;
                }
                X y = narrow<X>(a), other = narrow<X>(b);
                if (leaves) {
                    leave(to, y);
                    if (RUNS == 2) leave(to + (high - low), other);
                }
                if (cache) {
                    cache[0] = y;
                    if (RUNS == 2) cache[high - low] = other;
                }
            }
        }
        if (TILES <= GRID * (WARPS / FINISHERS) || tile >= TILES) break;
        read_ahead(tile);
        meet();
    }
}

/* The token in front of the layers. Every block writes all of it, and reads what it wrote by itself. */
__device__ inline void embed(const Model& m, i64 id, i64 position) {
    const Embedding& e = m.embedding;
    bool known = id >= 0 && id - e.first_row >= 0 && id - e.first_row < e.row_count;
    bool placed = e.position_rows && position >= 0 && position + e.position_offset < e.position_row_count;
#pragma unroll 1
    for (int at = threadIdx.x * 8; at < HIDDEN; at += MULTIPLIERS * 8) {
        float sums[8] = {}, its[8];
        if (known) load_eight(e.rows + (id - e.first_row) * HIDDEN + at, sums);
        if (placed) {
            load_eight(e.position_rows + (position + e.position_offset) * HIDDEN + at, its);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] += its[i];
        }
        store_eight((X*)m.x + at, sums);
    }
}

/* Ones again, by `count` threads, of which this begins at `at`. */
__device__ inline void clear(void* from, i64 bytes, i64 at, int count) {
    Vector ones = {{~0u, ~0u, ~0u, ~0u}};
#pragma unroll 1
    for (; at < bytes; at += count * 16) *(Vector*)((u8*)from + at) = ones;
}
#endif

extern "C" __global__ void __launch_bounds__(BLOCK, 1) layers(Extent tokens, Extent sequences, const __grid_constant__ Model m) {
#if __CUDA_ARCH__ >= 900
    __shared__ __align__(16) float2 scratch[2 * WARPS];
    __shared__ float2 sines[HEAD / 2];
    __shared__ u32 last;
    launch_dependents_and_wait();
    int start = m.query_start[0], length = m.query_length[0], total = m.kv_length[0], position = 0;
    int place = m.slots[0], id = -1, embedded = -1;
    if (m.embedding.rows) id = m.embedding.ids[0];
    if (m.embedding.position_rows) embedded = m.embedding.positions[0];
#if ROPE
    position = m.positions[0];
#endif
    if (tokens.count() <= 0) return;
    /* A token of no sequence attends to nothing: its layers are computed with zeros for attention. */
    bool attends = sequences.count() > 0 && start <= 0 && -start < length;
    Share share;
    share.keys = attends ? total : 0;
    if (CAUSAL && total - length - start + 1 < share.keys) share.keys = total - length - start + 1;
    if (share.keys > (int)m.block_table_columns * SLOTS) share.keys = (int)m.block_table_columns * SLOTS;
    share.units = share.keys > 0 ? (share.keys + UNIT - 1) / UNIT : 0;
    share.live = (share.units + WARPS - 1) / WARPS;
    if (MERGED && share.units <= ALONE * WARPS) share.live = 1;
    share.live = share.live < 1 ? 1 : share.live > SPLITS ? SPLITS : share.live;
    constexpr int parts = KV_HEADS * PARTS_OF_GROUP;
    share.part = blockIdx.x % parts;
    share.split = blockIdx.x / parts;
    share.place = place < m.pages * SLOTS ? place : -1;

    u32 barriers;
    asm volatile("mov.u32 %0, %1;" : "=r"(barriers) : "r"((u32)__cvta_generic_to_shared(memory + BARRIERS_AT)));
    Layer* table = (Layer*)(memory + TABLE_AT);
    int count = (int)m.layers;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * (int)(sizeof(Layer) / 8); i += BLOCK) ((u64*)table)[i] = ((const u64*)m.table)[i];
#if EXPERTS
#pragma unroll 1
    for (int i = threadIdx.x; i < count * (int)(sizeof(ExpertLayer) / 8); i += BLOCK) {
        ((u64*)(memory + EXPERT_TABLE_AT))[i] = ((const u64*)m.expert_table)[i];
    }
#endif
#if ROPE
    if (threadIdx.x < PAIRS) {
        float angle = __fmul_rn((float)position, m.frequencies[threadIdx.x]);
        sines[threadIdx.x] = make_float2(sinf(angle), cosf(angle));
    }
#endif
    if (threadIdx.x < RING_SLOTS) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barriers + threadIdx.x * 16) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barriers + threadIdx.x * 16 + 8), "n"(WARPS) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS) {
#if WIDE && __CUDA_ARCH__ < 1000
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
        if (threadIdx.x / 32 == WARPS) copy_weights(m, table, share, barriers);
        return;
    }
#if WIDE && __CUDA_ARCH__ < 1000
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif

    if (m.embedding.rows) {
        embed(m, id, embedded);
        meet();
    }
    Thread t;
    t.warp = threadIdx.x / 32;
    t.lane = threadIdx.x % 32;
    t.group = t.lane / 4;
    t.part = t.lane % 4;
    t.none = (u32)(m.layers >> 32);
    u8* mine = m.exchange;
    int unit = share.split * WARPS + t.warp;
    int2 pages = make_int2(-1, -1);
    if (share.split < share.live) {
        if (unit < share.units) pages.x = m.block_table[unit * UNIT / SLOTS];
        unit += share.live * WARPS;
        if (unit < share.units) pages.y = m.block_table[unit * UNIT / SLOTS];
    }
    Ring ring = {0, 0};
    /* Eight neighbouring threads set a line to ones. */
    int turn = 0, ones_at = (threadIdx.x / 8 * GRID + blockIdx.x) * 128 + threadIdx.x % 8 * 16;
#pragma unroll 1
    for (int l = 0; l < count; ++l) {
        const Layer& layer = table[l];
        i64 base = (i64)l * LAYER_BYTES;
        float* partial = m.partial + (i64)l * PARTIAL_FLOATS;
        run_product<INPUT>(m, layer, t, share, l, turn, ring, barriers, mine, partial, sines, scratch);
        if (share.split < share.live) {
            X* merged = (X*)(mine + base + MERGED_AT);
            attend(m, layer, share, (const X*)(mine + base + QUERIES_AT), pages, sines, (float*)(memory + HEADS_AT), partial, merged);
            if (MERGED && share.live > 1) leave_merged(share, partial, merged);
        }
        run_product<OUTPUT>(m, layer, t, share, l, turn, ring, barriers, mine, partial, sines, scratch);
#if EXPERTS
        stage_normed(m.products[UP], layer.norm_weights[1], layer.norm_biases[1], (const X*)(mine + base + MIDDLE_AT), false,
                     memory + ACTIVATIONS_AT, scratch);
        meet();
        run_product<ROUTER>(m, layer, t, share, l, turn, ring, barriers, mine, partial, sines, scratch);
#endif
        run_product<UP>(m, layer, t, share, l, turn, ring, barriers, mine, partial, sines, scratch);
        if (l > 0) {
            /* All blocks are past the layer before: ones again. */
            clear(m.exchange + base - LAYER_BYTES, LAYER_BYTES, ones_at, MULTIPLIERS * GRID);
            clear(partial - PARTIAL_FLOATS, PARTIAL_FLOATS * 4, ones_at, MULTIPLIERS * GRID);
        }
        run_product<DOWN>(m, layer, t, share, l, turn, ring, barriers, mine, partial, sines, scratch);
    }
    /* The block that ends last. */
    meet();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(m.done, 1u) == GRID - 1;
        __threadfence();
    }
    meet();
    if (last) {
        clear(m.exchange + (i64)(count - 1) * LAYER_BYTES, LAYER_BYTES, threadIdx.x * 16, MULTIPLIERS);
        clear(m.partial + (i64)(count - 1) * PARTIAL_FLOATS, PARTIAL_FLOATS * 4, threadIdx.x * 16, MULTIPLIERS);
        if (threadIdx.x == 0) *m.done = 0;
    }
#endif
}
