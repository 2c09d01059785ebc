/*
 * Collectives that copy, by peer exchange; see exchange.cuh for the protocol. X is any type of the elements' size.
 * spread: each rank writes part p of x to rank p, into its own part of y. With equal parts of x (p.x_part is 0) this is an
 *     all-gather. If there is a root, only its data is used; without columns this is a barrier.
 * send, receive: from one rank to another.
 *
 * Grid: as many blocks as there are units of data, at most BLOCKS. A thread stores all its packets before it waits for the first.
 */
extern "C" __global__ void spread(const __grid_constant__ SpreadParams p) {
    wait_for_predecessor();
    i64 elements = p.extent.count() * p.columns, units = (elements + UNIT - 1) / UNIT;
    Plane x = {(X*)p.x.first, p.x.stride, p.x_part, p.columns, elements};
    Plane y = {(X*)p.y.first, p.y.stride, p.y_part, p.columns, elements};
    i64 rounds = p.barrier ? 1 : rounds_of(units, p.depths);
    u32 begun = p.rounds[blockIdx.x];
    Patience patience;
    patience.begin(p.state, p.failed, p.patience);
    for (i64 round = 0; round < rounds; ++round) {
        u32 number = begun + (u32)round, flag = flag_of(number);
        i64 turn = (i64)(number % 2) * ROUND_PACKETS;
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            bool real = unit < units;
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                patience.leave((Vector*)p.to[peer] + turn + place_of(depth), real ? x.load(peer, unit) : 0, flag);
            }
            if (real && p.root < 0) y.store(p.rank, unit, x.load(p.rank, unit));
        }
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                const Vector* from = (const Vector*)p.from + peer * 2 * ROUND_PACKETS + turn + place_of(depth);
                u64 data = patience.await(from, flag, peer);
                if (unit < units && (p.root < 0 || p.root == peer)) y.store(peer, unit, data);
            }
        }
    }
    launch_dependents();
    __syncthreads();
    if (threadIdx.x == 0) p.rounds[blockIdx.x] = begun + (u32)rounds;
}

extern "C" __global__ void send(const __grid_constant__ MessageParams p) {
    wait_for_predecessor();
    i64 elements = p.extent.count() * p.columns, units = (elements + UNIT - 1) / UNIT;
    Plane x = {(X*)p.x.first, p.x.stride, 0, p.columns, elements};
    i64 rounds = rounds_of(units, p.depths);
    u32 begun = p.rounds[blockIdx.x];
    Patience patience;
    patience.begin(p.state, p.failed, p.patience);
    u32* taken = p.taken + blockIdx.x * THREADS + threadIdx.x;
    for (i64 round = 0; round < rounds; ++round) {
        u32 number = begun + (u32)round;
        patience.await_count(taken, number + 1 - CREDITS, p.peer);
        Vector* to = (Vector*)p.packets + (i64)(number % CREDITS) * ROUND_PACKETS;
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            if (unit < units) patience.leave(to + place_of(depth), x.load(0, unit), flag_of(number));
        }
    }
    launch_dependents();
    __syncthreads();
    if (threadIdx.x == 0) p.rounds[blockIdx.x] = begun + (u32)rounds;
}

extern "C" __global__ void receive(const __grid_constant__ MessageParams p) {
    wait_for_predecessor();
    i64 elements = p.extent.count() * p.columns, units = (elements + UNIT - 1) / UNIT;
    Plane x = {(X*)p.x.first, p.x.stride, 0, p.columns, elements};
    i64 rounds = rounds_of(units, p.depths);
    u32 begun = p.rounds[blockIdx.x];
    Patience patience;
    patience.begin(p.state, p.failed, p.patience);
    u32* taken = p.taken + blockIdx.x * THREADS + threadIdx.x;
    for (i64 round = 0; round < rounds; ++round) {
        u32 number = begun + (u32)round;
        const Vector* from = (const Vector*)p.packets + (i64)(number % CREDITS) * ROUND_PACKETS;
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            if (unit < units) x.store(0, unit, patience.await(from + place_of(depth), flag_of(number), p.peer));
        }
        store_word(taken, number + 1);
    }
    launch_dependents();
    __syncthreads();
    if (threadIdx.x == 0) p.rounds[blockIdx.x] = begun + (u32)rounds;
}
