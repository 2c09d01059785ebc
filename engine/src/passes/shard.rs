//! Tensor parallelism: splits a program into one program per rank, with collectives where ranks need each other's results.
//!
//! The split is computed from the graph, without rules per model. The index maps of the ops say how each call can be split
//! (`iteration`). Dimensions that correspond to each other are split the same way (`splits`). An exact search (`search`) over all
//! combinations of `choices` finds the one with the least cost ([`MeshCosts`]) that fits into the memory of a rank. For Llama and
//! GPT-2 this is the split of Megatron-LM: query, key, value, gate and up projections by outputs, output and down projections by
//! inputs, two all-reduces in each layer, embedding and logits by rows of the vocabulary.
//!
//! MoE layers are split within each expert (expert slicing) or by experts (expert parallelism), whichever costs less: a rank
//! holds a part of every expert, or all of some experts. Either way the weighted sum over slots ends in a sum over ranks.
//!
//! Weights stay expressions over the file, now of slices, so a rank reads only its own. The user can restrict the search by
//! pinning weights ([`ShardPolicy`]), up to a fully manual strategy.
//!
//! Sources: Shoeybi et al., "Megatron-LM" (2019); Wang et al., "Supporting Very Large Models using Automatic Dataflow Graph
//! Partitioning" (2019).

mod choices;
mod costs;
mod experts;
mod iteration;
mod policy;
mod rank_program;
mod search;
mod splits;

use choices::Mesh;
pub use costs::MeshCosts;
use dsrun_core::{Error, Result, program::Program};
pub use policy::{Pin, ShardPolicy};
use rank_program::rank_program;
use search::Search;
use splits::Splits;

/// The programs of the ranks, and what the strategy costs.
#[derive(Clone, Debug)]
pub struct Sharded {
    /// The program of each rank.
    pub programs: Vec<Program>,
    /// The predicted cost of a step in microseconds, including the price of memory ([`MeshCosts::memory_price`]).
    pub cost_us: f64,
    /// Bytes of weights and states on the fullest rank.
    pub memory: u64,
}

/// Shards a program over `ranks` ranks.
///
/// `sizes` resolves the sizes of states, and `limit` bounds the bytes of weights and states of a rank. The program consists of
/// primitives: this pass runs before fusion.
///
/// # Errors
/// If a pin matches no weight or is not possible, or no strategy fits into the memory of a rank.
pub fn shard(
    program: &Program,
    ranks: usize,
    policy: &ShardPolicy,
    costs: &MeshCosts,
    sizes: &dyn Fn(&str) -> Option<usize>,
    limit: Option<u64>,
) -> Result<Sharded> {
    let in_pass = |error: Error| error.in_op("shard");
    if ranks == 0 {
        return Err(in_pass(Error::invalid("is 0, must be at least 1").at("ranks")));
    }
    if ranks == 1 {
        return Ok(Sharded { programs: vec![program.clone()], cost_us: 0.0, memory: 0 });
    }
    let costs = policy.costs.as_ref().unwrap_or(costs);
    costs.check().map_err(in_pass)?;
    let pins = policy.resolve(program).map_err(in_pass)?;
    let splits = Splits::new(program, ranks).map_err(in_pass)?;
    let search = Search::new(Mesh { program, splits: &splits, costs }, sizes, limit);
    let admits = |id, form| pins.get(&id).is_none_or(|pin: &Pin| pin.admits(form));
    let strategy = search.best(&admits).map_err(in_pass)?;
    let program = |rank| rank_program(&search, &strategy.choices, rank);
    let programs = (0..ranks).map(program).collect::<Result<_>>().map_err(in_pass)?;
    Ok(Sharded { programs, cost_us: strategy.cost as f64 / 1e6, memory: strategy.memory })
}
