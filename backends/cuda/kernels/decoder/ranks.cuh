/*
 * Sums over ranks of the results of attention and MLP, where RANKS share each layer.
 *
 * Each rank stores its part of a result in the memory of every rank, its own included, and every block adds the parts, in the order
 * of the ranks. So all blocks of all ranks compute the same bits, and a sum takes one trip over the links. As within a rank, data is
 * its own flag: a place holds the sentinel until the part is there (exchange.cuh). Elements are rounded to X before they are sent, as
 * an all-reduce outside of the launch would receive them, and added in f32.
 *
 * The results of all launches of a group are numbered, two in each layer. Those with the same number modulo RESULT_SETS have the same places,
 * which therefore do not depend on the size of the model. A rank writes sentinels to the places of a result once none of its blocks
 * reads it any more (layers.cu), which is two layers later at most; another rank writes a result of the same places only after it
 * has all parts of the RESULT_SETS - 1 results between them, which blocks of this rank stored after they had written the sentinels.
 *
 * All ranks must launch the same layers in the same order.
 */
#if RANKS > 1 && __CUDA_ARCH__ >= 900
/* Bytes of the parts of a result, and the number of the result in front of a layer, or in its middle. */
#define SET_BYTES ((i64)RANKS * PART_BYTES)
#define RESULT_BEFORE(l) (2 * (l) - 1)
#define RESULT_IN(l) (2 * (l))

/* The byte offset of the places of a result of this launch. */
__device__ inline i64 set_of(u32 launched, int result) { return (i64)((launched + (u32)result) % RESULT_SETS) * SET_BYTES; }

/* Stores an element of this rank's part of a result for all ranks. */
__device__ inline void leave_part(const Ranks& r, i64 at, X value) {
    u16 bits = value.bits == 0xffffu ? 0x7fffu : value.bits;
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        asm volatile("st.relaxed.sys.global.u16 [%0], %1;" :: "l"((u8*)r.to[rank] + at), "h"(bits) : "memory");
    }
}

/* Counts a poll of another rank's part; returns whether to go on. */
__device__ inline bool wait_for_rank(const Ranks& r, u32& polls, u64& began, int rank) {
    if (++polls % POLLS_BETWEEN_LOOKS) return true;
    Patience patience;
    patience.begin(r.state, r.failed, r.patience);
    bool lasts = patience.lasts(POLLS_BETWEEN_LOOKS, began, rank);
    /* Blocks that read what this one computes from missing data must see the flag. */
    if (!lasts) __threadfence();
    return lasts;
}

/* A part of OWN of the groups of elements that a thread adds together: as many as registers hold. */
#define GROUPS_AT_ONCE (OWN * RANKS * TOGETHER <= 128 ? OWN : 1)

/* The sums of this thread's elements of a result, whose places begin at `parts`. */
__device__ inline void add_parts(const Ranks& r, const u8* parts, float (&values)[OWN][TOGETHER]) {
#pragma unroll
    for (int first = 0; first < OWN; first += GROUPS_AT_ONCE) {
        Some own[GROUPS_AT_ONCE][RANKS];
#pragma unroll
        for (int o = 0; o < GROUPS_AT_ONCE; ++o) {
            int at = (threadIdx.x + (first + o) * MULTIPLIERS) * TOGETHER;
#pragma unroll
            for (int rank = 0; rank < RANKS; ++rank) {
                own[o][rank] = Some{};
                if (at < HIDDEN) own[o][rank] = load_some(parts + rank * PART_BYTES + at * 2);
            }
        }
        /* All that are missing are loaded in each round, as in `await_some`. */
        u32 polls = 0;
        u64 began = 0;
        int missing;
        do {
            missing = -1;
#pragma unroll
            for (int o = 0; o < GROUPS_AT_ONCE; ++o) {
#pragma unroll
                for (int rank = 0; rank < RANKS; ++rank) {
                    if (lacks(own[o][rank])) {
                        missing = rank;
                        own[o][rank] = load_some(parts + rank * PART_BYTES + (threadIdx.x + (first + o) * MULTIPLIERS) * (TOGETHER * 2));
                    }
                }
            }
        } while (missing >= 0 && wait_for_rank(r, polls, began, missing));
#pragma unroll
        for (int o = 0; o < GROUPS_AT_ONCE; ++o) {
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                values[first + o][i] = 0.0f;
#pragma unroll
                for (int rank = 0; rank < RANKS; ++rank) values[first + o][i] += element(own[o][rank], i);
            }
        }
    }
}

/* Writes the sentinel to the places of a result. */
__device__ inline void clear_result(const Ranks& r, u32 launched, int result, i64 at, int count) {
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        clear((u8*)r.from + set_of(launched, result) + rank * PART_BYTES, HIDDEN * 2, at, count);
    }
}
#endif
