/*
 * All layers of a decoder for one token in one persistent, cooperative launch: sm_90 and up, f16 or bf16. Each layer is a norm with the
 * product of query, key and value; attention; the output product with residual; a norm with the first product of the MLP; the second
 * product of the MLP with residual. If the program embeds the token in the same region, the launch begins with that.
 *
 * With EXPERTS the MLP is a mixture of experts. The router's product follows the norm, and blocks exchange its logits like every other
 * result. In every block the producer warp waits for the logits, chooses the experts (choose.cuh), and copies their weights. The chosen
 * experts are treated as one MLP: the outputs of the first product are those of the chosen experts one after the other, each multiplied
 * by the weight of its expert, and a row of the second product is the concatenation of the experts' rows.
 *
 * Grid: at most one block per SM, all resident. Each block has 8 consumer warps, which multiply, and a producer warp, which copies weights.
 *
 * Exchange between blocks: there is no grid barrier and no fence. Each result that another block reads has a place of its own in
 * `exchange`, one set of places for each layer. A place holds the sentinel "all bits set", a NaN that no arithmetic produces, until the
 * result is written; readers poll until no sentinel is left. So a result takes one trip to the L2 and one back.
 *
 * Resetting the exchange: once a block has read the token in the middle of layer l, no block reads places of layer l - 1 any more. Every
 * part of that token needed the whole token in front of layer l, which needed all inner results of layer l - 1, and each block
 * contributes to those after it has read everything else of its layer. So blocks write sentinels to layer l - 1 while they run layer l, and
 * the block that ends last does so for the last layer.
 *
 * Tiles: a tile is one run of neighbouring outputs, or two runs where results come in pairs (rotated heads, gates). Tiles are dealt to
 * blocks round-robin across products, so that every block reads equally many bytes. The producer warp copies runs into a ring buffer, in
 * the order of all products of all layers, and waits only for the consumers of the ring: memory stays busy while blocks wait for each
 * other. A run is as many outputs as fit into a ring slot contiguously, so that it takes one bulk copy, or a few at an even pace: a copy costs
 * its SM 70 ns however short it is.
 *
 * Tensor cores: weights are the 16-row operand of mma.m16n8k16 in the order in which they lie in memory, so the 16 bytes of a lane are
 * its whole fragment. With one token the 8 columns of the other operand are free to hold different inputs; of each row of the
 * result only one column counts. So the rows of a run of 8, 4 or 2 outputs are 2, 4 or 8 sets of 32 inputs each, which lie beside each other,
 * and so in different banks (`weights.cuh`). Packed integers of 4 or 8 bits are multiplied by bytes of activations instead (`packed.cuh`); of
 * floats of 4 bits a lane has inputs of a scale of its own (`floats.cuh`). With DENSE_ATTENTION only the MLP has packed weights.
 *
 * Where blocks have several runs of a product, two teams of four warps take runs in turn: while one team waits for its next run, the other
 * one multiplies.
 *
 * With POST_NORMS the results of attention and MLP are normalised before they are added to the token, which needs all of a result. So
 * every block keeps the token for itself, and adds to it whole results that it reads from the exchange. The first block writes it in the end.
 * So it is, too, with RANKS, where several GPUs have a part of each product, and results are the sums of their parts (ranks.cuh).
 *
 * With PARALLEL the MLP is beside attention: its norm takes the token in front of the layer, and both results are added to that at once. The
 * first half of the MLP then precedes the output product, so that memory is busy while blocks exchange the result of attention. That
 * token is complete only after all blocks have ended the layer before, whose places are reset once a block has read it.
 *
 * Attention may be of two kinds in turn, which differ in window, scale and rotary embedding: KINDS, and the layer's `kind`. With NEIGHBOURS
 * rotated pairs are neighbouring outputs, which lie in one run, instead of the halves of a head.
 *
 * Attention: a block takes a part of the query heads of a KV head and a split of the keys; its warps take units of 16 keys, as in
 * attention/decode.cu. If all heads together have few elements, every block that multiplies the result merges the splits for itself.
 * Otherwise reading all splits takes longer than another trip through the L2, so the blocks that computed them merge them. Nothing is merged
 * if one block has all keys.
 *
 * Bytes: all weights, keys and values once. Floor: those over read bandwidth, or for small models five trips through the L2 per layer.
 * Measured figures: docs/src/performance/cuda.md and cuda-experts.md.
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
#elif FUNCTION == 6
    return tanhf(x);
#else
#error FUNCTION is not the number of an activation
#endif
}

/* The weight of a norm after attention, 0, or MLP, 1; and where the result is that is added to the token. */
#if POST_NORMS
#define POST_NORM_OF(l, which) ((l) < 0 ? nullptr : extras[l].post_norms[which])
#else
#define POST_NORM_OF(l, which) ((const G*)nullptr)
#endif
#if RANKS > 1
#define RESULT(number, place) ((const u8*)m.ranks.from + set_of(share.launched, number))
#else
#define RESULT(number, place) (place)
#endif
#if SINKS
#define SINKS_OF(l) (extras[l].sinks)
#else
#define SINKS_OF(l) ((const float*)nullptr)
#endif

