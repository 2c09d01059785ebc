/*
 * logit_process: a thread takes TURNS pieces of WIDTH neighbouring logits, all read before the first is needed. Grid: (chunks of
 * 256 * WIDTH * TURNS of the vocabulary, rows up to 65535). Reads the logit, the count where a penalty asks for it and, if there,
 * bias and mask bit; writes one f32. WIDTH is 4 where all rows begin at multiples of 16 bytes, else 1.
 *
 * Logits do not depend on the request, so they are on their way while it is looked up. A thread for each logit took 182 us for
 * 128 rows of 128256 on an H200, where memory needs 46: three reads, each waiting for the one before, for 4 bytes of each.
 */
#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) logit_process(
    Extent extent, i64 vocabulary, i64 capacity, const T0* logits, i64 logits_row, const int* requests, const float* parameters,
    i64 parameters_row, const int* counts, i64 counts_row, const float* bias, i64 bias_row, const u32* mask, i64 mask_row,
    float* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count(), first = ((i64)blockIdx.x * TURNS * THREADS + threadIdx.x) * WIDTH;
    FOR_ROWS(row, rows) {
        Piece<T0> x[TURNS];
        Piece<int> count[TURNS];
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            i64 i = first + turn * (THREADS * WIDTH);
            if (i < vocabulary) x[turn] = *(const Piece<T0>*)(logits + row * logits_row + i);
        }
        i64 request = requests[row];
        if (request < 0 || request >= capacity) continue;
        Penalties penalties(parameters + request * parameters_row);
        bool counted = penalties.any();
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            i64 i = first + turn * (THREADS * WIDTH);
            count[turn] = {};
            if (counted && i < vocabulary) count[turn] = *(const Piece<int>*)(counts + request * counts_row + i);
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            i64 i = first + turn * (THREADS * WIDTH);
            if (i >= vocabulary) break;
            Piece<float> added, out;
            if (bias) added = *(const Piece<float>*)(bias + request * bias_row + i);
            u32 allowed = mask ? mask[row * mask_row + i / 32] >> (i % 32) : ~0u;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                float value = penalties.of(widen(x[turn].of[k]), count[turn].of[k]);
                if (bias) value += added.of[k];
                out.of[k] = allowed >> k & 1 ? value : -infinity();
            }
            *(Piece<float>*)(y + row * y_row + i) = out;
        }
    }
}
