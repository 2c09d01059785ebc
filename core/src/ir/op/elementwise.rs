//! Elementwise sums, casts, and slices of columns.

use super::{
    Axis,
    DimensionKind::Parallel,
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    index_map::ABSENT,
    linear::check_float,
    signature::{operand, optional, result},
};
use crate::{
    DType, Error, Result,
    tensor::{Size, TensorType},
};

const ROWS_AND_FEATURES: &[Axis] = &[Axis::Of(&[0]), Axis::Of(&[1])];

fn plane(rows: &Size, features: &Size) -> [(&'static str, super::DimensionKind, Size); 2] {
    [("rows", Parallel, rows.clone()), ("features", Parallel, features.clone())]
}

attributes! {
    /// Residual sum: `y = a + alpha * (b + bias) + c`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `a`, `b` | float `[T, H]`, of one type | |
    /// | `c` | as `a`, optional | a second residual (parallel attention and MLP) |
    /// | `bias` | float `[H]`, optional | |
    /// | → `y` | as `a` | |
    ///
    /// Computed in f32, rounded once.
    Add {
        /// The factor of `b + bias`.
        alpha: f32,
    }
}

impl Operation for Add {
    const SIGNATURE: &'static Signature = &Signature {
        name: "add",
        profile: Profile::LlmCore1,
        summary: "`y = a + alpha * (b + bias) + c`",
        operands: &[
            operand("a", OperandKind::Float),
            operand("b", OperandKind::Float),
            optional("c", OperandKind::Float),
            optional("bias", OperandKind::Float),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let a = operands.tensor("a")?;
        let [rows, features] = a.sizes()?;
        for other in [operands.optional("b"), operands.optional("c")].into_iter().flatten() {
            other.expect_dtype(a.dtype(), "element type of a")?;
            other.expect_shape([rows, features], "shape of a")?;
        }
        if let Some(bias) = operands.optional("bias") {
            bias.expect_shape([features], "features of a")?;
        }
        if !self.alpha.is_finite() {
            return Err(Error::invalid(format!("is {}, must be finite", self.alpha)).at("alpha"));
        }
        Ok(vec![a.tensor_type().clone()])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, features] = operands.tensor("a")?.sizes()?;
        let c = if operands.optional("c").is_some() { ROWS_AND_FEATURES } else { ABSENT };
        let bias = if operands.optional("bias").is_some() { &[Axis::Of(&[1])] } else { ABSENT };
        let operands = [ROWS_AND_FEATURES, ROWS_AND_FEATURES, c, bias];
        Ok(IndexMaps::new(plane(rows, features), &operands, &[ROWS_AND_FEATURES]))
    }
}

attributes! {
    /// Converts to another float type: `y = round(x)`, to nearest, ties to even.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, H]` | |
    /// | → `y` | `dtype` `[T, H]` | |
    ///
    /// Exact except for the rounding; a cast to the same type copies bits. Values beyond the range of f16 become infinite.
    Cast {
        /// The element type of the result; a float.
        dtype: DType,
    }
}

impl Operation for Cast {
    const SIGNATURE: &'static Signature = &Signature {
        name: "cast",
        profile: Profile::LlmCore1,
        summary: "`y = round(x)` to another float type",
        operands: &[operand("x", OperandKind::Float)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = operands.tensor("x")?;
        let [rows, features] = x.sizes()?;
        check_float(self.dtype)?;
        Ok(vec![TensorType { dtype: self.dtype, shape: vec![rows.clone(), features.clone()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, features] = operands.tensor("x")?.sizes()?;
        Ok(IndexMaps::new(plane(rows, features), &[ROWS_AND_FEATURES], &[ROWS_AND_FEATURES]))
    }
}

attributes! {
    /// Takes a slice of columns: `y[t, j] = x[t, start + j]` for `j < count`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, F]` | |
    /// | → `y` | as `x`, `[T, count]` | |
    ///
    /// Exact. It splits the result of one GEMM over the concatenated weights of several projections.
    Columns {
        /// The first column.
        start: u32,
        /// The number of columns; `start + count <= F`.
        count: u32,
    }
}

impl Operation for Columns {
    const SIGNATURE: &'static Signature = &Signature {
        name: "columns",
        profile: Profile::LlmCore1,
        summary: "`y = x[:, start .. start + count]`",
        operands: &[operand("x", OperandKind::Float)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = operands.tensor("x")?;
        let [rows, _] = x.sizes()?;
        let (features, start, count) = (x.known(1)?, self.start as usize, self.count as usize);
        let Some(available) = features.checked_sub(start) else {
            let message = format!("is {start}, must be at most {features} (features of x)");
            return Err(Error::invalid(message).at("start"));
        };
        if count > available {
            let message =
                format!("is {count}, must be at most {available} (features of x from column {start} on)");
            return Err(Error::invalid(message).at("count"));
        }
        Ok(vec![TensorType { dtype: x.dtype(), shape: vec![rows.clone(), count.into()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, _] = operands.tensor("x")?.sizes()?;
        let part = [Axis::Of(&[0]), Axis::From { dimension: 1, start: self.start as usize }];
        let columns = (self.count as usize).into();
        Ok(IndexMaps::new(plane(rows, &columns), &[&part], &[ROWS_AND_FEATURES]))
    }
}
