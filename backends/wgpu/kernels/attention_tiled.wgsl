// Attention of many rows of a sequence without cooperative matrices. Rows, tiles and segments are those of tiles.wgsl.
//
// Keys are taken KEYS at a time: scores are a product of the tile's queries and the keys, CHUNK elements of both staged in
// workgroup memory; the softmax is online; and VALUE_KEYS values at a time are staged for the weighted sums. A thread computes
// four rows by four keys of the scores, and four rows by VALUES quads of the sums.

const KEYS: u32 = 64u;
const CHUNK: u32 = 32u;
const VALUE_KEYS: u32 = 16u;
// Numbers of a line of `tile`: four more than it has, so that lines begin in different banks.
const PITCH: u32 = 68u;

// CHUNK lines of queries and CHUNK of keys, a line per element; later KEYS lines of weights, a line per key.
var<workgroup> tile: array<f32, 2u * CHUNK * PITCH>;
var<workgroup> values: array<vec4<f32>, VALUE_KEYS * QUADS>;
var<workgroup> largest_parts: array<f32, THREADS>;
var<workgroup> sum_parts: array<f32, THREADS>;
// Of each row: the largest score, the sum of its weights, and the factor of its earlier sums.
var<workgroup> largest: array<f32, ROWS>;
var<workgroup> totals: array<f32, ROWS>;
var<workgroup> rescale: array<f32, ROWS>;

// A product with a weight; no value, not even one that is no number, counts where the weight is zero.
fn weighted(weight: f32, value: vec4<f32>) -> vec4<f32> {
    return select(weight * value, vec4<f32>(), weight == 0.0);
}

// Stages CHUNK elements of the queries and keys from `first` on.
fn stage_factors(segment: Segment, head: u32, first_row: u32, first: u32, lid: u32) {
    let line = lid / 4u;
    let row = first_row + line;
    let is_row = row >= segment.first_row && row < segment.end_row;
    for (var part = 0u; part < 2u; part += 1u) {
        let element = lid % 4u * 4u + part * 16u;
        let quad = (first + element) / 4u;
        var query = vec4<f32>();
        var key = vec4<f32>();
        if (4u * quad < P.key_size) {
            if (is_row) { query = query_get4((row * P.query_stride + head * P.key_size) / 4u + quad); }
            if (key_places[line] != NONE) { key = key_get4(key_places[line] + quad); }
        }
        for (var i = 0u; i < 4u; i += 1u) {
            tile[(element + i) * PITCH + line] = query[i];
            tile[(CHUNK + element + i) * PITCH + line] = key[i];
        }
    }
}

// Four numbers of a line.
fn four(at: u32) -> vec4<f32> {
    return vec4<f32>(tile[at], tile[at + 1u], tile[at + 2u], tile[at + 3u]);
}

