//! Int8 GEMM on Hopper: `linear/int8_wgmma.cu`.
//!
//! The fastest tile shape depends on the number of tiles per SM, the weight bytes per tile, and the time to fill the pipeline. A
//! cost model selects a few candidates. When the first call is bound, these are timed with its weights, and the result is cached
//! beside the kernels on disk.

use crate::{
    arch::{DeviceSpec, tuner},
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
        raw::RawStream,
        tensor_map::TensorMap,
    },
    ops::{
        bound::Bound,
        gemm::{
            families::int8_mma::{defines, is_aligned, packing, results},
            family::{Description, Family},
            fused_linear::Epilogue,
            problem::{Args, Problem, ProductPlan},
        },
        weight::UNIT as ROW_UNIT,
    },
};
use dsrun_core::{DType, Error, Result, TensorDesc};
use std::{fmt::Display, sync::OnceLock};

/// The source of the kernel.
const SOURCE: &str = "linear/int8_wgmma.cu";
/// Inputs of a k tile.
const K_TILE: usize = 128;
/// Bytes of shared memory for the ring.
const RING: usize = 224 << 10;
/// The ring begins at a multiple of this.
const ALIGNMENT: usize = 1024;
/// The maximum number of stages of a ring.
const STAGES: usize = 16;
/// Tiles that are measured.
const MEASURED: usize = 4;

/// The rows and outputs of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// Warpgroups that multiply, each 64 rows.
    groups: usize,
    outputs: usize,
}

const TILES: [Tile; 8] = [
    Tile { groups: 2, outputs: 256 },
    Tile { groups: 2, outputs: 224 },
    Tile { groups: 2, outputs: 128 },
    Tile { groups: 1, outputs: 224 },
    Tile { groups: 1, outputs: 128 },
    Tile { groups: 1, outputs: 64 },
    Tile { groups: 1, outputs: 48 },
    Tile { groups: 1, outputs: 32 },
];

impl Tile {
    fn rows(self) -> usize {
        self.groups * 64
    }

    /// Rows of activations that are copied.
    fn fetched(self, rows: usize) -> usize {
        self.rows().min(rows.next_multiple_of(32))
    }

    fn stage(self, rows: usize) -> usize {
        (self.fetched(rows) + self.outputs) * K_TILE
    }

    fn stages(self, rows: usize) -> usize {
        (RING / self.stage(rows)).min(STAGES)
    }

    fn count(self, rows: usize, outputs: usize) -> usize {
        rows.div_ceil(self.rows()) * outputs.div_ceil(self.outputs)
    }

    /// A model of the microseconds that a product takes on an H200. Only the order of its results matters.
    fn cost(self, rows: usize, outputs: usize, inputs: usize, sm_count: usize) -> f64 {
        let tiles = self.count(rows, outputs);
        let waves = tiles.div_ceil(sm_count) as f64;
        let operations = (self.rows() * self.outputs * K_TILE * 2) as f64 / 11.7e6;
        let bytes = (tiles.min(sm_count) * self.outputs * K_TILE) as f64 / 4.2e6;
        let shared = (self.stage(rows) as f64) / 1.0e5;
        waves * (inputs.div_ceil(K_TILE) as f64 * operations.max(bytes).max(shared).max(0.12) + 1.2)
    }
}

/// The tiles worth measuring, the most promising first.
fn shortlist(rows: usize, outputs: usize, inputs: usize, sm_count: usize) -> Vec<Tile> {
    let cost = |tile: &Tile| tile.cost(rows, outputs, inputs, sm_count);
    let mut tiles = TILES.to_vec();
    // Tiles that are wider than a tile with all outputs only add padding.
    tiles.retain(|tile| {
        let mut narrower = TILES.iter().filter(|one| one.groups <= tile.groups && one.outputs < tile.outputs);
        !narrower.any(|one| one.outputs >= outputs)
    });
    tiles.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
    tiles.truncate(MEASURED);
    tiles
}

