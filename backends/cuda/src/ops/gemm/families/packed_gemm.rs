//! GEMM of up to 32 rows of f16, bf16 or bytes with packed integers at memory bandwidth, with fused norm and epilogue:
//! `linear/packed.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
    },
    ops::{
        gemm::{
            families::{
                packed_wgmma,
                staged_activations::{NORMED_ROWS, norm_defines, norm_words, own_vectors, pitch, takes_norm},
            },
            family::{Description, Family},
            fused_linear::FusedLinear,
            problem::{Args, Problem, ProductPlan},
        },
        type_name,
        weight::{Offset, Packing, UNIT},
    },
};
use dsrun_core::{DType, Error, Result};
use std::fmt::Display;

/// The maximum number of rows of a launch.
const ROWS: usize = 16;
/// Up to this number of rows, a kernel has exactly as many.
const EXACT_ROWS: usize = 4;
/// Rows of a tensor core tile.
const TILE_ROWS: usize = 8;
/// The maximum number of rows whose activations are split into three bytes each. Measured on an H200.
const SPLIT_ROWS: usize = 4;
/// The same for small groups, where scaling the sums would cost more than converting the integers.
const SPLIT_ROWS_OF_SMALL_GROUPS: usize = 2;
/// Columns from which on a group is not small.
const LARGE_GROUP: usize = 128;
/// Bytes that an activation is split into.
const DIGITS: usize = 3;
/// Inputs that share a power of two when activations are split.
const SHARING: usize = 128;
/// The maximum number of vectors of a row that a thread keeps in registers for the norm.
const HELD: usize = 8;
/// The maximum number of rows, in launches of [`ROWS`]: for more, unpacking the weights for cuBLASLt is faster.
const MOST_ROWS: usize = 32;
/// Bytes of shared memory from which on a block of 16 warps has deep enough ring buffers.
const ROOM: usize = 111 << 10;
/// The maximum number of stages of a ring.
const STAGES: usize = 12;
/// Buffers in shared memory for the sums of a team's tiles.
const SUM_BUFFERS: usize = 4;
/// Floats between the sums of neighbouring rows.
const SUM_ROW: usize = 20;
/// The cost of the end of a tile, in k tiles of a warp, if sums are added in shared memory. Measured on an H200 with 1 row.
const END: usize = 1;
/// The same if blocks share a tile and add sums in scratch memory.
const END_OF_SLICE: usize = 2;

/// A product of up to [`ROWS`] rows.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Rows, [rounded up](kernel_rows).
    rows: usize,
    inputs: usize,
    tiles: usize,
    packing: Packing,
    /// Whether activations are bytes.
    bytes: bool,
}

/// The tile configuration of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TileConfig {
    /// Blocks that share the inputs of a tile (split-K).
    slices: usize,
    /// Inputs of a slice.
    slice: usize,
    stages: usize,
    blocks: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
    /// Warps of a block.
    warps: usize,
    /// Warps that share a tile: a team.
    split: usize,
}

/// Rows of the kernel for `rows` rows: whole tensor core tiles, unless there are so few that every row counts.
fn kernel_rows(rows: usize) -> usize {
    if rows <= EXACT_ROWS { rows } else { rows.next_multiple_of(TILE_ROWS) }
}

impl Shape {
    /// Inputs of a k tile, which a warp processes at a time.
    fn k_tile(&self) -> usize {
        2 * self.packing.span()
    }

    /// Bytes that an activation is split into for the tensor cores; 0 if it is multiplied as f16 or bf16.
    fn digits(&self) -> usize {
        let small = (1..LARGE_GROUP).contains(&self.packing.group);
        let most = if small { SPLIT_ROWS_OF_SMALL_GROUPS } else { SPLIT_ROWS };
        match self.bytes {
            true => 1,
            false if self.rows <= most && self.packing.offset != Offset::Floats => DIGITS,
            false => 0,
        }
    }

    /// Bytes between rows of a slice's activations in shared memory.
    fn pitch(&self, slice: usize) -> usize {
        pitch(if self.digits() == 0 { slice * 2 } else { slice })
    }

    /// Bytes of a slice's activations in shared memory.
    fn activations(&self, slice: usize) -> usize {
        self.rows * self.digits().max(1) * self.pitch(slice)
    }

    /// Bytes of a stage of a warp's ring.
    fn stage(&self) -> usize {
        let numbers = match self.packing.group {
            0 => 0,
            group => self.k_tile() / group * self.packing.line(),
        };
        2048 + 2 * numbers
    }

    /// Bytes of shared memory besides the ring buffers: activations with their scales and sums, and the sums of warps.
    fn beside(&self, slice: usize, warps: usize) -> usize {
        let Packing { group, offset, bits, .. } = self.packing;
        let fixed = matches!(offset, Offset::Fixed(_));
        let numbers = match self.digits() {
            0 if fixed && bits == 8 || offset == Offset::Floats => 0,
            0 if group == 0 => self.rows,
            0 => self.rows * (slice / group.min(self.packing.span())),
            DIGITS => {
                // Tokens are processed two at a time.
                let sums = match group {
                    _ if fixed => 0,
                    0 => slice / SHARING + 1,
                    group => slice / group * 2,
                };
                self.rows.next_multiple_of(2) * (slice / SHARING + sums)
            }
            _ => 0,
        };
        self.activations(slice) + numbers * 4 + self.rows * SUM_BUFFERS * warps * SUM_ROW * 4
    }

