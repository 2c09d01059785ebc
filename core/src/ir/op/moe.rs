//! Mixture of experts: the router, the grouping of assignments by expert, the linear layers of experts, and the weighted sum.
//!
//! Each token is assigned to `k` experts: slot `j` of token `t` is the assignment of `t` to expert `experts[t, j]`. What the
//! slots of a token hold stands side by side in one row, `[T, k * F]`, so that the number of rows, and the extent that bounds
//! it, is that of tokens throughout.
//!
//! A device may hold only some of the experts: `first_expert` and those after it. In every op but the router an assignment to
//! an expert that is not among them counts as -1, which means skip.

use super::{
    Axis,
    DimensionKind::{Parallel, Reduced, Whole},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    attributes::choice,
    index_map::ABSENT,
    linear::check_float,
    signature::{operand, optional, result},
};
use crate::{
    DType, Error, Result,
    tensor::{Size, TensorType},
};

choice! {
    /// The score of an expert, from its logit `z`.
    RouterScore {
        /// The softmax of all logits.
        Softmax = 1 "softmax",
        /// `1 / (1 + exp(-z))`.
        Sigmoid = 2 "sigmoid",
        /// The softmax of the logits of the chosen experts.
        SoftmaxOfSelected = 3 "softmax_of_selected",
        /// The softmax of the logits near the chosen one, again for each slot.
        SparseMixer = 4 "sparse_mixer",
    }
}

choice! {
    /// The score of a group of experts.
    GroupScore {
        /// The largest score of an expert of the group.
        Max = 1 "max",
        /// The sum of the two largest scores of experts of the group.
        TopTwoSum = 2 "top_two_sum",
    }
}

choice! {
    /// The divisor of the weights of a token, `s` being their sum.
    RouterNorm {
        /// 1.
        None = 1 "none",
        /// `s + eps`.
        Sum = 2 "sum",
        /// `max(s, eps)`.
        ClampedSum = 3 "clamped_sum",
    }
}

attributes! {
    /// Router of a mixture of experts: chooses `k` experts for each token, and their weights.
    ///
    /// With `z = logits + bias`, for each token:
    ///
    /// 1. The scores `s`, by `score`: the softmax of `z` over all experts, or the sigmoid of each `z`. With
    ///    `softmax_of_selected` and `sparse_mixer` experts are chosen by `z` itself, which stands for `s` in steps 2 and 3.
    /// 2. Groups: expert `e` is in group `e / (E / groups)`. Only the experts of the `top_groups` best groups can be chosen. The
    ///    score of a group is the largest of its `s + selection_bias`, or the sum of the two largest.
    /// 3. The `k` experts with the largest `s + selection_bias`, in descending order. The lower index wins ties, of experts
    ///    and of groups. With the operand `ids` these are the experts instead, and -1 skips a slot.
    /// 4. The weights `w`: the scores `s` of the chosen experts, without the selection bias. With `softmax_of_selected` it is the
    ///    softmax of `z` over the chosen experts. With `sparse_mixer` the weight of a slot is the softmax of `z` at the chosen
    ///    expert, over the experts `e` that no slot before it has and for which
    ///    `z_max - z_e <= threshold * max(|z_e|, z_max)`; `z_max` is the logit of the chosen expert.
    /// 5. `w / divisor * scale * expert_scale`, with the divisor that `norm` says.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `logits` | float `[T, E]` | |
    /// | `bias` | f32 `[E]`, optional | part of the logit |
    /// | `selection_bias` | f32 `[E]`, optional | counts when experts are chosen, not in weights; score softmax or sigmoid |
    /// | `expert_scale` | f32 `[E]`, optional | a factor of the weights of each expert |
    /// | `ids` | i32 `[T, k]`, optional | experts chosen in advance; not with a selection bias, groups, or `sparse_mixer` |
    /// | → `experts` | i32 `[T, k]` | |
    /// | → `weights` | f32 `[T, k]` | 0 in skipped slots |
    ///
    /// Scores are compared exactly, so without a selection bias and groups the order is that of `z` also where scores round to
    /// equal numbers. With them, either of two experts or groups may be chosen whose values differ by no more than the
    /// rounding of f32. If a token's `z` has a NaN or plus infinity, or is minus infinity throughout, no choice is sound: its
    /// experts are 0 to `k - 1`, or those of `ids`, and all their weights are NaN, so that the fault shows in the result.
    ///
    /// Computed in f32, rounded once.
    /// Sources: Fedus et al., "Switch Transformers" (2021); DeepSeek-AI, "DeepSeek-V3" (2024), for groups and the selection
    /// bias; Liu et al., "GRIN" (2024), for `sparse_mixer`.
    MoeRoute {
        /// The number `k` of experts of a token.
        top_k: u32,
        /// The score of an expert.
        score: RouterScore,
        /// The number of groups, which divides the number of experts; 1 for no groups.
        groups: u32,
        /// The number of groups of which experts are chosen.
        top_groups: u32,
        /// The score of a group.
        group_score: GroupScore,
        /// The divisor of the weights.
        norm: RouterNorm,
        /// What `norm` adds to the sum, or its least value.
        eps: f32,
        /// A factor of all weights.
        scale: f32,
        /// The largest distance that `sparse_mixer` allows; other scores do not read it.
        threshold: f32,
    }
}

