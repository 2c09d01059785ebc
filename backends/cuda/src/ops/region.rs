//! Fused kernels for regions. A body is read for what it does, so any that a kernel can run is native, whatever it is called;
//! every other is core's to lower.

use super::{
    Machine, Recipe,
    chain::{self, Chain},
    norm, quant,
};
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::Op,
    region::{Region, well_known},
};

pub(super) fn recipe(region: &Region, call: &CallDesc, machine: &Machine) -> Result<Recipe> {
    if let [first, second] = region.calls()
        && let (Op::Add(add), Op::RmsNorm(norm)) = (&first.op, &second.op)
        && *region == well_known::add_rms_norm(*add, *norm)?
    {
        return norm::add_rms_norm(add, norm, call);
    }
    if let Some(recipe) = quant::region(region, call)? {
        return Ok(recipe);
    }
    if let Some(chain) = Chain::parse(region) {
        return chain::recipe(chain, call, machine);
    }
    let ops: Vec<&str> = region.calls().iter().map(|call| call.op.name()).collect();
    Err(Error::unsupported(format!("CUDA has no fused kernel for a body of {}", ops.join(", "))))
}
