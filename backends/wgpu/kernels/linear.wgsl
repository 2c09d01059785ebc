// Linear layers with optional preceding norm and epilogue. Weights are dequantised in registers, four columns at a time.
//
// A dispatch computes the outputs of the bound rows of the weight: P.units units from P.first_unit on.
//
// Outputs are computed in units of four that belong together in the epilogue: two gates and their two up features, or two
// rotated pairs.

// The four outputs of a unit; indices from P.outputs on do not exist.
fn outputs_of(unit: u32) -> vec4<u32> {
    let first = 4u * unit;
#if CONCATENATED
    let half = P.outputs / 2u;
    let column = 2u * unit;
    let outputs = vec4<u32>(column, column + 1u, half + column, half + column + 1u);
    if (column + 1u < half) { return outputs; }
    return select(vec4<u32>(NONE), outputs, vec4<bool>(column < half, false, column < half, false));
#endif
#if ROTATED_HALVES
    if (first < P.query_columns + P.key_columns) {
        let head = first / P.head * P.head;
        let pair = head + (first - head) / 2u;
        return vec4<u32>(pair, pair + 1u, pair + P.head / 2u, pair + P.head / 2u + 1u);
    }
#endif
#if !CONCATENATED
    return vec4<u32>(first, first + 1u, first + 2u, first + 3u);
#endif
}

#if !MATRICES
// Four elements of a row of x; zeros past the last column, as in the weight.
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
#endif

#if NORM
// Four elements of the weight of the norm of x.
fn norm_weight4(column: u32) -> vec4<f32> {
#if VECTORS
    return norm_weight_get4(column / 4u) + P.weight_offset;
#else
    var values = vec4<f32>();
    if (column < P.inputs) { values.x = norm_weight_get(column) + P.weight_offset; }
    if (column + 1u < P.inputs) { values.y = norm_weight_get(column + 1u) + P.weight_offset; }
    if (column + 2u < P.inputs) { values.z = norm_weight_get(column + 2u) + P.weight_offset; }
    if (column + 3u < P.inputs) { values.w = norm_weight_get(column + 3u) + P.weight_offset; }
    return values;
#endif
}

fn norm_scale(squares: f32) -> f32 {
    return 1.0 / sqrt(squares / f32(P.inputs) + P.eps);
}
#endif

var<workgroup> live_shared: u32;

fn shared_rows(lid: u32) -> u32 {
#if HEADS
    if (lid == 0u) { live_shared = x_live(); }
#else
    if (lid == 0u) {
        live_shared = min(x_live(), y_live());
        if (residual_here) { live_shared = min(live_shared, residual_live()); }
    }
#endif
    return workgroupUniformLoad(&live_shared);
}

#if HEADS
fn rotated(y: vec4<f32>, position: i32, first: u32) -> vec4<f32> {
#if ROTATED
    let pair = first % P.head / 2u;
    let a = sine_and_cosine(f32(position) * frequencies_get(pair));
    let b = sine_and_cosine(f32(position) * frequencies_get(pair + 1u));
    let scale = select(P.key_scale, P.query_scale, first < P.query_columns);
#if ROTATED_HALVES
    return scale * vec4<f32>(y.x * a.y - y.z * a.x, y.y * b.y - y.w * b.x, y.z * a.y + y.x * a.x, y.w * b.y + y.y * b.x);
#else
    return scale * vec4<f32>(y.x * a.y - y.y * a.x, y.y * a.y + y.x * a.x, y.z * b.y - y.w * b.x, y.w * b.y + y.z * b.x);
#endif
#else
    return y;
#endif
}

