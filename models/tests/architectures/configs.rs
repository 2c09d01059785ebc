//! Configurations: what they mean, what is refused, and that nothing in them makes the reader panic.

use super::fixtures;
use dsrun_core::op::Nonlinearity;
use dsrun_models::config::{Biases, ConfigError, DecoderConfig, LayerAttention, Norm, Rope, RopeScaling};
use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

pub(super) fn read(config: &Value) -> Result<DecoderConfig, ConfigError> {
    DecoderConfig::from_json_bytes(config.to_string().as_bytes())
}

/// The least that a configuration must say.
pub(super) fn least(model_type: &str) -> Value {
    match model_type {
        "gpt2" => {
            json!({"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000})
        }
        "opt" => json!({
            "model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 3,
            "num_attention_heads": 4, "vocab_size": 1000,
        }),
        "gemma3" => json!({"model_type": "gemma3", "text_config": least("gemma3_text")}),
        "llama4" => json!({"model_type": "llama4", "text_config": least("llama4_text")}),
        "mistral3" => json!({"model_type": "mistral3", "text_config": least("mistral")}),
        "llama4_text" => json!({
            "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_hidden_layers": 30, "vocab_size": 1000,
        }),
        _ => json!({
            "model_type": model_type, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 30,
            "num_attention_heads": 32, "vocab_size": 1000,
        }),
    }
}

/// The rotary embedding that all layers have.
fn rope(config: DecoderConfig) -> Rope {
    let [rope] = config.ropes()[..] else { panic!("{:?} are not one", config.ropes()) };
    assert!(config.attention.iter().all(|layer| layer.rope.is_some()));
    (**rope).clone()
}

/// How many keys a query sees in each layer.
fn windows(config: &DecoderConfig) -> Vec<Option<u32>> {
    config.attention.iter().map(|layer| layer.window).collect()
}

pub(super) fn with(model_type: &str, fields: Value) -> Value {
    let mut config = least(model_type);
    for (field, value) in fields.as_object().unwrap() {
        config[field] = value.clone();
    }
    config
}

#[test]
fn every_fixture_is_read() {
    for name in fixtures::names() {
        let config = read(&fixtures::config(&name)).unwrap();
        assert_eq!((config.vocabulary, config.bos, config.eos.as_slice()), (96, Some(1), &[2][..]), "{name}");
    }
}

#[rstest]
#[case("llama", 32, 128, 2048, Biases::default())]
#[case("mistral", 8, 128, 131_072, Biases::default())]
#[case("qwen2", 32, 128, 32_768, Biases { query: true, key: true, value: true, ..Biases::default() })]
#[case("qwen3", 32, 128, 32_768, Biases::default())]
fn fields_left_out_mean_what_their_architecture_says(
    #[case] model_type: &str,
    #[case] kv_heads: usize,
    #[case] head_dim: usize,
    #[case] context: usize,
    #[case] biases: Biases,
) {
    let config = read(&least(model_type)).unwrap();
    assert_eq!(config.architecture, model_type);
    assert_eq!((config.kv_heads, config.head_dim, config.context), (kv_heads, head_dim, context));
    assert_eq!((config.biases, config.tied), (biases, false));
    assert_eq!((config.eps, config.activation), (1e-6, Nonlinearity::Silu));
    let windowed = if model_type == "mistral" { Some(4096) } else { None };
    assert_eq!(windows(&config), vec![windowed; 30]);
    assert_eq!(rope(config).theta, 10_000.0);
    let switched_on = windows(&read(&with(model_type, json!({"use_sliding_window": true}))).unwrap());
    let qwen = model_type.starts_with("qwen");
    assert_eq!(switched_on[27..], if qwen { [None, Some(4096), Some(4096)] } else { [windowed; 3] });
}

#[test]
fn gpt2_and_opt_fill_in_what_is_left_out() {
    let norm = Norm::LAYER;
    let biases = Biases { gate: false, ..Biases::ALL };
    let gpt2 = read(&least("gpt2")).unwrap();
    let common = |config: &DecoderConfig| {
        (config.norm, config.eps, config.norm_after, config.final_norm, config.biases, config.tied)
    };
    assert_eq!(common(&gpt2), (norm, 1e-5, false, true, biases, true));
    assert_eq!((gpt2.intermediate, gpt2.context, gpt2.activation), (256, 1024, Nonlinearity::GeluTanh));
    assert_eq!(gpt2.attention, vec![LayerAttention::full(0.25); 3]);
    assert_eq!(gpt2.head_dim, 16);
    let opt = read(&least("opt")).unwrap();
    assert_eq!(common(&opt), (norm, 1e-5, false, true, biases, true));
    assert_eq!((opt.embedding, opt.context, opt.activation), (64, 2048, Nonlinearity::Relu));
    let after = read(&with("opt", json!({"do_layer_norm_before": false}))).unwrap();
    assert_eq!((after.norm_after, after.final_norm), (true, false));
}

#[test]
fn gemma_phi_olmo_and_smollm3_fill_in_what_is_left_out() {
    let plain = |theta: f64, head_dim| Rope::plain(theta, head_dim);
    let sizes = |config: &DecoderConfig| (config.kv_heads, config.head_dim, config.context, config.tied);

    let gemma = read(&least("gemma3_text")).unwrap();
    assert_eq!(sizes(&gemma), (4, 256, 131_072, true));
    assert_eq!((gemma.eps, gemma.activation), (1e-6, Nonlinearity::GeluTanh));
    assert_eq!(gemma.norm, Norm::Rms { weight_offset: 1.0 });
    assert_eq!(windows(&gemma)[4..7], [Some(4096), None, Some(4096)]);
    let [local, global] = gemma.ropes()[..] else { panic!() };
    assert_eq!((&**local, &**global), (&plain(10_000.0, 256), &plain(1_000_000.0, 256)));
    assert_eq!(gemma.attention[5].rope.as_ref(), Some(global));
    assert_eq!(gemma.attention[0].scale, 1.0 / 16.0);
    // The text model within one that sees images is the same.
    let inner = read(&least("gemma3")).unwrap();
    assert_eq!(inner, DecoderConfig { architecture: "gemma3", ..gemma });

    let phi = read(&least("phi3")).unwrap();
    assert_eq!((sizes(&phi), phi.eps), ((32, 128, 4096, false), 1e-5));
    assert_eq!(windows(&phi), [None; 30]);
    let half = read(&with("phi3", json!({"partial_rotary_factor": 0.5}))).unwrap();
    assert_eq!(rope(half), Rope { dimensions: 64, ..plain(10_000.0, 128) });

    let olmo2 = read(&least("olmo2")).unwrap();
    assert_eq!((sizes(&olmo2), olmo2.eps), ((32, 128, 2048, false), 1e-5));
    assert_eq!((windows(&olmo2), rope(olmo2)), (vec![None; 30], plain(10_000.0, 128)));
    let olmo3 = read(&least("olmo3")).unwrap();
    assert_eq!(windows(&olmo3)[2..5], [Some(4096), None, Some(4096)]);
    assert_eq!(rope(olmo3), plain(500_000.0, 128));

    let smollm3 = read(&least("smollm3")).unwrap();
    assert_eq!(sizes(&smollm3), (4, 128, 32_768, true));
    let rotated: Vec<bool> = smollm3.attention.iter().map(|layer| layer.rope.is_some()).collect();
    assert_eq!(rotated[2..9], [true, false, true, true, true, false, true]);
    assert_eq!((windows(&smollm3), &**smollm3.ropes()[0]), (vec![None; 30], &plain(2_000_000.0, 128)));
}

#[test]
fn long_rope_chooses_its_divisors_by_the_longest_text() {
    let table = json!({"type": "su", "short_factor": vec![2.0; 64], "long_factor": vec![8.0; 64]});
    let fields = json!({"rope_scaling": table, "max_position_embeddings": 131_072});
    let rope = rope(read(&with("phi3", fields)).unwrap());
    assert_eq!(rope.inverse_frequencies(4096)[0], 0.5);
    assert_eq!(rope.inverse_frequencies(4097)[0], 0.125);
    // The square root of 1 + ln(32) / ln(4096).
    assert!((rope.scale - 1.190_238).abs() < 1e-6, "{}", rope.scale);
}

#[test]
fn scores_are_divided_as_asked() {
    let scale = |fields: Value| read(&with("gpt2", fields)).unwrap().attention[2].scale;
    assert_eq!(scale(json!({})), 0.25);
    assert_eq!(scale(json!({"scale_attn_weights": false})), 1.0);
    assert_eq!(scale(json!({"scale_attn_by_inverse_layer_idx": true})), 1.0 / 12.0);
    // Where they are computed is not the configuration's to say.
    assert_eq!(scale(json!({"reorder_and_upcast_attn": true})), 0.25);
}

#[test]
fn null_means_as_many_heads_except_where_it_means_nothing() {
    for model_type in ["llama", "mistral", "qwen2", "qwen3"] {
        let config = read(&with(model_type, json!({"num_key_value_heads": null}))).unwrap();
        assert_eq!(config.kv_heads, 32, "{model_type}");
        let config = read(&with(model_type, json!({"head_dim": null, "num_key_value_heads": 8})));
        assert_eq!(config.is_err(), model_type == "qwen3");
    }
    assert_eq!(read(&with("qwen3", json!({"num_attention_heads": 64}))).unwrap().head_dim, 128);
}

#[test]
fn the_table_of_rotary_parameters_wins_over_what_stands_beside_it() {
    let theta = |fields| rope(read(&with("llama", fields)).unwrap()).theta;
    assert_eq!(theta(json!({"rope_theta": 5.0})), 5.0);
    assert_eq!(theta(json!({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}})), 7.0);
    assert_eq!(theta(json!({"rope_theta": 5.0, "rope_parameters": {"rope_type": "default"}})), 5.0);
    let both =
        json!({"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {"type": "linear", "factor": 2.0}});
    assert_eq!(theta(both), 10_000.0);
    assert_eq!(theta(json!({"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {}})), 7.0);
}

#[test]
fn llama3_scaling_falls_back_to_the_context() {
    let scaling = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4});
    let config =
        read(&with("llama", json!({"rope_scaling": scaling, "max_position_embeddings": 512}))).unwrap();
    let RopeScaling::Llama3 { original_context, factor, .. } = rope(config).scaling else { panic!() };
    assert_eq!((original_context, factor), (512, 8.0));
}

/// The expected numbers are those of transformers 5.23, which computes them in f32.
#[rstest]
#[case::llama_1b(
    "llama-1b",
    &[(0, 1.0), (1, 0.663_601_3), (13, 0.004_839_421), (14, 0.003_211_446), (15, 0.001_290_548),
      (16, 0.000_429_557), (17, 9.708_286e-5), (18, 1.946_164e-5), (31, 9.418_306e-8)]
)]
#[case::smollm2(
    "smollm2-135m",
    &[(0, 1.0), (1, 0.697_830_6), (16, 0.003_162_278), (31, 1.433_012_7e-5)]
)]
fn rotary_frequencies_are_those_of_transformers(#[case] preset: &str, #[case] expected: &[(usize, f32)]) {
    let config = dsrun_models::presets::Preset::from_name(preset).unwrap().config().unwrap();
    let (head_dim, context) = (config.head_dim, config.context);
    let frequencies = rope(config).inverse_frequencies(context);
    assert_eq!(frequencies.len(), head_dim / 2);
    for (pair, frequency) in expected {
        let relative = (frequencies[*pair] / frequency - 1.0).abs();
        assert!(relative < 1e-6, "pair {pair}: {} is not {frequency}", frequencies[*pair]);
    }
}

/// What is wrong is named in the message.
#[rstest]
#[case::family("bloom", json!({}), "supported: llama, mistral, qwen2, qwen3, gemma3_text, gemma3, phi3, olmo2, olmo3, smollm3, gpt2, opt")]
#[case::mixtral_top_k("mixtral", json!({"num_experts_per_tok": 9}), "num_experts_per_tok is 9")]
#[case::mixtral_no_experts("mixtral", json!({"num_local_experts": 0}), "num_local_experts is 0")]
#[case::mixtral_router("mixtral", json!({"router_score": "sigmoid"}), "router_score")]
#[case::qwen3_moe_layers("qwen3_moe", json!({"mlp_only_layers": [99]}), "mlp_only_layers is [99]")]
#[case::qwen3_moe_counts("qwen3_moe", json!({"num_experts": 8, "num_local_experts": 4}), "num_local_experts")]
#[case::qwen3_moe_experts("qwen3_moe", json!({"moe_intermediate_size": 0}), "moe_intermediate_size is 0")]
#[case::olmoe_clip("olmoe", json!({"clip_qkv": 8.0}), "clip_qkv")]
#[case::minimax_linear_attention("minimax_m2", json!({"attn_type_list": [1, 0]}), "attn_type_list")]
#[case::minimax_rotation("minimax_m2", json!({"rotary_dim": 256}), "rotary_dim is 256, but must be at most 128")]
#[case::minimax_softmax("minimax_m2", json!({"scoring_func": "softmax"}), "scoring_func")]
#[case::minimax_norms_of_heads("minimax_m2", json!({"qk_norm_type": "per_head"}), "qk_norm_type")]
#[case::minimax_shared("minimax_m2", json!({"shared_intermediate_size": 64}), "shared_intermediate_size")]
#[case::llama4_factors("llama4_text", json!({"max_position_embeddings": 2_147_483_647}), "max_position_embeddings is 2147483647, but must be at most 16777216")]
#[case::gpt_oss_activation("gpt_oss", json!({"swiglu_alpha": 2.0}), "swiglu_alpha")]
#[case::granite_scale("granitemoe", json!({"logits_scaling": 0}), "logits_scaling is 0")]
#[case::glm_groups("glm4_moe", json!({"n_group": 3}), "n_group is 3")]
#[case::glm_top_groups("glm4_moe", json!({"topk_group": 2}), "topk_group is 2")]
#[case::glm_small_groups("glm4_moe", json!({"n_group": 128, "topk_group": 4}), "topk_group is 4")]
#[case::deepseek_groups("deepseek_v3", json!({"n_group": 3}), "n_group is 3")]
#[case::deepseek_method("deepseek_v2", json!({"topk_method": "random", "num_experts_per_tok": 2}), "topk_method = \"random\"")]
#[case::deepseek_scores("deepseek_v3", json!({"scoring_func": "softmax"}), "scoring_func")]
#[case::deepseek_top_k("deepseek_v3", json!({"num_experts_per_tok": 300}), "num_experts_per_tok is 300")]
#[case::deepseek_rank("deepseek_v3", json!({"kv_lora_rank": 0}), "kv_lora_rank is 0")]
#[case::deepseek_odd("deepseek_v3", json!({"qk_nope_head_dim": 7}), "qk_nope_head_dim is 7")]
#[case::deepseek_heads("deepseek_v3", json!({"num_key_value_heads": 4}), "num_key_value_heads = 4")]
#[case::deepseek_rotation("kimi_k2", json!({"rope_interleave": false}), "rope_interleave = false")]
#[case::deepseek_router("kimi_k2", json!({"router_bias": true}), "router_bias")]
#[case::phimoe_top_k("phimoe", json!({"num_experts_per_tok": 3}), "num_experts_per_tok = 3")]
#[case::phimoe_noise("phimoe", json!({"router_jitter_noise": -1}), "router_jitter_noise is -1")]
#[case::phimoe_scales(
    "phimoe",
    json!({"rope_scaling": {"type": "longrope", "short_factor": vec![1.0; 64], "long_factor": vec![1.0; 64],
        "short_mscale": 1.5, "long_mscale": 2}}),
    "rope_scaling.long_mscale = 2"
)]
#[case::llama4_top_k("llama4_text", json!({"num_experts_per_tok": 2}), "num_experts_per_tok = 2")]
#[case::llama4_chunk("llama4_text", json!({"attention_chunk_size": 0}), "attention_chunk_size is 0")]
#[case::llama4_no_chunk(
    "llama4_text",
    json!({"attention_chunk_size": null, "layer_types": vec!["chunked_attention"; 30]}),
    "layer_types[0] = \"chunked_attention\""
)]
#[case::llama4_windows("llama4_text", json!({"layer_types": vec!["sliding_attention"; 30]}), "layer_types[0]")]
#[case::llama4_experts("llama4_text", json!({"moe_layers": [30]}), "moe_layers is [30]")]
#[case::llama4_floor("llama4_text", json!({"floor_scale": 0}), "floor_scale is 0")]
#[case::llama4_text("llama4", json!({"text_config": least("llama")}), "text_config.model_type")]
#[case::gemma2_caps("gemma2", json!({"final_logit_softcapping": -1}), "final_logit_softcapping is -1")]
#[case::gemma2_sides("gemma2", json!({"use_bidirectional_attention": true}), "use_bidirectional_attention")]
#[case::phi_norms("phi", json!({"qk_layernorm": true}), "qk_layernorm")]
#[case::cohere_norms("cohere", json!({"use_qk_norm": true}), "use_qk_norm")]
#[case::exaone_pattern("exaone4", json!({"sliding_window_pattern": "LLX"}), "sliding_window_pattern is LLX")]
#[case::ministral3_rope("ministral3", json!({}), "rope_parameters is missing")]
#[case::mistral3_text("mistral3", json!({"text_config": {"model_type": "llama"}}), "text_config.model_type")]
#[case::other_name("gpt2", json!({"hidden_size": 64}), "hidden_size")]
#[case::gpt2_heads("gpt2", json!({"n_head": 5}), "n_head is 5")]
#[case::gpt2_inner("gpt2", json!({"n_inner": 0}), "n_inner is 0")]
#[case::gpt2_positions("gpt2", json!({"n_positions": 0}), "n_positions is 0")]
#[case::gpt2_eps("gpt2", json!({"layer_norm_epsilon": -1}), "layer_norm_epsilon is -1")]
#[case::gpt2_activation("gpt2", json!({"activation_function": "tanh"}), "activation_function = \"tanh\"")]
#[case::gpt2_cross("gpt2", json!({"add_cross_attention": true}), "add_cross_attention")]
#[case::gpt2_flag("gpt2", json!({"scale_attn_weights": 1}), "scale_attn_weights is 1")]
#[case::opt_heads("opt", json!({"num_attention_heads": 7}), "num_attention_heads is 7")]
#[case::opt_width("opt", json!({"word_embed_proj_dim": 0}), "word_embed_proj_dim is 0")]
#[case::opt_positions("opt", json!({"learned_embeddings": false}), "learned_embeddings")]
#[case::opt_scaled("opt", json!({"scale_embeddings": true}), "scale_embeddings")]
#[case::opt_norms("opt", json!({"do_layer_norm_before": "no"}), "do_layer_norm_before is \"no\"")]
#[case::no_heads("llama", json!({"num_attention_heads": null}), "num_attention_heads is missing")]
#[case::zero("llama", json!({"num_hidden_layers": 0}), "num_hidden_layers is 0")]
#[case::negative("llama", json!({"vocab_size": -5}), "vocab_size is -5")]
#[case::fraction("llama", json!({"hidden_size": 12.5}), "hidden_size is 12.5")]
#[case::absurd("llama", json!({"hidden_size": u64::MAX}), "hidden_size")]
#[case::absurd_layers("llama", json!({"num_hidden_layers": 1_000_000_000}), "num_hidden_layers")]
#[case::text("llama", json!({"intermediate_size": "64"}), "intermediate_size is \"64\"")]
#[case::heads("llama", json!({"num_attention_heads": 33}), "num_attention_heads is 33")]
#[case::groups("llama", json!({"num_key_value_heads": 5}), "num_key_value_heads is 5")]
#[case::odd("llama", json!({"head_dim": 15}), "head_dim is 15")]
#[case::eps("llama", json!({"rms_norm_eps": 0}), "rms_norm_eps is 0")]
#[case::tiny_eps("llama", json!({"rms_norm_eps": 1e-60}), "rms_norm_eps")]
#[case::theta("llama", json!({"rope_theta": -1.0}), "rope_theta is -1")]
#[case::theta_inside("llama", json!({"rope_parameters": {"rope_theta": 0}}), "rope_parameters.rope_theta is 0")]
#[case::factor("llama", json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor is missing")]
#[case::yarn("llama", json!({"rope_scaling": {"type": "yarn", "beta_fast": 32}}), "rope_scaling.factor is missing")]
#[case::yarn_betas(
    "llama",
    json!({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 32}}),
    "beta_fast is 1"
)]
#[case::yarn_mscale(
    "llama",
    json!({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 0.7}}),
    "rope_scaling.mscale"
)]
#[case::dynamic("llama", json!({"rope_scaling": {"type": "dynamic", "factor": 2}}), "dynamic")]
#[case::longrope(
    "qwen2",
    json!({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}),
    "rope_parameters.short_factor is [1.0], but must be a list of 64 numbers"
)]
#[case::rope_field("llama", json!({"rope_scaling": {"type": "linear", "factor": 2, "base": 3}}), "rope_scaling.base")]
#[case::layered_rope("qwen3", json!({"rope_parameters": {"full_attention": {}}}), "rope_parameters.full_attention")]
#[case::bands(
    "llama",
    json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}),
    "high_freq_factor"
)]
#[case::partial("llama", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor = 0.5")]
#[case::activation("llama", json!({"hidden_act": "swish2"}), "hidden_act = \"swish2\"")]
#[case::window("mistral", json!({"sliding_window": 0}), "sliding_window is 0")]
#[case::kinds("qwen2", json!({"layer_types": ["full_attention"]}), "layer_types is 1 long")]
#[case::kind("qwen2", json!({"num_hidden_layers": 1, "layer_types": ["mamba"]}), "layer_types[0] = \"mamba\"")]
#[case::kind_without_window(
    "qwen2",
    json!({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    "layer_types[0] = \"sliding_attention\""
)]
#[case::switch_of_no_one("llama", json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping = 50.0")]
#[case::unknown("llama", json!({"clip_qkv": 8}), "clip_qkv")]
#[case::soft_cap("gemma3_text", json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping = 30.0")]
#[case::bidirectional("gemma3_text", json!({"use_bidirectional_attention": true}), "use_bidirectional_attention")]
#[case::no_window("gemma3_text", json!({"sliding_window": null}), "sliding_window is null")]
#[case::period("gemma3_text", json!({"sliding_window_pattern": 0}), "sliding_window_pattern is 0")]
#[case::query_scale("gemma3_text", json!({"query_pre_attn_scalar": 0}), "query_pre_attn_scalar is 0")]
#[case::other_activation("gemma3_text", json!({"hidden_act": "silu"}), "hidden_act")]
#[case::flat_table("gemma3_text", json!({"rope_parameters": {"rope_theta": 5.0}}), "rope_parameters.rope_theta")]
#[case::two_tables(
    "olmo3",
    json!({"rope_scaling": {"type": "linear"}, "rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    "rope_scaling and rope_parameters contradict"
)]
#[case::kind_of_layer("olmo3", json!({"rope_parameters": {"chunked_attention": {}}}), "rope_parameters.chunked_attention")]
#[case::inner_scaling(
    "olmo3",
    json!({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}),
    "rope_parameters.sliding_attention.factor is missing"
)]
#[case::no_text("gemma3", json!({"text_config": null}), "text_config is missing")]
#[case::inner_field("gemma3", json!({"text_config": {"hidden_size": "x"}}), "text_config.hidden_size is")]
#[case::odd_part("phi3", json!({"partial_rotary_factor": 0.4}), "rotated elements is 51")]
#[case::large_part("phi3", json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor is 1.5")]
#[case::no_list("phi3", json!({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}), "short_factor is missing")]
#[case::negative_list(
    "phi3",
    json!({"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": vec![-1.0; 64]}}),
    "rope_scaling.short_factor is"
)]
#[case::phi_bias("phi3", json!({"lm_head_bias": true}), "lm_head_bias = true")]
#[case::phi_attention("phi3", json!({"full_attn_mod": 2}), "full_attn_mod = 2")]
#[case::clipped("olmo2", json!({"clip_qkv": 8}), "clip_qkv")]
#[case::too_few_rotated("smollm3", json!({"no_rope_layers": [1, 0]}), "no_rope_layers is 2 long")]
#[case::rotated_twice("smollm3", json!({"no_rope_layers": [2]}), "no_rope_layers is [2]")]
#[case::interval("smollm3", json!({"no_rope_layer_interval": 0}), "no_rope_layer_interval is 0")]
#[case::window_off(
    "smollm3",
    json!({"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 8}),
    "layer_types[0] = \"sliding_attention\""
)]
#[case::encoder("llama", json!({"is_encoder_decoder": true}), "is_encoder_decoder")]
#[case::tokens("llama", json!({"eos_token_id": [1, "x"]}), "eos_token_id")]
#[case::tied("llama", json!({"tie_word_embeddings": "yes"}), "tie_word_embeddings")]
fn errors_name_the_field(#[case] model_type: &str, #[case] fields: Value, #[case] named: &str) {
    let message = read(&with(model_type, fields)).unwrap_err().to_string();
    assert!(message.contains(named), "{message}");
}

