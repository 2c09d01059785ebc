// From logits to tokens. A workgroup of THREADS threads takes a row, but for the penalties, which are elementwise.

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
var<workgroup> best_value: array<f32, THREADS>;
var<workgroup> best_token: array<u32, THREADS>;
var<workgroup> row_count: u32;

struct Best { value: f32, token: u32 }

// The largest of the values of all threads, and of equal ones that of the lowest token. A thread without a value has token NONE.
fn best_of_group(value: f32, token: u32, lid: u32) -> Best {
    workgroupBarrier();
    best_value[lid] = value;
    best_token[lid] = token;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
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
@compute @workgroup_size(THREADS)
fn argmax(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let row = flat_group(wid, nwg);
    if (lid == 0u) { row_count = min(x_live(), ids_live()); }
    if (row >= workgroupUniformLoad(&row_count)) { return; }
    var value = 0.0;
    var token = NONE;
    for (var i = lid; i < P.columns; i += THREADS) {
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
// What reduce.wgsl adds up.
alias Reduced = f32;
const SUMS: u32 = 1u;

// The weights of the tokens by a digit, the lower and the upper word of each.
var<workgroup> low_bins: array<atomic<u32>, 256>;
var<workgroup> high_bins: array<atomic<u32>, 256>;
var<workgroup> bin_sums: array<vec2<u32>, THREADS>;
var<workgroup> chosen: Bin;
var<workgroup> greedy_shared: u32;

// The digit at which the weights reach what is wanted, the weight of higher digits, and that of its own.
struct Bin { digit: u32, before: vec2<u32>, weight: vec2<u32> }

// Tokens are ordered by logit, largest first, then by id. The filters keep a prefix of this order: the tokens whose key is
// above `key`, and those with this key and an id of at most `token`.
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

// Whether a token with this logit can be sampled.
fn is_candidate(x: f32) -> bool {
    return !is_nan(x) && !is_minus_infinity(x);
}

fn relative(x: f32, largest: f32, temperature: f32) -> f32 {
    if (x == largest) { return 0.0; }
    return (x - largest) / temperature;
}

// The weight of a token in a selection, a number of 64 bits with the lower word first: 1, or its probability relative to the
// largest with 40 fractional bits. Sums of integers do not depend on their order.
fn weight_of(x: f32, by_mass: bool, largest: f32, temperature: f32) -> vec2<u32> {
    if (!by_mass) { return vec2<u32>(1u, 0u); }
    let mass = exp_of(relative(x, largest, temperature)) * 256.0;
    let whole = floor(mass);
    return vec2<u32>(u32((mass - whole) * 4294967296.0), u32(whole));
}

fn add_64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn subtract_64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn is_less_64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn from_float_64(value: f32) -> vec2<u32> {
    let high = floor(value / 4294967296.0);
    return vec2<u32>(u32(value - high * 4294967296.0), u32(high));
}

fn to_float_64(value: vec2<u32>) -> f32 {
    return f32(value.y) * 4294967296.0 + f32(value.x);
}

// The weights of the bin of a number, counted from the highest.
fn bin_of(i: u32) -> vec2<u32> {
    return vec2<u32>(atomicLoad(&low_bins[255u - i]), atomicLoad(&high_bins[255u - i]));
}

// The cut after the shortest prefix of the candidates in `kept` whose weights reach `amount`: a number of tokens, or a share of
// the probability mass.
//
// Radix selection with 8-bit digits: a histogram of the weights of the tokens that match the digits found so far gives the
// next digit. The first four digits are those of the key. If the cut falls between tokens of equal keys, four digits of the id
// follow, inverted because low ids come first.
fn cut_of(row: u32, kept: Cut, by_mass: bool, amount: f32, largest: f32, temperature: f32, lid: u32) -> Cut {
    var wanted = vec2<u32>();
    var key_found = 0u;
    var found = 0u;
    var mask = 0u;
    for (var digit = 0u; digit < 8u; digit += 1u) {
        let shift = 24u - 8u * (digit % 4u);
        workgroupBarrier();
        for (var bin = lid; bin < 256u; bin += THREADS) {
            atomicStore(&low_bins[bin], 0u);
            atomicStore(&high_bins[bin], 0u);
        }
        workgroupBarrier();
        for (var i = lid; i < P.columns; i += THREADS) {
            let x = logits_get(row + i);
            let key = key_of(x);
            let number = select(~i, key, digit < 4u);
            if (!is_candidate(x) || (number & mask) != found || !keeps(kept, key, i)) { continue; }
            if (digit >= 4u && key != key_found) { continue; }
            let weight = weight_of(x, by_mass, largest, temperature);
            let bin = (number >> shift) & 255u;
            let before = atomicAdd(&low_bins[bin], weight.x);
            let high = weight.y + select(0u, 1u, before + weight.x < before);
            if (high > 0u) { atomicAdd(&high_bins[bin], high); }
        }
        workgroupBarrier();
        // Each thread has BINS bins, counted from the highest, and computes their inclusive prefix sum.
        let first_bin = lid * BINS;
        var sum = vec2<u32>();
        for (var i = first_bin; i < min(first_bin + BINS, 256u); i += 1u) { sum = add_64(sum, bin_of(i)); }
        let own = sum;
        bin_sums[lid] = sum;
        workgroupBarrier();
        for (var distance = 1u; distance < min(THREADS, 256u); distance *= 2u) {
            if (lid >= distance) { sum = add_64(sum, bin_sums[lid - distance]); }
            workgroupBarrier();
            bin_sums[lid] = sum;
            workgroupBarrier();
        }
        if (digit == 0u) {
            let all = bin_sums[min(THREADS, 256u) - 1u];
            wanted = from_float_64(select(amount, to_float_64(all) * amount, by_mass));
            if (is_less_64(all, wanted)) { wanted = all; }
            // At least the first token is kept.
            if (wanted.x == 0u && wanted.y == 0u) { wanted.x = 1u; }
        }
        var before = subtract_64(sum, own);
        if (is_less_64(before, wanted) && !is_less_64(sum, wanted)) {
            var i = first_bin;
            for (; i < first_bin + BINS - 1u; i += 1u) {
                let up_to = add_64(before, bin_of(i));
                if (!is_less_64(up_to, wanted)) { break; }
                before = up_to;
            }
            chosen = Bin(255u - i, before, bin_of(i));
        }
        let next = workgroupUniformLoad(&chosen);
        wanted = subtract_64(wanted, next.before);
        found |= next.digit << shift;
        mask |= 255u << shift;
        if (digit == 3u) {
            key_found = found;
            // Skips digits that are zero in all ids.
            digit += min(countLeadingZeros(P.columns - 1u) / 8u, 3u);
            mask = ~(0xffffffffu >> (8u * (digit - 3u)));
            found = mask;
            if (all(next.weight == wanted)) { return Cut(key_found, NONE); }
        }
    }
    return Cut(key_found, ~found);
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
    // For small v, 1 - v would lose digits of v, so a series of ln(1 - v) is used.
    if (v < 0.25) { return -ln_of(-ln_near_one(-v, 0.0)); }
    return -ln_of(-ln_of((f32(~word) + 0.5) * scale));
}

@compute @workgroup_size(THREADS)
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
    for (var i = lid; i < P.columns; i += THREADS) {
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
            by_count = cut_of(row, by_mass, false, parameters_get(parameters + 1u), largest, temperature, lid);
        }
        if ((mode & 8u) != 0u) {
            by_mass = cut_of(row, by_count, true, parameters_get(parameters + 2u), largest, temperature, lid);
        }
        let least = parameters_get(parameters + 3u);
        let seed = vec2<u32>(seeds_get(c * P.seeds_stride), seeds_get(c * P.seeds_stride + 1u));
        let position = bitcast<u32>(positions_get(number * P.positions_stride));
        var score = 0.0;
        var scored = NONE;
        for (var i = lid; i < P.columns; i += THREADS) {
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
    for (var i = lid; i < P.columns; i += THREADS) {
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
