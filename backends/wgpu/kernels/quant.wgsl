// Quantised activations: a scale and signed bytes for each row, and linear layers over them with exact integer sums.

#if QUANTISE
// A workgroup of 128 threads quantises a row: the largest magnitude, then four integers per thread at a time.
//
// Bytes: x twice (the second time from a cache) and y once.

// What reduce.wgsl compares.
alias Reduced = u32;
const SUMS: u32 = 1u;
const THREADS: u32 = 128u;

var<workgroup> rows_shared: u32;

// The quotient of two positive finite floats, rounded to nearest with ties to even, as its bits. The built-in division may be off by
// 2.5 units in the last place, and the result of this op is exact.
fn exact_quotient(a: u32, b: u32) -> u32 {
    if (a == 0u) { return 0u; }
    let x = normalised(a);
    let y = normalised(b);
    // 26 bits of the quotient of the significands, which lies between 1/2 and 2, by long division.
    var rest = x.x;
    var q = 0u;
    for (var i = 0u; i < 26u; i += 1u) {
        q = q << 1u;
        if (rest >= y.x) {
            rest -= y.x;
            q |= 1u;
        }
        rest = rest << 1u;
    }
    let below_one = q < (1u << 25u);
    var exponent = i32(x.y) - i32(y.y) - select(0, 1, below_one);
    var shift = select(2u, 1u, below_one);
    // A quotient below the smallest normal number keeps fewer bits.
    let subnormal = exponent < -126;
    if (subnormal) { shift = min(shift + u32(-126 - exponent), 30u); }
    var significand = q >> shift;
    let dropped = q & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    if (dropped > half || (dropped == half && (rest != 0u || (significand & 1u) == 1u))) { significand += 1u; }
    if (subnormal) { return significand; }
    // A significand that was rounded up to the next power of two carries into the exponent.
    return (u32(exponent + 126) << 23u) + significand;
}

// The significand of a positive float with its leading one at bit 23, and the exponent of that bit, both modulo 2^32.
fn normalised(bits: u32) -> vec2<u32> {
    let exponent = bits >> 23u;
    let significand = bits & 0x7fffffu;
    if (exponent > 0u) { return vec2<u32>(significand | 0x800000u, exponent - 127u); }
    let shift = countLeadingZeros(significand) - 8u;
    return vec2<u32>(significand << shift, bitcast<u32>(-126 - i32(shift)));
}

// The nearest integer to a float that is not negative, ties to even, and at most 127.
fn nearest(bits: u32) -> u32 {
    // Below 2^-2 everything is 0; from 2^7 on everything is 127.
    if (bits < 0x3e800000u) { return 0u; }
    if (bits >= 0x43000000u) { return 127u; }
    let shift = 150u - (bits >> 23u);
    let significand = (bits & 0x7fffffu) | 0x800000u;
    let whole = significand >> shift;
    let dropped = significand & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    let up = dropped > half || (dropped == half && (whole & 1u) == 1u);
    return min(whole + u32(up), 127u);
}

// The signed byte for x, as its lowest 8 bits.
fn quantised(x: f32, scale: u32) -> u32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7fffffffu;
    if (scale == 0u) { return 0u; }
    var integer = 0u;
    // If the approximate quotient is far enough from the middle between two integers, the exact one rounds to the same integer.
    let approximate = bitcast<f32>(magnitude) / bitcast<f32>(scale);
    let part = fract(approximate);
    if (scale >= 0x0d800000u && approximate < 126.0 && abs(part - 0.5) > 0.001) {
        integer = u32(approximate + 0.5);
    } else {
        integer = nearest(exact_quotient(magnitude, scale));
    }
    return select(integer, 0u - integer, (bits >> 31u) == 1u) & 0xffu;
}

