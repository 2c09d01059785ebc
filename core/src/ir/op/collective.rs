//! Collectives: ops over all ranks along one axis of the mesh.
//!
//! Every rank of the axis must enqueue the same collectives in the same order, with the same shapes and element types.
//! As in NCCL, a collective may run in place; a result that updates its operand always does.

use super::{
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    attributes::choice,
    cache::product,
    signature::{operand, result, updated},
};
use crate::{Error, Result, tensor::TensorType};

choice! {
    /// An axis of the device mesh.
    MeshAxis {
        /// Data parallelism: replicas with different batches.
        Data = 0 "data",
        /// Pipeline parallelism: ranks with different layers.
        Pipeline = 1 "pipeline",
        /// Tensor parallelism: ranks with slices of every layer.
        Tensor = 2 "tensor",
        /// Expert parallelism: ranks with different experts.
        Expert = 3 "expert",
    }
}

choice! {
    /// The operation that combines the elements of all ranks.
    Reduction {
        /// The sum.
        Sum = 1 "sum",
        /// The maximum.
        Max = 2 "max",
        /// The minimum.
        Min = 3 "min",
        /// The mean; for floats only.
        Mean = 4 "mean",
    }
}

fn plane(operands: &Operands<'_>) -> Result<TensorType> {
    let x = operands.tensor("x")?;
    x.sizes::<2>()?;
    Ok(x.tensor_type().clone())
}

fn check_reduction(reduction: Reduction, x: &TensorType) -> Result<()> {
    if reduction == Reduction::Mean && !x.dtype.is_float() {
        return Err(
            Error::invalid(format!("is mean, which {} elements do not support", x.dtype)).at("reduction")
        );
    }
    Ok(())
}

fn check_ranks(ranks: u32) -> Result<usize> {
    if ranks == 0 {
        return Err(Error::invalid("is 0, must be at least 1").at("ranks"));
    }
    Ok(ranks as usize)
}

attributes! {
    /// Reduces `x` over all ranks; every rank gets the result.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | any `[T, H]` | updated |
    /// | → `y` | `x` | |
    ///
    /// The order of the reduction may differ between backends, and intermediate results are rounded to the element type or
    /// better. Every rank gets the same bits.
    AllReduce {
        /// The axis whose ranks take part.
        axis: MeshAxis,
        /// The operation that combines elements.
        reduction: Reduction,
    }
}

impl Operation for AllReduce {
    const SIGNATURE: &'static Signature = &Signature {
        name: "all_reduce",
        profile: Profile::LlmDist1,
        summary: "reduces `x` over the ranks of a mesh axis; every rank gets the result",
        operands: &[operand("x", OperandKind::Any)],
        results: &[updated("y", 0)],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = plane(operands)?;
        check_reduction(self.reduction, &x)?;
        Ok(vec![x])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([2], &[2]))
    }
}

attributes! {
    /// Concatenates `x` of all ranks, in the order of ranks; every rank gets the result.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | any `[T, H]` | |
    /// | → `y` | as `x`, `[T, ranks * H]`; or `[ranks * T, H]` along the rows | |
    ///
    /// Exact. Along the rows, `T` must be known when the program is built.
    AllGather {
        /// The axis whose ranks take part.
        axis: MeshAxis,
        /// The number of ranks.
        ranks: u32,
        /// Whether to concatenate along the rows instead of the features.
        rows: bool,
    }
}

impl Operation for AllGather {
    const SIGNATURE: &'static Signature = &Signature {
        name: "all_gather",
        profile: Profile::LlmDist1,
        summary: "concatenates `x` of all ranks, along features or rows",
        operands: &[operand("x", OperandKind::Any)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (ranks, mut y) = (check_ranks(self.ranks)?, plane(operands)?);
        let dimension = usize::from(!self.rows);
        y.shape[dimension] = product("x", [operands.tensor("x")?.known(dimension)?, ranks])?.into();
        Ok(vec![y])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([2], &[2]))
    }
}

attributes! {
    /// Reduces `x` over all ranks; rank `i` gets features `i * H / ranks ..` of the result, or rows.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | any `[T, H]` | |
    /// | → `y` | as `x`, `[T, H / ranks]`; or `[T / ranks, H]` along the rows | |
    ///
    /// Rounding is that of [`AllReduce`]. The scattered dimension must be a known multiple of `ranks`.
    ReduceScatter {
        /// The axis whose ranks take part.
        axis: MeshAxis,
        /// The number of ranks.
        ranks: u32,
        /// Whether to scatter the rows instead of the features.
        rows: bool,
        /// The operation that combines elements.
        reduction: Reduction,
    }
}

