// Attention over the paged KV cache or within sequences. One workgroup per head and row. It processes the keys in tiles of one
// key per thread: each thread computes the score of its key. Then teams of 64 threads take 64 keys of the tile each: a thread
// sums the weighted values of every 64th element of the result. The sums of the teams are added at the end. Softmax is online:
// sums are rescaled when a tile has a larger score than all earlier ones.

#if VECTORS
var<workgroup> query_shared: array<vec4<f32>, QUADS>;
#else
var<workgroup> query_shared: array<f32, KEY_SIZE>;
#endif
var<workgroup> weights: array<f32, THREADS>;
// The value row of each key of a tile.
var<workgroup> places: array<u32, THREADS>;
var<workgroup> reduced: array<f32, THREADS>;
var<workgroup> rows_shared: u32;
var<workgroup> sequence_shared: atomic<u32>;
var<workgroup> keys_shared: vec2<i32>;

fn largest_of_group(value: f32, lid: u32) -> f32 {
    workgroupBarrier();
    reduced[lid] = value;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (lid < half) { reduced[lid] = max(reduced[lid], reduced[lid + half]); }
        workgroupBarrier();
    }
    return reduced[0];
}

fn sum_of_group(value: f32, lid: u32) -> f32 {
    workgroupBarrier();
    reduced[lid] = value;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (lid < half) { reduced[lid] += reduced[lid + half]; }
        workgroupBarrier();
    }
    return reduced[0];
}

fn sequences() -> u32 {
    let count = min(start_live(), queries_live());
#if PAGED
    return min(count, min(lengths_live(), tables_live()));
#else
    return count;
#endif
}

// The product of the query and a key.
fn product_with(key_at: u32) -> f32 {
    var product = 0.0;
#if VECTORS
    for (var d = 0u; d < QUADS; d += 1u) { product += dot(query_shared[d], key_get4(key_at / 4u + d)); }
#else
    for (var d = 0u; d < P.key_size; d += 1u) { product += query_shared[d] * key_get(key_at + d); }
#endif
    return product;
}

// The weighted sum of element `d` of the values of four keys of a tile.
fn values_of(key: u32, d: u32) -> f32 {
    let w = vec4<f32>(weights[key], weights[key + 1u], weights[key + 2u], weights[key + 3u]);
    let v = vec4<f32>(
        value_get(places[key] + d), value_get(places[key + 1u] + d), value_get(places[key + 2u] + d), value_get(places[key + 3u] + d));
    let products = select(w * v, vec4<f32>(), w == vec4<f32>());
    return (products.x + products.y) + (products.z + products.w);
}

