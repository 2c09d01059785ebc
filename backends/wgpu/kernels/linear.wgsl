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

#if X_WORDS
// Four elements of a vector of eight.
fn x_of(words: vec2<u32>) -> vec4<f32> {
#if X_BF16
    return widen_bf16(words);
#else
    return vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
#endif
}
#else
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

// The rows that exist, as a value that is uniform over the workgroup.
fn shared_rows(lid: u32) -> u32 {
    if (lid == 0u) { live_shared = live_rows(); }
    return workgroupUniformLoad(&live_shared);
}

// The rows that exist.
fn live_rows() -> u32 {
#if HEADS
    return x_live();
#else
    var rows = min(x_live(), y_live());
    if (residual_here) { rows = min(rows, residual_live()); }
    return rows;
#endif
}

// What the epilogue of a unit reads, so that it can be asked for before the sums are known.
struct Operands {
    bias: vec4<f32>,
#if ADD
    residual: vec4<f32>,
#endif
#if HEADS
    // Whether a query is stored.
    has_query: bool,
    // The cache slot; negative if a key or value is not stored.
    slot: i32,
#if ROTATED
    // Whether the row has a position. A query or key without one is not stored.
    has_position: bool,
    // The sines and cosines of the two pairs.
    rotations: vec4<f32>,
#endif
#endif
}

// The operands of a unit of a row; if the row does not exist they are not used.
fn operands_of(row: u32, unit: u32, outputs: vec4<u32>) -> Operands {
    var operands = Operands();
    if (bias_here) {
        for (var i = 0u; i < 4u; i += 1u) {
            if (outputs[i] < P.outputs) { operands.bias[i] = bias_get(outputs[i]); }
        }
    }
#if ADD
    for (var i = 0u; i < 4u; i += 1u) {
        if (outputs[i] < P.outputs) { operands.residual[i] = residual_get(row * P.residual_stride + outputs[i]); }
    }
#endif
#if HEADS
    let first = 4u * unit;
    let slot = slots_get(row * P.slots_stride);
    let pages = select(key_cache_live(), value_cache_live(), first >= P.query_columns + P.key_columns);
    let has_slot = slot >= 0 && row < slots_live() && u32(slot) / P.block < pages;
    operands.slot = select(-1, slot, has_slot);
    operands.has_query = row < query_live();
#if ROTATED
    if (first < P.query_columns + P.key_columns) {
        let position = positions_get(row * P.positions_stride);
        operands.has_position = position >= 0 && row < positions_live();
        let pair = first % P.head / 2u;
        let a = sine_and_cosine(f32(position) * frequencies_get(pair));
        let b = sine_and_cosine(f32(position) * frequencies_get(pair + 1u));
        operands.rotations = vec4<f32>(a, b);
    }
#endif
#endif
    return operands;
}

