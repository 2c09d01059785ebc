/*
 * Packed integers of 4 or 8 bits in the kernel for layers (see weight/packing.rs): activations as bytes for them, and products.
 *
 * Activations become three bytes each: linear/digits.cuh. A run is one unit of 8 outputs, or two. The 16 rows of m16n8k32 are a
 * unit's 8 outputs with two spans, of which the second has its bytes in columns 4 to 6 where the first has its own in 0 to 2: what
 * lanes have of the unit is in memory 16 bytes behind 16 bytes, and each has sums that belong to one span and so to one scale. These
 * 8 outputs by 256 inputs are a step, and a warp's steps of a run are of the same inputs from run to run: their bytes stay in
 * registers.
 *
 * 4 bits: a group is a span, its scale comes into the slot behind the integers. 8 bits: an output has one scale, applied to its sum.
 */
#if __CUDA_ARCH__ >= 900 && BITS
#define SPAN 128

__device__ inline void multiply_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/*
 * 8 of COUNT activations, from `at` on, into shared memory as bytes: three planes, and behind them a scale for each span. All lanes of
 * a warp must call, each with the 8 behind those of the lane before: they have two spans.
 */
template <int COUNT> __device__ inline void keep_eight(u8* to, int at, const Vector& v) {
    static_assert(COUNT % (2 * SPAN) == 0, "whole warps");
    const ThreeBytes<X, BITS> bytes(v);
    int eight = at / 8;
    u8* own = to + eight / 8 * 64 + (BITS == 4 ? eight % 4 * 16 + eight % 8 / 4 * 8 : eight % 8 * 8);
#pragma unroll
    for (int digit = 0; digit < 3; ++digit) *(uint2*)(own + digit * PLANE(COUNT)) = make_uint2(bytes.words[digit][0], bytes.words[digit][1]);
    if (eight % 16 == 0) *(float*)(to + 3 * PLANE(COUNT) + at / SPAN * 4) = bytes.scale();
}

