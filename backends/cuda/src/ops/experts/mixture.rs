//! The experts of a layer, from the router's logits to the weighted sum, as one region with a few launches.
//!
//! The body is `moe_route`, `moe_group`, `grouped_linear` for gate and up, `gated_activation`, `grouped_linear` and
//! `moe_combine`. On tensor cores, gate, up and activation are one launch; for one token, so are the last product and the sum.
//! `moe_group` is skipped if each assignment is an item. Values between launches are in scratch memory; values within a launch
//! are not rounded.

use super::{division::is_direct, linear, moe_combine, moe_group, moe_route};
use crate::{
    arch::DeviceSpec,
    ops::{
        KernelPlan,
        body::{BodyReader, made, value},
        bound::Bound,
        elementwise,
        frame::{Frame, Source},
        operand,
    },
};
use dsrun_core::{
    DType, Error, Result, TensorDesc,
    kernels::{CallDesc, OperandDesc},
    op::{GateLayout, GatedActivation, GroupedLinear, MoeCombine, MoeGroup, MoeRoute, Op},
    program::Call,
    region::Region,
};

/// Alignment of tensors in scratch memory.
const ALIGNMENT: usize = 256;

/// A linear layer of experts: its weight and bias.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct ExpertLinear {
    pub(in crate::ops) op: GroupedLinear,
    pub(in crate::ops) weight: usize,
    pub(in crate::ops) bias: Option<usize>,
}

/// The calls of a mixture from the router to the sum, with the value ids of their operands.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Mixture {
    pub(in crate::ops) route: MoeRoute,
    /// Logits, bias, selection bias, factors of experts, and experts chosen in advance.
    pub(in crate::ops) router: [Option<usize>; 5],
    pub(in crate::ops) group: MoeGroup,
    pub(in crate::ops) x: usize,
    pub(in crate::ops) gate: ExpertLinear,
    pub(in crate::ops) up: ExpertLinear,
    pub(in crate::ops) activation: GatedActivation,
    pub(in crate::ops) down: ExpertLinear,
    combine: MoeCombine,
    /// The weighted sum.
    pub(in crate::ops) result: usize,
}

impl Mixture {
    /// Reads a region that consists of a single mixture.
    fn of(region: &Region) -> Option<Self> {
        let mut reader = BodyReader::new(region);
        let mixture = Self::read(&mut reader)?;
        let outside = mixture.operands().all(|index| index < region.operands());
        let only = region.results().len() == 1
            && region.results().first().map(|result| result.index()) == Some(mixture.result);
        (outside && only && reader.is_done()).then_some(mixture)
    }

    /// Reads a mixture from the next calls of a body.
    pub(in crate::ops) fn read(reader: &mut BodyReader<'_>) -> Option<Self> {
        let (route, router) = reader.take(|op| if let Op::MoeRoute(op) = op { Some(*op) } else { None })?;
        let (group, grouping) = reader.take(|op| if let Op::MoeGroup(op) = op { Some(*op) } else { None })?;
        let [experts, weights] = [made(router, 0)?, made(router, 1)?];
        let tables = [made(grouping, 0)?, made(grouping, 1)?];
        let mut layer = || {
            let (op, call) =
                reader.take(|op| if let Op::GroupedLinear(op) = op { Some(*op) } else { None })?;
            let (weight, bias) = (value(call, 1)?, value(call, 3));
            let same = (op.count, op.first_expert) == (group.count, group.first_expert)
                && value(call, 2) == Some(experts)
                && [value(call, 4), value(call, 5)] == tables.map(Some);
            same.then_some((ExpertLinear { op, weight, bias }, call))
        };
        let ((gate, gating), (up, other)) = (layer()?, layer()?);
        let (activation, activated) =
            reader.take(|op| if let Op::GatedActivation(op) = op { Some(*op) } else { None })?;
        let mut layer = || {
            let (op, call) =
                reader.take(|op| if let Op::GroupedLinear(op) = op { Some(*op) } else { None })?;
            Some((ExpertLinear { op, weight: value(call, 1)?, bias: value(call, 3) }, call))
        };
        let (down, last) = layer()?;
        let (combine, combined) =
            reader.take(|op| if let Op::MoeCombine(op) = op { Some(*op) } else { None })?;
        let router_operands = std::array::from_fn(|index| value(router, index));
        let x = value(gating, 0)?;
        let flows = Self::is_chain(&[gating, other, activated, last, combined])
            && value(grouping, 0) == Some(experts)
            && value(other, 0) == Some(x)
            && value(activated, 2).is_none()
            && activation.layout == GateLayout::Separate
            && value(last, 2) == Some(experts)
            && [value(last, 4), value(last, 5)] == tables.map(Some)
            && [value(combined, 1), value(combined, 2)] == [Some(weights), Some(experts)];
        let counts = [[down.op.count, down.op.first_expert], [combine.count, combine.first_expert]];
        let alike = counts.iter().all(|counts| *counts == [group.count, group.first_expert]);
        let result = made(combined, 0)?;
        (flows && alike).then_some(Self {
            route,
            router: router_operands,
            group,
            x,
            gate,
            up,
            activation,
            down,
            combine,
            result,
        })
    }