@compute @workgroup_size(128)
fn quant_per_token(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let row = flat_group(wid, nwg);
    if (lid == 0u) { rows_shared = min(x_live(), min(y_live(), scales_live())); }
    if (row >= workgroupUniformLoad(&rows_shared)) { return; }
    let x = row * P.x_stride;
    // Magnitudes are compared as bits: the order is the same, and adapters do not flush subnormal bits.
    var largest = 0u;
    for (var i = lid; i < P.columns; i += 128u) { largest = max(largest, bitcast<u32>(x_get(x + i)) & 0x7fffffffu); }
    // The divisor is 127.
    let scale = exact_quotient(largest_of_group(largest, lid), 0x42fe0000u);
    if (lid == 0u) { scales_set(row * P.scales_stride, bitcast<f32>(scale)); }
    let y = row * P.y_stride;
    for (var i = 4u * lid; i < P.columns; i += 512u) {
        var word = 0u;
        let count = min(P.columns - i, 4u);
        for (var j = 0u; j < count; j += 1u) { word |= quantised(x_get(x + i + j), scale) << (8u * j); }
        if (count == 4u && (y + i) % 4u == 0u) {
            atomicStore(&y_data[(y + i) / 4u], word);
        } else {
            for (var j = 0u; j < count; j += 1u) { y_set(y + i + j, word >> (8u * j)); }
        }
    }
}
#endif

#if PRODUCT
// The weight holds integers from 0 to 255 for -128 to 127; flipping the highest bits gives signed bytes.
fn signed_bytes(vector: vec4<u32>) -> vec4<u32> {
    return vector ^ vec4<u32>(0x80808080u);
}

// Four bytes of x from byte `at` on; the first `count` belong to the row, the others are replaced by zeros.
fn x_word(at: u32, count: u32) -> u32 {
#if ALIGNED
    let word = x_get(at / 4u);
#else
    let shift = 8u * (at % 4u);
    var word = x_get(at / 4u) >> shift;
    if (at % 4u + min(count, 4u) > 4u) { word |= x_get(at / 4u + 1u) << (32u - shift); }
#endif
    if (count >= 4u) { return word; }
    return word & ((1u << (8u * count)) - 1u);
}

// Sixteen bytes of a row of x from a column on; zeros past the last column.
fn x16(row: u32, column: u32) -> vec4<u32> {
    var words = vec4<u32>();
    for (var i = 0u; i < 4u; i += 1u) {
        let k = column + 4u * i;
        if (k < P.inputs) { words[i] = x_word(row * P.x_stride + k, P.inputs - k); }
    }
    return words;
}

fn dot16(x: vec4<u32>, w: vec4<u32>) -> i32 {
    return dot4I8Packed(x.x, w.x) + dot4I8Packed(x.y, w.y) + dot4I8Packed(x.z, w.z) + dot4I8Packed(x.w, w.w);
}

var<workgroup> live_shared: u32;

fn shared_rows(lid: u32) -> u32 {
    if (lid == 0u) { live_shared = min(min(x_live(), y_live()), scales_live()); }
    return workgroupUniformLoad(&live_shared);
}

fn finish(row: u32, unit: u32, sums: vec4<i32>) {
    let x_scale = scales_get(row * P.scales_stride);
    for (var i = 0u; i < 4u; i += 1u) {
        let output = 4u * unit + i;
        if (output >= P.outputs) { break; }
        var y = 0.0;
        if (P.inputs > 0u) { y = scaled(sums[i], x_scale, w_affine(output, 0u).x); }
        if (bias_here) { y += bias_get(output); }
        y_set(row * P.y_stride + output, y);
    }
}

// The product of an exact sum with two scales. A sum may have more bits than an f32, so it is split into two parts.
fn scaled(sum: i32, x_scale: f32, w_scale: f32) -> f32 {
    let low = sum & 0xffff;
    return (f32(sum - low) * w_scale + f32(low) * w_scale) * x_scale;
}

#if FEW
// For few rows: one workgroup per four outputs of up to ROWS rows. Its threads divide the columns.

