// Attention over the paged KV cache or within sequences. A workgroup of 64 threads makes one head of one row: it takes the keys in
// tiles of 64, a thread scores one key of a tile, and a thread sums the values of every 64th element of the result. Softmax is
// online: the sums are rescaled where a tile has a larger score than those before.

var<workgroup> query_shared: array<f32, KEY_SIZE>;
var<workgroup> weights: array<f32, 64>;
// The value row of each key of a tile.
var<workgroup> places: array<u32, 64>;
var<workgroup> reduced: array<f32, 64>;
var<workgroup> rows_shared: u32;
var<workgroup> sequence_shared: atomic<u32>;
var<workgroup> keys_shared: vec2<i32>;

fn largest_of_group(value: f32, lid: u32) -> f32 {
    workgroupBarrier();
    reduced[lid] = value;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (lid < half) { reduced[lid] = max(reduced[lid], reduced[lid + half]); }
        workgroupBarrier();
    }
    return reduced[0];
}

fn sum_of_group(value: f32, lid: u32) -> f32 {
    workgroupBarrier();
    reduced[lid] = value;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
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

@compute @workgroup_size(64)
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
    // The number of the row's sequence plus one; 0 if it has none.
    for (var s = lid; s < sequences(); s += 64u) {
        let start = start_get(s * P.start_stride);
        let count = queries_get(s * P.queries_stride);
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
        // The table has pages for this many keys at most. The product is taken in floats because it may exceed 32 bits.
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
    for (var d = lid; d < P.key_size; d += 64u) {
        query_shared[d] = query_get(row * P.query_stride + head * P.key_size + d);
    }
    workgroupBarrier();
    let kv_head = head / P.group;

    var largest = minus_infinity();
    var total = 0.0;
    if (sinks_here) {
        largest = sinks_get(head);
        total = 1.0;
    }
    var sums = array<f32, VALUES>();
    for (var first = keys.x; first < keys.y; first += 64) {
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
                var product = 0.0;
                for (var d = 0u; d < P.key_size; d += 1u) { product += query_shared[d] * key_get(key_at + d); }
                score = P.scale * product;
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
        // Barriers inside order the reads of the tile before.
        let next = max(largest, largest_of_group(score, lid));
        var weight = 0.0;
        if (visible) { weight = exp_of(score - next); }
        weights[lid] = weight;
        places[lid] = value_at;
        // Before the first visible key there is nothing to rescale.
        var rescale = 1.0;
        if (!is_minus_infinity(largest)) { rescale = exp_of(largest - next); }
        total = total * rescale + sum_of_group(weight, lid);
        for (var i = 0u; i < VALUES; i += 1u) {
            let d = lid + 64u * i;
            if (d >= P.value_size) { break; }
            var sum = sums[i] * rescale;
            // Four keys in each iteration: Mesa's software driver ends a shader's loops after 65535 iterations in all. A key that is not
            // visible has no value, not even one times zero.
            for (var j = 0u; j < 64u; j += 4u) {
                if (weights[j] != 0.0) { sum += weights[j] * value_get(places[j] + d); }
                if (weights[j + 1u] != 0.0) { sum += weights[j + 1u] * value_get(places[j + 1u] + d); }
                if (weights[j + 2u] != 0.0) { sum += weights[j + 2u] * value_get(places[j + 2u] + d); }
                if (weights[j + 3u] != 0.0) { sum += weights[j + 3u] * value_get(places[j + 3u] + d); }
            }
            sums[i] = sum;
        }
        largest = next;
        workgroupBarrier();
    }
    if (found == 0u) { return; }
    for (var i = 0u; i < VALUES; i += 1u) {
        let d = lid + 64u * i;
        if (d >= P.value_size) { break; }
        var value = 0.0;
        if (total != 0.0) { value = sums[i] / total; }
        y_set(row * P.y_stride + head * P.value_size + d, value);
    }
#if PAGED
    if (lid == 0u) {
        var log_sum = minus_infinity();
        if (total != 0.0) { log_sum = largest + ln_of(total); }
        log_sum_exp_set(row * P.log_sum_exp_stride + head, log_sum);
    }
#endif
}
