//! Products on Hopper with what stands behind them: of 17 to 128 rows at memory speed by `linear/batch_wgmma.cu`, which takes
//! bytes too, of more at the speed of the tensor cores by `linear/tile_wgmma.cu`.

mod tiles;

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, Parameters},
        tensor_map::TensorMap,
    },
    ops::{
        frame::{Bound, Frame},
        gemm::fused_linear::{Epilogue, FusedLinear},
        operand, result, type_name,
        weight::{CudaWeight, Packing, UNIT},
        weight_type,
    },
};
use dsrun_core::{DType, Result, TensorDesc, WeightFormat, WeightType, kernels::CallDesc, op::GateLayout};
use std::{fmt::Display, ops::RangeInclusive, sync::Arc};

/// The fewest rows that are faster here than elsewhere.
const FEWEST: usize = 17;
/// Rows at memory speed.
const ROWS: RangeInclusive<usize> = FEWEST..=128;
/// Rows are multiplied so many at a time.
const ROW_UNIT: usize = 16;
const FEWEST_ROWS: usize = 32;
/// Inputs of a turn, where they are of 16 bits, and its bytes of a row.
const DEPTH: usize = 64;
const TURN: usize = DEPTH * 2;
/// Packed bytes lie in lines of 16 inputs of a unit's rows.
const LINE_INPUTS: usize = 16;
const LINE: usize = LINE_INPUTS * UNIT;
/// Outputs of a part of a tile.
const PART: usize = 64;
/// Results of a warp, which are all there or none.
const RESULTS: usize = 16;
/// Threads of a block: a warpgroup multiplies, a warp fetches.
const MULTIPLIERS: usize = 128;
const THREADS: usize = MULTIPLIERS + 32;
/// Clusters of four of which each block has a multiprocessor for itself, on one device at a time.
const CLUSTERS_OF_FOUR: usize = 30;
/// Shared memory for the ring of the only block of a multiprocessor, and of one of two; and to begin it at a multiple of 1024.
const ALONE: usize = 224 << 10;
const IN_PAIRS: usize = 110 << 10;
const ALIGNMENT: usize = 1024;
const MOST_STAGES: usize = 24;

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileConfig {
    /// Rows as they are multiplied.
    rows: usize,
    /// Parts of a tile.
    parts: usize,
    tiles: usize,
    /// Blocks that share the inputs of a tile.
    split: usize,
    stages: usize,
    /// Whether sums of other blocks have a place beside the ring.
    apart: bool,
    shared: usize,
}

impl TileConfig {
    /// The cut of a product whose rows have so many bytes of inputs.
    fn new(rows: usize, outputs: usize, bytes: usize, gated: bool, sm_count: usize) -> Self {
        let rows = rows.next_multiple_of(ROW_UNIT).max(FEWEST_ROWS);
        // Small tiles for few outputs; what is gated needs both halves in a tile.
        let parts = if gated || outputs.div_ceil(PART) > sm_count { 2 } else { 1 };
        let tiles = outputs.div_ceil(parts * PART);
        let split = match tiles {
            _ if tiles * 2 > sm_count => 1,
            _ if tiles > CLUSTERS_OF_FOUR => 2,
            _ => 4,
        };
        let split = split.min(bytes.div_ceil(TURN));
        let slot = (parts * PART + rows) * TURN;
        let room = if tiles * split <= sm_count { ALONE } else { IN_PAIRS };
        // Sums of eight rows for each turn of a block, from every block.
        let sums = match split {
            1 => 0,
            _ => (rows / 8).div_ceil(split) * split * parts * MULTIPLIERS * 16,
        };
        // A place of their own, where that takes no more than a stage: else where the ring was, when nobody needs it any more.
        let apart = sums <= slot;
        let stages = ((room - if apart { sums } else { 0 }) / slot).min(MOST_STAGES);
        let shared = ALIGNMENT + if apart { stages * slot + sums } else { (stages * slot).max(sums) };
        Self { rows, parts, tiles, split, stages, apart, shared }
    }

    /// The kernel, but for its epilogue.
    fn kernel(&self, planes: &Planes<'_>) -> Result<KernelSpec> {
        let [half, bias] = planes.types()?;
        let (integers, scale) = match planes.packing() {
            Some(packing) => (1, type_name(packing.scale)?),
            None => (0, "f32"),
        };
        let defines: [(_, &dyn Display); 10] = [
            ("APART", &i32::from(self.apart)),
            ("INTEGERS", &integers),
            ("W_SCALE", &scale),
            ("TOKENS", &self.rows),
            ("PARTS", &self.parts),
            ("SPLIT", &self.split),
            ("STAGES", &self.stages),
            ("HALF", &half),
            ("WIDE_Y", &i32::from(planes.y.dtype == DType::F32)),
            ("BIAS", &bias),
        ];
        Ok(KernelSpec::new("linear/batch_wgmma.cu", "batch_wgmma", defines).with_shared(self.shared))
    }
}

