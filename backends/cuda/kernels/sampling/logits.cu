/*
 * logit_process: a thread takes TURNS pieces of WIDTH neighbouring logits, all read before the first is needed. Grid: (chunks of
 * 256 * WIDTH * TURNS of the vocabulary, rows up to 65535). Reads the logit, the count where a penalty asks for it and, if there,
 * bias and mask bit; writes one f32. WIDTH is 4 where all rows begin at multiples of 16 bytes, else 1.
 *
 * Logits do not depend on the request, so they are on their way while it is looked up. A thread for each logit took 182 us for
 * 128 rows of 128256 on an H200, where memory needs 46: three reads, each waiting for the one before, for 4 bytes of each.
 */
#define IN_PROMPT (1 << 30)
#define THREADS 256

template <typename T> struct alignas(sizeof(T) * WIDTH) Piece { T of[WIDTH]; };

extern "C" __global__ void __launch_bounds__(THREADS) logit_process(
    Extent extent, i64 vocabulary, i64 capacity, const T0* logits, i64 logits_row, const int* requests, const float* parameters,
    i64 parameters_row, const int* counts, i64 counts_row, const float* bias, i64 bias_row, const u32* mask, i64 mask_row,
    float* y, i64 y_row) {
    take_turn();
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
        const float* own = parameters + request * parameters_row;
        float repetition = own[4], presence = own[5], frequency = own[6];
        bool counted = repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
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
                float value = widen(x[turn].of[k]);
                int seen = count[turn].of[k], generated = seen & (IN_PROMPT - 1);
                if (seen != 0) value = value > 0.0f ? value / repetition : value * repetition;
                if (generated > 0) value = value - frequency * (float)generated - presence;
                if (bias) value += added.of[k];
                out.of[k] = allowed >> k & 1 ? value : -infinity();
            }
            *(Piece<float>*)(y + row * y_row + i) = out;
        }
    }
}
