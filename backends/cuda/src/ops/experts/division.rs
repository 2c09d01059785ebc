//! How the work of the linear layers of experts is divided: the kernel of a call, its items, tiles and buffers.
//!
//! | kernel | operands |
//! |---|---|
//! | `grouped_linear_dense` | activations and dense weights of one type, f16 or bf16, on tensor cores; few assignments per expert |
//! | `grouped_linear_packed` | activations of f16 or bf16, packed weights, on tensor cores; few assignments per expert |
//! | `grouped_linear_wgmma` | the same, sm_90; some tens of assignments per expert |
//! | `grouped_linear_tiles` | as the first two; many assignments per expert |
//! | `grouped_linear_plain` | any |

use crate::{
    arch::DeviceSpec,
    driver::{kernel_spec::KernelSpec, launch::MAX_GRID},
    ops::{
        type_name,
        weight::{Offset, Packing, UNIT, format_name},
    },
};
use dsrun_core::{
    DType, Result, WeightFormat,
    op::{GatedActivation, Nonlinearity},
};
use std::fmt::Display;

/// Warps of a block on tensor cores, and outputs of a part of its tiles.
const WARPS: usize = 8;
const PART: usize = 16;
/// Parts of a tile of packed weights. Two share the loads of activations, which take as long as those of one.
const PACKED_PARTS: usize = 2;
/// Assignments of a tensor core tile, and the maximum number of tiles of an item.
const TILE_ROWS: usize = 8;
const MAX_TILES: usize = 2;
/// For many assignments: weight rows of a tile, the minimum and maximum number of assignments, and buffers of 64 inputs.
const LARGE_TILE: usize = 128;
const LARGE_TILE_ROWS: [usize; 2] = [64, 128];
const STAGES: usize = 3;
/// Bytes of a row of a buffer.
const STAGE_ROW: usize = 128;
/// For some tens of assignments by wgmma: the assignments of an item, weight rows of a product, of which a tile has up to two, and
/// buffers.
const WGMMA_ROWS: usize = 32;
const WGMMA_TILE: usize = 128;
const WGMMA_STAGES: usize = 3;
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
    /// Activations and the packed weights of `products` products are staged in shared memory. Two share the activations: those of a gate
    /// and up, or of neighbouring rows.
    Wgmma {
        products: usize,
    },
    /// Activations and weights are both staged in shared memory, as elements.
    Tiled,
}

