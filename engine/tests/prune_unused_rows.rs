//! Tests of the pass `prune_unused_rows`: which calls of a program move to the output rows, and that the results stay the same.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{
    device::Device,
    op::Op,
    program::{Node, Origin, Program, ValueId},
};
use dsrun_engine::{
    EngineOptions, EnginePlan, Request, SamplingOptions,
    passes::{
        prune_unused_rows,
        quantize::{Policy, Scheme},
    },
};
use dsrun_models::{model::Model, step::OUTPUTS};
use rstest::rstest;
use std::{collections::HashMap, sync::Arc};
use support::{device, exact, fixtures, late::LateDevice, logits, lowering::LoweringDevice};

fn model(name: &str) -> Model {
    Model::open(fixtures().join(name)).unwrap()
}

fn segment<'a>(program: &'a Program, name: &'a str) -> impl Iterator<Item = &'a Node> {
    program.nodes.iter().filter(move |node| program.segments[node.segment].name == name)
}

/// The symbol of the first dimension of a value.
fn rows(program: &Program, id: ValueId) -> Option<&str> {
    program.value(id).unwrap().tensor_type()?.shape.first()?.symbol()
}

fn is_attention(node: &Node) -> bool {
    matches!(node.call.op, Op::PagedAttention(_))
}

#[rstest]
fn the_last_layer_attends_for_output_rows_only(
    #[values("llama3", "qwen2", "qwen3", "mistral", "llama_gelu", "gpt2", "opt", "opt_350m")] name: &str,
    #[values(false, true)] fused: bool,
    #[values(false, true)] quantised: bool,
) {
    let device: Arc<dyn Device> = if fused { LoweringDevice::open() } else { device() };
    // That device does not fuse integer products.
    let quantize = (quantised && !fused).then(|| Policy { default: Scheme::W8A8, ..Policy::default() });
    let model = model(name);
    let plan = EnginePlan::new(&model, &*device, &EngineOptions { quantize, ..exact(64, 3) }).unwrap();
    let (program, pruned) = (plan.program(), plan.pruned());

    // Weights, states and inputs have the same numbers in both programs.
    for (id, value) in program.values_from(|origin| !matches!(origin, Origin::Node(_))) {
        assert_eq!(pruned.value(id).unwrap(), value);
    }
    // Every layer but the last attends for all tokens, the last one for the output rows.
    let attended = |program: &Program, name: &str| -> Vec<String> {
        let nodes = segment(program, name).filter(|node| is_attention(node));
        nodes.map(|node| rows(program, node.call.results[0]).unwrap().to_owned()).collect()
    };
    let layers = model.config().layers;
    assert_eq!(attended(program, "forward"), vec!["tokens"; layers]);
    let expected = [vec!["tokens"; layers - 1], vec!["rows"]].concat();
    assert_eq!(attended(pruned, "forward"), expected);
    // The segment of hidden states computes the rest of the layer for all tokens.
    assert_eq!(attended(pruned, "embed"), ["tokens"]);
    let hidden = OUTPUTS.iter().position(|name| *name == "hidden").unwrap();
    assert_eq!(rows(pruned, pruned.outputs[hidden]), Some("tokens"));

    // After the last attention no result has a row for each token.
    let forward: Vec<&Node> = segment(pruned, "forward").collect();
    let last = forward.iter().rposition(|node| is_attention(node)).unwrap();
    for node in &forward[last..] {
        let mut made = node.call.results.iter().map(|id| rows(pruned, *id));
        assert!(made.all(|rows| rows == Some("rows")), "{:?}", node.call);
    }
    // The query, or its producer, and the residual are gathered: one value where norms follow sums.
    let gathers = forward.iter().filter(|node| matches!(node.call.op, Op::GatherRows(_))).count();
    assert!((1..=2).contains(&gathers), "{gathers}");
    // The same calls and regions as before, apart from gathers and a second work list.
    let names = |program: &Program| {
        let mut names: HashMap<String, usize> = HashMap::new();
        let nodes = segment(program, "forward").filter(|node| !matches!(node.call.op, Op::GatherRows(_)));
        nodes.for_each(|node| *names.entry(node.call.op.name().to_owned()).or_default() += 1);
        names
    };
    let mut expected = names(program);
    if !fused {
        *expected.get_mut("attention_prepare").unwrap() += 1;
        assert_eq!(names(pruned), expected);
    }
    for region in ["linear_add", "mlp_input", "attention_input"] {
        assert_eq!(names(pruned).get(region), expected.get(region), "{region}");
    }
}

