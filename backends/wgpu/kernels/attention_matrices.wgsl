// Attention of many rows of a sequence by cooperative matrices: f16 queries, keys and values, f32 sums. Rows, tiles and segments
// are those of tiles.wgsl.
//
// There are two passes over the keys, because the rows of a cooperative matrix cannot be scaled one by one: the first finds the
// largest score of each row, the second sums the values with their final weights. Each takes KEYS keys at a time: a subgroup
// computes the scores of 16 rows and 16 keys, and the sums of 16 rows and half of the elements of a value.
//
// EMULATED replaces cooperative matrices by loops, so that the kernel runs, slowly, on adapters without them: a thread has eight
// elements of each fragment, the columns of half a row.

const KEYS: u32 = 32u;
// Vectors of four f16 of a row in workgroup memory: two more than it has, so that eight rows are in different banks.
const KEY_PITCH: u32 = KEY_QUADS + 2u;
const VALUE_PITCH: u32 = QUADS + 2u;
const WEIGHT_PITCH: u32 = KEYS / 4u + 2u;
const SCORE_PITCH: u32 = KEYS + 4u;
// Where each subgroup puts a fragment of its sums, in place of the scores.
const STAGE_PITCH: u32 = 20u;
const STAGE: u32 = 16u * STAGE_PITCH;

var<workgroup> queries_staged: array<vec4<f16>, ROWS * KEY_PITCH>;
// KEYS keys, then their values.
var<workgroup> staged: array<vec4<f16>, KEYS * max(KEY_PITCH, VALUE_PITCH)>;
var<workgroup> weights: array<vec4<f16>, ROWS * WEIGHT_PITCH>;
var<workgroup> scores: array<f32, max(ROWS * SCORE_PITCH, THREADS / 32u * STAGE)>;
// Of each row four parts.
var<workgroup> largest_parts: array<f32, THREADS>;
var<workgroup> sum_parts: array<f32, THREADS>;

fn stage_queries(segment: Segment, head: u32, first_row: u32, lid: u32) {
    for (var index = lid; index < ROWS * KEY_QUADS; index += THREADS) {
        let row = first_row + index / KEY_QUADS;
        var query = vec4<f16>();
        if (row >= segment.first_row && row < segment.end_row) {
            query = query_data[(row * P.query_stride + head * P.key_size) / 4u + index % KEY_QUADS];
        }
        queries_staged[index / KEY_QUADS * KEY_PITCH + index % KEY_QUADS] = query;
    }
}

fn stage_keys(lid: u32) {
    for (var index = lid; index < KEYS * KEY_QUADS; index += THREADS) {
        let place = key_places[index / KEY_QUADS];
        var key = vec4<f16>();
        if (place != NONE) { key = key_data[place + index % KEY_QUADS]; }
        staged[index / KEY_QUADS * KEY_PITCH + index % KEY_QUADS] = key;
    }
}

fn stage_values(lid: u32) {
    for (var index = lid; index < KEYS * QUADS; index += THREADS) {
        let place = value_places[index / QUADS];
        var value = vec4<f16>();
        if (place != NONE) { value = value_data[place + index % QUADS]; }
        staged[index / QUADS * VALUE_PITCH + index % QUADS] = value;
    }
}

#if EMULATED
fn emulate_scores(row: u32, first_key: u32) {
    for (var key = first_key; key < first_key + 8u; key += 1u) {
        var sum = 0.0;
        for (var quad = 0u; quad < KEY_QUADS; quad += 1u) {
            sum += dot(vec4<f32>(queries_staged[row * KEY_PITCH + quad]), vec4<f32>(staged[key * KEY_PITCH + quad]));
        }
        scores[row * SCORE_PITCH + key] = sum;
    }
}

fn emulated_sums(row: u32, first_column: u32, sums: array<f32, 8>) -> array<f32, 8> {
    var result = sums;
    for (var i = 0u; i < 8u; i += 1u) {
        let column = first_column + i;
        for (var key = 0u; key < KEYS; key += 1u) {
            let value = f32(staged[key * VALUE_PITCH + column / 4u][column % 4u]);
            result[i] += f32(weights[row * WEIGHT_PITCH + key / 4u][key % 4u]) * value;
        }
    }
    return result;
}
#endif

