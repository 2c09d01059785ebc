// Token embedding. One thread per element of the result. If tables are split into parts, there is one dispatch per pair of parts
// of the token and position tables, in order. A dispatch writes only rows that are in its part of a table, so the last one that
// has both rows determines the element.

@compute @workgroup_size(64)
fn embed(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let index = flat_group(wid, nwg) * 64u + lid;
    let row = index / P.columns;
    let column = index % P.columns;
    var rows = min(ids_live(), y_live());
    if (positions_here) { rows = min(rows, positions_live()); }
    if (row >= rows) { return; }
    let quad = column / 4u * 4u;
    var y = 0.0;
    let id = ids_get(row * P.ids_stride);
    if (id >= 0 && u32(id) >= P.first_row && u32(id) - P.first_row - P.table_first < P.table_rows) {
        y = table_get4(u32(id) - P.first_row, quad)[column % 4u];
#if FURTHER
    } else {
        return;
#endif
    }
    if (positions_here) {
        let position = positions_get(row * P.positions_stride);
        let place = u32(max(position, 0)) + P.position_offset;
        // The sum of an offset that is an i32 too and a position does not wrap.
        if (position >= 0 && P.position_offset <= 0x7fffffffu && place - P.position_table_first < P.position_table_rows) {
            y += position_table_get4(place, quad)[column % 4u];
#if FURTHER_POSITIONS
        } else {
            return;
#endif
        }
    }
    y_set(row * P.y_stride + column, y);
}
