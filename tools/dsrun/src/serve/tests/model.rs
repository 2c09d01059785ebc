//! A tiny model with random weights, a token for every byte, and a chat template with tools.

use serde_json::{Map, Value, json};
use std::{fs, path::Path};
use tempfile::TempDir;

const SPECIAL: [&str; 3] = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"];
const WIDTH: usize = 32;
const LAYERS: usize = 2;
const FEED_FORWARD: usize = 64;

/// The context: the maximum tokens of a prompt and its answer together.
pub(crate) const CONTEXT: usize = 4096;

/// The token that ends an answer.
const END: u32 = 256;

/// A chat template in the style of Hermes.
const TEMPLATE: &str = "{%- if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools>\nAnswer with <tool_call>.\
    <|im_end|>\n{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
    {%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n\
    {% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Writes the model into a temporary folder.
pub(crate) fn tiny() -> TempDir {
    tiny_with(&[])
}

/// Writes a model whose answers end after some dozens of letters, if they are sampled, into a temporary folder.
#[allow(dead_code, reason = "not every test binary that has this module needs it")]
pub(crate) fn tiny_that_ends() -> TempDir {
    written(&[], true)
}

/// Writes a model with further control tokens, from token 259 on, into a temporary folder.
pub(crate) fn tiny_with(further: &[&str]) -> TempDir {
    written(further, false)
}

/// Writes a model with further control tokens; `ends` makes the token that ends answers as likely as a letter.
fn written(further: &[&str], ends: bool) -> TempDir {
    let special: Vec<&str> = SPECIAL.iter().chain(further).copied().collect();
    // A token for each byte, then the control tokens.
    let size = 256 + special.len();
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, value: Value| {
        fs::write(folder.path().join(name), value.to_string()).expect("the file is written");
    };
    write(
        "config.json",
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": size,
            "hidden_size": WIDTH,
            "intermediate_size": FEED_FORWARD,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": false,
            "bos_token_id": 258,
            "eos_token_id": END,
            "rope_theta": 10000.0,
            "torch_dtype": "float32",
            "matryoshka_dimensions": [8, 16],
        }),
    );
    let tokens = alphabet().into_iter().chain(special.iter().map(|token| (*token).to_owned()));
    let vocabulary: Map<String, Value> = tokens.enumerate().map(|(id, token)| (token, id.into())).collect();
    let special: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(index, token)| {
            json!({"id": 256 + index, "content": token, "special": true, "normalized": false, "lstrip": false,
                "rstrip": false, "single_word": false})
        })
        .collect();
    write(
        "tokenizer.json",
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": special,
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []},
        }),
    );
    write(
        "tokenizer_config.json",
        json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "chat_template": TEMPLATE,
        }),
    );
    write_weights(&folder.path().join("model.safetensors"), size, ends);
    folder
}

/// The characters that stand for bytes in a byte-level vocabulary.
fn alphabet() -> Vec<String> {
    let mut next = 0x100;
    let character = |byte: u8| {
        let visible = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if visible { u32::from(byte) } else { next };
        next += u32::from(!visible);
        char::from_u32(code).expect("a character").to_string()
    };
    (0..=255).map(character).collect()
}

fn write_weights(path: &Path, vocabulary: usize, ends: bool) {
    let key_width = WIDTH / 2;
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocabulary, WIDTH]),
        ("model.norm.weight".to_owned(), vec![WIDTH]),
        ("lm_head.weight".to_owned(), vec![vocabulary, WIDTH]),
    ];
    for layer in 0..LAYERS {
        let shapes: [(&str, Vec<usize>); 9] = [
            ("input_layernorm", vec![WIDTH]),
            ("post_attention_layernorm", vec![WIDTH]),
            ("self_attn.q_proj", vec![WIDTH, WIDTH]),
            ("self_attn.k_proj", vec![key_width, WIDTH]),
            ("self_attn.v_proj", vec![key_width, WIDTH]),
            ("self_attn.o_proj", vec![WIDTH, WIDTH]),
            ("mlp.gate_proj", vec![FEED_FORWARD, WIDTH]),
            ("mlp.up_proj", vec![FEED_FORWARD, WIDTH]),
            ("mlp.down_proj", vec![WIDTH, FEED_FORWARD]),
        ];
        tensors.extend(shapes.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut state = 1_u64;
    for (name, shape) in tensors {
        let start = data.len();
        for index in 0..shape.iter().product() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let even = (state >> 40) as f32 / (1 << 24) as f32 - 0.5;
            let value = match name.as_str() {
                name if name.ends_with("norm.weight") => 1.0,
                // Letters and spaces are likelier than other bytes, and control tokens are rare, so that answers are mostly
                // text.
                "lm_head.weight" if index / WIDTH >= 256 && !(ends && index / WIDTH == END as usize) => 0.0,
                "lm_head.weight" if index / WIDTH >= 256 => even * 1.5,
                "lm_head.weight" if !is_text(index / WIDTH) => even * 0.5,
                _ => even * 1.5,
            };
            data.extend_from_slice(&value.to_le_bytes());
        }
        let offsets = [start, data.len()];
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": offsets}));
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    fs::write(path, file).expect("the weights are written");
}

fn is_text(token: usize) -> bool {
    u8::try_from(token).is_ok_and(|byte| byte.is_ascii_lowercase() || byte == b' ')
}
