//! Linear layers over dense and quantised weights, with optional preceding norm and epilogue.

use super::{
    activation,
    launch::{CallPlan, Launch, Value},
    matrices, rope, weight,
};
use crate::driver::{adapter::DeviceSpec, shader::WeightElement};
use dsrun_core::{
    DType, Error, Result,
    kernels::{CallDesc, OperandDesc},
    op::{GateLayout, RmsNorm, Rope, RopePairing},
    region::well_known::{Heads, MlpActivation},
};

pub(super) const SOURCE: &str = include_str!("../../kernels/linear.wgsl");

/// Up to this many rows, the weight is read once per [`ROWS_AT_ONCE`] rows instead of once per 64.
pub(super) const FEW_ROWS: usize = 8;
/// Rows of a workgroup of the kernel for few rows.
pub(super) const ROWS_AT_ONCE: usize = 4;
/// Outputs of a unit, which a thread computes together.
pub(super) const UNIT: usize = 4;

/// The epilogue of a linear layer. Operands are given by their index in the call.
pub(super) enum Epilogue {
    /// Result 0 holds the outputs.
    Store,
    /// Result 0 is `residual + alpha * output`.
    Add { residual: usize, alpha: f32 },
    /// Result 0 holds the activated outputs.
    Activate(MlpActivation),
    /// Queries go to result 0, keys and values to the caches, which are results 1 and 2. The operands from `first` on are positions
    /// and frequencies, if there are ropes, the two caches, and the slots.
    Heads { heads: Heads, first: usize },
}

/// A linear layer of operand 0 with its norm and epilogue. Operands are given by their index in the call.
pub(super) struct FusedLinear {
    /// The norm of operand 0, whose weight is operand 1.
    pub(super) norm: Option<RmsNorm>,
    pub(super) weight: usize,
    pub(super) bias: Option<usize>,
    pub(super) epilogue: Epilogue,
}

pub(super) fn linear(call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    let bias = call.tensor(2).map(|_| 2);
    plan(&FusedLinear { norm: None, weight: 1, bias, epilogue: Epilogue::Store }, call, spec)
}

/// The grid of a linear layer.
pub(super) struct Tiling {
    /// Whether the kernel for few rows runs.
    pub(super) few: bool,
    /// Rows of a workgroup of that kernel.
    pub(super) at_once: usize,
    /// The first unit that a dispatch computes.
    first_unit: usize,
    /// Units that a dispatch computes.
    units: usize,
    pub(super) groups: usize,
}

impl Tiling {
    /// The grid for this number of rows and these units.
    pub(super) fn new(rows: usize, first_unit: usize, units: usize) -> Self {
        let (few, at_once) = (rows <= FEW_ROWS, rows.clamp(1, ROWS_AT_ONCE));
        let groups = if few {
            units.saturating_mul(rows.div_ceil(at_once))
        } else {
            units.div_ceil(16).saturating_mul(rows.div_ceil(64))
        };
        Self { few, at_once, first_unit, units, groups }
    }

    /// Adds the grid's parameters to a dispatch.
    pub(super) fn apply(&self, launch: Launch) -> Result<Launch> {
        let launch = launch.size("first_unit", self.first_unit)?.size("units", self.units)?;
        Ok(launch.flag("FEW", self.few).flag("MANY", !self.few))
    }
}

/// The dispatches of a fused linear layer: one per part of its weight.
pub(super) fn plan(fused: &FusedLinear, call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    let Some(Some(OperandDesc::Weight(weight_type))) = call.operands.get(fused.weight) else {
        return Err(Error::internal("linear has no weight"));
    };
    let (parts, outputs) = (weight::parts(weight_type, spec)?, weight_type.rows());
    let apart = match &fused.epilogue {
        Epilogue::Activate(MlpActivation::Gated(gated)) => gated.layout == GateLayout::Concatenated,
        Epilogue::Heads { .. } => true,
        _ => false,
    };
    if apart && parts.len() > 1 {
        let message = format!(
            "the weight takes {} bindings, and outputs of one unit may be in two of them",
            parts.len()
        );
        return Err(Error::unsupported(message));
    }
    if matrices::suits(fused, call, spec, &parts) {
        let finish = |launch: Launch| epilogue(launch.size("outputs", outputs)?, fused, call, outputs);
        return matrices::plan(fused, call, spec, &parts, |part| units(fused, part), finish);
    }
    let one = |(index, part): (usize, &weight::Layout)| part_of(fused, call, outputs, index, part);
    Ok(parts.iter().enumerate().map(one).collect::<Result<Vec<_>>>()?.into())
}