// Writes a query, or a key or value to its cache slot.
fn store_head(row: u32, unit: u32, outputs: vec4<u32>, product: vec4<f32>) {
    let first = 4u * unit;
    let is_value = first >= P.query_columns + P.key_columns;
    var y = product;
#if ROTATED
    if (!is_value) {
        if (row >= positions_live()) { return; }
        let position = positions_get(row * P.positions_stride);
        if (position < 0) { return; }
        y = rotated(y, position, first);
    }
#endif
    if (first < P.query_columns) {
        if (row >= query_live()) { return; }
        for (var i = 0u; i < 4u; i += 1u) { query_set(row * P.query_stride + outputs[i], y[i]); }
        return;
    }
    if (row >= slots_live()) { return; }
    let slot = slots_get(row * P.slots_stride);
    if (slot < 0) { return; }
    let page = u32(slot) / P.block;
    let within = u32(slot) % P.block;
    if (is_value) {
        if (page >= value_cache_live()) { return; }
        let at = page * P.value_cache_stride + within * P.value_slot_stride;
        for (var i = 0u; i < 4u; i += 1u) {
            let column = outputs[i] - P.query_columns - P.key_columns;
            value_cache_set(at + column / P.value_head * P.value_head_stride + column % P.value_head, y[i]);
        }
    } else {
        if (page >= key_cache_live()) { return; }
        let at = page * P.key_cache_stride + within * P.key_slot_stride;
        for (var i = 0u; i < 4u; i += 1u) {
            let column = outputs[i] - P.query_columns;
            key_cache_set(at + column / P.key_head * P.key_head_stride + column % P.key_head, y[i]);
        }
    }
}
#endif

// Applies the epilogue to the sums of a unit, and writes the results.
fn finish(row: u32, unit: u32, sums: vec4<f32>) {
    let outputs = outputs_of(unit);
    var y = sums;
    if (bias_here) {
        for (var i = 0u; i < 4u; i += 1u) {
            if (outputs[i] < P.outputs) { y[i] += bias_get(outputs[i]); }
        }
    }
#if HEADS
    store_head(row, unit, outputs, y);
#endif
#if GATED_PRODUCT
#if CONCATENATED
    let gates = y.xy;
    let features = y.zw;
#else
    let gates = y.xz;
    let features = y.yw;
#endif
    for (var i = 0u; i < 2u; i += 1u) {
        let column = 2u * unit + i;
        if (column < P.outputs / 2u) { y_set(row * P.y_stride + column, activated(limited_above(gates[i])) * (limited(features[i]) + P.up_offset)); }
    }
#endif
#if STORED
    for (var i = 0u; i < 4u; i += 1u) {
        if (outputs[i] >= P.outputs) { break; }
        var value = y[i];
#if ACTIVATED
        value = activated(limited_above(value));
#endif
#if ADD
        value = residual_get(row * P.residual_stride + outputs[i]) + P.alpha * value;
#endif
        y_set(row * P.y_stride + outputs[i], value);
    }
#endif
}

#if FEW
// For few rows: one workgroup per unit of up to ROWS rows. Its threads divide the columns, so that the weight is read once and
// consecutive threads read consecutive vectors of 16 bytes, with four loads in flight per thread.
var<workgroup> partial: array<vec4<f32>, THREADS>;

// The sum of a value of all threads of the workgroup.
fn sum_of_group(value: vec4<f32>, lid: u32) -> vec4<f32> {
    workgroupBarrier();
    partial[lid] = value;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (lid < half) { partial[lid] += partial[lid + half]; }
        workgroupBarrier();
    }
    return partial[0];
}