    /// The values that it reads.
    pub(in crate::ops) fn operands(&self) -> impl Iterator<Item = usize> {
        let layers = [self.gate, self.up, self.down].into_iter();
        let layers = layers.flat_map(|layer| [Some(layer.weight), layer.bias]);
        self.router.into_iter().chain([Some(self.x)]).chain(layers).flatten()
    }

    /// Whether these calls form a chain: the activation reads gate and up, the next product the activation, and the sum that
    /// product.
    fn is_chain([gate, up, activated, down, combined]: &[&Call; 5]) -> bool {
        value(activated, 0) == made(gate, 0)
            && value(activated, 1) == made(up, 0)
            && value(down, 0) == made(activated, 0)
            && value(combined, 0) == made(down, 0)
    }
}

/// A tensor of a launch: an operand of the region, a tensor in scratch memory, or the region's result.
#[derive(Clone, Copy)]
enum Place {
    Operand(usize),
    Scratch(usize),
    Result,
}

/// One or several launches, with the places of their operands and results.
struct Step {
    plan: KernelPlan,
    /// The number of kernels.
    kernels: usize,
    operands: Vec<Option<Place>>,
    results: Vec<Place>,
}

/// Tensors in scratch memory that are passed between launches.
#[derive(Default)]
struct Scratch {
    tensors: Vec<(TensorDesc, usize)>,
    bytes: usize,
}

impl Scratch {
    fn add(&mut self, dtype: DType, shape: &[usize]) -> Result<Place> {
        let desc = TensorDesc::dense(dtype, shape).with_extent();
        let end = self.bytes.checked_add(desc.bytes()?);
        let end = end.and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
        let end = end.ok_or_else(|| Error::unsupported("the experts' activations are too large"))?;
        self.tensors.push((desc, self.bytes));
        self.bytes = end;
        Ok(Place::Scratch(self.tensors.len() - 1))
    }
}

/// The description of a call in the body.
fn inner(
    (call, scratch): (&CallDesc, &Scratch),
    op: impl Into<Op>,
    operands: &[Option<Place>],
    results: &[Place],
) -> CallDesc {
    let describe = |place: Place| match place {
        Place::Operand(index) => call.operands.get(index).cloned().flatten(),
        Place::Scratch(index) => {
            scratch.tensors.get(index).map(|(desc, _)| OperandDesc::Tensor(desc.clone()))
        }
        Place::Result => call.results.first().cloned().map(OperandDesc::Tensor),
    };
    let tensor = |place: &Place| match describe(*place) {
        Some(OperandDesc::Tensor(desc)) => Some(desc),
        _ => None,
    };
    CallDesc {
        op: op.into(),
        operands: operands.iter().map(|place| place.and_then(describe)).collect(),
        results: results.iter().filter_map(tensor).collect(),
        comm: None,
    }
}

