//! Tests of streamed layers: answers are those of weights that stay on the device, whatever is copied when.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/lagging.rs"]
mod lagging;
mod support;

use dsrun_core::{
    DType, WeightFormat,
    device::{Backend, Device, DeviceOptions},
};
use dsrun_engine::{
    EngineError, EngineOptions, EnginePlan, MemoryPlan, Precision, Request, WeightsIn,
    passes::quantize::{Policy, Scheme},
};
use dsrun_models::{config::DecoderConfig, model::Model};
use lagging::{Fault, LaggingDevice, Pace};
use rstest::rstest;
use std::{
    fs,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::Arc,
};
use support::{device, exact, fixtures, greedy, logits};

const PROMPT: [u32; 9] = [5, 17, 3, 88, 41, 9, 60, 2, 33];

/// A Llama of this many layers with random weights.
fn llama(layers: usize) -> Model {
    let config = format!(
        r#"{{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": {layers},
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 96,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": false}}"#
    );
    let config = DecoderConfig::from_json_bytes(config.as_bytes()).unwrap();
    Model::random("random", config, 7, WeightFormat::Dense(DType::F32)).unwrap()
}

/// A CPU that may hold this many bytes.
fn limited(bytes: u64) -> Arc<dyn Device> {
    dsrun_cpu::CpuBackend::new().open(0, &limit(bytes)).unwrap()
}

fn limit(bytes: u64) -> DeviceOptions {
    DeviceOptions { memory_limit: Some(bytes), ..DeviceOptions::default() }
}

fn streamed(options: &EngineOptions) -> EngineOptions {
    EngineOptions { weights_in: WeightsIn::Host, ..options.clone() }
}

/// The memory of an engine whose weights all stay on the device.
fn resident_memory(model: &Model, options: &EngineOptions) -> MemoryPlan {
    EnginePlan::new(model, &*device(), options).unwrap().memory().clone()
}

/// Greedy tokens of prompts that run side by side, and the logits of a text.
type Answers = (Vec<Vec<u32>>, Vec<Vec<f32>>);

fn answers(model: &Model, device: &Arc<dyn Device>, options: &EngineOptions) -> Answers {
    let plan = EnginePlan::new(model, &**device, options).unwrap();
    let mut engine = plan.load(model, device.clone(), &mut |_, _| {}).unwrap();
    let prompts = [PROMPT.to_vec(), PROMPT[4..].to_vec(), vec![1]];
    (greedy(&mut engine, &prompts, 12), logits(&mut engine, &PROMPT))
}

/// Weights in f32, bf16, int8 and int4; the layers that stay; and all numbers of slots, by what memory is left.
#[rstest]
fn answers_and_logits_are_those_of_resident_weights(
    #[values("f32", "bf16", "int8", "int4")] format: &str,
    #[values((0, 1), (0, 2), (0, 4), (4, 4))] (resident_layers, slots): (usize, usize),
) {
    let model = llama(8);
    let scheme = match format {
        "int8" => Some(Scheme::W8A16),
        "int4" => Some(Scheme::W4A16),
        _ => None,
    };
    let precision = if format == "bf16" { Precision::Bf16 } else { Precision::F32 };
    let quantize = scheme.map(Policy::of);
    // With a given number of tokens the KV cache stays as it is.
    let options = EngineOptions { precision, quantize, kv_tokens: Some(256), ..exact(16, 3) };
    let expected = answers(&model, &device(), &options);

    let options = EngineOptions { resident_layers: Some(resident_layers), ..streamed(&options) };
    let all_streamed = EngineOptions { resident_layers: Some(0), ..options.clone() };
    let all = EnginePlan::new(&model, &*device(), &all_streamed).unwrap();
    let (layer, slot) = (all.memory().streamed / 8, all.memory().ring / 4);
    assert!(layer <= slot && slot < 2 * layer, "{:?}", all.memory());
    // Room for so many slots and layers, and for less than another slot.
    let beside = all.memory().total() - all.memory().ring;
    let room = beside + slots as u64 * slot + resident_layers as u64 * layer + slot / 4;
    let device = limited(room + room / 18);
    let plan = EnginePlan::new(&model, &*device, &options).unwrap();
    let forecast = plan.forecast_streaming(&*device).unwrap().unwrap();
    assert_eq!((forecast.slots, forecast.streamed_layers), (slots, 8 - resident_layers), "{}", plan.memory());
    assert_eq!(answers(&model, &device, &options), expected);
}

