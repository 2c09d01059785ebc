/*
 * logit_process: a thread processes TURNS vectors of WIDTH neighbouring logits, all loaded before the first is used. Grid:
 * (chunks of 256 * WIDTH * TURNS of the vocabulary, rows up to 65535). Reads the logit, the count if a penalty needs it and, if
 * present, bias and mask bit; writes one f32. WIDTH is 4 if all rows begin at multiples of 16 bytes, else 1.
 *
 * The addresses of logits do not depend on the request, so they are loaded while the request is looked up. With one thread per
 * logit, 128 rows of 128256 took 182 us on an H200, where the memory traffic needs 46: three dependent reads of 4 bytes each.
 */
#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) logit_process(const __grid_constant__ LogitProcessParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count(), first = ((i64)blockIdx.x * TURNS * THREADS + threadIdx.x) * WIDTH;
    FOR_ROWS(row, rows) {
        Piece<X> x[TURNS];
        Piece<int> count[TURNS];
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            i64 i = first + turn * (THREADS * WIDTH);
            if (i < p.vocabulary) x[turn] = *(const Piece<X>*)(p.logits.row(row) + i);
        }
        i64 request = p.requests[row];
        if (request < 0 || request >= p.capacity) continue;
        Penalties penalties(p.settings.row(request));
        bool counted = penalties.any();
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            i64 i = first + turn * (THREADS * WIDTH);
            count[turn] = {};
            if (counted && i < p.vocabulary) count[turn] = *(const Piece<int>*)(p.counts.row(request) + i);
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            i64 i = first + turn * (THREADS * WIDTH);
            if (i >= p.vocabulary) break;
            Piece<float> added, out;
            if (p.bias.first) added = *(const Piece<float>*)(p.bias.row(request) + i);
            u32 allowed = p.mask.first ? p.mask.at(row, i / 32) >> (i % 32) : ~0u;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                float value = penalties.of(widen(x[turn].of[k]), count[turn].of[k]);
                if (p.bias.first) value += added.of[k];
                out.of[k] = allowed >> k & 1 ? value : -infinity();
            }
            *(Piece<float>*)(p.y.row(row) + i) = out;
        }
    }
}
