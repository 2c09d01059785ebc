/*
 * The epilogue of a cuBLASLt product in scratch memory: bias, residual, rounding, and only the rows within the extent. One thread
 * per element. Grid: (chunks of 256 of a row, rows up to 65535). Reads and writes each valid element once.
 */
extern "C" __global__ void finish(Extent extent, i64 columns, const X* x, i64 x_row, const BIAS* bias, const Y* residual,
                                  i64 residual_row, Y* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) {
            float sum = widen(x[row * x_row + i]) + or_else(bias, i, 0.0f);
            if (residual) sum += widen(residual[row * residual_row + i]);
            y[row * y_row + i] = narrow<Y>(sum);
        }
    }
}

/* The same, with 8 elements per thread, in loads of 16 bytes: for many rows. */
extern "C" __global__ void finish_wide(Extent extent, i64 columns, const X* x, i64 x_row, const BIAS* bias, const Y* residual,
                                       i64 residual_row, Y* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(item, columns / 8) {
            i64 i = item * 8;
            float sum[8], other[8] = {};
            load_eight(x + row * x_row + i, sum);
            if (residual) load_eight(residual + row * residual_row + i, other);
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[k] = sum[k] + or_else(bias, i + k, 0.0f) + other[k];
            store_eight(y + row * y_row + i, sum);
        }
    }
}
