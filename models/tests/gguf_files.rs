//! The GGUF reader: values of a file with everything in it, agreement between storage types, and errors that say what
//! is wrong and where.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

#[path = "support/gguf_writer.rs"]
mod gguf_writer;

use dsrun_core::{Code, WeightExpr};
use dsrun_models::gguf::{FromValue, GgufFile, Value, ValueType};
use dsrun_models::safetensors_file::SafetensorsFiles;
use dsrun_models::weights::{ExprReader, TensorSource};
use gguf_writer::{Writer, sample};
use rstest::rstest;
use std::path::{Path, PathBuf};

fn open(bytes: Vec<u8>) -> dsrun_models::gguf::Result<GgufFile> {
    GgufFile::from_bytes("model.gguf", bytes)
}

fn decoded(source: &dyn TensorSource, name: &str) -> Vec<f32> {
    let rows = source.tensor_type(name).unwrap().rows();
    ExprReader::new(source, &WeightExpr::tensor(name)).unwrap().decoded_rows(0, rows).unwrap()
}

#[test]
fn metadata_of_every_type() {
    let file = open(sample().finish()).unwrap();
    let metadata = file.metadata();
    assert_eq!((file.version(), file.alignment(), metadata.len()), (3, 64, 24));
    assert_eq!(metadata.require::<&str>("general.architecture").unwrap(), "llama");
    assert_eq!(metadata.require::<u32>("test.u8").unwrap(), 200);
    assert_eq!(metadata.require::<i64>("test.i8").unwrap(), -2);
    assert_eq!(metadata.require::<usize>("test.u16").unwrap(), 40_000);
    assert_eq!(metadata.require::<i32>("test.i16").unwrap(), -3);
    assert_eq!(metadata.require::<u64>("test.u32").unwrap(), 4_000_000_000);
    assert_eq!(metadata.require::<i32>("test.i32").unwrap(), -4);
    assert_eq!(metadata.require::<f32>("test.f32").unwrap(), 1e-5);
    assert!(metadata.require::<bool>("test.bool").unwrap());
    assert_eq!(metadata.require::<u64>("test.u64").unwrap(), u64::MAX);
    assert_eq!(metadata.require::<i64>("test.i64").unwrap(), i64::MIN);
    assert_eq!(metadata.require::<f32>("test.f64").unwrap(), 0.25);
    assert_eq!(metadata.require::<Vec<f32>>("test.floats").unwrap(), [0.5, -1.5]);
    assert_eq!(metadata.require::<Vec<bool>>("test.bools").unwrap(), [true, false, true]);
    assert_eq!(metadata.require::<Vec<i64>>("tokenizer.ggml.token_type").unwrap(), [3, 1, 1, 1, 1]);
    assert_eq!(metadata.require::<Vec<&str>>("test.empty").unwrap(), [""; 0]);
    assert_eq!(metadata.get::<u32>("absent").unwrap(), None);
    let Some(Value::Array(tokens)) = metadata.value("tokenizer.ggml.tokens") else {
        panic!("tokens are an array")
    };
    assert_eq!((tokens.len(), tokens.element_type()), (5, ValueType::String));
    assert_eq!(tokens.iter().last(), Some(Value::String("é")));
    assert_eq!(Value::Array(tokens).to_string(), "[`<s>`, `a`, `b`, `ab`, .. 5 in all]");
}

#[test]
fn vocabulary_and_template() {
    let file = open(sample().finish()).unwrap();
    let vocabulary = file.vocabulary().unwrap();
    assert_eq!((vocabulary.model.as_str(), vocabulary.pre_tokenizer.as_deref()), ("gpt2", Some("smollm")));
    assert_eq!(vocabulary.tokens, ["<s>", "a", "b", "ab", "é"]);
    assert_eq!(vocabulary.token_types, [3, 1, 1, 1, 1]);
    assert_eq!(vocabulary.merges, ["a b"]);
    assert!(vocabulary.scores.is_empty());
    assert_eq!((vocabulary.bos, vocabulary.eos, vocabulary.unk, vocabulary.pad), (Some(0), None, None, None));
    assert_eq!(
        (vocabulary.add_bos, vocabulary.add_eos, vocabulary.add_space_prefix),
        (Some(false), None, None)
    );
    assert_eq!(file.chat_template().unwrap(), Some("{{ messages }}"));

    let error = open(Writer::new(3).finish()).unwrap().vocabulary().unwrap_err().to_string();
    assert_eq!(error, "model.gguf: has no metadata key `tokenizer.ggml.model`");
}

