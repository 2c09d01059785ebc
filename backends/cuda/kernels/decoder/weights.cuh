/*
 * Weights of the kernel for layers: the ring that one warp fills, and products of what is in it.
 */
#if __CUDA_ARCH__ >= 900
/* A slot of the ring: its barriers, one for "filled" and one for "read by all warps". */
__device__ inline void await_phase(u32 barrier, u32 phase) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
    } while (!done);
}
__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

/* Goes through the slots in turn. */
struct Ring {
    int slot;
    u32 phase;
    __device__ void next() {
        if (++slot == RING_SLOTS) {
            slot = 0;
            phase ^= 1;
        }
    }
};

/* The first tile of a product that is this block's, given where the one before ended; and where the product ends. */
__device__ inline int first_of(int turn) {
    int mine = (int)blockIdx.x - turn;
    return mine < 0 ? mine + GRID : mine;
}
__device__ inline int turn_after(int turn, int tiles) {
    turn += tiles % GRID;
    return turn < GRID ? turn : turn - GRID;
}

/* Rows of a tile: two sets of 8 neighbours. */
struct Rows {
    int low, high;
    bool turned;
};
__device__ inline Rows rows_of(int product, int tile) {
    if (product % 2) return Rows{8 * tile, 8 * tile, false};
    Rows rows = {16 * tile, 16 * tile + 8, false};
    if (product == UP) {
        if (MIDDLE == GATED) rows = Rows{8 * tile, INNER + 8 * tile, false};
        return rows;
    }
#if ROPE
    int head = 16 * tile / HEAD, at = 16 * tile - head * HEAD;
    if (head < HEADS + KV_HEADS && at < 2 * PAIRS) {
        rows.low = head * HEAD + at / 2;
        rows.high = rows.low + PAIRS;
        rows.turned = true;
    }
#endif
    return rows;
}

/* A way through the pieces of weights that are this block's. */
struct Walk {
    int layer, product, tile, column, turn;
    __device__ void seek() {
        while (tile >= TILES_OF[product]) {
            turn = turn_after(turn, TILES_OF[product]);
            tile = first_of(turn);
            if (++product == 4) {
                product = 0;
                ++layer;
            }
        }
    }
    __device__ void next() {
        column += COLUMNS_OF[product];
        if (column < INPUTS_OF[product]) return;
        column = 0;
        tile += GRID;
        seek();
    }
    /* Columns of the piece; its copies, each of so many bytes; and where the copy of a lane begins. */
    __device__ void piece(const Layer* table, int lane, int& copies, int& bytes, const u8*& from) const {
        int inputs = INPUTS_OF[product], columns = COLUMNS_OF[product];
        if (inputs - column < columns) columns = inputs - column;
        /* Whole rows are neighbours: one copy for 8 of them. */
        bool whole = columns == inputs;
        Rows rows = rows_of(product, tile);
        copies = (product % 2 ? 1 : 2) * (whole ? 1 : 8);
        bytes = columns * 2 * (whole ? 8 : 1);
        int row = whole ? (lane ? rows.high : rows.low) : (lane < 8 ? rows.low : rows.high) + lane % 8;
        from = table[layer].weights[product] + (i64)row * (inputs * 2) + column * 2;
    }
};

__device__ inline void fetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from)); }
/* The lines of a vector that are this block's to fetch. */
__device__ inline void fetch_vector(const void* from, int bytes, int lane) {
    int at = blockIdx.x * 128 + lane * (GRID * 128);
    if (from && at < bytes) fetch_line((const u8*)from + at);
}

/* What a layer reads beside its weights, into the L2. */
__device__ inline void fetch_layer(const Model& m, const Layer& layer, const Share& share, int lane, int page) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        fetch_vector(layer.gains[i], HIDDEN * sizeof(G), lane);
        fetch_vector(layer.shifts[i], HIDDEN * sizeof(SHIFT), lane);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) fetch_vector(layer.biases[i], OUTPUTS_OF[i] * sizeof(BIAS), lane);
    if (page < 0) return;
    int unit = share.split * WARPS + lane / 2;
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

