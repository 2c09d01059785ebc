//! Writing models: what is read back is what was written, whatever it came from.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

#[path = "architectures/fixtures.rs"]
mod fixtures;

use dsrun_core::{
    DType, WeightExpr, WeightFormat, WeightReader,
    program::{Origin, Program},
};
use dsrun_models::{
    export::{Export, Written},
    fetch::at_path,
    model::Model,
    step::ProgramOptions,
    tokenizer::EncodeOptions,
    weights::ExprReader,
};
use rstest::rstest;
use std::{ops::ControlFlow, path::Path};

/// Writes the weights of a program, and opens what was written.
fn written(
    path: &Path,
    program: Option<Program>,
    dense: Option<DType>,
) -> (Model, Model, Vec<Written>, tempfile::TempDir) {
    let files = at_path(path).unwrap();
    let model = Model::from_files(&files).unwrap();
    let program = program.unwrap_or_else(|| model.program(&ProgramOptions::default()).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let export = Export { model: &model, files: &files, program: &program, dense };
    let (mut last, mut all) = (0, 0);
    let mut progress = |done, total| {
        assert!(last <= done && done <= total);
        (last, all) = (done, total);
        ControlFlow::Continue(())
    };
    let (matrices, left_out) = export.write(folder.path(), &mut progress).unwrap();
    assert!(left_out.is_empty(), "{left_out:?}");
    assert_eq!(last, all);
    (Model::open(folder.path()).unwrap(), model, matrices, folder)
}

/// The rows of a tensor, decoded.
fn values(model: &Model, name: &str) -> Vec<f32> {
    let reader = ExprReader::new(&**model.weights(), &WeightExpr::tensor(name)).unwrap();
    reader.decoded_rows(0, reader.weight_type().rows()).unwrap()
}

#[rstest]
fn checkpoints_of_other_tools_come_back_as_those_of_compressed_tensors(
    #[values(
        "gptq_4",
        "gptq_4_symmetric",
        "gptq_8_channel",
        "gptq_8_symmetric",
        "gptq_act_order",
        "awq",
        "compressed_w4a16",
        "compressed_w4a16_zero",
        "compressed_w8a16",
        "compressed_w8a16_zero",
        "compressed_fp8",
        "fp8_block",
        "fp8_tensor"
    )]
    name: &str,
) {
    let (found, model, matrices, folder) =
        written(&fixtures::root().join("quantised").join(name), None, None);
    assert_eq!(found.config(), model.config());
    assert!(matrices.len() >= 14 && matrices.iter().all(|matrix| matrix.error.is_none()));
    for tensor in found.weights().names() {
        let (ours, theirs) = (found.weights().tensor_type(tensor), model.weights().tensor_type(tensor));
        assert_eq!(ours.unwrap(), theirs.unwrap(), "{tensor}");
        assert_eq!(values(&found, tensor), values(&model, tensor), "{tensor}");
    }
    let config = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
    let decoded = name == "gptq_act_order" || name.contains("fp8");
    assert_eq!(config.contains("compressed-tensors"), !decoded);
}

#[rstest]
#[case("smollm2_f32", "smollm2")]
#[case("qwen2_f32", "qwen2")]
fn a_gguf_file_becomes_the_folder_that_it_was_made_of(#[case] gguf: &str, #[case] original: &str) {
    let (found, model, ..) = written(&fixtures::gguf(gguf), None, None);
    let original = Model::open(fixtures::folder(original)).unwrap();
    assert_eq!(found.config(), original.config());
    for tensor in original.weights().names() {
        assert_eq!(values(&found, tensor), values(&original, tensor), "{tensor}");
    }
    for (text, ids) in fixtures::tokenized(gguf) {
        for add_special in [false, true] {
            let options = EncodeOptions { add_special, parse_special: true };
            let encode = |model: &Model| model.tokenizer().unwrap().encode(&text, options).unwrap();
            assert_eq!(encode(&found), encode(&model));
            assert!(add_special || encode(&found) == ids);
        }
    }
    assert_eq!(found.eos(), model.eos());
    assert!(found.chat_template().is_ok());
}

#[rstest]
fn folders_are_written_as_they_were(
    #[values("gemma3", "gemma3_layer_types", "olmo2", "olmo3", "smollm3_switches", "qwen3")] name: &str,
) {
    let (found, original, ..) = written(&fixtures::folder(name), None, None);
    assert_eq!(found.config(), original.config());
    assert_eq!(found.weights().names().len(), original.weights().names().len());
    for tensor in original.weights().names() {
        assert_eq!(values(&found, tensor), values(&original, tensor), "{tensor}");
    }
}

#[rstest]
#[case("olmo2_q8_0", "olmo2")]
#[case("smollm3_q8_0", "smollm3")]
fn a_quantised_gguf_file_becomes_a_folder_close_to_its_source(#[case] gguf: &str, #[case] original: &str) {
    let (found, ..) = written(&fixtures::gguf(gguf), None, None);
    let original = Model::open(fixtures::folder(original)).unwrap();
    assert_eq!(found.config(), original.config());
    for tensor in original.weights().names() {
        let (ours, theirs) = (values(&found, tensor), values(&original, tensor));
        let apart = ours.iter().zip(&theirs).map(|(ours, theirs)| (ours - theirs).abs()).fold(0.0, f32::max);
        assert!(ours.len() == theirs.len() && apart < 0.02, "{tensor}: {apart}");
    }
}

#[test]
fn what_has_no_form_is_refused() {
    let write_changed = |path: &Path, change: fn(&mut Program)| {
        let files = at_path(path).unwrap();
        let model = Model::from_files(&files).unwrap();
        let mut program = model.program(&ProgramOptions::default()).unwrap();
        change(&mut program);
        let folder = tempfile::tempdir().unwrap();
        let export = Export { model: &model, files: &files, program: &program, dense: None };
        export.write(folder.path(), &mut |_, _| ControlFlow::Continue(())).unwrap_err().to_string()
    };
    let write = |path: &Path| write_changed(path, |_| {});
    assert!(write(&fixtures::folder("gpt2")).contains("architecture gpt2 cannot be written"));
    assert!(write(&fixtures::folder("phi3")).contains("those of llama, mistral, qwen2, qwen3, gemma3_text"));
    assert!(write(&fixtures::folder("gemma3_images")).contains("architecture gemma3 cannot be written"));
    assert!(write(&fixtures::gguf("llama3_q8_0")).contains("rope_freqs"));
    assert!(write(&fixtures::gguf("gemma3_bf16")).contains("start from the safetensors files"));
    assert!(write(&fixtures::gguf("olmo3_q8_0")).contains("sliding windows"));
    let error = write_changed(&fixtures::folder("llama3"), |program| {
        let up = program.values.iter_mut().find(|value| value.name == "layers.0.up").unwrap();
        let Origin::Weight(expr) = &mut up.origin else { panic!("{} is a weight", up.name) };
        let format = WeightFormat::from_name("mxfp4").unwrap();
        *expr = WeightExpr::Quantise { of: Box::new(expr.clone()), format, search: true };
    });
    assert!(error.contains("layers.0.up cannot be written as mxfp4"), "{error}");
}

#[test]
fn whoever_asks_to_stop_is_heard() {
    let files = at_path(&fixtures::folder("smollm2")).unwrap();
    let model = Model::from_files(&files).unwrap();
    let program = model.program(&ProgramOptions::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let export = Export { model: &model, files: &files, program: &program, dense: None };
    let stopped = export.write(folder.path(), &mut |_, _| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(dsrun_models::export::ExportError::Stopped)));
}
