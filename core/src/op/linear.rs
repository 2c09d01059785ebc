//! Matrix products: `linear` over packed weights and `matmul` over two tensors.

use super::{
    Axis,
    DimensionKind::{Parallel, Reduced},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    index_map::ABSENT,
    signature::{operand, optional, result},
};
use crate::{
    DType, Error, Result,
    tensor::{Size, TensorType},
};

attributes! {
    /// Linear layer: `y[m, n] = sum_k x[m, k] * weight[n, k] (+ bias[n])`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[M, K]` | |
    /// | `weight` | weight `[N, K]` | any format; quantised elements are what their format's formula says |
    /// | `bias` | float `[N]`, optional | |
    /// | → `y` | `dtype` `[M, N]` | |
    ///
    /// Products are accumulated in f32 or better; the sum with the bias is rounded once. A backend may round dequantised
    /// weights to the element type of `x`, but may not quantise `x`: that is an op of its own.
    Linear {
        /// Element type of the result; a float.
        dtype: DType,
    }
}

impl Operation for Linear {
    const SIGNATURE: &'static Signature = &Signature {
        name: "linear",
        profile: Profile::LlmCore1,
        summary: "`y[m, n] = sum_k x[m, k] * weight[n, k] (+ bias[n])`",
        operands: &[
            operand("x", OperandKind::Float),
            operand("weight", OperandKind::Weight),
            optional("bias", OperandKind::Float),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = operands.tensor("x")?;
        let [rows, _] = x.sizes()?;
        let (outputs, inputs) = operands.weight("weight")?;
        x.expect(1, &inputs.into(), "columns of weight")?;
        if let Some(bias) = operands.optional("bias") {
            bias.expect_shape([&outputs.into()], "rows of weight")?;
        }
        check_float(self.dtype)?;
        Ok(vec![TensorType { dtype: self.dtype, shape: vec![rows.clone(), outputs.into()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, _] = operands.tensor("x")?.sizes()?;
        let (outputs, inputs) = operands.weight("weight")?;
        let bias = if operands.optional("bias").is_some() { &[Axis::Of(&[1])] } else { ABSENT };
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("outputs", Parallel, outputs.into()),
                ("inputs", Reduced, inputs.into()),
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[2])], &[Axis::Of(&[1]), Axis::Of(&[2])], bias],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}

attributes! {
    /// Batched matrix product of two tensors: `y[g, m, n] = sum_k a[g, m, k] * b[g, k, n]`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `a` | float `[G, M, K]` | |
    /// | `b` | as `a`, `[G, K, N]`, or `[G, N, K]` if `transpose_b` | |
    /// | → `y` | `dtype` `[G, M, N]` | |
    ///
    /// Accumulated in f32 or better, rounded once. `K = 0` gives zeros.
    Matmul {
        /// Element type of the result; a float.
        dtype: DType,
        /// Whether `b` is stored with its last two dimensions swapped.
        transpose_b: bool,
    }
}

impl Matmul {
    fn sizes<'a>(&self, operands: &Operands<'a>) -> Result<[&'a Size; 4]> {
        let [groups, m, k] = operands.tensor("a")?.sizes()?;
        let [_, second, third] = operands.tensor("b")?.sizes()?;
        Ok([groups, m, k, if self.transpose_b { second } else { third }])
    }
}

impl Operation for Matmul {
    const SIGNATURE: &'static Signature = &Signature {
        name: "matmul",
        profile: Profile::LlmCore1,
        summary: "`y[g, m, n] = sum_k a[g, m, k] * b[g, k, n]`",
        operands: &[operand("a", OperandKind::Float), operand("b", OperandKind::Float)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let [groups, m, k, n] = self.sizes(operands)?;
        let (a, b) = (operands.tensor("a")?, operands.tensor("b")?);
        b.expect_dtype(a.dtype(), "element type of a")?;
        let shape = if self.transpose_b { [groups, n, k] } else { [groups, k, n] };
        b.expect_shape(shape, "to match a")?;
        check_float(self.dtype)?;
        Ok(vec![TensorType { dtype: self.dtype, shape: vec![groups.clone(), m.clone(), n.clone()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [groups, m, k, n] = self.sizes(operands)?.map(Size::clone);
        let b: &[Axis] = if self.transpose_b {
            &[Axis::Of(&[0]), Axis::Of(&[2]), Axis::Of(&[3])]
        } else {
            &[Axis::Of(&[0]), Axis::Of(&[3]), Axis::Of(&[2])]
        };
        Ok(IndexMaps::new(
            [("groups", Parallel, groups), ("m", Parallel, m), ("n", Parallel, n), ("k", Reduced, k)],
            &[&[Axis::Of(&[0]), Axis::Of(&[1]), Axis::Of(&[3])], b],
            &[&[Axis::Of(&[0]), Axis::Of(&[1]), Axis::Of(&[2])]],
        ))
    }
}

pub(super) fn check_float(dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::invalid(format!("is {dtype}, must be a float type")).at("dtype"))
}