impl MoeRoute {
    fn check(&self, experts: usize, operands: &Operands<'_>) -> Result<()> {
        let wrong = |name: &str, message: String| Err(Error::invalid(message).at(name));
        let (top_k, groups, top_groups) =
            (self.top_k as usize, self.groups as usize, self.top_groups as usize);
        if top_k == 0 || top_k > experts {
            return wrong("top_k", format!("is {top_k}, must be from 1 to {experts} (experts)"));
        }
        if groups == 0 || !experts.is_multiple_of(groups) {
            return wrong("groups", format!("is {groups}, must be a divisor of {experts} (experts)"));
        }
        if top_groups == 0 || top_groups > groups {
            return wrong("top_groups", format!("is {top_groups}, must be from 1 to {groups} (groups)"));
        }
        if top_groups * (experts / groups) < top_k {
            let message = format!(
                "is {top_groups}: the {} experts of so many groups are fewer than {top_k} (top_k)",
                top_groups * (experts / groups)
            );
            return wrong("top_groups", message);
        }
        if !(self.eps.is_finite() && self.eps >= 0.0) {
            return wrong("eps", format!("is {}, must be finite and not negative", self.eps));
        }
        if !self.scale.is_finite() {
            return wrong("scale", format!("is {}, must be finite", self.scale));
        }
        if !(self.threshold.is_finite() && self.threshold >= 0.0) {
            return wrong("threshold", format!("is {}, must be finite and not negative", self.threshold));
        }
        let by_logit = matches!(self.score, RouterScore::SoftmaxOfSelected | RouterScore::SparseMixer);
        if by_logit && operands.optional("selection_bias").is_some() {
            return wrong("selection_bias", format!("must be absent (score is {})", self.score.name()));
        }
        if self.score == RouterScore::SparseMixer && groups > 1 {
            return wrong("groups", format!("is {groups}, must be 1 (score is sparse_mixer)"));
        }
        if operands.optional("ids").is_some() {
            if self.score == RouterScore::SparseMixer {
                return wrong("ids", "must be absent (score is sparse_mixer)".into());
            }
            if groups > 1 {
                return wrong("groups", format!("is {groups}, must be 1 (ids are given)"));
            }
            if operands.optional("selection_bias").is_some() {
                return wrong("selection_bias", "must be absent (ids are given)".into());
            }
        }
        Ok(())
    }
}

