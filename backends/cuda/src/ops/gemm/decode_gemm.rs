//! Products of up to 32 rows at memory speed, with what stands in front and behind in the same launch: `linear/band.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, Parameters},
    },
    ops::{
        KernelPlan,
        frame::{Bound, Frame},
        gemm::fused_linear::{Epilogue, FusedLinear, Norm},
        operand, type_name, weight_type,
    },
};
use dsrun_core::{DType, Error, Result, TensorDesc, WeightFormat, kernels::CallDesc};
use std::{fmt::Display, sync::Arc};

/// The most rows.
const ROWS: usize = 16;
/// The most rows that are normed by every block for itself.
const NORMED_ROWS: usize = 8;
/// Vectors of a row that a thread of [`WARPS`] warps, alone on a multiprocessor, may keep in registers while the row is normed.
const HELD: usize = 32;
/// Warps that multiply.
const WARPS: usize = 8;
/// Inputs of a piece, and bytes of a stage of all rings.
const PIECE: usize = 64;
const STAGE: usize = WARPS * 16 * PIECE * 2;
/// The most stages: 112 KiB under way.
const STAGES: usize = 8;
/// Slices are only worth their sums in scratch memory if they keep so many more of the multiprocessors busy.
const WORTH: f64 = 0.04;

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileConfig {
    tiles: usize,
    slices: usize,
    /// Inputs of a slice.
    slice: usize,
    stages: usize,
    blocks: usize,
    shared: usize,
}

/// Bytes from row to row in shared memory: 64 more than a multiple of 128.
pub(super) fn pitch(bytes: usize) -> usize {
    if bytes % 128 == 64 { bytes } else { bytes.next_multiple_of(128) + 64 }
}

/// How much of the device is busy, on average, until the last block is done.
fn busy(tiles: usize, slices: usize, sm_count: usize) -> f64 {
    let groups = (sm_count / slices).clamp(1, tiles.max(1));
    (tiles * slices) as f64 / (tiles.div_ceil(groups) * sm_count) as f64
}

fn cut(rows: usize, inputs: usize, tiles: usize, device: &DeviceSpec) -> Option<TileConfig> {
    let sm_count = device.sm_count;
    let most_shared = device.shared_memory();
    // Activations may take a third of what a block has.
    let room = most_shared / 3;
    let least = (rows * pitch(inputs * 2)).div_ceil(room);
    let most = if rows == 1 { least } else { least + 8 };
    let mut best: Option<(usize, f64)> = None;
    for slices in least..=most.min(sm_count) {
        let slice = inputs.div_ceil(32 * slices) * 32;
        if (slices - 1) * slice >= inputs || rows * pitch(slice * 2) > room {
            continue;
        }
        let busy = busy(tiles, slices, sm_count);
        if best.is_none_or(|(_, before)| busy > before + WORTH) {
            best = Some((slices, busy));
        }
    }
    let (slices, _) = best?;
    let slice = inputs.div_ceil(32 * slices) * 32;
    // Two sets of sums: 8 warps, 20 floats a row.
    let beside = rows * pitch(slice * 2) + 2 * WARPS * rows * 20 * 4;
    let stages = most_shared.saturating_sub(beside) / STAGE;
    if stages < 3 {
        return None;
    }
    let turns = tiles.div_ceil((sm_count / slices).max(1)).max(1);
    let needed = turns * slice.div_ceil(WARPS * PIECE) + 1;
    let stages = stages.min(STAGES).min(needed.max(3));
    let groups = (sm_count / slices).clamp(1, tiles.max(1));
    // Two large blocks on one multiprocessor would share its bandwidth while another had none.
    let alone = if groups * slices * 2 > sm_count { most_shared / 2 + 1024 } else { 0 };
    let shared = (stages * STAGE + beside).max(alone);
    Some(TileConfig { tiles, slices, slice, stages, blocks: groups * slices, shared })
}

/// A launch of the kernel.
pub(super) struct Band {
    pub(super) spec: KernelSpec,
    pub(super) workspace: usize,
    pub(super) persistent: usize,
    cut: TileConfig,
}