// Turns the scores in `tile` to weights, and updates the figures of their rows.
fn weigh(lid: u32) {
    let row = lid / 4u;
    var most = minus_infinity();
    for (var i = 0u; i < KEYS / 4u; i += 1u) { most = max(most, tile[(4u * i + lid % 4u) * PITCH + row]); }
    largest_parts[lid] = most;
    workgroupBarrier();
    let before = largest[row];
    let parts = 4u * row;
    most = max(max(largest_parts[parts], largest_parts[parts + 1u]), max(largest_parts[parts + 2u], largest_parts[parts + 3u]));
    let next = max(before, most);
    var sum = 0.0;
    for (var i = 0u; i < KEYS / 4u; i += 1u) {
        let at = (4u * i + lid % 4u) * PITCH + row;
        let score = tile[at];
        var weight = 0.0;
        if (!is_minus_infinity(score)) { weight = exp_of(score - next); }
        tile[at] = weight;
        sum += weight;
    }
    sum_parts[lid] = sum;
    workgroupBarrier();
    if (lid % 4u == 0u) {
        // Before the first key that it sees there is nothing to rescale.
        var factor = 1.0;
        if (!is_minus_infinity(before)) { factor = exp_of(before - next); }
        rescale[row] = factor;
        totals[row] = totals[row] * factor + ((sum_parts[parts] + sum_parts[parts + 1u]) + (sum_parts[parts + 2u] + sum_parts[parts + 3u]));
        largest[row] = next;
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn attention_tiled(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let first_row = group / P.heads * ROWS;
    let head = group % P.heads;
    let rows = rows_of_call(lid);
    if (first_row >= rows) { return; }
    let count = find_segments(first_row, rows, lid);
    let four_rows = lid / 16u * 4u;
    let column = lid % 16u;
    for (var number = 0u; number < count; number += 1u) {
        let segment = segment_at(number, first_row, rows, lid);
        if (lid < ROWS) {
            largest[lid] = minus_infinity();
            totals[lid] = 0.0;
            if (sinks_here) {
                largest[lid] = sinks_get(head);
                // A sink of minus infinity has no weight.
                totals[lid] = select(1.0, 0.0, is_minus_infinity(largest[lid]));
            }
        }
#each J VALUES
        var sums_$J = mat4x4<f32>();
#endeach
        for (var first = segment.first_key; first < segment.end_key; first += i32(KEYS)) {
            workgroupBarrier();
            find_keys(segment, head, first, lid);
            // A row per column.
            var products = mat4x4<f32>();
            for (var element = 0u; element < P.key_size; element += CHUNK) {
                workgroupBarrier();
                stage_factors(segment, head, first_row, element, lid);
                workgroupBarrier();
                for (var i = 0u; i < CHUNK; i += 1u) {
                    let q = four(i * PITCH + four_rows);
                    let k = four((CHUNK + i) * PITCH + 4u * column);
                    products[0] += q.x * k;
                    products[1] += q.y * k;
                    products[2] += q.z * k;
                    products[3] += q.w * k;
                }
            }
            workgroupBarrier();
            let position = segment.origin + i32(first_row + four_rows);
            for (var j = 0u; j < 4u; j += 1u) {
                let key = 4u * column + j;
                let is_stored = key_places[key] != NONE;
                for (var i = 0u; i < 4u; i += 1u) {
                    let score = score_of(products[i][j], position + i32(i), first + i32(key), is_stored, head);
                    tile[key * PITCH + four_rows + i] = score;
                }
            }
            workgroupBarrier();
            weigh(lid);
#each J VALUES
#each I FOUR
            sums_$J[$Iu] *= rescale[four_rows + $Iu];
#endeach
#endeach
            // Whether some row does not see a key of the tile.
            let last = first + i32(KEYS) - 1;
            let end_position = segment.origin + i32(segment.end_row) - 1;
            let masked = !(sees(segment.origin + i32(segment.first_row), last) && sees(end_position, first));
            for (var part = 0u; part < KEYS; part += VALUE_KEYS) {
                workgroupBarrier();
                for (var index = lid; index < VALUE_KEYS * QUADS; index += THREADS) {
                    let place = value_places[part + index / QUADS];
                    var value = vec4<f32>();
                    if (place != NONE) { value = value_get4(place + index % QUADS); }
                    values[index] = value;
                }
                workgroupBarrier();
                for (var key = 0u; key < VALUE_KEYS; key += 1u) {
                    let w = four((part + key) * PITCH + four_rows);
#each J VALUES
                    let v_$J = values[key * QUADS + min(column + 16u * $Ju, QUADS - 1u)];
                    if (masked) {
#each I FOUR
                        sums_$J[$Iu] += weighted(w[$Iu], v_$J);
#endeach
                    } else {
#each I FOUR
                        sums_$J[$Iu] += w[$Iu] * v_$J;
#endeach
                    }
#endeach
                }
            }
        }
        workgroupBarrier();
#each I FOUR
        let row_$I = first_row + four_rows + $Iu;
        if (row_$I >= segment.first_row && row_$I < segment.end_row) {
            let total = totals[four_rows + $Iu];
#each J VALUES
            if (column + 16u * $Ju < QUADS) {
                let y = select(sums_$J[$Iu] / total, vec4<f32>(), total == 0.0);
                let at = row_$I * P.y_stride + head * P.value_size + 4u * (column + 16u * $Ju);
                for (var i = 0u; i < 4u; i += 1u) { y_set(at + i, y[i]); }
            }
#endeach
#if PAGED
            if (column == 0u) {
                var log_sum = minus_infinity();
                if (total != 0.0) { log_sum = largest[four_rows + $Iu] + ln_of(total); }
                log_sum_exp_set(row_$I * P.log_sum_exp_stride + head, log_sum);
            }
#endif
        }
#endeach
        workgroupBarrier();
    }
}
