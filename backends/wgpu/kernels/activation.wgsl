// Activations, plain and gated. One thread per element of the result.

// e^(-z^2) times a polynomial: the complementary error function of z >= 0, to a relative error of 1.2e-7 (Press et al.,
// "Numerical Recipes", section 6.2).
fn erfc_of(z: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.5 * z);
    var p = 0.17087277;
    p = p * t - 0.82215223;
    p = p * t + 1.48851587;
    p = p * t - 1.13520398;
    p = p * t + 0.27886807;
    p = p * t - 0.18628806;
    p = p * t + 0.09678418;
    p = p * t + 0.37409196;
    p = p * t + 1.00002368;
    return t * exp_of(-z * z - 1.26551223 + t * p);
}

fn activated(x: f32) -> f32 {
#if RELU
    // The built-in function may turn NaN into 0.
    if (is_nan(x)) { return x; }
    return max(x, 0.0);
#endif
#if SILU
    return x / (1.0 + exp_of(-x));
#endif
#if GELU_ERF
    let tail = 0.5 * erfc_of(abs(x) * 0.70710678118654752);
    if (x > 0.0) {
        if (tail == 0.0) { return x; }
        return x - x * tail;
    }
    return x * tail;
#endif
#if GELU_TANH
    // (1 + tanh(z)) / 2 = 1 / (1 + e^(-2 z)), without the cancellation of 1 + tanh(z) for negative z.
    let z = 0.79788456080286536 * (x + 0.044715 * x * x * x);
    return x / (1.0 + exp_of(-2.0 * z));
#endif
#if QUICK_GELU
    return x / (1.0 + exp_of(-1.702 * x));
#endif
#if TANH
    return tanh_of(x);
#endif
}

fn limited_above(x: f32) -> f32 {
    return select(x, P.limit, P.limit > 0.0 && x > P.limit);
}

fn limited(x: f32) -> f32 {
    let y = limited_above(x);
    return select(y, -P.limit, P.limit > 0.0 && y < -P.limit);
}

#if PLAIN
@compute @workgroup_size(64)
fn activation(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let index = flat_group(wid, nwg) * 64u + lid;
    let row = index / P.columns;
    let column = index % P.columns;
    if (row >= min(x_live(), y_live())) { return; }
    var x = x_get(row * P.x_stride + column);
    if (bias_here) { x += bias_get(column); }
    y_set(row * P.y_stride + column, activated(limited_above(x)));
}
#endif

#if GATED
@compute @workgroup_size(64)
fn gated_activation(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let index = flat_group(wid, nwg) * 64u + lid;
    let row = index / P.columns;
    let column = index % P.columns;
    var rows = min(gate_live(), y_live());
    if (up_here) { rows = min(rows, up_live()); }
    if (row >= rows) { return; }
    // The columns of gate and up in a packed row; the bias has the same order.
#if INTERLEAVED
    let places = vec2<u32>(2u * column, 2u * column + 1u);
#else
    let places = vec2<u32>(column, P.columns + column);
#endif
    var g = gate_get(row * P.gate_stride + places.x);
#if SEPARATE
    var u = up_get(row * P.up_stride + column);
#else
    var u = gate_get(row * P.gate_stride + places.y);
#endif
    if (bias_here) {
        g += bias_get(places.x);
        u += bias_get(places.y);
    }
    y_set(row * P.y_stride + column, activated(limited_above(g)) * (limited(u) + P.up_offset));
}
#endif
