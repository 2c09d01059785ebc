// Functions that all shaders share.

const NONE: u32 = 0xffffffffu;

// The linear index of this workgroup in a grid of up to three dimensions.
fn flat_group(wid: vec3<u32>, nwg: vec3<u32>) -> u32 {
    return wid.x + nwg.x * (wid.y + nwg.y * wid.z);
}

// The bits of x rounded to bf16, to nearest, ties to even.
fn round_bf16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return (bits >> 16u) | 0x40u; }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

fn widen_bf16(words: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
}

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

fn is_minus_infinity(x: f32) -> bool {
    return bitcast<u32>(x) == 0xff800000u;
}

// The float with these bits. The bits are in a variable because compilers reject infinite constants.
fn minus_infinity() -> f32 {
    var bits = 0xff800000u;
    return bitcast<f32>(bits);
}

// e^x to about one unit in the last place. The built-in function may be off by as much as 3 + 2 |x| units.
fn exp_of(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    if (x <= -103.0) { return 0.0; }
    let clamped = min(x, 89.0);
    let n = round(clamped * 1.44269504088896);
    // ln 2 in two parts, of which the first has few bits, so that its product with n is exact.
    let r = (clamped - n * 0.693359375) - n * -2.12194440e-4;
    var p = 1.9875691500e-4;
    p = p * r + 1.3981999507e-3;
    p = p * r + 8.3334519073e-3;
    p = p * r + 4.1665795894e-2;
    p = p * r + 1.6666665459e-1;
    p = p * r + 5.0000001201e-1;
    let y = (p * r) * r + r + 1.0;
    // In two steps, because 2^n may be subnormal or too large for one.
    let half = i32(n) / 2;
    let rest = i32(n) - half;
    return y * power_of_two(half) * power_of_two(rest);
}

fn power_of_two(n: i32) -> f32 {
    return bitcast<f32>(u32(n + 127) << 23u);
}

// The natural logarithm of a positive number, to about one unit in the last place.
fn ln_of(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    if (bits >= 0x7f800000u) { return x; }
    if (bits == 0u) { return minus_infinity(); }
    var number = bits;
    var exponent = 0;
    if (number < 0x00800000u) {
        // Subnormal: shift the leading one to where normal numbers have theirs.
        let shift = countLeadingZeros(number) - 8u;
        number = number << shift;
        exponent = -i32(shift) + 1;
        number = (number & 0x007fffffu) | 0x00800000u;
    }
    exponent += i32(number >> 23u) - 127;
    var m = bitcast<f32>((number & 0x007fffffu) | 0x3f800000u);
    if (m > 1.41421356) {
        m = m * 0.5;
        exponent += 1;
    }
    return f32(exponent) * 0.693359375 + ln_near_one(m - 1.0, f32(exponent));
}

// ln(1 + x) for x between -0.3 and 0.42, plus the small part of e ln 2.
fn ln_near_one(x: f32, e: f32) -> f32 {
    let z = x * x;
    var p = 7.0376836292e-2;
    p = p * x - 1.1514610310e-1;
    p = p * x + 1.1676998740e-1;
    p = p * x - 1.2420140846e-1;
    p = p * x + 1.4249322787e-1;
    p = p * x - 1.6668057665e-1;
    p = p * x + 2.0000714765e-1;
    p = p * x - 2.4999993993e-1;
    p = p * x + 3.3333331174e-1;
    return x + (x * z * p - 0.5 * z + e * -2.12194440e-4);
}

fn tanh_of(x: f32) -> f32 {
    let a = abs(x);
    if (a > 10.0) { return select(1.0, -1.0, x < 0.0); }
    if (a < 0.5) {
        let z = x * x;
        var p = -5.70498872745e-3;
        p = p * z + 2.06390887954e-2;
        p = p * z - 5.37397155531e-2;
        p = p * z + 1.33314422036e-1;
        p = p * z - 3.33332819422e-1;
        return x + x * z * p;
    }
    let t = 1.0 - 2.0 / (exp_of(2.0 * a) + 1.0);
    return select(t, -t, x < 0.0);
}

// The upper 32 bits of the product of two numbers.
fn multiply_high(a: u32, b: u32) -> u32 {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let middle_a = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let middle_b = (a & 0xffffu) * (b >> 16u) + (middle_a & 0xffffu);
    return (a >> 16u) * (b >> 16u) + (middle_a >> 16u) + (middle_b >> 16u);
}
