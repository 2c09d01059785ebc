//! Norms over the features of a row.

use super::{
    Axis,
    DimensionKind::{Parallel, Whole},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    index_map::ABSENT,
    signature::{operand, optional, result},
};
use crate::{Error, Result, tensor::TensorType};

attributes! {
    /// Root-mean-square norm: `y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, H]` | |
    /// | `weight` | float `[W]` | `W` divides `H` |
    /// | → `y` | as `x` | |
    ///
    /// Each run of `W` consecutive features is a group with its own mean: `W = H` is the usual norm, and `W` = head size
    /// norms every head of a projection separately. Computed in f32, rounded once.
    /// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    RmsNorm {
        /// The constant added to the mean square; not negative.
        eps: f32,
        /// The constant added to the weight (1 in models that store `weight - 1`).
        weight_offset: f32,
    }
}

impl Operation for RmsNorm {
    const SIGNATURE: &'static Signature = &Signature {
        name: "rms_norm",
        profile: Profile::LlmCore1,
        summary: "`y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)` over groups of `W` features",
        operands: &[operand("x", OperandKind::Float), operand("weight", OperandKind::Float)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (x, weight) = (operands.tensor("x")?, operands.tensor("weight")?);
        x.sizes::<2>()?;
        weight.sizes::<1>()?;
        check_eps(self.eps)?;
        if !self.weight_offset.is_finite() {
            return Err(
                Error::invalid(format!("is {}, must be finite", self.weight_offset)).at("weight_offset")
            );
        }
        let (features, width) = (x.known(1)?, weight.known(0)?);
        if width == 0 || !features.is_multiple_of(width) {
            let message = format!("is {width}, must divide {features} (features of x)");
            return Err(Error::invalid(message).at("weight").field("shape[0]"));
        }
        Ok(vec![x.tensor_type().clone()])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let (x, width) = (operands.tensor("x")?, operands.tensor("weight")?.known(0)?);
        let [rows, _] = x.sizes()?;
        let groups = x.known(1)? / width.max(1);
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("groups", Parallel, groups.into()),
                ("width", Whole, width.into()),
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[1, 2])], &[Axis::Of(&[2])]],
            &[&[Axis::Of(&[0]), Axis::Of(&[1, 2])]],
        ))
    }
}

attributes! {
    /// Layer norm: `y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias`, with the biased variance.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, H]` | |
    /// | `weight` | float `[H]`, optional | ones if absent |
    /// | `bias` | float `[H]`, optional | zeros if absent |
    /// | → `y` | as `x` | |
    ///
    /// Computed in f32 in two passes (mean first), rounded once.
    LayerNorm {
        /// The constant added to the variance; not negative.
        eps: f32,
    }
}

impl Operation for LayerNorm {
    const SIGNATURE: &'static Signature = &Signature {
        name: "layer_norm",
        profile: Profile::LlmCore1,
        summary: "`y = (x - mean) * rsqrt(var + eps) * weight + bias`, biased variance",
        operands: &[
            operand("x", OperandKind::Float),
            optional("weight", OperandKind::Float),
            optional("bias", OperandKind::Float),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = operands.tensor("x")?;
        let [_, features] = x.sizes()?;
        x.known(1)?;
        check_eps(self.eps)?;
        for vector in [operands.optional("weight"), operands.optional("bias")].into_iter().flatten() {
            vector.expect_shape([features], "features of x")?;
        }
        Ok(vec![x.tensor_type().clone()])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, features] = operands.tensor("x")?.sizes()?;
        let vector = |name| if operands.optional(name).is_some() { &[Axis::Of(&[1])] } else { ABSENT };
        Ok(IndexMaps::new(
            [("rows", Parallel, rows.clone()), ("features", Whole, features.clone())],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])], vector("weight"), vector("bias")],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}

fn check_eps(eps: f32) -> Result<()> {
    if eps.is_finite() && eps >= 0.0 {
        return Ok(());
    }
    Err(Error::invalid(format!("is {eps}, must be finite and not negative")).at("eps"))
}