/* This block's tiles of a product, with the norm in front of it and its epilogue. If blocks keep the token, every block takes the result
 * in front of the norm, and `post_norm` is the weight of that result's own norm. */
template <int P>
__device__ inline void run_product(const Model& m, const Layer& layer, const AttentionKind& kind, const Thread& t, const Share& share, int l,
                                   int& turn, Ring& ring, u32 barriers, u8* mine, const float* partial, const float* sinks,
                                   const float2* sines, float2* scratch, const G* post_norm = nullptr) {
    constexpr int TILES = TILES_OF[P], RUNS = RUNS_OF[P], RUN = ROWS_OF[P];
    /* Warps that finish a tile together: one for each 8 outputs of its runs. */
    constexpr int FINISHERS = RUN > 8 ? RUN / 8 : 1;
    /* Lanes of a warp that have the same output of a run in the end. */
    constexpr int SHARERS = Factors<P>::SHARERS;
    /* The router reads what the first half of the MLP does. */
    const Product& p = m.products[P == ROUTER ? UP : P];
    int first = first_of(turn);
    turn = turn_after(turn, TILES);
#if KEEPS_TOKEN
    auto stage = [&](bool stages) {
        const u8* result = RESULT(P == UP ? RESULT_IN(l) : RESULT_BEFORE(l), m.exchange + (i64)l * LAYER_BYTES + (P == UP ? MIDDLE_AT : 0));
        stage_token<P == UP ? UP : INPUT>(m, layer, post_norm, result, P == UP || l > 0, stages, scratch);
    };
    if (P == INPUT && first >= TILES) stage(false);
#endif
    if (first >= TILES) return;
    /* With planes of bytes the router has its activations as they are. */
    u8* activations = memory + (P == ROUTER && PLANES ? PLAIN_AT : ACTIVATIONS_AT);
    float* sums = (float*)(memory + SUMS_AT);
    mine += (i64)l * LAYER_BYTES;
    /* The source of residuals, and the destination of results. */
    const X* before = P == OUTPUT ? l ? (const X*)mine : m.x : (const X*)(mine + MIDDLE_AT);
    i64 after = (i64)l * LAYER_BYTES + (P == INPUT ? QUERIES_AT : P == OUTPUT ? MIDDLE_AT : P == UP ? INNER_AT : LAYER_BYTES);
    bool leaves = t.lane % SHARERS == 0;
#if EXPERTS
    const ExpertLayer& experts = ((const ExpertLayer*)(memory + EXPERT_TABLE_AT))[l];
    const Choice choice(m.rule, (u32*)(memory + CHOICE_AT));
    const BIAS* bias = P == ROUTER ? experts.router_bias : layer.biases[P == ROUTER ? UP : P];
#else
    const BIAS* bias = layer.biases[P == ROUTER ? UP : P];
#endif
    /* Operands of the epilogue of this warp's part of a tile, loaded ahead of the product. */
    bool finishes;
    Rows rows;
    int low, high;
    float add_low, add_high, sine, cosine;
    float scale_low = 1.0f, scale_high = 1.0f;
    X* cache;
    X residual, attended;
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
            if (NEIGHBOURS) rows.turned = low < queries + keys && low % HEAD < 2 * PAIRS;
            if (rows.turned) {
                float2 turned = sines[NEIGHBOURS ? low % HEAD / 2 : low % HEAD];
                float scale = low < queries ? kind.query_scale : kind.key_scale;
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
        residual = attended = X{0};
        if (finishes) {
#if EXPERTS
            /* The choice of experts is known in the second half of the MLP; in the first, see `read_biases`. */
            if (P == DOWN) {
#pragma unroll
                for (int slot = 0; bias && slot < CHOSEN; ++slot) {
                    add_low += choice.weights[slot] * widen(bias[(i64)choice.chosen[slot] * HIDDEN + low]);
                }
            } else
#endif
            if (!IS_OF_EXPERTS(P)) {
                add_low = or_else(bias, low, 0.0f);
                if (RUNS == 2) add_high = or_else(bias, high, 0.0f);
            }
            if (!KEEPS_TOKEN && !PARALLEL && (P == OUTPUT || P == DOWN)) residual = load_fresh_one(before + low);
            if (PARALLEL && P == DOWN) {
                residual = (l ? (const X*)mine : m.x)[low];
                attended = load_fresh_one((const X*)(mine + MIDDLE_AT) + low);
            }
        }
#if BITS
        if (IS_SCALED(P)) {
            const SCALE* scales = (const SCALE*)(layer.weights[P] + NUMBERS_AT(P));
            scale_low = finishes ? widen(scales[low]) : 0.0f;
            scale_high = finishes && RUNS == 2 ? widen(scales[high]) : 0.0f;
        }
#endif
        to = (X*)(m.exchange + after) + low;
    };
    read_ahead(first);
    /* The biases of a chosen expert, once a slot with its weights was full. */
    auto read_biases = [&]() {
#if EXPERTS
        if (P != UP || !finishes || !bias) return;
        i64 at = (i64)choice.chosen[low / EXPERT_INNER] * EXPERT_INNER + low % EXPERT_INNER;
        add_low = widen(bias[at]);
        add_high = or_else(experts.second_bias, at, 0.0f);
#endif
    };
    Factors<P> factors;
    /* With two teams, the ring slots of this warp's team, and the index of its next run. */
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
        /* Staged once for the router and the first half of the MLP. */
    } else if (P == INPUT || P == UP) {
#if KEEPS_TOKEN
        stage(true);
#else
        bool there = (P == INPUT || PARALLEL) && l == 0;
        const X* x = there ? m.x : (const X*)(mine + (P == UP && !PARALLEL ? MIDDLE_AT : 0));
        stage_normed(p, layer.norm_weights[P / 2], layer.norm_biases[P / 2], x, there, activations, scratch);
#endif
    } else if (P == OUTPUT) {
        if (MERGED) {
            stage_plain<HEADS * HEAD>((const X*)(mine + MERGED_AT), activations);
        } else {
            stage_merged(partial, share.live, sinks, activations);
        }
    } else {
        stage_plain<INNER>((const X*)(mine + INNER_AT), activations);
    }
    meet();
