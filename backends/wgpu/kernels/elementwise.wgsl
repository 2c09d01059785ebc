// Elementwise ops. One thread per element of the result, whose rows have `columns` elements.

struct Place { row: u32, column: u32, live: bool }

fn place(wid: vec3<u32>, nwg: vec3<u32>, lid: u32, rows: u32) -> Place {
    let index = flat_group(wid, nwg) * 64u + lid;
    let row = index / P.columns;
    return Place(row, index % P.columns, row < rows);
}

#if ADD
@compute @workgroup_size(64)
fn add(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    var rows = min(y_live(), min(a_live(), b_live()));
    if (c_here) { rows = min(rows, c_live()); }
    let at = place(wid, nwg, lid, rows);
    if (!at.live) { return; }
    var other = b_get(at.row * P.b_stride + at.column);
    if (bias_here) { other += bias_get(at.column); }
    var sum = a_get(at.row * P.a_stride + at.column) + P.alpha * other;
    if (c_here) { sum += c_get(at.row * P.c_stride + at.column); }
    y_set(at.row * P.y_stride + at.column, sum);
}
#endif

#if CAST
@compute @workgroup_size(64)
fn convert(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let at = place(wid, nwg, lid, min(x_live(), y_live()));
    if (!at.live) { return; }
#if SAME
    y_data[at.row * P.y_stride + at.column] = x_data[at.row * P.x_stride + at.column];
#else
    y_set(at.row * P.y_stride + at.column, x_get(at.row * P.x_stride + at.column));
#endif
}
#endif

#if COLUMNS
@compute @workgroup_size(64)
fn take_columns(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let at = place(wid, nwg, lid, min(x_live(), y_live()));
    if (!at.live) { return; }
    y_data[at.row * P.y_stride + at.column] = x_data[at.row * P.x_stride + P.start + at.column];
}
#endif

#if GATHER
// A row whose index is negative or outside of the rows of x is not written.
@compute @workgroup_size(64)
fn gather_rows(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let at = place(wid, nwg, lid, min(y_live(), rows_live()));
    if (!at.live) { return; }
    let row = rows_get(at.row * P.rows_stride);
    if (row < 0 || u32(row) >= x_live()) { return; }
    y_data[at.row * P.y_stride + at.column] = x_data[u32(row) * P.x_stride + at.column];
}
#endif
