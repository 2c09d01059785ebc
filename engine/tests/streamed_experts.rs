//! Tests of experts in host memory: answers are those of weights that stay on the device, and steps of few tokens copy nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/lagging.rs"]
mod lagging;
mod support;

use dsrun_core::{
    DType, WeightFormat,
    device::{Device, DeviceOptions},
};
use dsrun_engine::{
    EngineOptions, EnginePlan, ExpertsIn, Request, WeightsIn,
    passes::quantize::{Policy, Scheme},
};
use dsrun_models::{config::DecoderConfig, model::Model};
use lagging::{LaggingDevice, Pace};
use rstest::rstest;
use std::sync::Arc;
use support::{device, exact, greedy, logits};

/// A prompt of more tokens than read 16 experts in place, and two of fewer.
const PROMPTS: [&[u32]; 3] = [&[5, 17, 3, 88, 41, 9, 60, 2, 33, 71, 12, 4, 50, 19], &[41, 9, 60], &[1]];

/// The most tokens of a step that are expected to choose at most three quarters of 16 experts, two for each token.
const MOST_IN_PLACE: usize = 10;

/// A Qwen3-MoE of six layers with 16 experts, or a dense Qwen3.
fn qwen3(of_experts: bool) -> Model {
    let kind = if of_experts { "qwen3_moe" } else { "qwen3" };
    let experts = r#""num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true,"#;
    let config = format!(
        r#"{{"model_type": "{kind}", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": 96, {} "max_position_embeddings": 128,
        "rope_theta": 10000.0, "tie_word_embeddings": false}}"#,
        if of_experts { experts } else { "" }
    );
    let config = DecoderConfig::from_json_bytes(config.as_bytes()).unwrap();
    Model::random("random", config, 7, WeightFormat::Dense(DType::F32)).unwrap()
}

fn in_host(options: &EngineOptions) -> EngineOptions {
    EngineOptions { experts: ExpertsIn::Host, resident_layers: Some(2), ..options.clone() }
}

/// Greedy tokens of prompts that run side by side, and the logits of a text.
type Answers = (Vec<Vec<u32>>, Vec<Vec<f32>>);

fn answers(model: &Model, device: &Arc<dyn Device>, options: &EngineOptions) -> Answers {
    let plan = EnginePlan::new(model, &**device, options).unwrap();
    let mut engine = plan.load(model, device.clone(), &mut |_, _| {}).unwrap();
    (greedy(&mut engine, &PROMPTS.map(<[u32]>::to_vec), 12), logits(&mut engine, PROMPTS[0]))
}

#[rstest]
fn answers_and_logits_are_those_of_resident_experts(
    #[values(None, Some(Scheme::W8A16), Some(Scheme::W4A16), Some(Scheme::Mxfp4))] scheme: Option<Scheme>,
    #[values(None, Some(Pace::Late), Some(Pace::Early))] pace: Option<Pace>,
) {
    let model = qwen3(true);
    let options = EngineOptions { quantize: scheme.map(Policy::of), ..exact(32, 3) };
    let found = match pace {
        None => answers(&model, &device(), &in_host(&options)),
        // Streams that run side by side, in any order that events allow.
        Some(pace) => {
            let device: Arc<dyn Device> = LaggingDevice::open(&DeviceOptions::default(), pace, None);
            answers(&model, &device, &in_host(&options))
        }
    };
    assert_eq!(found, answers(&model, &device(), &options));
}