/// The kernel for a chain, if it takes it; `x` are the activations, which may be in scratch memory.
pub(super) fn plan(
    chain: &FusedLinear,
    x: &TensorDesc,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<Band>> {
    let weight = weight_type(call, chain.weight)?;
    let (rows, outputs, inputs) = (x.shape[0], weight.rows(), weight.columns());
    let takes = device.custom_gemm
        && device.capability >= 80
        && (1..=ROWS).contains(&rows)
        && matches!(x.dtype, DType::F16 | DType::BF16)
        && weight.format == WeightFormat::Dense(x.dtype)
        && inputs > 0
        && inputs.is_multiple_of(32)
        && outputs > 0
        && outputs.max(inputs) < 1 << 30
        && x.strides[0].is_multiple_of(8)
        && !chain.norms_heads();
    if !takes {
        return Ok(None);
    }
    if !takes_norm(chain, rows, inputs, call)? {
        return Ok(None);
    }
    let Some(tiles) = tiles(chain, outputs, call)? else { return Ok(None) };
    let Some(cut) = cut(rows, inputs, tiles, device) else { return Ok(None) };
    // The output of one token's attention, as it seems: as many inputs as outputs, no norm, and a residual.
    let plain_sum = matches!(chain.epilogue, Epilogue::Sum(..)) && chain.norm.is_none();
    let behind_attention = rows == 1 && plain_sum && inputs <= outputs;
    let defines: [(_, &dyn Display); 9] = [
        ("WARPS", &WARPS),
        ("X", &type_name(x.dtype)?),
        ("HALF", &i32::from(x.dtype == DType::F16)),
        ("TOKENS", &rows),
        ("SLICES", &cut.slices),
        ("SLICE", &cut.slice),
        ("X_PITCH", &pitch(cut.slice * 2)),
        ("STAGES", &cut.stages),
        ("PACED", &i32::from(behind_attention)),
    ];
    let mut spec = KernelSpec::new("linear/band.cu", "band", defines).with_shared(cut.shared);
    spec.defines.extend(norm_defines(chain, call)?);
    spec.defines.extend(chain.defines(call)?);
    spec.defines.push(("OWN", own_vectors([rows, inputs], WARPS, HELD).to_string()));
    let items = 8 * rows;
    let (workspace, persistent) = match cut.slices {
        1 => (0, 0),
        slices => (tiles * slices * items * 8, tiles * items.div_ceil(32) * 4),
    };
    Ok(Some(Band { spec, workspace, persistent, cut }))
}

/// Whether blocks can norm so many rows for themselves.
pub(super) fn takes_norm(chain: &FusedLinear, rows: usize, inputs: usize, call: &CallDesc) -> Result<bool> {
    let Some(norm) = chain.norm else { return Ok(true) };
    let whole = match norm.weight() {
        Some(gain) => operand(call, gain)?.shape == [inputs],
        None => true,
    };
    Ok(whole && rows <= NORMED_ROWS)
}

/// Tiles of 16 outputs, as the epilogue pairs them; none if it cannot.
pub(super) fn tiles(chain: &FusedLinear, outputs: usize, call: &CallDesc) -> Result<Option<usize>> {
    Ok(match (chain.epilogue, chain.head_sizes(call)?) {
        (Epilogue::Gate(op), _) if op.layout == dsrun_core::op::GateLayout::Concatenated => {
            Some((outputs / 2).div_ceil(8))
        }
        (_, Some([size, value_size, pairs])) => {
            let whole = size.is_multiple_of(16) && value_size.is_multiple_of(16) && pairs.is_multiple_of(8);
            whole.then_some(outputs / 16)
        }
        _ => Some(outputs.div_ceil(16)),
    })
}

/// How many vectors of a row each thread of a block of so many warps has, if they may stay in registers while the row is normed:
/// `most` at most, else 0.
pub(super) fn own_vectors([rows, inputs]: [usize; 2], warps: usize, most: usize) -> usize {
    // Rows share the warps evenly.
    let warps = (warps / rows.next_power_of_two()).max(1);
    let own = inputs.div_ceil(8 * warps * 32);
    if own <= most { own } else { 0 }
}

/// The constants of what stands in front of a product.
pub(super) fn norm_defines(chain: &FusedLinear, call: &CallDesc) -> Result<Vec<(&'static str, String)>> {
    let name = |index: Option<usize>| match index {
        Some(index) => operand(call, index).and_then(|tensor| type_name(tensor.dtype)),
        None => Ok("f32"),
    };
    let norm = match chain.norm {
        None => 0,
        Some(Norm::Rms(..)) => 1,
        Some(Norm::Layer(..)) => 2,
    };
    let (gain, shift) = chain.norm.map_or((None, None), |norm| (norm.weight(), norm.bias()));
    Ok([
        ("BIAS", name(chain.bias)?.to_owned()),
        ("G", name(gain)?.to_owned()),
        ("SHIFT", name(shift)?.to_owned()),
        ("NORM", norm.to_string()),
    ]
    .into())
}

/// `struct Norm` of the kernels.
pub(in crate::ops) fn norm_words(chain: &FusedLinear, frame: &Frame) -> [u64; 3] {
    let optional = |index: Option<usize>| index.map_or(0, |index| frame.address(index));
    let (gain, shift, eps, offset) = match chain.norm {
        None => (0, 0, 0.0f32, 0.0f32),
        Some(Norm::Rms(op, gain)) => (frame.address(gain), 0, op.eps, op.weight_offset),
        Some(Norm::Layer(op, gain, shift)) => (optional(gain), optional(shift), op.eps, 0.0),
    };
    [gain, shift, u64::from(eps.to_bits()) | u64::from(offset.to_bits()) << 32]
}

impl Band {
    /// The kernel as a whole recipe, of activations that are an operand.
    pub(super) fn recipe(self, chain: FusedLinear) -> KernelPlan {
        let (kernels, workspace, persistent) = (vec![self.spec.clone()], self.workspace, self.persistent);
        KernelPlan {
            kernels,
            workspace,
            persistent,
            batch_invariant: true,
            launches: Box::new(move |frame, functions, _| {
                let function =
                    functions.first().ok_or_else(|| Error::internal("a recipe without a kernel"))?;
                let x = frame.tensor(chain.x)?;
                Ok(self.step(&chain, frame, x, frame.workspace, function)?.into_iter().collect())
            }),
        }
    }

    pub(super) fn step(
        &self,
        chain: &FusedLinear,
        frame: &Frame,
        x: &Bound,
        workspace: u64,
        function: &Arc<Function>,
    ) -> Result<Option<LaunchOp>> {
        let weight = frame.weight(chain.weight)?;
        let mut bounds = chain.bounds(frame)?;
        bounds.push(x);
        let parameters = Parameters::default()
            .extent(x.size(0), &bounds)
            .size(self.cut.tiles)
            .size(weight.layout.columns)
            .rows(x)
            .address(weight.address())
            .size(weight.layout.row_bytes)
            .size(usize::from(weight.immutable))
            .words(norm_words(chain, frame))
            .address(workspace)
            .address(frame.persistent)
            .words(chain.epilogue_params(frame, true)?);
        Ok(LaunchOp::kernel(function, [self.cut.blocks, 1, 1], WARPS * 32, parameters))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::one_row(1, 4096, 384)]
    #[case::one_long_row(1, 14_336, 256)]
    #[case::tiny(1, 576, 36)]
    #[case::eight_rows(8, 14_336, 256)]
    #[case::most_rows(16, 4096, 1792)]
    #[case::odd_rows(11, 1600, 100)]
    #[case::long_rows(16, 20_480, 320)]
    fn cuts_cover_the_inputs_and_fit(#[case] rows: usize, #[case] inputs: usize, #[case] tiles: usize) {
        let device = DeviceSpec { capability: 90, sm_count: 132, blas: true, custom_gemm: true };
        let cut = cut(rows, inputs, tiles, &device).unwrap();
        assert!(cut.slices * cut.slice >= inputs && (cut.slices - 1) * cut.slice < inputs, "{cut:?}");
        assert!(cut.slice.is_multiple_of(32), "{cut:?}");
        assert!(cut.blocks <= 132 && cut.blocks.is_multiple_of(cut.slices), "{cut:?}");
        assert!(cut.shared <= device.shared_memory(), "{cut:?}");
        assert!(cut.stages >= 3, "{cut:?}");
    }

    #[rstest]
    #[case(32)]
    #[case(512)]
    #[case(1600)]
    #[case(4096)]
    fn neighbouring_rows_start_half_a_line_apart(#[case] columns: usize) {
        assert!(pitch(columns * 2) >= columns * 2 && pitch(columns * 2) % 128 == 64);
    }
}
