/*
 * Preserves the rows past an extent: copies them aside before cuBLASLt overwrites them, and back afterwards. Most steps have no
 * such rows, so the grid is small: blocks loop over pieces of rows, and exit at once if all rows are valid. Bytes: those of the
 * rows past the extent, read and written, twice. With one row per block, 14 rows of 128256 f32 took 227 us on an H200: few
 * blocks, each with 1 KiB in flight.
 */
#define THREADS 256
#define AHEAD 4
#define LANES (16 / (i64)sizeof(Y))
#define PIECE (THREADS * AHEAD * LANES)

extern "C" __global__ void __launch_bounds__(THREADS) guard(Extent extent, i64 rows, i64 columns, const Y* from, i64 from_row, Y* to,
                                                            i64 to_row) {
    launch_dependents_and_wait();
    i64 first = extent.count(), pieces = (columns + PIECE - 1) / PIECE;
    bool vectors = (((u64)from | (u64)to) % 16 | (u64)(from_row | to_row | columns) % LANES) == 0;
    for (i64 piece = blockIdx.x; piece < (rows - first) * pieces; piece += gridDim.x) {
        i64 row = first + piece / pieces, begin = piece % pieces * PIECE;
        const Y* source = from + row * from_row;
        Y* target = to + row * to_row;
        if (vectors) {
            Vector v[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                i64 i = begin + (k * THREADS + threadIdx.x) * LANES;
                if (i < columns) v[k] = load_vector(source + i);
            }
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                i64 i = begin + (k * THREADS + threadIdx.x) * LANES;
                if (i < columns) *(Vector*)(target + i) = v[k];
            }
        } else {
            i64 end = begin + PIECE < columns ? begin + PIECE : columns;
            for (i64 i = begin + threadIdx.x; i < end; i += THREADS) target[i] = source[i];
        }
    }
}
