use rstest::rstest;
use serde_json::{Value, json};

use super::super::{EncodeOptions, Tokenizer};
use super::*;

const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };
const PARSED: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };
const ADDED: EncodeOptions = EncodeOptions { add_special: true, parse_special: false };

fn byte_level() -> Value {
    serde_json::from_str(include_str!("byte_level.json")).unwrap()
}

fn build(file: &Value) -> Result<Tokenizer> {
    Tokenizer::from_json_bytes(file.to_string().as_bytes())
}

#[test]
fn byte_level_text_goes_there_and_back() {
    let tokenizer = build(&byte_level()).unwrap();
    assert_eq!(tokenizer.vocabulary_size(), 8);
    // The truncation to two tokens that the file asks for is not applied.
    assert_eq!(tokenizer.encode("ab aé", PLAIN).unwrap(), [3, 2, 0, 4, 5]);
    assert_eq!(tokenizer.decode(&[3, 2, 0, 4, 5], true).unwrap(), "ab aé");
    assert_eq!(tokenizer.encode("a<|end|>", PARSED).unwrap(), [0, 6]);
    assert_eq!(tokenizer.encode("a<|end|>", PLAIN).unwrap(), [0]);
    assert_eq!(tokenizer.encode("a<tab>", PLAIN).unwrap(), [0, 7]);
    assert_eq!(tokenizer.decode(&[0, 6, 7], true).unwrap(), "a<tab>");
    assert_eq!(tokenizer.decode(&[0, 6], false).unwrap(), "a<|end|>");
    assert_eq!(tokenizer.token_to_id("<|end|>"), Some(6));
    let tokenizer = tokenizer.with_bos_eos(None, Some(6)).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (None, Some(6)));
}

#[test]
fn the_post_processor_adds_what_the_file_says() {
    let tokenizer = Tokenizer::from_json_bytes(include_bytes!("word_piece.json")).unwrap();
    assert_eq!(tokenizer.encode("Playing.", ADDED).unwrap(), [1, 3, 4, 5, 2]);
    assert_eq!(tokenizer.encode("Playing.", PLAIN).unwrap(), [3, 4, 5]);
    assert_eq!(tokenizer.decode(&[1, 3, 4, 5, 2], true).unwrap(), "playing.");
}

/// The table gives what the library's own decoder gives, on tokens that are whole characters.
#[rstest]
#[case(json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}))]
#[case(json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}))]
#[case(json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}))]
#[case(json!({"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}))]
#[case(json!({"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]}))]
#[case(json!({"type": "WordPiece", "prefix": "##", "cleanup": true}))]
#[case(json!({"type": "WordPiece", "prefix": "##", "cleanup": false}))]
#[case(json!({"type": "BPEDecoder", "suffix": "</w>"}))]
#[case(json!({"type": "Fuse"}))]
#[case(Value::Null)]
fn decodes_as_the_library_does(#[case] decoder: Value) {
    let tokens =
        ["a", "▁a", "▁▁", "##a", "a</w>", "Ġa", "<0x0A>", "<0x41>", ".", "not", "do", "▁", "  ", "'s"];
    let mut file = byte_level();
    file["model"]["merges"] = json!([]);
    file["model"]["vocab"] = (0..).zip(tokens).map(|(id, token)| (token.to_owned(), json!(id))).collect();
    file["decoder"] = decoder;
    let tokenizer = build(&file).unwrap();
    let library = tokenizers::Tokenizer::from_bytes(file.to_string()).unwrap();
    let count = tokenizer.vocabulary_size() as u32;
    for first in 0..count {
        for second in 0..count {
            for third in 0..count {
                let ids = [first, second, third];
                // The library's suffix decoder fails on an empty list.
                let empty = ids.iter().all(|id| tokenizer.is_special(*id));
                let expected = if empty { String::new() } else { library.decode(&ids, true).unwrap() };
                assert_eq!(tokenizer.decode(&ids, true).unwrap(), expected, "{ids:?}");
            }
        }
    }
}

#[rstest]
#[case("/model/merges", json!(["a x"]), "merge 0 (\"a x\") needs token \"x\"")]
#[case("/model/merges", json!(["b a"]), "needs token \"ba\"")]
#[case("/model/merges", json!([["a", "a"]]), "needs token \"aa\"")]
#[case("/model/continuing_subword_prefix", json!("##"), "shorter than the prefix")]
#[case("/model/vocab/a", json!(4_000_000_000u32), "ids up to 4000000000")]
#[case("/model/vocab", json!({}), "needs token")]
#[case("/model/type", json!("Other"), "tokenizer.json is not valid")]
#[case("/decoder", json!({"type": "CTC", "pad_token": "x", "word_delimiter_token": "|", "cleanup": true}), "decoder is not supported")]
#[case("/decoder", json!({"type": "Strip", "content": " ", "start": 0, "stop": 3}), "decoder is not supported")]
#[case("/pre_tokenizer", json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}), "tokenizer.json is not valid")]
#[case("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "tokenizer.json is not valid")]
#[case("/version", json!("9"), "version")]
fn a_broken_file_is_an_error(#[case] place: &str, #[case] value: Value, #[case] expected: &str) {
    let mut file = byte_level();
    *file.pointer_mut(place).unwrap() = value;
    let message = build(&file).unwrap_err().to_string();
    assert!(message.contains(expected), "{message}");
}

#[rstest]
#[case(b"")]
#[case(b"\xff\xfe")]
#[case(b"[1]")]
#[case(b"{}")]
fn what_is_not_a_tokenizer_is_an_error(#[case] content: &[u8]) {
    let message = Tokenizer::from_json_bytes(content).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json"), "{message}");
}

#[test]
fn a_missing_file_is_named() {
    let message = Tokenizer::from_json_file("/nowhere/tokenizer.json").unwrap_err().to_string();
    assert!(message.contains("/nowhere/tokenizer.json"), "{message}");
}

/// No part of a file may bring the program down, whatever stands there.
#[test]
fn damaged_files_never_panic() {
    for source in
        [include_str!("byte_level.json"), include_str!("word_piece.json"), include_str!("metaspace.json")]
    {
        let file: Value = serde_json::from_str(source).unwrap();
        let mut places = Vec::new();
        collect_places(&file, String::new(), &mut places);
        for place in &places {
            for value in [
                Value::Null,
                json!(-1),
                json!(99),
                json!(""),
                json!("é▁"),
                json!([]),
                json!({}),
                json!([["", ""]]),
            ] {
                let mut damaged = file.clone();
                *damaged.pointer_mut(place).unwrap() = value;
                if let Ok(tokenizer) = build(&damaged) {
                    for options in [PLAIN, PARSED, ADDED] {
                        if let Ok(ids) = tokenizer.encode("ab é [CLS]<|end|> playing. hi", options) {
                            let _ = tokenizer.decode(&ids, true);
                        }
                    }
                }
            }
        }
    }
}

fn collect_places(value: &Value, place: String, places: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let key = key.replace('~', "~0").replace('/', "~1");
                collect_places(value, format!("{place}/{key}"), places);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                collect_places(value, format!("{place}/{index}"), places);
            }
        }
        _ => {}
    }
    if !place.is_empty() {
        places.push(place);
    }
}
