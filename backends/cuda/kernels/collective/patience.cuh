/*
 * Packets, and waits for other ranks.
 *
 * Every wait ends: with the data, with the host's abort flag, or after `patience`, which is recorded for the host. What the rank
 * computes afterwards is undefined, so a flag in its memory prevents this and all later kernels, of any group, from storing
 * data for other ranks: no other rank takes undefined data for real data.
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
