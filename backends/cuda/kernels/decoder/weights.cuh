/*
 * Weights of the decoder kernel: the ring buffer that the producer warp fills, and the products of its slots.
 */
#if __CUDA_ARCH__ >= 900
/* Waits for a barrier of a ring slot. Each slot has two: "full", and 8 bytes further "empty", which all consumer warps arrive at. */
__device__ inline void await_phase(u32 barrier, u32 phase) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
    } while (!done);
}
__device__ inline u32 clock_now() {
    u32 clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
    return clock;
}
template <int COUNT = 1> __device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "n"(COUNT) : "memory");
}

/* A position in the ring: a slot, and the parity of its phase. */
struct Ring {
    int slot;
    u32 phase;
    __device__ void next() {
        if (++slot == RING_SLOTS) {
            slot = 0;
            phase ^= 1;
        }
    }
    __device__ void skip(int slots) {
        slot += slots;
        phase ^= slot / RING_SLOTS & 1;
        slot %= RING_SLOTS;
    }
};

/* The first tile of a product for this block, given the block at which the product begins; and the block at which the next one begins. */
__device__ inline int first_of(int turn) {
    int mine = (int)blockIdx.x - turn;
    return mine < 0 ? mine + GRID : mine;
}
__device__ inline int turn_after(int turn, int tiles) {
    turn += tiles % GRID;
    return turn < GRID ? turn : turn - GRID;
}

/* The first outputs of the runs of a tile, and whether they are rotated with each other. */
struct Rows {
    int low, high;
    bool turned;
};
template <int P> __device__ inline Rows rows_of(int tile) {
    constexpr int RUN = ROWS_OF[P];
    if (RUNS_OF[P] == 1) return Rows{RUN * tile, RUN * tile, false};
    if (P == UP && MIDDLE == GATED) return Rows{RUN * tile, INNER + RUN * tile, false};
    Rows rows = {2 * RUN * tile, 2 * RUN * tile + RUN, false};
#if ROPE
    int head = rows.low / HEAD, at = rows.low - head * HEAD;
    if (P == INPUT && head < HEADS + KV_HEADS && at < 2 * PAIRS) {
        rows.low = head * HEAD + at / 2;
        rows.high = rows.low + PAIRS;
        rows.turned = true;
    }
#endif
    return rows;
}

__device__ inline void fetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from)); }
/* Prefetches this block's share of the cache lines of a vector. */
__device__ inline void fetch_vector(const void* from, int bytes, int lane) {
    int at = blockIdx.x * 128 + lane * (GRID * 128);
    if (from && at < bytes) fetch_line((const u8*)from + at);
}

/* The unit of keys of which a lane prefetches half, and its page: the first two units of each warp of the block are prefetched. */
struct Prefetch {
    int unit, page;

    __device__ Prefetch(const Model& m, const Share& share, int lane) {
        unit = share.first + (lane / 2 / WARPS * share.live + share.split) * WARPS + lane / 2 % WARPS;
        page = -1;
        if (share.split < share.live && unit < share.units) page = m.block_table[unit * UNIT / SLOTS];
        page = page < (int)m.pages ? page : -1;
    }
};

/* Prefetches into the L2 what a layer reads besides its weights, and its slots in the exchange. */
__device__ inline void fetch_layer(const Model& m, const Layer* table, int l, const Share& share, int lane,
                                   const Prefetch (&prefetch)[KINDS]) {
    const Layer& layer = table[l];
    fetch_vector(m.exchange + (i64)l * LAYER_BYTES, LAYER_BYTES, lane);
    fetch_vector(m.partial + (i64)l * PARTIAL_FLOATS, PARTIAL_FLOATS * 4, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        fetch_vector(layer.norm_weights[i], HIDDEN * sizeof(G), lane);
        fetch_vector(layer.norm_biases[i], HIDDEN * sizeof(SHIFT), lane);
    }
    /* Biases of experts are prefetched once they are chosen. */
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (!IS_OF_EXPERTS(i)) fetch_vector(layer.biases[i], OUTPUTS_OF[i] * sizeof(BIAS), lane);
    }
