//! What tests of plans and of their sources need, without an adapter.

use super::launch::{CallPlan, Launch};
use crate::driver::adapter::{DeviceSpec, Matrices};
use dsrun_core::{DType, TensorDesc, kernels::OperandDesc};
use wgpu::{
    Limits,
    naga::{
        back::spv,
        front::wgsl,
        valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator},
    },
};

/// An adapter with the limits of most hardware.
pub(super) fn spec(matrices: Option<Matrices>) -> DeviceSpec {
    let limits = Limits { max_compute_workgroup_storage_size: 48 << 10, ..Limits::default() };
    DeviceSpec {
        name: "test".into(),
        f16: true,
        i16: true,
        subgroup: Some(32),
        matrices,
        timestamps: false,
        software: false,
        alignment: 256,
        part_bytes: 1 << 30,
        limits,
    }
}

/// A dense operand.
pub(super) fn tensor(dtype: DType, shape: &[usize]) -> Option<OperandDesc> {
    Some(OperandDesc::Tensor(TensorDesc::dense(dtype, shape)))
}

/// The entry points of the dispatches.
pub(super) fn entries(plan: &CallPlan) -> Vec<&'static str> {
    plan.launches.iter().map(|launch| launch.shader.entry).collect()
}

/// Compiles a shader to SPIR-V.
fn compile(launch: &Launch) -> Result<usize, String> {
    let source = launch.shader.source();
    let module = wgsl::parse_str(&source).map_err(|error| error.emit_to_string(&source))?;
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::all());
    validator.subgroup_stages(ShaderStages::all()).subgroup_operations(SubgroupOperationSet::all());
    let info = validator.validate(&module).map_err(|error| error.emit_to_string(&source))?;
    let options = spv::Options { lang_version: (1, 3), ..spv::Options::default() };
    spv::write_vec(&module, &info, &options, None).map(|words| words.len()).map_err(|error| error.to_string())
}

/// Compiles the shaders of all dispatches.
pub(super) fn check_sources(plan: &CallPlan) {
    for launch in &plan.launches {
        if let Err(error) = compile(launch) {
            panic!("{}: {error}", launch.shader.entry);
        }
    }
}
