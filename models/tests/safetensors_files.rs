//! The safetensors reader: values, shards, and errors that say what is wrong and where.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

#[path = "support/safetensors_writer.rs"]
mod safetensors_writer;

use dsrun_core::{Code, DType, WeightExpr, WeightFormat, WeightType};
use dsrun_models::safetensors_file::SafetensorsFiles;
use dsrun_models::weights::{ExprReader, TensorSource};
use rstest::rstest;
use safetensors_writer::{file, sample};
use std::path::Path;

fn open(bytes: Vec<u8>) -> dsrun_models::safetensors_file::Result<SafetensorsFiles> {
    SafetensorsFiles::from_bytes("model.safetensors", bytes)
}

fn decoded(source: &dyn TensorSource, name: &str) -> Vec<f32> {
    let rows = source.tensor_type(name).unwrap().rows();
    ExprReader::new(source, &WeightExpr::tensor(name)).unwrap().decoded_rows(0, rows).unwrap()
}

#[test]
fn tensors_and_metadata() {
    let files = open(sample()).unwrap();
    assert_eq!(files.names(), ["a", "b", "c", "d", "e", "f", "g"]);
    assert_eq!(files.metadata().collect::<Vec<_>>(), [("format", "pt"), ("note", "x")]);
    let a = files.tensor_type("a").unwrap();
    assert_eq!(a, WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![2, 3] });
    assert_eq!(decoded(&files, "a"), [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
    assert_eq!(*files.rows("b", 0, 1).unwrap(), [0, 3, 6, 9, 12, 15, 18, 21]);
    assert_eq!(files.tensor_type("c").unwrap().rows(), 2);
    assert_eq!(decoded(&files, "e"), [84.0]);
    assert_eq!(decoded(&files, "g"), [87.0, 90.0, 93.0]);
    let d = files.tensor("d").unwrap();
    assert_eq!((d.dtype.as_str(), d.shape, d.bytes), ("I64", [2].as_slice(), 16));
}

#[rstest]
#[case("d", Code::Unsupported, "model.safetensors: tensor `d` has type I64, which cannot be used")]
#[case("f", Code::InvalidArgument, "tensor `f` of shape [0, 7] has no elements")]
#[case("z", Code::InvalidArgument, "model.safetensors: has no tensor `z`")]
fn unusable_tensors_are_errors_only_when_used(#[case] name: &str, #[case] code: Code, #[case] message: &str) {
    let files = open(sample()).unwrap();
    let error = files.tensor_type(name).unwrap_err();
    assert_eq!(error.code(), code);
    assert!(error.to_string().contains(message), "{error}");
    assert_eq!(files.rows(name, 0, 1).unwrap_err(), error);
}

#[rstest]
#[case::empty(vec![], "0 bytes are too few")]
#[case::seven(vec![1; 7], "7 bytes are too few")]
#[case::header_too_long([&u64::MAX.to_le_bytes()[..], b"{}"].concat(), "has 18446744073709551615 bytes, but 2 follow")]
#[case::header_longer_than_file(file("{}", &[])[..9].to_vec(), "has 2 bytes, but 1 follow")]
#[case::not_json(file("[]", &[]), "invalid header")]
#[case::not_utf8([&1u64.to_le_bytes()[..], &[0xFF]].concat(), "invalid header")]
#[case::text_after_header(file("{}x", &[]), "trailing characters")]
#[case::not_a_tensor(file(r#"{"a":3}"#, &[]), "`a`: invalid type")]
#[case::no_type(file(r#"{"a":{"shape":[],"data_offsets":[0,0]}}"#, &[]), "`a`: missing field `dtype`")]
#[case::unknown_type(file(r#"{"a":{"dtype":"F7","shape":[],"data_offsets":[0,0]}}"#, &[]), "`a`: unknown variant `F7`")]
#[case::negative(file(r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}"#, &[]), "`a`: invalid value")]
#[case::twice(
    file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, &[1]),
    "`a` comes twice"
)]
#[case::metadata_not_text(file(r#"{"__metadata__":{"a":1}}"#, &[]), "`__metadata__`: `a`: invalid type")]
#[case::outside(
    file(r#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}"#, &[0; 4]),
    "tensor `a` at data offsets 0..5 is outside the 4 bytes of data"
)]
#[case::backwards(
    file(r#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[4,0]}}"#, &[0; 4]),
    "tensor `a` at data offsets 4..0 is outside"
)]
#[case::far_outside(
    file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}}"#, &[0; 4]),
    "tensor `a` at data offsets 18446744073709551614..18446744073709551615 is outside"
)]
#[case::wrong_size(
    file(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,5]}}"#, &[0; 5]),
    "tensor `a` of shape [1] and type F32 cannot have 5 bytes"
)]
#[case::shape_overflow(
    file(r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#, &[]),
    "tensor `a` of shape [4294967296, 4294967296]"
)]
#[case::gap(
    file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#, &[0; 2]),
    "tensor `a` starts at data offset 1, but the one before it ends at 0"
)]
#[case::overlap(
    file(
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
        &[0; 3]
    ),
    "tensor `b` starts at data offset 1, but the one before it ends at 2"
)]
#[case::left_over(
    file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, &[0; 2]),
    "its tensors end at data offset 1, but it has 2 bytes of data"
)]
fn bad_files_are_refused(#[case] bytes: Vec<u8>, #[case] message: &str) {
    let error = open(bytes).unwrap_err().to_string();
    assert!(error.starts_with("model.safetensors: ") && error.contains(message), "{error}");
}

