//! Quantisation of activations, and the linear layer over quantised activations.

use super::{
    Axis,
    DimensionKind::{Parallel, Reduced, Whole},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    index_map::ABSENT,
    linear::check_float,
    signature::{operand, optional, result},
};
use crate::{DType, Error, Result, WeightFormat, tensor::TensorType};

attributes! {
    /// Quantises every row with its own scale: `scales[m] = max_k |x[m, k]| / 127`, `y[m, k] = round(x[m, k] / scales[m])`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[M, K]` | |
    /// | → `y` | i8 `[M, K]` | within ±127 |
    /// | → `scales` | f32 `[M]` | |
    ///
    /// Both divisions are f32 divisions rounded to nearest; `round` rounds to the nearest integer, ties to even, and results
    /// beyond ±127 become ±127. A row whose scale is 0 is all zeros. The results of a row with an infinite or NaN value are
    /// unspecified; they do not affect other rows. In a region the values may be quantised before they are rounded to the
    /// element type of `x`.
    QuantPerToken {}
}

impl Operation for QuantPerToken {
    const SIGNATURE: &'static Signature = &Signature {
        name: "quant_per_token",
        profile: Profile::LlmQuant1,
        summary: "`scales[m] = max_k |x[m, k]| / 127`, `y[m, k] = round(x[m, k] / scales[m])`",
        operands: &[operand("x", OperandKind::Float)],
        results: &[result("y"), result("scales")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let [rows, features] = operands.tensor("x")?.sizes()?;
        Ok(vec![
            TensorType { dtype: DType::I8, shape: vec![rows.clone(), features.clone()] },
            TensorType { dtype: DType::F32, shape: vec![rows.clone()] },
        ])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, features] = operands.tensor("x")?.sizes()?;
        Ok(IndexMaps::new(
            [("rows", Parallel, rows.clone()), ("features", Whole, features.clone())],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])], &[Axis::Of(&[0])]],
        ))
    }
}

attributes! {
    /// Linear layer over quantised activations and weights: `y[m, n] = scales[m] * s[n] * sum_k x[m, k] * q[n, k] (+ bias[n])`,
    /// with `s` the scales and `q` the integers of `weight`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | i8 `[M, K]` | at most 131071 columns, so that no sum overflows |
    /// | `scales` | f32 `[M]` | |
    /// | `weight` | weight `[N, K]` | signed bytes with one scale for each row: `int8`, `int8_f16` or `int8_bf16` |
    /// | `bias` | float `[N]`, optional | |
    /// | → `y` | `dtype` `[M, N]` | |
    ///
    /// The sum of products is exact, in i32. Scales and bias are applied in f32 or better, in any order, with one rounding.
    /// With `K = 0` the result is the bias, or zeros.
    LinearW8A8 {
        /// The element type of the result; a float.
        dtype: DType,
    }
}

impl LinearW8A8 {
    /// The maximum number of columns: a product of signed bytes is at most 2^14, and an i32 holds the sum of this many.
    pub const MAX_INPUTS: usize = (1 << 17) - 1;
}

impl Operation for LinearW8A8 {
    const SIGNATURE: &'static Signature = &Signature {
        name: "linear_w8a8",
        profile: Profile::LlmQuant1,
        summary: "`y[m, n] = scales[m] * s[n] * sum_k x[m, k] * q[n, k] (+ bias[n])`, the sum exact",
        operands: &[
            operand("x", OperandKind::I8),
            operand("scales", OperandKind::F32),
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
        operands.tensor("scales")?.expect_shape([rows], "rows of x")?;
        let format = operands.weight_format("weight")?;
        if !matches!(format, WeightFormat::Group(format) if format.is_channelwise_int8()) {
            let message = format!("is {format}, must be int8, int8_f16 or int8_bf16");
            return Err(Error::invalid(message).at("weight").field("format"));
        }
        if inputs > Self::MAX_INPUTS {
            let message = format!("is {inputs}, must be at most {} for sums to be exact", Self::MAX_INPUTS);
            return Err(Error::invalid(message).at("weight").field("shape[1]"));
        }
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
            &[&[Axis::Of(&[0]), Axis::Of(&[2])], &[Axis::Of(&[0])], &[Axis::Of(&[1]), Axis::Of(&[2])], bias],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}