#if RANKS > 1
    /* Once this block has its inputs: should one of them come from a rank that gave up, the flag is set. */
    u32 failed = P == OUTPUT || P == DOWN ? load_word(m.ranks.failed) : 0;
    i64 part = P == OUTPUT || P == DOWN ? set_of(share.launched, P == OUTPUT ? RESULT_IN(l) : RESULT_BEFORE(l + 1)) : 0;
#endif
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
                if (tiles == 0) read_biases();
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
        if (TEAMS > 1) read_biases();
        if (t.warp < tiles * FINISHERS) {
            float a = sum_of_sharers<SHARERS, TEAMS>(from);
            float b = RUNS == 2 ? sum_of_sharers<SHARERS, TEAMS>(from + SUMS_OF[P]) : 0.0f;
            if (IS_SCALED(P)) {
                a *= scale_low;
                b *= scale_high;
            }
            if (P == OUTPUT || P == DOWN) {
                if (!KEEPS_TOKEN && !PARALLEL && (P == DOWN || l > 0)) {
                    for (u32 polls = 0; residual.bits == 0xffffu; count_poll(polls, wait_name("residual"))) residual = load_fresh_one(before + low);
                }
                if (PARALLEL && P == DOWN) {
                    const X* from = (const X*)(mine + MIDDLE_AT) + low;
                    for (u32 polls = 0; attended.bits == 0xffffu; count_poll(polls, wait_name("attention"))) attended = load_fresh_one(from);
                }
                /* Beside the MLP attention's result is added with it. */
                float sum = a + add_low;
                if (PARALLEL && P == DOWN) sum = widen(residual) + p.alpha * widen(attended) + sum;
                if (!KEEPS_TOKEN && !PARALLEL) sum = widen(residual) + p.alpha * sum;
                X y = narrow<X>(sum);
#if RANKS > 1
                if (!failed && leaves) leave_part(m.ranks, part + low * 2, y);
#else
                bool ended = !KEEPS_TOKEN && P == DOWN && l == (int)m.layers - 1;
                if (!ended && leaves) leave(to, y);
                if (ended && leaves) m.y[low] = y;
#endif
            } else if (P == ROUTER) {
                a += add_low;
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
                    float inner = apply(a) * (b + p.up_offset);
#if EXPERTS
                    /* The weighted sum of the experts is a single product over the concatenated, weighted activations. */
                    inner *= choice.weights[low / EXPERT_INNER];
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
#if NEIGHBOURS
                float pair = __shfl_xor_sync(0xffffffffu, a, SHARERS);
                if (rows.turned) a = a * cosine + (low % 2 ? pair : -pair) * sine;
#else
                if (rows.turned) {
                    float other = a * cosine - b * sine;
                    b = b * cosine + a * sine;
                    a = other;
                }
#endif
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

/* Embeds the token, and adds the embedding to itself. Every block writes all of it, and reads only what it wrote itself. */
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
        if (e.alpha != 0.0f) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] += e.alpha * sums[i];
        }
        store_eight((X*)m.x + at, sums);
    }
}

