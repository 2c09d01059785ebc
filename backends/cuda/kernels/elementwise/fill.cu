/*
 * fill: every element becomes the same bits, a thread for each. X is the unsigned integer of the element's size.
 *
 * Grid: (column chunks of 256 threads, rows up to 65535). Every element is written once.
 */
extern "C" __global__ void fill(const __grid_constant__ FillParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, p.columns) p.x.row(row)[i] = (X)p.bits;
    }
}