impl Operation for ReduceScatter {
    const SIGNATURE: &'static Signature = &Signature {
        name: "reduce_scatter",
        profile: Profile::LlmDist1,
        summary: "reduces `x` over the ranks; each keeps its share of features or rows",
        operands: &[operand("x", OperandKind::Any)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (ranks, mut y) = (check_ranks(self.ranks)?, plane(operands)?);
        check_reduction(self.reduction, &y)?;
        let dimension = usize::from(!self.rows);
        let size = operands.tensor("x")?.known(dimension)?;
        if !size.is_multiple_of(ranks) {
            let message = format!("is {size}, must be a multiple of {ranks} (ranks)");
            return Err(Error::invalid(message).at("x").field(format!("shape[{dimension}]")));
        }
        y.shape[dimension] = (size / ranks).into();
        Ok(vec![y])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([2], &[2]))
    }
}

attributes! {
    /// Exchanges blocks of rows: block `j` of rank `i`'s `x` becomes block `i` of rank `j`'s `y`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | any `[T, H]` | `T` a known multiple of `ranks` |
    /// | → `y` | as `x` | |
    ///
    /// Exact.
    AllToAll {
        /// The axis whose ranks take part.
        axis: MeshAxis,
        /// The number of ranks.
        ranks: u32,
    }
}

impl Operation for AllToAll {
    const SIGNATURE: &'static Signature = &Signature {
        name: "all_to_all",
        profile: Profile::LlmDist1,
        summary: "block `j` of rank `i`'s `x` becomes block `i` of rank `j`'s `y`",
        operands: &[operand("x", OperandKind::Any)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (ranks, y) = (check_ranks(self.ranks)?, plane(operands)?);
        let rows = operands.tensor("x")?.known(0)?;
        if !rows.is_multiple_of(ranks) {
            let message = format!("is {rows}, must be a multiple of {ranks} (ranks)");
            return Err(Error::invalid(message).at("x").field("shape[0]"));
        }
        Ok(vec![y])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([2], &[2]))
    }
}

attributes! {
    /// Gives every rank the `x` of rank `root`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | any `[T, H]` | updated |
    /// | → `y` | `x` | |
    ///
    /// Exact.
    Broadcast {
        /// The axis whose ranks take part.
        axis: MeshAxis,
        /// The rank that sends its tensor.
        root: u32,
    }
}

impl Operation for Broadcast {
    const SIGNATURE: &'static Signature = &Signature {
        name: "broadcast",
        profile: Profile::LlmDist1,
        summary: "gives every rank the `x` of one rank",
        operands: &[operand("x", OperandKind::Any)],
        results: &[updated("y", 0)],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        Ok(vec![plane(operands)?])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([2], &[2]))
    }
}

attributes! {
    /// Sends `x` to rank `peer`, which must receive it.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | any `[T, H]` | |
    ///
    /// It has no result.
    Send {
        /// The axis whose ranks take part.
        axis: MeshAxis,
        /// The rank that receives.
        peer: u32,
    }
}

impl Operation for Send {
    const SIGNATURE: &'static Signature = &Signature {
        name: "send",
        profile: Profile::LlmDist1,
        summary: "sends `x` to another rank",
        operands: &[operand("x", OperandKind::Any)],
        results: &[],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        plane(operands).map(|_| Vec::new())
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([2], &[]))
    }
}

attributes! {
    /// Receives into `x` what rank `peer` sends.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | any `[T, H]` | updated |
    /// | → `y` | `x` | |
    ///
    /// Exact.
    Receive {
        /// The axis whose ranks take part.
        axis: MeshAxis,
        /// The rank that sends.
        peer: u32,
    }
}

impl Operation for Receive {
    const SIGNATURE: &'static Signature = &Signature {
        name: "receive",
        profile: Profile::LlmDist1,
        summary: "receives into `x` what another rank sends",
        operands: &[operand("x", OperandKind::Any)],
        results: &[updated("y", 0)],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        Ok(vec![plane(operands)?])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([2], &[2]))
    }
}

attributes! {
    /// Waits until every rank of the axis has reached the barrier. It has no operands and no results.
    Barrier {
        /// The axis whose ranks take part.
        axis: MeshAxis,
    }
}

impl Operation for Barrier {
    const SIGNATURE: &'static Signature = &Signature {
        name: "barrier",
        profile: Profile::LlmDist1,
        summary: "waits until every rank has reached the barrier",
        operands: &[],
        results: &[],
    };

    fn infer(&self, _: &Operands<'_>) -> Result<Vec<TensorType>> {
        Ok(Vec::new())
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([], &[]))
    }
}
