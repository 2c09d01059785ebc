// Linear layers. Weights are decoded in registers, four columns at a time.

// Four elements of a row of x. Those behind the last column are zeros, as are those of the weight.
fn x4(row: u32, column: u32) -> vec4<f32> {
#if VECTORS
    return x_get4((row * P.x_stride + column) / 4u);
#else
    var values = vec4<f32>();
    let at = row * P.x_stride + column;
    if (column < P.inputs) { values.x = x_get(at); }
    if (column + 1u < P.inputs) { values.y = x_get(at + 1u); }
    if (column + 2u < P.inputs) { values.z = x_get(at + 2u); }
    if (column + 3u < P.inputs) { values.w = x_get(at + 3u); }
    return values;
#endif
}

var<workgroup> live_shared: u32;

fn shared_rows(lid: u32) -> u32 {
    if (lid == 0u) { live_shared = min(x_live(), y_live()); }
    return workgroupUniformLoad(&live_shared);
}

fn finish(row: u32, output: u32, sum: f32) {
    var y = sum;
    if (bias_here) { y += bias_get(output); }
    y_set(row * P.y_stride + output, y);
}

#if FEW
// For few rows: a workgroup makes one output of up to 4 rows; its threads share the columns, so that the weight is read once for
// the 4 rows and consecutive threads read consecutive words.
var<workgroup> partial: array<vec4<f32>, 64>;

@compute @workgroup_size(64)
fn linear_few(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let output = group % P.outputs;
    let first = group / P.outputs * 4u;
    let rows = shared_rows(lid);
    if (first >= rows) { return; }
    let count = min(rows - first, 4u);
    var sums = vec4<f32>();
    for (var k = lid * 4u; k < P.inputs; k += 256u) {
        let w = w_get4(output, k);
        sums.x += dot(w, x4(first, k));
        if (count > 1u) { sums.y += dot(w, x4(first + 1u, k)); }
        if (count > 2u) { sums.z += dot(w, x4(first + 2u, k)); }
        if (count > 3u) { sums.w += dot(w, x4(first + 3u, k)); }
    }
    partial[lid] = sums;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (lid < half) { partial[lid] += partial[lid + half]; }
        workgroupBarrier();
    }
    if (lid < count) { finish(first + lid, output, partial[0][lid]); }
}
#endif

#if MANY
// For many rows: a workgroup of 256 threads makes a tile of 64 rows by 64 outputs, a thread 4 by 4 of it. Tiles of 16 columns of
// both factors pass through workgroup memory.
var<workgroup> x_tile: array<array<f32, 68>, 16>;
var<workgroup> w_tile: array<array<f32, 68>, 16>;

@compute @workgroup_size(256)
fn linear_many(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let tile = flat_group(wid, nwg);
    let tiles = (P.outputs + 63u) / 64u;
    let first_output = tile % tiles * 64u;
    let first_row = tile / tiles * 64u;
    let rows = shared_rows(lid);
    if (first_row >= rows) { return; }
    let loaded = lid / 4u;
    let part = lid % 4u * 4u;
    let row = lid / 16u * 4u;
    let output = lid % 16u * 4u;
    var sums = array<vec4<f32>, 4>();
    for (var k = 0u; k < P.inputs; k += 16u) {
        var x = vec4<f32>();
        var w = vec4<f32>();
        if (k + part < P.inputs) {
            if (first_row + loaded < rows) { x = x4(first_row + loaded, k + part); }
            if (first_output + loaded < P.outputs) { w = w_get4(first_output + loaded, k + part); }
        }
        workgroupBarrier();
        for (var i = 0u; i < 4u; i += 1u) {
            x_tile[part + i][loaded] = x[i];
            w_tile[part + i][loaded] = w[i];
        }
        workgroupBarrier();
        for (var i = 0u; i < 16u; i += 1u) {
            let w4 = vec4<f32>(w_tile[i][output], w_tile[i][output + 1u], w_tile[i][output + 2u], w_tile[i][output + 3u]);
            sums[0] += x_tile[i][row] * w4;
            sums[1] += x_tile[i][row + 1u] * w4;
            sums[2] += x_tile[i][row + 2u] * w4;
            sums[3] += x_tile[i][row + 3u] * w4;
        }
    }
    for (var i = 0u; i < 4u; i += 1u) {
        for (var j = 0u; j < 4u; j += 1u) {
            if (first_row + row + i < rows && first_output + output + j < P.outputs) {
                finish(first_row + row + i, first_output + output + j, sums[i][j]);
            }
        }
    }
}
#endif
