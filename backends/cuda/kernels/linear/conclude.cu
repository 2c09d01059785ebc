/*
 * What becomes of a product that is in scratch memory: one thread per pair of outputs (see epilogue.cuh) of a row. Grid:
 * (chunks of 256 pairs, rows up to 65535). Reads the product and the residual once, writes the result once.
 */
extern "C" __global__ void conclude_rows(Extent extent, const X* product, i64 product_row, Epilogue e) {
    take_turn();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(item, (e.outputs + 15) / 16 * 8 + 8) {
            Rows place = rows_of(e, (int)(item / 8));
            Ready ready = get_ready(e, place, (int)(item % 8), row);
            turn_ready(e, place, ready);
            const X* from = product + row * product_row;
            float a = ready.first < (int)e.outputs ? widen(from[ready.first]) : 0.0f;
            float b = ready.second < (int)e.outputs ? widen(from[ready.second]) : 0.0f;
            conclude(e, place, ready, row, a, b);
        }
    }
}
