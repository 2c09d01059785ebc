//! Models in GGUF files: fixtures, and copies of them with metadata changed byte by byte.

use super::fixtures;
use dsrun_models::{
    config::{DecoderConfig, Norm, Rope, RopeScaling},
    gguf::GgufFile,
    model::Model,
    tokenizer::EncodeOptions,
};
use proptest::prelude::*;
use rstest::rstest;
use std::{fs, sync::Arc};

#[test]
fn fixtures_say_the_same_as_the_models_they_are_made_of() {
    for name in fixtures::gguf_names() {
        let model = Model::open(fixtures::gguf(&name)).unwrap();
        let original = Model::open(fixtures::folder(&fixtures::source(&name))).unwrap();
        let (config, mut original) = (model.config(), original.config().clone());
        // The same frequencies, reached by other means.
        for (ours, theirs) in config.attention.iter().zip(&mut original.attention) {
            let frequencies = |rope: &Arc<Rope>| rope.inverse_frequencies(config.context);
            for (ours, theirs) in
                ours.rope.iter().flat_map(frequencies).zip(theirs.rope.iter().flat_map(frequencies))
            {
                assert!((ours / theirs - 1.0).abs() < 1e-6, "{name}: {ours} is not {theirs}");
            }
            assert_eq!(ours.rope.is_some(), theirs.rope.is_some(), "{name}");
            theirs.rope.clone_from(&ours.rope);
            // A gain of scores has been rounded to f32.
            assert!((ours.scale / theirs.scale - 1.0).abs() < 1e-6, "{name}");
            theirs.scale = ours.scale;
        }
        // Files need not have the layers that predict further tokens.
        original.unread_layers = config.unread_layers;
        // Gemma's files hold the factors of norms less 1, but not these.
        if name.starts_with("gemma") {
            let rms = |weight_offset| Norm::Rms { weight_offset };
            assert_eq!((config.norm, std::mem::replace(&mut original.norm, rms(0.0))), (rms(0.0), rms(1.0)));
        }
        let scaled = config.ropes().iter().any(|rope| matches!(rope.scaling, RopeScaling::Divisors(_)));
        let expected = ["llama3", "llama4", "exaone4"].iter().any(|source| name.starts_with(source));
        assert_eq!(scaled, expected, "{name}");
        assert_eq!(*config, original, "{name}");
    }
}

#[test]
fn tokenizer_template_and_end_come_with_the_file() {
    let model = Model::open(fixtures::gguf("smollm2_q4_1")).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let ids = tokenizer.encode("the cat", EncodeOptions::default()).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "the cat");
    assert_eq!(model.eos(), [2]);
    let text = model
        .chat_template()
        .unwrap()
        .render(&[dsrun_models::chat::Message::new("user", "hi")], &Default::default())
        .unwrap();
    assert_eq!(text, "<|im_start|>user\nhi<|im_end|>\n");
}

#[test]
fn tokenizers_of_files_split_and_merge_as_the_library_does() {
    for name in fixtures::gguf_names() {
        let model = Model::open(fixtures::gguf(&name)).unwrap();
        let samples = fixtures::tokenized(&name);
        assert!(samples.len() >= 3, "{name}");
        for (text, ids) in samples {
            let found = model.tokenizer().unwrap().encode(&text, EncodeOptions::default()).unwrap();
            assert_eq!(found, ids, "{name}: {text:?}");
        }
    }
}

/// Where the value of a key starts: behind the key and the number of its type.
fn value_of(bytes: &[u8], key: &str) -> usize {
    bytes.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len() + 4
}

fn changed(fixture: &str, key: &str, value: [u8; 4]) -> Result<DecoderConfig, String> {
    let mut bytes = fs::read(fixtures::gguf(fixture)).unwrap();
    let at = value_of(&bytes, key);
    bytes[at..at + 4].copy_from_slice(&value);
    let file = GgufFile::from_bytes("changed.gguf", bytes).map_err(|error| error.to_string())?;
    DecoderConfig::from_gguf(&file).map_err(|error| error.to_string())
}

#[rstest]
#[case("llama.attention.head_count", 0u32.to_le_bytes(), "llama.attention.head_count is 0")]
#[case("llama.attention.head_count_kv", 3u32.to_le_bytes(), "attention.head_count_kv is 3")]
#[case("llama.block_count", u32::MAX.to_le_bytes(), "llama.block_count is 4294967295")]
#[case("llama.embedding_length", 33u32.to_le_bytes(), "llama.attention.head_count is 4")]
#[case("llama.rope.dimension_count", 4u32.to_le_bytes(), "llama.rope.dimension_count = 4")]
#[case("llama.rope.freq_base", f32::NAN.to_le_bytes(), "llama.rope.freq_base is NaN")]
#[case("llama.rope.freq_base", (-1f32).to_le_bytes(), "llama.rope.freq_base is -1")]
#[case("llama.attention.layer_norm_rms_epsilon", 0f32.to_le_bytes(), "layer_norm_rms_epsilon is 0")]
fn errors_name_the_key(#[case] key: &str, #[case] value: [u8; 4], #[case] named: &str) {
    let message = changed("smollm2_q8_0", key, value).unwrap_err();
    assert!(message.contains(named), "{message}");
}

