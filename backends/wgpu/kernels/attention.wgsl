// Attention over the paged KV cache or within sequences. One workgroup per head and row. It processes the keys in tiles of one
// key per thread: four threads compute the product of the query with a key, so that they read its bytes together. Then COLUMNS
// threads, a team, hold four elements of the result each, and the teams take the values of the tile in turn; the first EARLY
// values are loaded before the scores are known. Softmax is online: sums are rescaled when a tile has a larger score than all
// earlier ones. The sums of the threads and teams are added at the end.

const TEAMS: u32 = THREADS / COLUMNS;

// What reduce.wgsl adds up.
alias Reduced = f32;
const SUMS: u32 = 1u;

#if VECTORS
var<workgroup> query_shared: array<vec4<f32>, QUADS>;
#else
var<workgroup> query_shared: array<f32, KEY_SIZE>;
#endif
var<workgroup> weights: array<f32, THREADS>;
// Where the key and the value of each key of a tile are; NONE if the row does not see it.
var<workgroup> key_places: array<u32, THREADS>;
var<workgroup> value_places: array<u32, THREADS>;
// Four parts of the product of each key of a tile; at the end, the sums of each thread.
var<workgroup> parts: array<f32, 4u * THREADS>;
// The index of the row's sequence plus one; 0 if it belongs to none.
var<workgroup> found_shared: atomic<u32>;
var<workgroup> sequence_shared: Sequence;

// A sequence: its index, its first row, its rows in this step, and its keys.
struct Sequence { index: u32, start: i32, queries: i32, length: i32 }

// The parts of the products of the query and four keys that one of four threads computes.
#if VECTORS
fn products_with(keys: vec4<u32>, part: u32) -> vec4<f32> {
    var products = vec4<f32>();
    for (var d = part; d < QUADS; d += 16u) {
#each N FOUR
        let quad_$N = min(d + 4u * $Nu, QUADS - 1u);
#each K FOUR
        let key_$N_$K = key_get4(keys[$K] / 4u + quad_$N);
#endeach
#endeach
#each N FOUR
        if (d + 4u * $Nu < QUADS) {
            let query = query_shared[quad_$N];
            products += vec4<f32>(dot(query, key_$N_0), dot(query, key_$N_1), dot(query, key_$N_2), dot(query, key_$N_3));
        }
#endeach
    }
    return products;
}
#else
fn products_with(keys: vec4<u32>, part: u32) -> vec4<f32> {
    var products = vec4<f32>();
    for (var d = part; d < P.key_size; d += 4u) {
        products += query_shared[d] * vec4<f32>(key_get(keys.x + d), key_get(keys.y + d), key_get(keys.z + d), key_get(keys.w + d));
    }
    return products;
}
#endif

// Four elements of a value; zeros past its last.
fn value4(at: u32, column: u32) -> vec4<f32> {
#if VALUE_VECTORS
    return value_get4(at / 4u + column);
#else
    var value = vec4<f32>();
    for (var i = 0u; i < 4u; i += 1u) {
        if (4u * column + i < P.value_size) { value[i] = value_get(at + 4u * column + i); }
    }
    return value;
#endif
}

