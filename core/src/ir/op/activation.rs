//! Pointwise activation functions, plain and gated.

use super::{
    Axis,
    DimensionKind::{Parallel, Reduced},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    attributes::choice,
    index_map::ABSENT,
    signature::{operand, optional, result},
};
use crate::{
    Error, Result,
    tensor::{Size, TensorType},
};

choice! {
    /// A non-linear function of one number.
    Nonlinearity {
        /// `max(x, 0)`.
        Relu = 1 "relu",
        /// `x / (1 + exp(-x))`.
        Silu = 2 "silu",
        /// `x / 2 * (1 + erf(x / sqrt(2)))`.
        GeluErf = 3 "gelu_erf",
        /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
        GeluTanh = 4 "gelu_tanh",
        /// `x / (1 + exp(-1.702 x))`.
        QuickGelu = 5 "quick_gelu",
        /// `tanh(x)`.
        Tanh = 6 "tanh",
    }
}

choice! {
    /// The layout of the gate and up halves of a gated activation.
    GateLayout {
        /// Two operands: `gate[T, F]` and `up[T, F]`.
        Separate = 1 "separate",
        /// One operand `gate[T, 2 F]`: the gate half, then the up half.
        Concatenated = 2 "concatenated",
        /// One operand `gate[T, 2 F]`: gate and up elements alternate.
        Interleaved = 3 "interleaved",
    }
}

attributes! {
    /// `y = f(min(x + bias, limit))`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, F]` | |
    /// | `bias` | float `[F]`, optional | |
    /// | → `y` | as `x` | |
    ///
    /// Computed in f32, rounded once.
    Activation {
        /// The function `f`.
        function: Nonlinearity,
        /// The upper bound on the input of `f`; 0 means no bound.
        limit: f32,
    }
}

impl Operation for Activation {
    const SIGNATURE: &'static Signature = &Signature {
        name: "activation",
        profile: Profile::LlmCore1,
        summary: "`y = f(x + bias)`: relu, silu, gelu_erf, gelu_tanh, quick_gelu, tanh",
        operands: &[operand("x", OperandKind::Float), optional("bias", OperandKind::Float)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = operands.tensor("x")?;
        let [_, features] = x.sizes()?;
        if let Some(bias) = operands.optional("bias") {
            bias.expect_shape([features], "features of x")?;
        }
        check_limit(self.limit)?;
        Ok(vec![x.tensor_type().clone()])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, features] = operands.tensor("x")?.sizes()?;
        let bias = if operands.optional("bias").is_some() { &[Axis::Of(&[1])] } else { ABSENT };
        Ok(IndexMaps::new(
            [("rows", Parallel, rows.clone()), ("features", Parallel, features.clone())],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])], bias],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}

attributes! {
    /// Gated activation: `y = f(min(g + bias_g, limit)) * (clamp(u + bias_u, -limit, limit) + up_offset)`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `gate` | float `[T, F]`, or `[T, 2 F]` if the layout packs both | |
    /// | `up` | as `gate`, `[T, F]`; only with layout `separate` | |
    /// | `bias` | float, `[2 F]`, optional | in the order of a packed row; the gate half first with layout `separate` |
    /// | → `y` | as `gate`, `[T, F]` | |
    ///
    /// Computed in f32, rounded once.
    /// Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    GatedActivation {
        /// The function `f`.
        function: Nonlinearity,
        /// The layout of the gate and up halves.
        layout: GateLayout,
        /// The upper bound on the gate and on the magnitude of the up half; 0 means no bound.
        limit: f32,
        /// The number added to the up half.
        up_offset: f32,
    }
}

impl Operation for GatedActivation {
    const SIGNATURE: &'static Signature = &Signature {
        name: "gated_activation",
        profile: Profile::LlmCore1,
        summary: "`y = f(gate) * (up + up_offset)`, the two halves separate, concatenated or interleaved",
        operands: &[
            operand("gate", OperandKind::Float),
            optional("up", OperandKind::Float),
            optional("bias", OperandKind::Float),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (gate, up) = (operands.tensor("gate")?, operands.optional("up"));
        let [rows, features] = gate.sizes()?;
        check_limit(self.limit)?;
        if !self.up_offset.is_finite() {
            return Err(Error::invalid(format!("is {}, must be finite", self.up_offset)).at("up_offset"));
        }
        let size = gate.known(1)?;
        let out = match (self.layout, up) {
            (GateLayout::Separate, Some(up)) => {
                up.expect_dtype(gate.dtype(), "element type of gate")?;
                up.expect_shape([rows, features], "shape of gate")?;
                size
            }
            (GateLayout::Separate, None) => {
                return Err(Error::invalid("is missing (layout is separate)").at("up"));
            }
            (layout, Some(_)) => {
                return Err(Error::invalid(format!("must be absent (layout is {})", layout.name())).at("up"));
            }
            (_, None) if size.is_multiple_of(2) => size / 2,
            (_, None) => {
                let message = format!("is {size}, must be even (it holds the gate and up halves)");
                return Err(Error::invalid(message).at("gate").field("shape[1]"));
            }
        };
        if let Some(bias) = operands.optional("bias") {
            let both =
                out.checked_mul(2).ok_or_else(|| Error::invalid("overflows").at("gate").field("shape[1]"))?;
            bias.expect_shape([&both.into()], "gate and up halves")?;
        }
        Ok(vec![TensorType { dtype: gate.dtype(), shape: vec![rows.clone(), out.into()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let gate = operands.tensor("gate")?;
        let [rows, _] = gate.sizes()?;
        let size = gate.known(1)?;
        let features: Size = if self.layout == GateLayout::Separate { size } else { size / 2 }.into();
        let packed: &[Axis] =
            if self.layout == GateLayout::Interleaved { &[Axis::Of(&[1, 2])] } else { &[Axis::Of(&[2, 1])] };
        let (gate_axes, up_axes): (&[Axis], &[Axis]) = match self.layout {
            GateLayout::Separate => (&[Axis::Of(&[0]), Axis::Of(&[1])], &[Axis::Of(&[0]), Axis::Of(&[1])]),
            GateLayout::Concatenated => (&[Axis::Of(&[0]), Axis::Of(&[2, 1])], ABSENT),
            GateLayout::Interleaved => (&[Axis::Of(&[0]), Axis::Of(&[1, 2])], ABSENT),
        };
        let bias = if operands.optional("bias").is_some() { packed } else { ABSENT };
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("features", Parallel, features),
                ("halves", Reduced, 2.into()),
            ],
            &[gate_axes, up_axes, bias],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}

fn check_limit(limit: f32) -> Result<()> {
    if limit.is_finite() && limit >= 0.0 {
        return Ok(());
    }
    Err(Error::invalid(format!("is {limit}, must be finite and not negative (0 means no bound)")).at("limit"))
}