/// Which kernel, and how a product is cut for it.
#[derive(Clone, Copy, Debug)]
enum KernelKind {
    Few(TileConfig),
    Many(tiles::TileConfig),
}

/// A launch of one of the kernels.
pub(super) struct Batch {
    pub(super) spec: KernelSpec,
    way: KernelKind,
    /// The size of the heads that the product is made of, if they are finished too.
    head: Option<usize>,
}

/// What a product reads and writes.
pub(super) struct Planes<'a> {
    /// Half precision, or bytes, whose rows have scales beside them.
    pub(super) x: &'a TensorDesc,
    pub(super) weight: &'a WeightType,
    pub(super) y: &'a TensorDesc,
    /// Element type of the bias, if there is one.
    pub(super) bias: Option<DType>,
    /// What the product is added to.
    pub(super) residual: Option<&'a TensorDesc>,
    /// Whether the first half of the outputs are gates of the other.
    pub(super) gated: bool,
    /// Whether what goes into an activation is limited.
    pub(super) limited: bool,
}

impl Planes<'_> {
    /// Whether there is a kernel for them.
    pub(super) fn fit(&self, device: &DeviceSpec) -> bool {
        let (rows, outputs, inputs) = (self.x.shape[0], self.weight.rows(), self.weight.columns());
        let few = ROWS.contains(&rows);
        let multiplied = match self.x.dtype {
            DType::I8 => few && self.packing().is_some() && self.x.strides[0].is_multiple_of(16),
            DType::F16 | DType::BF16 => {
                device.custom_gemm
                    && self.weight.format == WeightFormat::Dense(self.x.dtype)
                    && self.x.strides[0].is_multiple_of(8)
            }
            _ => false,
        };
        let results = if self.gated { outputs / 2 } else { outputs };
        let strides = |unit: usize| {
            self.y.strides[0].is_multiple_of(unit)
                && self.residual.is_none_or(|residual| residual.strides[0].is_multiple_of(unit))
        };
        let written = match few {
            true => results.is_multiple_of(RESULTS) && strides(2),
            false => {
                self.y.dtype == self.x.dtype
                    && (self.gated
                        || tiles::TileConfig::new(rows, outputs, inputs, self.gated, device.sm_count)
                            .pays(rows, self.residual.is_some()))
                    && results.is_multiple_of(tiles::VECTOR)
                    && strides(tiles::VECTOR)
            }
        };
        device.capability == 90
            && rows >= FEWEST
            && multiplied
            && inputs > 0
            && results > 0
            && rows.max(outputs).max(inputs) < 1 << 30
            && written
    }

    /// How weights of 8 bits lie, where `x` are bytes.
    fn packing(&self) -> Option<Packing> {
        let packing = Packing::of(self.weight.format).filter(|packing| packing.is_channelwise_int8());
        packing.filter(|_| self.x.dtype == DType::I8)
    }

    /// `HALF` and `BIAS` of the kernels.
    fn types(&self) -> Result<[String; 2]> {
        let half = i32::from(self.x.dtype == DType::F16);
        Ok([half.to_string(), self.bias.map_or(Ok("f32"), type_name)?.to_owned()])
    }

    /// The kernel with the constants of an epilogue.
    pub(super) fn plan(&self, epilogue: Vec<(&'static str, String)>, device: &DeviceSpec) -> Result<Batch> {
        let (rows, outputs, inputs) = (self.x.shape[0], self.weight.rows(), self.weight.columns());
        let (mut spec, way) = if ROWS.contains(&rows) {
            let bytes = inputs * self.x.dtype.bytes();
            let cut = TileConfig::new(rows, outputs, bytes, self.gated, device.sm_count);
            (cut.kernel(self)?, KernelKind::Few(cut))
        } else {
            let cut = tiles::TileConfig::new(rows, outputs, inputs, self.gated, device.sm_count);
            (cut.kernel(self)?, KernelKind::Many(cut))
        };
        spec.defines.extend(epilogue);
        Ok(Batch { spec, way, head: None })
    }
}