/* The pages of a warp's first two units; -1 for none. */
__device__ inline int2 first_pages(const Model& m, const Share& share, int warp) {
    int unit = share.first + share.split * WARPS + warp;
    int2 pages = make_int2(-1, -1);
    if (share.split < share.live) {
        if (unit < share.units) pages.x = m.block_table[unit * UNIT / SLOTS];
        unit += share.live * WARPS;
        if (unit < share.units) pages.y = m.block_table[unit * UNIT / SLOTS];
    }
    return pages;
}
#endif

extern "C" __global__ void __launch_bounds__(BLOCK, 1) layers(Extent tokens, Extent sequences, const __grid_constant__ Model m) {
#if __CUDA_ARCH__ >= 900
    __shared__ __align__(16) float2 scratch[2 * WARPS];
    __shared__ float2 all_sines[KINDS][HEAD / 2];
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
    /* A token that belongs to no sequence has no keys: its attention is zero. */
    bool attends = sequences.count() > 0 && start <= 0 && -start < length;
    Share share;
    share.keys = attends ? total : 0;
    share.end = total - length - start + 1;
    if (CAUSAL && share.end < share.keys) share.keys = share.end;
    if (share.keys > (int)m.block_table_columns * SLOTS) share.keys = (int)m.block_table_columns * SLOTS;
    share.look(m.kinds[0].window);
    constexpr int parts = KV_HEADS * PARTS_OF_GROUP;
    share.part = blockIdx.x % parts;
    share.split = blockIdx.x / parts;
    share.place = place < m.pages * SLOTS ? place : -1;
#if RANKS > 1
    share.launched = *m.ranks.launched;
#endif

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
    static_assert(KINDS * PAIRS <= BLOCK, "a thread for each sine");
    if (threadIdx.x < KINDS * PAIRS) {
        int kind = KINDS == 1 ? 0 : threadIdx.x / PAIRS, pair = threadIdx.x - kind * PAIRS;
        const float* frequencies = m.kinds[kind].frequencies;
        /* Where others are rotated, heads that are not are rotated by an angle of 0. */
        float angle = KINDS == 1 || frequencies ? __fmul_rn((float)position, frequencies[pair]) : 0.0f;
        all_sines[kind][pair] = make_float2(sinf(angle), cosf(angle));
    }
#endif
#if EXTRAS
#pragma unroll 1
    for (int i = threadIdx.x; i < count * (int)(sizeof(ExtraLayer) / 8); i += BLOCK) {
        ((u64*)(memory + EXTRA_TABLE_AT))[i] = ((const u64*)m.extra_table)[i];
    }
    const ExtraLayer* extras = (const ExtraLayer*)(memory + EXTRA_TABLE_AT);
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
    int2 pages = first_pages(m, share, t.warp);
#if KEEPS_TOKEN
    take_token(m.x);
#endif
    Ring ring = {0, 0};
    /* Eight neighbouring threads write the sentinel to one cache line. */
    int turn = 0, ones_at = (threadIdx.x / 8 * GRID + blockIdx.x) * 128 + threadIdx.x % 8 * 16;
#pragma unroll 1
    for (int l = 0; l < count; ++l) {
        const Layer& layer = table[l];
        i64 base = (i64)l * LAYER_BYTES;
        float* partial = m.partial + (i64)l * PARTIAL_FLOATS;
        const float* sinks = SINKS_OF(l);
#if KINDS > 1
        const AttentionKind& kind = m.kinds[extras[l].kind];
        const float2* sines = all_sines[extras[l].kind];
        share.look(kind.window);
        pages = first_pages(m, share, t.warp);
#else
        const AttentionKind& kind = m.kinds[0];
        const float2* sines = all_sines[0];
#endif
        run_product<INPUT>(m, layer, kind, t, share, l, turn, ring, barriers, mine, partial, sinks, sines, scratch, POST_NORM_OF(l - 1, 1));
        if (share.split < share.live) {
            X* merged = (X*)(mine + base + MERGED_AT);
            attend(m, layer, kind, share, (const X*)(mine + base + QUERIES_AT), pages, sinks, sines, (float*)(memory + HEADS_AT), partial,
                   merged);
            if (MERGED && share.live > 1) leave_merged(share, partial, sinks, merged);
        }
        if (!PARALLEL) run_product<OUTPUT>(m, layer, kind, t, share, l, turn, ring, barriers, mine, partial, sinks, sines, scratch);
#if EXPERTS
#if KEEPS_TOKEN
        stage_token<UP>(m, layer, POST_NORM_OF(l, 0), RESULT(RESULT_IN(l), mine + base + MIDDLE_AT), true, true, scratch, memory + PLAIN_AT);
#else
        stage_normed(m.products[UP], layer.norm_weights[1], layer.norm_biases[1], (const X*)(mine + base + MIDDLE_AT), false,
                     memory + ACTIVATIONS_AT, scratch, memory + PLAIN_AT);
#endif
        meet();
        run_product<ROUTER>(m, layer, kind, t, share, l, turn, ring, barriers, mine, partial, sinks, sines, scratch);
#endif
        run_product<UP>(m, layer, kind, t, share, l, turn, ring, barriers, mine, partial, sinks, sines, scratch, POST_NORM_OF(l, 0));
        if (l > 0) {
            /* No block reads the previous layer any more. */
            clear(m.exchange + base - LAYER_BYTES, LAYER_BYTES, ones_at, MULTIPLIERS * GRID);
            clear(partial - PARTIAL_FLOATS, PARTIAL_FLOATS * 4, ones_at, MULTIPLIERS * GRID);
#if RANKS > 1
            if (l > 1) clear_result(m.ranks, share.launched, RESULT_BEFORE(l - 1), ones_at, MULTIPLIERS * GRID);
            clear_result(m.ranks, share.launched, RESULT_IN(l - 1), ones_at, MULTIPLIERS * GRID);
#endif
        }
        if (PARALLEL) run_product<OUTPUT>(m, layer, kind, t, share, l, turn, ring, barriers, mine, partial, sinks, sines, scratch);
        run_product<DOWN>(m, layer, kind, t, share, l, turn, ring, barriers, mine, partial, sinks, sines, scratch);
    }
#if KEEPS_TOKEN
    if (blockIdx.x == 0) {
        leave_token(m, POST_NORM_OF(count - 1, 1), RESULT(RESULT_BEFORE(count), mine + EXCHANGE_END(count) - ROOM_OF(HIDDEN)), (float*)scratch);
    }
#endif
    /* The block that ends last resets the last layer. */
    meet();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(m.done, 1u) == GRID - 1;
        __threadfence();
    }
    meet();
    if (last) {
        i64 at = (i64)(count - 1) * LAYER_BYTES;
        clear(m.exchange + at, EXCHANGE_END(count) - at, threadIdx.x * 16, MULTIPLIERS);
        clear(m.partial + (i64)(count - 1) * PARTIAL_FLOATS, PARTIAL_FLOATS * 4, threadIdx.x * 16, MULTIPLIERS);
        if (threadIdx.x == 0) *m.done = 0;
#if RANKS > 1
        if (count > 1) clear_result(m.ranks, share.launched, RESULT_BEFORE(count - 1), threadIdx.x * 16, MULTIPLIERS);
        clear_result(m.ranks, share.launched, RESULT_IN(count - 1), threadIdx.x * 16, MULTIPLIERS);
        clear_result(m.ranks, share.launched, RESULT_BEFORE(count), threadIdx.x * 16, MULTIPLIERS);
        if (threadIdx.x == 0) *m.ranks.launched = share.launched + 2 * (u32)count;
#endif
    }
#endif
}
