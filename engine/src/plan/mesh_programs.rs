//! The programs of the ranks of a mesh.

use super::mesh_rank::MeshShape;
use crate::{
    error::Result,
    options::EngineOptions,
    passes::{
        partition::partition,
        shard::{MeshCosts, shard},
    },
};
use dsrun_core::program::Program;

/// The program of every rank: that of its stage, sharded over the ranks of the stage. `sizes` resolves the sizes of states, and
/// `free` bounds the bytes of weights and states of a rank.
///
/// # Errors
/// As the passes `partition` and `shard`.
pub(crate) fn mesh_programs(
    program: &Program,
    shape: MeshShape,
    options: &EngineOptions,
    costs: &MeshCosts,
    sizes: &dyn Fn(&str) -> Option<usize>,
    free: Option<u64>,
) -> Result<Vec<Program>> {
    let policy = &options.shard;
    let costs = policy.costs.as_ref().unwrap_or(costs);
    let stages = match shape.pipeline {
        1 => vec![program.clone()],
        _ => {
            // Within a stage, most weights are divided evenly over the ranks.
            let limit = free.map(|free| free.saturating_mul(shape.tensor as u64));
            let stages = partition(program, &options.pipeline, costs, sizes, limit)?;
            for (stage, own) in stages.iter().enumerate() {
                let (bytes, microseconds) = (own.memory, own.time_us);
                tracing::info!(stage, bytes, microseconds, "divided the model");
            }
            stages.into_iter().map(|stage| stage.program).collect()
        }
    };
    let mut programs = vec![Program::default(); shape.ranks()];
    for (stage, own) in stages.iter().enumerate() {
        let policy = policy.for_part(program, own)?;
        let sharded = shard(own, shape.tensor, &policy, costs, sizes, free)?;
        let (bytes, microseconds) = (sharded.memory, sharded.cost_us);
        tracing::info!(stage, ranks = shape.tensor, bytes, ?free, microseconds, "split the model");
        let ranks = (0..shape.ranks()).filter(|rank| shape.stage(*rank) == stage);
        for (rank, program) in ranks.zip(sharded.programs) {
            programs[rank] = program;
        }
    }
    Ok(programs)
}
