//! Products of signed bytes of more rows than fit [`super::super::packed`].
//!
//! | device | rows of `x` | kernel |
//! |---|---|---|
//! | sm_90 | at multiples of 16 bytes | `int8_wgmma`, in one of several tile shapes, with the gate behind it |
//! | all others | any | `int8_mma` |
//!
//! Which tile is fastest depends on how many of them there are for the multiprocessors, on how many bytes of weights one of them
//! must fetch, and on how long its pipeline takes to fill. A model of that picks a few; the first call that is bound measures
//! those on its own weights, and the answer is kept beside the kernels on disk.

use crate::{
    arch::DeviceSpec,
    driver::{
        context::Context,
        kernel_spec::KernelSpec,
        launch::{LaunchOp, MAX_GRID, Parameters},
        tensor_map::TensorMap,
    },
    ops::{
        THREADS,
        frame::Bound,
        gemm::linear::{Args, Layer, Layered, common, function, is_vectors},
        type_name,
        weight::{Packing, UNIT as ROW_UNIT},
    },
};
use dsrun_core::{DType, Error, Result, op::GateLayout};
use std::{fmt::Display, sync::OnceLock};

/// The source of the kernel whose tiles are measured.
const UNIT: &str = "linear/int8_wgmma.cu";
/// Inputs of a turn.
const DEPTH: usize = 128;
/// Shared memory for the ring, and to begin it at a multiple of 1024.
const ROOM: usize = 224 << 10;
const ALIGNMENT: usize = 1024;
/// The most stages of a ring.
const STAGES: usize = 16;
/// Tiles that are measured, and how many times each.
const MEASURED: usize = 4;
const REPEATS: usize = 5;

/// A tile: warpgroups, each of 64 rows, and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
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

    /// Rows that are fetched.
    fn fetched(self, rows: usize) -> usize {
        self.rows().min(rows.next_multiple_of(32))
    }

    fn stage(self, rows: usize) -> usize {
        (self.fetched(rows) + self.outputs) * DEPTH
    }

    fn stages(self, rows: usize) -> usize {
        (ROOM / self.stage(rows)).min(STAGES)
    }

    fn count(self, rows: usize, outputs: usize) -> usize {
        rows.div_ceil(self.rows()) * outputs.div_ceil(self.outputs)
    }

    /// About how many microseconds a product takes on an H200. Only the order matters.
    fn cost(self, rows: usize, outputs: usize, inputs: usize, sm_count: usize) -> f64 {
        let tiles = self.count(rows, outputs);
        let waves = tiles.div_ceil(sm_count) as f64;
        let operations = (self.rows() * self.outputs * DEPTH * 2) as f64 / 11.7e6;
        let bytes = (tiles.min(sm_count) * self.outputs * DEPTH) as f64 / 4.2e6;
        let shared = (self.stage(rows) as f64) / 1.0e5;
        waves * (inputs.div_ceil(DEPTH) as f64 * operations.max(bytes).max(shared).max(0.12) + 1.2)
    }
}

/// The tiles worth measuring, the most promising first.
fn shortlist(rows: usize, outputs: usize, inputs: usize, sm_count: usize) -> Vec<Tile> {
    let cost = |tile: &Tile| tile.cost(rows, outputs, inputs, sm_count);
    let mut tiles = TILES.to_vec();
    tiles.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
    tiles.truncate(MEASURED);
    tiles
}

/// The constants that both kernels take.
fn defines(layer: &Layer<'_>, packing: Packing) -> Result<Vec<(&'static str, String)>> {
    let [_, _, _, scale, _] = packing.defines();
    Ok([
        ("W_SCALE", scale.1),
        ("BIAS", layer.bias_name()?.to_owned()),
        ("Y", type_name(layer.y.dtype)?.to_owned()),
        ("ADDED", i32::from(layer.residual.is_some()).to_string()),
    ]
    .into())
}

/// Whether rows can be copied in bulk.
fn is_aligned(layer: &Layer<'_>) -> bool {
    layer.x.strides[0].is_multiple_of(16) && layer.inputs() > 0
}

/// Whether it is `int8_wgmma` that takes the layer.
fn on_hopper(layer: &Layer<'_>, device: &DeviceSpec) -> bool {
    device.capability == 90 && is_aligned(layer) && layer.rows() > 0 && layer.outputs() > 0
}

