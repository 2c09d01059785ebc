//! Writes small safetensors files.

/// The file of this header and data.
pub(crate) fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A header with a tensor of several types, an empty one and free texts.
pub(crate) const SAMPLE_HEADER: &str = r#"{"__metadata__":{"format":"pt","note":"x"},
"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},
"c":{"dtype":"F16","shape":[1,2,1],"data_offsets":[32,36]},
"d":{"dtype":"I64","shape":[2],"data_offsets":[36,52]},
"e":{"dtype":"U8","shape":[],"data_offsets":[52,53]},
"f":{"dtype":"F32","shape":[0,7],"data_offsets":[53,53]},
"g":{"dtype":"I8","shape":[3],"data_offsets":[53,56]}}   "#;

/// A file of that header.
pub(crate) fn sample() -> Vec<u8> {
    let data: Vec<u8> =
        (0..6).flat_map(|i| (i as f32 * 0.5).to_le_bytes()).chain((0..32).map(|i| i * 3)).collect();
    file(SAMPLE_HEADER, &data)
}
