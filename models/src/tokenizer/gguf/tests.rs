use rstest::rstest;

use super::super::test_vocabulary::{byte_level, sentence_piece};
use super::super::{EncodeOptions, Tokenizer};
use super::*;

const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };
const PARSED: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };
const ADDED: EncodeOptions = EncodeOptions { add_special: true, parse_special: false };

#[rstest]
#[case("", PLAIN, &[])]
#[case("hell", PLAIN, &[256, 257])]
#[case(" w", PLAIN, &[258])]
#[case("é", PLAIN, &[0xC3, 0xA9])]
#[case("h<|end|>", PARSED, &[104, 260])]
#[case("<|end|", PARSED, &[60, 124, 101, 110, 100, 124])]
#[case("<|tab|>h", PLAIN, &[261, 104])]
#[case("he", ADDED, &[256])]
fn byte_level_text(#[case] text: &str, #[case] options: EncodeOptions, #[case] expected: &[u32]) {
    let tokenizer = Tokenizer::from_gguf(byte_level()).unwrap();
    assert_eq!(tokenizer.encode(text, options).unwrap(), expected);
    assert_eq!(tokenizer.decode(expected, false).unwrap(), text);
}

#[test]
fn control_tokens_in_text_are_characters_unless_asked_for() {
    let tokenizer = Tokenizer::from_gguf(byte_level()).unwrap();
    let ids = tokenizer.encode("<|end|>", PLAIN).unwrap();
    assert_eq!(ids, [60, 124, 101, 110, 100, 124, 62]);
    let mut vocabulary = sentence_piece();
    // Letters that could merge into the control token must not.
    vocabulary.tokens.extend(["<", "s", ">", "<s"].map(str::to_owned));
    vocabulary.token_types.extend([TOKEN_TYPE_NORMAL; 4]);
    vocabulary.scores.extend([0.0; 4]);
    let tokenizer = Tokenizer::from_gguf(vocabulary).unwrap();
    assert!(!tokenizer.encode("<s>", PLAIN).unwrap().contains(&1));
    assert_eq!(tokenizer.encode("<s>", PARSED).unwrap(), [1]);
}

#[rstest]
#[case("hello", ADDED, &[1, 268], "hello")]
#[case(" hello", PLAIN, &[259, 268], " hello")]
#[case("hello hello", PLAIN, &[268, 268], "hello hello")]
#[case("é", PLAIN, &[259, 3 + 0xC3, 3 + 0xA9], "é")]
#[case("hello</s>hello", PARSED, &[268, 2, 268], "hello hello")]
#[case("<tool>hello", PLAIN, &[269, 268], "<tool> hello")]
#[case("", ADDED, &[1], "")]
fn sentence_piece_text(
    #[case] text: &str,
    #[case] options: EncodeOptions,
    #[case] expected: &[u32],
    #[case] decoded: &str,
) {
    let tokenizer = Tokenizer::from_gguf(sentence_piece()).unwrap();
    assert_eq!(tokenizer.encode(text, options).unwrap(), expected);
    assert_eq!(tokenizer.decode(expected, true).unwrap(), decoded);
}

#[test]
fn flags_decide_what_is_added() {
    let vocabulary = GgufVocabulary { add_bos: Some(true), add_eos: Some(true), ..byte_level() };
    let tokenizer = Tokenizer::from_gguf(vocabulary).unwrap();
    assert_eq!(tokenizer.encode("h", ADDED).unwrap(), [260, 104, 260]);
    assert_eq!(tokenizer.encode("h", PLAIN).unwrap(), [104]);

    let vocabulary =
        GgufVocabulary { add_bos: Some(false), add_space_prefix: Some(false), ..sentence_piece() };
    let tokenizer = Tokenizer::from_gguf(vocabulary).unwrap();
    assert_eq!(tokenizer.encode("he", ADDED).unwrap(), [264]);
    assert_eq!(tokenizer.decode(&[266], true).unwrap(), " he");

    let vocabulary = GgufVocabulary { pre_tokenizer: Some("llama-bpe".to_owned()), ..byte_level() };
    let tokenizer = Tokenizer::from_gguf(vocabulary).unwrap();
    assert_eq!(tokenizer.encode("h", ADDED).unwrap(), [260, 104]);
}

#[test]
fn a_word_that_is_a_token_is_whole_where_the_model_says_so() {
    let mut vocabulary = byte_level();
    vocabulary.tokens.push("hell".to_owned());
    vocabulary.token_types.push(TOKEN_TYPE_NORMAL);
    let ranked = Tokenizer::from_gguf(vocabulary.clone()).unwrap();
    assert_eq!(ranked.encode("hell", PLAIN).unwrap(), [256, 257]);
    vocabulary.pre_tokenizer = Some("llama-bpe".to_owned());
    let whole = Tokenizer::from_gguf(vocabulary).unwrap();
    assert_eq!(whole.encode("hell", PLAIN).unwrap(), [262]);
}

