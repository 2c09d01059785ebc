//! The linear layers of experts: selects the kernel of a call, and divides its work.
//!
//! | kernel | operands |
//! |---|---|
//! | `grouped_linear_dense` | activations and dense weights of one type, f16 or bf16, on tensor cores; few assignments per expert |
//! | `grouped_linear_packed` | activations of f16 or bf16, packed integers, on tensor cores; few assignments per expert |
//! | `grouped_linear_tiles` | as either of the two above; many assignments per expert |
//! | `grouped_linear_plain` | any |
//!
//! Work is divided into items: an expert with a bounded number of its assignments. Kernels find items through the tables of
//! `moe_group`, which an additional launch computes in scratch memory if they are no operands of the call. With few assignments,
//! each assignment is an item.

use super::{GROUP_THREADS, MoeGroupParams, assignments, group_spec};
use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{Pointer, declaration, header, kernel_struct},
        launch::{LaunchOp, MAX_GRID},
    },
    ops::{
        KernelPlan,
        frame::Frame,
        operand,
        params::{ExtentParams, MatrixParams, WeightParams},
        result, type_name,
        weight::{Offset, Packing, UNIT, format_name},
        weight_type,
    },
};
use dsrun_core::{
    DType, Error, Result, WeightFormat,
    kernels::CallDesc,
    op::{GatedActivation, GroupedLinear, Nonlinearity},
};
use std::fmt::Display;

kernel_struct! {
    /// Parameters of the kernels for linear layers of experts.
    pub(super) struct GroupedLinearParams {
        pub(super) extent: ExtentParams = "Extent",
        pub(super) x: MatrixParams = "Matrix<const X>",
        pub(super) weight: WeightParams = "Weight",
        pub(super) experts: MatrixParams = "Matrix<const int>",
        /// The bias of the weight's rows; may be null.
        pub(super) bias: Pointer = "const BIAS*",
        /// The weight and the bias of the up projection; absent without a gate.
        pub(super) other: WeightParams = "Weight",
        pub(super) other_bias: Pointer = "const BIAS*",
        /// The weights of slots whose products are summed; absent otherwise.
        pub(super) factors: MatrixParams = "Matrix<const float>",
        /// The tables of `moe_group`; absent if each assignment is an item.
        pub(super) order: MatrixParams = "Matrix<const int>",
        pub(super) starts: Pointer = "const int*",
        pub(super) y: MatrixParams = "Matrix<Y>",
        /// Inputs and outputs of an expert.
        pub(super) inputs: i64 = "i64",
        pub(super) outputs: i64 = "i64",
        /// Outputs, including those of neighbouring experts in the same units of packed rows.
        pub(super) covered: i64 = "i64",
        /// Experts of the device, and the index of the first.
        pub(super) count: i64 = "i64",
        pub(super) first_expert: i64 = "i64",
        /// The maximum number of items.
        pub(super) items: i64 = "i64",
        /// A counter of the units of work that are taken; 0 between launches. Only on tensor cores, with few assignments per expert.
        pub(super) taken: Pointer = "u32*",
        /// The upper limit of the gate and of the magnitude of up; 0 for none.
        pub(super) limit: f32 = "float",
        /// Added to up.
        pub(super) up_offset: f32 = "float",
    }
}

/// The generated header of the kernels' parameters.
pub(super) fn params_header() -> (String, String) {
    let text = header(
        "Parameters of the kernels for linear layers of experts.",
        &[declaration::<GroupedLinearParams>()],
    );
    ("experts/params.cuh".to_owned(), text)
}

