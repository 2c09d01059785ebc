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
 * All-reduces in chunks (chunks.cu) need no flags in their packets: a block counts the chunks that it has written in a mark.
 *
 * Messages: the sender stores the packets of a round in one of `CREDITS` buffers, once the same thread of the receiver has
 * acknowledged the round that used the buffer before, by a write to the sender's memory. So a sender does not wait for a receiver
 * that keeps up.
 *
 * Rounds are counted in device memory, per block, so that a graph can be replayed.
 *
 * Every wait ends: with the data, with the host's abort flag, or after `patience`, which is recorded for the host. What the rank
 * computes afterwards is undefined, so a flag in its memory prevents this and all later kernels, of any group, from storing
 * packets: no other rank takes undefined data for real data.
 */

/* Polls between checks of the clock and of the host's abort flag. */
#define POLLS_BETWEEN_LOOKS 512u

struct Words { u64 first, second; };

/* Memory shared by the host and the kernels. */
struct ExchangeState {
    u32 ended;
    u32 unused;
    u64 given_up;
};

__device__ inline void store_words(Vector* to, Words words) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" :: "l"(to), "l"(words.first), "l"(words.second) : "memory");
}
__device__ inline Words load_words(const Vector* from) {
    Words words;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(words.first), "=l"(words.second) : "l"(from) : "memory");
    return words;
}
__device__ inline void store_word(u32* to, u32 word) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(to), "r"(word) : "memory"); }
__device__ inline u32 load_word(const u32* from) {
    u32 word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}
__device__ inline u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    return now;
}

/* The flag of a round; never equal to empty memory. */
__device__ inline u32 flag_of(u32 round) { return 2 * round + 1; }

/* Packs data into a packet, and unpacks it. */
__device__ inline Words packed(u64 data, u32 flag) {
    u64 upper = (u64)flag << 32;
    return {upper | (data & 0xffffffffull), upper | (data >> 32)};
}
__device__ inline u64 unpacked(Words words) { return (words.first & 0xffffffffull) | words.second << 32; }

/* The state of a thread's waits, and whether its data is valid to send. */
struct Patience {
    ExchangeState* state;
    u32* failed;
    u64 limit;
    bool over;

    __device__ inline void begin(void* word, u32* word_of_rank, u64 nanoseconds) {
        state = (ExchangeState*)word;
        failed = word_of_rank;
        limit = nanoseconds;
        over = *(volatile u32*)failed;
    }

    /* Stores a packet. */
    __device__ inline void leave(Vector* to, u64 data, u32 flag) const {
        if (!over) store_words(to, packed(data, flag));
    }

    /* Ends this wait and all later ones. */
    __device__ inline bool end() {
        *(volatile u32*)failed = 1;
        over = true;
        return false;
    }

    /* Called after each poll with the number of polls and the start time of the wait, 0 at first; returns whether to continue. */
    __device__ inline bool lasts(u32 polls, u64& began, int peer) {
        if (over) return false;
        if (polls % POLLS_BETWEEN_LOOKS) return true;
        if (load_word(&state->ended)) return end();
        u64 now = nanoseconds();
        if (!began) began = now;
        if (now - began < limit) return true;
        u64 record = 1ull << 63 | (u64)(u32)peer << 32 | blockIdx.x;
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(&state->given_up), "l"(record) : "memory");
        store_word(&state->ended, 1);
        return end();
    }

    /* The data of a packet. */
    __device__ inline u64 await(const Vector* from, u32 flag, int peer) {
        u64 began = 0;
        for (u32 polls = 1;; ++polls) {
            Words words = load_words(from);
            if ((u32)(words.first >> 32) == flag && (u32)(words.second >> 32) == flag) return unpacked(words);
            if (!lasts(polls, began, peer)) return 0;
        }
    }

    /* Waits until a counter has reached a number. */
    __device__ inline void await_count(const u32* from, u32 least, int peer) {
        u64 began = 0;
        for (u32 polls = 1; (int)(load_word(from) - least) < 0; ++polls) {
            if (!lasts(polls, began, peer)) return;
        }
    }
};

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