#if HEAD_NORMS
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int heads = OVER_ALL_HEADS ? (i == 0 ? HEADS : KV_HEADS) : 1;
        fetch_vector(layer.head_norms[i], heads * HEAD * sizeof(HEAD_NORM), lane);
    }
#endif
    int unit = prefetch[0].unit, page = prefetch[0].page;
#if EXTRAS
    const ExtraLayer& extra = ((const ExtraLayer*)(memory + EXTRA_TABLE_AT))[l];
    if (KINDS > 1 && extra.kind) {
        unit = prefetch[KINDS - 1].unit;
        page = prefetch[KINDS - 1].page;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) fetch_vector(extra.post_norms[i], HIDDEN * sizeof(G), lane);
    if (SINKS) fetch_vector(extra.sinks, HEADS * sizeof(float), lane);
#endif
#if BITS && !GROUP
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (!IS_OF_EXPERTS(i)) fetch_vector(layer.weights[i] + NUMBERS_AT(i), OUTPUTS_OF[i] * sizeof(SCALE), lane);
    }
#endif
    if (page < 0) return;
    i64 head = share.part / PARTS_OF_GROUP, slot = unit * UNIT % SLOTS + lane % 2 * 8;
    const X* keys = layer.keys + page * m.key_strides.page + head * m.key_strides.head + slot * m.key_strides.slot;
    const X* values = layer.values + page * m.value_strides.page + head * m.value_strides.head + slot * m.value_strides.slot;
#pragma unroll 1
    for (int row = 0; row < 8; ++row) {
#pragma unroll
        for (int at = 0; at < HEAD; at += 64) {
            fetch_line(keys + row * m.key_strides.slot + at);
            fetch_line(values + row * m.value_strides.slot + at);
        }
    }
}

/* The producer warp. */
struct Copier {
    u32 barriers, to;
    u64 once;
    /* The next slot to fill, the oldest one that is in flight, and the number of slots requested so far. */
    Ring ring, landed;
    int asked;
    /* The clock at which memory has delivered all requested bytes, at the target rate. */
    u32 due;

    Pacing pacing;

    /* Waits until `bytes` more may be requested. If all blocks request at the rate of memory, no queue builds up in which
     * exchanged results would wait, and no block slows down another. */
    __device__ void keep_pace(int bytes) {
        if (!pacing.clocks_per_byte) return;
        u32 now = clock_now();
        /* A clock far in the future has wrapped: the launch may have been suspended for long. */
        while (due - now - 1 < 1u << 20) now = clock_now();
        if (now - due > pacing.catch_up) due = now - pacing.catch_up;
        due += bytes * pacing.clocks_per_byte >> 16;
    }
    /* Waits until the next slot is empty, and until few enough slots are in flight. */
    __device__ void await_room(u32 full) {
        await_phase(full + 8, ring.phase);
        if (++asked > (int)pacing.in_flight) {
            await_phase(barriers + landed.slot * 16, landed.phase);
            landed.next();
        }
    }
    __device__ void copy(u32 to, const u8* from, int bytes, u32 full) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
            :: "r"(to), "l"(from), "r"(bytes), "r"(full), "l"(once) : "memory");
    }

    /* Copies this block's weights of a product, slot by slot. With EXPERTS the products of the MLP take the weights of the `chosen` experts,
     * and the second run of a tile is of the weight `second`. */
    template <int P> __device__ void copy_product(const u8* weights, int& turn, const u8* second = nullptr, const int* chosen = nullptr) {
        if constexpr (IS_DENSE(P)) copy_dense<P>(weights, turn, second, chosen);
#if BITS
        else copy_units<P>(weights, turn, second, chosen);
#endif
    }