#if HEADS
fn rotated(y: vec4<f32>, operands: Operands, first: u32) -> vec4<f32> {
#if ROTATED
    let a = operands.rotations.xy;
    let b = operands.rotations.zw;
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
fn store_head(row: u32, unit: u32, outputs: vec4<u32>, operands: Operands, product: vec4<f32>) {
    let first = 4u * unit;
    let is_value = first >= P.query_columns + P.key_columns;
    var y = product;
#if ROTATED
    if (!is_value) {
        if (!operands.has_position) { return; }
        y = rotated(y, operands, first);
    }
#endif
    if (first < P.query_columns) {
        if (!operands.has_query) { return; }
        for (var i = 0u; i < 4u; i += 1u) { query_set(row * P.query_stride + outputs[i], y[i]); }
        return;
    }
    if (operands.slot < 0) { return; }
    let page = u32(operands.slot) / P.block;
    let within = u32(operands.slot) % P.block;
    if (is_value) {
        let at = page * P.value_cache_stride + within * P.value_slot_stride;
        for (var i = 0u; i < 4u; i += 1u) {
            let column = outputs[i] - P.query_columns - P.key_columns;
            value_cache_set(at + column / P.value_head * P.value_head_stride + column % P.value_head, y[i]);
        }
    } else {
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
    finish_with(operands_of(row, unit, outputs), row, unit, outputs, sums);
}

fn finish_with(operands: Operands, row: u32, unit: u32, outputs: vec4<u32>, sums: vec4<f32>) {
    let y = sums + operands.bias;
#if HEADS
    store_head(row, unit, outputs, operands, y);
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
        value = operands.residual[i] + P.alpha * value;
#endif
        y_set(row * P.y_stride + outputs[i], value);
    }
#endif
}

#if FEW
// For few rows: one workgroup per unit of up to ROWS rows; with RUN for UNITS units of one row, one after the other, each of which
// takes a single step, so that the inputs are read once. Its threads divide the columns, so that the weight is read once and
// consecutive threads read consecutive vectors of 16 bytes. A call of few rows takes little longer than its loads that wait for
// each other, so a thread asks for AHEAD vectors of each output at a time first of all; then for the inputs of a single row, and
// those that compute the epilogue for its operands.

// What reduce.wgsl adds up: the sums of the rows and, with a norm, those of the rows' squares.
alias Reduced = vec4<f32>;
#if NORM
const SUMS: u32 = ROWS + 1u;
#else
const SUMS: u32 = ROWS;
#endif

#if ONE_ROW
// The inputs of a vector of the weight.
fn inputs_of(row: u32, vector: u32) -> array<vec4<f32>, QUADS> {
    var x = array<vec4<f32>, QUADS>();
#if X_WORDS
#each H EIGHTS
    if ((vector * EIGHTS + $Hu) * 8u < P.inputs) {
        let words = x_data[(row * P.x_stride + (vector * EIGHTS + $Hu) * 8u) / 8u];
        x[2u * $Hu] = x_of(words.xy);
        x[2u * $Hu + 1u] = x_of(words.zw);
    }
#endeach
#else
#each Q QUADS
    if ((vector * QUADS + $Qu) * 4u < P.inputs) { x[$Qu] = x4(row, (vector * QUADS + $Qu) * 4u); }
#endeach
#endif
    return x;
}

#if NORM
// The weights of the norm of these inputs.
fn norm_weights_of(vector: u32) -> array<vec4<f32>, QUADS> {
    var weights = array<vec4<f32>, QUADS>();
#each Q QUADS
    if ((vector * QUADS + $Qu) * 4u < P.inputs) { weights[$Qu] = norm_weight4((vector * QUADS + $Qu) * 4u); }
#endeach
    return weights;
}
#endif
#endif

#if FACTORED
// What is subtracted from each integer before it is multiplied: with SUMMED nothing, because zero points and minima are factors of the
// sum of the inputs. Where both sums are large and their difference is small, that loses bits, so f32 inputs do without.
fn zero_in_product(affine: vec2<f32>) -> f32 {
#if SUMMED
    return 0.0;
#else
    return affine.y;
#endif
}
#endif

// Sums and the products of four inputs and the weights of four outputs, a column each.
fn multiplied(x: vec4<f32>, w: mat4x4<f32>, sums: vec4<f32>) -> vec4<f32> {
    var result = fma(vec4<f32>(x.x), vec4<f32>(w[0].x, w[1].x, w[2].x, w[3].x), sums);
    result = fma(vec4<f32>(x.y), vec4<f32>(w[0].y, w[1].y, w[2].y, w[3].y), result);
    result = fma(vec4<f32>(x.z), vec4<f32>(w[0].z, w[1].z, w[2].z, w[3].z), result);
    return fma(vec4<f32>(x.w), vec4<f32>(w[0].w, w[1].w, w[2].w, w[3].w), result);
}

@compute @workgroup_size(THREADS)
fn linear_few(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let vectors = P.w_row_words / 4u;
    // A row that does not exist is computed, but not stored.
    let last_row = P.x_rows - 1u;
    var squares = vec4<f32>();
#if RUN
    let runs = (P.units + UNITS - 1u) / UNITS;
    let first = group / runs;
    let row = min(first, last_row);
    let own_vector = min(lid, vectors - 1u);
    var x_0 = inputs_of(row, own_vector);
#if NORM
    let norm_weights_0 = norm_weights_of(own_vector);
#each Q QUADS
    if (lid < vectors) { squares.x += dot(x_0[$Qu], x_0[$Qu]); }
    x_0[$Qu] *= norm_weights_0[$Qu];
#endeach
#endif
#if SUMMED
    // The sum of the inputs of this thread.
    var x_sums = array<f32, ROWS>();
#each Q QUADS
    x_sums[0] += (x_0[$Qu].x + x_0[$Qu].y) + (x_0[$Qu].z + x_0[$Qu].w);
#endeach
#endif
    let begin = group % runs * UNITS;
    let end = min(begin + UNITS, P.units);
    for (var unit = P.first_unit + begin; unit < P.first_unit + end; unit += 1u) {
#else
    let unit = P.first_unit + group % P.units;
    let first = group / P.units * ROWS;
#if ONE_ROW
    let row = min(first, last_row);
#endif
    {
#endif
        let targets = outputs_of(unit);
        let outputs = min(targets, vec4<u32>(P.w_first + P.w_rows - 1u));
        var operands = Operands();
        var rows = 0u;
        var sums = array<vec4<f32>, ROWS>();
        for (var vector = 0u; vector < vectors; vector += AHEAD * THREADS) {
#each N AHEAD
            let v_$N = min(vector + $Nu * THREADS + lid, vectors - 1u);
            let a_$N = w_vector(outputs.x, v_$N);
            let b_$N = w_vector(outputs.y, v_$N);
            let c_$N = w_vector(outputs.z, v_$N);
            let d_$N = w_vector(outputs.w, v_$N);
#if !SMALL_GROUPS
            let first_column_$N = min(v_$N * 4u * w_QUADS, P.inputs - 1u);
            let a_affine_$N = w_affine(outputs.x, first_column_$N);
            let b_affine_$N = w_affine(outputs.y, first_column_$N);
            let c_affine_$N = w_affine(outputs.z, first_column_$N);
            let d_affine_$N = w_affine(outputs.w, first_column_$N);
#if FACTORED
            let offsets_$N = mat4x4<f32>(
                w_offsets(zero_in_product(a_affine_$N)), w_offsets(zero_in_product(b_affine_$N)),
                w_offsets(zero_in_product(c_affine_$N)), w_offsets(zero_in_product(d_affine_$N)));
#endif
#endif
#if ONE_ROW
#if !RUN
            let x_$N = inputs_of(row, v_$N);
#if NORM
            let norm_weights_$N = norm_weights_of(v_$N);
#endif
#endif
#endif
#endeach
            if (vector == 0u && lid < ROWS) {
                rows = live_rows();
                operands = operands_of(min(first + lid, last_row), unit, targets);
            }
#each N AHEAD
            if (vector + $Nu * THREADS + lid < vectors) {
#if FACTORED
                var products = array<vec4<f32>, ROWS>();
#if SUMMED
#if !RUN
                var x_sums = array<f32, ROWS>();
#endif
#endif
#endif
#each Q QUADS
#if WHOLE
                {
#else
                if ((v_$N * QUADS + $Qu) * 4u < P.inputs) {
#endif
                    let k = (v_$N * QUADS + $Qu) * 4u;
#if SMALL_GROUPS
                    let w = mat4x4<f32>(
                        w_quad(a_$N, $Qu, w_affine(outputs.x, k)), w_quad(b_$N, $Qu, w_affine(outputs.y, k)),
                        w_quad(c_$N, $Qu, w_affine(outputs.z, k)), w_quad(d_$N, $Qu, w_affine(outputs.w, k)));
#else
#if FACTORED
                    let w = mat4x4<f32>(
                        w_difference(a_$N, $Qu, offsets_$N[0]), w_difference(b_$N, $Qu, offsets_$N[1]),
                        w_difference(c_$N, $Qu, offsets_$N[2]), w_difference(d_$N, $Qu, offsets_$N[3]));
#else
                    let w = mat4x4<f32>(
                        w_quad(a_$N, $Qu, a_affine_$N), w_quad(b_$N, $Qu, b_affine_$N),
                        w_quad(c_$N, $Qu, c_affine_$N), w_quad(d_$N, $Qu, d_affine_$N));
#endif
#endif
                    for (var r = 0u; r < ROWS; r += 1u) {
#if ONE_ROW
                        var x = x_$N[$Qu];
#else
                        var x = x4(min(first + r, last_row), k);
#endif
#if NORM
#if !RUN
                        squares[r] += dot(x, x);
#if ONE_ROW
                        x *= norm_weights_$N[$Qu];
#else
                        x *= norm_weight4(k);
#endif
#endif
#endif
#if FACTORED
                        products[r] = multiplied(x, w, products[r]);
#if SUMMED
#if !RUN
                        x_sums[r] += (x.x + x.y) + (x.z + x.w);
#endif
#endif
#else
                        sums[r] = multiplied(x, w, sums[r]);
#endif
                    }
                }
#endeach
#if FACTORED
                let scales = vec4<f32>(a_affine_$N.x, b_affine_$N.x, c_affine_$N.x, d_affine_$N.x);
                let zeros = vec4<f32>(a_affine_$N.y, b_affine_$N.y, c_affine_$N.y, d_affine_$N.y);
                for (var r = 0u; r < ROWS; r += 1u) {
#if MINIMA
                    sums[r] += scales * products[r] + zeros * x_sums[r];
#else
#if SUMMED
                    sums[r] += scales * (products[r] - zeros * x_sums[r]);
#else
                    sums[r] += scales * products[r];
#endif
#endif
                }
#endif
            }
#endeach
        }
        for (var r = 0u; r < ROWS; r += 1u) { reduced[r * THREADS + lid] = sums[r]; }
#if NORM
        reduced[ROWS * THREADS + lid] = squares;
#endif
        add_up(lid);
        if (lid < ROWS && first + lid < rows) {
            var y = total_of(lid);
#if NORM
            y *= norm_scale(total_of(ROWS)[lid]);
#endif
            finish_with(operands, first + lid, unit, targets, y);
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
