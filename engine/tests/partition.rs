//! The pass `partition`: where it cuts programs, and the programs of the stages.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dsrun_core::{
    DType, WeightFormat,
    op::{MeshAxis, Op},
    program::{Origin, Program},
};
use dsrun_engine::passes::{
    partition::{PipelineOptions, Stage, partition},
    shard::{MeshCosts, ShardPolicy, shard},
};
use dsrun_models::{model::Model, step::ProgramOptions};
use rstest::rstest;
use std::collections::BTreeSet;

/// The sizes of states of an engine for one request of 2048 tokens.
fn sizes(name: &str) -> Option<usize> {
    Some(match name {
        "pages" | "blocks" => 128,
        _ => 1,
    })
}

fn bf16(preset: &str) -> Program {
    let model = Model::random_named(preset, 0, WeightFormat::Dense(DType::BF16)).unwrap();
    let options = ProgramOptions { activation: DType::BF16, cache: DType::BF16, ..ProgramOptions::default() };
    model.program(&options).unwrap()
}

fn divided(program: &Program, options: &PipelineOptions, limit: Option<u64>) -> Result<Vec<Stage>, String> {
    partition(program, options, &MeshCosts::ACCELERATORS, &sizes, limit).map_err(|error| error.to_string())
}

fn stages(program: &Program, stages: usize) -> Vec<Stage> {
    divided(program, &PipelineOptions { stages, ..PipelineOptions::default() }, None).unwrap()
}

fn names(program: &Program, is: impl Fn(&Origin) -> bool) -> BTreeSet<String> {
    program.values.iter().filter(|value| is(&value.origin)).map(|value| value.name.clone()).collect()
}

fn weights(program: &Program) -> BTreeSet<String> {
    names(program, |origin| matches!(origin, Origin::Weight(_)))
}

fn caches(program: &Program) -> BTreeSet<String> {
    let mut states = names(program, |origin| *origin == Origin::State);
    states.retain(|name| name.ends_with("_cache"));
    states
}

/// What a stage sends and receives: for each call the peer, and the width of what is exchanged.
fn exchanged(program: &Program, sends: bool) -> Vec<(u32, usize)> {
    let one = |node: &dsrun_core::program::Node| {
        let peer = match &node.call.op {
            Op::Send(op) if sends => op.peer,
            Op::Receive(op) if !sends => op.peer,
            _ => return None,
        };
        assert_eq!(node.call.op.mesh_axis(), Some(MeshAxis::Pipeline));
        let tensor = program.value(node.call.operands[0]?).unwrap().tensor_type()?.clone();
        Some((peer, tensor.shape[1].known()?))
    };
    program.nodes.iter().filter_map(one).collect()
}

/// Only the residual stream crosses, every layer is on one stage, and the head and sampling are on the last.
#[rstest]
fn layers_are_divided_and_the_residual_stream_is_sent(
    #[values("llama-1b", "llama-8b", "gpt2", "mixtral-8x7b", "gemma-3-4b")] preset: &str,
    #[values(2, 3, 4)] count: usize,
) {
    let program = bf16(preset);
    let stages = stages(&program, count);
    assert_eq!(stages.len(), count);
    let rank = |stage: usize| ((stage + 1) % count) as u32;
    let (mut all, mut held) = (BTreeSet::new(), Vec::new());
    for (stage, Stage { program: own, send_bytes, send_us, .. }) in stages.iter().enumerate() {
        let (sent, received) = (exchanged(own, true), exchanged(own, false));
        let (first, last) = (stage == 0, stage + 1 == count);
        assert_eq!((sent.len(), received.len()), (usize::from(!last), usize::from(!first)), "stage {stage}");
        assert!(sent.iter().all(|(peer, _)| *peer == rank(stage + 1)));
        assert!(received.iter().all(|(peer, _)| *peer == rank(stage - 1)));
        assert_eq!((*send_bytes > 0, *send_us > 0.0), (!last, !last));
        let samples = own.nodes.iter().any(|node| matches!(node.call.op, Op::Sample(_)));
        let looks_up = own.nodes.iter().any(|node| matches!(node.call.op, Op::Embed(_)));
        assert_eq!((samples, looks_up), (last, first), "stage {stage}");
        all.extend(weights(own));
        held.extend(caches(own));
    }
    assert_eq!(all, weights(&program));
    held.sort();
    assert_eq!(held, caches(&program).into_iter().collect::<Vec<_>>(), "each cache is on one stage");
}

/// Equal layers make equal stages, as far as the head allows.
#[test]
fn stages_are_balanced() {
    let program = bf16("llama-8b");
    for count in [2, 4, 8] {
        let times: Vec<f64> = stages(&program, count).iter().map(|stage| stage.time_us).collect();
        let (all, most) = (times.iter().sum::<f64>(), times.iter().copied().fold(0.0, f64::max));
        // A stage may be longer than its share by less than a layer, of which there are 32.
        assert!(most < all / count as f64 + all / 32.0, "{times:?}");
    }
}

#[test]
fn stages_begin_where_the_user_says() {
    let program = bf16("llama-1b");
    let options = PipelineOptions { stages: 3, first_layers: vec![2, 15], ..PipelineOptions::default() };
    let stages = divided(&program, &options, None).unwrap();
    let layers = |stage: &Stage| caches(&stage.program).len() / 2;
    assert_eq!(stages.iter().map(layers).collect::<Vec<_>>(), [2, 13, 1]);
    for (first_layers, part) in [
        (vec![2, 2], "must be above 0 and increase"),
        (vec![0, 2], "must be above 0 and increase"),
        (vec![2, 16], "layer 16, which the model does not have"),
        (vec![2], "names 1 first layers, but 3 stages have 2"),
    ] {
        let error = divided(
            &program,
            &PipelineOptions { stages: 3, first_layers, ..PipelineOptions::default() },
            None,
        )
        .unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let program = bf16("llama-1b");
    let error = divided(&program, &PipelineOptions { stages: 99, ..PipelineOptions::default() }, None);
    assert!(error.unwrap_err().contains("divided into at most"));
    let whole: u64 = stages(&program, 1)[0].memory;
    let two = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    // The tied embedding is on both stages.
    assert!(divided(&program, &two, Some(whole * 3 / 4)).is_ok());
    let error = divided(&program, &two, Some(whole / 3)).unwrap_err();
    assert!(error.contains("do not hold") && error.contains("more stages"), "{error}");
}

/// A stage is a program like any other: ranks divide its layers, and each sends the whole residual stream to the rank that has its
/// place in the next stage.
#[test]
fn stages_are_sharded() {
    let program = bf16("llama-1b");
    for Stage { program: own, .. } in stages(&program, 2) {
        let policy = ShardPolicy::default();
        let sharded = shard(&own, 2, &policy, &MeshCosts::ACCELERATORS, &sizes, None).unwrap();
        for rank in &sharded.programs {
            assert_eq!(exchanged(rank, true), exchanged(&own, true));
            assert_eq!(exchanged(rank, false), exchanged(&own, false));
            let reduced = rank.nodes.iter().filter(|node| matches!(node.call.op, Op::AllReduce(_))).count();
            assert!(reduced >= caches(rank).len(), "{reduced}");
        }
    }
}