/// The kernel for a chain without a norm, if it takes it; `x` are the activations, which may be in scratch memory.
pub(super) fn plan(
    chain: &FusedLinear,
    x: &TensorDesc,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<Batch>> {
    let (gated, residual) = match chain.epilogue {
        Epilogue::Nothing | Epilogue::Activation(_) => (false, None),
        Epilogue::Sum(_, residual) => (false, Some(operand(call, residual)?)),
        Epilogue::Gate(op) if op.layout == GateLayout::Concatenated => (true, None),
        Epilogue::Heads(_) => (false, None),
        Epilogue::Gate(_) => return Ok(None),
    };
    let bias = chain.bias.map(|bias| operand(call, bias)).transpose()?.map(|bias| bias.dtype);
    let limited = match chain.epilogue {
        Epilogue::Activation(op) => op.limit > 0.0,
        Epilogue::Gate(op) => op.limit > 0.0,
        _ => false,
    };
    let (weight, y) = (weight_type(call, chain.weight)?, result(call, 0)?);
    let planes = Planes { x, weight, y, bias, residual, gated, limited };
    if !planes.fit(device) {
        return Ok(None);
    }
    let mut batch = planes.plan(chain.defines(call)?, device)?;
    if let Epilogue::Heads(_) = chain.epilogue {
        let halves = [chain.cache_type(call)?, y.dtype].iter().all(|dtype| dtype.bytes() == 2);
        let fits = |size: &usize| match batch.way {
            KernelKind::Few(_) => halves && size.is_multiple_of(PART),
            KernelKind::Many(cut) => {
                cut.ordered && size.is_multiple_of(2 * tiles::ORDER) && cut.outputs.is_multiple_of(*size)
            }
        };
        batch.head = chain.halves(call)?.filter(fits);
        match batch.head {
            Some(size) => batch.spec.defines.push(("HEAD", size.to_string())),
            None => return Ok(None),
        }
    }
    Ok(Some(batch))
}

impl Batch {
    /// The launch for a chain.
    pub(super) fn step(
        &self,
        chain: &FusedLinear,
        frame: &Frame,
        x: &Bound,
        function: &Arc<Function>,
    ) -> Result<Option<LaunchOp>> {
        let mut bounds = chain.bounds(frame)?;
        bounds.push(x);
        let scales = chain.scales.map_or(0, |scales| frame.address(scales));
        self.launch(
            x,
            scales,
            frame.weight(chain.weight)?,
            &bounds,
            chain.epilogue_params(frame, true)?,
            function,
        )
    }

    /// The launch with `struct Epilogue` of `linear/epilogue.cuh`; `scales` are those of the rows of `x`, where those are bytes.
    pub(super) fn launch(
        &self,
        x: &Bound,
        scales: u64,
        weight: &CudaWeight,
        bounds: &[&Bound],
        epilogue: [u64; 26],
        function: &Arc<Function>,
    ) -> Result<Option<LaunchOp>> {
        let rows = x.size(0);
        let integers = x.desc.dtype == DType::I8;
        // Rows of x and of weights that a copy brings, blocks, and their threads.
        let (of_x, of_weight, blocks, threads) = match self.way {
            KernelKind::Few(cut) => (cut.rows, PART, cut.tiles * cut.split, THREADS),
            // Half a tile of weights: for each of two blocks, or what gates and what is gated.
            KernelKind::Many(cut) => (tiles::ROWS, cut.outputs / 2, cut.blocks, tiles::THREADS),
        };
        let element = x.desc.dtype.bytes();
        let bytes = (weight.layout.columns * element) as u64;
        let map = |address: u64, rows: usize, stride: usize, at_once: usize| {
            let sizes = [bytes, rows as u64];
            TensorMap::bytes(address, sizes, [stride as u64], [TURN as u32, at_once as u32], true)
        };
        let x_map = map(x.address, rows, x.stride(0) * element, of_x)?;
        let weight_map = match self.way {
            KernelKind::Few(_) if let Some(head) = self.head => in_pairs(weight, bytes, head, integers)?,
            _ if integers => lines(weight, of_weight)?,
            KernelKind::Many(cut) if cut.ordered => in_order(weight, bytes, of_weight)?,
            _ => map(weight.address(), weight.layout.rows, weight.layout.row_bytes, of_weight)?,
        };
        let mut parameters = Parameters::default().extent(rows, bounds).size(weight.layout.columns);
        if let KernelKind::Few(_) = self.way {
            parameters = parameters.size(usize::from(weight.immutable));
        }
        let mut parameters = parameters.words(epilogue);
        if integers {
            parameters = parameters.words([scales, weight.scales()]);
        }
        let parameters = parameters.words(x_map.words()).words(weight_map.words());
        Ok(LaunchOp::kernel(function, [blocks, 1, 1], threads, parameters))
    }
}

/// Rows of weights in the order of the lanes that have their results: each lane of four has two neighbouring columns of every 8, and
/// gets 8 neighbouring rows of every 32 for four of these.
fn in_order(weight: &CudaWeight, bytes: u64, rows: usize) -> Result<TensorMap> {
    let row = weight.layout.row_bytes as u64;
    let eights = weight.layout.rows / tiles::ORDER;
    // Inputs, two neighbours, lanes, columns of a lane, and all of that again.
    let sizes = [bytes, 2, 4, 4, eights as u64];
    let strides = [1, 8, 2, tiles::ORDER as u64].map(|rows| rows * row);
    TensorMap::bytes(
        weight.address(),
        sizes,
        strides,
        [TURN as u32, 2, 4, 4, (rows / tiles::ORDER) as u32],
        true,
    )
}

/// Rows of weights as heads are finished of [`PART`] of them: 8 of the first half of a head, then the 8 that are turned with
/// them, which are half a head further on. Bytes are packed, and lie in lines of 8 rows.
fn in_pairs(weight: &CudaWeight, bytes: u64, head: usize, integers: bool) -> Result<TensorMap> {
    let row = weight.layout.row_bytes as u64;
    let (half, heads) = ((head / 2) as u64, (weight.layout.rows / head) as u64);
    let (eights, of_part) = (half / UNIT as u64, (PART / 2 / UNIT) as u32);
    if integers {
        let [line, lines] = [LINE as u64, row / LINE as u64];
        let strides = [line, eights * row, row, 2 * eights * row];
        let at_once = [LINE as u32, (TURN / LINE_INPUTS) as u32, 2, of_part, 1];
        TensorMap::bytes(weight.address(), [line, lines, 2, eights, heads], strides, at_once, false)
    } else {
        let strides = [1, half, UNIT as u64, head as u64].map(|rows| rows * row);
        let at_once = [TURN as u32, UNIT as u32, 2, of_part, 1];
        TensorMap::bytes(weight.address(), [bytes, UNIT as u64, 2, eights, heads], strides, at_once, true)
    }
}

/// Lines of packed bytes: a turn of so many rows at a time.
fn lines(weight: &CudaWeight, rows: usize) -> Result<TensorMap> {
    let unit = weight.layout.row_bytes;
    let sizes = [LINE, unit / LINE, weight.layout.rows.div_ceil(UNIT)].map(|size| size as u64);
    let strides = [LINE, unit].map(|stride| stride as u64);
    let at_once = [LINE, TURN / LINE_INPUTS, rows / UNIT].map(|size| size as u32);
    TensorMap::bytes(weight.address(), sizes, strides, at_once, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::query_key_value(32, 6144, 4096, false)]
    #[case::gate(128, 28_672, 4096, true)]
    #[case::down(128, 4096, 14_336, false)]
    #[case::few_outputs(32, 576, 1536, false)]
    #[case::one_turn(32, 16, 16, false)]
    fn cuts_cover_the_product(
        #[case] rows: usize,
        #[case] outputs: usize,
        #[case] inputs: usize,
        #[case] gated: bool,
    ) {
        let cut = TileConfig::new(rows, outputs, inputs * 2, gated, 132);
        assert!(cut.rows >= rows && cut.tiles * cut.parts * PART >= outputs, "{cut:?}");
        // Every block of a tile has inputs, and what is gated has both halves in a tile.
        assert!(cut.split <= (inputs * 2).div_ceil(TURN) && (!gated || cut.parts == 2), "{cut:?}");
    }

    #[test]
    fn rings_fit() {
        for rows in ROWS {
            for outputs in [16, 1024, 4096, 8448, 8464, 128_256] {
                for gated in [false, true] {
                    let cut = TileConfig::new(rows, outputs, 4096, gated, 132);
                    let slot = (cut.parts * PART + cut.rows) * TURN;
                    assert!(cut.stages >= 3 && cut.rows >= rows, "{cut:?}");
                    // What a multiprocessor has, less what kernels take of it beside the ring, and the driver for each block.
                    let (of_kernel, of_driver) = (2 << 10, 1 << 10);
                    let blocks = if cut.tiles * cut.split <= 132 { 1 } else { 2 };
                    assert!(cut.stages * slot + ALIGNMENT <= cut.shared, "{cut:?}");
                    assert!(blocks * (cut.shared + of_kernel + of_driver) <= 228 << 10, "{cut:?}");
                }
            }
        }
    }
}
