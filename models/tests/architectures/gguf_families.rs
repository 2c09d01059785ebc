//! Families whose GGUF files leave out settings, or hold them in a form of their own.

use super::fixtures;
use dsrun_models::{
    config::{DecoderConfig, RopeScaling, Temperature},
    gguf::GgufFile,
    model::Model,
    sentence_transformers::{TextEmbedding, TextPooling},
};
use rstest::rstest;
use std::fs;

/// The configuration that a file has once bytes are changed.
fn read(bytes: Vec<u8>) -> Result<DecoderConfig, String> {
    let file = GgufFile::from_bytes("changed.gguf", bytes).map_err(|error| error.to_string())?;
    DecoderConfig::from_gguf(&file).map_err(|error| error.to_string())
}

/// Where a key starts.
fn place_of(bytes: &[u8], key: &str) -> usize {
    bytes.windows(key.len()).position(|window| window == key.as_bytes()).unwrap()
}

/// The fixture with another value of a key, which has 4 bytes.
fn changed(fixture: &str, key: &str, value: [u8; 4]) -> Result<DecoderConfig, String> {
    let mut bytes = fs::read(fixtures::gguf(fixture)).unwrap();
    // Between the key and its value stands the number of the type.
    let at = place_of(&bytes, key) + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&value);
    read(bytes)
}

/// The fixture without a key: it becomes one of another architecture.
fn without(fixture: &str, key: &str) -> Vec<u8> {
    let mut bytes = fs::read(fixtures::gguf(fixture)).unwrap();
    let at = place_of(&bytes, key);
    bytes[at..at + 5].copy_from_slice(b"other");
    bytes
}

/// The configuration of the file with one key more.
fn with(bytes: Vec<u8>, key: &str, kind: u32, value: [u8; 4]) -> Result<DecoderConfig, String> {
    read(extended(bytes, key, kind, value))
}

/// The file with one key more, of a type with this number.
fn extended(mut bytes: Vec<u8>, key: &str, kind: u32, value: [u8; 4]) -> Vec<u8> {
    let entry = |key: &str, kind: u32, value: &[u8]| {
        [&(key.len() as u64).to_le_bytes(), key.as_bytes(), &kind.to_le_bytes(), value].concat()
    };
    let mut entries = entry(key, kind, &value);
    // A text fills up to the alignment, so that tensors stay where they are.
    let empty = entries.len() + entry("fill", 8, &[0; 8]).len();
    let text = vec![b' '; empty.next_multiple_of(32) - empty];
    entries.extend(entry("fill", 8, &[&(text.len() as u64).to_le_bytes(), &text[..]].concat()));
    let keys = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
    bytes[16..24].copy_from_slice(&(keys + 2).to_le_bytes());
    bytes.splice(24..24, entries);
    bytes
}

const U32: u32 = 4;
const F32: u32 = 6;

#[test]
fn llama_4_has_the_chunks_and_the_temperature_of_its_family() {
    let model = Model::open(fixtures::gguf("llama4_scout_bf16")).unwrap();
    let config = model.config();
    assert!(config.head_norms);
    for (index, layer) in config.attention.iter().enumerate() {
        let rotated = (index + 1) % 4 != 0;
        let temperature = Temperature { interval: 8192, offset: 1, growth: 0.1 };
        assert_eq!(layer.rope.is_some(), rotated, "layer {index}");
        assert_eq!(layer.chunk, rotated.then_some(8192), "layer {index}");
        assert_eq!(layer.temperature, (!rotated).then_some(temperature), "layer {index}");
    }
    let sparse = |step: u32| {
        let config = changed("llama4_scout_bf16", "llama4.interleave_moe_layer_step", step.to_le_bytes());
        config.unwrap().mixture.unwrap().layers
    };
    assert_eq!(sparse(1), [true; 4]);
    assert_eq!(sparse(2), [false, true, false, true]);
    // Maverick has 128 experts, and no norms of heads.
    let maverick = changed("llama4_scout_bf16", "llama4.expert_count", 128u32.to_le_bytes()).unwrap();
    assert!(!maverick.head_norms);
}

