//! Calls of mixtures of experts that run wrongly.

use crate::{
    change::{change_result, copied, operand},
    wrap::Run,
};
use dsrun_core::{
    Result,
    device::Stream,
    op::{Op, RouterNorm, RouterScore},
};

/// The weights of sigmoid scores get the selection bias.
pub(crate) fn selection_bias_weighs(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    run.right(stream)?;
    let Op::MoeRoute(op) = run.call.op else { return Ok(()) };
    let (Some(logits), Some(bias)) = (copied(run, stream, 0)?, copied(run, stream, 2)?) else {
        return Ok(());
    };
    if op.score != RouterScore::Sigmoid {
        return Ok(());
    }
    let mut experts = None;
    change_result(run, stream, 0, |_, found| experts = Some(found.clone()))?;
    let Some(experts) = experts else { return Ok(()) };
    change_result(run, stream, 1, |_, weights| {
        let (width, slots) = (logits.width(), weights.width());
        for row in 0..weights.count() / slots {
            let score = |slot: usize| {
                let expert = experts.integer(row * slots + slot) as usize;
                1.0 / (1.0 + (-logits.float(row * width + expert)).exp()) + bias.float(expert)
            };
            let scores: Vec<f32> = (0..slots).map(score).collect();
            let sum: f32 = if op.norm == RouterNorm::None { 1.0 } else { scores.iter().sum() };
            for (slot, score) in scores.iter().enumerate() {
                weights.set_float(row * slots + slot, score / sum * op.scale);
            }
        }
    })
}

/// The right router sees the experts in descending order, and its answer is turned around.
pub(crate) fn ties_to_the_last(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let alone = run.call.operands.iter().skip(1).all(Option::is_none);
    if run.op() != "moe_route" || !alone {
        return run.right(stream);
    }
    let experts = run.operand(0).map_or(0, |logits| logits.shape[1]);
    operand(run, stream, "moe_route", 0, |_, logits| {
        let before = logits.clone();
        for index in 0..logits.count() {
            let (row, expert) = (index / experts, index % experts);
            logits.set_bits(index, before.bits(row * experts + experts - 1 - expert));
        }
    })?;
    change_result(run, stream, 0, |_, chosen| chosen.map(|_, expert| experts as i32 - 1 - expert))
}

/// Skipped assignments are taken for such of expert 0.
pub(crate) fn skipped_to_expert_0(run: &Run, stream: &mut dyn Stream, op: &str) -> Result<()> {
    operand(run, stream, op, 2, |_, experts| {
        experts.map(|_, expert| if expert == -1 { 0 } else { expert });
    })
}

/// The bias of the first expert stands for those of all.
pub(crate) fn bias_of_expert_0(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Op::GroupedLinear(op) = run.call.op else { return run.right(stream) };
    operand(run, stream, "grouped_linear", 3, |_, bias| {
        let (before, outputs) = (bias.clone(), bias.count() / op.count as usize);
        (0..bias.count()).for_each(|index| bias.set_bits(index, before.bits(index % outputs)));
    })
}
