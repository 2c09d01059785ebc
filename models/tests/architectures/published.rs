//! Fields of published `config.json` files that change nothing, since transformers does not read them or other models of the family need them.

use super::configs::{least, read, with};
use rstest::rstest;
use serde_json::{Value, json};

#[rstest]
#[case::command_r7b("cohere2", json!({
    "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0, "sliding_window_pattern": 4, "use_embedding_sharing": true, "use_gated_activation": true,
    "use_parallel_block": true, "use_parallel_embedding": true, "use_qk_norm": false,
}))]
#[case::dolly("gpt_neox", json!({"custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.Pipeline"}}}))]
#[case::gemma_2("gemma2", json!({"sliding_window": 4096, "sliding_window_size": 4096}))]
#[case::minimax_m2("minimax_m2", json!({
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
    "mlp_intermediate_size": 8192, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
}))]
#[case::modernbert("modernbert", json!({"position_embedding_type": "absolute"}))]
#[case::qwen3_coder("qwen3_moe", json!({"qkv_bias": false, "shared_expert_intermediate_size": 0, "use_qk_norm": true}))]
#[case::stablelm_3b("stablelm", json!({
    "norm_eps": 1e-5, "num_heads": 32, "rope_pct": 0.25, "rotary_scaling_factor": 1.0,
}))]
#[case::starcoder2("starcoder2", json!({
    "activation_function": "gelu", "attention_softmax_in_fp32": true, "layer_norm_epsilon": 1e-5, "mlp_type": "default",
    "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": true, "scale_attn_weights": true,
}))]
#[case::fine_tuned("mistral", json!({"_flash_attn_2_enabled": true, "bias": false}))]
#[case::distilgpt2("gpt2", json!({"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}))]
fn fields_that_change_nothing_are_accepted(#[case] model_type: &str, #[case] fields: Value) {
    assert_eq!(read(&with(model_type, fields)).unwrap(), read(&least(model_type)).unwrap());
}

/// GPT-NeoX-20b names the approximation of GELU by tanh so.
#[test]
fn gelu_fast_is_the_approximation_by_tanh() {
    let activation = |name: &str| read(&with("gpt_neox", json!({"hidden_act": name}))).unwrap().activation;
    assert_eq!(activation("gelu_fast"), activation("gelu_new"));
}

#[rstest]
#[case("cohere2", "layer_switch", json!(2), "layer_switch = 2 is not supported: it must be 4")]
#[case("cohere2", "rotary_pct", json!(0.5), "rotary_pct = 0.5 is not supported: it must be 1")]
#[case("cohere2", "use_embedding_sharing", json!(false), "use_embedding_sharing = false")]
#[case("llama", "bias", json!(true), "bias = true is not a field that is known for llama")]
#[case("minimax_m2", "layernorm_mlp_alpha", json!(3.5), "layernorm_mlp_alpha = 3.5")]
#[case("qwen3_moe", "qkv_bias", json!(true), "qkv_bias = true")]
#[case("qwen3_moe", "shared_expert_intermediate_size", json!(512), "there is no shared expert")]
#[case("qwen3_moe", "use_qk_norm", json!(false), "heads have norms")]
#[case("stablelm", "rotary_scaling_factor", json!(4), "rotary_scaling_factor = 4")]
#[case("starcoder2", "scale_attn_weights", json!(false), "scale_attn_weights = false")]
#[case("starcoder2", "mlp_type", json!("gated"), "mlp_type = \"gated\"")]
fn other_values_of_them_are_refused(
    #[case] model_type: &str,
    #[case] field: &str,
    #[case] value: Value,
    #[case] named: &str,
) {
    let message = read(&with(model_type, json!({field: value}))).unwrap_err().to_string();
    assert!(message.contains(named), "{message}");
}