#[rstest]
#[case::experts("llama4.expert_used_count", 2, "llama4.expert_used_count = 2")]
#[case::step("llama4.interleave_moe_layer_step", 0, "llama4.interleave_moe_layer_step is 0")]
#[case::no_shared("llama4.expert_feed_forward_length", 0, "llama4.expert_feed_forward_length is 0")]
fn llama_4_is_refused_by_name(#[case] key: &str, #[case] value: u32, #[case] named: &str) {
    let message = changed("llama4_scout_bf16", key, value.to_le_bytes()).unwrap_err();
    assert!(message.contains(named), "{message}");
}

#[rstest]
#[case::none("llama4.attention.sliding_window", 0, "llama4.attention.sliding_window = 0")]
#[case::shorter("llama4.attention.sliding_window", 4096, "llama4.attention.sliding_window = 4096")]
#[case::pattern("llama4.attention.sliding_window_pattern", 2, "llama4.attention.sliding_window_pattern")]
fn other_chunks_of_llama_4_are_refused_by_name(#[case] key: &str, #[case] value: u32, #[case] named: &str) {
    let bytes = fs::read(fixtures::gguf("llama4_scout_bf16")).unwrap();
    let message = with(bytes.clone(), key, U32, value.to_le_bytes()).unwrap_err();
    assert!(message.contains(named), "{message}");
    let same = with(bytes.clone(), "llama4.attention.sliding_window", U32, 8192u32.to_le_bytes());
    assert_eq!(same, read(bytes));
}

#[test]
fn phi_3_5_moe_replaces_the_factor_that_follows_from_the_contexts() {
    const KEY: &str = "phimoe.rope.scaling.attn_factor";
    let factor = |config: DecoderConfig| {
        let [rope] = config.ropes()[..] else { panic!("{:?} are not one", config.ropes()) };
        assert!(matches!(rope.scaling, RopeScaling::Long { original_context: 16, .. }));
        rope.scale
    };
    let bytes = fs::read(fixtures::gguf("phimoe_published_bf16")).unwrap();
    assert_eq!(factor(read(bytes).unwrap()), 1.243_163_1);
    // Another converter may write the factor of the model.
    assert_eq!(factor(changed("phimoe_published_bf16", KEY, 1.5f32.to_le_bytes()).unwrap()), 1.5);
    let message =
        changed("phimoe_published_bf16", "phimoe.expert_used_count", 3u32.to_le_bytes()).unwrap_err();
    assert!(message.contains("phimoe.expert_used_count = 3"), "{message}");
}

#[test]
fn mistral_small_has_no_temperature() {
    let bytes = without("ministral3_bf16", "mistral3.attention.temperature_scale");
    let config = read(bytes).unwrap();
    assert_eq!(config.architecture, "mistral3");
    assert!(config.attention.iter().all(|layer| layer.temperature.is_none()));
    let zero =
        changed("ministral3_bf16", "mistral3.attention.temperature_scale", 0f32.to_le_bytes()).unwrap();
    assert_eq!(zero, config);
    let negative = changed("ministral3_bf16", "mistral3.attention.temperature_scale", (-1f32).to_le_bytes());
    assert!(negative.unwrap_err().contains("mistral3.attention.temperature_scale is -1"));
}

