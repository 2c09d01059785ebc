//! The request table.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
    },
    ops::{KernelPlan, THREADS, frame::Bound},
};
use dsrun_core::{Result, kernels::CallDesc, op::PrepareStep};

/// The most blocks that copy rows of the block table.
const COPIERS: usize = 1024;
/// Threads of a block of `prepare_step`: a few warps, which soon meet, where every sequence brings a token.
const PREPARE_THREADS: std::ops::RangeInclusive<usize> = 128..=1024;

fn addresses(parameters: Parameters, tensors: &[&Bound]) -> Parameters {
    tensors.iter().fold(parameters, |parameters, tensor| parameters.address(tensor.address))
}

pub(super) fn prepare_step(op: &PrepareStep, _: &CallDesc) -> Result<KernelPlan> {
    let block = op.block_size as usize;
    let spec = KernelSpec::new("step/step.cu", "prepare_step", []);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let mut operands = Vec::new();
        for index in 0..10 {
            operands.push(frame.tensor(index)?);
        }
        let mut results = Vec::new();
        for index in 0..10 {
            results.push(frame.result(index)?);
        }
        let (table, tables, counts) = (operands[5], results[6], results[9]);
        let (sequences, tokens) = (operands[0].size(0), results[0].size(0));
        let per_sequence =
            [operands[0], operands[1], operands[2], results[3], results[4], results[5], results[6]];
        let parameters = Parameters::default()
            .extent(sequences, &per_sequence)
            .extent(tokens, &[operands[3], results[0], results[1], results[2]])
            .extent(operands[4].size(0), &[operands[4], results[7]])
            .extent(table.size(0), &[operands[5], operands[6], operands[7], results[8], results[9]])
            .size(operands[3].size(0))
            .size(table.size(1))
            .size(counts.size(1))
            .size(block);
        let parameters = addresses(parameters, &operands[..5]).rows(table);
        let parameters = addresses(parameters, &[operands[6], operands[7]]);
        let parameters = addresses(parameters, &results[..6]).rows(tables);
        let parameters = addresses(parameters, &[results[7], results[8]]).rows(counts);
        let (least, most) = PREPARE_THREADS.into_inner();
        let threads =
            if tokens > sequences { most } else { sequences.next_multiple_of(32).clamp(least, most) };
        Ok(LaunchOp::kernel(function, [1 + sequences.min(COPIERS), 1, 1], threads, parameters))
    }))
}

pub(super) fn commit_tokens(_: &CallDesc) -> Result<KernelPlan> {
    let spec = KernelSpec::new("step/step.cu", "commit_tokens", []);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (requests, ids, stop) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (last, finished, counts) = (frame.result(0)?, frame.result(1)?, frame.result(2)?);
        let rows = requests.size(0);
        let parameters = Parameters::default()
            .extent(rows, &[requests, ids])
            .extent(last.size(0), &[last, finished, counts])
            .size(stop.size(0))
            .size(counts.size(1));
        let parameters = addresses(parameters, &[requests, ids, stop, last, finished]).rows(counts);
        Ok(LaunchOp::kernel(function, [rows.div_ceil(THREADS), 1, 1], THREADS, parameters))
    }))
}
