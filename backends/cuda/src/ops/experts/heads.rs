//! A linear layer of each head, on the kernels of experts: a head is an expert to which all rows are assigned.

use super::{
    assignments,
    division::{Form, Shape},
    params::GroupedLinearParams,
};
use crate::{
    arch::DeviceSpec,
    driver::launch::LaunchOp,
    ops::{
        KernelPlan, operand,
        params::{ExtentParams, MatrixParams, WeightParams},
        result, weight_type,
    },
};
use dsrun_core::{Result, kernels::CallDesc, op::HeadLinear};

pub(in crate::ops) fn head_linear(
    op: &HeadLinear,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<KernelPlan> {
    let (x, weight, y) = (operand(call, 0)?, weight_type(call, 1)?, result(call, 0)?);
    let (heads, rows) = ((op.heads as usize).max(1), x.shape[0]);
    assignments(rows, heads)?;
    let (inputs, outputs) = (weight.columns(), weight.rows() / heads);
    let rest = (x.shape[1] / heads).saturating_sub(inputs);
    let shape = Shape {
        rows,
        slots: heads,
        count: heads,
        outputs,
        inputs,
        x: x.dtype,
        format: weight.format,
        x_stride: x.strides[0],
        rest: Some(rest),
    };
    let division = shape.division(Form::Plain, device);
    let spec = shape.spec(&division, Form::Plain, [y.dtype, x.dtype], true)?;
    let (items, covered) = (shape.items(division.rows), shape.covered_outputs());
    // The first tile of a head copies its rest, even if there are no outputs.
    let grid = division.grid(items, covered.max(1), device);
    let batch_invariant = device.batch_invariant;
    let plan = KernelPlan::of_one(spec, move |frame, function| {
        let (x, y) = (frame.tensor(0)?, frame.result(0)?);
        let params = GroupedLinearParams {
            extent: ExtentParams::of(rows, &[x, y]),
            x: MatrixParams::of(x),
            weight: WeightParams::of(frame.weight(1)?),
            y: MatrixParams::of(y),
            inputs: inputs as i64,
            outputs: outputs as i64,
            covered: covered as i64,
            count: heads as i64,
            slots: heads as i64,
            rest: rest as i64,
            per_slot: 1,
            items: items as i64,
            taken: frame.persistent,
            ..GroupedLinearParams::default()
        };
        Ok(LaunchOp::kernel(function, grid, division.threads, &params))
    });
    Ok(KernelPlan { batch_invariant, persistent: division.persistent(), ..plan })
}

#[cfg(test)]
mod tests {
    use super::{super::division::Kind, *};
    use dsrun_core::{DType, WeightFormat};
    use rstest::rstest;

    #[rstest]
    #[case::one_row(1, 1)]
    #[case::one_tile(16, 1)]
    #[case::small_tiles(100, 2)]
    #[case::large_tiles(300, 3)]
    fn items_have_all_rows_of_every_head(#[case] rows: usize, #[case] expected: usize) {
        let device = DeviceSpec::usual(90, 132);
        let (x, format) = (DType::BF16, WeightFormat::Dense(DType::BF16));
        let (heads, rest) = (16, Some(64));
        let (outputs, inputs, x_stride) = (512, 128, heads * 192);
        let shape = Shape { rows, slots: heads, count: heads, outputs, inputs, x, format, x_stride, rest };
        let division = shape.division(Form::Plain, &device);
        assert_eq!(shape.items(division.rows), heads * expected);
        assert!(division.kind != Kind::Plain && expected * division.rows >= rows);
    }
}
