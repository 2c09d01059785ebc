/*
 * What kernels that reduce by peer exchange share. X is the type of the elements.
 *
 * Elements are reduced in the order of ranks, floats in f32 and rounded once, so every rank gets the same bits. In place, x and y are
 * the same memory: a thread writes only units that it has read itself. ADDED: the sums, times a factor, are added to a residual, of
 * which all ranks have the same bits, before they are rounded.
 */

enum { SUM = 1, MAX = 2, MIN = 3, MEAN = 4 };

/* The type in which elements are reduced, and the conversion back. */
template <typename T> struct Combined {
    typedef float Value;
    static __device__ inline float read(T x) { return widen(x); }
    static __device__ inline T write(float x) { return narrow<T>(x); }
};
template <typename T> struct Integers {
    typedef i64 Value;
    static __device__ inline i64 read(T x) { return (i64)x; }
    static __device__ inline T write(i64 x) { return (T)x; }
};
template <> struct Combined<i32> : Integers<i32> {};
template <> struct Combined<u32> : Integers<u32> {};
template <> struct Combined<i8> : Integers<i8> {};
template <> struct Combined<u8> : Integers<u8> {};
typedef Combined<X>::Value Value;

__device__ inline bool lacks_value(float x) { return is_nan(x); }
__device__ inline bool lacks_value(i64) { return false; }
__device__ inline float share_of(float x, int ranks) { return x / (float)ranks; }
__device__ inline i64 share_of(i64 x, int) { return x; }

struct Unit {
    Value of[UNIT];

    __device__ inline void read(u64 word) {
        union { u64 word; X of[UNIT]; } data;
        data.word = word;
#pragma unroll
        for (int i = 0; i < UNIT; ++i) of[i] = Combined<X>::read(data.of[i]);
    }
    __device__ inline void combine(u64 word, int reduction) {
        Unit other;
        other.read(word);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            Value a = of[i], b = other.of[i];
            if (reduction == MAX) of[i] = b > a || lacks_value(a) ? b : a;
            else if (reduction == MIN) of[i] = b < a || lacks_value(a) ? b : a;
            else of[i] = a + b;
        }
    }
    /* A residual, plus this times `factor`. */
    __device__ inline void add_to(u64 word, float factor) {
        Unit residual;
        residual.read(word);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) of[i] = residual.of[i] + (Value)factor * of[i];
    }
    __device__ inline u64 write(int reduction, int ranks) const {
        union { u64 word; X of[UNIT]; } data;
#pragma unroll
        for (int i = 0; i < UNIT; ++i) data.of[i] = Combined<X>::write(reduction == MEAN ? share_of(of[i], ranks) : of[i]);
        return data.word;
    }
};

/* The operands and results of a reduction. */
struct Planes {
    Plane x, y, added;

    __device__ inline Planes(const ReduceParams& p, i64 elements) {
        x = {(X*)p.x.first, p.x.stride, p.x_part, p.columns, elements};
        y = {(X*)p.y.first, p.y.stride, 0, p.columns, elements};
        added = {(X*)p.added.first, p.added.stride, 0, p.columns, elements};
    }
    /* The results of the unit at `at`. */
    __device__ inline u64 finish(const ReduceParams& p, Unit& unit, i64 at) const {
        if (ADDED) unit.add_to(added.load(0, at), p.alpha);
        return unit.write(p.reduction, p.ranks);
    }
};

__device__ inline Planes begin(const ReduceParams& p, i64& units, Patience& patience) {
    i64 elements = p.extent.count() * p.columns;
    units = (elements + UNIT - 1) / UNIT;
    patience.begin(p.state, p.failed, p.patience);
    return {p, elements};
}

__device__ inline void end(const ReduceParams& p, u32 rounds) {
    launch_dependents();
    __syncthreads();
    if (threadIdx.x == 0) p.rounds[blockIdx.x] = rounds;
}

/* Unit `unit` of the share of rank `rank`, which has `share` units. */
__device__ inline u64 load_share(const Plane& x, i64 rank, i64 share, i64 unit, i64 units) {
    i64 at = rank * share + unit;
    return unit < share && at < units ? x.load(0, at) : 0;
}
