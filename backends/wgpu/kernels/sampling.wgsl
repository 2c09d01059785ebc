// From logits to tokens. A workgroup of 256 threads takes a row, but for the penalties, which are elementwise.

#if PENALTIES
@compute @workgroup_size(64)
fn logit_process(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let index = flat_group(wid, nwg) * 64u + lid;
    let row = index / P.columns;
    let token = index % P.columns;
    var rows = min(min(logits_live(), requests_live()), y_live());
    if (mask_here) { rows = min(rows, mask_live()); }
    if (row >= rows) { return; }
    var capacity = min(parameters_live(), counts_live());
    if (bias_here) { capacity = min(capacity, bias_live()); }
    let request = requests_get(row * P.requests_stride);
    if (request < 0 || u32(request) >= capacity) { return; }
    let c = u32(request);
    let parameters = c * P.parameters_stride;
    let count = counts_get(c * P.counts_stride + token);
    let n = count & 0x3fffffff;
    var x = logits_get(row * P.logits_stride + token);
    if (count != 0) {
        let penalty = parameters_get(parameters + 4u);
        if (x > 0.0) { x = x / penalty; } else { x = x * penalty; }
    }
    x -= parameters_get(parameters + 6u) * f32(n);
    if (n > 0) { x -= parameters_get(parameters + 5u); }
    if (bias_here) { x += bias_get(c * P.bias_stride + token); }
#if MASK
    if (((mask_get(row * P.mask_stride + token / 32u) >> (token % 32u)) & 1u) == 0u) { x = minus_infinity(); }
#endif
    y_set(row * P.y_stride + token, x);
}
#endif

#if ROWS
var<workgroup> best_value: array<f32, 256>;
var<workgroup> best_token: array<u32, 256>;
var<workgroup> sums: array<f32, 256>;
var<workgroup> row_count: u32;

struct Best { value: f32, token: u32 }

// The largest of the values of all threads, and of equal ones that of the lowest token. A thread without a value has token NONE.
fn best_of_group(value: f32, token: u32, lid: u32) -> Best {
    workgroupBarrier();
    best_value[lid] = value;
    best_token[lid] = token;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (lid < half) {
            let other = best_token[lid + half];
            let mine = best_token[lid];
            let larger = best_value[lid + half] > best_value[lid];
            let equal = best_value[lid + half] == best_value[lid];
            if (other != NONE && (mine == NONE || larger || (equal && other < mine))) {
                best_value[lid] = best_value[lid + half];
                best_token[lid] = other;
            }
        }
        workgroupBarrier();
    }
    return Best(best_value[0], workgroupUniformLoad(&best_token[0]));
}
#endif

#if ARGMAX
@compute @workgroup_size(256)
fn argmax(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let row = flat_group(wid, nwg);
    if (lid == 0u) { row_count = min(x_live(), ids_live()); }
    if (row >= workgroupUniformLoad(&row_count)) { return; }
    var value = 0.0;
    var token = NONE;
    for (var i = lid; i < P.columns; i += 256u) {
        let x = x_get(row * P.x_stride + i);
        if (!is_nan(x) && (token == NONE || x > value)) {
            value = x;
            token = i;
        }
    }
    let best = best_of_group(value, token, lid);
    if (lid == 0u) { ids_set(row * P.ids_stride, bitcast<i32>(best.token)); }
}
#endif

#if SAMPLE
var<workgroup> counted: atomic<u32>;
var<workgroup> total: u32;
var<workgroup> greedy_shared: u32;

// Tokens are ordered by their logit, largest first, and of equal logits by their id. The filters keep the first of this order:
// those whose key is above `key`, and those with this key and an id of at most `token`.
struct Cut { key: u32, token: u32 }

// An integer of the same order as the float. Both zeros are equal.
fn key_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (x == 0.0) { return 0x80000000u; }
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

fn keeps(cut: Cut, key: u32, token: u32) -> bool {
    return key > cut.key || (key == cut.key && token <= cut.token);
}

// Whether a logit can be drawn.
fn is_candidate(x: f32) -> bool {
    return !is_nan(x) && !is_minus_infinity(x);
}