/// The units of a part of the weight.
fn units(fused: &FusedLinear, part: &weight::Layout) -> usize {
    match &fused.epilogue {
        Epilogue::Activate(MlpActivation::Gated(gated)) if gated.layout == GateLayout::Concatenated => {
            (part.rows / 2).div_ceil(UNIT / 2)
        }
        _ => part.rows.div_ceil(UNIT),
    }
}

/// The dispatch for a part of the weight.
fn part_of(
    fused: &FusedLinear,
    call: &CallDesc,
    outputs: usize,
    index: usize,
    part: &weight::Layout,
) -> Result<Launch> {
    let Some(x) = call.tensor(0) else { return Err(Error::internal("linear has no x")) };
    let &[rows, inputs] = x.shape.as_slice() else {
        return Err(Error::internal("x of linear is not a matrix"));
    };
    let tiling = Tiling::new(rows, part.first / UNIT, units(fused, part));
    let entry = if tiling.few { "linear_few" } else { "linear_many" };
    let vectors =
        inputs.is_multiple_of(4) && x.strides.first().is_some_and(|stride| stride.is_multiple_of(4));
    // A single row of 16-bit elements can be read eight elements at a time, as most weights are.
    let in_eights = tiling.few
        && tiling.at_once == 1
        && vectors
        && inputs.is_multiple_of(8)
        && x.strides.first().is_some_and(|stride| stride.is_multiple_of(8))
        && matches!(x.dtype, DType::F16 | DType::BF16)
        && part.quads() > 1;
    let mut launch = tiling.apply(Launch::new(SOURCE, entry).groups(tiling.groups))?;
    launch = if vectors { launch.vectors("x", call, 0)? } else { launch.operand("x", call, 0)? };
    if in_eights {
        launch = launch.words();
    }
    launch = launch.weight_part("w", fused.weight, index, Some(part))?;
    // Weights of 8 and 16 bits took as long or longer.
    if tiling.few && part.quads() > 4 {
        launch = launch.writable();
    }
    launch = launch.operand("bias", call, fused.bias.unwrap_or(usize::MAX))?;
    if let Some(norm) = &fused.norm {
        let width = call.tensor(1).and_then(|weight| weight.shape.first().copied());
        if width != Some(inputs) {
            return Err(Error::unsupported("the norm is of parts of a row"));
        }
        launch = if vectors {
            launch.vectors("norm_weight", call, 1)?
        } else {
            launch.operand("norm_weight", call, 1)?
        };
        launch = launch.param("eps", Value::F32(norm.eps));
        launch = launch.param("weight_offset", Value::F32(norm.weight_offset)).flag("NORM", true);
    }
    launch = launch.size("inputs", inputs)?.size("outputs", outputs)?;
    launch = launch.flag("SMALL_GROUPS", part.has_small_groups()).flag("VECTORS", vectors);
    if !tiling.few {
        return epilogue(launch, fused, call, outputs);
    }
    launch = launch.flag("X_WORDS", in_eights).flag("X_BF16", x.dtype == DType::BF16);
    launch = of_few_rows(launch, part, &tiling, rows, x.dtype);
    if inputs == 0 {
        launch = launch.groups(0);
    }
    Ok(epilogue(launch, fused, call, outputs)?.fixed())
}

