//! Regions that run as one dispatch: linear layers with norm and epilogue. Core lowers every other region.

use super::{
    launch::CallPlan,
    linear::{self, Epilogue, FusedLinear},
};
use crate::driver::adapter::DeviceSpec;
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::{Op, RmsNorm},
    region::{
        Region,
        well_known::{self, AttentionInput, Heads, MlpActivation, Norm},
    },
};

pub(super) fn region(region: &Region, call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    match fused(region)? {
        Some(fused) => linear::plan(&fused, call, spec),
        None => {
            let ops: Vec<&str> = region.calls().iter().map(|call| call.op.name()).collect();
            Err(Error::unsupported(format!("no kernel runs a body of {}", ops.join(", "))))
        }
    }
}

/// The fused linear layer that a region is, if it is one.
fn fused(region: &Region) -> Result<Option<FusedLinear>> {
    let ops: Vec<&Op> = region.calls().iter().map(|call| &call.op).collect();
    let bias = |call: usize| {
        region.calls().get(call).is_some_and(|call| call.operands.get(2).is_some_and(Option::is_some))
    };
    let (same, fused) = match ops.as_slice() {
        [Op::Linear(product), Op::Add(add)] => {
            let bias = bias(0);
            let epilogue = Epilogue::Add { residual: 2 + usize::from(bias), alpha: add.alpha };
            let fused = FusedLinear { norm: None, weight: 1, bias: bias.then_some(2), epilogue };
            (well_known::linear_add(product.dtype, bias, *add)?, fused)
        }
        [Op::RmsNorm(norm), Op::Linear(product), after @ ..] => {
            let (norm, bias) = (*norm, bias(1));
            let normed = |epilogue| normed(norm, bias, epilogue);
            match after {
                [] => (well_known::norm_linear(norm, product.dtype, bias)?, normed(Epilogue::Store)),
                [Op::Activation(activation)] => {
                    let activation = MlpActivation::Plain(*activation);
                    let known = well_known::mlp_input(norm, product.dtype, bias, activation)?;
                    (known, normed(Epilogue::Activate(activation)))
                }
                [Op::GatedActivation(activation)] => {
                    let activation = MlpActivation::Gated(*activation);
                    let Ok(known) = well_known::mlp_input(norm, product.dtype, bias, activation) else {
                        return Ok(None);
                    };
                    (known, normed(Epilogue::Activate(activation)))
                }
                _ => {
                    let Some(heads) = heads(after) else { return Ok(None) };
                    let input = AttentionInput { norm: Norm::Rms(norm), dtype: product.dtype, bias, heads };
                    let known = well_known::attention_input(input)?;
                    (known, normed(Epilogue::Heads { heads, first: 3 + usize::from(bias) }))
                }
            }
        }
        _ => return Ok(None),
    };
    Ok((same == *region).then_some(fused))
}

/// The linear layer of a normed operand 0.
fn normed(norm: RmsNorm, bias: bool, epilogue: Epilogue) -> FusedLinear {
    FusedLinear { norm: Some(norm), weight: 2, bias: bias.then_some(3), epilogue }
}

/// Reads the split of a product into heads of queries, keys and values. Heads with norms are not supported; core lowers them.
fn heads(ops: &[&Op]) -> Option<Heads> {
    let [Op::Columns(query), Op::Columns(key), Op::Columns(value), between @ .., Op::KvWrite(_)] = ops else {
        return None;
    };
    let ropes = match between {
        [] => None,
        [Op::Rope(query), Op::Rope(key)] => Some([*query, *key]),
        _ => return None,
    };
    Some(Heads { columns: [query.count, key.count, value.count], head_norms: None, ropes })
}
