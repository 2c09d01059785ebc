/*
 * argmax: one block of 1024 threads per row, which owns all of it. Grid: (rows). Reads the row once, 16 bytes at a time if it
 * is aligned; each thread keeps its best, then warps and the block agree on the largest, the lowest index on ties. NaN counts
 * as minus infinity. 128256 logits in bf16 took 15 us on an H200; what one multiprocessor can read says 2 us.
 */
/* Loads under way at once. */
#define AHEAD 8

struct Best { float value; i64 index; };

__device__ inline Best better(Best a, Best b) {
    bool second = b.index >= 0 && (a.index < 0 || b.value > a.value || (b.value == a.value && b.index < a.index));
    return second ? b : a;
}

extern "C" __global__ void __launch_bounds__(1024) argmax(Extent extent, i64 columns, const T0* x, i64 x_row, int* ids) {
    i64 row = blockIdx.x;
    if (row >= extent.count()) return;
    Best best = {-infinity(), -1};
    bool numbers = false;
    const T0* from = x + row * x_row;
    auto consider = [&](float value, i64 index) {
        if (is_nan(value)) return;
        numbers = true;
        /* A thread's indices grow, so the first of equal ones stays. */
        if (best.index < 0 || value > best.value) best = {value, index};
    };
#if VECTORS
    const int width = Lanes<T0>::count;
    for (i64 base = threadIdx.x * width; base < columns; base += AHEAD * 1024 * width) {
        Vector pieces[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (base + u * 1024 * width < columns) pieces[u] = load_vector(from + base + u * 1024 * width);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (base + u * 1024 * width >= columns) break;
#pragma unroll
            for (int i = 0; i < width; ++i) consider(Lanes<T0>::get(pieces[u], i), base + u * 1024 * width + i);
        }
    }
#else
    for (i64 i = threadIdx.x; i < columns; i += 1024) consider(widen(from[i]), i);
#endif
    /* NaN counts as minus infinity: it is only chosen where nothing is above that, and then the first element is. */
    bool any = __syncthreads_or(numbers);
    if (best.value == -infinity()) best = {-infinity(), threadIdx.x < columns ? (i64)threadIdx.x : -1};
    __shared__ Best partial[32];
    for (int distance = 16; distance; distance /= 2) {
        Best other = {__shfl_xor_sync(0xffffffffu, best.value, distance), __shfl_xor_sync(0xffffffffu, best.index, distance)};
        best = better(best, other);
    }
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < blockDim.x / 32; ++warp) best = better(best, partial[warp]);
        ids[row] = any ? (int)best.index : -1;
    }
}
