/*
 * An all-reduce of a large message, by peer exchange: ranks read each other's operands and write each other's results in place, so
 * data passes each link once in each direction, and is never copied to a mailbox.
 *
 * First, each block sends the addresses of its rank's x, y and residual to the same block of every other rank. By then x is
 * complete, and the old contents of y are no longer needed, because the kernels before this one have ended. Then each rank reduces
 * its share of the elements, in the order of ranks, and stores the results to all ranks. At the end each block marks that it is
 * done in the mailbox of every other rank, and waits for the marks of the same blocks: when all blocks have passed, y is complete,
 * and no rank reads x.
 *
 * A block needs only one set of packets in a mailbox: it sends new ones in the next kernel, and this kernel ends only after the same
 * blocks of all ranks have read the last ones and marked their end.
 *
 * RESIDENT: blocks of a multiprocessor that are resident at once.
 * Grid: as many blocks as there are pairs of units of a share, at most BLOCKS.
 */

/* Where a rank has a tensor, and elements from row to row. */
struct Place { u64 first, stride; };
struct Places { Place x, y, added; };
enum { WORDS = sizeof(Places) / sizeof(u64) };

/* Packets with the places of a rank, for each block, and behind them the numbers of the reductions that its blocks have ended. */
#define PLACES_BYTES ((i64)BLOCKS * WORDS * sizeof(Vector) + BLOCKS * sizeof(u32))
__device__ inline Vector* packets_of(void* of_rank) { return (Vector*)of_rank + (i64)blockIdx.x * WORDS; }
__device__ inline u32* mark_of(void* of_rank) { return (u32*)((Vector*)of_rank + (i64)BLOCKS * WORDS) + blockIdx.x; }
__device__ inline void* from_rank(const ReduceParams& p, int rank) { return (char*)p.from + rank * PLACES_BYTES; }

/*
 * Exchanges places with the other ranks. Returns whether all have arrived. All threads of the block call it. Other ranks do not read
 * the residual, but have to know whether it is flat.
 */
__device__ inline bool meet(const ReduceParams& p, Places* places, u32 number, Patience& patience) {
    if (threadIdx.x == 0) {
        Place x = {(u64)p.x.first, (u64)p.x.stride}, y = {(u64)p.y.first, (u64)p.y.stride};
        places[p.rank] = {x, y, ADDED ? Place{(u64)p.added.first, (u64)p.added.stride} : x};
    }
    __syncthreads();
    int peer = threadIdx.x / WORDS, word = threadIdx.x % WORDS;
    if (peer < p.ranks && peer != p.rank) {
        u64 data = ((u64*)&places[p.rank])[word];
        /* Orders what earlier kernels have written before the packet. */
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        patience.leave(packets_of(p.to[peer]) + word, data, flag_of(number));
        data = patience.await(packets_of(from_rank(p, peer)) + word, flag_of(number), peer);
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        ((u64*)&places[peer])[word] = data;
    }
    return !__syncthreads_or(patience.over);
}