/// Warps of a block on tensor cores, and outputs of its tiles.
const WARPS: usize = 8;
const TILE: usize = 16;
/// Assignments of a tensor core tile, and the maximum number of tiles of an item.
const TILE_ROWS: usize = 8;
const MAX_TILES: usize = 2;
/// For many assignments: weight rows of a tile, the minimum and maximum number of assignments, and buffers of 64 inputs.
const LARGE_TILE: usize = 128;
const LARGE_TILE_ROWS: [usize; 2] = [64, 128];
const STAGES: usize = 3;
/// Bytes of a row of a buffer.
const STAGE_ROW: usize = 128;
/// Warps of a block on CUDA cores, and the maximum number of assignments of its items.
const PLAIN_WARPS: usize = 4;
const PLAIN_ROWS: usize = 4;
/// The maximum number of stages of a ring buffer, and of blocks that share an SM.
const MAX_STAGES: usize = 8;
const MAX_BLOCKS: usize = 2;
/// Bytes that an SM asks memory for ahead of their use: on an H200 twice what arrives within the latency of a busy memory (1 us). With
/// more, SMs that are far from the memory fall behind.
const IN_FLIGHT: usize = 64 << 10;
/// The minimum number of steps of a warp per tile that amortises the end of a tile.
const STEPS: usize = 6;
/// Bytes of shared memory that the driver reserves per block, and those of a kernel's small tables.
const RESERVED: usize = 1024 + 512;

/// The properties of a call by which its kernel is chosen.
pub(super) struct Shape {
    pub(super) rows: usize,
    pub(super) slots: usize,
    /// Experts of the device.
    pub(super) count: usize,
    /// Outputs and inputs of an expert.
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) x: DType,
    pub(super) format: WeightFormat,
    /// Elements from row to row of the activations.
    pub(super) x_stride: usize,
    /// For `head_linear`, whose heads are experts with all rows: the elements behind the inputs of a head.
    pub(super) rest: Option<usize>,
}

/// How the work of a call is divided among blocks.
pub(super) struct Division {
    entry: &'static str,
    unit: &'static str,
    /// Assignments of an item.
    pub(super) rows: usize,
    pub(super) threads: usize,
    /// Outputs of a block.
    outputs: usize,
    pub(super) kind: Kind,
}

/// The kind of kernel, by how the warps of a block divide its work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    /// `split` warps share a tile, with ring buffers of `stages` steps; `blocks` blocks share an SM.
    Streamed {
        split: usize,
        stages: usize,
        blocks: usize,
    },
    /// Activations and weights are both staged in shared memory.
    Tiled,
}

impl Division {
    /// Bytes of dynamic shared memory.
    fn shared(&self, stage: usize) -> usize {
        match self.kind {
            Kind::Plain => 0,
            Kind::Streamed { stages, .. } => WARPS * stages * stage + sums(self.rows / TILE_ROWS),
            Kind::Tiled => STAGES * (self.rows + LARGE_TILE) * STAGE_ROW,
        }
    }

    /// Bytes of zeroed memory of a bound call: the counter of the units that are taken.
    pub(super) fn persistent(&self) -> usize {
        if matches!(self.kind, Kind::Streamed { .. }) { size_of::<u32>() } else { 0 }
    }

    /// The grid for this many items, with tiles that cover this many outputs.
    pub(super) fn grid(&self, items: usize, outputs: usize, device: &DeviceSpec) -> [usize; 3] {
        let tiles = outputs.div_ceil(self.outputs);
        match self.kind {
            Kind::Streamed { blocks, .. } => [(items * tiles).clamp(1, blocks * device.sm_count), 1, 1],
            _ => [tiles, items.min(MAX_GRID), 1],
        }
    }

    /// The constants of the kernel.
    fn defines(&self, packing: Option<Packing>) -> Vec<(&'static str, String)> {
        let mut defines = match self.kind {
            Kind::Plain => return Vec::new(),
            Kind::Streamed { split, stages, blocks } => vec![
                ("BLOCKS", blocks.to_string()),
                ("TILES", (self.rows / TILE_ROWS).to_string()),
                ("SPLIT", split.to_string()),
                ("STAGES", stages.to_string()),
            ],
            Kind::Tiled => vec![("STAGES", STAGES.to_string())],
        };
        // Placeholder: kernels with dense weights ignore these constants.
        let dense = Packing { bits: 8, group: 0, offset: Offset::Fixed(128), scale: DType::F32 };
        defines.extend(packing.unwrap_or(dense).defines());
        defines
    }
}

impl Shape {
    fn packing(&self) -> Option<Packing> {
        Packing::of(self.format)
    }