    /// The cheapest tile configuration for blocks of `warps` with `room` bytes of shared memory. The cost is counted in k tiles.
    fn cheapest(&self, device: &DeviceSpec, room: usize, warps: usize) -> Option<TileConfig> {
        let mut best: Option<(TileConfig, usize)> = None;
        // At equal cost two teams are best, so they come first.
        let splits = [warps / 2, warps / 4, warps].into_iter().filter(|split| self.rows <= 4 * split);
        for split in splits {
            let teams = warps / split;
            let most = if self.rows == 1 { 8 } else { 16 };
            for slices in 1..=most.min(device.sm_count) {
                let slice = self.inputs.div_ceil(self.k_tile() * slices) * self.k_tile();
                if (slices - 1) * slice >= self.inputs || self.activations(slice) > room * 2 / 5 {
                    continue;
                }
                let stages = room.saturating_sub(self.beside(slice, warps)) / (warps * self.stage());
                if stages < 3 {
                    continue;
                }
                let groups = (device.sm_count / slices).max(1);
                let rounds = self.tiles.div_ceil(groups * teams).max(1);
                let k_tiles = slice.div_ceil(self.k_tile() * split);
                let cost = rounds * (k_tiles + if slices == 1 { END } else { END_OF_SLICE });
                if best.as_ref().is_some_and(|(_, before)| cost >= *before) {
                    continue;
                }
                let stages = stages.min(STAGES).min((rounds * k_tiles + 1).max(3));
                let groups = groups.min(self.tiles).max(1);
                let shared = stages * warps * self.stage() + self.beside(slice, warps);
                // Two large blocks on one SM would share its bandwidth while another SM had none.
                let alone = if groups * slices * 2 <= device.sm_count { 0 } else { room / 2 + 1024 };
                let blocks = groups * slices;
                let shared = shared.max(alone);
                best = Some((TileConfig { slices, slice, stages, blocks, shared, warps, split }, cost));
            }
        }
        best.map(|(config, _)| config)
    }

    /// The best tile configuration; `None` if the activations do not fit.
    fn best(&self, device: &DeviceSpec) -> Option<TileConfig> {
        let most = device.shared_memory();
        // 16 warps if shared memory has room for their ring buffers.
        let warps: &[usize] = if most > ROOM { &[16, 8] } else { &[8] };
        warps.iter().find_map(|warps| self.cheapest(device, most, *warps))
    }
}

/// One launch, of up to [`ROWS`] rows.
struct RowTile {
    first: usize,
    rows: usize,
    /// Tiles of outputs.
    tiles: usize,
    /// The index of its kernel in the plan.
    kernel: usize,
    config: TileConfig,
}

/// The shape and tile configuration of each launch; `None` if the epilogue is not supported or the activations do not fit.
fn row_tiles(problem: &Problem<'_>, device: &DeviceSpec) -> Option<Vec<(Shape, TileConfig)>> {
    let (inputs, bytes) = (problem.inputs(), problem.is_int8());
    let (tiles, packing) = (problem.tiles()?, problem.packing()?);
    let firsts = (0..problem.rows()).step_by(ROWS);
    firsts
        .map(|first| {
            let rows = kernel_rows(ROWS.min(problem.rows() - first));
            let shape = Shape { rows, inputs, tiles, packing, bytes };
            Some((shape, shape.best(device)?))
        })
        .collect()
}

/// See `linear/packed.cu`.
pub(in crate::ops::gemm) struct PackedGemm;

