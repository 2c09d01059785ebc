/*
 * Packed integers of 4 or 8 bits in the decoder kernel (see weight/packing.rs): activations as bytes, and the products.
 *
 * Activations become three bytes each: linear/digits.cuh. A run is one unit of 8 outputs, or two. The 16 rows of m16n8k32 are a
 * unit's 8 outputs for two spans of inputs. The bytes of the first span are in columns 0 to 2, those of the second in 4 to 6, so
 * each lane has sums of one span and of one scale. A step is 8 outputs by 256 inputs; the last of a run may have one span only.
 * Warps take the steps of a run in turn, continuing from slot to slot. A warp's steps have the same inputs in every run, so their
 * bytes stay in registers.
 *
 * A line of 128 bytes is 16 bytes of each output of a unit. Loaded by ldmatrix it has no bank conflicts, and a lane gets one word
 * of four; if lanes loaded the 16 bytes of their output, the four lanes of an output would conflict. So a lane has one word of
 * each 16 bytes of a span, and bytes of activations are in that order.
 *
 * 4 bits: a group is a span, and its scale follows the integers in the slot. Integers in the high halves of bytes are multiplied
 * as 16 times their value; those in the low halves with an offset of 8, which is subtracted from the sum. 8 bits: each output has
 * one scale, applied to its sum; an output of experts has one for each of them, which follow the integers in the slot.
 */
#if __CUDA_ARCH__ >= 900 && PLANES

__device__ inline void multiply_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/*
 * Stages 8 of COUNT activations, from `at` on, as bytes: three planes, followed by a scale for each span. All lanes of a warp must
 * call, each with the 8 activations after those of the lane before: two spans together. Of the second there may be none.
 */
template <int COUNT> __device__ inline void keep_eight(u8* to, int at, const Vector& v) {
    static_assert(COUNT % SPAN == 0, "whole spans");
    const ThreeBytes<X, BITS> bytes(v);
    if (COUNT % (2 * SPAN) && at >= COUNT) return;
    /* A lane's 16 bytes are two operands: for 4 bits one for the low halves of bytes and one for the high halves. */
    int eight = at / 8;
    u8* own = to + eight / 16 * 128
        + (BITS == 4 ? eight % 4 / 2 * 64 + eight % 16 / 4 * 16 + eight % 2 * 4 : eight % 16 / 8 * 64 + eight % 2 * 32 + eight % 8 / 2 * 4);
#pragma unroll
    for (int digit = 0; digit < 3; ++digit) {
        u8* plane = own + digit * PLANE(COUNT);
        *(u32*)plane = bytes.words[digit][0];
        *(u32*)(plane + (BITS == 4 ? 8 : 16)) = bytes.words[digit][1];
    }
    if (eight % 16 == 0) *(float*)(to + 3 * PLANE(COUNT) + at / SPAN * 4) = bytes.scale();
}

/* Steps of a unit of this many inputs. */
constexpr __device__ inline int steps_of(int columns) { return (columns + 2 * SPAN - 1) / (2 * SPAN); }

