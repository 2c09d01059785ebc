//! Activations, plain and gated.

use super::launch::{CallPlan, Launch, Value};
use dsrun_core::{
    Result,
    kernels::CallDesc,
    op::{Activation, GateLayout, GatedActivation, Nonlinearity},
};

pub(super) const SOURCE: &str = include_str!("../../kernels/activation.wgsl");

pub(super) fn flag(function: Nonlinearity) -> &'static str {
    match function {
        Nonlinearity::Relu => "RELU",
        Nonlinearity::Silu => "SILU",
        Nonlinearity::GeluErf => "GELU_ERF",
        Nonlinearity::GeluTanh => "GELU_TANH",
        Nonlinearity::QuickGelu => "QUICK_GELU",
        Nonlinearity::Tanh => "TANH",
    }
}

pub(super) fn activation(op: &Activation, call: &CallDesc) -> Result<CallPlan> {
    let launch = Launch::of_elements(SOURCE, "activation", call)?.operand("x", call, 0)?;
    let launch = launch.operand("bias", call, 1)?.param("limit", Value::F32(op.limit));
    Ok(launch.flag("PLAIN", true).flag(flag(op.function), true).into())
}

pub(super) fn gated_activation(op: &GatedActivation, call: &CallDesc) -> Result<CallPlan> {
    let launch = Launch::of_elements(SOURCE, "gated_activation", call)?.operand("gate", call, 0)?;
    let launch = launch.operand("up", call, 1)?.operand("bias", call, 2)?;
    let launch =
        launch.param("limit", Value::F32(op.limit)).flag("GATED", true).flag(flag(op.function), true);
    let launch = launch.flag("INTERLEAVED", op.layout == GateLayout::Interleaved);
    let launch = launch.param("up_offset", Value::F32(op.up_offset));
    Ok(launch.flag("SEPARATE", op.layout == GateLayout::Separate).into())
}
