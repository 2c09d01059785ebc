/*
 * argmax: SPLITS blocks of 512 threads share a row. Grid: (splits, rows). Reads the row once, 16 bytes at a time if it is
 * aligned; each thread keeps its best element, then warps and the block reduce to the largest, the lowest index on ties. Blocks
 * write their best to scratch memory, and the block that finishes last reduces those, whose order does not matter; it also resets
 * the counter to 0. NaN counts as minus infinity.
 *
 * Bytes: the row, usually from the L2, where the preceding product wrote it. Floor: three dependent reads.
 */
#define THREADS 512
/* Loads in flight at once. */
#define AHEAD 4

struct Best { float value; int index; };

/* NaN is never selected; minus infinity is, so that the first element of a row without larger numbers wins. */
__device__ inline Best better(Best a, Best b) {
    bool second = b.index >= 0 && (a.index < 0 || b.value > a.value || (b.value == a.value && b.index < a.index));
    return second ? b : a;
}

__device__ inline Best best_of_block(Best best, Best* partial) {
    for (int distance = 16; distance; distance /= 2) {
        Best other = {__shfl_xor_sync(0xffffffffu, best.value, distance), __shfl_xor_sync(0xffffffffu, best.index, distance)};
        best = better(best, other);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = best;
    __syncthreads();
    best = partial[threadIdx.x % 32 < THREADS / 32 ? threadIdx.x % 32 : 0];
    for (int distance = 16; distance; distance /= 2) {
        Best other = {__shfl_xor_sync(0xffffffffu, best.value, distance), __shfl_xor_sync(0xffffffffu, best.index, distance)};
        best = better(best, other);
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(THREADS) argmax(const __grid_constant__ ArgmaxParams p) {
    __shared__ Best partial[32];
    __shared__ bool last;
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        /* `numbers` is false if all elements are NaN, to distinguish them from minus infinity. */
        Best best = {-infinity(), -1};
        bool numbers = false;
        const X* from = p.x.row(row);
        auto consider = [&](float value, int index) {
            if (is_nan(value)) return;
            numbers = true;
            /* The indices of a thread increase, so the first of equal elements is kept. */
            if (best.index < 0 || value > best.value) best = {value, index};
        };
        const int width = VECTORS ? Lanes<X>::count : 1, step = SPLITS * THREADS * width;
        int first = (blockIdx.x * THREADS + threadIdx.x) * width;
#if VECTORS
        for (i64 base = first; base < p.columns; base += AHEAD * step) {
            Vector pieces[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                if (base + u * step < p.columns) pieces[u] = load_vector(from + base + u * step);
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                if (base + u * step >= p.columns) break;
#pragma unroll
                for (int i = 0; i < width; ++i) consider(Lanes<X>::get(pieces[u], i), (int)base + u * step + i);
            }
        }
#else
        for (i64 i = first; i < p.columns; i += step) consider(widen(from[i]), (int)i);
#endif
        /* NaN counts as minus infinity: if nothing is larger, the first element is selected. */
        if (best.value == -infinity()) best = {-infinity(), numbers ? 0 : -1};
        best = best_of_block(best, partial);
#if SPLITS > 1
        if (threadIdx.x == 0) {
            Best* own = p.partial + row * SPLITS;
            own[blockIdx.x] = best;
            __threadfence();
            last = atomicAdd(p.counters + row, 1u) == SPLITS - 1;
            if (last) p.counters[row] = 0;
            __threadfence();
        }
        __syncthreads();
        if (!last) continue;
        best = {-infinity(), -1};
        if (threadIdx.x < SPLITS) {
            float2 its = __ldcg((const float2*)(p.partial + row * SPLITS + threadIdx.x));
            best = {its.x, __float_as_int(its.y)};
        }
        best = best_of_block(best, partial);
#endif
        if (threadIdx.x == 0) p.ids[row] = best.index;
    }
}