/// The streams of a device run side by side, in any order that events allow.
#[rstest]
#[case::copies_late(Pace::Late, None, true)]
#[case::copies_early(Pace::Early, None, true)]
#[case::a_copy_is_not_awaited(Pace::Late, Some(Fault::CopyNotAwaited), false)]
#[case::a_slot_is_reused_too_early(Pace::Early, Some(Fault::SlotReusedEarly), false)]
fn events_order_copies_and_layers(#[case] pace: Pace, #[case] fault: Option<Fault>, #[case] right: bool) {
    let (model, options) = (llama(8), exact(16, 3));
    let expected = answers(&model, &device(), &options);
    // With as many slots as streamed layers each slot keeps its layer, and nothing can go wrong there.
    for most in if fault.is_some() { vec![0] } else { vec![0, 4] } {
        let options = EngineOptions { resident_layers: Some(most), ..streamed(&options) };
        let device: Arc<dyn Device> = LaggingDevice::open(&DeviceOptions::default(), pace, fault);
        assert_eq!(answers(&model, &device, &options) == expected, right, "at most {most} layers stay");
    }
}

/// Layers are found in the program of every family, whatever its names and formats.
#[test]
fn every_family_can_be_streamed() {
    let mut families = 0;
    for folder in fs::read_dir(fixtures()).unwrap() {
        let folder = folder.unwrap().path();
        if !folder.join("config.json").exists() || !folder.join("model.safetensors").exists() {
            continue;
        }
        let Ok(model) = Model::open(&folder) else { continue };
        let name = folder.display();
        let options = exact(16, 3);
        let own = EngineOptions { resident_layers: Some(0), ..streamed(&options) };
        let plan =
            EnginePlan::new(&model, &*device(), &own).unwrap_or_else(|error| panic!("{name}: {error}"));
        let forecast = plan.forecast_streaming(&*device()).unwrap().unwrap();
        // Where kinds of layers alternate, one of each kind is streamed as one; where all weights have the same shape, as only in small
        // models, each of them is.
        assert!(forecast.streamed_layers >= 2, "{name}");
        assert_eq!(answers(&model, &device(), &own), answers(&model, &device(), &options), "{name}");
        families += 1;
    }
    assert!(families > 20, "only {families} models were found");
}

#[test]
fn a_model_that_does_not_fit_is_streamed_if_the_device_has_its_own_memory() {
    let (model, options) = (llama(8), exact(16, 3));
    let memory = resident_memory(&model, &options);
    let little = limit(memory.total() - memory.weights / 2);
    let with = |weights_in| EngineOptions { weights_in, ..options.clone() };
    let own: Arc<dyn Device> = LaggingDevice::open(&little, Pace::Early, None);
    for (device, weights_in, streams) in [
        (&own, WeightsIn::Auto, true),
        (&own, WeightsIn::Host, true),
        (&own, WeightsIn::Device, false),
        // The memory of the host is no place to keep what does not fit into it.
        (&limited(little.memory_limit.unwrap()), WeightsIn::Auto, false),
    ] {
        let plan = EnginePlan::new(&model, &**device, &with(weights_in.clone())).unwrap();
        let memory = plan.memory();
        assert_eq!(memory.streamed > 0, streams, "{weights_in:?}: {memory}");
        assert_eq!(memory.missing().is_none(), streams, "{weights_in:?}: {memory}");
        // Every request keeps its whole context.
        assert!(!streams || memory.kv_tokens == 3 * 128, "{memory}");
    }
    assert_eq!(answers(&model, &own, &with(WeightsIn::Auto)), answers(&model, &device(), &options));
    let enough: Arc<dyn Device> = LaggingDevice::open(&DeviceOptions::default(), Pace::Early, None);
    let plan = EnginePlan::new(&model, &*enough, &options).unwrap();
    assert_eq!(plan.memory().streamed, 0, "{}", plan.memory());
}

#[test]
fn a_budget_that_is_too_small_for_one_layer_is_refused_before_weights_are_loaded() {
    let (model, options) = (llama(8), streamed(&exact(16, 3)));
    let device = limited(64 << 10);
    let plan = EnginePlan::new(&model, &*device, &options).unwrap();
    let mut loaded = 0;
    let error = plan.load(&model, device, &mut |bytes, _| loaded = bytes).unwrap_err();
    assert!(matches!(error, EngineError::DoesNotFit { .. }), "{error}");
    assert!(error.to_string().contains("ring of streamed layers"), "{error}");
    assert_eq!(loaded, 0);
}

