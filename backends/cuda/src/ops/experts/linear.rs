//! The linear layers of experts: the launches of a call, divided as [`Shape::division`] says.
//!
//! Work is divided into items: an expert with a bounded number of its assignments. Kernels find items through the tables of
//! `moe_group`, which an additional launch computes in scratch memory if they are no operands of the call. With few assignments,
//! each assignment is an item.

use super::{
    GROUP_THREADS, MoeGroupParams, assignments,
    division::{Form, Shape},
    group_spec,
    params::GroupedLinearParams,
};
use crate::{
    arch::DeviceSpec,
    driver::launch::{LaunchOp, MAX_GRID},
    ops::{
        KernelPlan,
        frame::Frame,
        operand,
        params::{ExtentParams, MatrixParams, WeightParams},
        result, weight_type,
    },
};
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::{GatedActivation, GroupedLinear},
};

pub(in crate::ops) fn grouped_linear(
    op: &GroupedLinear,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<KernelPlan> {
    let plan = product(op, Form::Plain, call, device)?;
    plan.ok_or_else(|| Error::internal("no kernel for a linear layer of experts"))
}

/// The gated activation of two linear layers of experts (gate and up) as one product: the operands of the call are those of
/// `grouped_linear` for the gate, then the weight and the bias of the up projection. `None` if no kernel supports it.
pub(super) fn gated_product(
    op: &GroupedLinear,
    gate: GatedActivation,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<KernelPlan>> {
    product(op, Form::Gated(gate), call, device)
}

/// The weighted sum of the products of one token's slots: the operands of the call are those of `grouped_linear`, two absent
/// ones, and the weights. `None` if no kernel supports it.
pub(super) fn summed_product(
    op: &GroupedLinear,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<KernelPlan>> {
    product(op, Form::Summed, call, device)
}

/// The maximum number of slots of a sum: one lane each.
const MAX_SUMMED: usize = 32;

fn product(
    op: &GroupedLinear,
    form: Form,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<KernelPlan>> {
    let gate = form.gate();
    let (x, weight, y) = (operand(call, 0)?, weight_type(call, 1)?, result(call, 0)?);
    let [rows, slots] = operand(call, 2)?.shape[..] else {
        return Err(Error::internal("experts are not a table"));
    };
    let all = assignments(rows, slots)?;
    let (count, inputs) = (op.count as usize, weight.columns());
    let outputs = weight.rows() / count.max(1);
    let (format, x_stride) = (weight.format, x.strides[0]);
    let shape = Shape { rows, slots, count, outputs, inputs, x: x.dtype, format, x_stride, rest: None };
    let per_slot = x.shape[1] != inputs;
    let takes = match form {
        Form::Plain => true,
        Form::Gated(_) => shape.multiplies(device),
        // The rows of all experts must be aligned to units in the same way.
        Form::Summed => {
            let whole = shape.covered_outputs() == outputs && per_slot | (slots == 1);
            shape.multiplies(device) && rows == 1 && slots <= MAX_SUMMED && whole
        }
    };
    if !takes {
        return Ok(None);
    }
    let summed = matches!(form, Form::Summed);
    let (division, direct) = (shape.division(form, device), shape.is_direct());
    let items = if summed { 1 } else { shape.items(division.rows) };
    // Without a bias any type will do: that which biases mostly have, so that one kernel serves both.
    let bias = call.tensor(3).or_else(|| call.tensor(7)).map_or(x.dtype, |bias| bias.dtype);
    let spec = shape.spec(&division, form, [y.dtype, bias], per_slot)?;
    let grouped = direct || call.tensor(4).is_some();
    let kernels = [spec].into_iter().chain((!grouped).then(|| group_spec(slots))).collect();
    let tables = if grouped { 0 } else { (all + count + 1) * size_of::<i32>() };
    let covered = shape.covered_outputs();
    let grid = division.grid(items, covered, device);
    let op = *op;
    Ok(Some(KernelPlan {
        kernels,
        workspace: tables,
        persistent: division.persistent(),
        batch_invariant: device.batch_invariant,
        launches: Box::new(move |frame: &Frame, functions, _| {
            let (x, experts, y) = (frame.tensor(0)?, frame.tensor(2)?, frame.result(0)?);
            let [order, starts] = [frame.optional(4), frame.optional(5)];
            let mut bounds = vec![x, experts, y];
            bounds.extend(order);
            bounds.extend(frame.optional(8));
            let extent = ExtentParams::of(rows, &bounds);
            let [function, grouping @ ..] = functions else {
                return Err(Error::internal("grouped_linear without a kernel"));
            };
            let mut tables = (MatrixParams::optional(order), starts.map_or(0, |starts| starts.address));
            let mut launches = Vec::new();
            if let [grouping] = grouping {
                let order = MatrixParams { first: frame.workspace, stride: slots as i64 };
                tables = (order, frame.workspace + (all * size_of::<i32>()) as u64);
                let params = MoeGroupParams {
                    extent,
                    experts: MatrixParams::of(experts),
                    order,
                    starts: tables.1,
                    count: i64::from(op.count),
                    first_expert: i64::from(op.first_expert),
                };
                let grid = [count.min(MAX_GRID), 1, 1];
                launches.extend(LaunchOp::kernel(grouping, grid, GROUP_THREADS, &params));
            }
            let params = GroupedLinearParams {
                extent,
                x: MatrixParams::of(x),
                weight: WeightParams::of(frame.weight(1)?),
                experts: MatrixParams::of(experts),
                bias: frame.address(3),
                other: frame.optional_weight(6).map(|other| WeightParams::of(other)).unwrap_or_default(),
                other_bias: frame.address(7),
                factors: MatrixParams::optional(frame.optional(8)),
                order: tables.0,
                starts: tables.1,
                y: MatrixParams::of(y),
                inputs: inputs as i64,
                outputs: outputs as i64,
                covered: covered as i64,
                count: i64::from(op.count),
                first_expert: i64::from(op.first_expert),
                slots: slots as i64,
                rest: 0,
                per_slot: i64::from(per_slot),
                items: items as i64,
                taken: frame.persistent,
                limit: gate.map_or(0.0, |gate| gate.limit),
                up_offset: gate.map_or(0.0, |gate| gate.up_offset),
            };
            launches.extend(LaunchOp::kernel(function, grid, division.threads, &params));
            Ok(launches)
        }),
    }))
}
