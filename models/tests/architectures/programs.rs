//! Programs of whole models: they build for every fixture, in every way they can be asked for.

use super::fixtures;
use dsrun_core::{
    DType, Size,
    cache_row::cache_row_size,
    op::{Op, RopePairing},
    program::{Origin, Program},
};
use dsrun_models::{
    model::{Model, ModelError},
    step::{OUTPUTS, ProgramOptions, Storage},
    weights::ExprReader,
};
use rstest::rstest;
use std::fs;

fn all() -> impl Iterator<Item = Model> {
    let safetensors = fixtures::names().into_iter().map(|name| fixtures::folder(&name));
    let gguf = fixtures::gguf_names().into_iter().map(|name| fixtures::gguf(&name));
    safetensors.chain(gguf).map(|path| Model::open(path).unwrap())
}

/// Every weight of the program can be read and has the type that the program says.
fn check_weights(model: &Model, program: &Program) {
    for (_, value) in program.values_from(|origin| matches!(origin, Origin::Weight(_))) {
        let Origin::Weight(expr) = &value.origin else { unreachable!() };
        let inferred = expr.infer(&|name| model.weights().tensor_type(name)).unwrap();
        match (value.weight_type(), value.tensor_type()) {
            (Some(weight), _) => assert_eq!(*weight, inferred, "{}", value.name),
            (_, Some(tensor)) => {
                let shape: Vec<usize> = tensor.shape.iter().filter_map(Size::known).collect();
                assert_eq!((tensor.dtype, shape), (DType::F32, inferred.shape), "{}", value.name);
            }
            (None, None) => unreachable!(),
        }
        let reader = ExprReader::new(&**model.weights(), expr).unwrap();
        assert!(reader.decoded_rows(0, 1).unwrap().iter().all(|value| value.is_finite()), "{}", value.name);
    }
}

#[test]
fn programs_build_and_print_for_every_fixture() {
    for model in all() {
        let half = ProgramOptions {
            activation: DType::BF16,
            storage: Storage::Cast(DType::F16),
            cache: DType::F16,
            block_size: 32,
            context: None,
        };
        for options in [ProgramOptions::default(), half] {
            let program = model.program(&options).unwrap();
            program.validate().unwrap();
            assert_eq!(program.to_string().parse::<Program>().unwrap(), program, "{}", model.name());
            assert_eq!(
                program.extents.iter().map(|name| &**name).collect::<Vec<_>>(),
                ["tokens", "sequences", "rows"]
            );
            // A key and a value cache for each layer, or a cache of latents.
            let caches = if model.config().latent.is_some() { 1 } else { 2 };
            assert_eq!(program.outputs.len(), OUTPUTS.len() + caches * model.config().layers);
            check_weights(&model, &program);
        }
    }
}

#[test]
fn gguf_and_safetensors_of_a_model_give_programs_of_one_form() {
    // Everything but formats, tensor names and the pairing of rotated elements is the same.
    let form = |path: std::path::PathBuf| {
        let program = Model::open(path).unwrap().program(&ProgramOptions::default()).unwrap();
        let ops: Vec<String> = program.nodes.iter().map(|node| node.call.op.name().to_owned()).collect();
        let names: Vec<String> = program.values.iter().map(|value| value.name.clone()).collect();
        (ops, names)
    };
    for name in fixtures::gguf_names() {
        assert_eq!(form(fixtures::folder(&fixtures::source(&name))), form(fixtures::gguf(&name)), "{name}");
    }
}

#[rstest]
#[case("smollm2_q4_0", RopePairing::Neighbours)]
#[case("qwen2_q4_0", RopePairing::Halves)]
fn gguf_llama_rotates_neighbours(#[case] name: &str, #[case] expected: RopePairing) {
    let program = Model::open(fixtures::gguf(name)).unwrap().program(&ProgramOptions::default()).unwrap();
    let ropes: Vec<RopePairing> = program
        .nodes
        .iter()
        .filter_map(|node| match &node.call.op {
            Op::Rope(rope) => Some(rope.pairing),
            _ => None,
        })
        .collect();
    assert_eq!(ropes, [expected; 4]);
}

#[test]
fn tiny_program_is_as_written_down() {
    let model = Model::open(fixtures::folder("qwen3")).unwrap();
    let text = model.program(&ProgramOptions::default()).unwrap().to_string();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/qwen3.program.txt");
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap();
    assert_eq!(text, expected, "run with UPDATE_SNAPSHOTS=1 if the change is meant, and read the difference");
}

#[rstest]
#[case::no_float(ProgramOptions { activation: DType::I32, ..ProgramOptions::default() }, "dtype")]
#[case::empty_pages(ProgramOptions { block_size: 0, ..ProgramOptions::default() }, "block_size")]
#[case::cache_of_integers(ProgramOptions { cache: DType::I32, ..ProgramOptions::default() }, "key_cache")]
fn impossible_options_are_refused(#[case] options: ProgramOptions, #[case] named: &str) {
    let error = Model::open(fixtures::folder("llama2")).unwrap().program(&options).unwrap_err().to_string();
    assert!(error.contains(named), "{error}");
}

