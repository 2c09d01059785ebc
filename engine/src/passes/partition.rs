//! Pipeline parallelism: divides a program into one program per stage. Each stage sends the values that the next one needs.
//!
//! Stages are computed from the graph, without rules per model. `cuts` finds where a program can be cut: at the points where the
//! fewest bytes cross, which is the residual stream alone in every model family. Of all divisions at these points, `balance`
//! takes the one whose slowest stage takes the least time ([`MeshCosts`]) and whose stages fit into memory. This is PipeDream's
//! dynamic programming, reduced to inference: no backward pass, so a transfer counts once, and no weights to synchronise.
//!
//! Calls that depend on no weight, such as the one that derives positions and slots from the request table, are replicated on
//! every stage that needs their results, so these are not sent. Every stage holds the states of such calls and updates them
//! identically.
//!
//! Sampled tokens are not sent back from the last stage by a collective: the engine reads them anyway, and uploads each with the
//! inputs of its request's next step. So a stage never waits for a later one, and several steps can be in flight. The pass
//! refuses programs in which any other value would have to flow back.
//!
//! The last stage runs on rank 0 of the pipeline axis, the first on rank 1, and so on ([`stage_of_rank`]), so that the process
//! of rank 0, which schedules, reads sampled tokens from its own device.
//!
//! `partition` runs before [`shard`](mod@super::shard): each stage's program is then sharded over the ranks of that stage, and
//! each rank exchanges activations with the rank of the same index in the neighbouring stages.
//!
//! Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019), section 3.1.

mod balance;
mod cuts;
mod stage_program;

use super::shard::MeshCosts;
use balance::{Piece, balance};
use cuts::Cuts;
use dsrun_core::{
    Code, Error, Result,
    op::OperandType,
    program::{Origin, Program},
};
use stage_program::stage_program;
use std::collections::HashSet;

/// The most micro-batches that can be asked for.
const MOST_MICRO_BATCHES: usize = 1024;

/// How a program is divided into stages.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct PipelineOptions {
    /// The number of stages; with 0 or 1 the program is not divided.
    pub stages: usize,
    /// The first layer of each stage but the first; empty to balance the stages by their costs.
    pub first_layers: Vec<usize>,
    /// The fixed number of micro-batches that both prompts and generating requests are divided into. By default prompts are divided
    /// into many, to keep the pipeline bubble small, and generating requests into one for each stage, because every further one
    /// reads all weights again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<usize>,
}

impl PipelineOptions {
    /// The number of stages, at least one.
    pub fn count(&self) -> usize {
        self.stages.max(1)
    }

    /// Checks that the first layers increase and that there is one for each stage but the first, and that there are stages for
    /// micro-batches.
    ///
    /// # Errors
    /// Names the field at fault.
    pub fn check(&self) -> Result<()> {
        let layers = &self.first_layers;
        if !layers.is_empty() && layers.len() + 1 != self.count() {
            let message = match (layers.len(), self.count()) {
                (_, 1) => "names first layers, but there is one stage; give --pp, too".to_owned(),
                (given, stages) => {
                    format!("names {given} first layers, but {stages} stages have {}", stages - 1)
                }
            };
            return Err(Error::invalid(message).at("stages"));
        }
        if layers.first() == Some(&0) || layers.windows(2).any(|pair| pair[0] >= pair[1]) {
            let message = format!("is {layers:?}, but first layers must be above 0 and increase");
            return Err(Error::invalid(message).at("stages"));
        }
        if let Some(count) = self.micro_batches {
            if self.count() == 1 {
                let message = format!("is {count}, but only several stages work on micro-batches");
                return Err(Error::invalid(message).at("micro-batches"));
            }
            if !(1..=MOST_MICRO_BATCHES).contains(&count) {
                let message = format!("is {count}, must be from 1 to {MOST_MICRO_BATCHES}");
                return Err(Error::invalid(message).at("micro-batches"));
            }
        }
        Ok(())
    }
}

/// The stage that a rank of the pipeline axis runs: the last on rank 0.
pub fn stage_of_rank(rank: usize, stages: usize) -> usize {
    (rank + stages - 1) % stages
}

/// The rank of the pipeline axis that runs a stage.
fn rank_of_stage(stage: usize, stages: usize) -> usize {
    (stage + 1) % stages
}

/// A stage of a pipeline.
#[derive(Clone, Debug)]
pub struct Stage {
    /// The program of the stage.
    pub program: Program,
    /// The predicted time of a step of the stage in microseconds, without its transfers.
    pub time_us: f64,
    /// The predicted time in microseconds to send a step's activations to the next stage; 0 for the last stage.
    pub send_us: f64,
    /// Bytes of activations that a step sends to the next stage.
    pub send_bytes: u64,
    /// Bytes of weights and states.
    pub memory: u64,
}

