/*
 * moe_route: the experts of each token and their weights. A team of ROUTE_TEAM threads owns a token (choose.cuh); a block has as
 * many teams as fit into 128 threads.
 *
 * Bytes: the logits, once, from the L2, where the router's product wrote them. Bounded by the latency of 2 k dependent
 * reductions.
 */
#define TEAMS (ROUTE_TEAM < 128 ? 128 / ROUTE_TEAM : 1)

extern __shared__ __align__(16) u32 memory[];

extern "C" __global__ void __launch_bounds__(ROUTE_TEAM * TEAMS) moe_route(const __grid_constant__ MoeRouteParams p) {
    launch_dependents_and_wait();
    /* Words of shared memory of a team. */
    const int words = (int)(2 * p.rule.experts + 2 * p.rule.slots + p.rule.groups);
    const Choice choice(p.rule, memory + threadIdx.x / ROUTE_TEAM * words);
    const Team team = {(int)threadIdx.x % ROUTE_TEAM, memory + TEAMS * words};
    i64 rows = p.extent.count();
    for (i64 row = (i64)blockIdx.x * TEAMS + threadIdx.x / ROUTE_TEAM; row < rows; row += (i64)gridDim.x * TEAMS) {
        const int* given = p.ids.first ? p.ids.row(row) : nullptr;
        choose_experts(p.rule, p.vectors, team, choice, given, [&](int i) { return widen(p.logits.row(row)[team.thread + i * ROUTE_TEAM]); });
        for (int slot = team.thread; slot < (int)p.rule.slots && team.thread < 32; slot += 32) {
            p.experts.row(row)[slot] = choice.chosen[slot];
            p.weights.row(row)[slot] = choice.weights[slot];
        }
        team.meet();
    }
}