#[rstest]
#[case(b"")]
#[case(b"[]")]
#[case(b"{\"model_type\": \"llama\"")]
#[case(b"{\"rope_theta\": 1e999}")]
#[case(b"\xff\xfe")]
fn files_that_are_no_json_objects_are_refused(#[case] bytes: &[u8]) {
    assert!(matches!(DecoderConfig::from_json_bytes(bytes), Err(ConfigError::Json { .. })));
}

#[test]
fn deeply_nested_json_is_an_error() {
    let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let config = format!("{{\"model_type\": \"llama\", \"x\": {nested}}}");
    assert!(matches!(DecoderConfig::from_json_bytes(config.as_bytes()), Err(ConfigError::Json { .. })));
}

#[test]
fn unknown_fields_of_value_null_are_as_good_as_left_out() {
    assert_eq!(read(&with("llama", json!({"clip_qkv": null}))).unwrap(), read(&least("llama")).unwrap());
}

/// Values of every kind, with those near the edges of what numbers can hold.
fn any_value() -> impl Strategy<Value = Value> {
    let edges = [0, 1, 2, 3, 64, i64::from(i32::MAX), i64::from(u32::MAX), 1 << 40, i64::MAX, -1, i64::MIN];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        proptest::sample::select(edges.to_vec()).prop_map(Value::from),
        (1u64..5000).prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        proptest::sample::select(vec![1e-320, 1e-38, 1e38, 1e300, -0.0, 0.5]).prop_map(Value::from),
        proptest::sample::select(vec![
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "silu",
            "gelu",
            "linear",
            "llama3",
            "yarn",
            "longrope",
            "default",
            "sliding_attention",
            "full_attention",
            "",
        ])
        .prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 16, 8, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::vec((proptest::sample::select(ROPE_FIELDS.to_vec()), inner), 0..6)
                .prop_map(|fields| fields
                    .into_iter()
                    .map(|(field, value)| (field.to_owned(), value))
                    .collect()),
        ]
    })
}