/// A file with one-byte tensors of these names.
fn shard(tensors: &[&str]) -> Vec<u8> {
    let entry = |(i, name): (usize, &&str)| {
        format!(r#""{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1)
    };
    let entries: Vec<String> = tensors.iter().enumerate().map(entry).collect();
    let data: Vec<u8> = tensors.iter().map(|name| name.as_bytes()[0]).collect();
    file(&format!("{{{}}}", entries.join(",")), &data)
}

fn write(folder: &Path, files: &[(&str, Vec<u8>)]) {
    for (name, bytes) in files {
        std::fs::write(folder.join(name), bytes).unwrap();
    }
}

#[test]
fn shards_read_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let index = br#"{"metadata":{"total_size":3},"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"1.safetensors"}}"#;
    // A single file beside an index is not looked at.
    write(
        folder.path(),
        &[
            ("model.safetensors.index.json", index.to_vec()),
            ("model.safetensors", b"not this one".to_vec()),
            ("1.safetensors", shard(&["c", "a"])),
            ("2.safetensors", shard(&["b", "unlisted"])),
        ],
    );
    let files = SafetensorsFiles::open(folder.path()).unwrap();
    assert_eq!(files.files().count(), 2);
    for name in ["a", "b", "c"] {
        assert_eq!(decoded(&files, name), [f32::from(name.as_bytes()[0])]);
        files.release(name);
    }
    assert_eq!(decoded(&files, "unlisted"), [f32::from(b'u')]);
    let error = files.tensor_type("z").unwrap_err().to_string();
    assert!(error.contains("index.json: has no tensor `z`"), "{error}");
}

#[rstest]
#[case::not_json("{", "is no valid index of safetensors files: EOF")]
#[case::no_map(r#"{"metadata":{}}"#, "it has no `weight_map`")]
#[case::map_of_numbers(r#"{"weight_map":{"a":1}}"#, "`weight_map`: `a`: invalid type")]
#[case::two_maps(r#"{"weight_map":{},"weight_map":{}}"#, "`weight_map` comes twice")]
#[case::tensor_twice(r#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#, "`a` comes twice")]
#[case::missing_shard(
    r#"{"weight_map":{"a":"1.safetensors","x":"3.safetensors"}}"#,
    "file `3.safetensors`, which should hold tensor `x`, is missing"
)]
#[case::tensor_in_no_shard(
    r#"{"weight_map":{"a":"1.safetensors","x":"1.safetensors"}}"#,
    "tensor `x` should be in `1.s"
)]
#[case::tensor_in_other_shard(
    r#"{"weight_map":{"a":"1.safetensors","b":"1.safetensors","c":"2.safetensors"}}"#,
    "tensor `b` should be in `1.safetensors`, but is not"
)]
#[case::tensor_in_two_shards(
    r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors","d":"4.safetensors"}}"#,
    "tensor `a` is in `1.safetensors` and in `4.safetensors`"
)]
#[case::outside_the_folder(
    r#"{"weight_map":{"a":"../1.safetensors"}}"#,
    "`../1.safetensors`, which is not the name"
)]
#[case::absolute(r#"{"weight_map":{"a":"/1.safetensors"}}"#, "`/1.safetensors`, which is not the name")]
#[case::bad_shard(r#"{"weight_map":{"a":"bad.safetensors"}}"#, "bad.safetensors: is no safetensors file")]
fn bad_indices_are_refused(#[case] index: &str, #[case] message: &str) {
    let folder = tempfile::tempdir().unwrap();
    write(
        folder.path(),
        &[
            ("model.safetensors.index.json", index.as_bytes().to_vec()),
            ("1.safetensors", shard(&["a"])),
            ("2.safetensors", shard(&["b"])),
            ("4.safetensors", shard(&["d", "a"])),
            ("bad.safetensors", vec![1]),
        ],
    );
    let error = SafetensorsFiles::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains(message) && error.contains(".safetensors"), "{error}");
}

#[test]
fn folders_without_a_model_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = SafetensorsFiles::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("has neither model.safetensors nor"), "{error}");
    let error = SafetensorsFiles::open(folder.path().join("x.safetensors")).unwrap_err().to_string();
    assert!(error.contains("x.safetensors: cannot be read"), "{error}");
}