// Computes the scores of the keys from `first` on, before their scale and mask.
fn multiply_keys(segment: Segment, head: u32, first: i32, lid: u32, warp: u32, lane: u32) {
    let row = warp % 4u * 16u;
    let key = warp / 4u * 16u;
    workgroupBarrier();
    find_keys(segment, head, first, lid);
    workgroupBarrier();
    stage_keys(lid);
    workgroupBarrier();
#if EMULATED
    emulate_scores(row + lane / 2u, key + lane % 2u * 8u);
#else
    var products = coop_mat16x16<f32, C>();
#each K KEY_FRAGMENTS
    let query_$K = coopLoadT<coop_mat16x16<f16, A>>(&queries_staged[row * KEY_PITCH + $Ku * 4u], KEY_PITCH);
    let key_$K = coopLoad<coop_mat16x16<f16, B>>(&staged[key * KEY_PITCH + $Ku * 4u], KEY_PITCH);
    products = coopMultiplyAdd(query_$K, key_$K, products);
#endeach
    coopStoreT(products, &scores[row * SCORE_PITCH + key], SCORE_PITCH);
#endif
    workgroupBarrier();
}

// The scores of a row and four of the keys from `first` on, from one on.
fn four_scores(row: u32, position: i32, first: i32, from_key: u32, head: u32) -> vec4<f32> {
    var result = vec4<f32>();
    for (var i = 0u; i < 4u; i += 1u) {
        let key = from_key + i;
        let product = scores[row * SCORE_PITCH + key];
        result[i] = score_of(product, position, first + i32(key), key_places[key] != NONE, head);
    }
    return result;
}

