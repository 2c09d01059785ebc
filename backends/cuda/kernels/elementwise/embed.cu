/*
 * embed: a thread takes an element, or of many tokens every 256th. Grid: (chunks of a row, tokens up to 65535). Reads one row of
 * each table per token and writes it once. Ids and positions outside their table give zeros.
 */
extern "C" __global__ void embed(Extent extent, i64 columns, const int* ids, i64 first_row, Weight table, i64 table_rows,
                                 const int* positions, i64 position_offset, OtherWeight places, i64 place_rows, T0* y,
                                 i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        i64 id = (i64)ids[row] - first_row;
        i64 place = positions ? (i64)positions[row] + position_offset : -1;
        bool known = ids[row] >= 0 && id >= 0 && id < table_rows;
        bool placed = positions && positions[row] >= 0 && place < place_rows;
#pragma unroll 8
        FOR_COLUMNS(i, columns) {
            float sum = known ? table.at(id, i) : 0.0f;
            if (placed) sum += places.at(place, i);
            y[row * y_row + i] = narrow<T0>(sum);
        }
    }
}
