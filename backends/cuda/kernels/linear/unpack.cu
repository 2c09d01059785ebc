/*
 * Weights as dense rows of another element type, for products of many rows: one thread per element. Grid: (chunks of 256 of a
 * row, rows up to 65535). Reads the packed rows once, writes them once.
 */
extern "C" __global__ void unpack(i64 first, i64 rows, i64 columns, Weight weight, Y* y, i64 y_row) {
    take_turn();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) y[row * y_row + i] = narrow<Y>(weight.at(first + row, i));
    }
}