#[test]
fn every_step_copies_the_streamed_layers_once() {
    let model = llama(6);
    let options = EngineOptions { resident_layers: Some(2), ..streamed(&exact(16, 1)) };
    let plan = EnginePlan::new(&model, &*device(), &options).unwrap();
    let bytes = plan.memory().streamed;
    let slots = plan.forecast_streaming(&*device()).unwrap().unwrap().slots;
    let mut engine = plan.load(&model, device(), &mut |_, _| {}).unwrap();
    engine.submit(Request { max_tokens: Some(5), ..Request::new(PROMPT.to_vec()) }).unwrap();
    while !engine.is_idle() {
        engine.step().unwrap();
    }
    let statistics = engine.statistics();
    // The first layers are copied when the model is loaded, and those of the next step at the end of each.
    assert_eq!(slots, 4);
    assert_eq!(statistics.streamed_bytes, bytes * statistics.steps + bytes, "{statistics:?}");
}

/// Every rank streams its share of each layer.
#[test]
fn ranks_stream_their_shares() {
    let (model, options) = (llama(8), exact(16, 2));
    let tokens = |options: &EngineOptions| {
        let devices = [device(), device()];
        let plan = EnginePlan::on_devices(&model, &devices, options).unwrap();
        let streamed = plan.memory_of_ranks().map(|memory| memory.streamed > 0).collect::<Vec<_>>();
        let mut engine = plan.load(&model, devices[0].clone(), &mut |_, _| {}).unwrap();
        (streamed, greedy(&mut engine, &[PROMPT.to_vec(), vec![3, 4]], 8))
    };
    let (none, expected) = tokens(&options);
    let (both, found) = tokens(&EngineOptions { resident_layers: Some(4), ..streamed(&options) });
    assert_eq!((none, both), (vec![false; 2], vec![true; 2]));
    assert_eq!(found, expected);
}

/// Options with a file in a folder, and so much host memory.
fn on_disk(options: &EngineOptions, folder: &Path, host_memory: u64) -> EngineOptions {
    EngineOptions {
        weights_in: WeightsIn::Disk(folder.to_owned()),
        host_memory: Some(host_memory),
        resident_layers: Some(0),
        ..options.clone()
    }
}

/// The only file of a folder.
fn only_file(folder: &Path) -> PathBuf {
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    file.clone()
}

/// Bytes of a streamed layer on disk.
fn layer_bytes(model: &Model, options: &EngineOptions) -> u64 {
    let options = on_disk(options, Path::new("never-made"), 1 << 30);
    EnginePlan::new(model, &*device(), &options).unwrap().memory().streamed / 8
}

/// Layers all on disk, some of them, and all in host memory; when the file is written, and when it is there.
#[rstest]
fn answers_of_weights_on_disk_are_those_of_resident_weights(
    #[values("f32", "int8", "int4")] format: &str,
    #[values((2, 8), (6, 6), (8, 0))] (room, on_disk_layers): (u64, u64),
) {
    let model = llama(8);
    let scheme = match format {
        "int8" => Some(Scheme::W8A16),
        "int4" => Some(Scheme::W4A16),
        _ => None,
    };
    let options = EngineOptions { quantize: scheme.map(Policy::of), ..exact(16, 3) };
    let expected = answers(&model, &device(), &options);
    let folder = tempfile::tempdir().unwrap();
    let layer = layer_bytes(&model, &options);
    let options = on_disk(&options, folder.path(), room * layer);
    let plan = EnginePlan::new(&model, &*device(), &options).unwrap();
    assert_eq!(plan.memory().disk, on_disk_layers * layer, "{}", plan.memory());
    assert!(plan.memory().host <= room * layer, "{}", plan.memory());

    assert_eq!(answers(&model, &device(), &options), expected);
    let written = fs::metadata(only_file(folder.path())).unwrap().modified().unwrap();
    for pace in [Pace::Late, Pace::Early] {
        let lagging: Arc<dyn Device> = LaggingDevice::open(&DeviceOptions::default(), pace, None);
        assert_eq!(answers(&model, &lagging, &options), expected, "{pace:?}");
    }
    assert_eq!(fs::metadata(only_file(folder.path())).unwrap().modified().unwrap(), written);
}

#[test]
fn a_layer_is_read_into_memory_only_after_the_copy_of_the_one_before() {
    let (model, options) = (llama(8), exact(16, 3));
    let expected = answers(&model, &device(), &options);
    let folder = tempfile::tempdir().unwrap();
    let options = on_disk(&options, folder.path(), 2 * layer_bytes(&model, &options));
    let fault = Some(Fault::HostDoesNotWait);
    let lagging: Arc<dyn Device> = LaggingDevice::open(&DeviceOptions::default(), Pace::Late, fault);
    assert_ne!(answers(&model, &lagging, &options), expected);
}

