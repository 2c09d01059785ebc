// The router of a mixture of experts, the grouping of assignments by expert, and the weighted sum of a token's experts.

#if ROUTE
// What reduce.wgsl adds up.
alias Reduced = f32;
const SUMS: u32 = 1u;
const THREADS: u32 = 64u;

// One workgroup of 64 threads per row. Logits, keys and the experts that are still selectable are in workgroup memory.
var<workgroup> logit: array<f32, EXPERTS>;
var<workgroup> key: array<f32, EXPERTS>;
var<workgroup> free: array<u32, EXPERTS>;
var<workgroup> group_key: array<f32, GROUPS>;
var<workgroup> group_free: array<u32, GROUPS>;
var<workgroup> chosen: array<i32, SLOTS>;
var<workgroup> share: array<f32, SLOTS>;
var<workgroup> reduced_index: array<u32, THREADS>;
var<workgroup> unsound_shared: atomic<u32>;
var<workgroup> rows_shared: u32;

// The index of the largest of all threads' values, the lowest of equals; 0 if all indices are NONE.
fn index_of_largest(value: f32, index: u32, lid: u32) -> u32 {
    workgroupBarrier();
    reduced[lid] = value;
    reduced_index[lid] = index;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (lid < half) {
            let other = reduced_index[lid + half];
            let own = reduced_index[lid];
            if (other != NONE) {
                let a = reduced[lid + half];
                let b = reduced[lid];
                if (own == NONE || a > b || (a == b && other < own)) {
                    reduced[lid] = a;
                    reduced_index[lid] = other;
                }
            }
        }
        workgroupBarrier();
    }
    return select(reduced_index[0], 0u, reduced_index[0] == NONE);
}

fn largest_free_expert(lid: u32) -> u32 {
    var best = NONE;
    var value = 0.0;
    for (var e = lid; e < EXPERTS; e += 64u) {
        if (free[e] != 0u && (best == NONE || key[e] > value)) {
            best = e;
            value = key[e];
        }
    }
    return index_of_largest(value, best, lid);
}

fn keep_best_groups(lid: u32) {
    let size = EXPERTS / GROUPS;
    for (var g = lid; g < GROUPS; g += 64u) {
        var first = minus_infinity();
        var second = first;
        for (var i = 0u; i < size; i += 1u) {
            let value = key[g * size + i];
            if (value > first) {
                second = first;
                first = value;
            } else if (value > second) {
                second = value;
            }
        }
#if TOP_TWO
        if (size > 1u) { first += second; }
#endif
        group_key[g] = first;
        group_free[g] = 1u;
    }
    for (var e = lid; e < EXPERTS; e += 64u) { free[e] = 0u; }
    workgroupBarrier();
    for (var i = 0u; i < P.top_groups; i += 1u) {
        var best = NONE;
        var value = 0.0;
        for (var g = lid; g < GROUPS; g += 64u) {
            if (group_free[g] != 0u && (best == NONE || group_key[g] > value)) {
                best = g;
                value = group_key[g];
            }
        }
        let kept = index_of_largest(value, best, lid);
        if (lid == 0u) { group_free[kept] = 0u; }
        for (var e = lid; e < size; e += 64u) { free[kept * size + e] = 1u; }
        workgroupBarrier();
    }
}

// Sets `key` to the scores of all experts.
fn score_all(largest: f32, lid: u32) {
#if SOFTMAX
    var sum = 0.0;
    for (var e = lid; e < EXPERTS; e += 64u) {
        key[e] = exp_of(logit[e] - largest);
        sum += key[e];
    }
    let total = sum_of_group(sum, lid);
    for (var e = lid; e < EXPERTS; e += 64u) { key[e] = key[e] / total; }
#endif
#if SIGMOID
    for (var e = lid; e < EXPERTS; e += 64u) { key[e] = 1.0 / (1.0 + exp_of(-logit[e])); }
#endif
#if BY_LOGIT
    for (var e = lid; e < EXPERTS; e += 64u) { key[e] = logit[e]; }
#endif
    workgroupBarrier();
}

