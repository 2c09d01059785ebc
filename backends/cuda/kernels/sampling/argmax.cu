/*
 * argmax: one block of 1024 threads per row, which owns all of it. Grid: (rows). Reads the row once; each thread keeps its
 * best, then warps and the block agree on the largest, the lowest index on ties. NaN counts as minus infinity.
 */
/* Loads under way at once. */
#define AHEAD 16

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
    for (i64 base = threadIdx.x; base < columns; base += AHEAD * 1024) {
        float values[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) values[u] = base + u * 1024 < columns ? widen(from[base + u * 1024]) : __uint_as_float(0x7fffffffu);
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (is_nan(values[u])) continue;
            numbers = true;
            /* Indices grow, so the first of equal ones stays. */
            if (best.index < 0 || values[u] > best.value) best = {values[u], base + u * 1024};
        }
    }
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
