/*
 * moe_group: sorts the assignments of a step by expert, each expert's in ascending order.
 *
 * A block of 8 warps owns an expert and is independent of other blocks. Its warps scan a range of the assignments each and count
 * by ballot, twice: first how many belong to earlier experts, which gives the start of the expert, then how many belong to this
 * one, which gives each warp its output position. There are no atomics and no padding. The block of the last expert writes the
 * end of the tables. Grid: (experts).
 *
 * Bytes: the assignments, twice for each expert, from the L2: about `4 T k E` of them.
 */
#define WARPS 8
/* Assignments that a lane reads at once. */
#define AHEAD 4

extern "C" __global__ void __launch_bounds__(WARPS * 32) moe_group(const __grid_constant__ MoeGroupParams p) {
    launch_dependents_and_wait();
    __shared__ int before_of[WARPS], own_of[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int all = (int)p.extent.count() * SLOTS, count = (int)p.count;
    /* Whole iterations of a warp. */
    const int run = (all + WARPS * 32 - 1) / (WARPS * 32) * 32;
    const int begin = warp * run < all ? warp * run : all, end = begin + run < all ? begin + run : all;
    /* The local index of an assignment's expert; `count` if it is skipped. */
    auto place_of = [&](int assignment) {
        if (assignment >= end) return count;
        int expert = p.experts.row(assignment / SLOTS)[assignment % SLOTS];
        u32 place = (u32)expert - (u32)p.first_expert;
        return expert >= 0 && place < (u32)count ? (int)place : count;
    };
    for (i64 own = blockIdx.x; own < count; own += gridDim.x) {
        int before = 0, mine = 0;
        for (int base = begin; base < end; base += 32 * AHEAD) {
            int place[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) place[i] = place_of(base + i * 32 + lane);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                before += __popc(__ballot_sync(0xffffffffu, place[i] < own));
                mine += __popc(__ballot_sync(0xffffffffu, place[i] == own));
            }
        }
        __syncthreads();
        if (lane == 0) {
            before_of[warp] = before;
            own_of[warp] = mine;
        }
        __syncthreads();
        int start = 0, to = 0, stop = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) {
            start += before_of[other];
            to += other < warp ? own_of[other] : 0;
            stop += own_of[other];
        }
        to += start;
        stop += start;
        auto write = [&](int at, int value) { p.order.row(at / SLOTS)[at % SLOTS] = value; };
        for (int base = begin; mine && base < end; base += 32 * AHEAD) {
            int place[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) place[i] = place_of(base + i * 32 + lane);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                u32 found = __ballot_sync(0xffffffffu, place[i] == own);
                if (place[i] == own) write(to + __popc(found & ((1u << lane) - 1)), base + i * 32 + lane);
                to += __popc(found);
            }
        }
        if (threadIdx.x == 0) p.starts[own] = start;
        if (own == count - 1) {
            if (threadIdx.x == 0) p.starts[count] = stop;
            for (int at = stop + threadIdx.x; at < all; at += WARPS * 32) write(at, -1);
        }
    }
}
