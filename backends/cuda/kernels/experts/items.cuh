/*
 * Work items of grouped_linear and head_linear: an expert, and up to TOKENS of its assignments.
 *
 * With HEADS, for head_linear, the experts are SLOTS heads, and every row is assigned to each. Items follow from the number of rows.
 * Behind its inputs, and behind its outputs, a head has REST elements, which `copy_rest` copies.
 *
 * With DIRECT an item is one assignment, whose expert is read from `experts`; used when there are so few assignments that hardly
 * two share an expert. Otherwise items are counted along the tables of moe_group: every warp adds up the items of 32 experts at a
 * time until it reaches the item's number. No block waits for another, and experts without assignments are skipped.
 *
 * The tables are untrusted: indices are clamped to them, and an assignment is used only if `experts` confirms that it belongs to
 * the expert. So each slot is written only by blocks that compute the same value, or not at all.
 */
/* Kernels that need not be fast do not define these: one kernel serves all sizes. */
#ifndef SLOTS
#define SLOTS ((int)p.slots)
#define PER_SLOT p.per_slot
#define REST ((int)p.rest)
#endif

struct Item {
    /* The expert's index on this device; negative if there is none. */
    int expert;
    /* The first index in `order`, or the first row of a head, and the number of assignments. */
    int begin, count;
};

/* Where the search for an item begins: an expert, and the number of items before it. */
struct Cursor { int base, before; };

#if HEADS
/* The number of a head's items. */
__device__ inline int items_of_head(const GroupedLinearParams& p, int all) { return (all / SLOTS + TOKENS - 1) / TOKENS; }

/* The number of items of a step with `all` assignments. */
__device__ inline int count_items(const GroupedLinearParams& p, int all) { return SLOTS * items_of_head(p, all); }

/* Item `number` of a step with `all` assignments. The items of a head are consecutive. */
__device__ inline Item find_item(const GroupedLinearParams& p, Cursor&, int number, int all) {
    if (number >= count_items(p, all)) return {-1, 0, 0};
    const int items = items_of_head(p, all), head = number / items, begin = number % items * TOKENS, left = all / SLOTS - begin;
    return {head, begin, left < TOKENS ? left : TOKENS};
}

/* Assignment `i` of an item, or -1 if the item has fewer. */
__device__ inline int assignment_of(const GroupedLinearParams& p, const Item& item, int i, int) {
    return i < item.count ? (item.begin + i) * SLOTS + item.expert : -1;
}
#else

/* The local index of an assignment's expert, or -1. */
__device__ inline int expert_of(const GroupedLinearParams& p, int assignment) {
    int expert = p.experts.row(assignment / SLOTS)[assignment % SLOTS];
    u32 place = (u32)expert - (u32)p.first_expert;
    return expert >= 0 && place < (u32)p.count ? (int)place : -1;
}

/* The range of an expert's assignments in `order`. */
struct Range { int begin, end; };
__device__ inline Range range_of(const GroupedLinearParams& p, int expert, int all) {
    int begin = p.starts[expert], end = p.starts[expert + 1];
    return {begin < 0 ? 0 : begin, end > all ? all : end};
}
/* The number of an expert's items. */
__device__ inline int items_of(const GroupedLinearParams& p, int expert, int all) {
    const Range range = range_of(p, expert, all);
    return range.end > range.begin ? (range.end - range.begin + TOKENS - 1) / TOKENS : 0;
}

/* The number of items of a step with `all` assignments. Whole warps must call. */
__device__ inline int count_items(const GroupedLinearParams& p, int all) {
#if DIRECT
    return all;
#else
    int items = 0;
#pragma unroll 4
    for (int expert = threadIdx.x % 32; expert < (int)p.count; expert += 32) items += items_of(p, expert, all);
    for (int distance = 16; distance; distance /= 2) items += __shfl_xor_sync(0xffffffffu, items, distance);
    /* Invalid tables with overlapping ranges may claim any number. */
    return items < 0 || items > (int)p.items ? (int)p.items : items;
#endif
}

/* Item `number` of a step with `all` assignments, not before that of an earlier call with the same cursor. Whole warps must call. */
__device__ inline Item find_item(const GroupedLinearParams& p, Cursor& cursor, int number, int all) {
#if DIRECT
    return {number < all ? expert_of(p, number) : -1, number, 1};
#else
    const int lane = threadIdx.x % 32, count = (int)p.count;
    int before = cursor.before;
    for (int base = cursor.base; base < count; base += 32) {
        int expert = base + lane, begin = 0, end = 0;
        if (expert < count) {
            const Range range = range_of(p, expert, all);
            begin = range.begin;
            end = range.end;
        }
        int items = end > begin ? (end - begin + TOKENS - 1) / TOKENS : 0, up_to = items;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            int other = __shfl_up_sync(0xffffffffu, up_to, distance);
            /* Invalid tables with overlapping ranges may claim any number of items. */
            if (lane >= distance) up_to = up_to + other < 1 << 24 ? up_to + other : 1 << 24;
        }
        u32 behind = __ballot_sync(0xffffffffu, before + up_to > number);
        if (behind) {
            int owner = __ffs(behind) - 1;
            begin += (number - (before + up_to - items)) * TOKENS;
            int left = end - begin;
            cursor = {base, before};
            return {base + owner, __shfl_sync(0xffffffffu, begin, owner),
                    __shfl_sync(0xffffffffu, left < TOKENS ? left : TOKENS, owner)};
        }
        before += __shfl_sync(0xffffffffu, up_to, 31);
        before = before < 1 << 24 ? before : 1 << 24;
    }
    return {-1, 0, 0};
#endif
}

/* Assignment `i` of an item, or -1 if it does not belong to the expert. */
__device__ inline int assignment_of(const GroupedLinearParams& p, const Item& item, int i, int all) {
    if (i >= item.count) return -1;
#if DIRECT
    return item.begin;
#else
    int at = item.begin + i;
    int assignment = p.order.row(at / SLOTS)[at % SLOTS];
    if (assignment < 0 || assignment >= all) return -1;
    return expert_of(p, assignment) == item.expert ? assignment : -1;
#endif
}
#endif

/* The inputs of an assignment: those of its token, or a separate row. */
__device__ inline const X* inputs_of(const GroupedLinearParams& p, int assignment) {
    return p.x.row(assignment / SLOTS) + (PER_SLOT ? assignment % SLOTS * (p.inputs + REST) : 0);
}

/* The outputs of an assignment. */
__device__ inline Y* outputs_of(const GroupedLinearParams& p, int assignment) {
    return p.y.row(assignment / SLOTS) + assignment % SLOTS * (p.outputs + REST);
}

/* Copies the REST elements of each row from the end of its inputs to the end of its outputs. All threads of the block call this: `thread` is
 * the index of the caller, `threads` their number. */
__device__ inline void copy_rest(const GroupedLinearParams& p, const Item& item, int thread, int threads, int all) {
    const int rest = REST;
    if (rest == 0) return;
#pragma unroll 1
    for (int i = thread; i < item.count * rest; i += threads) {
        const int assignment = assignment_of(p, item, i / rest, all), at = i % rest;
        outputs_of(p, assignment)[p.outputs + at] = convert<Y>(inputs_of(p, assignment)[p.inputs + at]);
    }
}
