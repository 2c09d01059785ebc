use proptest::prelude::*;
use rstest::rstest;

use super::super::test_vocabulary::{byte_level, sentence_piece};
use super::super::{EncodeOptions, GgufVocabulary, Tokenizer};
use super::*;

fn tokenizer(name: &str) -> Tokenizer {
    let json = |content: &str| Tokenizer::from_json_bytes(content.as_bytes()).unwrap();
    match name {
        "byte level" => Tokenizer::from_gguf(byte_level()).unwrap(),
        "sentence piece" => Tokenizer::from_gguf(sentence_piece()).unwrap(),
        "word piece" => json(include_str!("../json/word_piece.json")),
        "metaspace" => json(include_str!("../json/metaspace.json")),
        other => panic!("no vocabulary {other}"),
    }
}

fn stream(tokenizer: &Tokenizer, options: StreamOptions, ids: &[u32]) -> Vec<String> {
    let mut stream = StreamDecoder::new(tokenizer, options);
    let mut texts: Vec<String> = ids.iter().filter_map(|id| stream.push(*id)).collect();
    texts.extend(stream.finish());
    assert_eq!(stream.finish(), None, "there is nothing left to flush");
    assert!(texts.iter().all(|text| !text.is_empty()));
    texts
}

proptest! {
    /// Whatever the tokens, the pieces are the text.
    #[test]
    fn pieces_together_are_the_whole(
        name in prop::sample::select(vec!["byte level", "sentence piece", "word piece", "metaspace"]),
        picks in prop::collection::vec(any::<u32>(), 0..40),
        skip_special in any::<bool>(),
    ) {
        let tokenizer = tokenizer(name);
        let ids: Vec<u32> = picks.iter().map(|pick| pick % tokenizer.vocabulary_size() as u32).collect();
        let options = StreamOptions { skip_special, continues_text: false };
        prop_assert_eq!(stream(&tokenizer, options, &ids).concat(), tokenizer.decode(&ids, skip_special).unwrap());
    }

    /// The held bytes are exactly those of `String::from_utf8_lossy`'s last incomplete character.
    #[test]
    fn bytes_decode_as_the_standard_library_does(bytes in prop::collection::vec(any::<u8>(), 0..24)) {
        let tokenizer = Tokenizer::from_gguf(byte_level()).unwrap();
        let ids: Vec<u32> = bytes.iter().map(|byte| u32::from(*byte)).collect();
        let texts = stream(&tokenizer, StreamOptions::default(), &ids);
        prop_assert_eq!(texts.concat(), String::from_utf8_lossy(&bytes));
    }

    /// A valid text never shows a replacement character on the way.
    #[test]
    fn characters_are_never_split(text in any::<String>(), name in prop::sample::select(vec!["byte level", "sentence piece"])) {
        prop_assume!(!text.contains(char::REPLACEMENT_CHARACTER));
        let tokenizer = tokenizer(name);
        let ids = tokenizer.encode(&text, EncodeOptions::default()).unwrap();
        let texts = stream(&tokenizer, StreamOptions::default(), &ids);
        prop_assert!(texts.iter().all(|text| !text.contains(char::REPLACEMENT_CHARACTER)));
        prop_assert_eq!(texts.concat(), text.replace('▁', if name == "byte level" { "▁" } else { " " }));
    }
}

#[test]
fn a_character_comes_when_it_is_complete() {
    let tokenizer = Tokenizer::from_gguf(byte_level()).unwrap();
    let mut stream = StreamDecoder::new(&tokenizer, StreamOptions::default());
    let llama = "🦙".as_bytes();
    for byte in &llama[..3] {
        assert_eq!(stream.push(u32::from(*byte)), None);
    }
    assert_eq!(stream.push(u32::from(llama[3])).as_deref(), Some("🦙"));
    // A character that is cut off by another.
    assert_eq!(stream.push(0xF0), None);
    assert_eq!(stream.push(104).as_deref(), Some("\u{FFFD}h"));
    assert_eq!(stream.push(0xE2), None);
    assert_eq!(stream.finish().as_deref(), Some("\u{FFFD}"));
}

#[rstest]
#[case("sentence piece", false, &[268, 268], &["hello", " hello"])]
#[case("sentence piece", true, &[268, 268], &[" hello", " hello"])]
#[case("sentence piece", false, &[1, 268], &["<s>", " hello"])]
#[case("byte level", false, &[258], &[" w"])]
#[case("byte level", true, &[258], &[" w"])]
#[case("word piece", false, &[3, 4, 3], &["play", "ing", " play"])]
#[case("word piece", true, &[3, 4, 3], &[" play", "ing", " play"])]
#[case("metaspace", false, &[1, 1], &["hi", " hi"])]
#[case("metaspace", true, &[1, 1], &[" hi", " hi"])]
fn the_space_at_the_start(
    #[case] name: &str,
    #[case] continues_text: bool,
    #[case] ids: &[u32],
    #[case] expected: &[&str],
) {
    let options = StreamOptions { skip_special: false, continues_text };
    assert_eq!(stream(&tokenizer(name), options, ids), expected);
}

#[test]
fn skipped_tokens_do_not_count_as_the_start() {
    let tokenizer = tokenizer("sentence piece");
    let options = StreamOptions { skip_special: true, continues_text: false };
    assert_eq!(stream(&tokenizer, options, &[1, 268, 2]), ["hello"]);
}

#[test]
fn ids_without_a_token_give_no_text() {
    let vocabulary =
        GgufVocabulary { model: "gpt2".to_owned(), tokens: vec!["a".to_owned()], ..Default::default() };
    let tokenizer = Tokenizer::from_gguf(vocabulary).unwrap();
    assert_eq!(stream(&tokenizer, StreamOptions::default(), &[0, 1, u32::MAX, 0]), ["a", "a"]);
}
