/*
 * Collectives that reduce, by peer exchange; see exchange.cuh for the protocol. X is the type of the elements.
 *
 * Elements are reduced in the order of ranks, floats in f32 and rounded once, so every rank gets the same bits.
 * one_shot: every rank sends all of x to every other one, and reduces all of it. One exchange.
 * two_shots: the units of x are divided among the ranks. Every rank receives the others' elements of its share, reduces them, and
 *     sends the result to all other ranks. Two exchanges, and a fraction of the bytes.
 * in_chunks: as two_shots, for large messages. Packets are 16 bytes of data without flags, so half as many bytes pass; chunks of them
 *     have a mark instead.
 * scatter: each rank receives the others' elements of its part of x, and writes the result to y.
 *
 * FLAT, for in_chunks: the rows of x and of y are contiguous.
 *
 * Grid: as many blocks as there are units (in_chunks: pairs of units) of data, at most BLOCKS. In place, x and y are the same memory: a thread writes only
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

/* Chunks from a rank: DATA and RESULTS, two of each, and behind them for both kinds the number of chunks written, by block. */
enum { DATA = 0, RESULTS = 1 };
#define CHUNK_BYTES ((i64)4 * ROUND_PACKETS * 16 + 2 * BLOCKS * 4)

__device__ inline Vector* chunk_of(void* chunks, int kind, u32 number) {
    return (Vector*)chunks + (2 * kind + number % 2) * ROUND_PACKETS;
}
__device__ inline u32* mark_of(void* chunks, int kind) {
    return (u32*)((Vector*)chunks + 4 * ROUND_PACKETS) + kind * BLOCKS + blockIdx.x;
}
__device__ inline void* chunks_from(const ReduceParams& p, int rank) { return (char*)p.from + rank * CHUNK_BYTES; }

/* The two units of a packet of a chunk within a share: those of neighbouring threads follow each other. */
__device__ inline i64 first_unit(i64 chunk, int depths, int depth) {
    return ((chunk * depths + depth) * gridDim.x + blockIdx.x) * 2 * THREADS + threadIdx.x;
}

/* Tells the other ranks that this block has written a chunk. All threads of the block call it, and meet(). */
__device__ inline void mark(const ReduceParams& p, int kind, u32 number, const Patience& patience) {
    __syncthreads();
    int peer = threadIdx.x;
    if (peer >= p.ranks || peer == p.rank || patience.over) return;
    /* Orders the stores of the whole block, which the barrier has ordered before this thread, before the mark. */
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    store_word(mark_of(p.to[peer], kind), number + 1);
}

/* Waits until the same block of every other rank has written a chunk. */
__device__ inline void meet(const ReduceParams& p, int kind, u32 number, Patience& patience) {
    int peer = threadIdx.x;
    if (peer < p.ranks && peer != p.rank) {
        patience.await_count(mark_of(chunks_from(p, peer), kind), number + 1, peer);
        asm volatile("fence.acq_rel.sys;" ::: "memory");
    }
    if (__syncthreads_or(patience.over)) patience.over = true;
}

/* N of the packets of a thread in a chunk, from `first` on; p.depths are used. All of them are loaded before one is stored. */
template <int N> struct Packets {
    Words of[N];
    int first;
};
#define EACH_PACKET(packets) _Pragma("unroll") for (int i = 0; i < N; ++i) if (packets.first + i < p.depths)

template <int N>
__device__ inline void load_shares(const ReduceParams& p, Packets<N>& packets, const Plane& x, i64 rank, i64 share, i64 units, i64 chunk) {
    EACH_PACKET(packets) {
        i64 unit = first_unit(chunk, p.depths, packets.first + i);
        packets.of[i] = {load_share(x, rank, share, unit, units), load_share(x, rank, share, unit + THREADS, units)};
    }
}
template <int N>
__device__ inline void store_shares(const ReduceParams& p, const Packets<N>& packets, const Plane& y, i64 rank, i64 share, i64 units, i64 chunk) {
    EACH_PACKET(packets) {
        i64 unit = first_unit(chunk, p.depths, packets.first + i), at = rank * share + unit;
        if (unit < share && at < units) y.store(0, at, packets.of[i].first);
        if (unit + THREADS < share && at + THREADS < units) y.store(0, at + THREADS, packets.of[i].second);
    }
}
template <int N>
__device__ inline void send_packets(const ReduceParams& p, const Packets<N>& packets, int peer, int kind, u32 number, const Patience& patience) {
    if (patience.over) return;
    Vector* to = chunk_of(p.to[peer], kind, number);
    EACH_PACKET(packets) store_words(to + place_of(packets.first + i), packets.of[i]);
}
template <int N>
__device__ inline void take_packets(const ReduceParams& p, Packets<N>& packets, int peer, int kind, u32 number) {
    const Vector* from = chunk_of(chunks_from(p, peer), kind, number);
    EACH_PACKET(packets) packets.of[i] = load_words(from + place_of(packets.first + i));
}

