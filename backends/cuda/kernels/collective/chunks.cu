/*
 * An all-reduce of a large message, by peer exchange: the units of x are divided among the ranks, as in two_shots of reduce.cu. Packets are
 * 16 bytes of data without flags, so half as many bytes pass; chunks of them have a mark instead.
 *
 * The data of the next chunk is sent before the results of the last one are awaited, so that links do not idle.
 *
 * Two buffers of each kind are enough. Data of chunk c + 1 overwrites that of c - 1, which a rank has reduced before it marked the
 * results of c - 1, for which this rank has waited. Results of chunk c overwrite those of c - 2, which a rank has taken before it
 * sent the data of chunk c, for which this rank has waited. The same holds across kernels, because numbers continue, and a kernel
 * starts after its predecessor has ended.
 *
 * FLAT: the rows of x and of y are contiguous. RESIDENT: blocks of a multiprocessor that are resident at once.
 * Grid: as many blocks as there are pairs of units of a share, at most BLOCKS.
 */

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
