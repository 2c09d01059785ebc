//! Tests of keys and values in host memory: answers are those of a KV cache on the device, whatever is copied when.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/lagging.rs"]
mod lagging;
mod support;

use dsrun_core::{
    DType, WeightFormat,
    device::{Backend, Device, DeviceOptions},
};
use dsrun_engine::{
    CachePrecision, EmbeddingRequest, EngineError, EngineOptions, EnginePlan, KvIn, MemoryPlan, Request,
    Speculation, WeightsIn, passes::partition::PipelineOptions,
};
use dsrun_models::{config::DecoderConfig, model::Model};
use lagging::{Fault, LaggingDevice, Pace};
use rstest::rstest;
use std::{collections::HashMap, fs, path::Path, sync::Arc};
use support::{device, exact, fixtures, greedy, logits};

/// Tokens of a step: more than are read in place, so prompts are copied, in several steps.
const STEP: usize = 24;

/// Bytes that are left out of a budget so that it does not count as full.
const SPARE: u64 = 18;

/// A Llama of six layers with random weights.
fn llama() -> Model {
    let config = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 96,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": false}"#;
    let config = DecoderConfig::from_json_bytes(config.as_bytes()).unwrap();
    Model::random("random", config, 7, WeightFormat::Dense(DType::F32)).unwrap()
}

/// Prompts of two and a half steps, of less than one, and of a token.
fn prompts() -> Vec<Vec<u32>> {
    let prompt = |length: u32| (0..length).map(|token| (token * 13 + length) % 96).collect();
    vec![prompt(60), prompt(19), prompt(1)]
}

fn in_host(options: &EngineOptions) -> EngineOptions {
    EngineOptions { kv_in: KvIn::Host, ..options.clone() }
}

/// The memory of an engine on a device without a limit.
fn memory(model: &Model, options: &EngineOptions) -> MemoryPlan {
    EnginePlan::new(model, &*device(), options).unwrap().memory().clone()
}

/// The limit of a device with room for everything but this many of `all` layers of the KV cache, and two slots for them.
fn room(model: &Model, options: &EngineOptions, in_host: u64, all: u64) -> u64 {
    let memory = memory(model, options);
    let layer = memory.kv_cache / all;
    let bytes = memory.total() - in_host * layer + in_host.min(2) * layer + layer / 4;
    bytes + bytes / SPARE
}

fn limit(bytes: u64) -> DeviceOptions {
    DeviceOptions { memory_limit: Some(bytes), ..DeviceOptions::default() }
}

fn limited(bytes: u64) -> Arc<dyn Device> {
    dsrun_cpu::CpuBackend::new().open(0, &limit(bytes)).unwrap()
}

/// Greedy tokens of prompts that run side by side, then again when prefixes are known, and the logits of a text.
type Answers = (Vec<Vec<u32>>, Vec<Vec<u32>>, Vec<Vec<f32>>);

fn answers(model: &Model, device: &Arc<dyn Device>, options: &EngineOptions) -> Answers {
    let plan = EnginePlan::new(model, &**device, options).unwrap();
    let mut engine = plan.load(model, device.clone(), &mut |_, _| {}).unwrap();
    let first = greedy(&mut engine, &prompts(), 12);
    (first, greedy(&mut engine, &prompts(), 12), logits(&mut engine, &prompts()[0]))
}

/// Few, most and all layers in host memory; streams that run side by side, in any order that events allow.
#[rstest]
fn answers_and_logits_are_those_of_a_cache_on_the_device(
    #[values(4, 5, 6)] layers: u64,
    #[values(None, Some(Pace::Late), Some(Pace::Early))] pace: Option<Pace>,
) {
    // With a given number of tokens there are no fewer pages.
    let (model, options) = (llama(), EngineOptions { kv_tokens: Some(384), ..exact(STEP, 3) });
    let expected = answers(&model, &device(), &options);
    let bytes = room(&model, &options, layers, 6);
    let device: Arc<dyn Device> = match pace {
        None => limited(bytes),
        Some(pace) => LaggingDevice::open(&limit(bytes), pace, None),
    };
    let plan = EnginePlan::new(&model, &*device, &in_host(&options)).unwrap();
    let (found, all) = (plan.memory(), memory(&model, &options).kv_cache);
    assert_eq!((found.kv_host, found.kv_slots), (all / 6 * layers, all / 6 * 2), "{found}");
    assert_eq!((found.kv_cache, found.missing()), (all / 6 * (6 - layers), None), "{found}");
    assert_eq!(answers(&model, &device, &in_host(&options)), expected);
}