// What reduce.wgsl adds up.
alias Reduced = vec4<i32>;
const SUMS: u32 = ROWS;

@compute @workgroup_size(THREADS)
fn linear_w8a8_few(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let group = flat_group(wid, nwg);
    let unit = P.first_unit + group % P.units;
    let first = group / P.units * ROWS;
    let rows = shared_rows(lid);
    if (first >= rows) { return; }
    let outputs = min(4u * unit + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(P.w_first + P.w_rows - 1u));
    var sums = array<vec4<i32>, ROWS>();
    for (var v = lid; v < P.w_row_words / 4u; v += THREADS) {
        let a = signed_bytes(w_vector(outputs.x, v));
        let b = signed_bytes(w_vector(outputs.y, v));
        let c = signed_bytes(w_vector(outputs.z, v));
        let d = signed_bytes(w_vector(outputs.w, v));
        for (var r = 0u; r < ROWS; r += 1u) {
            let x = x16(min(first + r, rows - 1u), 16u * v);
            sums[r] += vec4<i32>(dot16(x, a), dot16(x, b), dot16(x, c), dot16(x, d));
        }
    }
    for (var r = 0u; r < ROWS; r += 1u) { reduced[r * THREADS + lid] = sums[r]; }
    add_up(lid);
    if (lid < ROWS && first + lid < rows) { finish(first + lid, unit, total_of(lid)); }
}
#endif

#if MANY
// For many rows: a workgroup of 256 threads computes a tile of 64 rows by 64 outputs, four by four per thread. Tiles of 64
// columns of both factors are staged in workgroup memory, four columns per word.
var<workgroup> x_tile: array<array<u32, 68>, 16>;
var<workgroup> w_tile: array<array<u32, 68>, 16>;

@compute @workgroup_size(256)
fn linear_w8a8_many(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let tile = flat_group(wid, nwg);
    let tiles = (P.units + 15u) / 16u;
    let first_unit = tile % tiles * 16u;
    let first_row = tile / tiles * 64u;
    let rows = shared_rows(lid);
    if (first_row >= rows) { return; }
    let loaded = lid / 4u;
    let part = lid % 4u;
    let row = lid / 16u * 4u;
    let column = lid % 16u * 4u;
    let output = 4u * (P.first_unit + first_unit) + loaded;
    var sums = array<vec4<i32>, 4>();
    for (var k = 0u; k < P.inputs; k += 64u) {
        var x = vec4<u32>();
        var w = vec4<u32>();
        if (k + 16u * part < P.inputs) {
            if (first_row + loaded < rows) { x = x16(first_row + loaded, k + 16u * part); }
            if (output - P.w_first < P.w_rows) { w = signed_bytes(w_vector(output, k / 16u + part)); }
        }
        workgroupBarrier();
        for (var i = 0u; i < 4u; i += 1u) {
            x_tile[4u * part + i][loaded] = x[i];
            w_tile[4u * part + i][loaded] = w[i];
        }
        workgroupBarrier();
        for (var i = 0u; i < 16u; i += 1u) {
            let w4 = vec4<u32>(w_tile[i][column], w_tile[i][column + 1u], w_tile[i][column + 2u], w_tile[i][column + 3u]);
            for (var r = 0u; r < 4u; r += 1u) {
                let x1 = x_tile[i][row + r];
                sums[r] += vec4<i32>(dot4I8Packed(x1, w4.x), dot4I8Packed(x1, w4.y), dot4I8Packed(x1, w4.z), dot4I8Packed(x1, w4.w));
            }
        }
    }
    let unit = first_unit + lid % 16u;
    if (unit >= P.units) { return; }
    for (var i = 0u; i < 4u; i += 1u) {
        if (first_row + row + i >= rows) { break; }
        finish(first_row + row + i, P.first_unit + unit, sums[i]);
    }
}
#endif
#endif
