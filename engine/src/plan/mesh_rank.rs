//! The mesh of devices that a model is split over, and the position of a rank in it.

use crate::passes::partition::stage_of_rank;
use dsrun_core::{
    Error,
    collective::Comm,
    op::{MeshAxis, OperandType},
    program::Program,
};
use std::sync::Arc;

/// The number of ranks along each axis of the mesh that a model is split over.
///
/// The ranks of a stage have consecutive numbers, so that they are close in the topology: tensor parallelism exchanges the most
/// data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MeshShape {
    /// Ranks that divide every layer of a stage.
    pub(crate) tensor: usize,
    /// Stages.
    pub(crate) pipeline: usize,
}

impl MeshShape {
    /// The number of ranks.
    pub(crate) fn ranks(self) -> usize {
        self.tensor * self.pipeline
    }

    /// The axes along which there are several ranks.
    pub(crate) fn axes(self) -> impl Iterator<Item = MeshAxis> {
        let sizes = [(MeshAxis::Tensor, self.tensor), (MeshAxis::Pipeline, self.pipeline)];
        sizes.into_iter().filter(|(_, size)| *size > 1).map(|(axis, _)| axis)
    }

    /// The stage of a rank.
    pub(crate) fn stage(self, rank: usize) -> usize {
        stage_of_rank(rank / self.tensor, self.pipeline)
    }

    /// The index of a rank within its stage.
    pub(crate) fn shard(self, rank: usize) -> usize {
        rank % self.tensor
    }

    /// The ranks that exchange data with a rank along an axis, itself included, in the order of their group.
    pub(crate) fn group(self, axis: MeshAxis, rank: usize) -> Vec<usize> {
        match axis {
            MeshAxis::Tensor => {
                let first = rank - self.shard(rank);
                (first..first + self.tensor).collect()
            }
            MeshAxis::Pipeline => (self.shard(rank)..self.ranks()).step_by(self.tensor).collect(),
            MeshAxis::Data | MeshAxis::Expert => vec![rank],
        }
    }
}

/// A rank of the mesh: its number, and the group that its collectives run over along each axis.
#[derive(Clone, Debug)]
pub(crate) struct MeshRank {
    rank: usize,
    shape: MeshShape,
    comms: [Option<Arc<dyn Comm>>; MeshAxis::ALL.len()],
    /// Whether the programs of the ranks of its stage are alike; false if they were not compared.
    alike: bool,
}

impl MeshRank {
    /// A rank that has joined no group yet.
    pub(super) fn new(rank: usize, shape: MeshShape) -> Self {
        Self { rank, shape, comms: [const { None }; MeshAxis::ALL.len()], alike: false }
    }

    /// Notes whether the programs of the ranks of its stage are [alike](are_alike).
    pub(super) fn compare(&mut self, programs: &[Program]) {
        let group = self.shape.group(MeshAxis::Tensor, self.rank);
        self.alike = are_alike(group.iter().filter_map(|rank| programs.get(*rank)));
    }

    /// Whether the ranks of a group all have a kernel for a call if this rank has: so a call with collectives may be a single launch.
    pub(crate) fn decides_for_all(&self, axis: MeshAxis) -> bool {
        axis == MeshAxis::Tensor && self.alike
    }

    /// Adds the membership in the group of an axis.
    pub(super) fn add(&mut self, axis: MeshAxis, comm: Arc<dyn Comm>) {
        self.comms[axis as usize] = Some(comm);
    }

    /// The number of the rank.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks of the mesh.
    pub(crate) fn ranks(&self) -> usize {
        self.shape.ranks()
    }

    /// The number of stages of the pipeline.
    pub(crate) fn stages(&self) -> usize {
        self.shape.pipeline
    }

    /// The stage of the rank.
    pub(crate) fn stage(&self) -> usize {
        self.shape.stage(self.rank)
    }

    /// The group of an axis, if there are several ranks along it.
    pub(crate) fn comm(&self, axis: MeshAxis) -> Option<&Arc<dyn Comm>> {
        self.comms[axis as usize].as_ref()
    }

