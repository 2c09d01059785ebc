// Grouped linear layers, in which each row selects a matrix of the weight: by expert, or by head.
//
// Row t of x has P.slots slots. Slot j is assignment t * P.slots + j; its inputs begin at column j * P.x_slot of the row, and its
// outputs at column j * P.y_slot. The weight holds the matrices of all experts, P.outputs rows each. With HEADS, slot j uses
// matrix j, and the outputs of each head are followed by the rest of the head, which another dispatch copies.

// The matrix of a slot; NONE if the slot is skipped.
fn matrix_of(row: u32, slot: u32) -> u32 {
#if HEADS
    return slot;
#else
    let expert = experts_get(row * P.experts_stride + slot);
    if (expert < 0 || u32(expert) < P.first_expert || u32(expert) - P.first_expert >= P.count) { return NONE; }
    return u32(expert) - P.first_expert;
#endif
}

fn live_rows() -> u32 {
#if HEADS
    return min(x_live(), y_live());
#else
    return min(min(x_live(), y_live()), experts_live());
#endif
}

// Four inputs of a slot; zeros past the last, as in the weight.
fn x4(start: u32, column: u32) -> vec4<f32> {
#if VECTORS
    return x_get4((start + column) / 4u);
#else
    var values = vec4<f32>();
    let at = start + column;
    if (column < P.inputs) { values.x = x_get(at); }
    if (column + 1u < P.inputs) { values.y = x_get(at + 1u); }
    if (column + 2u < P.inputs) { values.z = x_get(at + 2u); }
    if (column + 3u < P.inputs) { values.w = x_get(at + 3u); }
    return values;
#endif
}

// Whether the bound part of the weight has this row.
fn in_part(row: u32) -> bool {
    return row - P.w_first < P.w_rows;
}

fn finish(row: u32, slot: u32, matrix: u32, first: u32, sums: vec4<f32>) {
    for (var i = 0u; i < 4u; i += 1u) {
        let output = first + i;
        let place = matrix * P.outputs + output;
        if (output >= P.outputs || !in_part(place)) { continue; }
        var value = sums[i];
        if (bias_here) { value += bias_get(place); }
        y_set(row * P.y_stride + slot * P.y_slot + output, value);
    }
}

#if FEW
// For few rows of each matrix: one workgroup per four outputs of an assignment. Its threads divide the columns.

// What reduce.wgsl adds up.
alias Reduced = vec4<f32>;
const SUMS: u32 = 1u;

var<workgroup> matrix_shared: u32;

@compute @workgroup_size(THREADS)
fn experts_few(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let first = group % P.units * 4u;
    let assignment = group / P.units;
    let row = assignment / P.slots;
    let slot = assignment % P.slots;
    if (lid == 0u) {
        matrix_shared = NONE;
        if (row < live_rows()) {
            let matrix = matrix_of(row, slot);
            let place = matrix * P.outputs + first;
            // A unit without rows in the bound part is computed by another dispatch.
            let end = min(place + 4u, (matrix + 1u) * P.outputs);
            if (matrix != NONE && place < P.w_first + P.w_rows && end > P.w_first) { matrix_shared = matrix; }
        }
    }
    let matrix = workgroupUniformLoad(&matrix_shared);
    if (matrix == NONE) { return; }
    let last = min((matrix + 1u) * P.outputs, P.w_first + P.w_rows) - 1u;
    let places = clamp(matrix * P.outputs + first + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(P.w_first), vec4<u32>(last));
    let start = row * P.x_stride + slot * P.x_slot;
    var sum = vec4<f32>();
    for (var v = lid; v < P.w_row_words / 4u; v += THREADS) {
        let column = v * 4u * w_QUADS;
        let a = w_vector(places.x, v);
        let b = w_vector(places.y, v);
        let c = w_vector(places.z, v);
        let d = w_vector(places.w, v);
        for (var quad = 0u; quad < w_QUADS; quad += 1u) {
            let k = column + 4u * quad;
            if (k >= P.inputs) { break; }
            let w = mat4x4<f32>(w_quad(a, quad, w_affine(places.x, k)), w_quad(b, quad, w_affine(places.y, k)), w_quad(c, quad, w_affine(places.z, k)), w_quad(d, quad, w_affine(places.w, k)));
            sum += x4(start, k) * w;
        }
    }
    let y = sum_of_group(sum, lid);
    if (lid == 0u) { finish(row, slot, matrix, first, y); }
}
#endif