// The share of an expert in the softmax over the selectable experts near it.
fn share_of_near(expert: u32, lid: u32) -> f32 {
    let top = logit[expert];
    var sum = 0.0;
    for (var e = lid; e < EXPERTS; e += 64u) {
        let z = logit[e];
        if (e == expert) {
            sum += 1.0;
        } else if (free[e] != 0u && top - z <= P.threshold * max(abs(z), top)) {
            sum += exp_of(z - top);
        }
    }
    return 1.0 / sum_of_group(sum, lid);
}

fn is_expert(expert: i32) -> bool {
    return expert >= 0 && u32(expert) < EXPERTS;
}

@compute @workgroup_size(64)
fn moe_route(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let row = flat_group(wid, nwg);
    if (lid == 0u) {
        rows_shared = min(logits_live(), min(experts_live(), weights_live()));
        if (ids_here) { rows_shared = min(rows_shared, ids_live()); }
        atomicStore(&unsound_shared, 0u);
    }
    if (row >= workgroupUniformLoad(&rows_shared)) { return; }
    var own = minus_infinity();
    for (var e = lid; e < EXPERTS; e += 64u) {
        var z = logits_get(row * P.logits_stride + e);
        if (bias_here) { z += bias_get(e); }
        logit[e] = z;
        free[e] = 1u;
        if (is_nan(z) || bitcast<u32>(z) == 0x7f800000u) { atomicStore(&unsound_shared, 1u); }
        own = max(own, z);
    }
    let largest = largest_of_group(own, lid);
    // A row is invalid if it has a NaN or plus infinity, or only minus infinities.
    let unsound = atomicLoad(&unsound_shared) != 0u || is_minus_infinity(largest);
#if IDS
    for (var j = lid; j < SLOTS; j += 64u) { chosen[j] = ids_get(row * P.ids_stride + j); }
    workgroupBarrier();
#else
#if COMPARE_LOGITS
    for (var e = lid; e < EXPERTS; e += 64u) { key[e] = logit[e]; }
    workgroupBarrier();
#else
    score_all(largest, lid);
#endif
    if (selection_bias_here) {
        for (var e = lid; e < EXPERTS; e += 64u) { key[e] += selection_bias_get(e); }
        workgroupBarrier();
    }
#if GROUPED
    keep_best_groups(lid);
#endif
    for (var j = 0u; j < SLOTS; j += 1u) {
        let expert = largest_free_expert(lid);
#if SPARSE_MIXER
        let near = share_of_near(expert, lid);
        if (lid == 0u) { share[j] = near; }
#endif
        workgroupBarrier();
        if (lid == 0u) {
            free[expert] = 0u;
            chosen[j] = select(i32(expert), i32(j), unsound);
        }
        workgroupBarrier();
    }
#endif
#if SCORED
    score_all(largest, lid);
    for (var j = lid; j < SLOTS; j += 64u) {
        share[j] = 0.0;
        if (is_expert(chosen[j])) { share[j] = key[chosen[j]]; }
    }
#endif
#if OF_SELECTED
    var top = minus_infinity();
    for (var j = 0u; j < SLOTS; j += 1u) {
        if (is_expert(chosen[j])) { top = max(top, logit[chosen[j]]); }
    }
    var sum = 0.0;
    for (var j = 0u; j < SLOTS; j += 1u) {
        if (is_expert(chosen[j])) { sum += exp_of(logit[chosen[j]] - top); }
    }
    for (var j = lid; j < SLOTS; j += 64u) {
        share[j] = 0.0;
        if (is_expert(chosen[j])) { share[j] = exp_of(logit[chosen[j]] - top) / sum; }
    }
#endif
    workgroupBarrier();
    var divisor = 1.0;
#if NORM
    var total = 0.0;
    for (var j = 0u; j < SLOTS; j += 1u) { total += share[j]; }
#if CLAMPED
    divisor = max(total, P.eps);
#else
    divisor = total + P.eps;
#endif
#endif
    for (var j = lid; j < SLOTS; j += 64u) {
        let expert = chosen[j];
        var weight = 0.0;
        if (is_expert(expert)) {
            weight = share[j] / divisor * P.scale;
            if (expert_scale_here) { weight *= expert_scale_get(u32(expert)); }
            if (unsound) {
                var bits = 0x7fc00000u;
                weight = bitcast<f32>(bits);
            }
        }
        experts_set(row * P.experts_stride + j, expert);
        weights_set(row * P.weights_stride + j, weight);
    }
}
#endif