#if BITS
    /* Units are whole, or a contiguous range of their columns; so are the scales of their groups, which follow them in the slot. A slot may
     * hold the units of several experts, whose scales follow all of them. */
    template <int P> __device__ void copy_units(const u8* weights, int& turn, const u8* second, const int* chosen) {
        constexpr int ROW = ROW_OF(P), PADDED = PADDED_TO(ROW, SPAN), COLUMNS = COLUMNS_OF[P], UNITS = ROWS_OF[P] / 8;
        /* The rows of several experts are copies of their own. */
        constexpr int MOST_ROWS = ROWS_OF_SLOT(P), PARTS = MOST_ROWS > 1 ? 1 : COPIES;
        static_assert(UNITS * BITS * SPAN % (16 * PARTS) == 0, "copies are of 16 bytes");
        static_assert(!IS_OF_EXPERTS(P) || EXPERT_INNER % ROWS_OF[UP] == 0, "a slot is of one expert");
        int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int tile = first_of(turn); tile < TILES_OF[P]; tile += GRID) {
            Rows outputs = rows_of<P>(tile);
#pragma unroll 1
            for (int run = 0; run < RUNS_OF[P]; ++run) {
                i64 unit = (run ? outputs.high : outputs.low) / 8;
                const u8* of_run = weights;
                if constexpr (IS_OF_EXPERTS(P) && P == UP) {
                    unit = ((i64)chosen[outputs.low / EXPERT_INNER] * EXPERT_INNER + outputs.low % EXPERT_INNER) / 8;
                    of_run = run ? second : weights;
                }
#pragma unroll 1
                for (int slot = 0; slot < SLOTS_OF_RUN(P); ++slot) {
                    int row = slot / SLOTS_OF_ROW(P) * MOST_ROWS, column = slot % SLOTS_OF_ROW(P) * COLUMNS;
                    int rows = INPUTS_OF[P] / ROW - row < MOST_ROWS ? INPUTS_OF[P] / ROW - row : MOST_ROWS;
                    int columns = PADDED - column < COLUMNS ? PADDED - column : COLUMNS;
                    int bytes = UNITS * BITS * columns;
                    int of_groups = GROUP ? LINE * (columns / (GROUP ? GROUP : 1)) : IS_OF_EXPERTS(P) ? LINE : 0;
                    u32 full = barriers + ring.slot * 16, to_slot = to + ring.slot * SLOT_BYTES;
                    await_room(full);
                    if (lane == 0) {
                        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                            :: "r"(full), "r"(rows * (bytes + UNITS * of_groups)) : "memory");
                    }
#pragma unroll 1
                    for (int piece = 0; piece < rows; ++piece) {
                        if constexpr (IS_OF_EXPERTS(P) && P == DOWN) unit = ((i64)chosen[row + piece] * HIDDEN + outputs.low) / 8;
                        const u8* from = of_run + unit * UNIT_BYTES(P) + column * BITS;
                        u32 to_piece = to_slot + piece * bytes;
#pragma unroll 1
                        for (int at = 0; at < bytes; at += bytes / PARTS) {
                            keep_pace(bytes / PARTS);
                            if (lane == 0) copy(to_piece + at, from + at, bytes / PARTS, full);
                        }
                        if ((GROUP || IS_OF_EXPERTS(P)) && lane == 0) {
                            const u8* scales = of_run + NUMBERS_AT(P) + unit * UNIT_SCALES(P) + (GROUP ? column / (GROUP ? GROUP : 1) * LINE : 0);
                            /* Without padding the scales of both units are one range. */
                            constexpr int RANGES = PADDED == PADDED_TO(ROW, 2 * SPAN) ? 1 : UNITS;
                            u32 to_scales = to_slot + rows * bytes + piece * UNITS * of_groups;
#pragma unroll
                            for (int range = 0; range < RANGES; ++range) {
                                int its = UNITS / RANGES * of_groups;
                                copy(to_scales + range * its, scales + range * UNIT_SCALES(P), its, full);
                            }
                        }
                    }
                    ring.next();
                }
            }
        }
        turn = turn_after(turn, TILES_OF[P]);
    }