#[test]
fn tensors_of_every_type() {
    let file = open(sample().finish()).unwrap();
    assert_eq!(file.names(), ["f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "future", "q8_k"]);
    // The file says [3, 2], innermost first.
    assert_eq!(file.tensor("f32").unwrap().shape, [2, 3]);
    assert_eq!(file.tensor("q8_0").unwrap().shape, [2, 2, 1, 32]);
    assert!(file.tensors().all(|tensor| tensor.offset % 64 == 0));
    assert_eq!(decoded(&file, "f32"), [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
    assert_eq!(decoded(&file, "f16"), [1.0, -2.0, 65504.0]);
    // 0x3C00, 0xC000 and 0x7BFF are the upper halves of these.
    assert_eq!(decoded(&file, "bf16"), [0x3C00u32, 0xC000, 0x7BFF].map(|half| f32::from_bits(half << 16)));
    // Every block has the scale 0.5, q4_1 the minimum -0.5; the first payload bytes of block 0 are 74, 148, 74.
    assert_eq!(decoded(&file, "q4_0")[..1], [0.5 * (f32::from(74u8 & 15) - 8.0)]);
    assert_eq!(decoded(&file, "q4_0")[16], 0.5 * (f32::from(74u8 >> 4) - 8.0));
    assert_eq!(decoded(&file, "q4_1")[0], 0.5 * f32::from(148u8 & 15) - 0.5);
    assert_eq!(decoded(&file, "q8_0")[0], 0.5 * 74.0);
    assert_eq!(file.rows("q4_1", 3, 1).unwrap().len(), 20);
}

#[test]
fn unusable_types_are_errors_only_when_used() {
    let file = open(sample().finish()).unwrap();
    let error = file.tensor_type("q8_k").unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    assert!(
        error.to_string().contains("model.gguf: tensor `q8_k` has type Q8_K, which cannot be used"),
        "{error}"
    );
    let error = file.rows("future", 0, 1).unwrap_err().to_string();
    assert!(error.contains("tensor `future` has type number 1000"), "{error}");
    let error = file.rows("absent", 0, 1).unwrap_err().to_string();
    assert!(error.contains("model.gguf: has no tensor `absent`"), "{error}");
    let error = file.rows("f32", 1, 2).unwrap_err().to_string();
    assert!(error.contains("f32: rows 1..1+2 of 2"), "{error}");
}

#[test]
fn version_2_reads_like_version_3() {
    let mut bytes = sample().finish();
    bytes[4] = 2;
    let file = open(bytes).unwrap();
    assert_eq!((file.version(), decoded(&file, "f32").len()), (2, 6));
}

#[rstest]
#[case::not_gguf(|w: &mut Writer| { w.bytes[0] = b'X'; }, "starts with \"XGUF\", not \"GGUF\"")]
#[case::version_1(|w: &mut Writer| { w.bytes[4] = 1; }, "GGUF version 1, which is obsolete")]
#[case::version_4(|w: &mut Writer| { w.bytes[4] = 4; }, "GGUF version 4; versions 2 and 3 can be read")]
#[case::big_endian(|w: &mut Writer| { w.bytes[4..8].copy_from_slice(&3u32.to_be_bytes()); }, "big-endian GGUF file (version 3)")]
#[case::key_twice(|w: &mut Writer| { w.string("a.b", "x").string("a.b", "y"); }, "metadata key `a.b` comes twice")]
#[case::key_not_utf8(
    |w: &mut Writer| { w.string("ab", "x"); let at = w.bytes.len() - 15; w.bytes[at] = 0xFF; },
    "the name of metadata key 0 at offset 32 is not valid UTF-8"
)]
#[case::value_not_utf8(|w: &mut Writer| { w.key("a", 8).text("", &[0xFF]); }, "the value of metadata key `a` at offset 45 is not")]
#[case::unknown_value_type(|w: &mut Writer| { w.key("a", 13); }, "metadata key `a` has unknown value type 13 at offset 33")]
#[case::unknown_element_type(|w: &mut Writer| { w.array("a", 99, 0); }, "`a` has unknown value type 99 at offset 37")]
#[case::nested_array(|w: &mut Writer| { w.array("a", 9, 0); }, "metadata key `a` is an array of arrays")]
#[case::truth(|w: &mut Writer| { w.scalar("a", 7, &[2]); }, "metadata key `a` has truth value 2 at offset 37")]
#[case::array_too_long(
    |w: &mut Writer| { w.array("a", 10, u64::MAX); },
    "18446744073709551615 u64 elements of metadata key `a` follow offset 49"
)]
#[case::text_too_long(
    |w: &mut Writer| { w.key("a", 8).u64("", 1000); },
    "ends inside the value of metadata key `a`: 1000 bytes at offset 45 needed"
)]
#[case::alignment_0(|w: &mut Writer| { w.scalar("general.alignment", 4, &[0; 4]); }, "`general.alignment` is 0, but must be a power")]
#[case::alignment_48(|w: &mut Writer| { w.scalar("general.alignment", 4, &[48, 0, 0, 0]); }, "is 48, but must be a power of two")]
#[case::alignment_type(
    |w: &mut Writer| { w.string("general.alignment", "32"); },
    "metadata key `general.alignment` is the text `32`, but must be an integer from 0"
)]
#[case::tensor_twice(
    |w: &mut Writer| { w.tensor("t", &[1], 0, &[0; 4]).tensor("t", &[1], 0, &[0; 4]); },
    "tensor `t` comes twice"
)]
#[case::no_dimensions(|w: &mut Writer| { w.tensor("t", &[], 0, &[0; 4]); }, "tensor `t` has 0 dimensions")]
#[case::five_dimensions(|w: &mut Writer| { w.tensor("t", &[1; 5], 0, &[0; 4]); }, "tensor `t` has 5 dimensions")]
#[case::empty_dimension(|w: &mut Writer| { w.tensor("t", &[3, 0], 0, &[]); }, "tensor `t` of shape [0, 3] has a dimension of size 0")]
#[case::element_overflow(
    |w: &mut Writer| { w.tensor("t", &[1 << 40, 1 << 40], 0, &[]); },
    "the size of tensor `t` of shape [1099511627776, 1099511627776] overflows"
)]
#[case::byte_overflow(|w: &mut Writer| { w.tensor("t", &[1 << 62], 0, &[]); }, "the size of tensor `t`")]
#[case::unknown_type_overflow(|w: &mut Writer| { w.tensor("t", &[u64::MAX, 2], 999, &[]); }, "the size of tensor `t`")]
#[case::partial_block(
    |w: &mut Writer| { w.tensor("t", &[33, 2], 3, &[0; 80]); },
    "tensor `t` has rows of 33 elements, which are no whole number of Q4_1 blocks of 32"
)]
#[case::misaligned(
    |w: &mut Writer| { w.tensor_at("t", &[1], 0, 4); },
    "tensor `t` has data offset 4, which is not a multiple of alignment 32"
)]
#[case::outside(
    |w: &mut Writer| { w.tensor("t", &[9], 0, &[0; 32]); },
    "tensor `t` of 36 bytes at data offset 0 is outside the file of 96 bytes, whose data starts at 64"
)]
#[case::offset_overflow(|w: &mut Writer| { w.tensor_at("t", &[1], 0, u64::MAX - 31); }, "tensor `t` of 4 bytes at data offset 1844")]
#[case::unknown_type_outside(|w: &mut Writer| { w.tensor_at("t", &[1], 999, 64); }, "tensor `t` at data offset 64 is outside")]
#[case::overlap(
    |w: &mut Writer| { w.tensor("first", &[16], 0, &[0; 64]).tensor_at("second", &[1], 0, 32); },
    "tensor `second` at offset 160 lies on top of tensor `first`"
)]
fn bad_files_are_refused(#[case] change: fn(&mut Writer), #[case] message: &str) {
    let mut writer = Writer::new(3);
    change(&mut writer);
    let error = open(writer.finish()).unwrap_err().to_string();
    assert!(error.starts_with("model.gguf: ") && error.contains(message), "{error}");
}

