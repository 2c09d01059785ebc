/*
 * Collectives that reduce small messages, by peer exchange; see exchange.cuh for the protocol.
 *
 * one_shot: every rank sends all of x to every other one, and reduces all of it. One exchange.
 * two_shots: the units of x are divided among the ranks. Every rank receives the others' elements of its share, reduces them, and
 *     sends the result to all other ranks. Two exchanges, and a fraction of the bytes.
 * scatter: each rank receives the others' elements of its part of x, and writes the result to y.
 *
 * Grid: as many blocks as there are units of data, at most BLOCKS.
 */

/* Reduces this rank's data and the packets of a round from all others, in the order of ranks. */
__device__ inline Unit reduced(const ReduceParams& p, u64 own, i64 place, u32 flag, Patience& patience) {
    Unit unit;
    for (int rank = 0; rank < p.ranks; ++rank) {
        u64 data = own;
        if (rank != p.rank) data = patience.await((const Vector*)p.from + rank * 2 * ROUND_PACKETS + place, flag, rank);
        if (rank == 0) unit.read(data);
        else unit.combine(data, p.reduction);
    }
    return unit;
}

extern "C" __global__ void one_shot(const __grid_constant__ ReduceParams p) {
    wait_for_predecessor();
    i64 units;
    Patience patience;
    Planes planes = begin(p, units, patience);
    u32 number = p.rounds[blockIdx.x];
    i64 rounds = rounds_of(units, p.depths);
    for (i64 round = 0; round < rounds; ++round, ++number) {
        u32 flag = flag_of(number);
        i64 turn = (i64)(number % 2) * ROUND_PACKETS;
        u64 own[DEPTH];
#pragma unroll
        for (int depth = 0; depth < DEPTH; ++depth) {
            if (depth >= p.depths) break;
            i64 unit = unit_of(round, p.depths, depth);
            own[depth] = unit < units ? planes.x.load(0, unit) : 0;
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                patience.leave((Vector*)p.to[peer] + turn + place_of(depth), own[depth], flag);
            }
        }
#pragma unroll
        for (int depth = 0; depth < DEPTH; ++depth) {
            if (depth >= p.depths) break;
            i64 unit = unit_of(round, p.depths, depth);
            Unit sum = reduced(p, own[depth], turn + place_of(depth), flag, patience);
            if (unit < units) planes.y.store(0, unit, planes.finish(p, sum, unit));
        }
    }
    end(p, number);
}

extern "C" __global__ void two_shots(const __grid_constant__ ReduceParams p) {
    wait_for_predecessor();
    i64 units;
    Patience patience;
    Planes planes = begin(p, units, patience);
    const Plane &x = planes.x, &y = planes.y;
    u32 number = p.rounds[blockIdx.x];
    i64 share = (units + p.ranks - 1) / p.ranks, rounds = rounds_of(share, p.depths);
    for (i64 round = 0; round < rounds; ++round, number += 2) {
        u32 flag = flag_of(number), second = flag_of(number + 1);
        i64 turn = (i64)(number % 2) * ROUND_PACKETS, next = (i64)((number + 1) % 2) * ROUND_PACKETS;
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                u64 data = load_share(x, peer, share, unit, units);
                patience.leave((Vector*)p.to[peer] + turn + place_of(depth), data, flag);
            }
        }
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth), at = p.rank * share + unit;
            u64 own = load_share(x, p.rank, share, unit, units);
            Unit sum = reduced(p, own, turn + place_of(depth), flag, patience);
            bool real = unit < share && at < units;
            u64 result = real ? planes.finish(p, sum, at) : 0;
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                patience.leave((Vector*)p.to[peer] + next + place_of(depth), result, second);
            }
            if (real) y.store(0, at, result);
        }
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                i64 at = peer * share + unit;
                u64 data = patience.await((const Vector*)p.from + peer * 2 * ROUND_PACKETS + next + place_of(depth), second, peer);
                if (unit < share && at < units) y.store(0, at, data);
            }
        }
    }
    end(p, number);
}

extern "C" __global__ void scatter(const __grid_constant__ ReduceParams p) {
    wait_for_predecessor();
    i64 units;
    Patience patience;
    Planes planes = begin(p, units, patience);
    u32 number = p.rounds[blockIdx.x];
    i64 rounds = rounds_of(units, p.depths);
    for (i64 round = 0; round < rounds; ++round, ++number) {
        u32 flag = flag_of(number);
        i64 turn = (i64)(number % 2) * ROUND_PACKETS;
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                u64 data = unit < units ? planes.x.load(peer, unit) : 0;
                patience.leave((Vector*)p.to[peer] + turn + place_of(depth), data, flag);
            }
        }
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            u64 own = unit < units ? planes.x.load(p.rank, unit) : 0;
            Unit sum = reduced(p, own, turn + place_of(depth), flag, patience);
            if (unit < units) planes.y.store(0, unit, planes.finish(p, sum, unit));
        }
    }
    end(p, number);
}
