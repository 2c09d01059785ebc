// Four consecutive elements of a row of the weight NAME, from a column that is a multiple of 4.
fn NAME_get4(row: u32, column: u32) -> vec4<f32> {
#if F32
    let at = row * P.NAME_row_words + column;
    return bitcast<vec4<f32>>(vec4<u32>(NAME_data[at], NAME_data[at + 1u], NAME_data[at + 2u], NAME_data[at + 3u]));
#endif
#if F16
    let at = row * P.NAME_row_words + column / 2u;
    return vec4<f32>(unpack2x16float(NAME_data[at]), unpack2x16float(NAME_data[at + 1u]));
#endif
#if BF16
    let at = row * P.NAME_row_words + column / 2u;
    return widen_bf16(vec2<u32>(NAME_data[at], NAME_data[at + 1u]));
#endif
#if QUANTISED
#if INT4
    let word = NAME_data[row * P.NAME_row_words + column / 8u] >> (4u * (column % 8u));
    let q = vec4<f32>((vec4<u32>(word) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u));
#else
    let word = NAME_data[row * P.NAME_row_words + column / 4u];
    let q = vec4<f32>((vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u));
#endif
    let group = P.NAME_scales + 2u * (row * P.NAME_groups + column / P.NAME_group);
    let scale = bitcast<f32>(NAME_data[group]);
    let offset = bitcast<f32>(NAME_data[group + 1u]);
#if MINIMUM
    return scale * q + offset;
#else
    return scale * (q - offset);
#endif
#endif
}
