/*
 * The last step of a product by cuBLASLt: bias, rounding, and only the rows that are real. One thread per element. Grid:
 * (chunks of 256 of a row, rows up to 65535). Reads and writes each real element once.
 */
extern "C" __global__ void finish(Extent extent, i64 columns, const X* x, i64 x_row, const BIAS* bias, Y* y, i64 y_row) {
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) y[row * y_row + i] = narrow<Y>(widen(x[row * x_row + i]) + or_else(bias, i, 0.0f));
    }
}
