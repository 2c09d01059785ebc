/*
 * embed: the row of a token in a table, plus the row of its position in another table if there is one. Ids and positions outside
 * their table give zeros.
 *
 * Grid: (chunks of 256 columns, tokens up to 65535), one thread per element; with many tokens one chunk, whose block loops over
 * the row. One row of each table is read per token and one row is written.
 */
extern "C" __global__ void embed(const __grid_constant__ EmbedParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        i64 id = (i64)p.ids[row] - p.first_row;
        i64 place = p.positions ? (i64)p.positions[row] + p.position_offset : -1;
        bool known = p.ids[row] >= 0 && id >= 0 && id < p.table_rows;
        bool placed = p.positions && p.positions[row] >= 0 && place < p.position_table_rows;
#pragma unroll 8
        FOR_COLUMNS(i, p.columns) {
            float sum = known ? p.table.at(id, i) : 0.0f;
            if (placed) sum += p.position_table.at(place, i);
            p.y.row(row)[i] = narrow<X>(sum);
        }
    }
}
