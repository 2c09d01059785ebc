/*
 * Queries, keys and values where the product is: what a kernel of wgmma does with its sums, on Hopper (sm_90a).
 *
 * Outputs are taken in units of 16, of which the lower eight and the upper eight are what rope turns together: so the copy engine
 * brings the rows of the weights in that order (ORDER says which), and both elements of a pair are in the same registers. Heads
 * are whole units, of HEAD elements. Cosines and sines come from a table of the step (elementwise/turns.cu).
 */
#if EPILOGUE == HEADS

/* ORDER of outputs in units: as they are; pair by pair of heads turned by halves; by neighbours: the first of each pair, then the others. */
#define AS_THEY_ARE 0
#define BY_HALVES 1
#define BY_NEIGHBOURS 2

#define HEAD_UNITS (HEAD / 16)
/* Where a row goes that goes nowhere. */
#define NOWHERE 0xffffffffu

/* The head a unit belongs to, and its number in there. */
struct Unit {
    int head, at;
    __device__ explicit Unit(int number) : head(number / HEAD_UNITS), at(number % HEAD_UNITS) {}

    /* Which element of the head is the first of the lower or upper eight. */
    __device__ int eight(int upper) const {
        return ORDER == BY_HALVES ? at * 8 + upper * PAIRS : ORDER == BY_NEIGHBOURS ? at * 16 + upper : at * 16 + upper * 8;
    }
    /* The output that is element `i` of the lower or upper eight. */
    __device__ int output(int upper, int i) const {
        return head * HEAD + eight(upper) + i * (ORDER == BY_NEIGHBOURS ? 2 : 1);
    }
};

/* What a head is: those of queries come first, then those of keys and values. */
enum Kind { QUERY, KEY, VALUE, NONE };
__device__ inline Kind kind_of(const Epilogue& e, int head) {
    int keys = (int)e.query_heads, values = keys + (int)e.kv_heads;
    return head < keys ? QUERY : head < values ? KEY : head < values + (int)e.kv_heads ? VALUE : NONE;
}
__device__ inline bool is_turned(const Epilogue& e, int head) { return ROPE && head < (int)(e.query_heads + e.kv_heads); }
__device__ inline float factor_of(const Epilogue& e, int head) { return head < (int)e.query_heads ? e.query_scale : e.key_scale; }

/* Where row 0 of a head is: among the queries, or in slot 0 of the first page. */
__device__ inline Y* begin_of(const Epilogue& e, int head, Kind kind) {
    if (kind == QUERY) return e.y + head * HEAD;
    int kv_head = head - (int)e.query_heads;
    if (kind == KEY) return (Y*)e.keys + kv_head * e.key_strides.head;
    return (Y*)e.values + (kv_head - (int)e.kv_heads) * e.value_strides.head;
}

/* How far behind that a row is, in eights of elements. */
__device__ inline u32 way_of(const Epilogue& e, Kind kind, int row, int rows) {
    if (row >= rows || kind == NONE) return NOWHERE;
    if (ROPE && kind != VALUE && e.positions[row] < 0) return NOWHERE;
    if (kind == QUERY) return (u32)(row * e.y_row / 8);
    int place = e.places[row];
    if (place < 0 || place >= e.pages * e.slots) return NOWHERE;
    const Strides& strides = kind == KEY ? e.key_strides : e.value_strides;
    i64 page = (u32)place / (u32)e.slots, slot = (u32)place % (u32)e.slots;
    return (u32)((page * strides.page + slot * strides.slot) / 8);
}

/* A pair by its cosine and sine. */
__device__ inline void turn(float& p, float& q, float2 by, float factor) {
    float cosine = factor * by.x, sine = factor * by.y, first = p;
    p = first * cosine - q * sine;
    q = q * cosine + first * sine;
}

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000 && ORDER != AS_THEY_ARE
/* UNITS units of weights in their order, from unit `first` on, to this block or to all of its cluster. */
__device__ inline void copy_units(const TensorMap& map, u32 to, u64& barrier, int input, int first, u64 once) {
    Unit unit(first);
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(input), "r"(0), "r"(unit.at), "r"(unit.head), "l"(once)
        : "memory");
}
__device__ inline void copy_units_to(u16 blocks, const TensorMap& map, u32 to, u64& barrier, int input, int first) {
    Unit unit(first);
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(input), "r"(0), "r"(unit.at), "r"(unit.head), "h"(blocks)
        : "memory");
}
#endif
#endif