#[test]
fn only_steps_of_many_tokens_copy_experts() {
    let model = qwen3(true);
    let options = in_host(&exact(32, 1));
    let plan = EnginePlan::new(&model, &*device(), &options).unwrap();
    let memory = plan.memory().clone();
    let forecast = plan.forecast_streaming(&*device()).unwrap().unwrap();
    assert_eq!((forecast.streamed_layers, forecast.most_tokens_in_place), (4, MOST_IN_PLACE));
    // Three matrices of 32 x 64 for each of 16 experts in four layers; two of 16 are read for each token.
    assert_eq!(memory.streamed, 4 * 16 * 3 * 32 * 64 * 4);
    let of_a_token = memory.streamed / 8;
    let mut engine = plan.load(&model, device(), &mut |_, _| {}).unwrap();
    let mut before = 0;
    let mut steps = |prompt: &[u32]| {
        engine.submit(Request { max_tokens: Some(5), ..Request::new(prompt.to_vec()) }).unwrap();
        let mut crossed = Vec::new();
        while !engine.is_idle() {
            engine.step().unwrap();
            let after = engine.statistics().streamed_bytes;
            crossed.push(after - before);
            before = after;
        }
        crossed.retain(|bytes| *bytes > 0);
        crossed
    };
    // When the model is loaded, the first layers are copied, here all four; and those of the next step at the end of each that copies.
    assert_eq!(steps(PROMPTS[0]), [&[2 * memory.streamed][..], &[of_a_token; 4]].concat());
    let [prompt, rest @ ..] = &steps(PROMPTS[1])[..] else { panic!("no step read experts") };
    // The step of three tokens is rounded up to four.
    assert!((3 * of_a_token..4 * of_a_token).contains(prompt), "{prompt}");
    assert_eq!(rest, &[of_a_token; 4]);
}

#[test]
fn experts_leave_a_device_of_its_own_memory_first() {
    let (model, options) = (qwen3(true), exact(32, 3));
    let all = EnginePlan::new(&model, &*device(), &options).unwrap().memory().clone();
    let experts = 6 * 16 * 3 * 32 * 64 * 4;
    for (limit, streams, in_place) in [
        (all.total() * 2, false, 0),
        (all.total() - experts / 2, true, MOST_IN_PLACE),
        // Attention does not fit, so whole layers are streamed.
        (all.total() - experts - experts / 24, true, 0),
    ] {
        let limit = DeviceOptions { memory_limit: Some(limit), ..DeviceOptions::default() };
        let own: Arc<dyn Device> = LaggingDevice::open(&limit, Pace::Late, None);
        let plan = EnginePlan::new(&model, &*own, &options).unwrap();
        assert!(plan.memory().missing().is_none(), "{}", plan.memory());
        let forecast = plan.forecast_streaming(&*own).unwrap();
        assert_eq!(forecast.is_some(), streams, "{}", plan.memory());
        assert_eq!(forecast.map_or(0, |forecast| forecast.most_tokens_in_place), in_place);
        assert_eq!(answers(&model, &own, &options), answers(&model, &device(), &options));
    }
}

/// Every rank reads its share of each expert.
#[test]
fn ranks_read_their_shares() {
    let model = qwen3(true);
    let tokens = |options: &EngineOptions| {
        let devices = [device(), device()];
        let plan = EnginePlan::on_devices(&model, &devices, options).unwrap();
        let streamed = plan.memory_of_ranks().map(|memory| memory.streamed > 0).collect::<Vec<_>>();
        let mut engine = plan.load(&model, devices[0].clone(), &mut |_, _| {}).unwrap();
        (streamed, greedy(&mut engine, &PROMPTS.map(<[u32]>::to_vec), 8))
    };
    let (none, expected) = tokens(&exact(32, 3));
    let (both, found) = tokens(&in_host(&exact(32, 3)));
    assert_eq!((none, both), (vec![false; 2], vec![true; 2]));
    assert_eq!(found, expected);
}

#[rstest]
#[case::no_experts(false, WeightsIn::Auto, None, "the model has none")]
#[case::on_disk(true, WeightsIn::Disk("/tmp".into()), None, "needs --weights-in auto or host, not disk:/tmp")]
#[case::on_the_device(true, WeightsIn::Device, None, "needs --weights-in auto or host, not device")]
#[case::too_little_memory(true, WeightsIn::Auto, Some(600 << 10), "more device memory")]
fn what_is_not_possible_is_named(
    #[case] of_experts: bool,
    #[case] weights_in: WeightsIn,
    #[case] memory_limit: Option<u64>,
    #[case] expected: &str,
) {
    let options = EngineOptions { weights_in, ..in_host(&exact(32, 3)) };
    let limit = DeviceOptions { memory_limit, ..DeviceOptions::default() };
    let device = LaggingDevice::open(&limit, Pace::Late, None);
    let error = EnginePlan::new(&qwen3(of_experts), &*device, &options).unwrap_err().to_string();
    assert!(error.contains("experts") && error.contains(expected), "{error}");
}
