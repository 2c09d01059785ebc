//! From the logits of one row to its token, recorded, in one launch: `sampling/next_token.cu`.
//!
//! Programs do not know of it. When calls are captured as a graph, `logit_process`, `sample` and `commit_tokens` of one row that
//! follow each other are found here and launched as one kernel, which does to the bit what theirs would have done one after the
//! other, and takes their parameters.

use super::{KernelSpec, sampling::in_fours, type_name};
use crate::{
    context::Context,
    kernels::Work,
    launch::{Launch, Parameters, Step},
    memory::CudaBuffer,
};
use dsrun_core::{DType, Result, TensorDesc, device::MemoryKind, kernels::CallDesc, op::Op};
use std::{ops::Range, sync::Arc};

/// Calls that become one launch.
const CALLS: usize = 3;
/// Threads of a block, and the tokens of its chunk.
const THREADS: usize = 1024;
const CHUNK: usize = 4096;

/// The kernel that takes the logits of one row, of a type, to its token; `vectors`: they are whole vectors of four.
///
/// # Errors
/// If the type is no float.
pub fn next_token_kernel(logits: DType, vectors: bool) -> Result<KernelSpec> {
    let (logits, vectors) = (type_name(logits)?, i32::from(vectors));
    let defines: [(_, &dyn std::fmt::Display); 3] = [("T0", &logits), ("WIDTH", &4), ("VECTORS", &vectors)];
    Ok(KernelSpec::new("sampling/next_token.cu", "next_token", defines))
}

/// The kernels that a graph of such calls would have for its rows.
pub(crate) fn foreseen(calls: &[CallDesc]) -> Vec<KernelSpec> {
    let row = |calls: &[CallDesc]| {
        let [process, sample, commit] = calls else { return None };
        if !are_of_a_row([process, sample, commit]) {
            return None;
        }
        let columns = *process.results.first()?.shape.get(1)?;
        next_token_kernel(process.tensor(0)?.dtype, in_fours(columns, [])).ok()
    };
    calls.windows(CALLS).filter_map(row).collect()
}

/// Whether calls take the logits of one row to its token, if each reads what the one before left.
fn are_of_a_row([process, sample, commit]: [&CallDesc; CALLS]) -> bool {
    let ops = [process, sample, commit].map(|call| &call.op);
    let one = |tensor: Option<&TensorDesc>| tensor.and_then(|tensor| tensor.shape.first()) == Some(&1);
    matches!(ops, [Op::LogitProcess(_), Op::Sample(_), Op::CommitTokens(_)])
        && one(process.results.first())
        && one(commit.tensor(0))
}

/// Where calls follow each other that become one launch, as ranges.
pub(crate) fn find(calls: &[Work]) -> Vec<Range<usize>> {
    let starts = 0..(calls.len() + 1).saturating_sub(CALLS);
    starts.filter(|start| Row::of(&calls[*start..]).is_some()).map(|start| start..start + CALLS).collect()
}

/// The calls, and the last launch of each.
struct Row<'a> {
    process: &'a CallDesc,
    launches: [&'a Launch; CALLS],
}

impl<'a> Row<'a> {
    fn of(calls: &'a [Work]) -> Option<Self> {
        let [process, sample, commit, ..] = calls else { return None };
        if !are_of_a_row([process.call(), sample.call(), commit.call()]) {
            return None;
        }
        let last = |work: &'a Work| match work.steps().last()? {
            Step::Kernel(launch) => Some(launch),
            Step::Product(_) => None,
        };
        let launches = [last(process)?, last(sample)?, last(commit)?];
        let shape = |tensor: Option<&TensorDesc>| tensor.map(|tensor| tensor.shape.clone());
        // One request table, as long in every column, and one extent.
        let capacity = shape(process.call().tensor(2))?.first().copied();
        let tables = [(sample, 3), (sample, 4)]
            .map(|(work, index)| shape(work.call().tensor(index)).and_then(|shape| shape.first().copied()));
        let same_extent =
            launches.iter().all(|launch| launch.parameters.first() == launches[0].parameters.first());
        let [process_traffic, sample_traffic, commit_traffic] =
            [process, sample, commit].map(|work| &work.traffic);
        // Each reads what the one before left, for the same request.
        let flow = process_traffic.writes.first()? == sample_traffic.reads.first()?
            && process_traffic.reads.get(1)? == sample_traffic.reads.get(1)?
            && process_traffic.reads.get(2)? == sample_traffic.reads.get(3)?
            && sample_traffic.writes.first()? == commit_traffic.reads.get(1)?;
        let sound = flow && same_extent && tables == [capacity; 2];
        sound.then_some(Self { process: process.call(), launches })
    }
}

/// The launch that stands for the calls of a row.
#[derive(Debug)]
pub(crate) struct NextToken {
    pub(crate) step: Step,
    /// Where its blocks count themselves.
    _arrived: Arc<CudaBuffer>,
}

impl NextToken {
    /// Sets up the launch for calls that [`find`] found.
    pub(crate) fn new(calls: &[Work], context: &Arc<Context>) -> Result<Option<Self>> {
        let Some(Row { process, launches }) = Row::of(calls) else { return Ok(None) };
        let (Some(logits), Some(y)) = (process.tensor(0), process.results.first()) else { return Ok(None) };
        let columns = y.shape.get(1).copied().unwrap_or(0);
        if columns == 0 {
            return Ok(None);
        }
        let function = context.function(&next_token_kernel(logits.dtype, in_fours(columns, []))?)?;
        let arrived = Arc::new(CudaBuffer::new(context.clone(), size_of::<u32>(), MemoryKind::Device)?);
        let parameters =
            launches.iter().fold(Parameters::default(), |all, launch| all.then(&launch.parameters));
        let grid = [columns.div_ceil(CHUNK), 1, 1];
        let step = Step::kernel(&function, grid, THREADS, parameters.address(arrived.pointer));
        Ok(step.map(|step| Self { step, _arrived: arrived }))
    }
}
