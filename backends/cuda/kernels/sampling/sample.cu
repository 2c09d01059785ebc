/*
 * Two kernels: one summarises the chunks of a row, the other samples from the summaries.
 *
 * sample_chunks: one block of 256 threads for each chunk of 4096 tokens. Grid: (rows, chunks). Loads its whole chunk at once,
 * before it knows the request, and computes the largest logit, the sum of exponentials and the unfiltered sample. Chunks do not
 * depend on the number of rows, so neither do results. With one block per row, 128 greedy rows of 128256 took 77 us on an H200,
 * where memory needs 15: few loads in flight, and dependent exponentials. The logarithms of a token's Gumbel noise are computed
 * only if the leading zeros of its random word show that the noise may be large enough to win, and the random word only if any
 * noise could be.
 *
 * sample: one block of 1024 threads per row, of which one warp merges the chunks. For rows with filters, which depend on the
 * whole row, the block samples again.
 *
 * The filters keep a prefix of the tokens in the order "larger x first, lower id first among equals", so all of them together are
 * one bound: (value, id). It is found without sorting, by a radix search of the value, four bits per pass: a pass counts, for
 * each of 15 thresholds, the tokens at or above it (top-k) or their mass (top-p), and keeps the highest threshold that reaches
 * the target. Masses are integers, exp(x - max) in units of 2^-40, so that the order of summation does not matter. Ties at the
 * bound are kept by id, found the same way.
 *
 * Passes of `sample` over a row with filters, which stays in the L2: 1 for the sample, 8 for top-k, 1 + 8 for top-p, 6 more if
 * ties are cut.
 */
#define WARPS 8
#define THREADS (WARPS * 32)
/* Vectors of four tokens that a thread of `sample_chunks` has in flight. */
#define AHEAD 4

extern "C" __global__ void __launch_bounds__(THREADS) sample_chunks(const __grid_constant__ SampleParams p) {
    launch_dependents_and_wait();
    i64 at = blockIdx.x;
    if (at >= p.extent.count()) return;
    const float* from = p.logits.row(at);
    int begin = blockIdx.y * CHUNK;
    float x[AHEAD][4];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
        int i = index_of<WARPS>(begin, u, 0);
#if VECTORS
        Vector v = {{0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u}};
        if (i < p.columns) v = load_vector(from + i);
#pragma unroll
        for (int k = 0; k < 4; ++k) x[u][k] = __uint_as_float(v.word[k]);
#else
#pragma unroll
        for (int k = 0; k < 4; ++k) x[u][k] = i + k < p.columns ? from[i + k] : -infinity();
#endif
    }
    i64 request = p.requests[at];
    if (request < 0 || request >= p.capacity) return;
    Settings settings(p.settings.row(request), p.seeds.row(request), p.positions[at]);
    leave_share<AHEAD, WARPS>(x, begin, p.columns, from, settings, p.shares + at * gridDim.y + blockIdx.y);
}

extern "C" __global__ void __launch_bounds__(1024) sample(const __grid_constant__ SampleParams p) {
    launch_dependents_and_wait();
    i64 at = blockIdx.x;
    if (at >= p.extent.count()) return;
    int lane = threadIdx.x % 32;
    const Share* shares = p.shares + at * p.chunks;
    Share share = {0.0, none(), none(), 0};
    /* Loaded before it is known whether it is needed. */
    if (lane < p.chunks) share = shares[lane];
    i64 request = p.requests[at];
    if (request < 0 || request >= p.capacity) {
        if (threadIdx.x == 0) {
            p.ids[at] = -1;
            p.log_probability[at] = 0.0f;
        }
        return;
    }
    Settings settings(p.settings.row(request), p.seeds.row(request), p.positions[at]);
    bool filtered = !settings.greedy() && settings.filters(p.columns);
    if (!filtered && threadIdx.x >= 32) return;
    int id;
    float log;
    choose(p.logits.row(at), p.columns, settings, filtered, shares, p.chunks, share, id, log);
    if (threadIdx.x == 0) {
        p.ids[at] = id;
        p.log_probability[at] = log;
    }
}
