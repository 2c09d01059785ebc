//! The product of two tensors: `linear/matmul.cu`.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, MAX_GRID, Parameters},
    },
    ops::{KernelPlan, THREADS, frame::Bound, type_name, type_of},
};
use dsrun_core::{Result, kernels::CallDesc, op::Matmul};
use std::fmt::Display;

pub(in crate::ops) fn matmul(op: &Matmul, call: &CallDesc) -> Result<KernelPlan> {
    let transposed = op.transpose_b;
    let defines: [(_, &dyn Display); 3] =
        [("X", &type_of(call, 0)?), ("Y", &type_name(op.dtype)?), ("TRANSPOSED", &i32::from(transposed))];
    let spec = KernelSpec::new("linear/matmul.cu", "matmul", defines);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (a, b, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let [groups, rows, columns] = [0, 1, 2].map(|dimension| y.size(dimension));
        let tensor = |parameters: Parameters, tensor: &Bound| {
            parameters.address(tensor.address).size(tensor.stride(0)).size(tensor.stride(1))
        };
        let parameters =
            Parameters::default().extent(groups, &[a, b, y]).size(rows).size(columns).size(a.size(2));
        let parameters = tensor(tensor(tensor(parameters, a), b), y);
        let grid = [columns.div_ceil(64), rows.div_ceil(64).min(MAX_GRID), groups.min(MAX_GRID)];
        Ok(LaunchOp::kernel(function, grid, THREADS, parameters))
    }))
}
