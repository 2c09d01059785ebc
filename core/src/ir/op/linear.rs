//! The linear layer: a GEMM of activations with a packed weight.

use super::{
    Axis,
    DimensionKind::{Parallel, Reduced},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    index_map::ABSENT,
    signature::{operand, optional, result},
};
use crate::{DType, Error, Result, tensor::TensorType};

attributes! {
    /// Linear layer: `y[m, n] = sum_k x[m, k] * weight[n, k] (+ bias[n])`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[M, K]` | |
    /// | `weight` | weight `[N, K]` | of any format; the format's formula defines quantised elements |
    /// | `bias` | float `[N]`, optional | |
    /// | → `y` | `dtype` `[M, N]` | |
    ///
    /// Products are accumulated in f32 or better; the sum with the bias is rounded once. A backend may round dequantised
    /// weights to the element type of `x`, but may not quantise `x`, for which [`super::QuantPerToken`] exists.
    Linear {
        /// The element type of the result; a float.
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

pub(super) fn check_float(dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::invalid(format!("is {dtype}, must be a float type")).at("dtype"))
}