@compute @workgroup_size(THREADS)
#if EMULATED
fn attention_matrices(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let warp = lid / 32u;
    let lane = lid % 32u;
#else
fn attention_matrices(
    @builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32,
    @builtin(subgroup_id) warp: u32, @builtin(subgroup_invocation_id) lane: u32,
) {
#endif
    let group = flat_group(wid, nwg);
    let first_row = group / P.heads * ROWS;
    let head = group % P.heads;
    let rows = rows_of_call(lid);
    // A tile past the last row has no segment. It cannot return instead, because WGSL does not see that this is uniform.
    let count = find_segments(first_row, rows, lid);
    let warp_row = warp % 4u * 16u;
    let warp_quad = warp / 4u * (QUADS / 2u);
    // The row of a thread, and the first of the eight keys that it weighs.
    let row = lid / 4u;
    let key = lid % 4u * 8u;
    for (var number = 0u; number < count; number += 1u) {
        let segment = segment_at(number, first_row, rows, lid);
        let position = segment.origin + i32(first_row + row);
        stage_queries(segment, head, first_row, lid);
        var largest = minus_infinity();
        for (var first = segment.first_key; first < segment.end_key; first += i32(KEYS)) {
            multiply_keys(segment, head, first, lid, warp, lane);
            let most = max(four_scores(row, position, first, key, head), four_scores(row, position, first, key + 4u, head));
            largest = max(largest, max(max(most.x, most.y), max(most.z, most.w)));
        }
        largest_parts[lid] = largest;
        workgroupBarrier();
        largest = largest_of(row);
        var total = 0.0;
#each J VALUE_FRAGMENTS
#if EMULATED
        var sums_$J = array<f32, 8>();
#else
        var sums_$J = coop_mat16x16<f32, C>();
#endif
#endeach
        for (var first = segment.first_key; first < segment.end_key; first += i32(KEYS)) {
            multiply_keys(segment, head, first, lid, warp, lane);
            for (var half = 0u; half < 2u; half += 1u) {
                let row_scores = four_scores(row, position, first, key + 4u * half, head);
                var row_weights = vec4<f32>();
                for (var i = 0u; i < 4u; i += 1u) {
                    if (!is_minus_infinity(row_scores[i])) { row_weights[i] = exp_of(row_scores[i] - largest); }
                }
                total += (row_weights.x + row_weights.y) + (row_weights.z + row_weights.w);
                weights[row * WEIGHT_PITCH + key / 4u + half] = vec4<f16>(row_weights);
            }
            stage_values(lid);
            workgroupBarrier();
#if EMULATED
#each J VALUE_FRAGMENTS
            sums_$J = emulated_sums(warp_row + lane / 2u, 4u * warp_quad + $Ju * 16u + lane % 2u * 8u, sums_$J);
#endeach
#else
#each K WEIGHT_FRAGMENTS
            let weight_$K = coopLoadT<coop_mat16x16<f16, A>>(&weights[warp_row * WEIGHT_PITCH + $Ku * 4u], WEIGHT_PITCH);
#each J VALUE_FRAGMENTS
            let value_$K_$J = coopLoadT<coop_mat16x16<f16, B>>(&staged[$Ku * 16u * VALUE_PITCH + warp_quad + $Ju * 4u], VALUE_PITCH);
            sums_$J = coopMultiplyAdd(weight_$K, value_$K_$J, sums_$J);
#endeach
#endeach
#endif
        }
        sum_parts[lid] = total;
        let place = warp * STAGE;
#each J VALUE_FRAGMENTS
        workgroupBarrier();
#if EMULATED
        for (var i = 0u; i < 8u; i += 1u) { scores[place + lane / 2u * STAGE_PITCH + lane % 2u * 8u + i] = sums_$J[i]; }
#else
        coopStoreT(sums_$J, &scores[place], STAGE_PITCH);
#endif
        workgroupBarrier();
        finish(segment, head, first_row + warp_row + lane / 2u, 4u * warp_quad + $Ju * 16u + lane % 2u * 8u, place, lane);
#endeach
#if PAGED
        if (key == 0u) { finish_row(segment, head, first_row + row); }
#endif
        workgroupBarrier();
    }
}

// The largest score of a row of the tile.
fn largest_of(row: u32) -> f32 {
    let parts = 4u * row;
    return max(max(largest_parts[parts], largest_parts[parts + 1u]), max(largest_parts[parts + 2u], largest_parts[parts + 3u]));
}

// What the sums of a row of the tile are multiplied by, and the logarithm of the sum of all weights. Weights are relative to the
// largest score of a key, so that f16 holds them well; a sink, which may be larger, comes in here.
fn factor_of(row: u32, head: u32) -> vec2<f32> {
    let parts = 4u * row;
    let largest = largest_of(row);
    var total = (sum_parts[parts] + sum_parts[parts + 1u]) + (sum_parts[parts + 2u] + sum_parts[parts + 3u]);
    var factor = 1.0;
    var top = largest;
    if (sinks_here) {
        let sink = sinks_get(head);
        top = max(largest, sink);
        factor = 0.0;
        if (!is_minus_infinity(largest)) { factor = exp_of(largest - top); }
        total *= factor;
        // A sink of minus infinity has no weight.
        if (!is_minus_infinity(sink)) { total += exp_of(sink - top); }
    }
    if (total == 0.0) { return vec2<f32>(0.0, minus_infinity()); }
    return vec2<f32>(factor / total, top + ln_of(total));
}

// Writes half a row of a fragment of sums, from a column on.
fn finish(segment: Segment, head: u32, row: u32, column: u32, place: u32, lane: u32) {
    if (row < segment.first_row || row >= segment.end_row) { return; }
    let factor = factor_of(row % ROWS, head).x;
    for (var i = 0u; i < 8u; i += 1u) {
        var y = 0.0;
        if (factor != 0.0) { y = factor * scores[place + lane / 2u * STAGE_PITCH + lane % 2u * 8u + i]; }
        y_set(row * P.y_stride + head * P.value_size + column + i, y);
    }
}

#if PAGED
fn finish_row(segment: Segment, head: u32, row: u32) {
    if (row < segment.first_row || row >= segment.end_row) { return; }
    log_sum_exp_set(row * P.log_sum_exp_stride + head, factor_of(row % ROWS, head).y);
}
#endif
