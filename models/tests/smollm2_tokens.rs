//! The tokenizer of a real model file against the token ids of an independent engine (llama.cpp).
//!
//! Set `DSRUN_TEST_MODEL` to the path of `SmolLM2-135M-Instruct.Q4_1.gguf`, or to the folder that holds it.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::PathBuf;

use dsrun_models::tokenizer::{EncodeOptions, GgufVocabulary, StreamDecoder, StreamOptions, Tokenizer};
use serde::Deserialize;

const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

#[derive(Deserialize)]
struct Case {
    prompt: String,
    tokens: Vec<u32>,
    greedy: Vec<u32>,
    greedy_text: String,
}

fn model() -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os("DSRUN_TEST_MODEL")?);
    let path = if path.is_dir() { path.join(MODEL) } else { path };
    path.is_file().then_some(path)
}

#[test]
#[allow(clippy::print_stderr, reason = "a skipped test says why")]
fn tokens_and_text_are_those_of_llama_cpp() {
    let Some(path) = model() else {
        eprintln!("skipped: DSRUN_TEST_MODEL does not lead to {MODEL}");
        return;
    };
    let tokenizer = Tokenizer::from_gguf(read_vocabulary(BufReader::new(File::open(path).unwrap()))).unwrap();
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
