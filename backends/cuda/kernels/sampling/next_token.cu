/*
 * next_token: from the logits of one row to its token, recorded: `logit_process`, `sample` and `commit_tokens` in one launch.
 *
 * Grid: a block of 1024 threads for each chunk of 4096 tokens. A thread takes four logits, processes and keeps them, and its block
 * leaves what there is in the chunk. The block that is through last puts the chunks together, with the filters if there are any,
 * and records the token: all others have read the counts by then. To the bit what the kernels by themselves give.
 *
 * Memory is not what takes the time of one row: what waits for each other does, and launches. The four kernels took 9 us for
 * 128256 logits on an H200, of which reads and writes need 0.5.
 */
extern "C" __global__ void __launch_bounds__(1024) next_token(
    Extent extent, Extent request_extent, i64 columns, i64 capacity, const T0* logits, const int* requests, const float* parameters,
    i64 parameters_row, const int* counts, i64 counts_row, const float* bias, i64 bias_row, const u32* mask, float* y,
    const int* positions, const u32* seeds, i64 seeds_row, Share* shares, i64 chunks, int* ids, float* log_probability, i64 stops,
    i64 vocabulary, const int* commits, const int* stop_ids, int* last_token, int* finished, int* recorded, i64 recorded_row,
    u32* arrived) {
    __shared__ bool is_last;
    launch_dependents_and_wait();
    int begin = blockIdx.x * CHUNK, thread = threadIdx.x, at = begin + thread * 4;
    /* All that waits for nothing is read at once; with fewer rows than one its memory is there all the same. */
    i64 request = requests[0], commit = commits[0];
    int position = positions[0];
    float x[1][4];
    T0 read[4];
#if VECTORS
    Piece<T0> piece = {};
    if (at < columns) piece = *(const Piece<T0>*)(logits + at);
#pragma unroll
    for (int k = 0; k < 4; ++k) read[k] = piece.of[k];
#else
#pragma unroll
    for (int k = 0; k < 4; ++k) read[k] = at + k < columns ? logits[at + k] : narrow<T0>(0.0f);
#endif
    if (extent.count() < 1) return;
    if (request < 0 || request >= capacity) {
        if (blockIdx.x == 0 && thread == 0) {
            ids[0] = -1;
            log_probability[0] = 0.0f;
        }
        return;
    }
    Settings settings(parameters + request * parameters_row, seeds + request * seeds_row, position);
    Penalties penalties(parameters + request * parameters_row);
    commit = commit < request_extent.count() ? commit : -1;
    bool ended = commit < 0 || finished[commit] != 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        i64 i = at + k;
        x[0][k] = -infinity();
        if (i >= columns) continue;
        int seen = penalties.any() ? counts[request * counts_row + i] : 0;
        float value = penalties.of(widen(read[k]), seen);
        if (bias) value += bias[request * bias_row + i];
        if (mask && !(mask[i / 32] >> (i % 32) & 1)) value = -infinity();
        x[0][k] = value;
    }
#if VECTORS
    if (at < columns) {
        Vector out;
#pragma unroll
        for (int k = 0; k < 4; ++k) out.word[k] = __float_as_uint(x[0][k]);
        *(Vector*)(y + at) = out;
    }
#else
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (at + k < columns) y[at + k] = x[0][k];
    }
#endif
    leave_share<1, 32>(x, begin, columns, y, settings, shares + blockIdx.x);

    __syncthreads();
    if (thread == 0) {
        __threadfence();
        is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    if (thread == 0) *arrived = 0;
    bool filtered = !settings.greedy() && settings.filters(columns);
    if (!filtered && thread >= 32) return;
    Share share = {0.0, none(), none(), 0};
    if (thread % 32 < chunks) share = shares[thread % 32];
    int id;
    float log;
    choose(y, columns, settings, filtered, shares, chunks, share, id, log);
    if (thread > 0) return;
    ids[0] = id;
    log_probability[0] = log;
    if (!ended && id >= 0 && id < vocabulary) {
        record_token(commit, id, stop_ids, stops, last_token, finished, recorded, recorded_row);
    }
}