#endif

    /* Whole runs are contiguous and take a few copies. */
    template <int P> __device__ void copy_dense(const u8* weights, int& turn, const u8* second, const int* chosen) {
        constexpr bool OF_EXPERTS = IS_OF_EXPERTS(P);
        constexpr int ROW = ROW_OF(P), INPUTS = INPUTS_OF[P], COLUMNS = COLUMNS_OF[P], RUN = ROWS_OF[P];
        constexpr bool WHOLE = COLUMNS >= ROW;
        static_assert(!OF_EXPERTS || (ROW % COLUMNS == 0 && EXPERT_INNER % ROWS_OF[UP] == 0), "a slot is of one expert");
        int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int tile = first_of(turn); tile < TILES_OF[P]; tile += GRID) {
            Rows rows = rows_of<P>(tile);
#pragma unroll 1
            for (int run = 0; run < RUNS_OF[P]; ++run) {
                const u8* from = weights + (i64)(run ? rows.high : rows.low) * (ROW * 2);
                if constexpr (OF_EXPERTS && P == UP) {
                    i64 row = (i64)chosen[rows.low / EXPERT_INNER] * EXPERT_INNER + rows.low % EXPERT_INNER;
                    from = (run ? second : weights) + row * (ROW * 2);
                }
#pragma unroll 1
                for (int column = 0; column < INPUTS; column += COLUMNS) {
                    int bytes = (WHOLE ? ROW : column + COLUMNS > INPUTS ? INPUTS - column : COLUMNS) * 2, at_column = column;
                    if constexpr (OF_EXPERTS && P == DOWN) {
                        i64 row = (i64)chosen[column / EXPERT_INNER] * HIDDEN + rows.low;
                        from = weights + row * (ROW * 2);
                        at_column = column % EXPERT_INNER;
                    }
                    u32 full = barriers + ring.slot * 16, slot = to + ring.slot * SLOT_BYTES;
                    await_room(full);
                    if (lane == 0) {
                        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                            :: "r"(full), "r"(bytes * RUN) : "memory");
                    }
                    if constexpr (WHOLE) {
                        constexpr int WHOLE_BYTES = RUN * ROW * 2, PART = WHOLE_BYTES / COPIES;
                        static_assert(WHOLE_BYTES % (16 * COPIES) == 0, "copies are of 16 bytes");
#pragma unroll 1
                        for (int at = 0; at < WHOLE_BYTES; at += PART) {
                            keep_pace(PART);
                            if (lane == 0) copy(slot + at, from + at, PART, full);
                        }
                    } else {
                        keep_pace(bytes * RUN);
                        __syncwarp();
                        if (lane < RUN) copy(slot + lane * bytes, from + at_column * 2 + lane * (ROW * 2), bytes, full);
                    }
                    ring.next();
                }
            }
        }
        turn = turn_after(turn, TILES_OF[P]);
    }
};

#if EXPERTS
/*
 * Chooses the token's experts in a layer, by one warp. Their factors are in `choice` before any slot with weights of experts is
 * full. They remain valid until the logits of the next layer are complete, which requires that this block has used the factors.
 */
__device__ inline void choose(const Model& m, const RouterVectors& vectors, const float* logits, const Choice& choice) {
    const Team team = {(int)threadIdx.x % 32, nullptr};
    float own[EXPERTS_EACH];
    u32 polls = 0, missing;
    /* All of a lane's logits in one trip to the L2. */
    while (true) {
        missing = 0;
#pragma unroll
        for (int i = 0; i < EXPERTS_EACH; ++i) {
            int expert = team.thread + i * 32;
            own[i] = expert < EXPERTS ? load_fresh_float(logits + expert) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < EXPERTS_EACH; ++i) missing = larger_of(missing, __float_as_uint(own[i]));
        if (missing != ~0u) break;
        count_poll(polls, wait_name("logits"));
    }
    __syncwarp();
    choose_experts(m.rule, vectors, team, choice, nullptr, [&](int i) { return own[i]; });
    __syncwarp();
}

/* Prefetches this block's share of the biases of the chosen experts into the L2. */
__device__ inline void fetch_biases(const Layer& layer, const ExpertLayer& experts, const Choice& choice, int lane) {
    auto fetch = [&](const BIAS* biases, int outputs) {
#pragma unroll 1
        for (int slot = 0; biases && slot < CHOSEN; ++slot) fetch_vector(biases + (i64)choice.chosen[slot] * outputs, outputs * sizeof(BIAS), lane);
    };
    fetch(layer.biases[UP], EXPERT_INNER);
    fetch(experts.second_bias, EXPERT_INNER);
    fetch(layer.biases[DOWN], HIDDEN);
}
#endif