template <int P> struct Factors<P, false> {
    static constexpr int INPUTS = INPUTS_OF[P], COLUMNS = COLUMNS_OF[P], UNITS = ROWS_OF[P] / 8;
    /* Slots of a run; the last may have fewer inputs. */
    static constexpr int PIECES = (INPUTS + COLUMNS - 1) / COLUMNS, LAST = INPUTS - (PIECES - 1) * COLUMNS;
    /* Maximum steps of a warp for a unit in a slot, in the last slot, and in all slots. */
    static constexpr int EACH = (steps_of(COLUMNS) + WARPS - 1) / WARPS, OWN = UNITS * EACH;
    static constexpr int LAST_EACH = (steps_of(LAST) + WARPS - 1) / WARPS, ALL = (PIECES - 1) * EACH + LAST_EACH;
    /* Whether the last step of a run has one span. */
    static constexpr bool HALF_STEP = INPUTS % (2 * SPAN) != 0;
    /* Whether slots end with a scale for each output. */
    static constexpr bool BY_OUTPUT = !GROUP && IS_OF_EXPERTS(P);
    /* Vectors of 16 bytes of a span in a lane. */
    static constexpr int VECTORS = BITS / 4;
    static_assert(INPUTS % SPAN == 0 && (PIECES == 1 || COLUMNS % (2 * SPAN) == 0), "whole steps but the last");
    static_assert(!HALF_STEP || !IS_OF_EXPERTS(P), "rows of experts have whole steps");
    static_assert(UNITS == 1 || PIECES == 1, "units together are whole");
    /* Lanes that share an output when sums are added up. */
    static constexpr int SHARERS = 4;

    /* This warp's part of a slot. */
    Vector integers[OWN][2][VECTORS];
    float scale[OWN];
    /* Whether the bytes of activations stay in registers; otherwise they are loaded for every run. */
    static constexpr bool KEPT = ALL <= (WIDE ? 8 : 4);
    struct Bytes {
        u32 word[8];
        /* Subtracted from sums: their start value, and the offset of integers in the low halves of bytes. */
        float off[2];
        float scale;
    };
    Bytes kept[KEPT ? ALL : 1];

    static constexpr __device__ int columns(int piece) { return piece < PIECES - 1 ? COLUMNS : LAST; }
    static constexpr __device__ int each(int piece) { return piece < PIECES - 1 ? EACH : LAST_EACH; }
    /* The warp's rank in the round-robin of steps of a slot: rank 0 takes the first step after those of the previous slots. */
    static __device__ int member(const Thread& t, int piece) {
        const int before = piece * (COLUMNS / (2 * SPAN)) % WARPS;
        return before ? (t.warp + WARPS - before) % WARPS : t.warp;
    }
    static __device__ bool has(const Thread& t, int piece, int i) {
        const int all = steps_of(columns(piece));
        return (i + 1) * WARPS <= all || member(t, piece) + i * WARPS < all;
    }
    /* Whether step `i` of a piece has this one of its two spans. */
    static __device__ bool has_span(const Thread& t, int piece, int i, int span) {
        return !HALF_STEP || piece < PIECES - 1 || 2 * (member(t, piece) + i * WARPS) + span < LAST / SPAN;
    }
    /* The index of a lane's sum of a run. */
    static __device__ int place(const Thread& t) { return (t.group * 2 + t.part / 2) * WARPS + t.warp; }

    /* Loads step `own` of a slot, which begins at `from`. Registers of steps that the warp does not have keep their values, and
     * are multiplied by zero. */
    __device__ void load_step(const Thread& t, int piece, int own, const u8* from) {
        const int unit = own / EACH, i = own % EACH;
        if (i >= each(piece) || !has(t, piece, i)) return;
        u32 lines = (u32)__cvta_generic_to_shared(from) + member(t, piece) * (2 * SPAN * BITS) + t.lane * 16;
        const int at = unit * (columns(piece) * BITS) + i * WARPS * (2 * SPAN * BITS);
#pragma unroll
        for (int set = 0; set < 2; ++set) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                /* The slot may end here. */
                if (HALF_STEP && set && !has_span(t, piece, i, 1)) integers[own][set][v] = Vector{};
                else integers[own][set][v] = load_matrices(lines + at + set * (SPAN * BITS) + v * 512);
            }
        }
#if GROUP
        const int numbers = UNITS * columns(piece) * BITS + (unit * (columns(piece) / SPAN) + i * WARPS * 2) * LINE;
        scale[own] = 0.0f;
        if (has_span(t, piece, i, t.part / 2)) {
            scale[own] = widen(*(const SCALE*)(from + numbers + (2 * member(t, piece) + t.part / 2) * LINE + t.group * (int)sizeof(SCALE)));
        }
#else
        /* The expert that the step's inputs belong to, of those of the slot. */
        const int expert = ROWS_OF_SLOT(P) == 1 ? 0 : (i * WARPS + member(t, piece)) * (2 * SPAN) / ROW_OF(P);
        if (BY_OUTPUT) scale[own] = widen(((const SCALE*)(from + UNITS * columns(piece) * BITS + (expert * UNITS + unit) * LINE))[t.group]);
#endif
    }
    __device__ void release(const Thread& t, Ring& ring, u32 barriers) const {
        u32 mixed = 0;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
#pragma unroll
            for (int v = 0; v < 2 * VECTORS; ++v) mixed ^= integers[i][v / VECTORS][v % VECTORS].word[0];
            if (GROUP || BY_OUTPUT) mixed ^= __float_as_uint(scale[i]);
        }
        release_slot(mixed, t, ring, barriers);
    }
    /* Loads the first slot, before the activations are complete. */
    __device__ void take_ahead(const Thread& t, Ring& ring, u32 barriers) {
        await_phase(barriers + ring.slot * 16, ring.phase);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            scale[i] = 1.0f;
#pragma unroll
            for (int v = 0; v < 2 * VECTORS; ++v) integers[i][v / VECTORS][v % VECTORS] = Vector{};
            load_step(t, 0, i, memory + ring.slot * SLOT_BYTES);
        }
        release(t, ring, barriers);
    }

    /* The activations of this warp's step `i` of a piece. */
    static __device__ Bytes bytes_of_inputs(const Thread& t, const u8* activations, int piece, int i) {
        int step = piece * (COLUMNS / (2 * SPAN)) + i * WARPS + member(t, piece);
        bool real = has(t, piece, i);
        bool has_bytes = real && has_span(t, piece, i, t.group / 4), has_scale = real && has_span(t, piece, i, t.part / 2);
        const u8* own = activations + t.group % 4 * PLANE(INPUTS) + (2 * step + t.group / 4) * SPAN + t.part * 16;
        Bytes bytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Vector v = {};
            /* The results of columns 3 and 7 are not used. */
            if (has_bytes && t.group % 4 < 3) v = *(const Vector*)(own + half * 64);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                /* 4 bits: low halves of bytes come first. */
                const int word = BITS == 4 ? j / 2 * 4 + half * 2 + j % 2 : half * 4 + j;
                bytes.word[word] = v.word[j];
            }
        }
        bytes.scale = has_scale ? ((const float*)(activations + 3 * PLANE(INPUTS)))[2 * step + t.part / 2] : 0.0f;
        int c[4] = {RAISED, RAISED, RAISED, RAISED};
