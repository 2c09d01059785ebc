// Norms. A workgroup of 128 threads normalises one group of `width` features of a row: a sum over its threads, then the scaled
// elements.
//
// Bytes: x twice (the second time from a cache) and y once.

// What reduce.wgsl adds up.
alias Reduced = f32;
const SUMS: u32 = 1u;
const THREADS: u32 = 128u;

var<workgroup> rows_shared: u32;

// The number of valid rows, as a value that is uniform over the workgroup.
fn shared_rows(lid: u32) -> u32 {
    if (lid == 0u) { rows_shared = min(x_live(), y_live()); }
    return workgroupUniformLoad(&rows_shared);
}

#if RMS
@compute @workgroup_size(128)
fn rms_norm(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let row = group / P.groups;
    if (row >= shared_rows(lid)) { return; }
    let x = row * P.x_stride + (group % P.groups) * P.width;
    let y = row * P.y_stride + (group % P.groups) * P.width;
    var squares = 0.0;
    for (var i = lid; i < P.width; i += 128u) {
        let value = x_get(x + i);
        squares += value * value;
    }
    let scale = 1.0 / sqrt(sum_of_group(squares, lid) / f32(P.width) + P.eps);
    for (var i = lid; i < P.width; i += 128u) {
        y_set(y + i, x_get(x + i) * scale * (weight_get(i) + P.weight_offset));
    }
}
#endif

#if LAYER
@compute @workgroup_size(128)
fn layer_norm(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let row = flat_group(wid, nwg);
    if (row >= shared_rows(lid)) { return; }
    let x = row * P.x_stride;
    let y = row * P.y_stride;
    var sum = 0.0;
    for (var i = lid; i < P.width; i += 128u) { sum += x_get(x + i); }
    let mean = sum_of_group(sum, lid) / f32(P.width);
    var squares = 0.0;
    for (var i = lid; i < P.width; i += 128u) {
        let difference = x_get(x + i) - mean;
        squares += difference * difference;
    }
    let scale = 1.0 / sqrt(sum_of_group(squares, lid) / f32(P.width) + P.eps);
    for (var i = lid; i < P.width; i += 128u) {
        var value = (x_get(x + i) - mean) * scale;
        if (weight_here) { value *= weight_get(i); }
        if (bias_here) { value += bias_get(i); }
        y_set(y + i, value);
    }
}
#endif
