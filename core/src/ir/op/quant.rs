//! Quantisation of activations, and the linear layers over quantised activations.

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

/// The number of groups of a row of `columns` elements, which `operand` has.
fn groups(group: u32, columns: usize, operand: &str) -> Result<usize> {
    let size = group as usize;
    if size == 0 {
        return Err(Error::invalid("is 0, must be at least 1").at("group"));
    }
    if !columns.is_multiple_of(size) {
        let message = format!("is {columns}, must be a multiple of {group} (group)");
        return Err(Error::invalid(message).at(operand).field("shape[1]"));
    }
    Ok(columns / size)
}

attributes! {
    /// Quantises every group of `group` consecutive elements of a row with its own scale: [`QuantPerToken`] of each group.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[M, K]` | `K` a multiple of `group` |
    /// | → `y` | i8 `[M, K]` | within ±127 |
    /// | → `scales` | f32 `[M, K / group]` | |
    ///
    /// Divisions, rounding and special values are those of [`QuantPerToken`], group by group: an infinite or NaN value makes
    /// the results of its own group unspecified and affects no other group.
    QuantPerGroup {
        /// The number of consecutive elements that share a scale; at least 1.
        group: u32,
    }
}

impl Operation for QuantPerGroup {
    const SIGNATURE: &'static Signature = &Signature {
        name: "quant_per_group",
        profile: Profile::LlmQuant2,
        summary: "`quant_per_token` of every `group` consecutive elements of a row",
        operands: &[operand("x", OperandKind::Float)],
        results: &[result("y"), result("scales")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = operands.tensor("x")?;
        let [rows, features] = x.sizes()?;
        let groups = groups(self.group, x.known(1)?, "x")?;
        Ok(vec![
            TensorType { dtype: DType::I8, shape: vec![rows.clone(), features.clone()] },
            TensorType { dtype: DType::F32, shape: vec![rows.clone(), groups.into()] },
        ])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let x = operands.tensor("x")?;
        let [rows, _] = x.sizes()?;
        let groups = groups(self.group, x.known(1)?, "x")?;
        let features = &[Axis::Of(&[0]), Axis::Of(&[1, 2])];
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("groups", Parallel, groups.into()),
                ("elements", Whole, (self.group as usize).into()),
            ],
            &[features],
            &[features, &[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}

attributes! {
    /// Linear layer over activations that are quantised in groups: `y[m, n] = sum_k scales[m, k / group] * x[m, k] * weight[n, k]
    /// (+ bias[n])`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | i8 `[M, K]` | within ±127; -128 is unspecified |
    /// | `scales` | f32 `[M, K / group]` | |
    /// | `weight` | weight `[N, K]` | of any format; the format's formula defines quantised elements |
    /// | `bias` | float `[N]`, optional | |
    /// | → `y` | `dtype` `[M, N]` | |
    ///
    /// Products are accumulated in f32 or better, or exactly in integers within a group; scales are applied in f32 or better, in
    /// any order. The sum with the bias is rounded once. Weights are not rounded to fewer bits than their format has. No sum of
    /// integers may wrap around, however long a group is. With `K = 0` the result is the bias, or zeros.
    ///
    /// A scale that is NaN makes its row of `y` NaN, and one that is infinite makes it unspecified; neither affects other rows.
    LinearA8 {
        /// The element type of the result; a float.
        dtype: DType,
        /// The number of consecutive elements of `x` that share a scale; at least 1.
        group: u32,
    }
}

impl Operation for LinearA8 {
    const SIGNATURE: &'static Signature = &Signature {
        name: "linear_a8",
        profile: Profile::LlmQuant2,
        summary: "`y[m, n] = sum_k scales[m, k / group] * x[m, k] * weight[n, k] (+ bias[n])`",
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
        let groups = groups(self.group, inputs, "weight")?;
        let scales = operands.tensor("scales")?;
        scales.expect_shape([rows, &groups.into()], "rows and groups of x")?;
        if let Some(bias) = operands.optional("bias") {
            bias.expect_shape([&outputs.into()], "rows of weight")?;
        }
        check_float(self.dtype)?;
        Ok(vec![TensorType { dtype: self.dtype, shape: vec![rows.clone(), outputs.into()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, _] = operands.tensor("x")?.sizes()?;
        let (outputs, inputs) = operands.weight("weight")?;
        let groups = groups(self.group, inputs, "weight")?;
        let bias = if operands.optional("bias").is_some() { &[Axis::Of(&[1])] } else { ABSENT };
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("outputs", Parallel, outputs.into()),
                ("groups", Reduced, groups.into()),
                ("elements", Reduced, (self.group as usize).into()),
            ],
            &[
                &[Axis::Of(&[0]), Axis::Of(&[2, 3])],
                &[Axis::Of(&[0]), Axis::Of(&[2])],
                &[Axis::Of(&[1]), Axis::Of(&[2, 3])],
                bias,
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}
