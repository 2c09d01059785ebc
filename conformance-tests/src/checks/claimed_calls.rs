//! What a device says it runs, it packs, plans and runs, also where no profile asks for it.

use super::bench::{During, Outcome, Stop, describe, ensure, floats};
use crate::{
    cases::{TABLES, formats},
    draw::{Draw, DrawnId},
    runner::{self, Status},
    subject::Subject,
};
use dsrun_core::{
    DType, TensorDesc, WeightFormat, WeightType,
    device::Device,
    kernels::{OperandDesc, WeightDesc},
    op::{Cast, Embed, GroupedLinear, Linear, Op},
};
use std::slice;

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Columns of a weight, of which every format has whole blocks.
const COLUMNS: usize = 256;

/// Random cases for an op and an element type that a device does not list.
const DRAWN: usize = 2;

fn tensor(dtype: DType, shape: &[usize]) -> Option<OperandDesc> {
    Some(OperandDesc::Tensor(TensorDesc::dense(dtype, shape)))
}

/// The ops that read a weight of any format, with activations of `from` and a result of `to`.
fn with_weight(from: DType, to: DType, format: WeightFormat) -> [(Op, Vec<Option<OperandDesc>>); 3] {
    let weight = |rows| Some(OperandDesc::Weight(WeightType { format, shape: vec![rows, COLUMNS] }));
    let grouped = GroupedLinear { dtype: to, count: 8, first_expert: 0 };
    [
        (
            Embed { dtype: to, first_row: 0, position_offset: 0 }.into(),
            vec![tensor(DType::I32, &[6]), weight(50), None, None],
        ),
        (Linear { dtype: to }.into(), vec![tensor(from, &[6, COLUMNS]), weight(48), None]),
        (
            grouped.into(),
            vec![tensor(from, &[6, COLUMNS]), weight(8 * 48), tensor(DType::I32, &[6, 2]), None, None, None],
        ),
    ]
}

/// A call that is said to run has weights that can be packed, whatever their format, and results of a type that can be planned.
pub(super) fn formats_and_results(subject: &Subject) -> Outcome {
    let device = &**subject.device();
    for from in floats(device) {
        for to in FLOATS {
            for format in formats() {
                for (op, operands) in with_weight(from, to, format) {
                    let weight = operands.iter().flatten().find_map(|operand| match operand {
                        OperandDesc::Weight(weight) => Some(weight.clone()),
                        OperandDesc::Tensor(_) => None,
                    });
                    let name = format!("{} of {from} to {to} with a weight of {format}", op.name());
                    // Plans are made for dense weights only: to make one may compile a kernel.
                    let dense = matches!(format, WeightFormat::Dense(stored) if stored == from);
                    holds(device, &name, op, operands, weight, dense)?;
                }
            }
            let cast = (Cast { dtype: to }.into(), vec![tensor(from, &[6, 64])]);
            holds(device, &format!("cast of {from} to {to}"), cast.0, cast.1, None, true)?;
        }
    }
    Ok(())
}

/// Fails if a device says that it runs a valid call, and then cannot hold its weight or plan it.
fn holds(
    device: &dyn Device,
    name: &str,
    op: Op,
    operands: Vec<Option<OperandDesc>>,
    weight: Option<WeightType>,
    plans: bool,
) -> Outcome {
    // Not every op takes every format.
    let Ok(call) = describe(op, operands, None) else { return Ok(()) };
    if !device.kernels().query(&call).during(name)?.native {
        return Ok(());
    }
    if let Some(weight_type) = weight {
        let layout = device.kernels().prepack_query(&WeightDesc { weight_type, immutable: true });
        ensure(layout.is_ok(), || format!("{name} is said to run, and its weight is refused: {layout:?}"))?;
    }
    let planned = if plans { device.kernels().plan(&call).map(drop) } else { Ok(()) };
    ensure(planned.is_ok(), || format!("{name} is said to run, and not planned: {planned:?}"))
}

/// Ops that a device says it runs on element types that it does not list give right results: the suite tests only those it lists.
pub(super) fn unlisted_types(subject: &Subject) -> Outcome {
    let device = subject.device();
    let listed = floats(&**device);
    for table in TABLES {
        let Some(drawn) = table.drawn else { continue };
        for dtype in
            FLOATS.into_iter().filter(|dtype| table.dtypes.contains(dtype) && !listed.contains(dtype))
        {
            for index in 0..DRAWN {
                let id = DrawnId::numbered(table.op, dtype, 1, index);
                let case = drawn(dtype, &mut Draw::new(id));
                if case.calls.len() > 1 {
                    break;
                }
                if let Status::Failed(failures) = runner::run(&case, slice::from_ref(device)).status {
                    let first = failures.first().cloned().unwrap_or_default();
                    return Err(Stop::Failed(format!(
                        "{} is said to run, though the device does not list {dtype}: {first}",
                        case.id
                    )));
                }
            }
        }
    }
    Ok(())
}