#[test]
fn a_program_without_prunable_calls_stays_as_it_is() {
    let program = model("llama3").program(&Default::default()).unwrap();
    let pruned = prune_unused_rows(&program).unwrap();
    assert_ne!(pruned, program);
    assert_eq!(pruned.to_string().parse::<Program>().unwrap(), pruned);
    // Without the inputs that assign output rows to sequences, attention cannot be restricted to them.
    let mut unknown = program.clone();
    unknown.values.iter_mut().filter(|value| value.name == "wanted_start").for_each(|value| {
        value.name = "another".to_owned();
    });
    assert_eq!(prune_unused_rows(&unknown).unwrap(), unknown);
}

/// Compares pruned steps, which give the first token of a prompt, with steps of output rows only, which score a text.
#[rstest]
fn pruned_steps_give_the_same_log_probabilities(
    #[values("llama3", "qwen3", "mistral", "gpt2", "opt", "opt_350m")] name: &str,
    #[values("plain", "fused", "late")] kind: &str,
    #[values(64, 16, 7)] step_tokens: usize,
    #[values(1, 4)] requests: usize,
) {
    let model = model(name);
    let open = || -> Arc<dyn Device> {
        match kind {
            "fused" => LoweringDevice::open(),
            "late" => LateDevice::open(),
            _ => device(),
        }
    };
    let engine = |requests| {
        let (device, options) = (open(), EngineOptions { ignore_end: true, ..exact(step_tokens, requests) });
        let plan = EnginePlan::new(&model, &*device, &options).unwrap();
        plan.load(&model, device, &mut |_, _| {}).unwrap()
    };
    // Prompts of one token, of one step, and of several steps of which only the last has an output row.
    let prompts: Vec<Vec<u32>> = [1, 2, 7, 16, 23, 5]
        .iter()
        .map(|length| (0..*length).map(|index| (index * 17 + length * 31 + 5) % 96).collect())
        .collect();
    let mut scoring = engine(1);
    let mut side_by_side = engine(requests);
    let request = |prompt: &Vec<u32>| Request {
        max_tokens: Some(3),
        top_log_probabilities: 4,
        sampling: SamplingOptions::default(),
        ..Request::new(prompt.as_slice())
    };
    let ids: Vec<_> = prompts.iter().map(|prompt| side_by_side.submit(request(prompt)).unwrap()).collect();
    let mut events = HashMap::new();
    while !side_by_side.is_idle() {
        for event in side_by_side.step().unwrap() {
            events.entry(event.request).or_insert_with(Vec::new).push(event);
        }
    }
    for (prompt, id) in prompts.iter().zip(ids) {
        let mut tokens = prompt.clone();
        let events = &events[&id];
        tokens.extend(events[..2].iter().map(|event| event.token));
        let logits = logits(&mut scoring, &tokens);
        for (row, event) in logits[prompt.len() - 1..].iter().zip(events) {
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|logit| f64::from(logit - largest).exp()).sum();
            let normaliser = f64::from(largest) + sum.ln();
            for (token, log_probability) in &event.top {
                let error = f64::from(row[*token as usize]) - normaliser - f64::from(*log_probability);
                assert!(error.abs() < 2e-5, "{error}");
            }
        }
    }
}