/// Divides a program into stages.
///
/// `sizes` resolves the sizes of states, and `limit` bounds the bytes of weights and states of a stage. The program consists of
/// primitives: this pass runs before fusion.
///
/// # Errors
/// If the program cannot be divided into that many stages or at those layers, or no division fits into the memory of a stage.
pub fn partition(
    program: &Program,
    options: &PipelineOptions,
    costs: &MeshCosts,
    sizes: &dyn Fn(&str) -> Option<usize>,
    limit: Option<u64>,
) -> Result<Vec<Stage>> {
    divide(program, options, costs, sizes, limit).map_err(|error| error.in_op("partition"))
}

fn divide(
    program: &Program,
    options: &PipelineOptions,
    costs: &MeshCosts,
    sizes: &dyn Fn(&str) -> Option<usize>,
    limit: Option<u64>,
) -> Result<Vec<Stage>> {
    options.check()?;
    costs.check()?;
    let stages = options.count();
    let cuts = Cuts::new(program, costs)?;
    let pieces = pieces(&cuts, costs, sizes)?;
    if stages > pieces.len() {
        let most = pieces.len();
        let message = format!("is {stages}, but the program can be divided into at most {most} stages");
        return Err(Error::invalid(message).at("stages"));
    }
    let transfers: Vec<u64> =
        cuts.candidates().iter().map(|cut| costs.send(cuts.crossing_bytes(*cut, costs))).collect();
    let starts = match options.first_layers.is_empty() {
        true => balance(&pieces, &transfers, stages, limit).ok_or_else(|| {
            let (weights, limit) = (pieces.iter().map(|piece| piece.memory).sum::<u64>(), limit.unwrap_or(0));
            let message = format!(
                "{stages} stages with {limit} free bytes each do not hold the {weights} bytes of weights and KV cache; use \
                 more stages, a smaller context or smaller weights; `dsrun plan` shows what more devices need"
            );
            Error::new(Code::OutOfMemory, message)
        })?,
        false => options.first_layers.iter().map(|layer| cuts.piece_of_layer(*layer)).collect::<Result<_>>()?,
    };
    let ends = starts.iter().copied().chain([pieces.len()]);
    let begins = [0].into_iter().chain(starts.iter().copied());
    let ranges: Vec<_> = begins.zip(ends).map(|(begin, end)| begin..end).collect();
    let cut_before = |piece: usize| piece.checked_sub(1).map(|cut| cuts.candidates()[cut]);
    let stage = |(stage, range): (usize, &std::ops::Range<usize>)| {
        let own = &pieces[range.clone()];
        let next = (range.end < pieces.len()).then_some(range.end).and_then(cut_before);
        let program = stage_program(&cuts, [cut_before(range.start), next], stage, stages)?;
        let send_bytes = next.map_or(0.0, |cut| cuts.crossing_bytes(cut, costs));
        Ok(Stage {
            program,
            time_us: own.iter().map(|piece| piece.time).sum::<u64>() as f64 / 1e6,
            send_us: next.map_or(0, |_| costs.send(send_bytes)) as f64 / 1e6,
            send_bytes: send_bytes as u64,
            memory: own.iter().map(|piece| piece.memory).sum(),
        })
    };
    ranges.iter().enumerate().map(stage).collect()
}

/// The time and memory of the calls between neighbouring cuts. Later segments belong to the last piece.
fn pieces(cuts: &Cuts<'_>, costs: &MeshCosts, sizes: &dyn Fn(&str) -> Option<usize>) -> Result<Vec<Piece>> {
    let program = cuts.program();
    let mut pieces = vec![Piece::default(); cuts.candidates().len() + 1];
    let mut held = HashSet::new();
    for index in 0..program.nodes.len() {
        let Some(piece) = cuts.piece_of_call(index) else { continue };
        let call = &program.nodes[index].call;
        let operands = program.operand_types(&call.operands)?;
        let results = call.results.iter().filter_map(|id| program.values[id.index()].tensor_type());
        let results: Vec<_> = results.cloned().collect();
        pieces[piece].time += costs.call(&call.op, &call.op, &operands, &results);
        for id in call.operands.iter().flatten() {
            let value = program.value(*id)?;
            if matches!(value.origin, Origin::Weight(_) | Origin::State) && held.insert((*id, piece)) {
                pieces[piece].memory += resident_bytes(&value.value_type, sizes)?;
            }
        }
    }
    Ok(pieces)
}

/// The bytes of a weight or a state.
fn resident_bytes(value_type: &OperandType, sizes: &dyn Fn(&str) -> Option<usize>) -> Result<u64> {
    Ok(match value_type {
        OperandType::Weight(weight) => weight.bytes()? as u64,
        OperandType::Tensor(tensor) => {
            let shape = tensor.resolve(sizes)?;
            shape.iter().fold(tensor.dtype.bytes(), |bytes, size| bytes.saturating_mul(*size)) as u64
        }
    })
}