/* The warp that copies weights. */
__device__ inline void copy_weights(const Model& m, const Layer* table, const Share& share, u32 barriers) {
    int lane = threadIdx.x % 32, layers = (int)m.layers, copies, bytes;
    u32 to = (u32)__cvta_generic_to_shared(memory);
    const u8* from;
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    Ring ring = {0, 1};
    Walk walk = {0, 0, (int)blockIdx.x, 0, 0};
    walk.seek();
    /* Goes ahead, into the L2; what is next for the ring needs no such help. */
    Walk scout = walk;
    int own = share.split * WARPS + lane / 2, page = -1;
    if (share.split < share.live && lane / 2 < WARPS && own < share.units) page = m.pages_of[own * UNIT / SLOTS];
    page = page < (int)m.pages ? page : -1;
    fetch_layer(m, table[0], share, lane, page);
#pragma unroll 1
    for (int i = 0; i < AHEAD && scout.layer < layers; ++i) scout.next();
    int fetched = 0;
#pragma unroll 1
    while (walk.layer < layers) {
        u32 full = barriers + ring.slot * 16;
        await_phase(full + 8, ring.phase);
        walk.piece(table, lane, copies, bytes, from);
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(full), "r"(copies * bytes) : "memory");
        }
        __syncwarp();
        if (lane < copies) {
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                         "[%0], [%1], %2, [%3], %4;"
                :: "r"(to + ring.slot * SLOT_BYTES + lane * bytes), "l"(from), "r"(bytes), "r"(full), "l"(once) : "memory");
        }
        ring.next();
        walk.next();
        if (AHEAD > 0 && scout.layer < layers) {
            scout.piece(table, lane, copies, bytes, from);
            if (lane < copies) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
            scout.next();
        }
        if (walk.layer > fetched) {
            fetched = walk.layer;
            if (fetched < layers) fetch_layer(m, table[fetched], share, lane, page);
        }
    }
}

/* What a thread is. */
struct Thread {
    int warp, lane, group, part, odd, pair;
};

/* What a warp has of a slot: pieces of 16 rows by 64 inputs, or of 8 rows by 2 x 64. */
template <int COLUMNS, bool WIDE> struct Weights {
    static constexpr int ROW = COLUMNS * 2, STEP = WIDE ? 256 : 128, PIECES = (ROW + STEP - 1) / STEP;
    static constexpr int EACH = (PIECES + WARPS - 1) / WARPS;
    Vector a[EACH][2], b[EACH][2];

    static __device__ bool has(const Thread& t, int i) {
        return PIECES % WARPS == 0 || i < EACH - 1 || t.warp + i * WARPS < PIECES;
    }
    /* The last piece of 8 rows may be half of one: then both sets of rows are the same, and one set of inputs zeros. */
    static __device__ bool half(const Thread& t, int i) {
        return WIDE && ROW % STEP != 0 && i == EACH - 1 && t.warp + i * WARPS == PIECES - 1;
    }

    /* From the next slot into registers. */
    __device__ void load(const Thread& t, Ring& ring, u32 barriers) {
        u32 full = barriers + ring.slot * 16;
        const u8* low = memory + ring.slot * SLOT_BYTES + t.group * ROW + t.part * 16 + t.odd + t.warp * STEP;
        /* From the first half of 64 inputs to the second, or back. */
        int other = 64 - 2 * t.odd;
        await_phase(full, ring.phase);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            a[i][0] = a[i][1] = b[i][0] = b[i][1] = Vector{};
            if (!has(t, i)) break;
            const u8* here = low + i * (WARPS * STEP);
            const u8* there = here + (half(t, i) ? 0 : WIDE ? 128 : 8 * ROW);
            a[i][0] = *(const Vector*)here;
            a[i][1] = *(const Vector*)(here + other);
            b[i][0] = *(const Vector*)there;
            b[i][1] = *(const Vector*)(there + other);
        }
        __syncwarp();
        if (t.lane == 0) arrive(full + 8);
        ring.next();
    }
    static __device__ void load_inputs(const Thread& t, const u8* x, Vector (&v)[EACH][2]) {
        const u8* its = x + t.part * 16 + t.odd + t.warp * STEP + (WIDE ? t.group / 2 * 128 : 0);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            v[i][0] = v[i][1] = Vector{};
            if (has(t, i) && t.group < (half(t, i) ? 2 : 4)) {
                v[i][0] = *(const Vector*)(its + i * (WARPS * STEP));
                v[i][1] = *(const Vector*)(its + i * (WARPS * STEP) + 64 - 2 * t.odd);
            }
        }
    }
    __device__ void multiply_by(const Vector (&v)[EACH][2], float (&c)[2][4]) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const Vector &low = a[i][k], &high = b[i][k], &x = v[i][k];
                multiply(c[k], low.word[0], high.word[0], low.word[1], high.word[1], x.word[0], x.word[1]);
                multiply(c[k], low.word[2], high.word[2], low.word[3], high.word[3], x.word[2], x.word[3]);
            }
        }
    }
};

/* All of the next slot, by inputs in shared memory. */
template <int COLUMNS, bool WIDE>
__device__ inline void take_slot(const Thread& t, Ring& ring, u32 barriers, const u8* x, float (&c)[2][4]) {
    Weights<COLUMNS, WIDE> weights;
    Vector inputs[Weights<COLUMNS, WIDE>::EACH][2];
    weights.load(t, ring, barriers);
    weights.load_inputs(t, x, inputs);
    weights.multiply_by(inputs, c);
}
#endif