/* Sends the elements of a chunk to the ranks whose share they are. */
__device__ inline void send_data(const ReduceParams& p, const Plane& x, i64 share, i64 units, i64 chunk, u32 number, const Patience& patience) {
    for (int i = 1; i < p.ranks; ++i) {
        int peer = (p.rank + i) % p.ranks;
        Packets<4> packets;
        for (packets.first = 0; packets.first < p.depths; packets.first += 4) {
            load_shares(p, packets, x, peer, share, units, chunk);
            send_packets(p, packets, peer, DATA, number, patience);
        }
    }
    mark(p, DATA, number, patience);
}

/* Reduces a chunk of this rank's share, and sends the result to all ranks. */
__device__ inline void reduce_chunk(const ReduceParams& p, const Plane& x, const Plane& y, i64 share, i64 units, i64 chunk, u32 number, Patience& patience) {
    enum { N = 2 };
    meet(p, DATA, number, patience);
    Packets<N> packets;
#pragma unroll 1
    for (packets.first = 0; packets.first < p.depths; packets.first += N) {
        Unit first[N], second[N];
        for (int rank = 0; rank < p.ranks; ++rank) {
            if (rank == p.rank) load_shares(p, packets, x, rank, share, units, chunk);
            else take_packets(p, packets, rank, DATA, number);
            EACH_PACKET(packets) {
                if (rank == 0) {
                    first[i].read(packets.of[i].first);
                    second[i].read(packets.of[i].second);
                } else {
                    first[i].combine(packets.of[i].first, p.reduction);
                    second[i].combine(packets.of[i].second, p.reduction);
                }
            }
        }
        EACH_PACKET(packets) packets.of[i] = {first[i].write(p.reduction, p.ranks), second[i].write(p.reduction, p.ranks)};
        for (int i = 1; i < p.ranks; ++i) send_packets(p, packets, (p.rank + i) % p.ranks, RESULTS, number, patience);
        store_shares(p, packets, y, p.rank, share, units, chunk);
    }
    mark(p, RESULTS, number, patience);
}

/* Takes the results of a chunk from the other ranks. */
__device__ inline void take_results(const ReduceParams& p, const Plane& y, i64 share, i64 units, i64 chunk, u32 number, Patience& patience) {
    meet(p, RESULTS, number, patience);
    for (int i = 1; i < p.ranks; ++i) {
        int peer = (p.rank + i) % p.ranks;
        Packets<4> packets;
        for (packets.first = 0; packets.first < p.depths; packets.first += 4) {
            take_packets(p, packets, peer, RESULTS, number);
            store_shares(p, packets, y, peer, share, units, chunk);
        }
    }
}

/*
 * The data of the next chunk is sent before the results of the last one are awaited, so that links do not idle.
 *
 * Two buffers of each kind are enough. Data of chunk c + 1 overwrites that of c - 1, which a rank has reduced before it marked the
 * results of c - 1, for which this rank has waited. Results of chunk c overwrite those of c - 2, which a rank has taken before it
 * sent the data of chunk c, for which this rank has waited. The same holds across kernels, because numbers continue, and a kernel
 * starts after its predecessor has ended.
 */
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) in_chunks(const __grid_constant__ ReduceParams p) {
    wait_for_predecessor();
    Plane x, y;
    i64 units;
    Patience patience;
    begin(p, x, y, units, patience);
#if FLAT
    x.stride = x.columns = y.stride = y.columns = x.elements;
#endif
    u32 begun = p.rounds[blockIdx.x];
    i64 share = (units + p.ranks - 1) / p.ranks, each = (i64)gridDim.x * 2 * THREADS * p.depths;
    i64 chunks = (share + each - 1) / each;
    if (chunks > 0) send_data(p, x, share, units, 0, begun, patience);
    for (i64 chunk = 0; chunk < chunks; ++chunk) {
        u32 number = begun + (u32)chunk;
        reduce_chunk(p, x, y, share, units, chunk, number, patience);
        if (chunk > 0) take_results(p, y, share, units, chunk - 1, number - 1, patience);
        if (chunk + 1 < chunks) send_data(p, x, share, units, chunk + 1, number + 1, patience);
    }
    if (chunks > 0) take_results(p, y, share, units, chunks - 1, begun + (u32)chunks - 1, patience);
    end(p, begun + (u32)chunks);
}