fn sum_of_group(value: f32, lid: u32) -> f32 {
    workgroupBarrier();
    sums[lid] = value;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (lid < half) { sums[lid] += sums[lid + half]; }
        workgroupBarrier();
    }
    return workgroupUniformLoad(&sums[0]);
}

// The number of candidates that both cuts keep.
fn count_kept(row: u32, cut: Cut, lid: u32) -> u32 {
    workgroupBarrier();
    if (lid == 0u) { atomicStore(&counted, 0u); }
    workgroupBarrier();
    var count = 0u;
    for (var i = lid; i < P.columns; i += 256u) {
        let x = logits_get(row + i);
        if (is_candidate(x) && keeps(cut, key_of(x), i)) { count += 1u; }
    }
    atomicAdd(&counted, count);
    workgroupBarrier();
    if (lid == 0u) { total = atomicLoad(&counted); }
    return workgroupUniformLoad(&total);
}

fn relative(x: f32, largest: f32, temperature: f32) -> f32 {
    if (x == largest) { return 0.0; }
    return (x - largest) / temperature;
}

// The sum of e^x over the candidates that both cuts keep.
fn mass_kept(row: u32, first: Cut, second: Cut, largest: f32, temperature: f32, lid: u32) -> f32 {
    var sum = 0.0;
    for (var i = lid; i < P.columns; i += 256u) {
        let x = logits_get(row + i);
        let key = key_of(x);
        if (is_candidate(x) && keeps(first, key, i) && keeps(second, key, i)) {
            sum += exp_of(relative(x, largest, temperature));
        }
    }
    return sum_of_group(sum, lid);
}

// The cut behind the first `count` candidates.
fn cut_of_count(row: u32, count: u32, lid: u32) -> Cut {
    // The largest key that still keeps enough, and then, among equal keys, the lowest id that does.
    var cut = Cut(0u, NONE);
    for (var bit = 0x80000000u; bit > 0u; bit >>= 1u) {
        if (count_kept(row, Cut(cut.key | bit, NONE), lid) >= count) { cut.key |= bit; }
    }
    if (count_kept(row, cut, lid) <= count) { return cut; }
    var low = 0u;
    var high = P.columns - 1u;
    while (low < high) {
        let middle = low + (high - low) / 2u;
        if (count_kept(row, Cut(cut.key, middle), lid) >= count) { high = middle; } else { low = middle + 1u; }
    }
    return Cut(cut.key, low);
}

// The cut behind the first candidates of `kept` whose mass reaches `wanted`.
fn cut_of_mass(row: u32, kept: Cut, wanted: f32, largest: f32, temperature: f32, lid: u32) -> Cut {
    var cut = Cut(0u, NONE);
    for (var bit = 0x80000000u; bit > 0u; bit >>= 1u) {
        // Keys above that of the largest logit keep nothing, which must not pass for enough when nothing is wanted.
        let tried = Cut(cut.key | bit, NONE);
        if (tried.key <= key_of(largest) && mass_kept(row, kept, tried, largest, temperature, lid) >= wanted) { cut.key |= bit; }
    }
    var low = 0u;
    var high = P.columns - 1u;
    while (low < high) {
        let middle = low + (high - low) / 2u;
        if (mass_kept(row, kept, Cut(cut.key, middle), largest, temperature, lid) >= wanted) { high = middle; } else { low = middle + 1u; }
    }
    return Cut(cut.key, low);
}