#[rstest]
#[case("gpt2.attention.head_count", 5u32.to_le_bytes(), "gpt2.attention.head_count is 5")]
#[case("gpt2.attention.layer_norm_epsilon", 0f32.to_le_bytes(), "layer_norm_epsilon is 0")]
#[case("gpt2.context_length", 0u32.to_le_bytes(), "gpt2.context_length is 0")]
fn errors_of_gpt2_name_the_key(#[case] key: &str, #[case] value: [u8; 4], #[case] named: &str) {
    let message = changed("gpt2_q8_0", key, value).unwrap_err();
    assert!(message.contains(named), "{message}");
}

#[rstest]
#[case("llama.vocab_size", "llama.vocab_sizf", "llama.vocab_sizf")]
#[case("llama.context_length", "llamb.context_length", "llama.context_length is missing")]
fn keys_that_are_unknown_or_missing_are_named(#[case] key: &str, #[case] instead: &str, #[case] named: &str) {
    let mut bytes = fs::read(fixtures::gguf("smollm2_q8_0")).unwrap();
    let at = value_of(&bytes, key) - key.len() - 4;
    bytes[at..at + key.len()].copy_from_slice(instead.as_bytes());
    let file = GgufFile::from_bytes("changed.gguf", bytes).unwrap();
    let message = DecoderConfig::from_gguf(&file).unwrap_err().to_string();
    assert!(message.contains(named), "{message}");
}

#[test]
fn the_attention_factor_of_yarn_has_two_keys() {
    const KEYS: [&str; 2] = ["olmo2.rope.scaling.yarn_attn_factor", "olmo2.rope.scaling.attn_factor"];
    let bytes = fs::read(fixtures::gguf("olmo3_q8_0")).unwrap();
    let read = |bytes: Vec<u8>| {
        let file = GgufFile::from_bytes("changed.gguf", bytes).unwrap();
        DecoderConfig::from_gguf(&file).map_err(|error| error.to_string())
    };
    // Another architecture's keys are ignored.
    let without = |key: &str| {
        let mut bytes = bytes.clone();
        let at = value_of(&bytes, key) - key.len() - 4;
        bytes[at..at + 5].copy_from_slice(b"other");
        bytes
    };
    let config = read(bytes.clone()).unwrap();
    assert!(config.ropes().iter().any(|rope| rope.scale == 1.2));
    for key in KEYS {
        assert_eq!(read(without(key)).unwrap(), config, "{key}");
        let message = changed("olmo3_q8_0", key, 1.5f32.to_le_bytes()).unwrap_err();
        assert!(message.contains(KEYS[0]) && message.contains(KEYS[1]), "{message}");
    }
}

#[test]
fn other_architectures_are_refused_by_name() {
    let mut bytes = fs::read(fixtures::gguf("smollm2_q8_0")).unwrap();
    // Behind the key come the type of the value, its length and the text.
    let at = value_of(&bytes, "general.architecture") + 8;
    assert_eq!(&bytes[at..at + 5], b"llama");
    bytes[at..at + 5].copy_from_slice(b"bloom");
    let file = GgufFile::from_bytes("changed.gguf", bytes).unwrap();
    let message = DecoderConfig::from_gguf(&file).unwrap_err().to_string();
    assert!(message.contains("bloom") && message.contains("qwen2"), "{message}");
    // There are no such files of OPT.
    assert!(!message.contains("opt"), "{message}");
}

#[test]
fn sizes_that_do_not_fit_the_tensors_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.gguf");
    for (key, value) in
        [("llama.feed_forward_length", 96u32), ("llama.block_count", 3), ("llama.block_count", 1)]
    {
        let mut bytes = fs::read(fixtures::gguf("smollm2_f32")).unwrap();
        let at = value_of(&bytes, key);
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        let message = Model::open(&path).unwrap_err().to_string();
        assert!(message.contains("blk."), "{message}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn hostile_metadata_gives_a_valid_configuration_or_an_error(
        fixture in proptest::sample::select(fixtures::gguf_names()),
        place in any::<proptest::sample::Index>(),
        value in any::<[u8; 4]>(),
    ) {
        let mut bytes = fs::read(fixtures::gguf(&fixture)).unwrap();
        let end = value_of(&bytes, "tokenizer.ggml.model");
        let at = place.index(end);
        bytes[at..at + 4].copy_from_slice(&value);
        if let Ok(file) = GgufFile::from_bytes("changed.gguf", bytes)
            && let Ok(config) = DecoderConfig::from_gguf(&file)
        {
            prop_assert!(config.validate().is_ok());
        }
    }
}
