//! A dense model written as a mixture of experts gives the logits of the dense model.
//!
//! Split: the features of each MLP are dealt out to experts that are all chosen, with equal weights that the last matrix makes
//! up for. Upcycled: each expert is a copy of the MLP, and a router chooses some of them by real differences; their weights add
//! up to 1.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::WeightExpr;
use dsrun_engine::EngineOptions;
use dsrun_models::{export::Export, fetch::at_path, model::Model, step::ProgramOptions, weights::ExprReader};
use dsrun_test_support::{TestResult, test_main};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, ops::ControlFlow, path::Path};
use support::{difference, engine, exact, fixtures, logits};

test_main![a_tiny_model, the_real_model];

/// Layers of the real model that are compared: enough for errors to add up, few enough to be written quickly.
const LAYERS: usize = 4;

/// Tensors in f32, by name, with their shapes.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The tensors of a dense Llama and its configuration, with at most [`LAYERS`] layers, in the form of Hugging Face.
fn dense(path: &Path) -> (Tensors, Value) {
    let files = at_path(path).unwrap();
    let model = Model::from_files(&files).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let program = model.program(&ProgramOptions::default()).unwrap();
    let export = Export { model: &model, files: &files, program: &program, dense: None };
    export.write(folder.path(), &mut |_, _| ControlFlow::Continue(())).unwrap();
    let written = Model::open(folder.path()).unwrap();
    let config = fs::read(folder.path().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    let layers = model.config().layers.min(LAYERS);
    config["num_hidden_layers"] = layers.into();
    let is_kept = |name: &str| match name.strip_prefix("model.layers.") {
        Some(rest) => rest.split('.').next().unwrap().parse::<usize>().unwrap() < layers,
        None => true,
    };
    let names: Vec<String> = written.weights().names().into_iter().map(str::to_owned).collect();
    let read = |name: String| {
        let reader = ExprReader::new(&**written.weights(), &WeightExpr::tensor(&name)).unwrap();
        let weight = written.weights().tensor_type(&name).unwrap();
        let values = reader.decoded_rows(0, weight.rows()).unwrap();
        (name, (weight.shape, values))
    };
    (names.into_iter().filter(|name| is_kept(name)).map(read).collect(), config)
}

/// Writes a model into a folder, and opens it.
fn model(tensors: &Tensors, config: &Value) -> (Model, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let bytes: BTreeMap<&String, Vec<u8>> = tensors
        .iter()
        .map(|(name, (_, values))| (name, values.iter().flat_map(|value| value.to_le_bytes()).collect()))
        .collect();
    let view = |(name, (shape, _)): (&String, &(Vec<usize>, Vec<f32>))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), &bytes[name]).unwrap())
    };
    let views = tensors.iter().map(view);
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    (Model::open(folder.path()).unwrap(), folder)
}

/// Some rows of a matrix.
fn rows((shape, values): &(Vec<usize>, Vec<f32>), start: usize, count: usize) -> (Vec<usize>, Vec<f32>) {
    let columns = shape[1];
    (vec![count, columns], values[start * columns..(start + count) * columns].to_vec())
}

/// Some columns of a matrix, times a factor.
fn columns(
    (shape, values): &(Vec<usize>, Vec<f32>),
    start: usize,
    count: usize,
    factor: f32,
) -> (Vec<usize>, Vec<f32>) {
    let row = |row: &[f32]| row[start..start + count].iter().map(|value| value * factor).collect::<Vec<_>>();
    (vec![shape[0], count], values.chunks_exact(shape[1]).flat_map(row).collect())
}

/// The model as a Mixtral of so many experts, of which `chosen` are for each token. Experts are parts of the MLP if all of them
/// are chosen, else copies.
fn as_experts(dense: &Tensors, config: &Value, experts: usize, chosen: usize) -> (Tensors, Value) {
    let splits = experts == chosen;
    let mut config = config.clone();
    let object = config.as_object_mut().unwrap();
    for (field, value) in [
        ("model_type", json!("mixtral")),
        ("num_local_experts", json!(experts)),
        ("num_experts_per_tok", json!(chosen)),
        ("sliding_window", Value::Null),
    ] {
        object.insert(field.to_owned(), value);
    }
    for field in ["attention_bias", "mlp_bias", "architectures", "rope_interleaved"] {
        object.remove(field);
    }
    let intermediate = object["intermediate_size"].as_u64().unwrap() as usize;
    let hidden = object["hidden_size"].as_u64().unwrap() as usize;
    let part = if splits { intermediate / experts } else { intermediate };
    object.insert("intermediate_size".to_owned(), part.into());
    let mut tensors = Tensors::new();
    for (name, tensor) in dense {
        let Some((layer, matrix)) = name.split_once(".mlp.") else {
            tensors.insert(name.clone(), tensor.clone());
            continue;
        };
        for expert in 0..experts {
            let start = if splits { expert * part } else { 0 };
            let (own, values) = match matrix {
                "gate_proj.weight" => ("w1", rows(tensor, start, part)),
                "up_proj.weight" => ("w3", rows(tensor, start, part)),
                "down_proj.weight" => {
                    ("w2", columns(tensor, start, part, if splits { experts as f32 } else { 1.0 }))
                }
                other => panic!("expected gate, up or down, found {other}"),
            };
            tensors.insert(format!("{layer}.block_sparse_moe.experts.{expert}.{own}.weight"), values);
        }
        // Equal logits where all are chosen; else such as differ from token to token.
        let logit = |index: usize| if splits { 0.0 } else { ((index * 7919) % 1013) as f32 / 1013.0 - 0.5 };
        let router = (vec![experts, hidden], (0..experts * hidden).map(logit).collect());
        tensors.insert(format!("{layer}.block_sparse_moe.gate.weight"), router);
    }
    (tensors, config)
}

/// Compares a dense model with its mixtures; `tolerance` is for logits.
fn compare(path: &Path, prompt: &[u32], tolerance: f32) {
    let (dense, config) = dense(path);
    let (plain, _folder) = model(&dense, &config);
    let expected = logits(&mut engine(&plain, &exact(64, 1)), prompt);
    for (experts, chosen) in [(4, 4), (8, 8), (1, 1), (4, 2)] {
        let (tensors, config) = as_experts(&dense, &config, experts, chosen);
        let (mixture, _folder) = model(&tensors, &config);
        for fuse in [true, false] {
            let mut engine = engine(&mixture, &EngineOptions { fuse, ..exact(64, 1) });
            assert!(engine.program().to_string().contains("grouped_linear"));
            let found = logits(&mut engine, prompt);
            let error = difference(&found, &expected);
            assert!(error <= tolerance, "{chosen} of {experts} experts: off by {error}");
        }
    }
}

fn a_tiny_model() {
    let prompt: Vec<u32> = (0..40).map(|index| (index * 37 + 5) % 96).collect();
    compare(&fixtures().join("smollm2"), &prompt, 1e-4);
}

fn the_real_model() -> TestResult {
    let path = dsrun_test_support::model()?;
    let prompt: Vec<u32> = (0..48).map(|index| (index * 7919 + 11) % 49152).collect();
    compare(&path, &prompt, 1e-3);
    Ok(())
}