impl Operation for MoeRoute {
    const SIGNATURE: &'static Signature = &Signature {
        name: "moe_route",
        profile: Profile::LlmMoe1,
        summary: "chooses the experts of each token and their weights",
        operands: &[
            operand("logits", OperandKind::Float),
            optional("bias", OperandKind::F32),
            optional("selection_bias", OperandKind::F32),
            optional("expert_scale", OperandKind::F32),
            optional("ids", OperandKind::I32),
        ],
        results: &[result("experts"), result("weights")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let logits = operands.tensor("logits")?;
        let [rows, experts] = logits.sizes()?;
        self.check(logits.known(1)?, operands)?;
        for name in ["bias", "selection_bias", "expert_scale"] {
            if let Some(vector) = operands.optional(name) {
                vector.expect_shape([experts], "columns of logits")?;
            }
        }
        let slots: Size = (self.top_k as usize).into();
        if let Some(ids) = operands.optional("ids") {
            ids.expect_shape([rows, &slots], "rows of logits and top_k")?;
        }
        Ok([DType::I32, DType::F32]
            .map(|dtype| TensorType { dtype, shape: vec![rows.clone(), slots.clone()] })
            .into())
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, experts] = operands.tensor("logits")?.sizes()?;
        let absent_or =
            |name, axes: &'static [Axis]| if operands.optional(name).is_some() { axes } else { ABSENT };
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("experts", Reduced, experts.clone()),
                ("slots", Whole, (self.top_k as usize).into()),
            ],
            &[
                &[Axis::Of(&[0]), Axis::Of(&[1])],
                absent_or("bias", &[Axis::Of(&[1])]),
                absent_or("selection_bias", &[Axis::Of(&[1])]),
                absent_or("expert_scale", &[Axis::Of(&[1])]),
                absent_or("ids", &[Axis::Of(&[0]), Axis::Of(&[2])]),
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[2])], &[Axis::Of(&[0]), Axis::Of(&[2])]],
        ))
    }
}

attributes! {
    /// Groups the assignments of a step by expert: the tables that the linear layers of all experts share.
    ///
    /// Assignment `t * k + j` is slot `j` of token `t`. Read row by row, `order` holds the assignments to expert `first_expert`
    /// in ascending order, then those to the next expert, and so on; `starts[i] .. starts[i + 1]` are the places of those to
    /// expert `first_expert + i`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `experts` | i32 `[T, k]` | -1 and experts outside of `first_expert .. first_expert + count` are skipped |
    /// | → `order` | i32 `[T, k]` | -1 after the last assignment |
    /// | → `starts` | i32 `[count + 1]` | |
    ///
    /// Exact.
    MoeGroup {
        /// The number of experts.
        count: u32,
        /// The index of the first expert.
        first_expert: u32,
    }
}

impl Operation for MoeGroup {
    const SIGNATURE: &'static Signature = &Signature {
        name: "moe_group",
        profile: Profile::LlmMoe1,
        summary: "groups the assignments of tokens by expert",
        operands: &[operand("experts", OperandKind::I32)],
        results: &[result("order"), result("starts")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let experts = operands.tensor("experts")?;
        experts.sizes::<2>()?;
        experts.known(1)?;
        let count = check_experts(self.count, self.first_expert)?;
        Ok(vec![experts.tensor_type().clone(), TensorType::new(DType::I32, [count + 1])])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([2], &[2, 1]))
    }
}

attributes! {
    /// Linear layers of experts: `y[t, j, n] = sum_k x[t, j, k] * weight[e, n, k] (+ bias[e, n])`, with
    /// `e = experts[t, j] - first_expert`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, K]`, or `[T, slots * K]` | one row for all slots of a token, or one for each |
    /// | `weight` | weight `[count * N, K]` | the matrices of all experts, one after the other, in any format |
    /// | `experts` | i32 `[T, slots]` | -1 and experts outside of `first_expert .. first_expert + count` are skipped |
    /// | `bias` | float `[count * N]`, optional | |
    /// | `order` | i32 `[T, slots]`, optional | a result of [`MoeGroup`] for these experts |
    /// | `starts` | i32 `[count + 1]`, with `order` | the other result |
    /// | → `y` | `dtype` `[T, slots * N]` | skipped slots are not written |
    ///
    /// `order` and `starts` say nothing that `experts` does not; they save backends that run expert by expert the search. With
    /// other tables than those of `experts` the result is undefined, but no memory outside of operands and result is accessed.
    /// Rounding is that of [`super::Linear`].
    GroupedLinear {
        /// The element type of the result; a float.
        dtype: DType,
        /// The number of experts.
        count: u32,
        /// The index of the first expert.
        first_expert: u32,
    }
}