#if BITS == 4
        /* 128 times the sum of the factors of low halves, in two steps because 128 is not a signed byte. */
        const u32 each = 0x40404040u;
#pragma unroll
        for (int word = 0; word < 8; word += 2) {
            multiply_bytes(c, each, each, each, each, bytes.word[word % 4], bytes.word[word % 4 + 1]);
        }
#endif
        bytes.off[0] = __int_as_float(c[0]);
        bytes.off[1] = __int_as_float(c[1]);
        return bytes;
    }
    __device__ void take_inputs(const Thread& t, const u8* activations) {
#pragma unroll
        for (int n = 0; n < ALL && KEPT; ++n) kept[n] = bytes_of_inputs(t, activations, n / EACH, n % EACH);
    }

    /* The integers of a step as bytes, four to an operand: for 4 bits the low halves, then the high halves. */
    struct Operands { u32 word[16]; };
    static __device__ Operands operands_of(const Vector (&its)[2][VECTORS]) {
        Operands a;
#pragma unroll
        for (int i = 0; i < 4 * VECTORS; ++i) {
#pragma unroll
            for (int set = 0; set < 2; ++set) {
                u32 w = its[set][i / 4].word[i % 4];
                const int at = i / 2 * 4 + i % 2 * 2 + set;
#if BITS == 4
                a.word[at] = w & 0x0f0f0f0fu;
                asm("lop3.b32 %0, %1, 0xf0f0f0f0, %2, 0x6a;" : "=r"(a.word[8 + at]) : "r"(w), "r"(0x80808080u));
#else
                a.word[at] = w;
#endif
            }
        }
        return a;
    }
    /* Adds a step's sums for a lane's span: of low and middle bytes, or of high bytes alone. */
    static __device__ void add_step(float (&total)[2], const Operands& a, float scale, const Bytes& x, bool first_span) {
        int c[4] = {RAISED, RAISED, RAISED, RAISED}, low[4] = {};
        auto multiply_next = [&](int (&c)[4], int k) {
            multiply_bytes(c, a.word[4 * k], a.word[4 * k + 1], a.word[4 * k + 2], a.word[4 * k + 3], x.word[2 * k], x.word[2 * k + 1]);
        };
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply_next(BITS == 4 && k < 2 ? low : c, k);
        float factor = scale * x.scale;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int sum = (first_span ? low[i] : low[2 + i]) * 16 + (first_span ? c[i] : c[2 + i]);
            total[i] += factor * (__int_as_float(sum) - x.off[i]);
        }
    }
    /* A tile: sums of its runs over this warp's inputs, into shared memory. With `more`, weights of the next tile replace these
     * step by step; otherwise what is read past the last slot is not used. */
    __device__ void multiply_tile(u32 sums, bool more, const u8* activations, const Thread& t, Ring& ring, u32 barriers) {
        float total[RUNS_OF[P]][UNITS][2] = {};
#pragma unroll
        for (int slot = 0; slot < RUNS_OF[P] * PIECES; ++slot) {
            const int run = slot / PIECES, piece = slot % PIECES;
            bool next = more || slot + 1 < RUNS_OF[P] * PIECES;
            if (next) await_phase(barriers + ring.slot * 16, ring.phase);
            const u8* from = memory + ring.slot * SLOT_BYTES;
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                Operands a = operands_of(integers[i]);
                float its_scale = scale[i];
                load_step(t, (slot + 1) % PIECES, i, from);
                if (i % EACH >= each(piece)) continue;
                const Bytes x = KEPT ? kept[KEPT ? piece * EACH + i % EACH : 0] : bytes_of_inputs(t, activations, piece, i % EACH);
                add_step(total[run][i / EACH], a, its_scale, x, t.part < 2);
            }
            if (next) release(t, ring, barriers);
        }
#pragma unroll
        for (int run = 0; run < RUNS_OF[P]; ++run) {
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                /* Integers of 4 bits were multiplied as 16 times their value. */
                const float one = BITS == 4 ? 0.0625f : 1.0f;
                const float (&its)[2] = total[run][unit];
                float sum = t.part % 2 ? its[0] * (one * 65536.0f) : its[0] * one + its[1] * (one * 256.0f);
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                if (t.part % 2 == 0) leave_sum(sums + (run + unit * RUNS_OF[P]) * (RUN_SUMS * 4), sum);
            }
        }
    }
};
#endif