/// Whether a gate can be part of the product: halves begin at whole units of weights.
pub(super) fn takes_gate(layer: &Layer<'_>, layout: GateLayout, device: &DeviceSpec) -> bool {
    on_hopper(layer, device)
        && layout == GateLayout::Concatenated
        && layer.outputs().is_multiple_of(2 * ROW_UNIT)
}

pub(super) fn plan(layer: &Layer<'_>, device: &DeviceSpec) -> Result<Layered> {
    let packing = Packing::of(layer.weight.format).filter(|packing| packing.is_channelwise_int8());
    let packing = packing.ok_or_else(|| Error::internal("a product of bytes with weights that are none"))?;
    if on_hopper(layer, device) {
        return by_wgmma(layer, packing, device);
    }
    let aligned = is_aligned(layer);
    let defines: [(_, &dyn Display); 1] =
        [("X_VECTORS", &i32::from(aligned && layer.inputs().is_multiple_of(16)))];
    let mut spec = KernelSpec::new("linear/int8_mma.cu", "int8_mma", defines);
    spec.defines.extend(self::defines(layer, packing)?);
    Ok(Layered {
        kernels: vec![spec],
        workspace: 0,
        batch_invariant: true,
        launches: Box::new(|places, functions, _| {
            let parameters = common(places)
                .rows(places.x)
                .address(places.weight.address())
                .size(places.weight.layout.row_bytes)
                .words(results(places, 0.0));
            let grid = [places.y.size(1).div_ceil(64), places.y.size(0).div_ceil(128).min(MAX_GRID), 1];
            Ok(LaunchOp::kernel(function(functions, 0)?, grid, THREADS, parameters).into_iter().collect())
        }),
    })
}

/// `struct Results` of the kernels, whose gates have a limit.
fn results(places: &Args<'_>, limit: f32) -> [u64; 8] {
    let added = places.residual.map_or((0, 0), |residual| (residual.address, residual.stride(0) as u64));
    let (row_scales, output_scales) = (places.scales, places.weight.scales());
    let y_row = places.y.stride(0) as u64;
    let numbers = u64::from(1.0f32.to_bits()) | u64::from(limit.to_bits()) << 32;
    [row_scales, output_scales, places.bias, places.y.address, y_row, added.0, added.1, numbers]
}

fn by_wgmma(layer: &Layer<'_>, packing: Packing, device: &DeviceSpec) -> Result<Layered> {
    let (rows, outputs, inputs, sm_count) = (layer.rows(), layer.outputs(), layer.inputs(), device.sm_count);
    let tiles = shortlist(rows, outputs, inputs, sm_count);
    let wide = layer.y.dtype == DType::F32;
    let vectors =
        is_vectors(layer.y) && layer.residual.is_none_or(is_vectors) && layer.y.shape[1].is_multiple_of(8);
    let (gated, nonlinearity, limit) =
        layer.gate.map_or((false, 1, 0.0), |gate| (true, gate.function as u32, gate.limit));
    let mut kernels = Vec::new();
    for tile in &tiles {
        let (fetched, stages) = (tile.fetched(rows), tile.stages(rows));
        let own: [(_, &dyn Display); 8] = [
            ("GATED", &i32::from(gated)),
            ("FUNCTION", &nonlinearity),
            ("GROUPS", &tile.groups),
            ("OUTPUTS", &tile.outputs),
            ("STAGES", &stages),
            ("X_ROWS", &fetched),
            ("WIDE_Y", &i32::from(wide)),
            ("Y_VECTORS", &i32::from(vectors)),
        ];
        let spec = KernelSpec::new(UNIT, "int8_wgmma", own);
        let mut spec = spec.with_shared(ALIGNMENT + stages * tile.stage(rows));
        spec.defines.extend(defines(layer, packing)?);
        kernels.push(spec);
    }
    let question = format!("{rows} x {outputs} x {inputs} of {kernels:?}");
    let chosen = OnceLock::new();
    Ok(Layered {
        kernels,
        workspace: 0,
        batch_invariant: true,
        launches: Box::new(move |places, functions, context| {
            let launch = |index: usize, x: u64, bounds: &[&Bound], results: [u64; 8]| {
                let tile = tiles[index];
                let sizes = [inputs as u64, places.x.size(0) as u64];
                let x_map = TensorMap::bytes(
                    x,
                    sizes,
                    [places.x.stride(0) as u64],
                    [128, tile.fetched(rows) as u32],
                    true,
                )?;
                let unit = places.weight.layout.row_bytes as u64;
                let sizes = [128, unit / 128, places.weight.layout.rows.div_ceil(8) as u64];
                // What gates and what is gated are copied one by one.
                let at_once = if gated { tile.outputs / 2 } else { tile.outputs };
                let boxed = [128, (DEPTH / 16) as u32, (at_once / ROW_UNIT) as u32];
                let weight = places.weight.address();
                let weight_map = TensorMap::bytes(weight, sizes, [128, unit], boxed, false)?;
                let parameters = Parameters::default()
                    .extent(places.x.size(0), bounds)
                    .size(outputs)
                    .size(inputs)
                    .words(results)
                    .words(x_map.words())
                    .words(weight_map.words());
                let blocks = tile.count(places.x.size(0), outputs).min(sm_count);
                let threads = (tile.groups + 1) * 128;
                Ok(LaunchOp::kernel(function(functions, index)?, [blocks, 1, 1], threads, parameters))
            };
            let best = match chosen.get() {
                Some(best) => *best,
                None => *chosen.get_or_init(|| {
                    let candidates = |x: u64, y: u64, scales: u64| {
                        let mut results = results(places, limit);
                        (results[0], results[3], results[5]) = (scales, y, y);
                        let columns = places.y.size(1) as u64;
                        (results[4], results[6]) = (columns, columns);
                        // All rows, whatever the extents hold now.
                        (0..tiles.len()).map(|index| launch(index, x, &[], results)).collect()
                    };
                    choose(context, &question, tiles.len(), places, &candidates)
                }),
            };
            Ok(launch(best, places.x.address, places.bounds, results(places, limit))?.into_iter().collect())
        }),
    })
}