impl GroupedLinear {
    /// The numbers of slots, of outputs and of inputs of an expert.
    fn sizes(&self, operands: &Operands<'_>) -> Result<[usize; 3]> {
        let count = check_experts(self.count, self.first_expert)?;
        let (rows, inputs) = operands.weight("weight")?;
        if !rows.is_multiple_of(count) {
            let message = format!("is {rows}, must be a multiple of {count} (count)");
            return Err(Error::invalid(message).at("weight").field("shape[0]"));
        }
        let experts = operands.tensor("experts")?;
        experts.sizes::<2>()?;
        let slots = experts.known(1)?;
        if slots == 0 {
            return Err(Error::invalid("is 0, must be at least 1 slot").at("experts").field("shape[1]"));
        }
        Ok([slots, rows / count, inputs])
    }

    /// Whether `x` has a row for each slot.
    fn per_slot(operands: &Operands<'_>, inputs: usize) -> Result<bool> {
        Ok(operands.tensor("x")?.known(1)? != inputs)
    }
}

impl Operation for GroupedLinear {
    const SIGNATURE: &'static Signature = &Signature {
        name: "grouped_linear",
        profile: Profile::LlmMoe1,
        summary: "`y[t, j] = x[t] . weight[experts[t, j]] (+ bias)`: the linear layers of experts",
        operands: &[
            operand("x", OperandKind::Float),
            operand("weight", OperandKind::Weight),
            operand("experts", OperandKind::I32),
            optional("bias", OperandKind::Float),
            optional("order", OperandKind::I32),
            optional("starts", OperandKind::I32),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let x = operands.tensor("x")?;
        let [rows, _] = x.sizes()?;
        let [slots, outputs, inputs] = self.sizes(operands)?;
        let count = self.count as usize;
        let overflow = |name: &'static str| Error::invalid("overflows").at(name).field("shape[1]");
        let per_slot = slots.checked_mul(inputs).ok_or_else(|| overflow("weight"))?;
        let width = slots.checked_mul(outputs).ok_or_else(|| overflow("weight"))?;
        if Self::per_slot(operands, inputs)? {
            x.expect(1, &per_slot.into(), "columns of weight, once or for each slot")?;
        }
        let experts = operands.tensor("experts")?;
        experts.expect(0, rows, "rows of x")?;
        if let Some(bias) = operands.optional("bias") {
            bias.expect_shape([&(count * outputs).into()], "rows of weight")?;
        }
        match (operands.optional("order"), operands.optional("starts")) {
            (Some(order), Some(starts)) => {
                order.expect_shape(experts.sizes::<2>()?.each_ref(), "shape of experts")?;
                starts.expect_shape([&(count + 1).into()], "experts and one")?;
            }
            (Some(_), None) => return Err(Error::invalid("is missing (order is there)").at("starts")),
            (None, Some(_)) => return Err(Error::invalid("is missing (starts is there)").at("order")),
            (None, None) => {}
        }
        check_float(self.dtype)?;
        Ok(vec![TensorType { dtype: self.dtype, shape: vec![rows.clone(), width.into()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, _] = operands.tensor("x")?.sizes()?;
        let [slots, outputs, inputs] = self.sizes(operands)?;
        let x: &[Axis] = match Self::per_slot(operands, inputs)? {
            true => &[Axis::Of(&[0]), Axis::Of(&[1, 4])],
            false => &[Axis::Of(&[0]), Axis::Of(&[4])],
        };
        let absent_or =
            |name, axes: &'static [Axis]| if operands.optional(name).is_some() { axes } else { ABSENT };
        // A slot is the sum over all experts of which all but one are multiplied by 0: ranks that hold some of the experts
        // compute parts of the sum.
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("slots", Parallel, slots.into()),
                ("experts", Reduced, (self.count as usize).into()),
                ("outputs", Parallel, outputs.into()),
                ("inputs", Reduced, inputs.into()),
            ],
            &[
                x,
                &[Axis::Of(&[2, 3]), Axis::Of(&[4])],
                &[Axis::Of(&[0]), Axis::Of(&[1])],
                absent_or("bias", &[Axis::Of(&[2, 3])]),
                absent_or("order", &[Axis::Gathered, Axis::Gathered]),
                absent_or("starts", &[Axis::Gathered]),
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[1, 3])]],
        ))
    }
}

