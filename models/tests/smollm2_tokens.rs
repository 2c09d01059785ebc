//! The tokenizer of a real model file against the token ids of an independent engine (llama.cpp).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::File;
use std::io::{BufReader, Read};

use dsrun_models::tokenizer::{EncodeOptions, GgufVocabulary, StreamDecoder, StreamOptions, Tokenizer};
use dsrun_test_support::{TestResult, model, test_main};
use serde::Deserialize;

test_main![tokens_and_text_are_those_of_llama_cpp];

#[derive(Deserialize)]
struct Case {
    prompt: String,
    tokens: Vec<u32>,
    greedy: Vec<u32>,
    greedy_text: String,
}

fn tokens_and_text_are_those_of_llama_cpp() -> TestResult {
    let file = BufReader::new(File::open(model()?).unwrap());
    let tokenizer = Tokenizer::from_gguf(read_vocabulary(file)).unwrap();
    let cases: Vec<Case> = serde_json::from_str(include_str!("data/smollm2_tokens.json")).unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let options = EncodeOptions { add_special: false, parse_special: true };
        assert_eq!(tokenizer.encode(&case.prompt, options).unwrap(), case.tokens, "{:?}", case.prompt);
        assert_eq!(tokenizer.decode(&case.tokens, false).unwrap(), case.prompt);
        let options = StreamOptions { skip_special: true, continues_text: true };
        let mut stream = StreamDecoder::new(&tokenizer, options);
        let mut text: String = case.greedy.iter().filter_map(|id| stream.push(*id)).collect();
        text.extend(stream.finish());
        assert_eq!(text, case.greedy_text);
    }
    Ok(())
}

/// The vocabulary from the file's metadata. A few lines of its own, so that the tokenizer is tested by itself.
fn read_vocabulary(mut file: impl Read) -> GgufVocabulary {
    let mut vocabulary = GgufVocabulary::default();
    let header: [u8; 16] = bytes(&mut file);
    assert_eq!(&header[..8], b"GGUF\x03\0\0\0");
    let count = u64::from_le_bytes(bytes(&mut file));
    for _ in 0..count {
        let key = text(&mut file);
        let value = value(&mut file);
        match key.strip_prefix("tokenizer.ggml.") {
            Some("model") => vocabulary.model = value.texts.concat(),
            Some("pre") => vocabulary.pre_tokenizer = Some(value.texts.concat()),
            Some("tokens") => vocabulary.tokens = value.texts,
            Some("merges") => vocabulary.merges = value.texts,
            Some("token_type") => {
                vocabulary.token_types = value.numbers.iter().map(|number| *number as i32).collect();
            }
            Some("bos_token_id") => vocabulary.bos = value.numbers.first().map(|number| *number as u32),
            Some("eos_token_id") => vocabulary.eos = value.numbers.first().map(|number| *number as u32),
            Some("add_bos_token") => vocabulary.add_bos = value.numbers.first().map(|number| *number != 0),
            _ => {}
        }
    }
    vocabulary
}

#[derive(Default)]
struct Metadata {
    texts: Vec<String>,
    numbers: Vec<u64>,
}

fn bytes<const N: usize>(file: &mut impl Read) -> [u8; N] {
    let mut bytes = [0; N];
    file.read_exact(&mut bytes).expect("the file ends too early");
    bytes
}

fn text(file: &mut impl Read) -> String {
    let length = u64::from_le_bytes(bytes(file));
    let mut text = String::new();
    file.take(length).read_to_string(&mut text).expect("a text of the file is not readable");
    text
}

fn value(file: &mut impl Read) -> Metadata {
    let mut kind = u32::from_le_bytes(bytes(file));
    let mut count = 1;
    if kind == 9 {
        kind = u32::from_le_bytes(bytes(file));
        count = u64::from_le_bytes(bytes(file));
    }
    let mut value = Metadata::default();
    for _ in 0..count {
        match kind {
            0 | 1 | 7 => value.numbers.push(u64::from(bytes::<1>(file)[0])),
            2 | 3 => value.numbers.push(u64::from(u16::from_le_bytes(bytes(file)))),
            4..=6 => value.numbers.push(u64::from(u32::from_le_bytes(bytes(file)))),
            8 => value.texts.push(text(file)),
            10..=12 => value.numbers.push(u64::from_le_bytes(bytes(file))),
            other => panic!("metadata of type {other}"),
        }
    }
    value
}
