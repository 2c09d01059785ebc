//! The published configurations of well-known models, for benchmarks and tests with random weights.
//!
//! They are kept as the fields of their `config.json` files and read like those. What does not matter to the result is
//! left out. Where base and chat model differ, it is the chat model.

use crate::config::{ConfigError, DecoderConfig};

/// A well-known model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// The name it is chosen by.
    pub name: &'static str,
    /// Where it is published on the Hugging Face hub.
    pub repository: &'static str,
    json: &'static str,
}

impl Preset {
    /// All presets, smaller before larger within a family.
    pub const ALL: &'static [Self] = PRESETS;

    /// The preset of this name.
    pub fn from_name(name: &str) -> Option<&'static Self> {
        PRESETS.iter().find(|preset| preset.name == name)
    }

    /// The configuration.
    ///
    /// # Errors
    /// None that a test has not ruled out for every preset.
    pub fn config(&self) -> Result<DecoderConfig, ConfigError> {
        DecoderConfig::from_json_bytes(self.json.as_bytes())
    }
}

const PRESETS: &[Preset] = &[
    Preset {
        name: "smollm2-135m",
        repository: "HuggingFaceTB/SmolLM2-135M-Instruct",
        json: r#"{
            "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-05,
            "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000,
            "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2}"#,
    },
    Preset {
        name: "smollm2-360m",
        repository: "HuggingFaceTB/SmolLM2-360M-Instruct",
        json: r#"{
            "model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
            "num_attention_heads": 15, "num_key_value_heads": 5, "rms_norm_eps": 1e-05,
            "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000,
            "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2}"#,
    },
    Preset {
        name: "smollm2-1.7b",
        repository: "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        json: r#"{
            "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32,
            "rms_norm_eps": 1e-05, "vocab_size": 49152, "max_position_embeddings": 8192,
            "rope_theta": 130000, "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2}"#,
    },
    Preset {
        name: "llama-1b",
        repository: "meta-llama/Llama-3.2-1B-Instruct",
        json: r#"{
            "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "head_dim": 64, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192},
            "tie_word_embeddings": true, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}"#,
    },
    Preset {
        name: "llama-3b",
        repository: "meta-llama/Llama-3.2-3B-Instruct",
        json: r#"{
            "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192,
            "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "head_dim": 128, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192},
            "tie_word_embeddings": true, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}"#,
    },
    Preset {
        name: "llama-8b",
        repository: "meta-llama/Llama-3.1-8B-Instruct",
        json: r#"{
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "head_dim": 128, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192},
            "tie_word_embeddings": false, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}"#,
    },
    Preset {
        name: "llama-70b",
        repository: "meta-llama/Llama-3.1-70B-Instruct",
        json: r#"{
            "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
            "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "head_dim": 128, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192},
            "tie_word_embeddings": false, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}"#,
    },
    Preset {
        name: "qwen2.5-0.5b",
        repository: "Qwen/Qwen2.5-0.5B-Instruct",
        json: r#"{
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "use_sliding_window": false, "tie_word_embeddings": true, "bos_token_id": 151643,
            "eos_token_id": [151645, 151643]}"#,
    },
    Preset {
        name: "qwen2.5-7b",
        repository: "Qwen/Qwen2.5-7B-Instruct",
        json: r#"{
            "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "use_sliding_window": false, "tie_word_embeddings": false,
            "bos_token_id": 151643, "eos_token_id": [151645, 151643]}"#,
    },
    Preset {
        name: "qwen3-0.6b",
        repository: "Qwen/Qwen3-0.6B",
        json: r#"{
            "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "use_sliding_window": false, "tie_word_embeddings": true,
            "bos_token_id": 151643, "eos_token_id": [151645, 151643]}"#,
    },
    Preset {
        name: "qwen3-8b",
        repository: "Qwen/Qwen3-8B",
        json: r#"{
            "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "use_sliding_window": false, "tie_word_embeddings": false,
            "bos_token_id": 151643, "eos_token_id": [151645, 151643]}"#,
    },
    Preset {
        name: "qwen3-14b",
        repository: "Qwen/Qwen3-14B",
        json: r#"{
            "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408,
            "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "use_sliding_window": false, "tie_word_embeddings": false,
            "bos_token_id": 151643, "eos_token_id": [151645, 151643]}"#,
    },
    Preset {
        name: "qwen3-32b",
        repository: "Qwen/Qwen3-32B",
        json: r#"{
            "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
            "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "use_sliding_window": false, "tie_word_embeddings": false,
            "bos_token_id": 151643, "eos_token_id": [151645, 151643]}"#,
    },
    Preset {
        name: "gemma-3-4b",
        repository: "google/gemma-3-4b-it",
        json: r#"{
            "model_type": "gemma3", "eos_token_id": [1, 106], "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024, "bos_token_id": 2}}"#,
    },
    Preset {
        name: "phi-4-mini",
        repository: "microsoft/Phi-4-mini-instruct",
        json: r#"{
            "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
            "num_attention_heads": 24, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "vocab_size": 200064, "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75, "rope_scaling": {"type": "longrope",
                "short_factor": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
                "long_factor": [1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897,
                    1.956131817, 2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075,
                    3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555,
                    7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651,
                    14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418,
                    28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
                    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77]},
            "sliding_window": 262144, "tie_word_embeddings": true, "bos_token_id": 199999,
            "eos_token_id": 199999}"#,
    },
    Preset {
        name: "smollm3-3b",
        repository: "HuggingFaceTB/SmolLM3-3B",
        json: r#"{
            "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008,
            "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "vocab_size": 128256, "max_position_embeddings": 65536,
            "rope_theta": 5000000.0, "no_rope_layer_interval": 4, "use_sliding_window": false,
            "tie_word_embeddings": true, "bos_token_id": 128000, "eos_token_id": 128012}"#,
    },
    Preset {
        name: "mistral-7b",
        repository: "mistralai/Mistral-7B-Instruct-v0.3",
        json: r#"{
            "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 32768, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false,
            "bos_token_id": 1, "eos_token_id": 2}"#,
    },
    Preset {
        name: "gpt2",
        repository: "openai-community/gpt2",
        json: r#"{
            "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
            "layer_norm_epsilon": 1e-05, "activation_function": "gelu_new", "vocab_size": 50257,
            "bos_token_id": 50256, "eos_token_id": 50256}"#,
    },
    Preset {
        name: "gpt2-xl",
        repository: "openai-community/gpt2-xl",
        json: r#"{
            "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024,
            "layer_norm_epsilon": 1e-05, "activation_function": "gelu_new", "vocab_size": 50257,
            "bos_token_id": 50256, "eos_token_id": 50256}"#,
    },
    Preset {
        name: "opt-125m",
        repository: "facebook/opt-125m",
        json: r#"{
            "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "max_position_embeddings": 2048, "activation_function": "relu",
            "do_layer_norm_before": true, "word_embed_proj_dim": 768, "vocab_size": 50272,
            "bos_token_id": 2, "eos_token_id": 2}"#,
    },
    Preset {
        name: "opt-1.3b",
        repository: "facebook/opt-1.3b",
        json: r#"{
            "model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24,
            "num_attention_heads": 32, "max_position_embeddings": 2048, "activation_function": "relu",
            "do_layer_norm_before": true, "word_embed_proj_dim": 2048, "vocab_size": 50272,
            "bos_token_id": 2, "eos_token_id": 2}"#,
    },
    Preset {
        name: "opt-13b",
        repository: "facebook/opt-13b",
        json: r#"{
            "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40,
            "num_attention_heads": 40, "max_position_embeddings": 2048, "activation_function": "relu",
            "do_layer_norm_before": true, "word_embed_proj_dim": 5120, "vocab_size": 50272,
            "bos_token_id": 2, "eos_token_id": 2}"#,
    },
    Preset {
        name: "mixtral-8x7b",
        repository: "mistralai/Mixtral-8x7B-Instruct-v0.1",
        json: r#"{
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-05, "vocab_size": 32000, "max_position_embeddings": 32768,
            "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false, "bos_token_id": 1,
            "eos_token_id": 2}"#,
    },
    Preset {
        name: "qwen3-30b-a3b",
        repository: "Qwen/Qwen3-30B-A3B",
        json: r#"{
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "rms_norm_eps": 1e-06, "vocab_size": 151936, "max_position_embeddings": 40960,
            "rope_theta": 1000000.0, "use_sliding_window": false, "tie_word_embeddings": false,
            "bos_token_id": 151643, "eos_token_id": 151645}"#,
    },
    Preset {
        name: "olmoe-1b-7b",
        repository: "allenai/OLMoE-1B-7B-0125-Instruct",
        json: r#"{
            "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": false, "rms_norm_eps": 1e-05, "vocab_size": 50304,
            "max_position_embeddings": 4096, "rope_theta": 10000.0, "clip_qkv": null,
            "tie_word_embeddings": false, "eos_token_id": 50279}"#,
    },
    Preset {
        name: "gpt-oss-20b",
        repository: "openai/gpt-oss-20b",
        json: r#"{
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, "rms_norm_eps": 1e-05, "vocab_size": 201088,
            "max_position_embeddings": 131072, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 4096, "truncate": false},
            "attention_bias": true, "tie_word_embeddings": false, "eos_token_id": 200002}"#,
    },
    Preset {
        name: "deepseek-v2-lite",
        repository: "deepseek-ai/DeepSeek-V2-Lite-Chat",
        json: r#"{
            "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": null, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
            "norm_topk_prob": false, "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1,
            "topk_group": 1, "rms_norm_eps": 1e-06, "vocab_size": 102400, "max_position_embeddings": 163840,
            "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
            "attention_bias": false, "tie_word_embeddings": false, "bos_token_id": 100000, "eos_token_id": 100001}"#,
    },
    Preset {
        name: "deepseek-v3",
        repository: "deepseek-ai/DeepSeek-V3",
        json: r#"{
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
            "norm_topk_prob": true, "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "n_group": 8, "topk_group": 4, "rms_norm_eps": 1e-06, "vocab_size": 129280,
            "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096}, "num_nextn_predict_layers": 1,
            "attention_bias": false, "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 1}"#,
    },
    Preset {
        name: "phi-3.5-moe",
        repository: "microsoft/Phi-3.5-MoE-instruct",
        json: r#"{
            "model_type": "phimoe", "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01, "input_jitter_noise": 0.01, "attention_bias": true, "lm_head_bias": true,
            "rms_norm_eps": 1e-05, "vocab_size": 32064, "max_position_embeddings": 131072, "rope_theta": 10000.0,
            "sliding_window": 131072, "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 32000}"#,
    },
];