fn refused<T: for<'a> FromValue<'a>>(file: &GgufFile, key: &str) -> String {
    file.metadata().require::<T>(key).err().unwrap().to_string()
}

#[rstest]
#[case("test.i16", refused::<u32>, "is the signed integer -3, but must be an integer from 0")]
#[case("test.u64", refused::<i64>, "is the unsigned integer 18446744073709551615")]
#[case("test.f32", refused::<u32>, "is the float 1e-5, but must be an integer")]
#[case("test.u32", refused::<f32>, "must be a float")]
#[case("test.bool", refused::<String>, "is the truth value true, but must be a text")]
#[case("general.architecture", refused::<bool>, "is the text `llama`, but must be a truth")]
#[case("test.floats", refused::<Vec<i64>>, "is the array of f32 [0.5, -1.5], but must be")]
#[case("test.u8", refused::<Vec<String>>, "must be an array of texts")]
#[case("absent", refused::<u32>, "has no metadata key `absent`")]
fn wrong_metadata_types_name_the_key(
    #[case] key: &str,
    #[case] read: fn(&GgufFile, &str) -> String,
    #[case] message: &str,
) {
    let error = read(&open(sample().finish()).unwrap(), key);
    assert!(error.contains(message) && error.contains(key), "{error}");
}

#[test]
fn files_that_are_not_there_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("absent.gguf");
    let error = GgufFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("absent.gguf: cannot be read"), "{error}");
    let error = GgufFile::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("a folder, not a file"), "{error}");
    std::fs::write(&path, []).unwrap();
    let error = GgufFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("ends inside the file header: 4 bytes at offset 0 needed, 0 left"), "{error}");
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