#if MANY
// For many rows of each matrix: a workgroup of 256 threads computes a tile of 64 assignments of a matrix by 64 outputs, four by
// four per thread. Tiles of 16 columns of both factors are staged in workgroup memory.
var<workgroup> x_tile: array<array<f32, 68>, 16>;
var<workgroup> w_tile: array<array<f32, 68>, 16>;
// The matrix of the tile, its first index in `order` (or its first row), and the number of its assignments.
var<workgroup> tile_shared: vec3<u32>;

// Finds the tile of this number among the tiles of all matrices.
fn tile_of(number: u32) -> vec3<u32> {
    let rows = live_rows();
#if HEADS
    let tiles = (P.x_rows + 63u) / 64u;
    let first = number % tiles * 64u;
    if (first >= rows) { return vec3<u32>(NONE, 0u, 0u); }
    return vec3<u32>(number / tiles, first, min(rows - first, 64u));
#else
    let most = P.x_rows * P.slots;
    var before = 0u;
    var start = min(u32(max(starts_get(0u), 0)), most);
    for (var matrix = 0u; matrix < P.count; matrix += 1u) {
        let end = min(u32(max(starts_get(matrix + 1u), 0)), most);
        let length = end - min(start, end);
        let tiles = (length + 63u) / 64u;
        if (number < before + tiles) {
            let skipped = (number - before) * 64u;
            return vec3<u32>(matrix, start + skipped, min(length - skipped, 64u));
        }
        before += tiles;
        start = end;
    }
    return vec3<u32>(NONE, 0u, 0u);
#endif
}

// Row and slot of an assignment of the tile; row NONE if there is none.
fn assignment_of(tile: vec3<u32>, index: u32) -> vec2<u32> {
    if (index >= tile.z) { return vec2<u32>(NONE, 0u); }
    let place = tile.y + index;
#if HEADS
    return vec2<u32>(place, tile.x);
#else
    let assignment = order_get(place / P.slots * P.order_stride + place % P.slots);
    if (assignment < 0) { return vec2<u32>(NONE, 0u); }
    let row = u32(assignment) / P.slots;
    if (row >= live_rows()) { return vec2<u32>(NONE, 0u); }
    return vec2<u32>(row, u32(assignment) % P.slots);
#endif
}

@compute @workgroup_size(256)
fn experts_many(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let across = (P.units + 15u) / 16u;
    let first = group % across * 64u;
    if (lid == 0u) { tile_shared = tile_of(group / across); }
    let tile = workgroupUniformLoad(&tile_shared);
    if (tile.x == NONE) { return; }
    let loaded = lid / 4u;
    let part = lid % 4u * 4u;
    let row = lid / 16u * 4u;
    let column = lid % 16u * 4u;
    let source = assignment_of(tile, loaded);
    let start = source.x * P.x_stride + source.y * P.x_slot;
    let output = tile.x * P.outputs + first + loaded;
    let has_output = first + loaded < P.outputs && in_part(output);
    var sums = array<vec4<f32>, 4>();
    for (var k = 0u; k < P.inputs; k += 16u) {
        var x = vec4<f32>();
        var w = vec4<f32>();
        if (k + part < P.inputs) {
            if (source.x != NONE) { x = x4(start, k + part); }
            if (has_output) { w = w_get4(output, k + part); }
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
    for (var i = 0u; i < 4u; i += 1u) {
        let target_row = assignment_of(tile, row + i);
        if (target_row.x == NONE) { continue; }
        finish(target_row.x, target_row.y, tile.x, first + column, sums[i]);
    }
}
#endif

#if COPY
// Copies the rest of each head of x after the outputs of the head. One thread per element.
@compute @workgroup_size(64)
fn copy_rest(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let index = flat_group(wid, nwg) * 64u + lid;
    let rest = P.y_slot - P.outputs;
    let column = index % rest;
    let slot = index / rest % P.slots;
    let row = index / rest / P.slots;
    if (row >= live_rows()) { return; }
    let from_column = row * P.x_stride + slot * P.x_slot + P.inputs + column;
    let to_column = row * P.y_stride + slot * P.y_slot + P.outputs + column;
#if SAME
    y_data[to_column] = x_data[from_column];
#else
    y_set(to_column, x_get(from_column));
#endif
}
#endif
