// Rows as f16 for products with cooperative matrices, after an RMS norm if there is one. A workgroup of 256 threads per row.
//
// Rows of bf16 are multiplied by a power of two, so that the largest element is at least 2^13 and less than 2^14: elements that
// f16 cannot represent exactly are then less than 2^-31 of the largest.
//
// Bytes: x two or three times (from a cache but the first time), and the f16 once.

// What reduce.wgsl adds up.
alias Reduced = f32;
const SUMS: u32 = 1u;
const THREADS: u32 = 256u;

var<workgroup> rows_shared: u32;

fn weighted4(row: u32, quad: u32) -> vec4<f32> {
    let x = x_get4(row * (P.x_stride / 4u) + quad);
#if NORM
    return x * (norm_weight_get4(quad) + P.weight_offset);
#else
    return x;
#endif
}

@compute @workgroup_size(256)
fn halves_of_rows(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let row = flat_group(wid, nwg);
    if (lid == 0u) { rows_shared = x_live(); }
    if (row >= workgroupUniformLoad(&rows_shared)) { return; }
    let quads = P.inputs / 4u;
    var scale = 1.0;
#if NORM
    var squares = 0.0;
    for (var quad = lid; quad < quads; quad += 256u) {
        let x = x_get4(row * (P.x_stride / 4u) + quad);
        squares += dot(x, x);
    }
    scale = 1.0 / sqrt(sum_of_group(squares, lid) / f32(P.inputs) + P.eps);
#endif
#if SCALED
    var largest = 0.0;
    for (var quad = lid; quad < quads; quad += 256u) {
        let x = abs(scale * weighted4(row, quad));
        largest = max(max(largest, max(x.x, x.y)), max(x.z, x.w));
    }
    let exponent = i32((bitcast<u32>(largest_of_group(largest, lid)) >> 23u) & 0xffu) - 127;
    let factor = select(power_of_two(clamp(13 - exponent, -126, 126)), 1.0, exponent == -127 || exponent == 128);
    if (lid == 0u) { x_scales_set(row, factor); }
#endif
    for (var quad = lid; quad < quads; quad += 256u) {
        var x = scale * weighted4(row, quad);
#if SCALED
        x *= factor;
#endif
        halves_data[row * (P.halves_stride / 4u) + quad] = vec4<f16>(x);
    }
}