/// What is not a complete file of these weights is written again.
#[rstest]
#[case::truncated(|file: &Path| {
    let length = fs::metadata(file).unwrap().len();
    fs::OpenOptions::new().write(true).open(file).unwrap().set_len(length - 1).unwrap();
})]
#[case::empty(|file: &Path| fs::write(file, "").unwrap())]
#[case::half_written(|file: &Path| {
    fs::rename(file, file.with_extension("packed.partial")).unwrap();
})]
#[case::damaged_contents(|file: &Path| flip(file, SeekFrom::End(-3)))]
#[case::damaged_head(|file: &Path| flip(file, SeekFrom::Start(9)))]
fn an_incomplete_file_is_written_again(#[case] damage: fn(&Path)) {
    let (model, options) = (llama(8), exact(16, 3));
    let expected = answers(&model, &device(), &options);
    let folder = tempfile::tempdir().unwrap();
    let options = on_disk(&options, folder.path(), 2 * layer_bytes(&model, &options));
    assert_eq!(answers(&model, &device(), &options), expected);
    damage(&only_file(folder.path()));
    assert_eq!(answers(&model, &device(), &options), expected);
    assert_eq!(only_file(folder.path()).extension().unwrap(), "packed");
}

/// Changes a byte of a file.
fn flip(file: &Path, at: SeekFrom) {
    let mut file = fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let place = file.seek(at).unwrap();
    let mut byte = [0];
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(place)).unwrap();
    file.write_all(&[byte[0] ^ 0x10]).unwrap();
}

#[rstest]
#[case::read_in_each_step(2)]
#[case::kept_in_host_memory(8)]
fn weights_that_changed_on_disk_are_never_used(#[case] room: u64) {
    let (model, options) = (llama(8), exact(16, 3));
    let folder = tempfile::tempdir().unwrap();
    let layer = layer_bytes(&model, &options);
    let options = on_disk(&options, folder.path(), room * layer);
    answers(&model, &device(), &options);
    // In the fifth layer, behind the head of one block.
    let file = only_file(folder.path());
    flip(&file, SeekFrom::Start(4096 + 4 * layer + 17));
    let plan = EnginePlan::new(&model, &*device(), &options).unwrap();
    let run = || {
        let mut engine = plan.load(&model, device(), &mut |_, _| {})?;
        engine.submit(Request { max_tokens: Some(4), ..Request::new(PROMPT.to_vec()) })?;
        while !engine.is_idle() {
            engine.step()?;
        }
        Ok::<_, EngineError>(())
    };
    let error = run().unwrap_err().to_string();
    assert!(error.contains("streamed layer 5, have changed since they were written"), "{error}");
    assert!(error.contains(&file.display().to_string()) && error.contains("delete the file"), "{error}");
}

#[test]
fn folders_and_budgets_that_cannot_be_used_are_named() {
    let (model, options) = (llama(8), exact(16, 3));
    let folder = tempfile::tempdir().unwrap();
    let no_folder = folder.path().join("file");
    fs::write(&no_folder, "").unwrap();
    let layer = layer_bytes(&model, &options);
    let plan = EnginePlan::new(&model, &*device(), &on_disk(&options, &no_folder, 2 * layer)).unwrap();
    let error = plan.load(&model, device(), &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains(&no_folder.display().to_string()), "{error}");

    let options = on_disk(&options, folder.path(), 2 * layer - 1);
    let error = EnginePlan::new(&model, &*device(), &options).unwrap_err();
    assert!(matches!(error, EngineError::ReadAhead { .. }), "{error}");
}

/// Models, formats and weights each have a file of their own.
#[test]
fn files_of_other_weights_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let options = exact(16, 3);
    let other = EngineOptions { quantize: Some(Policy::of(Scheme::W8A16)), ..options.clone() };
    for (number, options) in [&options, &other, &options].into_iter().enumerate() {
        let model = llama(8);
        let expected = answers(&model, &device(), options);
        let options = on_disk(options, folder.path(), 2 * layer_bytes(&model, options));
        assert_eq!(answers(&model, &device(), &options), expected);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2.min(number + 1));
    }
}

/// Every rank has a file of its shares.
#[test]
fn ranks_read_their_shares_from_disk() {
    let (model, options) = (llama(8), exact(16, 2));
    let folder = tempfile::tempdir().unwrap();
    let tokens = |options: &EngineOptions| {
        let devices: Vec<Arc<dyn Device>> = vec![device(), device()];
        let plan = EnginePlan::on_devices(&model, &devices, options).unwrap();
        let mut engine = plan.load(&model, devices[0].clone(), &mut |_, _| {}).unwrap();
        greedy(&mut engine, &[PROMPT.to_vec()], 8)
    };
    let expected = tokens(&options);
    let read = on_disk(&options, folder.path(), layer_bytes(&model, &options));
    for _ in 0..2 {
        assert_eq!(tokens(&read), expected);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