/// The gate of the epilogue, if there is one: its nonlinearity and limit.
fn gate(problem: &Problem<'_>) -> Option<(u32, f32)> {
    match problem.fused.epilogue {
        Epilogue::Gate(op) => Some((op.function as u32, op.limit)),
        _ => None,
    }
}

/// Whether rows begin at multiples of 16 bytes.
fn is_vectors(rows: &TensorDesc) -> bool {
    (rows.strides[0] * rows.dtype.bytes()).is_multiple_of(16)
}

/// See `linear/int8_wgmma.cu`.
pub(in crate::ops::gemm) struct Int8Wgmma;

impl Family for Int8Wgmma {
    fn description(&self) -> Description {
        Description {
            kernel: "int8_wgmma",
            rows: "any".to_owned(),
            devices: "sm_90",
            operands: "bytes times bytes, rows of activations at multiples of 16 bytes",
            fused: "a sum; a gate of halves that are multiples of 8 outputs".to_owned(),
            method: "TMA copies feed wgmma, with the tile shape measured to be the fastest",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        let gated = problem.fused.norm.is_none()
            && problem.is_gated_by_halves()
            && problem.results().is_multiple_of(ROW_UNIT);
        device.has_wgmma()
            && problem.int8_packing().is_some()
            && is_aligned(problem)
            && problem.rows() > 0
            && problem.outputs() > 0
            && (problem.is_bare() || problem.is_unscaled_sum() || gated)
    }

    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan> {
        let (rows, outputs, inputs) = (problem.rows(), problem.outputs(), problem.inputs());
        let tiles = shortlist(rows, outputs, inputs, device.sm_count);
        let gate = gate(problem);
        let kernels = tiles.iter().map(|tile| spec(problem, *tile, gate)).collect::<Result<Vec<_>>>()?;
        let question = format!("{rows} x {outputs} x {inputs} of {kernels:?}");
        let scale_type = match packing(problem)?.scale {
            DType::F32 => 0,
            DType::F16 => 1,
            _ => 2,
        };
        let product = Product { rows, outputs, inputs, scale_type, gate, tiles, device: *device };
        let chosen = OnceLock::new();
        Ok(ProductPlan {
            kernels,
            workspace: 0,
            persistent: 0,
            launches: Box::new(move |args| {
                let best = *chosen.get_or_init(|| product.choose(args, &question));
                let results = results(args, product.limit());
                Ok(product.launch(args, best, args.x.address, &args.bounds, results)?.into_iter().collect())
            }),
        })
    }
}

fn spec(problem: &Problem<'_>, tile: Tile, gate: Option<(u32, f32)>) -> Result<KernelSpec> {
    let (fetched, stages) = (tile.fetched(problem.rows()), tile.stages(problem.rows()));
    let vectors = is_vectors(problem.y)
        && problem.residual.is_none_or(is_vectors)
        && problem.y.shape[1].is_multiple_of(8);
    let own: [(_, &dyn Display); 8] = [
        ("GATED", &i32::from(gate.is_some())),
        ("FUNCTION", &gate.map_or(1, |(function, _)| function)),
        ("GROUPS", &tile.groups),
        ("OUTPUTS", &tile.outputs),
        ("STAGES", &stages),
        ("X_ROWS", &fetched),
        ("WIDE_Y", &i32::from(problem.y.dtype == DType::F32)),
        ("Y_VECTORS", &i32::from(vectors)),
    ];
    let mut spec = KernelSpec::new(SOURCE, "int8_wgmma", own);
    spec.defines.extend(defines(problem)?);
    Ok(spec.with_shared(ALIGNMENT + stages * tile.stage(problem.rows())))
}

/// A product with the tiles that may run it.
struct Product {
    rows: usize,
    outputs: usize,
    inputs: usize,
    /// The type of the scales of outputs: 0 f32, 1 f16, 2 bf16.
    scale_type: usize,
    gate: Option<(u32, f32)>,
    tiles: Vec<Tile>,
    device: DeviceSpec,
}

impl Product {
    fn limit(&self) -> f32 {
        self.gate.map_or(0.0, |(_, limit)| limit)
    }

