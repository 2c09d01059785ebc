/*
 * Two kernels: what there is in a row, chunk by chunk, and what is drawn from it.
 *
 * sample_chunks: a block of 256 threads for each chunk of 4096 tokens. Grid: (rows, chunks). Reads its chunk once, all at once
 * and before it knows its request, for the largest logit, the sum of exponentials and the draw from all tokens. Chunks are the
 * same for any number of rows, and so are results. One block for each row took 77 us for 128 greedy rows of 128256 on an H200,
 * where memory needs 15: few loads under way, and one exponential waiting for the other. A draw is worth its logarithms only
 * if the noise can be large enough for it to win, which the leading zeros of the random word tell, and worth the word only if
 * any noise can.
 *
 * sample: one block of 1024 threads for each row, of which one warp puts the chunks together. For rows with filters, which
 * need to know the whole row, the block draws again by itself.
 *
 * The filters keep the first so many tokens of the order "larger x first, lower id first among equals", so all of them
 * together are one bound: (value, id). It is found without sorting, by narrowing down the value four bits at a time: a pass
 * counts, for each of 15 thresholds, the tokens at or above it (top-k) or their mass (top-p), and keeps the highest
 * threshold that reaches the target. Masses are whole numbers, so that the order of summing does not matter: exp(x - max)
 * in units of 2^-40. Ties at the bound are kept by id, found the same way.
 *
 * Passes of `sample` over a row with filters, which stays in the L2: 1 for the draw, 8 for top-k, 1 + 8 for top-p, 6 more where
 * ties are cut.
 */
#define WARPS 8
#define THREADS (WARPS * 32)
/* Vectors of four tokens that a thread of `sample_chunks` has under way. */
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
    /* Read ahead of what says whether it is wanted. */
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