/// Makes the launches to choose from, given where activations, results and row scales are.
type Candidates<'a> = &'a dyn Fn(u64, u64, u64) -> Result<Vec<Option<LaunchOp>>>;

/// The fastest of some launches: as remembered, or as measured. What cannot be measured is decided by the model.
fn choose(
    context: &Context,
    question: &str,
    count: usize,
    places: &Args<'_>,
    candidates: Candidates<'_>,
) -> usize {
    let remembered = context.recall(UNIT, question).and_then(|answer| answer.parse().ok());
    if let Some(answer) = remembered.filter(|answer| *answer < count) {
        return answer;
    }
    match measure(context, places, candidates) {
        Ok(best) => {
            context.remember(UNIT, question, &best.to_string());
            best
        }
        Err(error) => {
            tracing::debug!(%error, "tiles cannot be measured: the model decides");
            0
        }
    }
}

fn measure(context: &Context, places: &Args<'_>, candidates: Candidates<'_>) -> Result<usize> {
    let (rows, columns) = (places.x.size(0), places.y.size(1));
    let sizes = [rows * places.x.stride(0), rows * columns * places.y.desc.dtype.bytes(), rows * 4];
    let starts = [
        0,
        sizes[0].next_multiple_of(256),
        (sizes[0].next_multiple_of(256) + sizes[1]).next_multiple_of(256),
    ];
    let memory = context.allocate(starts[2] + sizes[2])?;
    let measured = (|| {
        // Tensor cores are faster on zeros.
        context.fill(memory, sizes[0], 0x35)?;
        let steps = candidates(memory, memory + starts[1] as u64, memory + starts[2] as u64)?;
        let mut best = (0, f32::INFINITY);
        for (index, step) in steps.iter().enumerate() {
            let Some(LaunchOp::Kernel(launch)) = step else { continue };
            let time = context.time(REPEATS, |stream| launch.enqueue_on(context, stream))?;
            tracing::debug!(index, time, function = launch.function.name, "a tile is measured");
            if time < best.1 {
                best = (index, time);
            }
        }
        Ok(best.0)
    })();
    context.release(memory);
    measured
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit() {
        for tile in TILES {
            for rows in [17, 40, 100, 4096] {
                assert!(tile.stages(rows) >= 4, "{tile:?}");
                assert!(tile.stages(rows) * tile.stage(rows) <= ROOM, "{tile:?}");
                // What is read of rows that were not fetched lies in the slot.
                assert!((tile.rows() - tile.fetched(rows)) <= tile.outputs, "{tile:?}");
            }
        }
    }
}
