/*
 * next_token: from the logits of one row to its token, recorded: `logit_process`, `sample` and `commit_tokens` in one launch.
 *
 * Grid: one block of 1024 threads for each chunk of 4096 tokens. A thread processes and stores four logits, and its block writes
 * the summary of its chunk. The block that finishes last merges the chunks, applies filters if there are any, and records the
 * token: by then all other blocks have read the counts. The result is bit-identical to that of the separate kernels.
 *
 * One row is bounded by latency and launches, not by memory: the four separate kernels took 9 us for 128256 logits on an H200, of
 * which reads and writes need 0.5.
 */
extern "C" __global__ void __launch_bounds__(1024) next_token(const __grid_constant__ NextTokenParams p) {
    __shared__ bool is_last;
    launch_dependents_and_wait();
    int begin = blockIdx.x * CHUNK, thread = threadIdx.x, at = begin + thread * 4;
    /* All loads that do not depend on others are issued at once, even before the extent is known, as the memory exists. */
    i64 request = p.requests[0], commit = p.commits[0];
    int position = p.positions[0];
    float x[1][4];
    X read[4];
#if VECTORS
    Piece<X> piece = {};
    if (at < p.columns) piece = *(const Piece<X>*)(p.logits + at);
#pragma unroll
    for (int k = 0; k < 4; ++k) read[k] = piece.of[k];
#else
#pragma unroll
    for (int k = 0; k < 4; ++k) read[k] = at + k < p.columns ? p.logits[at + k] : narrow<X>(0.0f);
#endif
    if (p.extent.count() < 1) return;
    if (request < 0 || request >= p.capacity) {
        if (blockIdx.x == 0 && thread == 0) {
            p.ids[0] = -1;
            p.log_probability[0] = 0.0f;
        }
        return;
    }
    Settings settings(p.settings.row(request), p.seeds.row(request), position);
    Penalties penalties(p.settings.row(request));
    commit = commit < p.records.requests.count() ? commit : -1;
    bool ended = commit < 0 || p.records.finished[commit] != 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        i64 i = at + k;
        x[0][k] = -infinity();
        if (i >= p.columns) continue;
        int seen = penalties.any() ? p.counts.at(request, i) : 0;
        float value = penalties.of(widen(read[k]), seen);
        if (p.bias.first) value += p.bias.at(request, i);
        if (p.mask && !(p.mask[i / 32] >> (i % 32) & 1)) value = -infinity();
        x[0][k] = value;
    }
#if VECTORS
    if (at < p.columns) {
        Vector out;
#pragma unroll
        for (int k = 0; k < 4; ++k) out.word[k] = __float_as_uint(x[0][k]);
        *(Vector*)(p.y + at) = out;
    }
#else
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (at + k < p.columns) p.y[at + k] = x[0][k];
    }
#endif
    leave_share<1, 32>(x, begin, p.columns, p.y, settings, p.shares + blockIdx.x);

    __syncthreads();
    if (thread == 0) {
        __threadfence();
        is_last = atomicAdd(p.counter, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    if (thread == 0) *p.counter = 0;
    bool filtered = !settings.greedy() && settings.filters(p.columns);
    if (!filtered && thread >= 32) return;
    Share share = {0.0, none(), none(), 0};
    if (thread % 32 < p.chunks) share = p.shares[thread % 32];
    int id;
    float log;
    choose(p.y, p.columns, settings, filtered, p.shares, p.chunks, share, id, log);
    if (thread > 0) return;
    p.ids[0] = id;
    p.log_probability[0] = log;
    if (!ended && id >= 0 && id < p.records.vocabulary) {
        record_token(p.records, commit, id);
    }
}