@compute @workgroup_size(THREADS)
fn attention(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let row = group / P.heads;
    let head = group % P.heads;
    if (lid == 0u) { atomicStore(&found_shared, 0u); }
    let query_at = row * P.query_stride + head * P.key_size;
#if VECTORS
    for (var d = lid; d < QUADS; d += THREADS) { query_shared[d] = query_get4(query_at / 4u + d); }
#else
    for (var d = lid; d < P.key_size; d += THREADS) { query_shared[d] = query_get(query_at + d); }
#endif
    var rows = min(query_live(), y_live());
    let sequences = sequences();
#if PAGED
    rows = min(rows, log_sum_exp_live());
#endif
#if EXPLICIT
    rows = min(rows, mask_live());
#endif
    workgroupBarrier();
    // The last sequence of this thread that has the row.
    var mine = Sequence();
    var candidate = 0u;
    for (var s = lid; s < P.start_rows; s += THREADS) {
        let start = start_get(s * P.start_stride);
        let queries = queries_get(s * P.queries_stride);
#if PAGED
        let length = lengths_get(s * P.lengths_stride);
#else
        let length = queries;
#endif
        // The other sequences are those of tiles.wgsl.
        if (u32(queries) >= P.many) { continue; }
        if (s < sequences && row < rows && start >= 0 && queries > 0 && row >= u32(start) && row - u32(start) < u32(queries)) {
            candidate = s + 1u;
            mine = Sequence(s, start, queries, length);
        }
    }
    if (candidate > 0u) { atomicMax(&found_shared, candidate); }
    workgroupBarrier();
    let found = atomicLoad(&found_shared);
    if (found == 0u && lid == 0u) { sequence_shared = Sequence(); }
    if (found > 0u && candidate == found) { sequence_shared = mine; }
    let sequence = workgroupUniformLoad(&sequence_shared);
    // The position of the sequence's first row of this step.
    let first_position = sequence.length - sequence.queries;
    let position = first_position + i32(row) - sequence.start;
#if PAGED
    // The block table has pages for this many keys at most. The product is computed in f32 because it may exceed 32 bits.
    var length = max(sequence.length, 0);
    if (f32(P.blocks) * f32(P.block) < 2147483000.0) { length = min(length, i32(P.blocks * P.block)); }
#else
    let length = min(sequence.length, max(i32(min(key_live(), value_live())) - sequence.start, 0));
#endif
    var keys = vec2<i32>(0, length);
#if CAUSAL
    keys.y = min(keys.y, position + 1);
#endif
    if (P.window > 0u) { keys.x = max(keys.x, position - window() + 1); }
    let kv_head = head / P.group;

    var largest = minus_infinity();
    // The sum of the weights of this thread's keys.
    var total = 0.0;
    if (sinks_here) {
        largest = sinks_get(head);
        // A sink of minus infinity has no weight.
        if (lid == 0u) { total = select(1.0, 0.0, is_minus_infinity(largest)); }
    }
    var sums = array<vec4<f32>, ROUNDS>();
    let stored = value_live() > 0u;
    let team = lid / COLUMNS;
    let column = lid % COLUMNS;
    for (var first = keys.x; first < keys.y; first += i32(THREADS)) {
        let key = first + i32(lid);
        var visible = key < keys.y;
        var key_at = 0u;
        var value_at = 0u;
        if (visible) {
#if PAGED
            let page = tables_get(sequence.index * P.tables_stride + u32(key) / P.block);
            visible = page >= 0 && u32(page) < min(key_live(), value_live());
            let slot = u32(key) % P.block;
            key_at = u32(page) * P.key_stride + kv_head * P.key_head_stride + slot * P.key_slot_stride;
            value_at = u32(page) * P.value_stride + kv_head * P.value_head_stride + slot * P.value_slot_stride;
#else
            key_at = u32(sequence.start + key) * P.key_stride + kv_head * P.key_size;
            value_at = u32(sequence.start + key) * P.value_stride + kv_head * P.value_size;
#endif
#if BOTH_SIDES
            if (P.window > 0u && key - position >= window()) { visible = false; }
#endif
#if EXPLICIT
            let token = key - first_position;
            if (token >= 0) {
                let word = u32(token) / 32u;
                visible = visible && word < P.mask_words && ((mask_get(row * P.mask_stride + word) >> (u32(token) % 32u)) & 1u) == 1u;
            }
#endif
        }
        // All have read the weights of the previous tile.
        workgroupBarrier();
        key_places[lid] = select(NONE, key_at, visible);
        value_places[lid] = select(NONE, value_at, visible && stored);
        workgroupBarrier();
        let count = min(THREADS, u32(keys.y - first));
        // For a key or value that is not there the first one is loaded, but not added, not even times zero. That keeps loads from
        // waiting for each other.
#each N EARLY
        let place_$N = value_places[min(team + $Nu * TEAMS, THREADS - 1u)];
        let early_$N = value4(select(place_$N, 0u, place_$N == NONE), column);
#endeach
        // Four threads take the keys k, k + THREADS / 4 and so on.
        let k = vec4<u32>(lid / 4u) + vec4<u32>(0u, 1u, 2u, 3u) * (THREADS / 4u);
        if (k.x < count) {
            let places = vec4<u32>(key_places[k.x], key_places[k.y], key_places[k.z], key_places[k.w]);
            let products = products_with(select(places, vec4<u32>(), places == vec4<u32>(NONE)), lid % 4u);
            for (var i = 0u; i < 4u; i += 1u) { parts[4u * k[i] + lid % 4u] = products[i]; }
        }
        workgroupBarrier();
        var score = minus_infinity();
        if (visible) {
            let of_four = vec4<f32>(parts[4u * lid], parts[4u * lid + 1u], parts[4u * lid + 2u], parts[4u * lid + 3u]);
            score = score_of_product((of_four.x + of_four.y) + (of_four.z + of_four.w), position, key, head);
        }
        let next = max(largest, largest_of_group(score, lid));
        var weight = 0.0;
        if (visible) { weight = exp_of(score - next); }
        // Before the first visible key there is nothing to rescale.
        var rescale = 1.0;
        if (!is_minus_infinity(largest)) { rescale = exp_of(largest - next); }
        total = total * rescale + weight;
        weights[lid] = weight;
        workgroupBarrier();
        if (team < TEAMS) {
            for (var round = 0u; round < ROUNDS; round += 1u) { sums[round] *= rescale; }
#each N EARLY
            let key_$N = team + $Nu * TEAMS;
            if (key_$N < count && place_$N != NONE && weights[key_$N] != 0.0) { sums[0] += weights[key_$N] * early_$N; }
#endeach
            for (var round = 0u; round < ROUNDS; round += 1u) {
                let quad = column + round * COLUMNS;
                if (4u * quad >= P.value_size) { break; }
                for (var k = team + select(0u, EARLY * TEAMS, round == 0u); k < count; k += LATE * TEAMS) {
#each N LATE
                    let at_$N = min(k + $Nu * TEAMS, THREADS - 1u);
                    let place_$N = value_places[at_$N];
                    let value_$N = value4(select(place_$N, 0u, place_$N == NONE), quad);
#endeach
#each N LATE
                    if (k + $Nu * TEAMS < count && place_$N != NONE && weights[at_$N] != 0.0) { sums[round] += weights[at_$N] * value_$N; }
#endeach
                }
            }
        }
        largest = next;
    }
    total = sum_of_group(total, lid);
    for (var round = 0u; round < ROUNDS; round += 1u) {
        workgroupBarrier();
        for (var i = 0u; i < 4u; i += 1u) { parts[4u * lid + i] = sums[round][i]; }
        workgroupBarrier();
        // An element for each thread.
        for (var i = lid; i < 4u * COLUMNS; i += THREADS) {
            let d = 4u * COLUMNS * round + i;
            if (found == 0u || d >= P.value_size) { continue; }
            var sum = 0.0;
            for (var other = 0u; other < TEAMS; other += 1u) { sum += parts[4u * COLUMNS * other + i]; }
            var value = 0.0;
            if (total != 0.0) { value = sum / total; }
            y_set(row * P.y_stride + head * P.value_size + d, value);
        }
    }
#if PAGED
    if (found > 0u && lid == 0u) {
        var log_sum = minus_infinity();
        if (total != 0.0) { log_sum = largest + ln_of(total); }
        log_sum_exp_set(row * P.log_sum_exp_stride + head, log_sum);
    }
#endif
}
