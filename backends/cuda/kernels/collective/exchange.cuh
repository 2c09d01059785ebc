/*
 * How ranks exchange data through the memory of each other.
 *
 * A packet is 8 bytes of data in two words of 64 bits, the upper half of each the flag of the round that the data belongs to. Words of
 * 64 bits are stored and loaded whole, so data that has its flag is there, and no order between stores is needed.
 *
 * Collectives of all ranks. In each round every thread stores `depth` packets at every other rank and waits for as many from each,
 * also where it has no data to exchange. Rounds take turns in two places. A thread that has come to the end of a round has got the
 * packets of that round from every rank, which their threads stored after they had read those of the round before: the place of the
 * round before may be written again. Between kernels the same holds for whole blocks, because a kernel begins when the one in front of it
 * has ended, and every kernel has a round or none on all ranks. So all ranks must launch the same kernels with the same grids over
 * equally many rows, in the same order.
 *
 * Messages. The sender stores the packets of a round in one of `CREDITS` places, when the same thread of the receiver has taken the
 * packets of the round that was there before, and tells so in the sender's memory. So a sender does not wait for a receiver that has
 * read what was sent before.
 *
 * Rounds are counted in device memory, by block, so that a graph can be replayed.
 *
 * Every wait ends: with the data, with the word by which the host ends all waits, or after `patience`, when the wait is recorded for
 * the host. What the rank computes from then on is undefined, so a word in its memory keeps this and all later kernels, in whatever
 * group, from storing packets: no other rank takes undefined data for real data.
 */

/* Polls between looks at the clock and at the host's word. */
#define POLLS_BETWEEN_LOOKS 512u

struct Words { u64 first, second; };

/* What the host and kernels tell each other. */
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

/* The flag of a round: never that of empty memory. */
__device__ inline u32 flag_of(u32 round) { return 2 * round + 1; }

/* Data as a packet, and back. */
__device__ inline Words packed(u64 data, u32 flag) {
    u64 upper = (u64)flag << 32;
    return {upper | (data & 0xffffffffull), upper | (data >> 32)};
}
__device__ inline u64 unpacked(Words words) { return (words.first & 0xffffffffull) | words.second << 32; }

/* How a thread waits, and whether what it has is worth sending. */
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

    /* Ends this wait and all that follow. */
    __device__ inline bool end() {
        *(volatile u32*)failed = 1;
        over = true;
        return false;
    }

    /* Called with the number of polls of a wait and when it began, 0 at first; whether it goes on. */
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

    /* Waits until a count has come to a number. */
    __device__ inline void await_count(const u32* from, u32 least, int peer) {
        u64 began = 0;
        for (u32 polls = 1; (int)(load_word(from) - least) < 0; ++polls) {
            if (!lasts(polls, began, peer)) return;
        }
    }
};

/* The place of a packet among those of a round: neighbours are threads. */
__device__ inline i64 place_of(int depth) { return ((i64)depth * BLOCKS + blockIdx.x) * THREADS + threadIdx.x; }
#define ROUND_PACKETS ((i64)DEPTH * BLOCKS * THREADS)

/* The unit of data that a thread has in a round. */
__device__ inline i64 unit_of(i64 round, int depths, int depth) {
    return ((round * depths + depth) * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
}
__device__ inline i64 rounds_of(i64 units, int depths) {
    i64 each = (i64)gridDim.x * THREADS * depths;
    return (units + each - 1) / each;
}

/* A plane of elements in one or several parts of equal shape, as units of 8 bytes in the order of elements. WIDE: every unit is 8 aligned
 * bytes of one row. */
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
