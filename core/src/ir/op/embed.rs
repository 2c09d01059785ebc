//! Lookups of rows by index: `embed` and `gather_rows`.

use super::{
    Axis,
    DimensionKind::Parallel,
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    index_map::ABSENT,
    signature::{operand, optional, result},
};
use crate::{
    DType, Error, Result,
    tensor::{Size, TensorType},
};

attributes! {
    /// Token embedding: `y[t] = table[ids[t] - first_row] (+ position_table[positions[t] + position_offset])`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `ids` | i32 `[T]` | token ids |
    /// | `table` | weight `[V, H]` | rows `first_row .. first_row + V` of the vocabulary |
    /// | `positions` | i32 `[T]`, optional | needed with `position_table` |
    /// | `position_table` | weight `[P, H]`, optional | learned positions |
    /// | → `y` | `dtype` `[T, H]` | |
    ///
    /// An id outside the table's rows, including -1, contributes zeros, so that the results of vocabulary shards add up to the
    /// whole. A position that is -1 or outside its table contributes zeros too. The sum is rounded once.
    Embed {
        /// The element type of the result; a float.
        dtype: DType,
        /// The row of the vocabulary that is row 0 of `table`.
        first_row: u32,
        /// The offset of every position (OPT counts positions from 2).
        position_offset: u32,
    }
}

impl Operation for Embed {
    const SIGNATURE: &'static Signature = &Signature {
        name: "embed",
        profile: Profile::LlmCore1,
        summary: "`y[t] = table[ids[t]] (+ position_table[positions[t]])`; ids out of range give zeros",
        operands: &[
            operand("ids", OperandKind::I32),
            operand("table", OperandKind::Weight),
            optional("positions", OperandKind::I32),
            optional("position_table", OperandKind::Weight),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let [tokens] = operands.tensor("ids")?.sizes()?;
        let (_, hidden) = operands.weight("table")?;
        if !self.dtype.is_float() {
            return Err(Error::invalid(format!("is {}, must be a float type", self.dtype)).at("dtype"));
        }
        match (operands.optional("positions"), operands.optional_weight("position_table")?) {
            (None, None) => {}
            (Some(positions), Some((_, columns))) => {
                positions.expect_shape([tokens], "one per id")?;
                if columns != hidden {
                    let message = format!("is {columns}, must be {hidden} (columns of table)");
                    return Err(Error::invalid(message).at("position_table").field("shape[1]"));
                }
            }
            (None, Some(_)) => return Err(Error::invalid("is needed with position_table").at("positions")),
            (Some(_), None) => return Err(Error::invalid("is needed with positions").at("position_table")),
        }
        Ok(vec![TensorType { dtype: self.dtype, shape: vec![tokens.clone(), hidden.into()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [tokens] = operands.tensor("ids")?.sizes()?;
        let (_, hidden) = operands.weight("table")?;
        let positions: [&[Axis]; 2] = match operands.optional("positions") {
            Some(_) => [&[Axis::Of(&[0])], &[Axis::Gathered, Axis::Of(&[1])]],
            None => [ABSENT, ABSENT],
        };
        Ok(IndexMaps::new(
            [("rows", Parallel, tokens.clone()), ("features", Parallel, hidden.into())],
            &[&[Axis::Of(&[0])], &[Axis::Gathered, Axis::Of(&[1])], positions[0], positions[1]],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}

attributes! {
    /// Gathers rows: `y[r] = x[rows[r]]`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, H]` | |
    /// | `rows` | i32 `[R]` | indices into `x`; -1 skips |
    /// | → `y` | as `x`, `[R, H]` | |
    ///
    /// Exact. A row whose index is -1 is not written. An index outside `x` or its extent is treated as -1.
    GatherRows {}
}

impl Operation for GatherRows {
    const SIGNATURE: &'static Signature = &Signature {
        name: "gather_rows",
        profile: Profile::LlmCore1,
        summary: "`y[r] = x[rows[r]]`; -1 skips the row",
        operands: &[operand("x", OperandKind::Float), operand("rows", OperandKind::I32)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = operands.tensor("x")?;
        let [_, features] = x.sizes()?;
        let [rows] = operands.tensor("rows")?.sizes()?;
        Ok(vec![TensorType { dtype: x.dtype(), shape: vec![rows.clone(), features.clone()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [_, features] = operands.tensor("x")?.sizes()?;
        let [rows] = operands.tensor("rows")?.sizes::<1>()?;
        let rows: Size = rows.clone();
        Ok(IndexMaps::new(
            [("rows", Parallel, rows), ("features", Parallel, features.clone())],
            &[&[Axis::Gathered, Axis::Of(&[1])], &[Axis::Of(&[0])]],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}
