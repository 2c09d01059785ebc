//! Runs the body of a region op by op, and compares the fused op with its body.

use super::{
    Report, Status,
    call::{self, CallRun, Placed, Stop, place_operands},
    image::{Content, Image, Scratch},
    judge, run_calls,
};
use crate::{
    case::{CallCase, Case, Element, Layout},
    gate::Gate,
    oracle::float,
};
use dsrun_core::{
    Size,
    checked::CheckedPlan,
    collective::Comm,
    device::Device,
    kernels::{Arguments, CallDesc, OperandDesc},
    op::{Op, OperandType},
    program::ValueId,
    region::Region,
};
use std::sync::Arc;

/// Runs the body of the case's region op by op, and compares the results with those the case expects of the region. If the
/// device runs the fused region too, the difference of the two results may be at most twice the limit of each.
///
/// Rank `i` runs on `devices[i]`.
pub fn run(case: &Case, devices: &[Arc<dyn Device>]) -> Report {
    let body = |call: &CallCase, device: &Arc<dyn Device>, comm: Option<Arc<dyn Comm>>| match &call.op {
        Op::Region(region) => run_body(call, region, device, comm.as_ref()),
        _ => Err(Stop::Failed("the op of the case is not a region".into())),
    };
    let lowered = run_calls(case, devices, &body);
    let fused = run_calls(case, devices, &call::run);
    let difference = match (&lowered, &fused) {
        (Ok(lowered), Ok(fused)) => {
            let runs = case.calls.iter().zip(lowered.iter().zip(fused));
            runs.flat_map(|(call, (lowered, fused))| compare(call, lowered, fused)).collect()
        }
        _ => Vec::new(),
    };
    let mut report = judge(case, lowered);
    report.id.push_str("/lowered");
    if !difference.is_empty() {
        report.status = match report.status {
            Status::Failed(failures) => Status::Failed(failures.into_iter().chain(difference).collect()),
            _ => Status::Failed(difference),
        };
    }
    report
}

fn compare(case: &CallCase, lowered: &CallRun, fused: &CallRun) -> Vec<String> {
    let mut failures = Vec::new();
    for (index, expected) in case.results.iter().enumerate() {
        let dtype = lowered.dtypes.get(index).copied();
        let (Some(dtype), Some(a), Some(b)) = (dtype, lowered.results.get(index), fused.results.get(index))
        else {
            continue;
        };
        for (at, element) in expected.elements.iter().enumerate() {
            let Element::Real(real) = element else { continue };
            let (a, b) = (float::value(dtype, a[at]), float::value(dtype, b[at]));
            let limit = 2.0 * Gate::limit(expected.gate, dtype, *real);
            let difference = (a - b).abs();
            if real.value.is_finite() && (difference.is_nan() || difference > limit) {
                failures.push(format!(
                    "result {index}, element {at}: the region gives {b:e}, its body {a:e} (± {limit:.1e})"
                ));
                break;
            }
        }
    }
    failures
}

fn run_body(
    case: &CallCase,
    region: &Region,
    device: &Arc<dyn Device>,
    comm: Option<&Arc<dyn Comm>>,
) -> Result<CallRun, Stop> {
    let device = &**device;
    let mut stream = device.stream()?;
    let stream = &mut *stream;
    let mut placed = place_operands(case, device, stream)?;
    // The place of each value of the body: an updated operand keeps its place.
    let mut places: Vec<usize> = (0..placed.len()).collect();
    // The values of the body whose first size is that of a bounded operand have the extent of the first result.
    let rows = case.results.first().map(|expected| expected.layout).unwrap_or_default();
    let rows = Layout { gap: 0, ..rows };
    let bounded = bounded_values(region, &placed);
    for call in region.calls() {
        let place = |id: ValueId| places[id.index()];
        let of = |id: &Option<ValueId>| id.map_or(&Placed::Absent, |id| &placed[place(id)]);
        let operands: Vec<&Placed> = call.operands.iter().map(of).collect();
        let mut desc = CallDesc {
            op: call.op.clone(),
            operands: operands.iter().map(|placed| placed.desc()).collect(),
            results: Vec::new(),
            comm: comm.filter(|_| call.op.mesh_axis().is_some()).cloned(),
        };
        let (mut made, mut bindings, mut result_places) = (Vec::new(), Vec::new(), Vec::new());
        for (index, inferred) in call.op.infer(&desc.operand_types())?.into_iter().enumerate() {
            let updated = call.op.updates(index).and_then(|operand| call.operands[operand]).map(place);
            if let Some((place, image)) = updated.and_then(|place| Some((place, placed[place].image()?))) {
                desc.results.push(image.desc.clone());
                bindings.push(image.binding()?);
                result_places.push(place);
                continue;
            }
            let shape = inferred.resolve(&|_| None)?;
            let has_extent = call.results.get(index).is_none_or(|id| bounded.get(id.index()) != Some(&false));
            let layout = if has_extent { rows } else { Layout::default() };
            let image = Image::of_result(device, inferred.dtype, &shape, layout)?;
            image.upload(stream, Content::Poisoned)?;
            desc.results.push(image.desc.clone());
            bindings.push(image.binding()?);
            result_places.push(placed.len() + made.len());
            made.push(Placed::Tensor(image));
        }
        let plan = CheckedPlan::new(device, desc.validate()?)?;
        let scratch = Scratch::new(device, plan.workspace_bytes())?;
        let bound = plan.bind(&Arguments {
            operands: operands.iter().map(|placed| placed.argument()).collect::<Result<_, _>>()?,
            results: bindings,
            workspace: Some(scratch.slice()?),
        })?;
        bound.enqueue(stream)?;
        stream.synchronize("the body of a region", super::TIMEOUT)?;
        placed.extend(made);
        places.extend(result_places);
    }
    let mut run = CallRun::default();
    for (index, (id, expected)) in region.results().iter().zip(&case.results).enumerate() {
        let Some(image) = placed[places[id.index()]].image() else { continue };
        let bytes = image.download(stream)?;
        let (found, before) = (image.elements(&bytes), image.elements(&image.bytes(Content::Poisoned)));
        let verdict = call::judge(&image.desc, expected, &found, &before, device)?;
        run.failures.extend(verdict.failures.iter().map(|failure| format!("result {index}: {failure}")));
        run.verdicts.push((format!("result {index}"), verdict));
        run.dtypes.push(image.desc.dtype);
        run.results.push(found);
    }
    Ok(run)
}

/// Whether each value of a region's body has as many rows as a bounded operand; empty if operands do not fit together by that, and
/// nothing is known.
fn bounded_values(region: &Region, operands: &[Placed]) -> Vec<bool> {
    let one = |operand: &Placed| match operand.desc()? {
        OperandDesc::Weight(weight) => Some(OperandType::Weight(weight)),
        OperandDesc::Tensor(desc) => {
            let mut tensor = desc.tensor_type();
            if let (true, Some(first)) = (desc.bounded, tensor.shape.first_mut()) {
                *first = Size::bounded("rows");
            }
            Some(OperandType::Tensor(tensor))
        }
    };
    let types = region.value_types(&operands.iter().map(one).collect::<Vec<_>>()).unwrap_or_default();
    let is_bounded = |value: &Option<OperandType>| match value {
        Some(OperandType::Tensor(tensor)) => matches!(tensor.shape.first(), Some(Size::Bounded(_))),
        _ => false,
    };
    types.iter().map(is_bounded).collect()
}
