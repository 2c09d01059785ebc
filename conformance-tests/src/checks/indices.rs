//! Indices in device memory that point nowhere. Whatever stands there, a call touches only what is its own.
//!
//! The calls run as cases whose results may be anything. What a case checks all the same is what counts here: memory around
//! every tensor, the gaps between rows, operands that are not updated, and that the same call gives the same bits again.

use super::bench::{Bench, Outcome, Stop, floats};
use crate::{
    case::{CallCase, Case, Expected, Layout, Operand},
    cases::drawn_weight,
    random::{Random, Values},
    runner::{self, Status},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat,
    op::{
        AttentionMask, CommitTokens, Embed, GatherRows, GroupScore, GroupedLinear, KvWrite, LatentWrite,
        LogitProcess, MoeCombine, MoeGroup, MoeRoute, Op, PageGather, PageScatter, PagedAttention,
        PrepareStep, Rope, RopePairing, RouterNorm, RouterScore, SAMPLING_COLUMNS, Sample,
    },
};

/// Numbers that are easily taken for an index, or overflow on the way to an address.
const HOSTILE: [i32; 10] =
    [-1, -2, i32::MIN, i32::MAX, 1 << 30, 1 << 20, 65_536, -65_536, i32::MIN + 1, i32::MAX - 1];

/// How many numbers a vector of indices has: all the hostile ones, and one that is right.
const COUNT: usize = HOSTILE.len() + 3;

/// Hostile numbers, each once, the first numbers behind what an index may be, and one good index.
fn hostile(random: &mut Random, limit: usize) -> Vec<i32> {
    let mut all = HOSTILE.to_vec();
    all.extend([limit as i32, limit as i32 + 1, 1]);
    random.shuffled(all.len()).into_iter().map(|at| all[at]).collect()
}

fn indices(values: &[i32]) -> Option<Operand> {
    Operand::tensor(Tensor::vector(values))
}

fn laid(tensor: Tensor) -> Option<Operand> {
    Operand::laid(tensor, Layout::strided(3, 1))
}