#[test]
fn rows_of_an_i8_cache_end_with_their_scales() {
    let options = ProgramOptions { cache: DType::I8, ..ProgramOptions::default() };
    let model = Model::open(fixtures::folder("llama2")).unwrap();
    let (kv_heads, row) = (model.config().kv_heads, cache_row_size(DType::I8, model.config().head_dim));
    let text = model.program(&options).unwrap().to_string();
    assert!(text.contains(&format!("i8[$pages, {kv_heads}, 16, {row}]")), "{text}");
    let error = Model::open(fixtures::folder("deepseek_v3")).unwrap().program(&options).unwrap_err();
    assert!(error.to_string().contains("latent_write"), "{error}");
}

#[test]
fn long_rope_follows_the_context_that_is_asked_for() {
    let model = Model::open(fixtures::folder("phi3_long")).unwrap();
    let program = |context| {
        model.program(&ProgramOptions { context, ..ProgramOptions::default() }).unwrap().to_string()
    };
    assert_eq!(program(None), program(Some(17)));
    assert_ne!(program(Some(16)), program(Some(17)));
}

#[test]
fn rotary_tables_in_the_file_are_ignored() {
    let model = Model::open(fixtures::folder("llama2")).unwrap();
    assert!(model.weights().names().iter().any(|name| name.ends_with("rotary_emb.inv_freq")));
}

#[test]
fn a_tied_head_that_repeats_the_embedding_is_dropped() {
    // The head of this fixture is replaced by its embedding, byte by byte.
    let mut config = fixtures::config("mistral");
    config["tie_word_embeddings"] = true.into();
    let folder = fixtures::with_config("mistral", &config);
    let path = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let [embedding, head] = {
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        ["model.embed_tokens.weight", "lm_head.weight"].map(|name| {
            let (start, end) = metadata.info(name).unwrap().data_offsets;
            header + 8 + start..header + 8 + end
        })
    };
    bytes.copy_within(embedding, head.start);
    fs::write(&path, &bytes).unwrap();
    let program = Model::open(folder.path()).unwrap().program(&ProgramOptions::default()).unwrap();
    assert!(!program.to_string().contains("lm_head"));

    bytes[head.start + 3] ^= 0x40;
    fs::write(&path, &bytes).unwrap();
    let error = Model::open(folder.path()).unwrap_err();
    assert!(matches!(&error, ModelError::Weights { problems, .. } if problems.len() == 1), "{error}");
}

#[test]
fn many_missing_tensors_end_the_search() {
    let mut config = fixtures::config("llama2");
    config["num_hidden_layers"] = 4096.into();
    let folder = fixtures::with_config("llama2", &config);
    let ModelError::Weights { problems, .. } = Model::open(folder.path()).unwrap_err() else { panic!() };
    assert!(problems.len() < 50 && problems.iter().any(|problem| problem.contains("model.layers.2.")));
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let folder = fixtures::with_config("qwen2", &fixtures::config("qwen2"));
    let tokens: serde_json::Map<String, serde_json::Value> =
        (0..97).map(|id| (format!("t{id}"), id.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": tokens, "merges": []},
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let error = Model::open(folder.path()).unwrap_err();
    assert!(matches!(error, ModelError::Vocabulary { tokenizer: 97, model: 96, .. }), "{error}");
}

#[test]
fn what_stands_beside_the_weights_is_read() {
    let folder = fixtures::with_config("llama2", &fixtures::config("llama2"));
    fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [7, 8], "top_k": 20}"#)
        .unwrap();
    fs::write(folder.path().join("chat_template.jinja"), "{{ messages[0].content }}!").unwrap();
    let model = Model::open(folder.path()).unwrap();
    assert_eq!((model.eos(), model.generation().top_k), (&[7, 8][..], Some(20)));
    assert_eq!(model.chat_template().unwrap().names(), ["default"]);

    fs::write(folder.path().join("chat_template.jinja"), "{% if %}").unwrap();
    let model = Model::open(folder.path()).unwrap();
    assert!(model.chat_template().unwrap_err().to_string().contains("chat_template.jinja"));

    fs::write(folder.path().join("generation_config.json"), "[]").unwrap();
    assert!(Model::open(folder.path()).unwrap_err().to_string().contains("generation_config.json"));
}

#[test]
fn without_a_template_there_is_an_error_that_says_so() {
    let error = Model::open(fixtures::folder("llama2")).unwrap().chat_template().unwrap_err().to_string();
    assert!(error.contains("no chat template"), "{error}");
}