@compute @workgroup_size(THREADS)
fn attention(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let row = group / P.heads;
    let head = group % P.heads;
    if (lid == 0u) {
        rows_shared = min(query_live(), y_live());
#if PAGED
        rows_shared = min(rows_shared, log_sum_exp_live());
#endif
#if EXPLICIT
        rows_shared = min(rows_shared, mask_live());
#endif
        atomicStore(&sequence_shared, 0u);
    }
    if (row >= workgroupUniformLoad(&rows_shared)) { return; }
    // The index of the row's sequence plus one; 0 if it belongs to none.
    for (var s = lid; s < sequences(); s += THREADS) {
        let start = start_get(s * P.start_stride);
        let count = queries_get(s * P.queries_stride);
#if PAGED
        // The other sequences are those of attention_tiled.wgsl.
        if (u32(count) >= P.many) { continue; }
#endif
        if (start >= 0 && count > 0 && row >= u32(start) && row - u32(start) < u32(count)) { atomicMax(&sequence_shared, s + 1u); }
    }
    workgroupBarrier();
    let found = atomicLoad(&sequence_shared);
    let sequence = max(found, 1u) - 1u;
    var start = 0;
    var position = 0;
    // The position of the sequence's first row of this step.
    var first_position = 0;
    if (found > 0u) {
        start = start_get(sequence * P.start_stride);
        let offset = i32(row) - start;
        var length = queries_get(sequence * P.queries_stride);
#if PAGED
        let kv_length = lengths_get(sequence * P.lengths_stride);
        first_position = kv_length - length;
        // The block table has pages for this many keys at most. The product is computed in f32 because it may exceed 32 bits.
        length = max(kv_length, 0);
        if (f32(P.blocks) * f32(P.block) < 2147483000.0) { length = min(length, i32(P.blocks * P.block)); }
#else
        length = min(length, max(i32(min(key_live(), value_live())) - start, 0));
#endif
        position = first_position + offset;
        if (lid == 0u) {
            var low = 0;
            var high = length;
#if CAUSAL
            high = min(high, position + 1);
#endif
            if (P.window > 0u) { low = max(low, position - i32(min(P.window, 0x3fffffffu)) + 1); }
            keys_shared = vec2<i32>(low, high);
        }
    } else if (lid == 0u) {
        keys_shared = vec2<i32>(0, -1);
    }
    let keys = workgroupUniformLoad(&keys_shared);
    let query_at = row * P.query_stride + head * P.key_size;
#if VECTORS
    for (var d = lid; d < QUADS; d += THREADS) { query_shared[d] = query_get4(query_at / 4u + d); }
#else
    for (var d = lid; d < P.key_size; d += THREADS) { query_shared[d] = query_get(query_at + d); }
#endif
    workgroupBarrier();
    let kv_head = head / P.group;

    var largest = minus_infinity();
    var total = 0.0;
    if (sinks_here) {
        largest = sinks_get(head);
        // A sink of minus infinity has no weight.
        total = select(1.0, 0.0, is_minus_infinity(largest));
    }
    var sums = array<f32, VALUES>();
    let stored = value_live() > 0u;
    let lane = lid % 64u;
    let team = lid / 64u * 64u;
    for (var first = keys.x; first < keys.y; first += i32(THREADS)) {
        let key = first + i32(lid);
        var visible = key < keys.y;
        var score = minus_infinity();
        var value_at = 0u;
        if (visible) {
            var key_at = 0u;
#if PAGED
            let page = tables_get(sequence * P.tables_stride + u32(key) / P.block);
            visible = page >= 0 && u32(page) < min(key_live(), value_live());
            let slot = u32(key) % P.block;
            key_at = u32(page) * P.key_stride + kv_head * P.key_head_stride + slot * P.key_slot_stride;
            value_at = u32(page) * P.value_stride + kv_head * P.value_head_stride + slot * P.value_slot_stride;
#else
            key_at = u32(start + key) * P.key_stride + kv_head * P.key_size;
            value_at = u32(start + key) * P.value_stride + kv_head * P.value_size;
#endif
#if BIDIRECTIONAL
#if !PAGED
            if (P.window > 0u && key - position >= i32(min(P.window, 0x3fffffffu))) { visible = false; }
#endif
#endif
#if EXPLICIT
            let token = key - first_position;
            if (token >= 0) {
                let word = u32(token) / 32u;
                visible = visible && word < P.mask_words && ((mask_get(row * P.mask_stride + word) >> (u32(token) % 32u)) & 1u) == 1u;
            }
#endif
            if (visible) {
                score = P.scale * product_with(key_at);
                if (P.softcap > 0.0) { score = P.softcap * tanh_of(score / P.softcap); }
                if (alibi_here) {
                    var distance = position - key;
#if BIDIRECTIONAL
#if !PAGED
                    distance = abs(distance);
#endif
#endif
                    score -= alibi_get(head) * f32(distance);
                }
            }
        }
        // The barriers inside also separate this tile from the reads of the previous one.
        let next = max(largest, largest_of_group(score, lid));
        var weight = 0.0;
        if (visible) { weight = exp_of(score - next); }
        weights[lid] = weight;
        places[lid] = select(0u, value_at, visible);
        // Before the first visible key there is nothing to rescale.
        var rescale = 1.0;
        if (!is_minus_infinity(largest)) { rescale = exp_of(largest - next); }
        total = total * rescale + sum_of_group(weight, lid);
        for (var i = 0u; i < VALUES; i += 1u) {
            let d = lane + 64u * i;
            if (d >= P.value_size) { break; }
            var sum = sums[i] * rescale;
            // Eight keys at a time: all their values are loaded first, so that no load waits for a weight. For a masked key,
            // value 0 is loaded instead, but not added, not even times zero.
            let end = select(team, min(team + 64u, u32(keys.y - first)), stored);
            for (var j = team; j < end; j += 8u) {
                sum += values_of(j, d) + values_of(j + 4u, d);
            }
            sums[i] = sum;
        }
        largest = next;
        workgroupBarrier();
    }
    for (var i = 0u; i < VALUES; i += 1u) {
        workgroupBarrier();
        reduced[lid] = sums[i];
        workgroupBarrier();
        let d = lid + 64u * i;
        if (found > 0u && lid < 64u && d < P.value_size) {
            var sum = 0.0;
            for (var other = lid; other < THREADS; other += 64u) { sum += reduced[other]; }
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
