//! Samples and records the token of one row of logits in one launch: `sampling/next_token.cu`.
//!
//! The region is `logit_process`, `sample` and `commit_tokens` of one row, in a chain. The kernel's results are bit-identical to
//! those of the separate kernels.

use super::{CHUNK, SHARE, in_fours, params::NextTokenParams};
use crate::{
    driver::{kernel_spec::KernelSpec, launch::LaunchOp},
    ops::{
        KernelPlan,
        body::{BodyReader, made, value},
        frame::Frame,
        operand,
        params::{ExtentParams, MatrixParams},
        step::TokenRecords,
        type_name,
    },
};
use dsrun_core::{Error, Result, kernels::CallDesc, op::Op, region::Region};
use std::fmt::Display;

/// Threads of a block, which processes a chunk of the row.
const THREADS: usize = 1024;

/// The operands of the body, as operands of the region. Its results are the processed logits, the id, its log probability, and the
/// last token, finished flag and counts of the request.
#[derive(Clone, Copy)]
struct Body {
    logits: usize,
    requests: usize,
    parameters: usize,
    counts: usize,
    bias: Option<usize>,
    mask: Option<usize>,
    positions: usize,
    seeds: usize,
    commits: usize,
    stop_ids: usize,
}

impl Body {
    fn read(region: &Region) -> Option<Self> {
        let mut reader = BodyReader::new(region);
        let (_, process) = reader.take(|op| matches!(op, Op::LogitProcess(_)).then_some(()))?;
        let (_, sample) = reader.take(|op| matches!(op, Op::Sample(_)).then_some(()))?;
        let (_, commit) = reader.take(|op| matches!(op, Op::CommitTokens(_)).then_some(()))?;
        let body = Self {
            logits: value(process, 0)?,
            requests: value(process, 1)?,
            parameters: value(process, 2)?,
            counts: value(process, 3)?,
            bias: value(process, 4),
            mask: value(process, 5),
            positions: value(sample, 2)?,
            seeds: value(sample, 4)?,
            commits: value(commit, 0)?,
            stop_ids: value(commit, 2)?,
        };
        let flows = value(sample, 0) == made(process, 0)
            && value(sample, 1) == Some(body.requests)
            && value(sample, 3) == Some(body.parameters)
            && value(commit, 1) == made(sample, 0)
            && value(commit, 5) == Some(body.counts);
        let results = process.results.iter().chain(&sample.results).chain(&commit.results);
        let whole = reader.is_done() && region.results().iter().eq(results);
        let first_made = made(process, 0)?;
        let outside = body.values().all(|value| value < first_made);
        (flows && whole && outside).then_some(body)
    }

    fn values(self) -> impl Iterator<Item = usize> {
        let always = [
            self.logits,
            self.requests,
            self.parameters,
            self.counts,
            self.positions,
            self.seeds,
            self.commits,
            self.stop_ids,
        ];
        always.into_iter().chain(self.bias).chain(self.mask)
    }

    fn params(self, columns: usize, frame: &Frame) -> Result<NextTokenParams> {
        let (logits, requests) = (frame.tensor(self.logits)?, frame.tensor(self.requests)?);
        let (settings, counts) = (frame.tensor(self.parameters)?, frame.tensor(self.counts)?);
        let (positions, seeds) = (frame.tensor(self.positions)?, frame.tensor(self.seeds)?);
        let (commits, stop_ids) = (frame.tensor(self.commits)?, frame.tensor(self.stop_ids)?);
        let (y, ids, log_probability) = (frame.result(0)?, frame.result(1)?, frame.result(2)?);
        let (last, finished, recorded) = (frame.result(3)?, frame.result(4)?, frame.result(5)?);
        let mask = self.mask.and_then(|mask| frame.optional(mask));
        let mut rows = vec![logits, requests, positions, commits, y, ids, log_probability];
        rows.extend(mask);
        Ok(NextTokenParams {
            extent: ExtentParams::of(1, &rows),
            columns: columns as i64,
            capacity: settings.size(0).min(seeds.size(0)) as i64,
            logits: logits.address,
            requests: requests.address,
            settings: MatrixParams::of(settings),
            counts: MatrixParams::of(counts),
            bias: MatrixParams::optional(self.bias.and_then(|bias| frame.optional(bias))),
            mask: mask.map_or(0, |mask| mask.address),
            y: y.address,
            positions: positions.address,
            seeds: MatrixParams::of(seeds),
            shares: frame.workspace,
            chunks: columns.div_ceil(CHUNK) as i64,
            ids: ids.address,
            log_probability: log_probability.address,
            commits: commits.address,
            records: TokenRecords::of(stop_ids, last, finished, recorded),
            counter: frame.persistent,
        })
    }
}

/// The plan of the sampling tail of a step of one row; `None` if the region is something else.
///
/// # Errors
/// If the step has more rows.
pub(in crate::ops) fn region(region: &Region, call: &CallDesc) -> Result<Option<KernelPlan>> {
    let Some(body) = Body::read(region) else { return Ok(None) };
    let logits = operand(call, body.logits)?;
    let [rows, columns] = logits.shape[..] else { return Ok(None) };
    if (rows, operand(call, body.commits)?.shape[0]) != (1, 1) || columns == 0 {
        let message =
            format!("CUDA samples and records {rows} rows of {columns} logits in separate launches");
        return Err(Error::unsupported(message));
    }
    let defines: [(_, &dyn Display); 5] = [
        ("X", &type_name(logits.dtype)?),
        ("WIDTH", &4),
        ("VECTORS", &i32::from(in_fours(columns, []))),
        ("CHUNK", &CHUNK),
        ("SHARE", &SHARE),
    ];
    let spec = KernelSpec::new("sampling/next_token.cu", "next_token", defines);
    let chunks = columns.div_ceil(CHUNK);
    Ok(Some(KernelPlan {
        workspace: chunks * SHARE,
        persistent: size_of::<u32>(),
        ..KernelPlan::of_one(spec, move |frame, function| {
            Ok(LaunchOp::kernel(function, [chunks, 1, 1], THREADS, &body.params(columns, frame)?))
        })
    }))
}