attributes! {
    /// Weighted sum of the slots of each token: `y[t, h] = sum_j weights[t, j] * x[t, j, h]`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, slots * H]` | skipped slots are not read |
    /// | `weights` | f32 `[T, slots]` | |
    /// | `experts` | i32 `[T, slots]` | -1 and experts outside of `first_expert .. first_expert + count` are skipped |
    /// | → `y` | as `x`, `[T, H]` | zeros for a token without slots |
    ///
    /// Summed in f32 in the order of slots, rounded once.
    MoeCombine {
        /// The number of experts.
        count: u32,
        /// The index of the first expert.
        first_expert: u32,
    }
}

impl Operation for MoeCombine {
    const SIGNATURE: &'static Signature = &Signature {
        name: "moe_combine",
        profile: Profile::LlmMoe1,
        summary: "`y[t] = sum_j weights[t, j] * x[t, j]`: the weighted sum of a token's experts",
        operands: &[
            operand("x", OperandKind::Float),
            operand("weights", OperandKind::F32),
            operand("experts", OperandKind::I32),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (x, experts) = (operands.tensor("x")?, operands.tensor("experts")?);
        let [rows, _] = x.sizes()?;
        check_experts(self.count, self.first_expert)?;
        let features = slot_features(operands)?;
        experts.expect(0, rows, "rows of x")?;
        operands.tensor("weights")?.expect_shape(experts.sizes::<2>()?.each_ref(), "shape of experts")?;
        Ok(vec![TensorType { dtype: x.dtype(), shape: vec![rows.clone(), features.into()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, _] = operands.tensor("x")?.sizes()?;
        let slots = operands.tensor("experts")?.known(1)?;
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("slots", Reduced, slots.into()),
                ("features", Parallel, slot_features(operands)?.into()),
            ],
            &[
                &[Axis::Of(&[0]), Axis::Of(&[1, 2])],
                &[Axis::Of(&[0]), Axis::Of(&[1])],
                &[Axis::Of(&[0]), Axis::Of(&[1])],
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[2])]],
        ))
    }
}

/// The number of features of a slot of `x`.
fn slot_features(operands: &Operands<'_>) -> Result<usize> {
    let experts = operands.tensor("experts")?;
    experts.sizes::<2>()?;
    let (slots, width) = (experts.known(1)?, operands.tensor("x")?.known(1)?);
    if slots > 0 && width.is_multiple_of(slots) {
        return Ok(width / slots);
    }
    let message = format!("is {width}, must be a multiple of {slots} (columns of experts)");
    Err(Error::invalid(message).at("x").field("shape[1]"))
}

/// The number of experts of a device, whose indices fit an i32.
fn check_experts(count: u32, first_expert: u32) -> Result<usize> {
    const MOST: u32 = i32::MAX as u32;
    if count == 0 || count > MOST {
        return Err(Error::invalid(format!("is {count}, must be from 1 to {MOST}")).at("count"));
    }
    if first_expert > MOST - count {
        let message = format!("is {first_expert}, must be at most {} ({MOST} less count)", MOST - count);
        return Err(Error::invalid(message).at("first_expert"));
    }
    Ok(count as usize)
}
