//! Products of few rows with packed integers at memory speed, with what stands in front and behind in the same launch:
//! `linear/packed.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, Parameters},
    },
    ops::{
        KernelPlan,
        frame::{Bound, Frame},
        gemm::{
            decode_gemm::{self, pitch},
            fused_linear::{Epilogue, FusedLinear},
            weight_only,
        },
        type_name,
        weight::{Offset, Packing, UNIT},
        weight_type,
    },
};
use dsrun_core::{DType, Error, Result, TensorDesc, kernels::CallDesc, op::GateLayout};
use std::{fmt::Display, sync::Arc};

/// The most rows of a launch.
const ROWS: usize = 16;
/// The most rows whose activations are multiplied as three bytes each, and those where groups are so small that sums of columns,
/// of which there are more, would be scaled more often than integers are converted. Measured on an H200.
const SPLIT_ROWS: usize = 4;
const SPLIT_ROWS_OF_SMALL_GROUPS: usize = 2;
/// Columns of a group from which on it is not small.
const LARGE_GROUP: usize = 128;
/// Bytes that an activation is split into, and inputs that share a power of two.
const DIGITS: usize = 3;
const SHARING: usize = 128;
/// Vectors of a row that a thread may keep in registers while the row is normed.
const HELD: usize = 8;
/// The most rows there are launches for, where [`mixed`] does not take them: of more, unpacking the weights and cuBLASLt are
/// faster.
const MOST_ROWS: usize = 32;
/// Bytes of shared memory that the rings of 16 warps are worth having.
const ROOM: usize = 111 << 10;
/// The most stages of a ring.
const STAGES: usize = 12;
/// Args for the sums of the tiles of a team, and floats from token to token of them.
const TURNS: usize = 4;
const SUM_ROW: usize = 20;
/// What ending a tile costs, in pieces of a warp: adding up in shared memory, or in scratch memory where blocks share a tile.
/// Measured on an H200 with 1 row.
const END: usize = 1;
const END_OF_SLICE: usize = 2;

/// What is multiplied.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    inputs: usize,
    tiles: usize,
    packing: Packing,
    /// Whether activations are bytes.
    bytes: bool,
}

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TileConfig {
    slices: usize,
    /// Inputs of a slice.
    slice: usize,
    stages: usize,
    blocks: usize,
    shared: usize,
    /// Warps of a block, and those that share a tile.
    warps: usize,
    split: usize,
}

impl Shape {
    /// Inputs of a piece: what a warp takes at a time.
    fn piece(&self) -> usize {
        2 * self.packing.span()
    }

    /// Bytes that the tensor cores are given for an activation: those it is, or is split into; 0 for halves.
    fn digits(&self) -> usize {
        let small = (1..LARGE_GROUP).contains(&self.packing.group);
        let most = if small { SPLIT_ROWS_OF_SMALL_GROUPS } else { SPLIT_ROWS };
        match self.bytes {
            true => 1,
            false if self.rows <= most => DIGITS,
            false => 0,
        }
    }

    /// Bytes from row to row of activations in shared memory, for slices of so many inputs.
    fn pitch(&self, slice: usize) -> usize {
        pitch(if self.digits() == 0 { slice * 2 } else { slice })
    }

    /// Bytes of activations in shared memory.
    fn activations(&self, slice: usize) -> usize {
        self.rows * self.digits().max(1) * self.pitch(slice)
    }

    /// Bytes of a stage of a warp's ring.
    fn stage(&self) -> usize {
        let numbers = match self.packing.group {
            0 => 0,
            group => self.piece() / group * self.packing.line(),
        };
        2048 + 2 * numbers
    }

    /// Bytes of shared memory beside the rings: activations with their scales and sums, and places for the sums of warps.
    fn beside(&self, slice: usize, warps: usize) -> usize {
        let Packing { group, offset, bits, .. } = self.packing;
        let fixed = matches!(offset, Offset::Fixed(_));
        let numbers = match self.digits() {
            0 if fixed && bits == 8 => 0,
            0 if group == 0 => self.rows,
            0 => self.rows * (slice / group.min(self.packing.span())),
            DIGITS => {
                // Tokens are taken two at a time.
                let sums = match group {
                    _ if fixed => 0,
                    0 => slice / SHARING + 1,
                    group => slice / group * 2,
                };
                self.rows.next_multiple_of(2) * (slice / SHARING + sums)
            }
            _ => 0,
        };
        self.activations(slice) + numbers * 4 + self.rows * TURNS * warps * SUM_ROW * 4
    }

