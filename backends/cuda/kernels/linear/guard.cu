/*
 * Copies the rows past an extent: aside before cuBLASLt writes over them, and back behind it. In most steps there are none, so
 * the grid is small: blocks take turns at rows, and end at once where all rows are real. Bytes: those of the rows past the
 * extent, read and written, twice.
 */
extern "C" __global__ void guard(Extent extent, i64 rows, i64 columns, const Y* from, i64 from_row, Y* to, i64 to_row) {
    take_turn();
    for (i64 row = extent.count() + blockIdx.x; row < rows; row += gridDim.x) {
        for (i64 i = threadIdx.x; i < columns; i += blockDim.x) to[row * to_row + i] = from[row * from_row + i];
    }
}