const ROPE_FIELDS: [&str; 15] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "short_factor",
    "long_factor",
    "full_attention",
    "sliding_attention",
];

const FIELDS: [&str; 43] = [
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "n_positions",
    "layer_norm_epsilon",
    "activation_function",
    "ffn_dim",
    "word_embed_proj_dim",
    "do_layer_norm_before",
    "scale_attn_by_inverse_layer_idx",
    "eos_token_id",
    "text_config",
    "sliding_window_pattern",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "hidden_activation",
    "partial_rotary_factor",
    "no_rope_layers",
    "no_rope_layer_interval",
    "an_unknown_field",
    "original_max_position_embeddings",
];

const ARCHITECTURES: [&str; 12] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gemma3",
    "phi3",
    "olmo2",
    "olmo3",
    "smollm3",
    "gpt2",
    "opt",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn hostile_values_give_a_valid_configuration_or_an_error(
        model_type in proptest::sample::select(ARCHITECTURES.to_vec()),
        changes in proptest::collection::vec((proptest::sample::select(FIELDS.to_vec()), any_value()), 1..4),
    ) {
        let mut config = least(model_type);
        for (field, value) in changes {
            config[field] = value;
        }
        match read(&config) {
            Ok(config) => {
                prop_assert!(config.validate().is_ok());
                for rope in config.ropes() {
                    let frequencies = rope.inverse_frequencies(config.context);
                    prop_assert!(frequencies.iter().all(|frequency| frequency.is_finite() && *frequency > 0.0));
                }
            }
            Err(error) => prop_assert!(error.to_string().len() < 600, "{error}"),
        }
    }

    #[test]
    fn bytes_of_any_kind_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = DecoderConfig::from_json_bytes(&bytes);
    }
}
