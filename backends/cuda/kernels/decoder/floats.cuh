/*
 * Floats of 4 bits in the decoder kernel (linear/floats.cuh, weight/packing.rs): products by mma.m16n8k16.
 *
 * A run is one unit of 8 outputs, or two. A step is 8 outputs by 128 inputs, those of four scales. Warps take the steps of a run in turn,
 * continuing from slot to slot. Loaded by ldmatrix, a lane has a word of each of the step's four lines: 4 times 8 inputs of the scale that
 * is its part's.
 *
 * The 16 rows of an mma are the 8 outputs twice, with the first and with the last 4 inputs of a word. So along the summed dimension the
 * places of each part belong to another scale. The other operand keeps them apart: its columns 2 p and 2 p + 1 have the first and the last
 * inputs of part p at the places of that part, and zeros elsewhere. So the four mma of a step, one for each line, add up to the same sums,
 * and a lane ends up with the sum of its own scale.
 */
#if __CUDA_ARCH__ >= 900 && FLOATS
template <int P> struct Factors<P, false> {
    static constexpr int ROW = ROW_OF(P), COLUMNS = COLUMNS_OF[P], UNITS = ROWS_OF[P] / 8;
    static constexpr int OF_ROW = SLOTS_OF_ROW(P), OF_RUN = SLOTS_OF_RUN(P);
    /* Steps of a row and of a slot at most. */
    static constexpr int STEPS = PADDED_TO(ROW, SPAN) / SPAN, EACH = COLUMNS / SPAN;
    /* Maximum steps of a warp for a unit in a slot, and for all units. */
    static constexpr int MOST = (EACH + WARPS - 1) / WARPS, OWN = UNITS * MOST;
    static_assert(COLUMNS % SPAN == 0 && GROUP == 32 && BITS == 4, "whole steps of four scales");
    static_assert(UNITS == 1 || OF_RUN == 1, "units together are whole");
    /* Lanes that share an output when sums are added up. */
    static constexpr int SHARERS = 4;
    /* Whether activations stay in registers, 8 for each step, at most 48 of the 224 of a thread; otherwise they are loaded for every run. */
    static constexpr bool KEPT = OF_RUN * MOST <= 6;

    /* This warp's part of a slot. */
    Vector words[OWN];
    float scale[OWN];
    struct Inputs { u32 word[8]; };
    Inputs kept[KEPT ? OF_RUN * MOST : 1];

    /* Steps before a slot, of those of the run, and of the slot. */
    static constexpr __device__ int before(int slot) { return slot / OF_ROW * (ROWS_OF_SLOT(P) * STEPS) + slot % OF_ROW * EACH; }
    static constexpr __device__ int steps(int slot) {
        const int end = slot + 1 < OF_RUN ? before(slot + 1) : INPUTS_OF[P] / ROW * STEPS;
        return end - before(slot);
    }
    /* The warp's rank in the round-robin of steps of a slot: rank 0 takes the first step after those of the previous slots. */
    static __device__ int member(const Thread& t, int slot) {
        const int taken = before(slot) % WARPS;
        return taken ? (t.warp + WARPS - taken) % WARPS : t.warp;
    }
    static __device__ bool has(const Thread& t, int slot, int i) {
        return (i + 1) * WARPS <= steps(slot) || member(t, slot) + i * WARPS < steps(slot);
    }
    /* The index of a lane's sum of a run. */
    static __device__ int place(const Thread& t) { return (t.group * 2 + t.part / 2) * WARPS + t.warp; }

    /* Loads step `own` of a slot, which begins at `from`. Steps that the warp does not have are multiplied by zero. */
    __device__ void load_step(const Thread& t, int slot, int own, const u8* from) {
        const int unit = own / MOST, i = own % MOST;
        scale[own] = 0.0f;
        if (i * WARPS >= steps(slot) || !has(t, slot, i)) return;
        u32 lines = (u32)__cvta_generic_to_shared(from) + member(t, slot) * (SPAN * BITS) + t.lane * 16;
        words[own] = load_matrices(lines + (unit * steps(slot) + i * WARPS) * (SPAN * BITS));
        const int numbers = UNITS * steps(slot) * (SPAN * BITS) + (unit * steps(slot) + i * WARPS) * (4 * LINE);
        scale[own] = widen(*(const SCALE*)(from + numbers + (4 * member(t, slot) + t.part) * LINE + t.group * (int)sizeof(SCALE)));
    }
    __device__ void release(const Thread& t, Ring& ring, u32 barriers) const {
        u32 mixed = 0;
#pragma unroll
        for (int i = 0; i < OWN; ++i) mixed ^= words[i].word[0] ^ __float_as_uint(scale[i]);
        release_slot(mixed, t, ring, barriers);
    }
    /* Loads the first slot, before the activations are complete. */
    __device__ void take_ahead(const Thread& t, Ring& ring, u32 barriers) {
        await_phase(barriers + ring.slot * 16, ring.phase);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            words[i] = Vector{};
            load_step(t, 0, i, memory + ring.slot * SLOT_BYTES);
        }
        release(t, ring, barriers);
    }

    /* The activations of this warp's step `i` of a slot, where this lane's column has any. */
    static __device__ Inputs inputs_of(const Thread& t, const u8* activations, int slot, int i) {
        Inputs x = {};
        const int step = before(slot) + i * WARPS + member(t, slot), at = step % STEPS * SPAN + t.part * GROUP;
        if (i * WARPS >= steps(slot) || !has(t, slot, i) || t.group / 2 != t.part || at >= ROW) return x;
        const u8* from = activations + (step / STEPS * ROW + at + t.group % 2 * 4) * 2;
#pragma unroll
        for (int line = 0; line < 4; ++line) {
            uint2 four = *(const uint2*)(from + line * 16);
            x.word[2 * line] = four.x;
            x.word[2 * line + 1] = four.y;
        }
        return x;
    }
    __device__ void take_inputs(const Thread& t, const u8* activations) {
#pragma unroll
        for (int n = 0; n < OF_RUN * MOST && KEPT; ++n) kept[n] = inputs_of(t, activations, n / MOST, n % MOST);
    }

    /* A tile: sums of its runs over this warp's inputs, into shared memory. With `more`, weights of the next tile replace these. */
    __device__ void multiply_tile(u32 sums, bool more, const u8* activations, const Thread& t, Ring& ring, u32 barriers) {
        float total[RUNS_OF[P]][UNITS] = {};
#pragma unroll
        for (int of_tile = 0; of_tile < RUNS_OF[P] * OF_RUN; ++of_tile) {
            const int run = of_tile / OF_RUN, slot = of_tile % OF_RUN;
            Vector now[OWN];
            Inputs x[MOST];
            float its[OWN], c[OWN][4] = {};
#pragma unroll
            for (int i = 0; i < MOST; ++i) x[i] = KEPT ? kept[KEPT ? slot * MOST + i : 0] : inputs_of(t, activations, slot, i);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                now[i] = words[i];
                its[i] = scale[i];
            }
            if (more || of_tile + 1 < RUNS_OF[P] * OF_RUN) {
                await_phase(barriers + ring.slot * 16, ring.phase);
#pragma unroll
                for (int i = 0; i < OWN; ++i) load_step(t, (slot + 1) % OF_RUN, i, memory + ring.slot * SLOT_BYTES);
                release(t, ring, barriers);
            }
            /* Steps take turns, so that an mma seldom waits for the one before. */
#pragma unroll
            for (int line = 0; line < 4; ++line) {
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    if (i % MOST * WARPS >= steps(slot)) continue;
                    u32 word = now[i].word[line];
                    const u32* inputs = x[i % MOST].word + 2 * line;
                    multiply(c[i], pair_of_floats(word, 0), pair_of_floats(word, 2), pair_of_floats(word, 1), pair_of_floats(word, 3),
                             inputs[0], inputs[1]);
                }
            }
#pragma unroll
            for (int i = 0; i < OWN; ++i) total[run][i / MOST] += its[i] * (c[i][0] + c[i][3]);
        }
#pragma unroll
        for (int run = 0; run < RUNS_OF[P]; ++run) {
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                float sum = total[run][unit];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                if (t.part % 2 == 0) leave_sum(sums + (run + unit * RUNS_OF[P]) * (RUN_SUMS * 4), sum);
            }
        }
    }
};
#endif