    /// Whether a tensor core kernel supports these activations and weights.
    fn multiplies(&self, device: &DeviceSpec) -> bool {
        let half = matches!(self.x, DType::F16 | DType::BF16);
        let weight = match self.packing() {
            // With 4 bits, a lane's 16 bytes are 32 columns, which must be of one group.
            Some(packing) => packing.bits == 8 || packing.group == 0 || packing.group >= 32,
            None => self.format == WeightFormat::Dense(self.x),
        };
        device.has_half_mma()
            && half
            && weight
            && self.inputs > 0
            && self.inputs.is_multiple_of(8)
            && self.x_stride.is_multiple_of(8)
            && self.rest.is_none_or(|rest| rest.is_multiple_of(8) && self.outputs > 0)
            && self.outputs.max(self.inputs) < 1 << 28
            && self.count.saturating_mul(self.outputs) < 1 << 30
    }

    /// Whether each assignment is an item, because hardly two of them share an expert.
    fn is_direct(&self) -> bool {
        self.rest.is_none() && is_direct(self.rows, self.slots, self.count)
    }

    /// Columns of a step of a warp on tensor cores.
    fn step(&self) -> usize {
        self.packing().map_or(64, Packing::span)
    }

    /// Outputs of an expert, including those of neighbouring experts in the same units of packed rows.
    pub(super) fn covered_outputs(&self) -> usize {
        let whole = self.packing().is_none() || self.outputs.is_multiple_of(UNIT);
        if whole { self.outputs } else { self.outputs + UNIT - 1 }
    }

    pub(super) fn division(&self, form: Form, device: &DeviceSpec) -> Division {
        let gated = form.gate().is_some();
        let all = self.rows * self.slots;
        let wanted = match self.rest {
            Some(_) => self.rows.max(1),
            None if self.is_direct() => 1,
            // Twice the average number of assignments per expert, so that few experts have several items.
            None => (2 * all).div_ceil(self.count).max(1),
        };
        if !self.multiplies(device) {
            let rows = wanted.next_power_of_two().min(PLAIN_ROWS);
            return Division {
                entry: "grouped_linear_plain",
                unit: "experts/plain.cu",
                rows,
                threads: PLAIN_WARPS * 32,
                outputs: PLAIN_WARPS * UNIT,
                kind: Kind::Plain,
            };
        }
        if wanted > TILE_ROWS * MAX_TILES {
            let [few, many] = LARGE_TILE_ROWS;
            return Division {
                entry: "grouped_linear_tiles",
                unit: "experts/tiles.cu",
                rows: if wanted <= 2 * few { few } else { many },
                threads: WARPS * 32,
                // Half of the rows of a gated tile belong to the up projection.
                outputs: if gated { LARGE_TILE / 2 } else { LARGE_TILE },
                kind: Kind::Tiled,
            };
        }
        let tiles = wanted.div_ceil(TILE_ROWS).next_power_of_two().min(MAX_TILES);
        let (entry, unit) = match self.packing() {
            Some(_) => ("grouped_linear_packed", "experts/packed.cu"),
            None => ("grouped_linear_dense", "experts/dense.cu"),
        };
        // Half of the rows of a gated tile belong to the up projection.
        let outputs = |split: usize| WARPS / split * if gated { TILE / 2 } else { TILE };
        let steps = self.inputs.div_ceil(self.step());
        // A summed tile is computed for all slots.
        let (items, turns) = match form {
            Form::Summed => (1, self.slots),
            _ => (self.items(tiles * TILE_ROWS), 1),
        };
        let units = |split: usize| items * self.covered_outputs().div_ceil(outputs(split));
        let mut split = 1;
        while split < WARPS
            && steps >= 2 * split
            && (steps * turns >= 2 * split * STEPS || units(split) < MAX_BLOCKS * device.sm_count)
        {
            split *= 2;
        }
        let (stages, blocks) = self.ring(tiles, device);
        let kind = Kind::Streamed { split, stages, blocks };
        Division { entry, unit, rows: tiles * TILE_ROWS, threads: WARPS * 32, outputs: outputs(split), kind }
    }