__device__ inline void copy_weights(const Model& m, const Layer* table, const Share& share, u32 barriers) {
    int lane = threadIdx.x % 32, layers = (int)m.layers;
    Copier copier = {barriers, (u32)__cvta_generic_to_shared(memory), 0, {0, 1}, {0, 0}, 0, clock_now(), m.pacing};
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(copier.once));
    int turn = 0;
#if KINDS > 1
    Share other = share;
    other.look(m.kinds[1].window);
    const Prefetch prefetch[KINDS] = {{m, share, lane}, {m, other, lane}};
#else
    const Prefetch prefetch[KINDS] = {{m, share, lane}};
#endif
    fetch_layer(m, table, 0, share, lane, prefetch);
#pragma unroll 1
    for (int l = 0; l < layers; ++l) {
        const u8* const (&weights)[4] = table[l].weights;
        copier.copy_product<INPUT>(weights[INPUT], turn);
        if (!PARALLEL) copier.copy_product<OUTPUT>(weights[OUTPUT], turn);
#if EXPERTS
        const ExpertLayer& experts = ((const ExpertLayer*)(memory + EXPERT_TABLE_AT))[l];
        const Choice choice(m.rule, (u32*)(memory + CHOICE_AT));
        copier.copy_product<ROUTER>(experts.router, turn);
        choose(m, experts.vectors, (const float*)(m.exchange + (i64)l * LAYER_BYTES + LOGITS_AT), choice);
        fetch_biases(table[l], experts, choice, lane);
        copier.copy_product<UP>(weights[UP], turn, experts.second, choice.chosen);
        copier.copy_product<DOWN>(weights[DOWN], turn, nullptr, choice.chosen);
#else
        copier.copy_product<UP>(weights[UP], turn);
        if (PARALLEL) copier.copy_product<OUTPUT>(weights[OUTPUT], turn);
        copier.copy_product<DOWN>(weights[DOWN], turn);
#endif
        if (l + 1 < layers) fetch_layer(m, table, l + 1, share, lane, prefetch);
    }
}

/* The indices of a thread: its warp and lane, and the row group and part of the lane in an mma fragment. */
struct Thread {
    int warp, lane, group, part;
    /* Zero, unknown to the compiler. */
    u32 none;
};

/* Stores a partial sum of a warp for the warp that adds them up. */
__device__ inline void leave_sum(u32 to, float sum) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(to), "f"(sum) : "memory"); }

/* Releases a slot once all lanes have read it, and goes on to the team's next one. `read` depends on everything that the lane has loaded
 * from the slot: the vote completes only after the loads have. A fence would also wait for results that are being written to other blocks. */
template <int TEAMS = 1> __device__ inline void release_slot(u32 read, const Thread& t, Ring& ring, u32 barriers) {
    u32 voted = __ballot_sync(0xffffffffu, read == 0x2545f491u);
    if (t.lane == 0) arrive<TEAMS>(barriers + ring.slot * 16 + 8 + (voted & t.none));
    if constexpr (TEAMS == 1) ring.next();
    else ring.skip(TEAMS);
}

/* Loads four consecutive matrices of 8 rows of 16 bytes: a lane gets word `part` of row `group` of each. */
__device__ inline Vector load_matrices(u32 from) {
    Vector v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "r"(from) : "memory");
    return v;
}

/* The operands of a warp for product P, by whether its weights are dense. */
template <int P, bool DENSE = IS_DENSE(P)> struct Factors;

/* A warp's part of a slot of dense weights. A run of 8, 4 or 2 outputs is multiplied in steps of 2, 4 or 8 sets of 32 inputs for each output, by two
 * mma of 16 rows. A lane's vector is its whole fragment: row `group` has its first and third word, row `group + 8` the others. So both
 * rows belong to one output and one set, and each counts in the column of the other operand that has its words of the inputs. A run
 * belongs to one team, whose warps take steps in turn. */
