//! Sampling: from logits to tokens.

mod next_token;
mod params;

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, MAX_GRID},
    },
    ops::{
        KernelPlan, operand,
        params::{ExtentParams, MatrixParams},
        result, type_of,
    },
};
use dsrun_core::{Error, Result, TensorDesc, kernels::CallDesc};
pub(super) use next_token::region;
pub(super) use params::params_headers;
use params::{ArgmaxParams, LogitProcessParams, SampleParams};

/// Threads of a block of `argmax`, and the maximum number of blocks that share a row: one thread of the last block merges each.
const ARGMAX_THREADS: usize = 512;
const MAX_SPLITS: usize = 64;
/// Threads of a block of `logit_process`, and the number of vectors of 4 logits per thread, if there are enough.
const PROCESS_THREADS: usize = 256;
const PROCESS_TURNS: usize = 2;
/// Threads of a block of `sample_chunks`.
const CHUNK_THREADS: usize = 256;
/// Tokens of a chunk of a row, and bytes of `struct Share`, the summary of a chunk.
const CHUNK: usize = 4096;
const SHARE: usize = 32;
/// Threads of a block of `sample`.
const SAMPLE_THREADS: usize = 1024;

/// Whether the columns, and the rows of all planes, consist of whole vectors of four elements.
pub(super) fn in_fours<'a>(columns: usize, planes: impl IntoIterator<Item = &'a TensorDesc>) -> bool {
    columns.is_multiple_of(4) && planes.into_iter().all(|plane| plane.strides[0].is_multiple_of(4))
}

pub(super) fn logit_process(call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let (logits, y) = (operand(call, 0)?, result(call, 0)?);
    let planes = [logits, operand(call, 3)?, y].into_iter().chain(call.tensor(4));
    let width = if in_fours(y.shape[1], planes) { 4 } else { 1 };
    // With few rows, several vectors per thread would leave the device idle.
    let blocks = |turns: usize| y.shape[0] * y.shape[1].div_ceil(PROCESS_THREADS * width * turns);
    let turns = if blocks(PROCESS_TURNS) > 2 * device.sm_count { PROCESS_TURNS } else { 1 };
    let defines: [(_, &dyn std::fmt::Display); 3] =
        [("X", &type_of(call, 0)?), ("WIDTH", &width), ("TURNS", &turns)];
    let spec = KernelSpec::new("sampling/logits.cu", "logit_process", defines);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (logits, requests, settings) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (counts, y) = (frame.tensor(3)?, frame.result(0)?);
        let (rows, vocabulary) = (y.size(0), y.size(1));
        let mut bounds = vec![logits, requests, y];
        bounds.extend(frame.optional(5));
        let params = LogitProcessParams {
            extent: ExtentParams::of(rows, &bounds),
            vocabulary: vocabulary as i64,
            capacity: settings.size(0) as i64,
            logits: MatrixParams::of(logits),
            requests: requests.address,
            settings: MatrixParams::of(settings),
            counts: MatrixParams::of(counts),
            bias: MatrixParams::optional(frame.optional(4)),
            mask: MatrixParams::optional(frame.optional(5)),
            y: MatrixParams::of(y),
        };
        let grid = [vocabulary.div_ceil(PROCESS_THREADS * width * turns), rows.min(MAX_GRID), 1];
        Ok(LaunchOp::kernel(function, grid, PROCESS_THREADS, &params))
    }))
}

pub(super) fn argmax(call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let x = operand(call, 0)?;
    let unit = 16 / x.dtype.bytes();
    let vectors = x.shape[1].is_multiple_of(unit) && x.strides[0].is_multiple_of(unit);
    // Four vectors per thread of a block.
    let rows = x.shape[0];
    let most = (device.sm_count / rows.max(1)).clamp(1, MAX_SPLITS);
    let splits = x.shape[1].div_ceil(ARGMAX_THREADS * 4 * unit).clamp(1, most);
    let defines: [(_, &dyn std::fmt::Display); 3] =
        [("X", &type_of(call, 0)?), ("VECTORS", &i32::from(vectors)), ("SPLITS", &splits)];
    let spec = KernelSpec::new("sampling/argmax.cu", "argmax", defines);
    let mut plan = KernelPlan::of_one(spec, move |frame, function| {
        let (x, ids) = (frame.tensor(0)?, frame.result(0)?);
        let params = ArgmaxParams {
            extent: ExtentParams::of(rows, &[x, ids]),
            columns: x.size(1) as i64,
            x: MatrixParams::of(x),
            ids: ids.address,
            partial: frame.workspace,
            counters: frame.persistent,
        };
        Ok(LaunchOp::kernel(function, [splits, rows.min(MAX_GRID), 1], ARGMAX_THREADS, &params))
    });
    if splits > 1 {
        plan.workspace = rows * splits * 8;
        plan.persistent = rows * 4;
    }
    Ok(plan)
}

pub(super) fn sample(call: &CallDesc) -> Result<KernelPlan> {
    let logits = operand(call, 0)?;
    let (rows, columns) = (logits.shape[0], logits.shape[1]);
    let chunks = columns.div_ceil(CHUNK).max(1);
    let vectors = i32::from(in_fours(columns, [logits]));
    let defines: [(_, &dyn std::fmt::Display); 3] =
        [("VECTORS", &vectors), ("CHUNK", &CHUNK), ("SHARE", &SHARE)];
    let specs =
        ["sample_chunks", "sample"].map(|entry| KernelSpec::new("sampling/sample.cu", entry, defines));
    Ok(KernelPlan {
        kernels: specs.to_vec(),
        workspace: rows * chunks * SHARE,
        persistent: 0,
        batch_invariant: true,
        launches: Box::new(move |frame, functions, _| {
            let [of_chunks, of_rows] = functions else {
                return Err(Error::internal("a sampling plan without its two kernels"));
            };
            let (logits, requests, positions) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
            let (settings, seeds) = (frame.tensor(3)?, frame.tensor(4)?);
            let (ids, log_probability) = (frame.result(0)?, frame.result(1)?);
            let params = SampleParams {
                extent: ExtentParams::of(rows, &[logits, requests, positions, ids, log_probability]),
                columns: columns as i64,
                capacity: settings.size(0).min(seeds.size(0)) as i64,
                logits: MatrixParams::of(logits),
                requests: requests.address,
                positions: positions.address,
                settings: MatrixParams::of(settings),
                seeds: MatrixParams::of(seeds),
                shares: frame.workspace,
                chunks: chunks as i64,
                ids: ids.address,
                log_probability: log_probability.address,
            };
            let steps = [
                LaunchOp::kernel(of_chunks, [rows, chunks, 1], CHUNK_THREADS, &params),
                LaunchOp::kernel(of_rows, [rows, 1, 1], SAMPLE_THREADS, &params),
            ];
            Ok(steps.into_iter().flatten().collect())
        }),
    })
}