    /// The maximum number of items with this many assignments each.
    pub(super) fn items(&self, rows: usize) -> usize {
        let all = self.rows * self.slots;
        match self.rest {
            Some(_) => self.count * self.rows.div_ceil(rows),
            None if self.is_direct() => all,
            // Each expert has at most one item that is not full.
            None => all.min(all / rows + self.count),
        }
    }

    /// The kernel of a division of work, for results and biases of these types. With `per_slot` each slot has its own inputs.
    pub(super) fn spec(
        &self,
        division: &Division,
        form: Form,
        [y, bias]: [DType; 2],
        per_slot: bool,
    ) -> Result<KernelSpec> {
        let gate = form.gate();
        let vector = match self.format {
            WeightFormat::Dense(dtype) => (16 / dtype.bytes()).max(16 / self.x.bytes()),
            _ => 1,
        };
        let vectors = [self.x_stride, self.inputs, self.rest.unwrap_or(0)]
            .iter()
            .all(|size| size.is_multiple_of(vector));
        let defines: [(_, &dyn Display); 16] = [
            ("X", &type_name(self.x)?),
            ("Y", &type_name(y)?),
            ("BIAS", &type_name(bias)?),
            ("FORMAT", &format_name(self.format)?),
            ("SLOTS", &self.slots),
            ("PER_SLOT", &i32::from(per_slot)),
            ("DIRECT", &i32::from(self.is_direct())),
            ("HEADS", &i32::from(self.rest.is_some())),
            ("REST", &self.rest.unwrap_or(0)),
            ("TOKENS", &division.rows),
            ("HALF", &i32::from(self.x == DType::F16)),
            ("X_VECTORS", &i32::from(vectors)),
            ("WHOLE", &i32::from(self.inputs.is_multiple_of(self.step()))),
            ("GATED", &i32::from(gate.is_some())),
            ("SUMMED", &i32::from(matches!(form, Form::Summed))),
            ("FUNCTION", &(gate.map_or(Nonlinearity::Relu, |gate| gate.function) as u32)),
        ];
        let mut spec = KernelSpec::new(division.unit, division.entry, defines)
            .with_shared(division.shared(self.stage()));
        spec.defines.extend(division.defines(self.packing()));
        Ok(spec)
    }

    /// Bytes of a step of a ring.
    fn stage(&self) -> usize {
        // 16 rows by 128 bytes if they are dense, else by 64 bytes, with the scales and offsets of their groups.
        let packed = |packing: Packing| {
            let groups = match packing.group {
                0 => 1,
                group => (packing.span() / group).max(1),
            };
            TILE * 64 + 2 * groups * packing.line()
        };
        self.packing().map_or(TILE * 128, packed)
    }

    /// The stages of a ring buffer, and the number of blocks per SM.
    fn ring(&self, tiles: usize, device: &DeviceSpec) -> (usize, usize) {
        let stages = |blocks: usize| {
            let room = (device.shared_memory() / blocks).saturating_sub(RESERVED + sums(tiles));
            let wanted = 1 + IN_FLIGHT / (blocks * WARPS * self.stage());
            (room / (WARPS * self.stage())).min(wanted).min(MAX_STAGES)
        };
        // A ring with a stage that is read and two that are copied.
        let fitting = (1..=MAX_BLOCKS).rev().find(|blocks| stages(*blocks) >= 3);
        let blocks = fitting.unwrap_or(1);
        (stages(blocks).max(2), blocks)
    }
}

/// Bytes of the sums of the warps of a block, for two tiles each.
fn sums(tiles: usize) -> usize {
    2 * WARPS * tiles * TILE_ROWS * (TILE + 1) * size_of::<f32>()
}