impl Division {
    /// Bytes of dynamic shared memory.
    fn shared(&self, shape: &Shape) -> usize {
        match self.kind {
            Kind::Plain => 0,
            Kind::Streamed { stages, .. } => {
                WARPS * stages * shape.stage() + shape.sums(self.rows / TILE_ROWS)
            }
            Kind::Wgmma { products } => {
                let activations = self.rows * shape.step() * 2;
                let stage = activations + products * WGMMA_TILE / PART * shape.part_bytes();
                WGMMA_STAGES * stage.next_multiple_of(1024)
            }
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
    fn defines(&self, shape: &Shape) -> Vec<(&'static str, String)> {
        let mut defines = match self.kind {
            Kind::Plain => return Vec::new(),
            Kind::Streamed { split, stages, blocks } => vec![
                ("BLOCKS", blocks.to_string()),
                ("PARTS", shape.parts().to_string()),
                ("TILES", (self.rows / TILE_ROWS).to_string()),
                ("SPLIT", split.to_string()),
                ("STAGES", stages.to_string()),
            ],
            Kind::Wgmma { products } => {
                vec![("STAGES", WGMMA_STAGES.to_string()), ("PRODUCTS", products.to_string())]
            }
            Kind::Tiled => vec![("STAGES", STAGES.to_string())],
        };
        // Placeholder: kernels with dense weights ignore these constants.
        let dense = Packing { bits: 8, group: 0, offset: Offset::Fixed(128), scale: DType::F32 };
        defines.extend(shape.packing().unwrap_or(dense).defines());
        defines
    }
}

impl Shape {
    fn packing(&self) -> Option<Packing> {
        Packing::of(self.format)
    }

    /// Whether a tensor core kernel supports these activations and weights.
    pub(super) fn multiplies(&self, device: &DeviceSpec) -> bool {
        let half = matches!(self.x, DType::F16 | DType::BF16);
        let weight = match self.packing() {
            // With 4 bits, a lane's 16 bytes are 32 columns, which must be of one group.
            Some(packing) => packing.bits == 8 || packing.group == 0 || packing.group >= 32,
            None => self.format == WeightFormat::Dense(self.x),
        };
        // On tensor cores, the order of a sum depends on the kernel, which depends on the number of rows.
        device.has_half_mma()
            && !device.batch_invariant
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
    pub(super) fn is_direct(&self) -> bool {
        self.rest.is_none() && is_direct(self.rows, self.slots, self.count)
    }

    /// Columns of a step of a warp on tensor cores.
    fn step(&self) -> usize {
        self.packing().map_or(64, Packing::span)
    }

    /// Parts of a tile of a warp.
    fn parts(&self) -> usize {
        if self.packing().is_some() { PACKED_PARTS } else { 1 }
    }

    /// The maximum number of assignments of an expert with which a lane's weights are multiplied by `mma.sync`.
    fn few_rows(&self, device: &DeviceSpec) -> usize {
        match self.packing() {
            // To unpack 4 bits takes so long that it should happen once for all assignments.
            Some(packing) if device.has_wgmma() && packing.bits == 4 => TILE_ROWS,
            _ => TILE_ROWS * MAX_TILES,
        }
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
            let wanted = if device.batch_invariant { PLAIN_ROWS } else { wanted };
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
        let few = self.few_rows(device);
        if self.packing().is_some() && device.has_wgmma() && (few + 1..=4 * WGMMA_ROWS).contains(&wanted) {
            let tiles = self.items(WGMMA_ROWS) * self.covered_outputs().div_ceil(2 * WGMMA_TILE);
            let products = if gated || tiles >= device.sm_count { 2 } else { 1 };
            return Division {
                entry: "grouped_linear_wgmma",
                unit: "experts/packed_wgmma.cu",
                rows: WGMMA_ROWS,
                threads: WARPS * 32,
                outputs: if gated { WGMMA_TILE } else { products * WGMMA_TILE },
                kind: Kind::Wgmma { products },
            };
        }
        if wanted > few {
            let [small, large] = LARGE_TILE_ROWS;
            return Division {
                entry: "grouped_linear_tiles",
                unit: "experts/tiles.cu",
                rows: if wanted <= 2 * small { small } else { large },
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
        let tile = self.parts() * if gated { PART / 2 } else { PART };
        let outputs = |split: usize| WARPS / split * tile;
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
        let common: [(_, &dyn Display); 8] = [
            ("X", &type_name(self.x)?),
            ("Y", &type_name(y)?),
            ("BIAS", &type_name(bias)?),
            ("FORMAT", &format_name(self.format)?),
            ("DIRECT", &i32::from(self.is_direct())),
            ("HEADS", &i32::from(self.rest.is_some())),
            ("TOKENS", &division.rows),
            ("X_VECTORS", &i32::from(vectors)),
        ];
        let mut spec =
            KernelSpec::new(division.unit, division.entry, common).with_shared(division.shared(self));
        if division.kind == Kind::Plain {
            // The rest are parameters.
            return Ok(spec);
        }
        let own: [(_, &dyn Display); 8] = [
            ("SLOTS", &self.slots),
            ("PER_SLOT", &i32::from(per_slot)),
            ("REST", &self.rest.unwrap_or(0)),
            ("HALF", &i32::from(self.x == DType::F16)),
            ("WHOLE", &i32::from(self.inputs.is_multiple_of(self.step()))),
            ("GATED", &i32::from(gate.is_some())),
            ("SUMMED", &i32::from(matches!(form, Form::Summed))),
            ("FUNCTION", &(gate.map_or(Nonlinearity::Relu, |gate| gate.function) as u32)),
        ];
        spec.defines.extend(own.map(|(name, value)| (name, value.to_string())));
        spec.defines.extend(division.defines(self));
        Ok(spec)
    }

    /// Bytes of a step of a ring.
    fn stage(&self) -> usize {
        self.parts() * self.part_bytes()
    }

    /// Bytes of a step of a part.
    fn part_bytes(&self) -> usize {
        // 16 rows by 128 bytes if they are dense, else by 64 bytes, with the scales and offsets of their groups.
        let packed = |packing: Packing| {
            let groups = match packing.group {
                0 => 1,
                group => (packing.span() / group).max(1),
            };
            PART * 64 + 2 * groups * packing.line()
        };
        self.packing().map_or(PART * 128, packed)
    }

    /// Bytes of the sums of the warps of a block, for two tiles each of `tiles` times [`TILE_ROWS`] assignments.
    fn sums(&self, tiles: usize) -> usize {
        2 * WARPS * tiles * TILE_ROWS * (self.parts() * PART + 1) * size_of::<f32>()
    }

    /// The stages of a ring buffer, and the number of blocks per SM.
    fn ring(&self, tiles: usize, device: &DeviceSpec) -> (usize, usize) {
        // Stages beside those in flight: one that is read and, since to unpack it takes long, one that has arrived meanwhile.
        let held = if self.packing().is_some() { 2 } else { 1 };
        let stages = |blocks: usize| {
            let room = (device.shared_memory() / blocks).saturating_sub(RESERVED + self.sums(tiles));
            let wanted = held + IN_FLIGHT.div_ceil(blocks * WARPS * self.stage());
            (room / (WARPS * self.stage())).min(wanted).min(MAX_STAGES)
        };
        // A ring with a stage that is read and two that are copied.
        let fitting = (1..=MAX_BLOCKS).rev().find(|blocks| stages(*blocks) >= 3);
        let blocks = fitting.unwrap_or(1);
        (stages(blocks).max(2), blocks)
    }
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
    pub(super) fn gate(self) -> Option<GatedActivation> {
        if let Self::Gated(gate) = self { Some(gate) } else { None }
    }
}

/// Whether each assignment is an item, for `rows` tokens with `slots` slots each and `count` experts.
pub(super) fn is_direct(rows: usize, slots: usize, count: usize) -> bool {
    // With so few assignments, hardly two have the same expert.
    rows <= 1 || rows * slots * 8 <= count
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
                let device = DeviceSpec::usual(capability, sm_count);
                for form in [Form::Plain, GATED, Form::Summed] {
                    let division = shape.division(form, &device);
                    // Beside lists of assignments.
                    let shared = division.shared(&shape) + 512;
                    assert!(shared <= device.shared_memory(), "{shared} bytes for {outputs} x {inputs}");
                    match division.kind {
                        Kind::Plain => panic!("plain arithmetic where tensor cores multiply"),
                        Kind::Streamed { split, stages, blocks } => {
                            assert!(WARPS.is_multiple_of(split) && split <= inputs.div_ceil(shape.step()));
                            assert!(stages >= 2 && division.rows <= TILE_ROWS * MAX_TILES);
                            let [grid, ..] = division.grid(shape.items(division.rows), outputs, &device);
                            assert!(grid <= blocks * sm_count, "{grid} blocks");
                        }
                        Kind::Wgmma { .. } => assert!(capability == 90 && division.rows == WGMMA_ROWS),
                        Kind::Tiled => assert!(LARGE_TILE_ROWS.contains(&division.rows)),
                    }
                }
            }
        }
    }

    #[rstest]
    fn no_multiprocessor_has_one_block_where_two_fit(
        #[values("bf16", "int8", "int4g128_f16", "mxfp4", "q4_k", "q6_k")] format: &str,
        #[values(1, 2)] tiles: usize,
        #[values(80, 86, 90)] capability: u32,
    ) {
        let format = WeightFormat::from_name(format).unwrap_or(WeightFormat::Dense(DType::BF16));
        let (outputs, inputs, x) = (768, 2048, DType::BF16);
        let shape =
            Shape { rows: 8, slots: 8, count: 128, outputs, inputs, x, format, x_stride: inputs, rest: None };
        let device = DeviceSpec::usual(capability, 132);
        let (stages, blocks) = shape.ring(tiles, &device);
        let bytes = |stages: usize| WARPS * stages * shape.stage() + shape.sums(tiles) + RESERVED;
        assert!(blocks * bytes(stages) <= device.shared_memory() + blocks * RESERVED, "{blocks} of {stages}");
        assert_eq!(blocks == 2, 2 * bytes(3) <= device.shared_memory(), "{blocks} of {stages}");
    }

    #[rstest]
    #[case::many_tiles(32, 2)]
    #[case::few_tiles(4, 1)]
    fn neighbouring_rows_share_activations_if_all_multiprocessors_have_a_tile(
        #[case] count: usize,
        #[case] expected: usize,
    ) {
        let format = WeightFormat::from_name("mxfp4").unwrap();
        let (outputs, inputs, x) = (2880, 2880, DType::BF16);
        let (rows, slots) = (count * 4, 4);
        let shape = Shape { rows, slots, count, outputs, inputs, x, format, x_stride: inputs, rest: None };
        let device = DeviceSpec::usual(90, 132);
        let products = |form| match shape.division(form, &device).kind {
            Kind::Wgmma { products } => products,
            _ => 0,
        };
        assert_eq!((products(Form::Plain), products(GATED)), (expected, 2));
    }

    #[test]
    fn assignments_are_items_where_hardly_two_share_an_expert() {
        assert!(is_direct(1, 8, 8) && is_direct(2, 8, 128) && !is_direct(4, 8, 128) && !is_direct(2, 2, 8));
    }
}