/// Adds what only the kernel for few rows needs.
fn of_few_rows(
    mut launch: Launch,
    part: &weight::Layout,
    tiling: &Tiling,
    rows: usize,
    dtype: DType,
) -> Launch {
    let (at_once, quads) = (tiling.at_once, part.quads() as u32);
    let (threads, run) = match Run::of(part, tiling) {
        Some(Run { threads, units }) => (threads, units),
        None => (threads_of_few(part, at_once), 1),
    };
    let constants = [("THREADS", threads), ("ROWS", at_once as u32), ("AHEAD", vectors_ahead(part, threads))];
    launch.shader.constants.extend(constants);
    launch.shader.constants.extend([("UNITS", run as u32), ("QUADS", quads), ("EIGHTS", quads / 2)]);
    // Where a vector has one scale, it is a factor of the vector's sum.
    let integers = matches!(part.element, WeightElement::Integers { .. }) && !part.has_small_groups();
    let minima = matches!(part.element, WeightElement::Integers { minimum: true, .. });
    let summed = dtype != DType::F32;
    let factored = integers && (summed || !minima);
    launch = launch.flag("FACTORED", factored).flag("SUMMED", factored && summed);
    launch = launch.flag("MINIMA", factored && minima);
    launch = launch.flag("WHOLE", part.columns.is_multiple_of(4 * part.quads()));
    let groups = tiling.units.div_ceil(run).saturating_mul(rows.div_ceil(at_once));
    launch.groups(groups).reducing(false).flag("ONE_ROW", at_once == 1).flag("RUN", run > 1)
}

/// Several units that a workgroup of `linear_few` computes one after the other.
struct Run {
    threads: u32,
    units: usize,
}

impl Run {
    /// Workgroups of a dispatch: about as many as large GPUs run at once.
    const GROUPS: usize = 768;
    /// The most threads of a workgroup.
    const THREADS: usize = 256;

    /// Runs gain where threads have a single vector of a row, and vectors have so many elements that the inputs take longer to load.
    fn of(layout: &weight::Layout, tiling: &Tiling) -> Option<Self> {
        let vectors = layout.row_words / 4;
        let units = tiling.units.div_ceil(Self::GROUPS);
        let gains = layout.quads() > 4 && tiling.at_once == 1 && vectors <= Self::THREADS && units > 1;
        gains.then(|| Self { threads: vectors.next_multiple_of(32) as u32, units })
    }
}

/// Threads of a workgroup of the kernels for few rows, `at_once` of which it computes together: each reads at least two vectors of a
/// weight row, or one if that is as many elements. The numbers are those that were fastest on one GPU. The parts of the sums of
/// several rows take at most 10 KB of workgroup memory this way, which every adapter has.
pub(super) fn threads_of_few(layout: &weight::Layout, at_once: usize) -> u32 {
    let many_elements = layout.quads() > 4;
    let each = if many_elements { 1 } else { 2 };
    let most = if many_elements || at_once > 1 { 128 } else { 256 };
    (layout.row_words / 4).div_ceil(each).next_power_of_two().clamp(32, most) as u32
}

/// Vectors of each output for which a thread of `linear_few` asks at a time, as many as its registers hold with their inputs.
fn vectors_ahead(layout: &weight::Layout, threads: u32) -> u32 {
    let each = (layout.row_words / 4).div_ceil(threads as usize);
    each.clamp(1, if layout.quads() > 4 { 1 } else { 2 }) as u32
}

fn epilogue(launch: Launch, fused: &FusedLinear, call: &CallDesc, outputs: usize) -> Result<Launch> {
    match &fused.epilogue {
        Epilogue::Store => {
            Ok(launch.operand("residual", call, usize::MAX)?.result("y", call, 0)?.flag("STORED", true))
        }
        Epilogue::Add { residual, alpha } => {
            let launch = launch.operand("residual", call, *residual)?.param("alpha", Value::F32(*alpha));
            Ok(launch.result("y", call, 0)?.flag("STORED", true).flag("ADD", true))
        }
        Epilogue::Activate(function) => {
            let mut launch = launch.operand("residual", call, usize::MAX)?.result("y", call, 0)?;
            launch.shader.parts.insert(0, activation::SOURCE);
            let (function, limit, flag) = match function {
                MlpActivation::Plain(plain) => {
                    launch = launch.flag("STORED", true);
                    (plain.function, plain.limit, "ACTIVATED")
                }
                MlpActivation::Gated(gated) => {
                    if !outputs.is_multiple_of(2) {
                        return Err(Error::internal("the halves of a gated activation differ"));
                    }
                    launch = launch.flag("CONCATENATED", gated.layout == GateLayout::Concatenated);
                    launch = launch.param("up_offset", Value::F32(gated.up_offset));
                    (gated.function, gated.limit, "GATED_PRODUCT")
                }
            };
            Ok(launch
                .param("limit", Value::F32(limit))
                .flag(flag, true)
                .flag(activation::flag(function), true))
        }
        Epilogue::Heads { heads, first } => head_results(launch, heads, *first, call),
    }
}

