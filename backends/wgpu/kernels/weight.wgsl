// Access to the weight NAME, whose rows from NAME_first on are bound. A vector is 16 bytes of a row: NAME_QUADS quads of four
// elements.
#if F32
const NAME_QUADS: u32 = 1u;
#endif
#if HALF
const NAME_QUADS: u32 = 2u;
#endif
#if INT8
const NAME_QUADS: u32 = 4u;
#endif
#if INT4
const NAME_QUADS: u32 = 8u;
#endif

fn NAME_vector(row: u32, index: u32) -> vec4<u32> {
    return NAME_data[(row - P.NAME_first) * (P.NAME_row_words / 4u) + index];
}

// The scale, and the zero point or minimum, of the group of a column of a row. Both are in one vector.
fn NAME_affine(row: u32, column: u32) -> vec2<f32> {
#if QUANTISED
    let at = P.NAME_scales + 2u * ((row - P.NAME_first) * P.NAME_groups + column / P.NAME_group);
    let vector = bitcast<vec4<f32>>(NAME_data[at / 4u]);
    return select(vector.xy, vector.zw, (at & 2u) != 0u);
#else
    return vec2<f32>(1.0, 0.0);
#endif
}

// The elements of a quad of a vector.
fn NAME_quad(vector: vec4<u32>, quad: u32, affine: vec2<f32>) -> vec4<f32> {
#if F32
    return bitcast<vec4<f32>>(vector);
#endif
#if F16
    let words = select(vector.xy, vector.zw, quad == 1u);
    return vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
#endif
#if BF16
    return widen_bf16(select(vector.xy, vector.zw, quad == 1u));
#endif
#if QUANTISED
#if FLOATS
    // Twice the magnitude: 0 to 4 for the codes 0 to 4, then 6, 8 and 12, each from 4 bits of one constant.
    let word = vector[quad / 2u] >> (16u * (quad % 2u));
    let codes = (vec4<u32>(word) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u);
    let bits = ((vec4<u32>(0xc8643210u) >> (4u * (codes & vec4<u32>(7u)))) & vec4<u32>(15u)) | vec4<u32>(0x4b000000u);
    let doubled = bitcast<vec4<f32>>(bits) - 8388608.0;
    return affine.x * select(doubled, -doubled, codes > vec4<u32>(7u));
#else
#if MINIMUM
    return affine.x * NAME_difference(vector, quad, NAME_offsets(0.0)) + affine.y;
#else
    return affine.x * NAME_difference(vector, quad, NAME_offsets(affine.y));
#endif
#endif
#endif
}

#if QUANTISED
#if !FLOATS
// The bits of an integer become the lowest ones of the significand of a power of two, which is subtracted with the zero point: where
// conversions of integers are slow, that is faster. The exponent is a parameter, because compilers join an `and` and an `or` to one
// instruction only if one of their operands is no constant.
//
// The powers of two of the integers of a quad, with the zero point: 2^23, 2^19, 2^15 and 2^11 for four bits, whose places stand
// for 1 to 8; 2^23 and 2^15 for eight, whose places stand for 1 to 128.
fn NAME_offsets(zero: f32) -> vec4<f32> {
#if INT4
    return vec4<f32>(8388608.0, 524288.0, 32768.0, 2048.0) + zero;
#else
    return vec4<f32>(8388608.0, 32768.0, 8388608.0, 32768.0) + zero;
#endif
}

// The integers of a quad of a vector less the zero point of `offsets`.
fn NAME_difference(vector: vec4<u32>, quad: u32, offsets: vec4<f32>) -> vec4<f32> {
    let exponent = NAME_exponent();
#if INT4
    let word = vector[quad / 2u] >> (16u * (quad % 2u));
    let exponents = exponent - vec4<u32>(0u, 0x2000000u, 0x4000000u, 0x6000000u);
    let bits = (vec4<u32>(word) & vec4<u32>(0xfu, 0xf0u, 0xf00u, 0xf000u)) | exponents;
#else
    let words = vec4<u32>(vec2<u32>(vector[quad]), vec2<u32>(vector[quad] >> 16u));
    let exponents = exponent - vec4<u32>(0u, 0x4000000u, 0u, 0x4000000u);
    let bits = (words & vec4<u32>(0xffu, 0xff00u, 0xffu, 0xff00u)) | exponents;
#endif
    return bitcast<vec4<f32>>(bits) - offsets;
}
#endif
#endif

// Four consecutive elements of a row, from a column that is a multiple of 4.
fn NAME_get4(row: u32, column: u32) -> vec4<f32> {
    let quad = column / 4u;
    return NAME_quad(NAME_vector(row, quad / NAME_QUADS), quad % NAME_QUADS, NAME_affine(row, column));
}

// The power of two by which the elements of a row are multiplied before they become f16.
fn NAME_half_scale(row: u32) -> f32 {
    let at = P.NAME_half_scales + row - P.NAME_first;
    return bitcast<f32>(NAME_data[at / 4u][at % 4u]);
}

// The elements of a quad of a vector times `scale`.
fn NAME_scaled_quad(vector: vec4<u32>, quad: u32, affine: vec2<f32>, scale: f32) -> vec4<f32> {
#if QUANTISED
#if MINIMUM
    return NAME_quad(vector, quad, scale * affine);
#else
    return NAME_quad(vector, quad, vec2<f32>(scale * affine.x, affine.y));
#endif
#else
    return scale * NAME_quad(vector, quad, affine);
#endif
}
