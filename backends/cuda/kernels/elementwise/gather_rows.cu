/*
 * gather_rows: y[r] = x[index[r]], one thread per element. Indices outside x are skipped.
 *
 * Grid: (column chunks of 256 threads, rows up to 65535). Every gathered element is read once and written once.
 */
extern "C" __global__ void gather_rows(const __grid_constant__ GatherRowsParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count(), limit = p.source.count();
    FOR_ROWS(row, rows) {
        i64 from = p.index[row];
        if (from < 0 || from >= limit) continue;
        FOR_COLUMNS(i, p.columns) p.y.row(row)[i] = p.x.row(from)[i];
    }
}