/// The columns of a head, if the two ropes can run in the epilogue, which needs both elements of a pair in one unit.
fn rotated_head(ropes: &[Rope; 2], columns: [u32; 3], pairs: usize) -> Result<u32> {
    let [query, key] = ropes;
    let head = columns[0] / query.heads.max(1);
    let same = query.pairing == key.pairing && columns[1] / key.heads.max(1) == head;
    if !same || !head.is_multiple_of(UNIT as u32) || head as usize != 2 * pairs {
        return Err(Error::unsupported(
            "ropes of queries and keys differ, rotate only a part of a head, or the head size is not a multiple of 4",
        ));
    }
    Ok(head)
}

fn head_results(launch: Launch, heads: &Heads, first: usize, call: &CallDesc) -> Result<Launch> {
    if heads.columns.iter().any(|columns| !columns.is_multiple_of(UNIT as u32)) {
        return Err(Error::unsupported("the columns of queries, keys or values are not a multiple of 4"));
    }
    let [query_columns, key_columns, _] = heads.columns;
    let mut launch = launch.flag("HEADS", true);
    let mut caches = first;
    if let Some(ropes) = &heads.ropes {
        let pairs = call.tensor(first + 1).and_then(|frequencies| frequencies.shape.first().copied());
        let head = rotated_head(ropes, heads.columns, pairs.unwrap_or(0))?;
        launch = launch.operand("positions", call, first)?.operand("frequencies", call, first + 1)?;
        launch = launch.param("head", Value::U32(head));
        for (name, rope) in ["query_scale", "key_scale"].into_iter().zip(ropes) {
            launch = launch.param(name, Value::F32(rope.scale));
        }
        launch.shader.parts.insert(0, rope::SOURCE);
        launch = launch.flag("ROTATED", true).flag("ROTATED_HALVES", ropes[0].pairing == RopePairing::Halves);
        caches += 2;
    }
    launch = launch.param("query_columns", Value::U32(query_columns));
    launch = launch.param("key_columns", Value::U32(key_columns));
    launch = launch.operand("slots", call, caches + 2)?.result("query", call, 0)?;
    launch = launch.result("key_cache", call, 1)?.result("value_cache", call, 2)?;
    let names = [
        ["key_head", "key_head_stride", "key_slot_stride"],
        ["value_head", "value_head_stride", "value_slot_stride"],
    ];
    for (index, [head_name, head_stride_name, slot_stride_name]) in names.into_iter().enumerate() {
        let cache = call.results.get(1 + index);
        let Some((&[_, _, block, head], &[_, head_stride, slot_stride, _])) = cache
            .map(|cache| (cache.shape.as_slice(), cache.strides.as_slice()))
            .and_then(|(shape, strides)| {
                Some((<&[usize; 4]>::try_from(shape).ok()?, <&[usize; 4]>::try_from(strides).ok()?))
            })
        else {
            return Err(Error::internal("a cache has four dimensions"));
        };
        if index == 0 {
            launch = launch.size("block", block)?;
        }
        launch = launch.size(head_name, head)?.size(head_stride_name, head_stride)?;
        launch = launch.size(slot_stride_name, slot_stride)?;
    }
    Ok(launch)
}

#[cfg(test)]
mod tests;