template <int COLUMNS, int RUN, int TEAMS> struct Weights {
    static constexpr int TEAM = WARPS / TEAMS, STEP = 16 / RUN * 64, STEPS = COLUMNS * 2 / STEP;
    static constexpr int EACH = (STEPS + TEAM - 1) / TEAM;
    /* Sets of an mma. The second mma is of the other outputs, or for runs of two outputs of further inputs of both. */
    static constexpr int SETS = RUN == 8 ? 2 : 4;
    static constexpr bool OTHER_INPUTS = RUN == 2;
    static constexpr int SECOND = OTHER_INPUTS ? SETS * 64 : RUN * COLUMNS;
    /* The index of the second mma's sums among the 16 sums, which are in the order of outputs. */
    static constexpr int SECOND_SUM = OTHER_INPUTS ? SETS : 8;
    static_assert(COLUMNS * 2 % STEP == 0, "whole sets of inputs");
    struct Inputs { u32 first[2], second[2]; };
    Vector low[EACH], high[EACH];

    static __device__ bool has(const Thread& t, int i) {
        return STEPS % TEAM == 0 || i < EACH - 1 || member(t) + i * TEAM < STEPS;
    }
    static __device__ int member(const Thread& t) { return t.warp % TEAM; }
    static __device__ int set(const Thread& t) { return t.group % SETS; }
    static __device__ int place_of_sum(const Thread& t) {
        return OTHER_INPUTS ? t.group / SETS * (2 * SETS) + set(t) : t.group;
    }

    /* Loads a step of a full slot into registers, given the lane's address of the slot from `await`. Registers of steps that the warp does
     * not have stay zero. */
    __device__ void load_step(const Thread& t, int i, const u8* from) {
        if (!has(t, i)) return;
        low[i] = *(const Vector*)(from + i * (TEAM * STEP));
        high[i] = *(const Vector*)(from + i * (TEAM * STEP) + SECOND);
    }
    static __device__ const u8* await(const Thread& t, const Ring& ring, u32 barriers) {
        await_phase(barriers + ring.slot * 16, ring.phase);
        return memory + ring.slot * SLOT_BYTES + t.group / SETS * (COLUMNS * 2) + member(t) * STEP + set(t) * 64 + t.part * 16;
    }
    __device__ void release(const Thread& t, Ring& ring, u32 barriers) const {
        u32 mixed = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) mixed ^= low[i].word[0] ^ high[i].word[0];
        release_slot<TEAMS>(mixed, t, ring, barriers);
    }
    /* Every register is set on every path: otherwise the compiler keeps it alive from one layer to the next. */
    __device__ void load(const Thread& t, Ring& ring, u32 barriers, bool there) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) low[i] = high[i] = Vector{};
        if (!there) return;
        const u8* from = await(t, ring, barriers);
#pragma unroll
        for (int i = 0; i < EACH; ++i) load_step(t, i, from);
        release(t, ring, barriers);
    }
    static __device__ void load_inputs(const Thread& t, const u8* x, Inputs (&inputs)[EACH]) {
        const u8* from = x + member(t) * STEP + t.group / 2 % SETS * 64 + t.part * 16;
        auto own = [&](const u8* from, u32 (&out)[2]) {
            Vector all = *(const Vector*)from;
            out[0] = t.group % 2 ? all.word[1] : all.word[0];
            out[1] = t.group % 2 ? all.word[3] : all.word[2];
        };
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            inputs[i] = Inputs{};
            if (!has(t, i)) continue;
            own(from + i * (TEAM * STEP), inputs[i].first);
            if (OTHER_INPUTS) own(from + i * (TEAM * STEP) + SECOND, inputs[i].second);
        }
    }
    __device__ void multiply_step(int i, const Inputs& x, float (&c)[2][4]) const {
        const Vector &a = low[i], &b = high[i];
        const u32 (&other)[2] = OTHER_INPUTS ? x.second : x.first;
        multiply(c[0], a.word[0], a.word[1], a.word[2], a.word[3], x.first[0], x.first[1]);
        multiply(c[1], b.word[0], b.word[1], b.word[2], b.word[3], other[0], other[1]);
    }
    /* Multiplies the held slot; with `more`, loads the next slot in its place, step by step. */
    __device__ void multiply_by(const Inputs (&inputs)[EACH], float (&c)[2][4], bool more, const Thread& t, Ring& ring,
                                u32 barriers) {
        if (more) {
            const u8* from = await(t, ring, barriers);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                multiply_step(i, inputs[i], c);
                load_step(t, i, from);
            }
            release(t, ring, barriers);
        } else {
#pragma unroll
            for (int i = 0; i < EACH; ++i) multiply_step(i, inputs[i], c);
        }
    }
};