impl Family for PackedGemm {
    fn description(&self) -> Description {
        Description {
            kernel: "packed",
            rows: format!("1 to {ROWS}; but for bytes, to {MOST_ROWS} where `packed_wgmma` does not run"),
            devices: "sm_80 and up",
            operands: "integers; f16 or bf16 with inputs a multiple of 8, or bytes with inputs a multiple of 16",
            fused: format!("a norm of up to {NORMED_ROWS} rows; every epilogue but norms of heads"),
            method: "as `decode_gemm`; converts integers to f16 or bf16, or splits activations of few rows into three bytes each",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        let (rows, bytes) = (problem.rows(), problem.is_int8());
        // Rows must consist of whole vectors; k tiles are padded with zeros after the last input.
        let vector = if bytes { 16 } else { 8 };
        let most = if bytes || packed_wgmma::multiplies(problem, device) { ROWS } else { MOST_ROWS };
        device.has_half_mma()
            && (1..=most).contains(&rows)
            && (bytes || problem.has_half_activations())
            && problem.inputs() > 0
            && problem.inputs().is_multiple_of(vector)
            && problem.outputs() > 0
            && problem.outputs().max(problem.inputs()) < 1 << 28
            && problem.x.strides[0].is_multiple_of(vector)
            // Gate and up must both begin at a unit of rows.
            && (!problem.is_gated_by_halves() || problem.results().is_multiple_of(UNIT))
            && takes_norm(problem)
            && row_tiles(problem, device).is_some()
    }

    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan> {
        let shapes = row_tiles(problem, device).ok_or_else(|| Error::internal("no tiles for packed"))?;
        let (mut launches, mut kernels) = (Vec::new(), Vec::<KernelSpec>::new());
        let (mut workspace, mut persistent, mut first) = (0, 0, 0);
        for (shape, config) in shapes {
            let Shape { rows, tiles, .. } = shape;
            let spec = spec(problem, &shape, &config)?;
            if config.slices > 1 {
                workspace = workspace.max(tiles * config.slices * 8 * rows * 8);
                persistent = persistent.max(tiles * (8 * rows).div_ceil(32) * 4);
            }
            let kernel = kernels.iter().position(|known| *known == spec).unwrap_or(kernels.len());
            if kernel == kernels.len() {
                kernels.push(spec);
            }
            let rows = ROWS.min(problem.rows() - first);
            launches.push(RowTile { first, rows, tiles, kernel, config });
            first += rows;
        }
        let fused = problem.fused;
        Ok(ProductPlan {
            kernels,
            workspace,
            persistent,
            launches: Box::new(move |args| {
                let made = launches.iter().map(|tile| tile.launch(&fused, args));
                made.filter_map(Result::transpose).collect()
            }),
        })
    }
}

fn spec(problem: &Problem<'_>, shape: &Shape, config: &TileConfig) -> Result<KernelSpec> {
    let x = if shape.bytes { "u8" } else { type_name(problem.x.dtype)? };
    let defines: [(_, &dyn Display); 10] = [
        ("X", &x),
        ("HALF", &i32::from(problem.x.dtype == DType::F16)),
        ("DIGITS", &shape.digits()),
        ("TOKENS", &shape.rows),
        ("SLICES", &config.slices),
        ("SLICE", &config.slice),
        ("X_PITCH", &shape.pitch(config.slice)),
        ("STAGES", &config.stages),
        ("WARPS", &config.warps),
        ("SPLIT", &config.split),
    ];
    let mut spec = KernelSpec::new("linear/packed.cu", "packed", defines).with_shared(config.shared);
    spec.defines.extend(shape.packing.defines());
    spec.defines.extend(norm_defines(problem)?);
    spec.defines.extend(problem.epilogue_defines()?);
    let own = own_vectors([shape.rows, shape.inputs], config.warps, HELD);
    spec.defines.push(("OWN", own.to_string()));
    Ok(spec)
}

impl RowTile {
    fn launch(&self, fused: &FusedLinear, args: &Args<'_>) -> Result<Option<LaunchOp>> {
        let (x, weight) = (args.x, args.weight);
        let row_bytes = x.stride(0) * x.desc.dtype.bytes();
        let scales = if args.scales == 0 { 0 } else { args.scales + self.first as u64 * 4 };
        let packed = [
            weight.address(),
            weight.scales(),
            weight.layout.row_bytes as u64,
            weight.layout.scale_bytes as u64,
        ];
        let parameters = Parameters::default()
            .extent(self.first + self.rows, &args.bounds)
            .size(self.first)
            .size(self.rows)
            .size(self.tiles)
            .size(weight.layout.columns)
            .address(x.address + (self.first * row_bytes) as u64)
            .size(x.stride(0))
            .address(scales)
            .words(packed)
            .size(usize::from(weight.immutable))
            .words(norm_words(fused, args.frame))
            .address(args.workspace)
            .address(args.frame.persistent)
            .structure(&fused.epilogue_params_from(args.frame, args.y, self.first)?);
        let (function, config) = (args.function(self.kernel)?, &self.config);
        Ok(LaunchOp::kernel(function, [config.blocks, 1, 1], config.warps * 32, parameters))
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
    fn slices_cover_the_inputs_and_fit(
        #[case] rows: usize,
        #[case] inputs: usize,
        #[case] tiles: usize,
        #[case] bits: usize,
        #[case] group: usize,
    ) {
        let packing = Packing { bits, group, offset: Offset::Minimum, scale: DType::F32 };
        for bytes in [false, true] {
            for (capability, sm_count) in [(80, 108), (86, 84), (90, 132), (120, 170)] {
                let device = DeviceSpec::usual(capability, sm_count);
                let shape = Shape { rows, inputs, tiles, packing, bytes };
                let Some(config) = shape.best(&device) else {
                    assert!(capability == 86 || capability == 120, "{shape:?}");
                    continue;
                };
                assert!(
                    config.slices * config.slice >= inputs && (config.slices - 1) * config.slice < inputs,
                    "{config:?}"
                );
                assert!(config.slice.is_multiple_of(shape.k_tile()), "{config:?}");
                assert!(
                    config.blocks <= sm_count && config.blocks.is_multiple_of(config.slices),
                    "{config:?}"
                );
                assert!(config.shared <= device.shared_memory(), "{config:?}");
                assert!(config.stages >= 3 && rows <= 4 * config.split, "{config:?}");
            }
        }
    }
}
