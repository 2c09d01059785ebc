/*
 * The last step of a product by cuBLASLt that went to scratch memory: bias, residual, rounding, and only the rows that are
 * real. One thread per element. Grid: (chunks of 256 of a row, rows up to 65535). Reads and writes each real element once.
 */
extern "C" __global__ void finish(Extent extent, i64 columns, const X* x, i64 x_row, const BIAS* bias, const Y* residual,
                                  i64 residual_row, Y* y, i64 y_row) {
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) {
            float sum = widen(x[row * x_row + i]) + or_else(bias, i, 0.0f);
            if (residual) sum += widen(residual[row * residual_row + i]);
            y[row * y_row + i] = narrow<Y>(sum);
        }
    }
}
