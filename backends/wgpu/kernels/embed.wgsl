// Token embedding. A thread makes one element of the result.

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
    if (id >= 0 && u32(id) >= P.first_row && u32(id) - P.first_row < P.table_rows) {
        y = table_get4(u32(id) - P.first_row, quad)[column % 4u];
    }
    if (positions_here) {
        let position = positions_get(row * P.positions_stride);
        let rows = P.position_table_rows;
        if (position >= 0 && P.position_offset < rows && u32(position) < rows - P.position_offset) {
            y += position_table_get4(u32(position) + P.position_offset, quad)[column % 4u];
        }
    }
    y_set(row * P.y_stride + column, y);
}