pub(in crate::ops) fn grouped_linear(
    op: &GroupedLinear,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<KernelPlan> {
    let plan = product(op, Form::Plain, call, device)?;
    plan.ok_or_else(|| Error::internal("no kernel for a linear layer of experts"))
}

/// The gated activation of two linear layers of experts (gate and up) as one product: the operands of the call are those of
/// `grouped_linear` for the gate, then the weight and the bias of the up projection. `None` if no kernel supports it.
pub(super) fn gated_product(
    op: &GroupedLinear,
    gate: GatedActivation,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<KernelPlan>> {
    product(op, Form::Gated(gate), call, device)
}

/// The weighted sum of the products of one token's slots: the operands of the call are those of `grouped_linear`, two absent
/// ones, and the weights. `None` if no kernel supports it.
pub(super) fn summed_product(
    op: &GroupedLinear,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<KernelPlan>> {
    product(op, Form::Summed, call, device)
}

/// How a launch combines its products.
#[derive(Clone, Copy)]
pub(super) enum Form {
    Plain,
    /// Two products are combined by a gated activation.
    Gated(GatedActivation),
    /// The products of one token's slots are added up, weighted.
    Summed,
}

impl Form {
    fn gate(self) -> Option<GatedActivation> {
        if let Self::Gated(gate) = self { Some(gate) } else { None }
    }
}

/// The maximum number of slots of a sum: one lane each.
const MAX_SUMMED: usize = 32;

/// Whether each assignment is an item, for `rows` tokens with `slots` slots each and `count` experts.
pub(super) fn is_direct(rows: usize, slots: usize, count: usize) -> bool {
    // With so few assignments, hardly two have the same expert.
    rows <= 1 || rows * slots * 8 <= count
}

fn product(
    op: &GroupedLinear,
    form: Form,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<KernelPlan>> {
    let gate = form.gate();
    let (x, weight, y) = (operand(call, 0)?, weight_type(call, 1)?, result(call, 0)?);
    let [rows, slots] = operand(call, 2)?.shape[..] else {
        return Err(Error::internal("experts are not a table"));
    };
    let all = assignments(rows, slots)?;
    let (count, inputs) = (op.count as usize, weight.columns());
    let outputs = weight.rows() / count.max(1);
    let (format, x_stride) = (weight.format, x.strides[0]);
    let shape = Shape { rows, slots, count, outputs, inputs, x: x.dtype, format, x_stride, rest: None };
    let per_slot = x.shape[1] != inputs;
    let takes = match form {
        Form::Plain => true,
        Form::Gated(_) => shape.multiplies(device),
        // The rows of all experts must be aligned to units in the same way.
        Form::Summed => {
            let whole = shape.covered_outputs() == outputs && per_slot | (slots == 1);
            shape.multiplies(device) && rows == 1 && slots <= MAX_SUMMED && whole
        }
    };
    if !takes {
        return Ok(None);
    }
    let summed = matches!(form, Form::Summed);
    let (division, direct) = (shape.division(form, device), shape.is_direct());
    let items = if summed { 1 } else { shape.items(division.rows) };
    let bias = call.tensor(3).or_else(|| call.tensor(7)).map_or(DType::F32, |bias| bias.dtype);
    let spec = shape.spec(&division, form, [y.dtype, bias], per_slot)?;
    let grouped = direct || call.tensor(4).is_some();
    let kernels = [spec].into_iter().chain((!grouped).then(|| group_spec(slots))).collect();
    let tables = if grouped { 0 } else { (all + count + 1) * size_of::<i32>() };
    let covered = shape.covered_outputs();
    let grid = division.grid(items, covered, device);
    let op = *op;
    Ok(Some(KernelPlan {
        kernels,
        workspace: tables,
        persistent: division.persistent(),
        // On tensor cores, the order of a sum depends on the kernel, which depends on the number of rows.
        batch_invariant: division.kind == Kind::Plain,
        launches: Box::new(move |frame: &Frame, functions, _| {
            let (x, experts, y) = (frame.tensor(0)?, frame.tensor(2)?, frame.result(0)?);
            let [order, starts] = [frame.optional(4), frame.optional(5)];
            let mut bounds = vec![x, experts, y];
            bounds.extend(order);
            bounds.extend(frame.optional(8));
            let extent = ExtentParams::of(rows, &bounds);
            let [function, grouping @ ..] = functions else {
                return Err(Error::internal("grouped_linear without a kernel"));
            };
            let mut tables = (MatrixParams::optional(order), starts.map_or(0, |starts| starts.address));
            let mut launches = Vec::new();
            if let [grouping] = grouping {
                let order = MatrixParams { first: frame.workspace, stride: slots as i64 };
                tables = (order, frame.workspace + (all * size_of::<i32>()) as u64);
                let params = MoeGroupParams {
                    extent,
                    experts: MatrixParams::of(experts),
                    order,
                    starts: tables.1,
                    count: i64::from(op.count),
                    first_expert: i64::from(op.first_expert),
                };
                let grid = [count.min(MAX_GRID), 1, 1];
                launches.extend(LaunchOp::kernel(grouping, grid, GROUP_THREADS, &params));
            }
            let params = GroupedLinearParams {
                extent,
                x: MatrixParams::of(x),
                weight: WeightParams::of(frame.weight(1)?),
                experts: MatrixParams::of(experts),
                bias: frame.address(3),
                other: frame.optional_weight(6).map(|other| WeightParams::of(other)).unwrap_or_default(),
                other_bias: frame.address(7),
                factors: MatrixParams::optional(frame.optional(8)),
                order: tables.0,
                starts: tables.1,
                y: MatrixParams::of(y),
                inputs: inputs as i64,
                outputs: outputs as i64,
                covered: covered as i64,
                count: i64::from(op.count),
                first_expert: i64::from(op.first_expert),
                items: items as i64,
                taken: frame.persistent,
                limit: gate.map_or(0.0, |gate| gate.limit),
                up_offset: gate.map_or(0.0, |gate| gate.up_offset),
            };
            launches.extend(LaunchOp::kernel(function, grid, division.threads, &params));
            Ok(launches)
        }),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::op::GateLayout;
    use rstest::rstest;

    const GATED: Form = Form::Gated(GatedActivation {
        function: Nonlinearity::Silu,
        layout: GateLayout::Separate,
        limit: 0.0,
        up_offset: 0.0,
    });

    #[rstest]
    #[case::one_token(1, "bf16")]
    #[case::few_tokens(8, "bf16")]
    #[case::two_tiles(128, "bf16")]
    #[case::many_tokens(512, "bf16")]
    #[case::one_token_of_integers(1, "q4_k")]
    #[case::two_tiles_of_integers(128, "mxfp4")]
    #[case::many_tokens_of_integers(4096, "int4g128_f16")]
    fn work_is_divided_into_what_fits(#[case] rows: usize, #[case] format: &str) {
        let format = WeightFormat::from_name(format).unwrap_or(WeightFormat::Dense(DType::BF16));
        for (outputs, inputs) in [(768, 2048), (2048, 768), (14_336, 4096), (16, 256)] {
            let x = DType::BF16;
            let shape = Shape {
                rows,
                slots: 8,
                count: 128,
                outputs,
                inputs,
                x,
                format,
                x_stride: inputs,
                rest: None,
            };
            for (capability, sm_count) in [(80, 108), (86, 84), (90, 132), (120, 170)] {
                let device =
                    DeviceSpec { capability, sm_count, blas: true, custom_gemm: true, shared: false };
                for form in [Form::Plain, GATED, Form::Summed] {
                    let division = shape.division(form, &device);
                    // Beside lists of assignments.
                    let shared = division.shared(shape.stage()) + 512;
                    assert!(shared <= device.shared_memory(), "{shared} bytes for {outputs} x {inputs}");
                    match division.kind {
                        Kind::Plain => panic!("plain arithmetic where tensor cores multiply"),
                        Kind::Streamed { split, stages, blocks } => {
                            assert!(WARPS.is_multiple_of(split) && split <= inputs.div_ceil(shape.step()));
                            assert!(stages >= 2 && division.rows <= TILE_ROWS * MAX_TILES);
                            let [grid, ..] = division.grid(shape.items(division.rows), outputs, &device);
                            assert!(grid <= blocks * sm_count, "{grid} blocks");
                        }
                        Kind::Tiled => assert!(LARGE_TILE_ROWS.contains(&division.rows)),
                    }
                }
            }
        }
    }

    #[test]
    fn assignments_are_items_where_hardly_two_share_an_expert() {
        assert!(is_direct(1, 8, 8) && is_direct(2, 8, 128) && !is_direct(4, 8, 128) && !is_direct(2, 2, 8));
    }
}