/// Calls of every op that takes indices, their index operands full of hostile numbers.
fn calls(dtype: DType) -> Vec<(&'static str, CallCase)> {
    let mut random = Random::named(&format!("indices/{dtype}"));
    let random = &mut random;
    let mut calls: Vec<(&'static str, CallCase)> = Vec::new();
    let mut add = |op: Op, operands: Vec<Option<Operand>>| {
        let Some(signature) = op.signature() else { return };
        let anything = Expected { layout: Layout::strided(3, 1), ..Expected::new(Vec::new()) };
        let results = vec![anything; signature.results.len()];
        calls.push((signature.name, CallCase::new(op, operands, results)));
    };
    let (cache, page) = ([4, 2, 4, 8], 2 * 4 * 8);
    let table = drawn_weight(random, WeightFormat::Dense(dtype), [5, 24], 1.0);
    let places = drawn_weight(random, WeightFormat::Dense(dtype), [4, 24], 1.0);
    add(
        Embed { dtype, first_row: u32::MAX - 2, position_offset: u32::MAX }.into(),
        vec![
            indices(&hostile(random, 5)),
            Operand::weight(table.clone()),
            indices(&hostile(random, 4)),
            Operand::weight(places),
        ],
    );
    add(
        Embed { dtype, first_row: 0, position_offset: 0 }.into(),
        vec![indices(&hostile(random, 5)), Operand::weight(table), None, None],
    );
    let plane = |random: &mut Random, rows: usize, columns: usize| {
        laid(random.tensor(dtype, &[rows, columns], Values::Uniform))
    };
    let pages = |random: &mut Random| laid(random.tensor(dtype, &cache, Values::Uniform));
    add(GatherRows {}.into(), vec![plane(random, 6, 24), indices(&hostile(random, 6))]);
    add(
        Rope { heads: 3, pairing: RopePairing::Halves, scale: 1.0 }.into(),
        vec![
            plane(random, COUNT, 24),
            indices(&hostile(random, 6)),
            Operand::tensor(Tensor::floats(DType::F32, &[4], &[0.5; 4])),
        ],
    );
    add(
        KvWrite {}.into(),
        vec![
            pages(random),
            pages(random),
            plane(random, COUNT, 16),
            plane(random, COUNT, 16),
            indices(&hostile(random, 16)),
        ],
    );
    add(
        LatentWrite {}.into(),
        vec![pages(random), plane(random, COUNT, 10), plane(random, COUNT, 6), indices(&hostile(random, 16))],
    );
    add(PageGather {}.into(), vec![pages(random), indices(&hostile(random, 4))]);
    add(PageScatter {}.into(), vec![pages(random), plane(random, COUNT, page), indices(&hostile(random, 4))]);
    // Two sequences, one of which has its keys nowhere at all.
    let attend = |mask, window| PagedAttention {
        query_heads: 4,
        kv_heads: 2,
        scale: 0.35,
        softcap: 0.0,
        window,
        mask,
        value_size: 0,
    };
    for (mask, window) in
        [(AttentionMask::Causal, 0), (AttentionMask::Causal, 5), (AttentionMask::Bidirectional, 0)]
    {
        let mut tables = hostile(random, 4);
        tables.resize(2 * 8, i32::MAX);
        add(
            attend(mask, window).into(),
            vec![
                plane(random, 4, 32),
                pages(random),
                pages(random),
                indices(&[0, 3]),
                indices(&[3, 1]),
                indices(&[30, 32]),
                Operand::tensor(Tensor::integers(&[2, 8], &tables)),
                Some(Operand::WorkList),
                None,
                None,
                None,
            ],
        );
    }
    let capacity = 3;
    let parameters = || {
        let row = [1.0, 4.0, 0.9, 0.0, 1.5, 0.5, 0.5, 0.0];
        let all: Vec<f64> = row.iter().copied().cycle().take(capacity * SAMPLING_COLUMNS).collect();
        Operand::tensor(Tensor::floats(DType::F32, &[capacity, SAMPLING_COLUMNS], &all))
    };
    let counts = |value: i32| Operand::tensor(Tensor::integers(&[capacity, 40], &vec![value; capacity * 40]));
    let wide = |random: &mut Random| laid(random.tensor(DType::F32, &[COUNT, 40], Values::Uniform));
    add(
        LogitProcess {}.into(),
        vec![wide(random), indices(&hostile(random, capacity)), parameters(), counts(1), None, None],
    );
    add(
        Sample {}.into(),
        vec![
            wide(random),
            indices(&hostile(random, capacity)),
            indices(&hostile(random, 9)),
            parameters(),
            Operand::tensor(Tensor::words(&[capacity, 2], &[7; 6])),
        ],
    );
    let per_request = || indices(&[1, 2, 3]);
    add(
        CommitTokens {}.into(),
        vec![
            indices(&hostile(random, 40)),
            indices(&hostile(random, capacity)),
            indices(&[2, -1, i32::MAX]),
            per_request(),
            indices(&[0, 0, 1]),
            counts(0),
        ],
    );
    add(
        PrepareStep { block_size: 4 }.into(),
        vec![
            indices(&[2, i32::MAX, -2]),
            indices(&[2, 1, 1]),
            indices(&[0, -1, -1]),
            indices(&hostile(random, 40)),
            indices(&hostile(random, 4)),
            Operand::tensor(Tensor::integers(&[capacity, 4], &[i32::MAX; 12])),
            per_request(),
            indices(&[0, 0, 0]),
            indices(&[0, 3, 8]),
            counts(0),
        ],
    );
    calls.extend(expert_calls(dtype));
    calls
}

/// Calls of the ops of mixtures of experts, of which experts 1 to 3 of 5 are those of the device.
fn expert_calls(dtype: DType) -> Vec<(&'static str, CallCase)> {
    let mut random = Random::named(&format!("indices/experts/{dtype}"));
    let random = &mut random;
    let anything = || Expected { layout: Layout::strided(3, 1), ..Expected::new(Vec::new()) };
    let (count, first_expert, slots) = (3, 1, 2);
    let chosen = |random: &mut Random| {
        let values: Vec<i32> = hostile(random, 5).into_iter().chain(hostile(random, 4)).collect();
        Operand::tensor(Tensor::integers(&[COUNT, slots], &values))
    };
    let plane = |random: &mut Random, dtype: DType, columns: usize| {
        laid(random.tensor(dtype, &[COUNT, columns], Values::Uniform))
    };
    let weight = drawn_weight(random, WeightFormat::Dense(dtype), [3 * 8, 24], 1.0);
    let route = MoeRoute {
        top_k: slots as u32,
        score: RouterScore::Softmax,
        groups: 1,
        top_groups: 1,
        group_score: GroupScore::Max,
        norm: RouterNorm::Sum,
        eps: 1e-6,
        scale: 1.0,
        threshold: 0.0,
    };
    let logits = plane(random, dtype, 5);
    let ids = chosen(random);
    let mut calls = vec![(
        "moe_route",
        CallCase::new(route, vec![logits, None, None, None, ids], vec![anything(), anything()]),
    )];
    let group = MoeGroup { count, first_expert };
    let tables = vec![anything(), Expected::new(Vec::new())];
    calls.push(("moe_group", CallCase::new(group, vec![chosen(random)], tables)));
    // Tables of other experts, or of none. No assignment is in the tables of two experts, one of which would write last.
    let starts = [i32::MIN, i32::MAX, -1, -5];
    for starts in [&starts[..], &[0, 1 << 20, 3, 2]] {
        let tables = [chosen(random), chosen(random), Operand::tensor(Tensor::vector(starts))];
        let [experts, order, starts] = tables;
        let operands =
            vec![plane(random, dtype, 24), Operand::weight(weight.clone()), experts, None, order, starts];
        let op = GroupedLinear { dtype, count, first_expert };
        calls.push(("grouped_linear", CallCase::new(op, operands, vec![anything()])));
    }
    let weights = plane(random, DType::F32, slots);
    let operands = vec![plane(random, dtype, slots * 8), weights, chosen(random)];
    let combine = MoeCombine { count, first_expert };
    calls.push(("moe_combine", CallCase::new(combine, operands, vec![anything()])));
    calls
}

pub(super) fn hostile_indices(subject: &Subject) -> Outcome {
    let device = subject.device();
    let (mut ran, mut wrong) = (0, Vec::new());
    for dtype in floats(&**device) {
        for (name, call) in calls(dtype) {
            let case = Case::new(format!("{name}/{dtype}"), call);
            let report = runner::run(&case, std::slice::from_ref(device));
            match report.status {
                Status::Passed => ran += 1,
                Status::Unsupported(_) => {}
                Status::Failed(failures) => wrong.push(format!("{}: {}", case.id, failures.join("; "))),
            }
        }
    }
    if !wrong.is_empty() {
        return Err(Stop::Failed(wrong.join("\n")));
    }
    if ran == 0 {
        return Err(Stop::Unsupported("the device runs no op that takes indices".into()));
    }
    super::memory::sum_is_right(&mut Bench::new(device)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::op::OperandKind;
    use std::collections::HashSet;

    #[test]
    fn every_op_with_indices_is_there() {
        // Lengths of sequences and extents are no indices; what these take them for is held to by their cases.
        let lengths = ["attention_prepare", "attention"];
        let there: HashSet<&str> = calls(DType::F32).into_iter().map(|(name, _)| name).collect();
        for signature in Op::PRIMITIVES {
            let takes = signature.operands.iter().any(|operand| operand.kind == OperandKind::I32);
            assert_eq!(
                takes && !lengths.contains(&signature.name),
                there.contains(signature.name),
                "{}",
                signature.name
            );
        }
    }
}