#[test]
fn the_multiplier_of_yarn_divides_its_gain() {
    const KEY: &str = "mistral3.rope.scaling.yarn_log_multiplier";
    let factor = |config: DecoderConfig| config.ropes()[0].scale;
    let gain = 0.1 * 16f32.ln() + 1.0;
    let near =
        |found: f32, wanted: f32| assert!((found / wanted - 1.0).abs() < 1e-6, "{found} is not {wanted}");
    let model = Model::open(fixtures::gguf("ministral3_bf16")).unwrap();
    near(factor(model.config().clone()), 1.0);
    near(factor(read(without("ministral3_bf16", KEY)).unwrap()), gain);
    near(factor(changed("ministral3_bf16", KEY, 0f32.to_le_bytes()).unwrap()), gain);
    let half = changed("ministral3_bf16", KEY, 0.5f32.to_le_bytes()).unwrap();
    near(factor(half), gain / (0.05 * 16f32.ln() + 1.0));

    // The factor itself may stand beside the multiplier, but not another one.
    let own = "mistral3.rope.scaling.attn_factor";
    let bytes = fs::read(fixtures::gguf("ministral3_bf16")).unwrap();
    assert_eq!(with(bytes.clone(), own, F32, 1f32.to_le_bytes()), read(bytes.clone()));
    let message = with(bytes, own, F32, 1.5f32.to_le_bytes()).unwrap_err();
    assert!(message.contains(own) && message.contains(KEY), "{message}");
}

#[test]
fn experts_of_mistral_3_and_windows_without_a_list_of_layers_are_refused_by_name() {
    let bytes = fs::read(fixtures::gguf("ministral3_bf16")).unwrap();
    for (key, value) in [("mistral3.expert_count", 8u32), ("mistral3.attention.sliding_window", 16)] {
        let message = with(bytes.clone(), key, U32, value.to_le_bytes()).unwrap_err();
        assert!(message.contains(key), "{message}");
    }
}

#[test]
fn glm_4_of_the_first_release_has_two_forms_of_one_model() {
    let [one, other] =
        ["glm_bf16", "glm_separate_bf16"].map(|name| Model::open(fixtures::gguf(name)).unwrap());
    assert_eq!(one.config(), other.config());
    let biases = one.config().biases;
    assert!(biases.query && biases.key && biases.value && !biases.output);
    let has = |model: &Model, tensor: &str| model.weights().names().contains(&tensor);
    assert!(has(&one, "blk.0.attn_qkv.weight") && !has(&one, "blk.0.attn_q.weight"));
    assert!(has(&other, "blk.0.attn_q.weight") && !has(&other, "blk.0.attn_qkv.weight"));
}

#[test]
fn granite_with_experts_may_have_a_shared_one() {
    const KEY: &str = "granitemoe.expert_shared_feed_forward_length";
    let shared = |config: DecoderConfig| (config.architecture, config.mixture.unwrap().shared);
    let model = Model::open(fixtures::gguf("granitemoeshared_f16")).unwrap();
    let (architecture, expert) = shared(model.config().clone());
    assert_eq!(
        (architecture, expert.unwrap().intermediate, expert.unwrap().gated),
        ("granitemoeshared", 24, false)
    );
    let none = changed("granitemoeshared_f16", KEY, 0u32.to_le_bytes()).unwrap();
    assert_eq!(shared(none), ("granitemoe", None));
}

/// As the published files of Qwen3-Embedding say it.
#[rstest]
#[case::none(0, Ok(None))]
#[case::mean(1, Ok(Some(TextPooling::Mean)))]
#[case::first(2, Ok(Some(TextPooling::First)))]
#[case::last(3, Ok(Some(TextPooling::Last)))]
#[case::rank(4, Err("qwen2.pooling_type = 4 is not supported: supported: 0 (none)"))]
fn files_say_how_texts_are_pooled(
    #[case] value: u32,
    #[case] expected: Result<Option<TextPooling>, &'static str>,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("embedding.gguf");
    let bytes = fs::read(fixtures::gguf("qwen2_f32")).unwrap();
    fs::write(&path, extended(bytes, "qwen2.pooling_type", U32, value.to_le_bytes())).unwrap();
    match (Model::open(&path), expected) {
        (Ok(model), Ok(pooling)) => {
            let expected = pooling.map(|pooling| TextEmbedding { pooling, normalize: true });
            assert_eq!(model.embedding(), expected);
        }
        (Err(error), Err(named)) => assert!(error.to_string().contains(named), "{error}"),
        (opened, expected) => {
            panic!("{:?} where {expected:?} was expected", opened.map(|model| model.embedding()))
        }
    }
}