#[test]
fn looks_tokens_up() {
    let tokenizer = Tokenizer::from_gguf(byte_level()).unwrap();
    assert_eq!(tokenizer.vocabulary_size(), 262);
    assert_eq!(tokenizer.token_to_id("Ġw"), Some(258));
    assert_eq!(tokenizer.token_to_id("nothing"), None);
    assert_eq!(tokenizer.id_to_token(260), Some("<|end|>"));
    assert_eq!(tokenizer.id_to_token(262), None);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(260), Some(260)));
    assert!(tokenizer.is_special(260) && !tokenizer.is_special(261) && !tokenizer.is_special(u32::MAX));
}

#[rstest]
#[case(|v: &mut GgufVocabulary| v.model = "rwkv".to_owned(), "\"rwkv\" is not supported; supported: gpt2, llama")]
#[case(|v: &mut GgufVocabulary| v.pre_tokenizer = Some("x".to_owned()), "pre-tokenizer \"x\" is not supported")]
#[case(|v: &mut GgufVocabulary| v.tokens.clear(), "tokens is empty")]
#[case(|v: &mut GgufVocabulary| v.token_types.truncate(3), "token_type has 3 entries, but the vocabulary has 262")]
#[case(|v: &mut GgufVocabulary| v.bos = Some(262), "bos_token_id is 262")]
#[case(|v: &mut GgufVocabulary| v.pad = Some(u32::MAX), "padding_token_id is 4294967295")]
#[case(|v: &mut GgufVocabulary| v.merges.push("a".to_owned()), "merge 4 (\"a\") is not two tokens")]
#[case(|v: &mut GgufVocabulary| v.merges.push("a b c".to_owned()), "merge 4 (\"a b c\") is not two tokens")]
#[case(|v: &mut GgufVocabulary| v.merges.push(" a".to_owned()), "is not two tokens")]
#[case(|v: &mut GgufVocabulary| v.merges.push(String::new()), "is not two tokens")]
#[case(|v: &mut GgufVocabulary| v.merges.push("he xx".to_owned()), "needs token \"xx\"")]
#[case(|v: &mut GgufVocabulary| v.merges.push("he h".to_owned()), "needs token \"heh\"")]
#[case(|v: &mut GgufVocabulary| v.merges.push("< |end|>".to_owned()), "needs token \"|end|>\"")]
// The merged text is longer than all tokens.
#[case(|v: &mut GgufVocabulary| v.merges = vec!["he ll".to_owned()], "needs token \"hell\"")]
#[case(|v: &mut GgufVocabulary| v.merges.clear(), "merges is missing or empty, but there are longer tokens: \"he\"")]
#[case(
    |v: &mut GgufVocabulary| (v.add_eos, v.eos) = (Some(true), None),
    "add_eos_token is set, but eos_token_id is missing"
)]
fn a_broken_vocabulary_is_an_error(#[case] damage: fn(&mut GgufVocabulary), #[case] expected: &str) {
    let mut vocabulary = byte_level();
    damage(&mut vocabulary);
    let message = Tokenizer::from_gguf(vocabulary).unwrap_err().to_string();
    assert!(message.contains(expected), "{message}");
}

#[test]
fn scores_must_fit() {
    let vocabulary = GgufVocabulary { scores: vec![0.0; 2], ..sentence_piece() };
    let message = Tokenizer::from_gguf(vocabulary).unwrap_err().to_string();
    assert!(message.contains("scores has 2 entries, but the vocabulary has 270"), "{message}");
}

#[test]
fn ids_out_of_range_are_an_error() {
    let tokenizer = Tokenizer::from_gguf(byte_level()).unwrap();
    let message = tokenizer.decode(&[104, 262], false).unwrap_err().to_string();
    assert_eq!(message, "token id 262 is not in the vocabulary of 262 tokens");
    assert!(tokenizer.with_bos_eos(None, Some(9999)).is_err());
}

#[test]
fn bytes_without_a_token_are_left_out() {
    let mut vocabulary = byte_level();
    vocabulary.tokens[0xA9] = "unused".to_owned();
    let tokenizer = Tokenizer::from_gguf(vocabulary).unwrap();
    assert_eq!(tokenizer.encode("é", PLAIN).unwrap(), [0xC3]);
}