/// One model in every storage type: they agree up to the rounding of the type.
#[rstest]
#[case("smollm2_f16", 1.0 / 2048.0)]
#[case("smollm2_bf16", 1.0 / 256.0)]
#[case("smollm2_q8_0", 1.0 / 127.0)]
#[case("smollm2_q4_0", 1.0 / 8.0)]
#[case("smollm2_q4_1", 1.0 / 15.0)]
fn storage_types_agree(#[case] name: &str, #[case] step: f32) {
    let exact = GgufFile::open(fixture("gguf/smollm2_f32/model.gguf")).unwrap();
    let stored = GgufFile::open(fixture(&format!("gguf/{name}/model.gguf"))).unwrap();
    assert_eq!(stored.names(), exact.names());
    let mut rounded = 0;
    for tensor in exact.names() {
        let (exact, values) = (decoded(&exact, tensor), decoded(&stored, tensor));
        rounded += usize::from(exact != values);
        for (exact, values) in exact.chunks(32).zip(values.chunks(32)) {
            let largest = exact.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            for (exact, value) in exact.iter().zip(values) {
                assert!((exact - value).abs() <= largest * step * 1.01, "{tensor}: {value} for {exact}");
            }
        }
        stored.release(tensor);
    }
    assert!(rounded > 0, "{name} holds the very values of the f32 file");
}

#[test]
fn gguf_and_safetensors_hold_the_same_model() {
    let gguf = GgufFile::open(fixture("gguf/smollm2_f32/model.gguf")).unwrap();
    let safetensors = SafetensorsFiles::open(fixture("smollm2")).unwrap();
    // Rows of q and k are in another order in GGUF files.
    for (in_gguf, in_safetensors) in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
    ] {
        assert_eq!(gguf.tensor(in_gguf).unwrap().shape, safetensors.tensor(in_safetensors).unwrap().shape);
        assert_eq!(decoded(&gguf, in_gguf), decoded(&safetensors, in_safetensors), "{in_gguf}");
    }
}