#[rstest]
#[case::a_copy_is_not_awaited(Pace::Late, Fault::CopyNotAwaited)]
#[case::a_slot_is_reused_too_early(Pace::Early, Fault::SlotReusedEarly)]
fn events_order_copies_and_layers(#[case] pace: Pace, #[case] fault: Fault) {
    let (model, options) = (llama(), EngineOptions { kv_tokens: Some(384), ..exact(STEP, 3) });
    let expected = answers(&model, &device(), &options);
    let options = EngineOptions { resident_layers: Some(0), ..in_host(&options) };
    let device: Arc<dyn Device> = LaggingDevice::open(&DeviceOptions::default(), pace, Some(fault));
    assert_ne!(answers(&model, &device, &options), expected);
}

/// Together with everything else that moves pages or changes steps.
#[rstest]
#[case::weights_in_host_memory(|options: &mut EngineOptions| {
    options.weights_in = WeightsIn::Host;
    options.resident_layers = Some(2);
})]
#[case::swapping(|options: &mut EngineOptions| {
    (options.kv_tokens, options.swap_tokens, options.prefix_cache) = (Some(96), 256, false);
})]
#[case::computing_again(|options: &mut EngineOptions| {
    (options.kv_tokens, options.prefix_cache) = (Some(96), false);
})]
#[case::speculation(|options: &mut EngineOptions| options.speculation = Some(Speculation::Ngram { tokens: 4 }))]
#[case::no_regions(|options: &mut EngineOptions| options.fuse = false)]
#[case::no_launch_ahead(|options: &mut EngineOptions| options.launch_ahead = false)]
#[case::prompts_first(|options: &mut EngineOptions| options.split_prompts = false)]
#[case::a_cache_of_f16(|options: &mut EngineOptions| options.kv_precision = CachePrecision::F16)]
#[case::a_cache_of_int8(|options: &mut EngineOptions| {
    (options.kv_precision, options.exact) = (CachePrecision::Int8, false);
})]
fn other_options_work_with_it(#[case] set: fn(&mut EngineOptions)) {
    let (model, mut options) = (llama(), EngineOptions { kv_tokens: Some(384), ..exact(STEP, 3) });
    set(&mut options);
    let expected = answers(&model, &device(), &options);
    options.resident_layers = Some(options.resident_layers.unwrap_or(0));
    for pace in [Pace::Late, Pace::Early] {
        let device: Arc<dyn Device> = LaggingDevice::open(&DeviceOptions::default(), pace, None);
        let plan = EnginePlan::new(&model, &*device, &in_host(&options)).unwrap();
        assert!(plan.memory().kv_host > 0, "{}", plan.memory());
        assert_eq!(answers(&model, &device, &in_host(&options)), expected, "{pace:?}");
    }
}

/// The caches of a layer are found in the program of every family.
#[test]
fn every_family_can_keep_its_cache_in_host_memory() {
    let mut families = 0;
    for folder in fs::read_dir(fixtures()).unwrap() {
        let name = folder.unwrap().file_name().into_string().unwrap();
        if !fixtures().join(&name).join("model.safetensors").exists() {
            continue;
        }
        let Ok(model) = Model::open(fixtures().join(&name)) else { continue };
        let options = EngineOptions { kv_tokens: Some(96), ..exact(STEP, 3) };
        let own = EngineOptions { resident_layers: Some(0), ..in_host(&options) };
        let cache = memory(&model, &options).kv_cache;
        let found = memory(&model, &own);
        assert_eq!((found.kv_host, found.kv_cache), (cache, 0), "{name}: {found}");
        if cache == 0 || model.config().context < 48 {
            continue;
        }
        let device: Arc<dyn Device> = LaggingDevice::open(&DeviceOptions::default(), Pace::Late, None);
        let prompt: Vec<u32> = (0..40).map(|token| token % model.config().vocabulary as u32).collect();
        let run = |device: &Arc<dyn Device>, options: &EngineOptions| {
            let plan = EnginePlan::new(&model, &**device, options).unwrap();
            let mut engine = plan.load(&model, device.clone(), &mut |_, _| {}).unwrap();
            (greedy(&mut engine, std::slice::from_ref(&prompt), 6), logits(&mut engine, &prompt))
        };
        assert_eq!(run(&device, &own), run(&support::device(), &options), "{name}");
        families += 1;
    }
    assert!(families > 20, "only {families} models were found");
}