/* Tells the other ranks that this block is done, and waits for them. */
__device__ inline void part(const ReduceParams& p, u32 number, Patience& patience) {
    __syncthreads();
    int peer = threadIdx.x;
    if (peer >= p.ranks || peer == p.rank) return;
    /* Orders the stores of the whole block, which the barrier has ordered before this thread, before the mark. */
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    store_word(mark_of(p.to[peer]), number + 1);
    patience.await_count(mark_of(from_rank(p, peer)), number + 1, peer);
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/* Whether the elements of a tensor are whole packets that follow each other. */
__device__ inline bool is_flat(const Place& place, i64 columns, i64 elements) {
    return place.first % sizeof(Words) == 0 && ((i64)place.stride == columns || elements <= columns) && elements % (2 * UNIT) == 0;
}

/* Two units at a time, and N of these by a thread at once. */
template <int N>
__device__ inline void reduce_flat(const ReduceParams& p, const Places* places, i64 elements, int reduction) {
    i64 pairs = elements / (2 * UNIT), share = (pairs + p.ranks - 1) / p.ranks, first = p.rank * share;
    i64 count = min(share, pairs - first), threads = (i64)gridDim.x * THREADS;
    for (i64 start = (i64)blockIdx.x * THREADS + threadIdx.x; start < count; start += N * threads) {
        Words next[N];
        Unit sums[N][2];
#define EACH _Pragma("unroll") for (int i = 0; i < N; ++i) if (start + i * threads < count)
#define AT (first + start + i * threads)
        EACH next[i] = load_words((const Vector*)places[0].x.first + AT);
        for (int rank = 0; rank < p.ranks; ++rank) {
            Words words[N];
            EACH words[i] = next[i];
            if (rank + 1 < p.ranks) {
                EACH next[i] = load_words((const Vector*)places[rank + 1].x.first + AT);
            } else if (ADDED) {
                EACH next[i] = load_words((const Vector*)p.added.first + AT);
            }
            EACH {
                if (rank == 0) {
                    sums[i][0].read(words[i].first);
                    sums[i][1].read(words[i].second);
                } else {
                    sums[i][0].combine(words[i].first, reduction);
                    sums[i][1].combine(words[i].second, reduction);
                }
            }
        }
        if (ADDED) {
            EACH {
                sums[i][0].add_to(next[i].first, p.alpha);
                sums[i][1].add_to(next[i].second, p.alpha);
            }
        }
        EACH next[i] = {sums[i][0].write(reduction, p.ranks), sums[i][1].write(reduction, p.ranks)};
        for (int step = 1; step <= p.ranks; ++step) {
            Vector* y = (Vector*)places[(p.rank + step) % p.ranks].y.first;
            EACH store_words(y + AT, next[i]);
        }
#undef EACH
#undef AT
    }
}

/* Unit by unit. */
__device__ inline void reduce_rows(const ReduceParams& p, const Places* places, i64 elements) {
    i64 units = (elements + UNIT - 1) / UNIT, share = (units + p.ranks - 1) / p.ranks, first = p.rank * share;
    i64 count = min(share, units - first), threads = (i64)gridDim.x * THREADS;
    for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < count; at += threads) {
        Unit sum;
        for (int rank = 0; rank < p.ranks; ++rank) {
            const Place& place = places[rank].x;
            u64 word = Plane{(X*)place.first, (i64)place.stride, 0, p.columns, elements}.load(0, first + at);
            if (rank == 0) sum.read(word);
            else sum.combine(word, p.reduction);
        }
        u64 word = Planes(p, elements).finish(p, sum, first + at);
        for (int rank = 0; rank < p.ranks; ++rank) {
            const Place& place = places[rank].y;
            Plane{(X*)place.first, (i64)place.stride, 0, p.columns, elements}.store(0, first + at, word);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) direct(const __grid_constant__ ReduceParams p) {
    __shared__ Places places[MOST_RANKS];
    wait_for_predecessor();
    Patience patience;
    patience.begin(p.state, p.failed, p.patience);
    u32 number = p.rounds[blockIdx.x];
    i64 elements = p.extent.count() * p.columns;
    if (meet(p, places, number, patience)) {
        bool flat = true;
        for (int rank = 0; rank < p.ranks; ++rank) {
            for (const Place& place : {places[rank].x, places[rank].y, places[rank].added}) {
                flat = flat && is_flat(place, p.columns, elements);
            }
        }
        /* Sums are what links wait for; as many elements of them as registers hold. */
        if (flat && p.reduction == SUM) reduce_flat<sizeof(X) == 1 ? 1 : sizeof(X) == 2 ? 3 : 4>(p, places, elements, SUM);
        else if (flat) reduce_flat<1>(p, places, elements, p.reduction);
        else reduce_rows(p, places, elements);
        part(p, number, patience);
    }
    end(p, number + 1);
}
