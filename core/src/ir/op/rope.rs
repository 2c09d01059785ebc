//! Rotary position embedding.

use super::{
    Axis,
    DimensionKind::{Parallel, Whole},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    attributes::choice,
    signature::{operand, result},
};
use crate::{Error, Result, tensor::TensorType};

choice! {
    /// The pairs of head elements that are rotated together.
    RopePairing {
        /// Element `i` with element `i + r / 2` (GPT-NeoX, Hugging Face Llama).
        Halves = 1 "halves",
        /// Element `2 i` with element `2 i + 1` (GPT-J, GGUF Llama).
        Neighbours = 2 "neighbours",
    }
}

attributes! {
    /// Rotates pairs of elements of every head by an angle proportional to the position.
    ///
    /// With `a = positions[t] * inverse_frequencies[i]`, pair `i` of each head, `(p, q)`, becomes
    /// `scale * (p cos a - q sin a, q cos a + p sin a)`. The first `r = 2 * len(inverse_frequencies)` elements of a head
    /// are rotated; the rest are copied.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, heads * D]` | |
    /// | `positions` | i32 `[T]` | -1 skips the row: it is not written |
    /// | `inverse_frequencies` | f32 `[r / 2]` | after any scaling for long context; `r <= D` |
    /// | → `y` | as `x` | |
    ///
    /// The angle is computed in f32 (the product rounded once), sine and cosine to f32 accuracy, the result rounded once.
    /// Source: Su et al., "RoFormer" (2021).
    Rope {
        /// The number of heads in a row.
        heads: u32,
        /// The elements that are rotated together.
        pairing: RopePairing,
        /// The factor of the rotated elements (1 unless the model's long-context scaling sets another).
        scale: f32,
    }
}

impl Operation for Rope {
    const SIGNATURE: &'static Signature = &Signature {
        name: "rope",
        profile: Profile::LlmCore1,
        summary: "rotates pairs of each head by `positions[t] * inverse_frequencies[i]`",
        operands: &[
            operand("x", OperandKind::Float),
            operand("positions", OperandKind::I32),
            operand("inverse_frequencies", OperandKind::F32),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = operands.tensor("x")?;
        let [rows, _] = x.sizes()?;
        operands.tensor("positions")?.expect_shape([rows], "rows of x")?;
        let head = head_size(x.known(1)?, self.heads)?;
        let frequencies = operands.tensor("inverse_frequencies")?;
        frequencies.sizes::<1>()?;
        let pairs = frequencies.known(0)?;
        if pairs > head / 2 {
            let message = format!("is {pairs}, must be at most {} (pairs in a head of {head})", head / 2);
            return Err(Error::invalid(message).at("inverse_frequencies").field("shape[0]"));
        }
        if !self.scale.is_finite() {
            return Err(Error::invalid(format!("is {}, must be finite", self.scale)).at("scale"));
        }
        Ok(vec![x.tensor_type().clone()])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let x = operands.tensor("x")?;
        let [rows, _] = x.sizes()?;
        let head = head_size(x.known(1)?, self.heads)?;
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("heads", Parallel, (self.heads as usize).into()),
                ("head", Whole, head.into()),
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[1, 2])], &[Axis::Of(&[0])], &[Axis::Gathered]],
            &[&[Axis::Of(&[0]), Axis::Of(&[1, 2])]],
        ))
    }
}

/// The head size of `heads` heads in a row of `features`.
fn head_size(features: usize, heads: u32) -> Result<usize> {
    match heads as usize {
        heads if heads > 0 && features.is_multiple_of(heads) => Ok(features / heads),
        heads => {
            Err(Error::invalid(format!("is {heads}, must divide {features} (features of x)")).at("heads"))
        }
    }
}
