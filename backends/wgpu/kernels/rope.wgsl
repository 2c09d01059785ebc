// Rotary position embedding.

// The sine and cosine of an angle, to f32 accuracy for angles up to 2^31. The built-in functions are accurate only near 0.
fn sine_and_cosine(angle: f32) -> vec2<f32> {
    let a = abs(angle);
    var r = a;
    var quadrant = 0u;
    if (!(a < 2147483648.0)) {
        // Infinite or NaN angles, or angles that no position and frequency below 1 give.
        return vec2<f32>(angle - angle, angle - angle);
    }
    if (a > 0.78539816) {
        // a / (2 pi) as a fixed-point fraction of a turn: the 24-bit mantissa times the bits of 1 / (2 pi) that matter to it.
        let bits = bitcast<u32>(a);
        let mantissa = (bits & 0x007fffffu) | 0x00800000u;
        let exponent = i32(bits >> 23u) - 150;
        var high = 0x28be60dbu;
        var low = 0x9391054au;
        if (exponent > 0) {
            let k = u32(exponent);
            high = (0x28be60dbu << k) | (0x9391054au >> (32u - k));
            low = (0x9391054au << k) | (0x7f09d5f4u >> (32u - k));
        } else if (exponent < 0) {
            let k = u32(-exponent);
            high = 0x28be60dbu >> k;
            low = (0x28be60dbu << (32u - k)) | (0x9391054au >> k);
        }
        let turn = mantissa * high + multiply_high(mantissa, low);
        quadrant = (turn + 0x20000000u) >> 30u;
        r = f32(bitcast<i32>(turn - (quadrant << 30u))) * 1.4629180792671596e-9;
    }
    let z = r * r;
    let s = r + r * z * ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1);
    let c = 1.0 - 0.5 * z + z * z * ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2);
    var both = select(vec2<f32>(s, c), vec2<f32>(c, -s), (quadrant & 1u) == 1u);
    if ((quadrant & 2u) == 2u) { both = -both; }
    if (angle < 0.0) { both.x = -both.x; }
    return both;
}

#if ROPE
// A thread makes one element of the result: it reads the pair that the element belongs to.
@compute @workgroup_size(64)
fn rope(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let index = flat_group(wid, nwg) * 64u + lid;
    let row = index / P.columns;
    let column = index % P.columns;
    if (row >= min(min(x_live(), y_live()), positions_live())) { return; }
    let position = positions_get(row * P.positions_stride);
    if (position < 0) { return; }
    let element = column % P.head;
    let x = row * P.x_stride + column;
    let y = row * P.y_stride + column;
    if (element >= 2u * P.pairs) {
        y_data[y] = x_data[x];
        return;
    }
#if HALVES
    let pair = element % P.pairs;
    let second = element >= P.pairs;
    let partner = select(x + P.pairs, x - P.pairs, second);
#else
    let pair = element / 2u;
    let second = element % 2u == 1u;
    let partner = select(x + 1u, x - 1u, second);
#endif
    let rotation = sine_and_cosine(f32(position) * frequencies_get(pair));
    let across = select(-rotation.x, rotation.x, second);
    y_set(y, P.scale * (x_get(x) * rotation.y + x_get(partner) * across));
}
#endif
