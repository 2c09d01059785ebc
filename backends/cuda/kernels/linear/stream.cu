/*
 * linear for one row on CUDA cores (GEMV), sm_80 and up: y = x W^T + b, and with NORM y = rms_norm(x) W^T + b.
 *
 * Persistent blocks of 4 warps, at most 6 per SM; SPLIT warps share an output and loop over outputs. Each lane copies 16 bytes of
 * the weights at a time into its own ring buffer in shared memory (cp.async), with STAGES - 1 copies in flight at any moment,
 * across row boundaries, so the memory pipeline never drains. That is 3.5 KiB per warp and up to 84 KiB per SM, where 4.8 TB/s
 * need about 29 KiB. A lane reads only what it copied itself, so no barrier is needed. x (and the norm's weight) come through the
 * L1, which all warps of the SM share.
 *
 * With STAGED, x is widened to f32 once per block and kept in shared memory, which removes two thirds of the instructions; this
 * happens after the first copies were issued, so it costs little time. The norm needs no additional pass: y = sum_k(x_k g_k W_nk)
 * / rms(x). With WHOLE a row is a whole number of steps of SPLIT warps.
 *
 * Bytes: the weights, once. Floor: those over read bandwidth. Measured figures: docs/src/performance/cuda.md.
 */
#define WARPS 4
#define STAGES 8

/* `WIDTH` elements of x, times the norm's weight; zeros past the end. */
__device__ inline void load_scaled(const X* x, const void* gain, float offset, int piece, int inputs, float (&out)[WIDTH]) {
    load_x(x + piece * WIDTH, inputs - piece * WIDTH, out);
#if NORM
    const G* own = (const G*)gain;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) out[i] *= piece * WIDTH + i < inputs ? widen(own[piece * WIDTH + i]) + offset : 0.0f;
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 6) stream(Extent extent, i64 output_count, i64 input_count, const X* x,
                                                                   i64 x_row, Weight weight, const BIAS* bias, Y* y, i64 y_row,
                                                                   const void* gain, float eps, float offset) {
    launch_dependents_and_wait();
    __shared__ Vector ring[WARPS][STAGES][32];
    __shared__ float partial[2][WARPS][2];
#if STAGED > 0
    /* x, scaled and widened, in planes of four elements of every vector, so that lanes have no bank conflicts. */
    __shared__ Vector staged[WIDTH / 4][STAGED];
#endif
    if (extent.count() <= 0) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % SPLIT;
    int outputs = (int)output_count, inputs = (int)input_count;
    int groups = gridDim.x * (WARPS / SPLIT), first = blockIdx.x * (WARPS / SPLIT) + warp / SPLIT;
    int pieces = (inputs + WIDTH - 1) / WIDTH, steps = (pieces + 32 * SPLIT - 1) / (32 * SPLIT);
    /* All warps of a block run the same number of iterations, because of the barriers of SPLIT. */
    int turns = (outputs + groups - 1) / groups;

    /* The next copy: its address, its step in the row, its stage. */
    const u8* ahead = weight.elements + (i64)first * weight.row_bytes + (part * 32 + lane) * 16;
    const i64 to_next_row = (i64)groups * weight.row_bytes - (i64)steps * (SPLIT * 32 * 16);
    int ahead_output = first, ahead_step = 0, ahead_slot = 0;
    auto fetch = [&]() {
        bool real = ahead_output < outputs;
#if !WHOLE
        real = real && (ahead_step * SPLIT + part) * 32 + lane < pieces;
#endif
        copy_ahead(&ring[warp][ahead_slot][lane], real ? ahead : weight.elements, real);
        commit_copies();
        ahead_slot = (ahead_slot + 1) % STAGES;
        ahead += SPLIT * 32 * 16;
        if (++ahead_step == steps) {
            ahead_step = 0;
            ahead_output += groups;
            ahead += to_next_row;
        }
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch();

    float squares = 0.0f, scale = 1.0f;
#if STAGED > 0
    for (int piece = threadIdx.x; piece < pieces; piece += WARPS * 32) {
        float own[WIDTH];
#if NORM
        load_x(x + piece * WIDTH, inputs - piece * WIDTH, own);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) squares += own[i] * own[i];
#endif
        load_scaled(x, gain, offset, piece, inputs, own);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) staged[i / 4][piece].word[i % 4] = __float_as_uint(own[i]);
    }
#if NORM
    squares = block_sum(squares);
    scale = 1.0f / sqrtf(squares / (float)inputs + eps);
#endif
    __syncthreads();
#endif
    int slot = 0;
    for (int turn = 0; turn < turns; ++turn) {
        int output = first + turn * groups;
        float sums[2] = {};
#pragma unroll 4
        for (int step = 0; step < steps; ++step) {
            int piece = (step * SPLIT + part) * 32 + lane;
            bool real = WHOLE || piece < pieces;
            float own[WIDTH] = {};
            if (real) {
#if STAGED > 0
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) own[i] = __uint_as_float(staged[i / 4][piece].word[i % 4]);
#else
#if NORM
                if (turn == 0) {
                    load_x(x + piece * WIDTH, inputs - piece * WIDTH, own);
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) squares += own[i] * own[i];
                }
#endif
                load_scaled(x, gain, offset, piece, inputs, own);
#endif
            }
            await_copies<STAGES - 2>();
            Vector v = ring[warp][slot][lane];
            slot = (slot + 1) % STAGES;
            /* Refills the stage that was read one step ago. */
            fetch();
            if (real) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) sums[i % 2] += own[i] * Elements::get(v, i);
            }
        }
        float sum = warp_sum(sums[0] + sums[1]);
#if NORM && STAGED == 0
        if (turn == 0) squares = warp_sum(squares);
#endif
#if SPLIT > 1
        float(*here)[2] = partial[turn % 2];
        if (lane == 0) {
            here[warp][0] = sum;
            here[warp][1] = squares;
        }
        __syncthreads();
        if (part == 0) {
            for (int other = 1; other < SPLIT; ++other) sum += here[warp + other][0];
        }
#if NORM && STAGED == 0
        if (turn == 0) {
            float all = 0.0f;
            for (int other = 0; other < SPLIT; ++other) all += here[warp - part + other][1];
            squares = all;
        }
#endif
#endif
#if NORM && STAGED == 0
        if (turn == 0) scale = 1.0f / sqrtf(squares / (float)inputs + eps);
#endif
        if (part == 0 && lane == 0 && output < outputs) {
            y[output] = narrow<Y>(sum * scale + or_else(bias, output, 0.0f));
        }
    }
}
