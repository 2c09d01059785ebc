//! Grouped linear layers, in which each row selects a matrix of the weight: by expert, or by head.

use super::{
    launch::{CallPlan, Launch, Value},
    linear::{UNIT, threads_of_few},
    weight,
};
use crate::driver::adapter::DeviceSpec;
use dsrun_core::{
    Error, Result,
    kernels::{CallDesc, OperandDesc},
    op::{GroupedLinear, HeadLinear},
};

const SOURCE: &str = include_str!("../../kernels/experts.wgsl");

/// Up to this average number of rows per matrix, rows are multiplied one by one.
const FEW_ROWS: usize = 4;
/// Rows of a tile of the kernel for many rows.
const TILE: usize = 64;

/// The sizes of both ops.
struct Sizes {
    rows: usize,
    slots: usize,
    /// Matrices of the weight.
    matrices: usize,
    inputs: usize,
    outputs: usize,
    /// Columns from the inputs of a slot to those of the next; 0 if all slots of a row share them.
    x_slot: usize,
    /// Columns from the outputs of a slot to those of the next.
    y_slot: usize,
}

impl Sizes {
    /// The sizes of a call of an op with this number of matrices, a weight as operand 1, and this number of slots.
    fn new(call: &CallDesc, matrices: usize, slots: usize) -> Result<Self> {
        let (Some(x), Some(y), Some(Some(OperandDesc::Weight(weight)))) =
            (call.tensor(0), call.results.first(), call.operands.get(1))
        else {
            return Err(Error::internal("x, weight or y is missing"));
        };
        let (&[rows, x_width], &[_, y_width]) = (x.shape.as_slice(), y.shape.as_slice()) else {
            return Err(Error::internal("x or y is not a matrix"));
        };
        let inputs = weight.columns();
        let (x_slot, y_slot) = (x_width / slots.max(1), y_width / slots.max(1));
        let outputs = weight.rows() / matrices.max(1);
        Ok(Self { rows, slots, matrices, inputs, outputs, x_slot, y_slot })
    }

    /// A dispatch of an entry point with the common operands and sizes.
    fn launch(&self, entry: &'static str, call: &CallDesc, vectors: bool) -> Result<Launch> {
        let launch = Launch::new(SOURCE, entry);
        let launch = if vectors { launch.vectors("x", call, 0)? } else { launch.operand("x", call, 0)? };
        let launch = launch.result("y", call, 0)?.size("slots", self.slots)?;
        let launch = launch.size("inputs", self.inputs)?.size("outputs", self.outputs)?;
        launch.size("x_slot", self.x_slot)?.size("y_slot", self.y_slot)
    }

    /// The dispatches of the products, one per part of the weight. `tiles` is the number of row tiles of all matrices, if the
    /// kernel for many rows can run; `finish` adds the operands that are specific to an op.
    fn products(
        &self,
        call: &CallDesc,
        spec: &DeviceSpec,
        tiles: Option<usize>,
        finish: impl Fn(Launch) -> Result<Launch>,
    ) -> Result<Vec<Launch>> {
        let Some(Some(OperandDesc::Weight(weight))) = call.operands.get(1) else {
            return Err(Error::internal("the weight is missing"));
        };
        let stride = call.tensor(0).and_then(|x| x.strides.first().copied()).unwrap_or(1);
        let vectors = [self.inputs, self.x_slot, stride].iter().all(|size| size.is_multiple_of(4));
        let units = self.outputs.div_ceil(UNIT);
        let (entry, groups) = match tiles {
            Some(tiles) => ("experts_many", units.div_ceil(16).saturating_mul(tiles)),
            None => ("experts_few", units.saturating_mul(self.rows.saturating_mul(self.slots))),
        };
        let one = |(index, part): (usize, &weight::Layout)| {
            let mut launch = self.launch(entry, call, vectors)?.groups(groups);
            if tiles.is_none() {
                launch = launch.reducing(false);
                launch.shader.constants.push(("THREADS", threads_of_few(part, 1)));
            }
            let launch = launch.weight_part("w", 1, index, Some(part))?.size("units", units)?;
            let launch = launch.flag("VECTORS", vectors);
            finish(launch.flag("FEW", tiles.is_none()).flag("MANY", tiles.is_some()))
        };
        weight::parts(weight, spec)?.iter().enumerate().map(one).collect()
    }
}

pub(super) fn grouped_linear(op: &GroupedLinear, call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    let slots = call.tensor(2).and_then(|experts| experts.shape.get(1).copied()).unwrap_or(0);
    let mut sizes = Sizes::new(call, op.count as usize, slots)?;
    let width = call.tensor(0).and_then(|x| x.shape.get(1).copied());
    sizes.x_slot = if width == Some(sizes.inputs) { 0 } else { sizes.inputs };
    let assignments = sizes.rows.saturating_mul(slots);
    let many = call.tensor(4).is_some() && assignments > sizes.matrices.saturating_mul(FEW_ROWS);
    // Every matrix may have one tile that is not full.
    let tiles = many.then(|| assignments.div_ceil(TILE).saturating_add(sizes.matrices.min(assignments)));
    let launches = sizes.products(call, spec, tiles, |launch| {
        let mut launch = launch.operand("experts", call, 2)?.operand("bias", call, 3)?;
        if many {
            launch = launch.operand("order", call, 4)?.operand("starts", call, 5)?;
        }
        Ok(launch.param("count", Value::U32(op.count)).param("first_expert", Value::U32(op.first_expert)))
    })?;
    Ok(launches.into())
}

pub(super) fn head_linear(op: &HeadLinear, call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    let heads = op.heads as usize;
    let sizes = Sizes::new(call, heads, heads)?;
    let tiles = (sizes.rows > FEW_ROWS).then(|| sizes.rows.div_ceil(TILE).saturating_mul(heads));
    let mut launches = sizes.products(call, spec, tiles, |launch| {
        Ok(launch.operand("bias", call, usize::MAX)?.flag("HEADS", true))
    })?;
    let rest = sizes.y_slot - sizes.outputs;
    if rest > 0 {
        let elements = sizes.rows.saturating_mul(heads).saturating_mul(rest);
        let same = call.tensor(0).zip(call.results.first()).is_some_and(|(x, y)| x.dtype == y.dtype);
        let launch = sizes.launch("copy_rest", call, false)?.elements(elements);
        // The source also contains the functions of products, which need declarations of these absent operands.
        let launch = launch.operand("bias", call, usize::MAX)?.weight_part("w", 1, 0, None)?;
        launches.push(launch.flag("HEADS", true).flag("COPY", true).flag("SAME", same));
    }
    Ok(launches.into())
}
