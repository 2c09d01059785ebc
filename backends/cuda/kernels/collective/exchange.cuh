/*
 * Protocol by which ranks exchange data through each other's memory.
 *
 * A packet is 8 bytes of data in two 64-bit words; the upper half of each word is the flag of the round. 64-bit words are stored
 * and loaded atomically, so data with the right flag is complete, and stores need no ordering.
 *
 * Collectives: in each round every thread stores `depth` packets to every other rank and waits for as many from each, even if it
 * has no data to exchange. Rounds alternate between two buffers. A thread that has completed a round has received that round's
 * packets from all ranks, whose threads had read the previous round before they stored them: so the buffer of the previous round
 * may be overwritten. Across kernels the same holds for whole blocks, because a kernel starts after its predecessor has ended,
 * and every kernel has a round on all ranks or on none. Therefore all ranks must launch the same kernels with the same grids over
 * the same number of rows, in the same order.
 *
 * Direct all-reduces (direct.cu) exchange addresses in packets, and no data: ranks read and write each other's tensors.
 *
 * Messages: the sender stores the packets of a round in one of `CREDITS` buffers, once the same thread of the receiver has
 * acknowledged the round that used the buffer before, by a write to the sender's memory. So a sender does not wait for a receiver
 * that keeps up.
 *
 * Rounds are counted in device memory, per block, so that a graph can be replayed.
 *
 * Every wait ends (patience.cuh).
 */

/* The index of a packet within a round: threads are contiguous. */
__device__ inline i64 place_of(int depth) { return ((i64)depth * BLOCKS + blockIdx.x) * THREADS + threadIdx.x; }
#define ROUND_PACKETS ((i64)DEPTH * BLOCKS * THREADS)

/* The unit of data of a thread in a round. */
__device__ inline i64 unit_of(i64 round, int depths, int depth) {
    return ((round * depths + depth) * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
}
__device__ inline i64 rounds_of(i64 units, int depths) {
    i64 each = (i64)gridDim.x * THREADS * depths;
    return (units + each - 1) / each;
}

/* A plane of elements in one or several parts of equal shape, as units of 8 bytes in the order of elements. WIDE: every unit is
 * 8 aligned bytes of one row. */
#define UNIT ((i64)(8 / sizeof(X)))
struct Plane {
    X* first;
    i64 stride, part;
    i64 columns, elements;

    __device__ inline X* at(i64 p, i64 element) const {
        if (stride == columns) return first + p * part + element;
        i64 row = element / columns;
        return first + p * part + row * stride + (element - row * columns);
    }
    __device__ inline u64 load(i64 p, i64 unit) const {
#if WIDE
        return *(const u64*)at(p, unit * UNIT);
#else
        union { u64 word; X of[UNIT]; } data;
        data.word = 0;
        for (int i = 0; i < UNIT; ++i) {
            i64 element = unit * UNIT + i;
            if (element < elements) data.of[i] = *at(p, element);
        }
        return data.word;
#endif
    }
    __device__ inline void store(i64 p, i64 unit, u64 word) const {
#if WIDE
        *(u64*)at(p, unit * UNIT) = word;
#else
        union { u64 word; X of[UNIT]; } data;
        data.word = word;
        for (int i = 0; i < UNIT; ++i) {
            i64 element = unit * UNIT + i;
            if (element < elements) *at(p, element) = data.of[i];
        }
#endif
    }
};