    /// How to cut with so much shared memory and so many warps: what takes the fewest turns at pieces and at ends of tiles.
    fn cut(&self, device: &DeviceSpec, room: usize, warps: usize) -> Option<TileConfig> {
        let mut best: Option<(TileConfig, usize)> = None;
        // Two teams first: they are better than others that come to the same.
        let splits = [warps / 2, warps / 4, warps].into_iter().filter(|split| self.rows <= 4 * split);
        for split in splits {
            let teams = warps / split;
            let most = if self.rows == 1 { 8 } else { 16 };
            for slices in 1..=most.min(device.sm_count) {
                let slice = self.inputs.div_ceil(self.piece() * slices) * self.piece();
                if (slices - 1) * slice >= self.inputs || self.activations(slice) > room * 2 / 5 {
                    continue;
                }
                let stages = room.saturating_sub(self.beside(slice, warps)) / (warps * self.stage());
                if stages < 3 {
                    continue;
                }
                let groups = (device.sm_count / slices).max(1);
                let turns = self.tiles.div_ceil(groups * teams).max(1);
                let pieces = slice.div_ceil(self.piece() * split);
                let cost = turns * (pieces + if slices == 1 { END } else { END_OF_SLICE });
                if best.as_ref().is_some_and(|(_, before)| cost >= *before) {
                    continue;
                }
                let stages = stages.min(STAGES).min((turns * pieces + 1).max(3));
                let groups = groups.min(self.tiles).max(1);
                let shared = stages * warps * self.stage() + self.beside(slice, warps);
                // Two large blocks on one multiprocessor would share its bandwidth while another had none.
                let alone = if groups * slices * 2 <= device.sm_count { 0 } else { room / 2 + 1024 };
                let blocks = groups * slices;
                let shared = shared.max(alone);
                best = Some((TileConfig { slices, slice, stages, blocks, shared, warps, split }, cost));
            }
        }
        best.map(|(cut, _)| cut)
    }

    /// The best way to cut.
    fn best(&self, device: &DeviceSpec) -> Option<TileConfig> {
        let most = device.shared_memory();
        // Half of the registers are for 16 warps, where there is shared memory for their rings.
        let warps: &[usize] = if most > ROOM { &[16, 8] } else { &[8] };
        warps.iter().find_map(|warps| self.cut(device, most, *warps))
    }
}

/// Launches of the kernel: one for every [`ROWS`] rows, of which the last may have fewer.
pub(super) struct Packed {
    parts: Vec<Part>,
    pub(super) specs: Vec<KernelSpec>,
    pub(super) workspace: usize,
    pub(super) persistent: usize,
    tiles: usize,
}

/// One of them.
struct Part {
    first: usize,
    rows: usize,
    kernel: usize,
    cut: TileConfig,
}