/// The plan for the experts of a layer; `None` if the region is something else, or custom GEMM kernels are disabled.
pub(in crate::ops) fn region(
    region: &Region,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<KernelPlan>> {
    let Some(body) = Mixture::of(region).filter(|_| device.custom_gemm) else { return Ok(None) };
    let Some(logits) = body.router[0] else { return Ok(None) };
    let (rows, slots) = (operand(call, logits)?.shape[0], body.route.top_k as usize);
    let count = body.group.count as usize;
    let weight = |layer: ExpertLinear| match call.operands.get(layer.weight) {
        Some(Some(OperandDesc::Weight(weight))) => Ok(weight),
        _ => Err(Error::internal("a linear layer of experts without a weight")),
    };
    let hidden = weight(body.gate)?.rows() / count.max(1);
    let biases = [body.gate, body.up].map(|layer| layer.bias.and_then(|bias| call.tensor(bias)));
    let alike = weight(body.gate)? == weight(body.up)?
        && body.gate.op.dtype == body.up.op.dtype
        && (biases[0].is_none()
            || biases[1].is_none()
            || biases[0].map(|b| b.dtype) == biases[1].map(|b| b.dtype));
    let mut scratch = Scratch::default();
    let experts = scratch.add(DType::I32, &[rows, slots])?;
    let weights = scratch.add(DType::F32, &[rows, slots])?;
    let order = scratch.add(DType::I32, &[rows, slots])?;
    let starts = scratch.add(DType::I32, &[count + 1])?;
    let activated = scratch.add(body.gate.op.dtype, &[rows, slots * hidden])?;
    let outputs = weight(body.down)?.rows() / count.max(1);
    let product = scratch.add(body.down.op.dtype, &[rows, slots * outputs])?;
    let outer = |index: Option<usize>| index.map(Place::Operand);
    let direct = is_direct(rows, slots, count);
    let tables = if direct { [None, None] } else { [Some(order), Some(starts)] };
    let mut steps = Vec::new();
    let mut add = |plan: KernelPlan, operands: Vec<Option<Place>>, results: Vec<Place>| {
        steps.push(Step { kernels: plan.kernels.len(), plan, operands, results });
    };

    let (operands, results) = (body.router.map(outer).to_vec(), vec![experts, weights]);
    add(
        moe_route(&body.route, &inner((call, &scratch), body.route, &operands, &results))?,
        operands,
        results,
    );
    if !direct {
        let (operands, results) = (vec![Some(experts)], vec![order, starts]);
        add(
            moe_group(&body.group, &inner((call, &scratch), body.group, &operands, &results))?,
            operands,
            results,
        );
    }
    let layer = |x: Place, layer: ExpertLinear| {
        let [order, starts] = tables;
        vec![Some(x), outer(Some(layer.weight)), Some(experts), outer(layer.bias), order, starts]
    };
    let mut operands = layer(Place::Operand(body.x), body.gate);
    operands.extend([outer(Some(body.up.weight)), outer(body.up.bias)]);
    let gating = inner((call, &scratch), body.gate.op, &operands, &[activated]);
    let fused =
        if alike { linear::gated_product(&body.gate.op, body.activation, &gating, device)? } else { None };
    if let Some(plan) = fused {
        add(plan, operands, vec![activated]);
    } else {
        let mut halves = Vec::new();
        for part in [body.gate, body.up] {
            let place = scratch.add(part.op.dtype, &[rows, slots * hidden])?;
            let operands = layer(Place::Operand(body.x), part);
            let plan = linear::grouped_linear(
                &part.op,
                &inner((call, &scratch), part.op, &operands, &[place]),
                device,
            )?;
            add(plan, operands, vec![place]);
            halves.push(Some(place));
        }
        halves.push(None);
        let activating = inner((call, &scratch), body.activation, &halves, &[activated]);
        add(elementwise::gated_activation(&body.activation, &activating)?, halves, vec![activated]);
    }
    // For one token, the launch of the last product also adds up the slots.
    let mut operands = layer(activated, body.down);
    operands.extend([None, None, Some(weights)]);
    let summed = inner((call, &scratch), body.down.op, &operands, &[Place::Result]);
    if let Some(plan) = linear::summed_product(&body.down.op, &summed, device)? {
        add(plan, operands, vec![Place::Result]);
    } else {
        let (operands, results) = (layer(activated, body.down), vec![product]);
        let down = inner((call, &scratch), body.down.op, &operands, &results);
        add(linear::grouped_linear(&body.down.op, &down, device)?, operands, results);
        let (operands, results) = (vec![Some(product), Some(weights), Some(experts)], vec![Place::Result]);
        add(
            moe_combine(&body.combine, &inner((call, &scratch), body.combine, &operands, &results))?,
            operands,
            results,
        );
    }
    Ok(Some(plan_of(steps, scratch, [logits, body.x])))
}

/// The plan with the launches of all steps. `rows` are the operands whose rows are tokens; the rows of the result and of tensors
/// in scratch memory are tokens, too.
fn plan_of(mut steps: Vec<Step>, scratch: Scratch, rows: [usize; 2]) -> KernelPlan {
    let batch_invariant = steps.iter().all(|step| step.plan.batch_invariant);
    let kernels = steps.iter_mut().flat_map(|step| std::mem::take(&mut step.plan.kernels)).collect();
    let persistent = |step: &Step| step.plan.persistent.next_multiple_of(size_of::<u64>());
    KernelPlan {
        kernels,
        workspace: scratch.bytes,
        persistent: steps.iter().map(persistent).sum(),
        batch_invariant,
        launches: Box::new(move |frame, functions, context| {
            // Any of the row counts may bound the step, so they are distributed over the tensors in scratch memory, and the last
            // launch reads all of them.
            let extents =
                [frame.tensor(rows[0])?.extent, frame.tensor(rows[1])?.extent, frame.result(0)?.extent];
            let bound = |(index, (desc, offset)): (usize, &(TensorDesc, usize))| Bound {
                desc: desc.clone(),
                address: frame.workspace + *offset as u64,
                extent: extents[index % extents.len()],
            };
            let tensors: Vec<Bound> = scratch.tensors.iter().enumerate().map(bound).collect();
            let (mut launches, mut functions, mut own_memory) = (Vec::new(), functions, frame.persistent);
            for step in &steps {
                let source = |place: &Option<Place>| match (*place)? {
                    Place::Operand(index) => Some(Source::Operand(index)),
                    Place::Scratch(index) => tensors.get(index).map(Source::Scratch),
                    Place::Result => None,
                };
                let operands: Vec<_> = step.operands.iter().map(source).collect();
                let result = |place: &Place| match place {
                    Place::Scratch(index) => tensors.get(*index).cloned(),
                    _ => frame.results.first().cloned(),
                };
                let mut inner: Frame =
                    frame.within(&operands, step.results.iter().filter_map(result).collect());
                inner.persistent = own_memory;
                own_memory += persistent(step) as u64;
                let (own, rest) = functions
                    .split_at_checked(step.kernels)
                    .ok_or_else(|| Error::internal("experts with fewer functions than launches"))?;
                functions = rest;
                launches.extend((step.plan.launches)(&inner, own, context)?);
            }
            Ok(launches)
        }),
    }
}