    /// Reports whether a group of the rank has failed.
    ///
    /// # Errors
    /// The error of the group. Its members are numbered within the group, so the message adds their ranks in the mesh.
    pub(crate) fn status(&self) -> Result<(), Error> {
        MeshAxis::ALL.iter().try_for_each(|axis| {
            let Some(comm) = self.comm(*axis) else { return Ok(()) };
            let group = self.shape.group(*axis, self.rank);
            comm.status().map_err(|error| match group.iter().copied().eq(0..group.len()) {
                true => error,
                false => {
                    let message = error.message();
                    let ranks: Vec<String> = group.iter().map(usize::to_string).collect();
                    let (axis, ranks) = (axis.name(), ranks.join(", "));
                    Error::new(error.code(), format!("{message} (in the {axis} group of the ranks {ranks})"))
                }
            })
        })
    }

    /// Aborts all groups of the rank: every wait of it and of the other members fails at once with this reason.
    pub(crate) fn abort(&self, reason: &str) {
        self.comms.iter().flatten().for_each(|comm| comm.abort(reason));
    }
}

/// Whether the programs of ranks compute values of the same types from the same operands, call by call. Then devices of one kind run
/// the same calls of them in one launch, and what launches exchange with each other fits. Weights may differ in shape: ranks need not
/// have equal parts.
fn are_alike<'a>(mut programs: impl Iterator<Item = &'a Program>) -> bool {
    fn types(program: &Program) -> impl Iterator<Item = Option<&OperandType>> {
        let results = program.nodes.iter().flat_map(|node| &node.call.results);
        results.map(|id| program.values.get(id.index()).map(|value| &value.value_type))
    }
    // A rank may lack an operand that another one has: one of them adds the bias of a sum.
    fn present(program: &Program) -> impl Iterator<Item = (&str, Vec<bool>)> {
        program
            .nodes
            .iter()
            .map(|node| (node.call.op.name(), node.call.operands.iter().map(Option::is_some).collect()))
    }
    let Some(first) = programs.next() else { return true };
    programs.all(|other| present(first).eq(present(other)) && types(first).eq(types(other)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::{
        DType, TensorType, WeightExpr, WeightFormat, WeightType, op::Linear, program::ProgramBuilder,
    };

    /// A program of one linear layer, with or without a bias.
    fn linear(outputs: usize, bias: bool) -> Program {
        let mut program = ProgramBuilder::new("linear");
        let x = program.input("x", TensorType::new(DType::F32, [4, 8])).unwrap();
        let weight = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![outputs, 8] };
        let weight = program.weight("weight", WeightExpr::Tensor("weight".into()), weight).unwrap();
        let of_bias = TensorType::new(DType::F32, [outputs]);
        let bias = bias.then(|| program.vector("bias", WeightExpr::Tensor("bias".into()), of_bias).unwrap());
        let y = program.call(Linear { dtype: DType::F32 }, [Some(x), Some(weight), bias]).unwrap();
        program.finish(&[y]).unwrap()
    }

    #[test]
    fn ranks_without_a_bias_or_of_other_sizes_are_not_alike() {
        let alike = |a: &Program, b: &Program| are_alike([a, b].into_iter());
        assert!(alike(&linear(3, true), &linear(3, true)));
        assert!(!alike(&linear(3, true), &linear(3, false)));
        assert!(!alike(&linear(3, true), &linear(2, true)));
    }

    #[test]
    fn ranks_of_a_stage_are_neighbours_and_rank_0_has_the_last_stage() {
        let shape = MeshShape { tensor: 2, pipeline: 3 };
        assert_eq!((0..6).map(|rank| shape.stage(rank)).collect::<Vec<_>>(), [2, 2, 0, 0, 1, 1]);
        assert_eq!(shape.group(MeshAxis::Tensor, 3), [2, 3]);
        assert_eq!(shape.group(MeshAxis::Pipeline, 3), [1, 3, 5]);
        assert_eq!(shape.axes().count(), 2);
        assert_eq!(MeshShape { tensor: 1, pipeline: 3 }.group(MeshAxis::Pipeline, 2), [0, 1, 2]);
    }
}