/// The kernel for a chain, if it takes it; `x` are the activations, which may be in scratch memory.
pub(super) fn plan(
    chain: &FusedLinear,
    x: &TensorDesc,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<Packed>> {
    let weight = weight_type(call, chain.weight)?;
    let (rows, outputs, inputs) = (x.shape[0], weight.rows(), weight.columns());
    let Some(packing) = Packing::of(weight.format) else { return Ok(None) };
    let bytes = chain.scales.is_some();
    let most = if bytes { ROWS } else { MOST_ROWS };
    // Vectors of 16 bytes, and zeros behind the last input from a multiple of that on.
    let aligned = if bytes { 16 } else { 8 };
    let takes = device.capability >= 80
        && (1..=most).contains(&rows)
        && (bytes || matches!(x.dtype, DType::F16 | DType::BF16))
        && inputs > 0
        && inputs.is_multiple_of(aligned)
        && outputs > 0
        && outputs.max(inputs) < 1 << 28
        && x.strides[0].is_multiple_of(aligned)
        && !chain.norms_heads()
        && (bytes || rows <= ROWS || !weight_only::takes(x, weight, device));
    if !takes || !decode_gemm::takes_norm(chain, rows, inputs, call)? {
        return Ok(None);
    }
    let Some(tiles) = decode_gemm::tiles(chain, outputs, call)? else { return Ok(None) };
    // Gate and other half must begin with a unit each.
    let halves = matches!(chain.epilogue, Epilogue::Gate(op) if op.layout == GateLayout::Concatenated);
    if halves && !(outputs / 2).is_multiple_of(UNIT) {
        return Ok(None);
    }
    let (mut parts, mut specs, mut workspace, mut persistent) = (Vec::new(), Vec::<KernelSpec>::new(), 0, 0);
    for first in (0..rows).step_by(ROWS) {
        let rows = ROWS.min(rows - first);
        let shape = Shape { rows, inputs, tiles, packing, bytes };
        let Some(cut) = shape.best(device) else { return Ok(None) };
        let defines: [(_, &dyn Display); 10] = [
            ("X", if bytes { &"u8" } else { &"bf16" }),
            ("HALF", &i32::from(x.dtype == DType::F16)),
            ("DIGITS", &shape.digits()),
            ("TOKENS", &rows),
            ("SLICES", &cut.slices),
            ("SLICE", &cut.slice),
            ("X_PITCH", &shape.pitch(cut.slice)),
            ("STAGES", &cut.stages),
            ("WARPS", &cut.warps),
            ("SPLIT", &cut.split),
        ];
        let mut spec = KernelSpec::new("linear/packed.cu", "packed", defines).with_shared(cut.shared);
        if !bytes {
            spec.defines[0].1 = type_name(x.dtype)?.to_owned();
        }
        spec.defines.extend(packing.defines());
        spec.defines.extend(decode_gemm::norm_defines(chain, call)?);
        spec.defines.extend(chain.defines(call)?);
        spec.defines.push(("OWN", decode_gemm::own_vectors([rows, inputs], cut.warps, HELD).to_string()));
        if cut.slices > 1 {
            workspace = workspace.max(tiles * cut.slices * 8 * rows * 8);
            persistent = persistent.max(tiles * (8 * rows).div_ceil(32) * 4);
        }
        let kernel = specs.iter().position(|known| *known == spec).unwrap_or(specs.len());
        if kernel == specs.len() {
            specs.push(spec);
        }
        parts.push(Part { first, rows, kernel, cut });
    }
    Ok(Some(Packed { parts, specs, workspace, persistent, tiles }))
}

impl Packed {
    /// The kernel as a whole recipe, of activations that are an operand.
    pub(super) fn recipe(self, chain: FusedLinear) -> KernelPlan {
        let (kernels, workspace, persistent) = (self.specs.clone(), self.workspace, self.persistent);
        KernelPlan {
            kernels,
            workspace,
            persistent,
            batch_invariant: false,
            launches: Box::new(move |frame, functions, _| {
                self.steps(&chain, frame, frame.tensor(chain.x)?, frame.workspace, functions)
            }),
        }
    }

    pub(super) fn steps(
        &self,
        chain: &FusedLinear,
        frame: &Frame,
        x: &Bound,
        workspace: u64,
        functions: &[Arc<Function>],
    ) -> Result<Vec<LaunchOp>> {
        let weight = frame.weight(chain.weight)?;
        let mut bounds = chain.bounds(frame)?;
        bounds.push(x);
        let scales = chain.scales.map(|scales| frame.tensor(scales)).transpose()?;
        bounds.extend(scales);
        let row_bytes = x.stride(0) * x.desc.dtype.bytes();
        let mut steps = Vec::new();
        for part in &self.parts {
            let function =
                functions.get(part.kernel).ok_or_else(|| Error::internal("a recipe without a kernel"))?;
            let packed = [
                weight.address(),
                weight.scales(),
                weight.layout.row_bytes as u64,
                weight.layout.scale_bytes as u64,
            ];
            let parameters = Parameters::default()
                .extent(part.first + part.rows, &bounds)
                .size(part.first)
                .size(self.tiles)
                .size(weight.layout.columns)
                .address(x.address + (part.first * row_bytes) as u64)
                .size(x.stride(0))
                .address(scales.map_or(0, |scales| scales.address + part.first as u64 * 4))
                .words(packed)
                .size(usize::from(weight.immutable))
                .words(decode_gemm::norm_words(chain, frame))
                .address(workspace)
                .address(frame.persistent)
                .words(chain.epilogue_params_from(frame, part.first)?);
            steps.extend(LaunchOp::kernel(
                function,
                [part.cut.blocks, 1, 1],
                part.cut.warps * 32,
                parameters,
            ));
        }
        Ok(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::one_row(1, 4096, 384, 4, 128)]
    #[case::one_long_row(1, 14_336, 256, 4, 32)]
    #[case::tiny(1, 576, 36, 8, 0)]
    #[case::groups_of_16(4, 2048, 100, 8, 16)]
    #[case::eight_rows(8, 14_336, 256, 8, 128)]
    #[case::most_rows(16, 4096, 1792, 4, 64)]
    #[case::long_rows(16, 20_480, 320, 8, 32)]
    fn cuts_cover_the_inputs_and_fit(
        #[case] rows: usize,
        #[case] inputs: usize,
        #[case] tiles: usize,
        #[case] bits: usize,
        #[case] group: usize,
    ) {
        let packing = Packing { bits, group, offset: Offset::Minimum, scale: DType::F32 };
        for bytes in [false, true] {
            for (capability, sm_count) in [(80, 108), (86, 84), (90, 132), (120, 170)] {
                let device = DeviceSpec { capability, sm_count, blas: true, custom_gemm: true };
                let shape = Shape { rows, inputs, tiles, packing, bytes };
                let Some(cut) = shape.best(&device) else {
                    assert!(capability == 86 || capability == 120, "{shape:?}");
                    continue;
                };
                assert!(cut.slices * cut.slice >= inputs && (cut.slices - 1) * cut.slice < inputs, "{cut:?}");
                assert!(cut.slice.is_multiple_of(shape.piece()), "{cut:?}");
                assert!(cut.blocks <= sm_count && cut.blocks.is_multiple_of(cut.slices), "{cut:?}");
                assert!(cut.shared <= device.shared_memory(), "{cut:?}");
                assert!(cut.stages >= 3 && rows <= 4 * cut.split, "{cut:?}");
            }
        }
    }
}
