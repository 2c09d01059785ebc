//! Latent attention: what is cached, and what files without a part of it are told.

use super::fixtures;
use dsrun_core::{DType, Size, WeightFormat, op::Op, program::Origin};
use dsrun_models::{model::Model, step::ProgramOptions};
use rstest::rstest;
use safetensors::SafeTensors;
use std::fs;

#[rstest]
#[case("deepseek-v2-lite", 16)]
#[case("deepseek-v3", 128)]
fn a_token_has_576_elements_in_the_cache_of_a_layer(#[case] preset: &str, #[case] heads: usize) {
    let model = Model::random_named(preset, 1, WeightFormat::Dense(DType::BF16)).unwrap();
    let program = model.program(&ProgramOptions::default()).unwrap();
    let paged = |shape: &[Size]| shape.first() == Some(&Size::bucket("pages"));
    let mut caches = 0;
    for (_, value) in program.values_from(|origin| matches!(origin, Origin::State)) {
        let Some(tensor) = value.tensor_type().filter(|tensor| paged(&tensor.shape)) else { continue };
        assert_eq!(tensor.shape[1..], [1.into(), 16.into(), 576.into()], "{}", value.name);
        caches += 1;
    }
    assert_eq!(caches, model.config().layers);
    let attention = program.nodes.iter().filter_map(|node| match &node.call.op {
        Op::PagedAttention(op) => Some((op.query_heads as usize, op.kv_heads, op.value_size)),
        _ => None,
    });
    assert_eq!(attention.collect::<Vec<_>>(), vec![(heads, 1, 512); caches]);
}

#[test]
fn kimi_is_built_as_deepseek_v3() {
    let mut config = fixtures::config("deepseek_v3");
    config["model_type"] = "kimi_k2".into();
    let folder = fixtures::with_config("deepseek_v3", &config);
    let text = |model: Model| model.program(&ProgramOptions::default()).unwrap().to_string();
    let kimi = text(Model::open(folder.path()).unwrap());
    let deepseek = text(Model::open(fixtures::folder("deepseek_v3")).unwrap());
    assert_eq!(kimi.replace("kimi_k2", "deepseek_v3"), deepseek);
}

#[rstest]
#[case::latent("deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight")]
#[case::latent_norm("deepseek_v2", "model.layers.0.self_attn.kv_a_layernorm.weight")]
#[case::selection_bias("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias")]
#[case::expert("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight")]
#[case::expert_of_deepseek("deepseek_v2", "model.layers.1.mlp.experts.7.up_proj.weight")]
#[case::head_bias("phimoe", "lm_head.bias")]
fn tensors_that_are_missing_are_named(#[case] fixture: &str, #[case] missing: &str) {
    let folder = fixtures::with_config(fixture, &fixtures::config(fixture));
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let kept: Vec<_> = tensors.tensors().into_iter().filter(|(name, _)| name != missing).collect();
    assert_eq!(kept.len() + 1, tensors.len());
    fs::write(&path, safetensors::serialize(kept, None).unwrap()).unwrap();
    let error = match Model::open(folder.path()) {
        Ok(model) => model.program(&ProgramOptions::default()).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    assert!(error.contains(missing) && error.contains("is missing"), "{error}");
}