/* What a warp multiplies for product P. */
template <int P> struct Factors {
    static constexpr int INPUTS = INPUTS_OF[P], COLUMNS = COLUMNS_OF[P], UNITS = ROWS_OF[P] / 8, PIECES = INPUTS / COLUMNS;
    static constexpr int STEPS = COLUMNS / (2 * SPAN), EACH = (STEPS + WARPS - 1) / WARPS, OWN = UNITS * EACH;
    /* Vectors of 16 bytes that a lane has of a span. */
    static constexpr int VECTORS = BITS / 4;
    static_assert(INPUTS % COLUMNS == 0 && COLUMNS % (2 * SPAN) == 0, "whole steps");
    static_assert(UNITS == 1 || PIECES == 1, "units together are whole");
    /* Lanes that have an output in the end. */
    static constexpr int SHARERS = 4;

    /* What came of a slot. */
    struct Taken {
        Vector integers[OWN][2][VECTORS];
        float scale[OWN];
    };
    Taken held;
    /* Whether the bytes of activations stay in registers, or are read again and again. */
    static constexpr bool KEPT = PIECES * EACH <= 4;
    struct Bytes {
        u32 word[8];
        float scale;
    };
    Bytes kept[KEPT ? PIECES * EACH : 1];

    static __device__ bool has(const Thread& t, int i) { return STEPS % WARPS == 0 || i < EACH - 1 || t.warp + i * WARPS < STEPS; }

    static __device__ void take(Taken& taken, const Thread& t, const Ring& ring, u32 barriers) {
        await_phase(barriers + ring.slot * 16, ring.phase);
        const u8* slot = memory + ring.slot * SLOT_BYTES;
        const u8* own = slot + t.warp * (2 * SPAN * BITS) + t.part * 128 + t.group * 16;
#if GROUP
        const u8* number = slot + UNITS * COLUMNS * BITS + (2 * t.warp + t.part / 2) * LINE + t.group * (int)sizeof(SCALE);
#endif
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                Vector (&its)[2][VECTORS] = taken.integers[unit * EACH + i];
                taken.scale[unit * EACH + i] = 1.0f;
#pragma unroll
                for (int set = 0; set < 2; ++set) {
#pragma unroll
                    for (int v = 0; v < VECTORS; ++v) {
                        its[set][v] = Vector{};
                        const int at = unit * (COLUMNS * BITS) + (i * WARPS * 2 + set) * (SPAN * BITS) + v * 512;
                        if (has(t, i)) its[set][v] = *(const Vector*)(own + at);
                    }
                }
#if GROUP
                const int at = (unit * (COLUMNS / SPAN) + i * WARPS * 2) * LINE;
                if (has(t, i)) taken.scale[unit * EACH + i] = widen(*(const SCALE*)(number + at));
#endif
            }
        }
    }
    /* Word `word` of bytes. */
    static __device__ u32 bytes_of(const Vector (&its)[VECTORS], int word) {
#if BITS == 8
        return its[word / 4 % VECTORS].word[word % 4];
#else
        u32 from = its[0].word[word / 2], bytes;
        asm("lop3.b32 %0, %1, 0xf0f0f0f0, %2, 0x6a;" : "=r"(bytes) : "r"(word % 2 ? from : from * 16), "r"(0x80808080u));
        return bytes;
#endif
    }
    /* The place of a lane's sum of a run. */
    static __device__ int place(const Thread& t) { return (t.group * 2 + t.part / 2) * WARPS + t.warp; }
    /* The first slot, before the activations are there. */
    __device__ void take_ahead(const Thread& t, Ring& ring, u32 barriers) {
        take(held, t, ring, barriers);
        release_slot(t, ring, barriers);
    }
    /* What activations are to step `n` of this warp. */
    static __device__ Bytes bytes_of_inputs(const Thread& t, const u8* activations, int n) {
        int step = n / EACH * STEPS + n % EACH * WARPS + t.warp;
        bool real = has(t, n % EACH);
        const u8* own = activations + t.group % 4 * PLANE(INPUTS) + (2 * step + t.group / 4) * SPAN + t.part * 16;
        Bytes bytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Vector v = {};
            /* Columns 3 and 7 come to nothing, whatever they hold. */
            if (real && t.group % 4 < 3) v = *(const Vector*)(own + half * 64);
#pragma unroll
            for (int i = 0; i < 4; ++i) bytes.word[half * 4 + i] = v.word[i];
        }
        bytes.scale = real ? ((const float*)(activations + 3 * PLANE(INPUTS)))[2 * step + t.part / 2] : 0.0f;
        return bytes;
    }
    __device__ void take_inputs(const Thread& t, const u8* activations) {
#pragma unroll
        for (int n = 0; n < PIECES * EACH && KEPT; ++n) kept[n] = bytes_of_inputs(t, activations, n);
    }
    /* A run: its sums over this warp's inputs. With `more`, weights of the next come in the place of these. */
    __device__ void multiply_run(float* sums, bool more, const u8* activations, const Thread& t, Ring& ring, u32 barriers) {
        float total[UNITS][2] = {};
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            bool next = more || piece + 1 < PIECES;
            Taken taken;
            if (next) take(taken, t, ring, barriers);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const int step = piece * EACH + i % EACH;
                const Bytes its = KEPT ? kept[KEPT ? step : 0] : bytes_of_inputs(t, activations, step);
                int c[4] = {RAISED, RAISED, RAISED, RAISED};
#pragma unroll
                for (int k = 0; k < 8; k += 2) {
                    multiply_bytes(c, bytes_of(held.integers[i][0], k), bytes_of(held.integers[i][1], k), bytes_of(held.integers[i][0], k + 1),
                                   bytes_of(held.integers[i][1], k + 1), its.word[k], its.word[k + 1]);
                }
                bool low = t.part < 2;
                float factor = held.scale[i] * its.scale;
                total[i / EACH][0] += factor * (__int_as_float(low ? c[0] : c[2]) - RAISED_BY);
                total[i / EACH][1] += factor * (__int_as_float(low ? c[1] : c[3]) - RAISED_BY);
            }
            if (next) {
                release_slot(t, ring, barriers);
                held = taken;
            }
        }
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            /* Low and middle bytes of a span, and the high ones. Integers of 4 bits were multiplied as 16 times what they are. */
            const float one = BITS == 4 ? 0.0625f : 1.0f;
            float sum = t.part % 2 ? total[unit][0] * (one * 65536.0f) : total[unit][0] * one + total[unit][1] * (one * 256.0f);
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            if (t.part % 2 == 0) sums[unit * (RUNS_OF[P] * RUN_SUMS)] = sum;
        }
    }
};
#endif