    /// The launch with a tile, of activations at `x`.
    fn launch(
        &self,
        args: &Args<'_>,
        index: usize,
        x: u64,
        bounds: &[&Bound],
        results: [u64; 8],
    ) -> Result<Option<LaunchOp>> {
        let tile = self.tiles[index];
        let rows = args.x.size(0);
        let sizes = [self.inputs as u64, rows as u64];
        let fetched = [K_TILE as u32, tile.fetched(self.rows) as u32];
        let x_map = TensorMap::bytes(x, sizes, [args.x.stride(0) as u64], fetched, true)?;
        let unit = args.weight.layout.row_bytes as u64;
        let sizes = [128, unit / 128, args.weight.layout.rows.div_ceil(8) as u64];
        // Gate and up are separate copies.
        let at_once = if self.gate.is_some() { tile.outputs / 2 } else { tile.outputs };
        let boxed = [128, (K_TILE / 16) as u32, (at_once / ROW_UNIT) as u32];
        let weight_map = TensorMap::bytes(args.weight.address(), sizes, [128, unit], boxed, false)?;
        let parameters = Parameters::default()
            .extent(rows, bounds)
            .size(self.outputs)
            .size(self.inputs)
            .size(self.scale_type)
            .words(results)
            .words(x_map.words())
            .words(weight_map.words());
        let blocks = tile.count(rows, self.outputs).min(self.device.sm_count);
        let threads = (tile.groups + 1) * 128;
        Ok(LaunchOp::kernel(args.function(index)?, [blocks, 1, 1], threads, parameters))
    }

    /// The index of the fastest tile shape, measured with these weights on scratch activations and results.
    fn choose(&self, args: &Args<'_>, question: &str) -> usize {
        if self.tiles.len() == 1 {
            return 0;
        }
        let context = args.context;
        let (rows, columns) = (args.x.size(0), args.y.size(1));
        let x_bytes = (rows * args.x.stride(0)).next_multiple_of(256);
        let y_bytes = (rows * columns * args.y.desc.dtype.bytes()).next_multiple_of(256);
        let best = (|| {
            let memory = context.allocate(x_bytes + y_bytes + rows * size_of::<f32>())?;
            let (y, scales) = (memory + x_bytes as u64, memory + (x_bytes + y_bytes) as u64);
            let mut results = results(args, self.limit());
            (results[0], results[3], results[5]) = (scales, y, y);
            (results[4], results[6]) = (columns as u64, columns as u64);
            let run = |index: usize, stream: RawStream| {
                // Computes all rows, whatever the current extents are.
                match &self.launch(args, index, memory, &[], results)? {
                    Some(LaunchOp::Kernel(launch)) => launch.enqueue_on(context, stream),
                    _ => Err(Error::internal("a product without a launch")),
                }
            };
            // Random data, because tensor cores are faster on zeros.
            let best = context
                .fill(memory, x_bytes, 0x35)
                .map(|()| tuner::fastest(context, &self.device, SOURCE, question, self.tiles.len(), &run));
            context.release(memory);
            best
        })();
        best.unwrap_or_else(|error| {
            tracing::debug!(%error, "tiles cannot be measured: the first is used");
            0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit() {
        for tile in TILES {
            for rows in [17, 40, 100, 4096] {
                assert!(tile.stages(rows) >= 4, "{tile:?}");
                assert!(tile.stages(rows) * tile.stage(rows) <= RING, "{tile:?}");
                // Rows that were not fetched are read from the rest of the stage.
                assert!((tile.rows() - tile.fetched(rows)) <= tile.outputs, "{tile:?}");
            }
        }
    }

    #[test]
    fn few_outputs_have_no_wide_tiles() {
        let outputs =
            |outputs| shortlist(64, outputs, 1024, 132).iter().map(|tile| tile.outputs).collect::<Vec<_>>();
        assert_eq!(outputs(32), [32]);
        assert!(outputs(60).iter().all(|width| *width <= 64));
        assert_eq!(outputs(4096).len(), MEASURED);
    }
}