#if GROUP
// One workgroup of 256 threads per expert writes the expert's assignments; one more workgroup fills the rest of `order`. The
// first pass over all assignments counts those of earlier experts, the second writes its own in ascending order.
var<workgroup> counts: array<u32, 256>;
var<workgroup> rows_shared: u32;

// The local index of an assignment's expert; NONE if it has none on this device.
fn place_of(assignment: u32) -> u32 {
    let expert = experts_get(assignment / P.slots * P.experts_stride + assignment % P.slots);
    if (expert < 0 || u32(expert) < P.first_expert || u32(expert) - P.first_expert >= P.count) { return NONE; }
    return u32(expert) - P.first_expert;
}

fn set_order(place: u32, assignment: i32) {
    order_set(place / P.slots * P.order_stride + place % P.slots, assignment);
}

@compute @workgroup_size(256)
fn moe_group(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let own = flat_group(wid, nwg);
    if (lid == 0u) { rows_shared = min(experts_live(), order_live()); }
    let all = workgroupUniformLoad(&rows_shared) * P.slots;
    if (own > P.count) { return; }
    var before = 0u;
    for (var a = lid; a < all; a += 256u) { before += select(0u, 1u, place_of(a) < own); }
    counts[lid] = before;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (lid < half) { counts[lid] += counts[lid + half]; }
        workgroupBarrier();
    }
    var next = counts[0];
    workgroupBarrier();
    if (lid == 0u && own < starts_live()) { starts_set(own, i32(next)); }
    if (own == P.count) {
        for (var a = next + lid; a < all; a += 256u) { set_order(a, -1); }
        return;
    }
    for (var first = 0u; first < all; first += 256u) {
        let assignment = first + lid;
        var mine = false;
        if (assignment < all) { mine = place_of(assignment) == own; }
        // The running sums of the chunk's assignments to the expert.
        counts[lid] = u32(mine);
        workgroupBarrier();
        for (var step = 1u; step < 256u; step *= 2u) {
            var sum = counts[lid];
            if (lid >= step) { sum += counts[lid - step]; }
            workgroupBarrier();
            counts[lid] = sum;
            workgroupBarrier();
        }
        if (mine) { set_order(next + counts[lid] - 1u, i32(assignment)); }
        next += counts[255];
        workgroupBarrier();
    }
}
#endif

#if COMBINE
// One thread per element of the result.
@compute @workgroup_size(64)
fn moe_combine(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let index = flat_group(wid, nwg) * 64u + lid;
    let row = index / P.columns;
    let column = index % P.columns;
    if (row >= min(min(x_live(), y_live()), min(weights_live(), experts_live()))) { return; }
    var sum = 0.0;
    for (var j = 0u; j < P.slots; j += 1u) {
        let expert = experts_get(row * P.experts_stride + j);
        if (expert < 0 || u32(expert) < P.first_expert || u32(expert) - P.first_expert >= P.count) { continue; }
        sum += weights_get(row * P.weights_stride + j) * x_get(row * P.x_stride + j * P.columns + column);
    }
    y_set(row * P.y_stride + column, sum);
}
#endif
