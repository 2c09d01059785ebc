/*
 * Collectives that reduce, by peer exchange; see exchange.cuh for the protocol. X is the type of the elements.
 *
 * Elements are reduced in the order of ranks, floats in f32 and rounded once, so every rank gets the same bits.
 * one_shot: every rank sends all of x to every other one, and reduces all of it. One exchange.
 * two_shots: the units of x are divided among the ranks. Every rank receives the others' elements of its share, reduces them, and
 *     sends the result to all other ranks. Two exchanges, and a fraction of the bytes.
 * scatter: each rank receives the others' elements of its part of x, and writes the result to y.
 *
 * Grid: as many blocks as there are units of data, at most BLOCKS. In place, x and y are the same memory: a thread writes only
 * units that it has read itself.
 */

enum { SUM = 1, MAX = 2, MIN = 3, MEAN = 4 };

/* The type in which elements are reduced, and the conversion back. */
template <typename T> struct Combined {
    typedef float Value;
    static __device__ inline float read(T x) { return widen(x); }
    static __device__ inline T write(float x) { return narrow<T>(x); }
};
template <typename T> struct Integers {
    typedef i64 Value;
    static __device__ inline i64 read(T x) { return (i64)x; }
    static __device__ inline T write(i64 x) { return (T)x; }
};
template <> struct Combined<i32> : Integers<i32> {};
template <> struct Combined<u32> : Integers<u32> {};
template <> struct Combined<i8> : Integers<i8> {};
template <> struct Combined<u8> : Integers<u8> {};
typedef Combined<X>::Value Value;

__device__ inline bool lacks_value(float x) { return is_nan(x); }
__device__ inline bool lacks_value(i64) { return false; }
__device__ inline float share_of(float x, int ranks) { return x / (float)ranks; }
__device__ inline i64 share_of(i64 x, int) { return x; }

struct Unit {
    Value of[UNIT];

    __device__ inline void read(u64 word) {
        union { u64 word; X of[UNIT]; } data;
        data.word = word;
#pragma unroll
        for (int i = 0; i < UNIT; ++i) of[i] = Combined<X>::read(data.of[i]);
    }
    __device__ inline void combine(u64 word, int reduction) {
        Unit other;
        other.read(word);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            Value a = of[i], b = other.of[i];
            if (reduction == MAX) of[i] = b > a || lacks_value(a) ? b : a;
            else if (reduction == MIN) of[i] = b < a || lacks_value(a) ? b : a;
            else of[i] = a + b;
        }
    }
    __device__ inline u64 write(int reduction, int ranks) const {
        union { u64 word; X of[UNIT]; } data;
#pragma unroll
        for (int i = 0; i < UNIT; ++i) data.of[i] = Combined<X>::write(reduction == MEAN ? share_of(of[i], ranks) : of[i]);
        return data.word;
    }
};

/* Reduces this rank's data and the packets of a round from all others, in the order of ranks. */
__device__ inline u64 reduced(const ReduceParams& p, u64 own, i64 place, u32 flag, Patience& patience) {
    Unit unit;
    for (int rank = 0; rank < p.ranks; ++rank) {
        u64 data = own;
        if (rank != p.rank) data = patience.await((const Vector*)p.from + rank * 2 * ROUND_PACKETS + place, flag, rank);
        if (rank == 0) unit.read(data);
        else unit.combine(data, p.reduction);
    }
    return unit.write(p.reduction, p.ranks);
}

__device__ inline void begin(const ReduceParams& p, Plane& x, Plane& y, i64& units, Patience& patience) {
    i64 elements = p.extent.count() * p.columns;
    units = (elements + UNIT - 1) / UNIT;
    x = {(X*)p.x.first, p.x.stride, p.x_part, p.columns, elements};
    y = {(X*)p.y.first, p.y.stride, 0, p.columns, elements};
    patience.begin(p.state, p.failed, p.patience);
}

__device__ inline void end(const ReduceParams& p, u32 rounds) {
    launch_dependents();
    __syncthreads();
    if (threadIdx.x == 0) p.rounds[blockIdx.x] = rounds;
}

extern "C" __global__ void one_shot(const __grid_constant__ ReduceParams p) {
    wait_for_predecessor();
    Plane x, y;
    i64 units;
    Patience patience;
    begin(p, x, y, units, patience);
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
            own[depth] = unit < units ? x.load(0, unit) : 0;
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                patience.leave((Vector*)p.to[peer] + turn + place_of(depth), own[depth], flag);
            }
        }
#pragma unroll
        for (int depth = 0; depth < DEPTH; ++depth) {
            if (depth >= p.depths) break;
            i64 unit = unit_of(round, p.depths, depth);
            u64 result = reduced(p, own[depth], turn + place_of(depth), flag, patience);
            if (unit < units) y.store(0, unit, result);
        }
    }
    end(p, number);
}

/* Unit `unit` of the share of rank `rank`, which has `share` units. */
__device__ inline u64 load_share(const Plane& x, i64 rank, i64 share, i64 unit, i64 units) {
    i64 at = rank * share + unit;
    return unit < share && at < units ? x.load(0, at) : 0;
}

extern "C" __global__ void two_shots(const __grid_constant__ ReduceParams p) {
    wait_for_predecessor();
    Plane x, y;
    i64 units;
    Patience patience;
    begin(p, x, y, units, patience);
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
            u64 result = reduced(p, own, turn + place_of(depth), flag, patience);
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                patience.leave((Vector*)p.to[peer] + next + place_of(depth), result, second);
            }
            if (unit < share && at < units) y.store(0, at, result);
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
    Plane x, y;
    i64 units;
    Patience patience;
    begin(p, x, y, units, patience);
    u32 number = p.rounds[blockIdx.x];
    i64 rounds = rounds_of(units, p.depths);
    for (i64 round = 0; round < rounds; ++round, ++number) {
        u32 flag = flag_of(number);
        i64 turn = (i64)(number % 2) * ROUND_PACKETS;
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            for (int i = 1; i < p.ranks; ++i) {
                int peer = (p.rank + i) % p.ranks;
                u64 data = unit < units ? x.load(peer, unit) : 0;
                patience.leave((Vector*)p.to[peer] + turn + place_of(depth), data, flag);
            }
        }
        for (int depth = 0; depth < p.depths; ++depth) {
            i64 unit = unit_of(round, p.depths, depth);
            u64 own = unit < units ? x.load(p.rank, unit) : 0;
            u64 result = reduced(p, own, turn + place_of(depth), flag, patience);
            if (unit < units) y.store(0, unit, result);
        }
    }
    end(p, number);
}