// The first word of Philox4x32-10 (Salmon et al., 2011).
fn philox(key: vec2<u32>, token: u32, position: u32) -> u32 {
    var c = vec4<u32>(token, position, 0u, 0u);
    var k = key;
    for (var round = 0u; round < 10u; round += 1u) {
        let high_0 = multiply_high(0xD2511F53u, c.x);
        let high_2 = multiply_high(0xCD9E8D57u, c.z);
        c = vec4<u32>(high_2 ^ c.y ^ k.x, 0xCD9E8D57u * c.z, high_0 ^ c.w ^ k.y, 0xD2511F53u * c.x);
        k += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c.x;
}

// -ln(-ln(1 - v)) with v = (word + 0.5) / 2^32.
fn gumbel(word: u32) -> f32 {
    let scale = 2.3283064365386963e-10;
    let v = (f32(word) + 0.5) * scale;
    // Where 1 - v would lose digits of v, the series of ln(1 - v) in v keeps them.
    if (v < 0.25) { return -ln_of(-ln_near_one(-v, 0.0)); }
    return -ln_of(-ln_of((f32(~word) + 0.5) * scale));
}

@compute @workgroup_size(256)
fn sample(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let number = flat_group(wid, nwg);
    if (lid == 0u) {
        row_count = min(min(min(logits_live(), requests_live()), positions_live()), min(ids_live(), log_probability_live()));
    }
    if (number >= workgroupUniformLoad(&row_count)) { return; }
    let row = number * P.logits_stride;
    let request = requests_get(number * P.requests_stride);
    let valid = request >= 0 && u32(request) < min(parameters_live(), seeds_live());
    let c = select(0u, u32(request), valid);

    // The largest logit that is a candidate.
    var value = 0.0;
    var token = NONE;
    for (var i = lid; i < P.columns; i += 256u) {
        let x = logits_get(row + i);
        if (is_candidate(x) && (token == NONE || x > value)) {
            value = x;
            token = i;
        }
    }
    let first = best_of_group(value, token, lid);
    if (lid == 0u) {
        // 0: nothing to draw; 1: the largest; 2: draw; 4 and 8: with top-k and top-p.
        var mode = 0u;
        if (valid && first.token != NONE) {
            mode = 1u;
            if (parameters_get(c * P.parameters_stride) > 0.0) {
                mode = 2u;
                if (parameters_get(c * P.parameters_stride + 1u) >= 1.0) { mode |= 4u; }
                if (parameters_get(c * P.parameters_stride + 2u) < 1.0) { mode |= 8u; }
            }
        }
        greedy_shared = mode;
    }
    let mode = workgroupUniformLoad(&greedy_shared);
    if (mode == 0u) {
        if (lid == 0u) {
            ids_set(number * P.ids_stride, -1);
            log_probability_set(number * P.log_probability_stride, 0.0);
        }
        return;
    }
    let largest = first.value;
    var drawn = first.token;
    if (mode >= 2u) {
        let parameters = c * P.parameters_stride;
        let temperature = parameters_get(parameters);
        var by_count = Cut(0u, NONE);
        var by_mass = Cut(0u, NONE);
        if ((mode & 4u) != 0u) {
            by_count = cut_of_count(row, u32(min(parameters_get(parameters + 1u), 4294967040.0)), lid);
        }
        if ((mode & 8u) != 0u) {
            let all = mass_kept(row, by_count, by_mass, largest, temperature, lid);
            by_mass = cut_of_mass(row, by_count, parameters_get(parameters + 2u) * all, largest, temperature, lid);
        }
        let least = parameters_get(parameters + 3u);
        let seed = vec2<u32>(seeds_get(c * P.seeds_stride), seeds_get(c * P.seeds_stride + 1u));
        let position = bitcast<u32>(positions_get(number * P.positions_stride));
        var score = 0.0;
        var scored = NONE;
        for (var i = lid; i < P.columns; i += 256u) {
            let logit = logits_get(row + i);
            let key = key_of(logit);
            if (!is_candidate(logit) || !keeps(by_count, key, i) || !keeps(by_mass, key, i)) { continue; }
            let x = relative(logit, largest, temperature);
            if (least > 0.0 && i != first.token && !(exp_of(x) >= least)) { continue; }
            let sum = x + gumbel(philox(seed, i, position));
            if (scored == NONE || sum > score) {
                score = sum;
                scored = i;
            }
        }
        drawn = best_of_group(score, scored, lid).token;
    }
    var sum = 0.0;
    for (var i = lid; i < P.columns; i += 256u) {
        let x = logits_get(row + i);
        if (!is_nan(x)) { sum += exp_of(x - largest); }
    }
    let mass = sum_of_group(sum, lid);
    if (lid == 0u) {
        ids_set(number * P.ids_stride, bitcast<i32>(drawn));
        log_probability_set(number * P.log_probability_stride, logits_get(row + drawn) - largest - ln_of(mass));
    }
}
#endif