/* Multiplies the next slot by inputs in shared memory. */
template <int COLUMNS, int RUN>
__device__ inline void take_slot(const Thread& t, Ring& ring, u32 barriers, const u8* x, float (&c)[2][4]) {
    Weights<COLUMNS, RUN, 1> weights;
    typename Weights<COLUMNS, RUN, 1>::Inputs inputs[Weights<COLUMNS, RUN, 1>::EACH];
    weights.load(t, ring, barriers, true);
    weights.load_inputs(t, x, inputs);
    weights.multiply_by(inputs, c, false, t, ring, barriers);
}

template <int P> struct Factors<P, true> {
    static constexpr int INPUTS = INPUTS_OF[P], COLUMNS = COLUMNS_OF[P], RUN = ROWS_OF[P];
    /* Inputs of the last slot of a run. */
    static constexpr int LAST = INPUTS - (INPUTS - 1) / COLUMNS * COLUMNS;
    static constexpr int TEAMS = TEAMS_OF[P];
    typedef Weights<LAST, RUN, TEAMS> Slot;
    /* Whether weights are loaded into registers before the activations are complete. */
    static constexpr bool HELD = COLUMNS >= INPUTS;
    static_assert(HELD || TEAMS == 1, "teams take whole runs");
    /* Lanes of a warp that share an output of a run when sums are added up. */
    static constexpr int SHARERS = 32 / RUN;
    Slot held;
    typename Slot::Inputs inputs[Slot::EACH];

    /* The index of a lane's first sum of a run. */
    static __device__ int place(const Thread& t) { return Slot::place_of_sum(t) * Slot::TEAM + Slot::member(t); }
    /* Loads the first slot, before the activations are complete. */
    __device__ void take_ahead(const Thread& t, Ring& ring, u32 barriers, bool there = true) {
        if (HELD) held.load(t, ring, barriers, there);
    }
    __device__ void take_inputs(const Thread& t, const u8* activations) {
        if (HELD) Slot::load_inputs(t, activations, inputs);
    }
    /* Writes the sums of a run over this warp's inputs to shared memory. With `more`, loads the weights of the next run. */
    __device__ void multiply_run(u32 sums, bool more, const u8* activations, const Thread& t, Ring& ring, u32 barriers) {
        float c[2][4] = {};
        if constexpr (HELD) {
            held.multiply_by(inputs, c, more, t, ring, barriers);
        } else {
            const u8* x = activations;
#pragma unroll 1
            for (int column = 0; column < INPUTS - LAST; column += COLUMNS, x += COLUMNS * 2) {
                take_slot<COLUMNS, RUN>(t, ring, barriers, x, c);
            }
            take_slot<LAST, RUN>(t, ring, barriers, x, c);
        }
        /* Only one lane of four has a column that is used. */
        if (t.part == Slot::set(t)) {
            leave_sum(sums, c[0][0] + c[0][3]);
            leave_sum(sums + Slot::SECOND_SUM * (Slot::TEAM * 4), c[1][0] + c[1][3]);
        }
    }
    /* Multiplies all runs of a tile. */
    __device__ void multiply_tile(u32 sums, bool more, const u8* activations, const Thread& t, Ring& ring, u32 barriers) {
#pragma unroll
        for (int run = 0; run < RUNS_OF[P]; ++run) {
            multiply_run(sums + run * (SUMS_OF[P] * 4), more || run + 1 < RUNS_OF[P], activations, t, ring, barriers);
        }
    }
};
#endif