@compute @workgroup_size(THREADS)
fn linear_few(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let unit = P.first_unit + group % P.units;
    let first = group / P.units * ROWS;
    let rows = shared_rows(lid);
    if (first >= rows) { return; }
    let outputs = min(outputs_of(unit), vec4<u32>(P.w_first + P.w_rows - 1u));
    var sums = array<vec4<f32>, ROWS>();
    var squares = vec4<f32>();
    for (var v = lid; v < P.w_row_words / 4u; v += THREADS) {
        let column = v * 4u * w_QUADS;
        let a = w_vector(outputs.x, v);
        let b = w_vector(outputs.y, v);
        let c = w_vector(outputs.z, v);
        let d = w_vector(outputs.w, v);
#if !SMALL_GROUPS
        let first_column = min(column, P.inputs - 1u);
        let a_affine = w_affine(outputs.x, first_column);
        let b_affine = w_affine(outputs.y, first_column);
        let c_affine = w_affine(outputs.z, first_column);
        let d_affine = w_affine(outputs.w, first_column);
#endif
        for (var quad = 0u; quad < w_QUADS; quad += 1u) {
            let k = column + 4u * quad;
            if (k >= P.inputs) { break; }
#if SMALL_GROUPS
            let a_affine = w_affine(outputs.x, k);
            let b_affine = w_affine(outputs.y, k);
            let c_affine = w_affine(outputs.z, k);
            let d_affine = w_affine(outputs.w, k);
#endif
            let w = mat4x4<f32>(w_quad(a, quad, a_affine), w_quad(b, quad, b_affine), w_quad(c, quad, c_affine), w_quad(d, quad, d_affine));
            for (var r = 0u; r < ROWS; r += 1u) {
                var x = x4(min(first + r, rows - 1u), k);
#if NORM
                squares[r] += dot(x, x);
                x *= norm_weight4(k);
#endif
                sums[r] += x * w;
            }
        }
    }
#if NORM
    let scales = sum_of_group(squares, lid);
#endif
    for (var r = 0u; r < ROWS; r += 1u) {
        var y = sum_of_group(sums[r], lid);
        if (lid == 0u && first + r < rows) {
#if NORM
            y *= norm_scale(scales[r]);
#endif
            finish(first + r, unit, y);
        }
    }
}
#endif

#if MANY
// For many rows: a workgroup of 256 threads computes a tile of 64 rows by 16 units, 4 rows of a unit per thread. Tiles of 16
// columns of both factors are staged in workgroup memory.
var<workgroup> x_tile: array<array<f32, 68>, 16>;
var<workgroup> w_tile: array<array<f32, 68>, 16>;
#if NORM
var<workgroup> row_squares: array<array<f32, 4>, 64>;
#endif

@compute @workgroup_size(256)
fn linear_many(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let tile = flat_group(wid, nwg);
    let tiles = (P.units + 15u) / 16u;
    let first_unit = tile % tiles * 16u;
    let first_row = tile / tiles * 64u;
    let rows = shared_rows(lid);
    if (first_row >= rows) { return; }
    let loaded = lid / 4u;
    let part = lid % 4u * 4u;
    let row = lid / 16u * 4u;
    let column = lid % 16u * 4u;
    let output = outputs_of(P.first_unit + first_unit + loaded / 4u)[loaded % 4u];
    var sums = array<vec4<f32>, 4>();
    var squares = 0.0;
    for (var k = 0u; k < P.inputs; k += 16u) {
        var x = vec4<f32>();
        var w = vec4<f32>();
        if (k + part < P.inputs) {
            if (first_row + loaded < rows) { x = x4(first_row + loaded, k + part); }
            if (output - P.w_first < P.w_rows) { w = w_get4(output, k + part); }
#if NORM
            squares += dot(x, x);
            x *= norm_weight4(k + part);
#endif
        }
        workgroupBarrier();
        for (var i = 0u; i < 4u; i += 1u) {
            x_tile[part + i][loaded] = x[i];
            w_tile[part + i][loaded] = w[i];
        }
        workgroupBarrier();
        for (var i = 0u; i < 16u; i += 1u) {
            let w4 = vec4<f32>(w_tile[i][column], w_tile[i][column + 1u], w_tile[i][column + 2u], w_tile[i][column + 3u]);
            sums[0] += x_tile[i][row] * w4;
            sums[1] += x_tile[i][row + 1u] * w4;
            sums[2] += x_tile[i][row + 2u] * w4;
            sums[3] += x_tile[i][row + 3u] * w4;
        }
    }
#if NORM
    row_squares[loaded][lid % 4u] = squares;
    workgroupBarrier();
#endif
    let unit = first_unit + lid % 16u;
    if (unit >= P.units) { return; }
    for (var i = 0u; i < 4u; i += 1u) {
        if (first_row + row + i >= rows) { break; }
        var y = sums[i];
#if NORM
        let parts = row_squares[row + i];
        y *= norm_scale((parts[0] + parts[1]) + (parts[2] + parts[3]));
#endif
        finish(first_row + row + i, P.first_unit + unit, y);
    }
}
#endif