#[test]
fn generation_copies_nothing() {
    let options = EngineOptions { resident_layers: Some(0), ..in_host(&exact(STEP, 1)) };
    let plan = EnginePlan::new(&llama(), &*device(), &options).unwrap();
    // Six layers, two vectors of 32 elements for each token, pages of four tokens.
    let page = 4 * 2 * 32 * 4;
    let mut engine = plan.load(&llama(), device(), &mut |_, _| {}).unwrap();
    let prompt = prompts()[0].clone();
    engine.submit(Request { max_tokens: Some(6), ..Request::new(prompt) }).unwrap();
    let mut copied = vec![engine.statistics().cache_bytes];
    while !engine.is_idle() {
        engine.step().unwrap();
        copied.push(engine.statistics().cache_bytes);
    }
    // Steps of 24, 24 and 12 tokens; the last of the prompt's is small enough to be read in place.
    let pages: Vec<u64> = copied.windows(2).map(|pair| (pair[1] - pair[0]) / page / 6).collect();
    assert_eq!(pages.iter().sum::<u64>(), 6, "{pages:?}");
    assert_eq!(pages.iter().filter(|pages| **pages > 0).count(), 1, "{pages:?}");
}

/// A known prefix is copied from host memory for a tail of more tokens than are read in place.
#[test]
fn a_prefix_is_reused_by_a_step_that_copies() {
    let (model, options) = (llama(), exact(64, 1));
    let long = |tail: u32| -> Vec<u32> {
        (0..40).map(|token| token * 7 % 96).chain((0..40).map(|token| (token * 11 + tail) % 96)).collect()
    };
    let answers = |options: &EngineOptions| {
        let plan = EnginePlan::new(&model, &*device(), options).unwrap();
        let mut engine = plan.load(&model, device(), &mut |_, _| {}).unwrap();
        let answers = [1, 2].map(|tail| greedy(&mut engine, &[long(tail)], 8));
        (answers, engine.statistics().prefix_hit_tokens, engine.statistics().cache_bytes)
    };
    let (expected, hits, none) = answers(&options);
    let (found, same_hits, copied) =
        answers(&EngineOptions { resident_layers: Some(0), ..in_host(&options) });
    assert_eq!((found, same_hits, none), (expected, hits, 0));
    assert!(hits >= 40 && copied > 0, "{hits} tokens, {copied} bytes");
}

/// Stages of a pipeline, a step size that is measured, and a draft model whose cache stays on the device.
#[test]
fn stages_step_sizes_and_drafts_work_with_it() {
    let (model, options) = (llama(), EngineOptions { kv_tokens: Some(384), ..exact(64, 3) });
    let (first, again, logits) = answers(&model, &device(), &options);
    let own = EngineOptions { resident_layers: Some(1), ..in_host(&options) };
    let tuned = EngineOptions { tune_step: true, ..own.clone() };
    assert_eq!(answers(&model, &device(), &tuned), (first.clone(), again, logits));

    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let devices = [device(), device()];
    let plan = EnginePlan::on_devices(&model, &devices, &EngineOptions { pipeline, ..own.clone() }).unwrap();
    assert!(plan.memory_of_ranks().all(|memory| memory.kv_host > 0));
    let mut engine = plan.load(&model, devices[0].clone(), &mut |_, _| {}).unwrap();
    assert_eq!(greedy(&mut engine, &prompts(), 12), first);

    let speculation = Some(Speculation::Draft { tokens: 3 });
    let (draft, device) = (Arc::new(llama()), device());
    let plan =
        EnginePlan::with_draft(&model, &draft, &*device, &EngineOptions { speculation, ..own }).unwrap();
    let drafted = plan.memory().draft.as_ref().unwrap();
    assert!(plan.memory().kv_host > 0 && drafted.kv_host == 0 && drafted.kv_cache > 0, "{}", plan.memory());
    let mut engine = plan.load(&model, device, &mut |_, _| {}).unwrap();
    assert_eq!(greedy(&mut engine, &prompts(), 12), first);
}

/// Hidden states are computed after the logits, from the last layer's keys and values.
#[rstest]
#[case::keys_and_values(|options: &mut EngineOptions, _: &Path| options.kv_in = KvIn::Host)]
#[case::weights(|options: &mut EngineOptions, _: &Path| options.weights_in = WeightsIn::Host)]
#[case::weights_on_disk(|options: &mut EngineOptions, folder: &Path| {
    (options.weights_in, options.host_memory) = (WeightsIn::Disk(folder.to_owned()), Some(1 << 19));
})]
fn embeddings_work_with_it(#[case] set: fn(&mut EngineOptions, &Path)) {
    let folder = tempfile::tempdir().unwrap();
    let (model, mut options) = (llama(), exact(64, 3));
    let vectors = |device: &Arc<dyn Device>, options: &EngineOptions| {
        let plan = EnginePlan::new(&model, &**device, options).unwrap();
        let mut engine = plan.load(&model, device.clone(), &mut |_, _| {}).unwrap();
        let request = |tokens| EmbeddingRequest { tokens, ..EmbeddingRequest::default() };
        let ids = prompts().into_iter().map(|tokens| engine.submit_embedding(request(tokens)).unwrap());
        let ids: Vec<_> = ids.collect();
        let mut vectors = HashMap::new();
        while !engine.is_idle() {
            engine.step().unwrap();
            vectors.extend(engine.take_embeddings());
        }
        ids.iter().map(|id| vectors.remove(id).unwrap()).collect::<Vec<_>>()
    };
    let expected = vectors(&device(), &options);
    set(&mut options, folder.path());
    options.resident_layers = Some(0);
    for pace in [Pace::Late, Pace::Early] {
        let device: Arc<dyn Device> = LaggingDevice::open(&DeviceOptions::default(), pace, None);
        assert_eq!(vectors(&device, &options), expected, "{pace:?}");
    }
}

#[test]
fn what_fits_stays_on_the_device() {
    let (model, options) = (llama(), exact(STEP, 3));
    let expected = memory(&model, &options);
    assert_eq!(memory(&model, &in_host(&options)), expected);
}

/// Where the device has too little room, requests share fewer pages, unless the KV cache is in host memory.
#[test]
fn requests_keep_their_contexts_in_host_memory() {
    let (model, options) = (llama(), exact(STEP, 3));
    let device = limited(room(&model, &options, 6, 6));
    let tokens = |options: &EngineOptions| {
        let plan = EnginePlan::new(&model, &*device, options).unwrap();
        assert_eq!(plan.memory().missing(), None, "{}", plan.memory());
        plan.memory().kv_tokens
    };
    assert!(tokens(&options) < 3 * 128, "{}", tokens(&options));
    assert_eq!(tokens(&in_host(&options)), 3 * 128);
}

#[test]
fn every_rank_keeps_its_share_in_host_memory() {
    let (model, options) = (llama(), EngineOptions { kv_tokens: Some(256), ..exact(STEP, 2) });
    let tokens = |options: &EngineOptions| {
        let devices = [device(), device()];
        let plan = EnginePlan::on_devices(&model, &devices, options).unwrap();
        let in_host = plan.memory_of_ranks().map(|memory| memory.kv_host).collect::<Vec<_>>();
        let mut engine = plan.load(&model, devices[0].clone(), &mut |_, _| {}).unwrap();
        (in_host, greedy(&mut engine, &prompts()[..2], 8))
    };
    let (none, expected) = tokens(&options);
    let (both, found) = tokens(&EngineOptions { resident_layers: Some(0), ..in_host(&options) });
    let cache = memory(&model, &options).kv_cache / 2;
    assert_eq!((none, both), (vec![0; 2], vec![cache; 2]));
    assert_eq!(found, expected);
}

#[test]
fn more_than_the_host_has_is_refused() {
    let (model, options) = (llama(), in_host(&EngineOptions { kv_tokens: Some(1 << 40), ..exact(STEP, 3) }));
    let device = limited(1 << 20);
    let error = EnginePlan::new(&model, &*device, &options).unwrap_err();
    assert!(matches!(error, EngineError::HostCache { .. }), "{error}");
    assert!(error.to_string().contains("does not fit into host memory"), "{error}");
}

#[test]
fn an_encoder_is_refused() {
    let model = Model::open(fixtures().join("encoders/bert")).unwrap();
    let error = EnginePlan::new(&model, &*device(), &in_host(&exact(STEP, 1))).unwrap_err();
    assert!(error.to_string().contains("kv-in is host: must be device"), "{error}");
}

#[test]
fn a_device_that_takes_no_pinned_tensors_is_refused() {
    let device = LaggingDevice::unpinned();
    let error = EnginePlan::new(&llama(), &*device, &in_host(&exact(STEP, 1))).unwrap_err();
    assert!(error.to_string().contains("kv-in"), "{error}");
}
