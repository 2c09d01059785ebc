//! An epilogue as a separate launch, applied to a product in scratch memory: `linear/apply_epilogue.cu` and `linear/heads.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, MAX_GRID, Parameters},
    },
    ops::{
        THREADS, WIDE,
        bound::Bound,
        evenly,
        frame::Frame,
        gemm::fused_linear::{Epilogue, FusedLinear, NormSpan},
        operand, plane, result, type_name,
    },
};
use dsrun_core::{Error, Result, TensorDesc, kernels::CallDesc, op::RmsNorm};
use std::{fmt::Display, sync::Arc};

/// A separate launch that applies an epilogue.
pub(super) struct ApplyEpilogue {
    pub(super) spec: KernelSpec,
    fused: FusedLinear,
    /// Blocks per row, threads per block, and resident rows of the heads kernel; `None` if the epilogue does not split into
    /// heads.
    heads: Option<([usize; 2], usize)>,
    /// Results per thread if the epilogue does not split into heads.
    results: usize,
}

/// Threads of a block of `heads`.
const HEAD_THREADS: usize = 128;
/// The maximum number of threads of a block of `heads_wide`, which processes [`WIDE`] elements at a time.
const WIDE_HEAD_THREADS: usize = 256;
/// Threads of `heads_wide` that an SM has registers for.
const HEADS_AT_ONCE: usize = 1024;

/// The number of blocks for the heads of a row, with `lanes` lanes per head, and the threads of a block.
fn head_blocks(heads: usize, lanes: usize) -> [usize; 2] {
    let most = WIDE_HEAD_THREADS / lanes;
    // The threads of a block are whole warps.
    let in_block = heads.div_ceil(heads.div_ceil(most).max(1)).next_multiple_of(32 / lanes).max(32 / lanes);
    [heads.div_ceil(in_block), in_block * lanes]
}

impl ApplyEpilogue {
    /// The launch for the epilogue of a fused layer, whose product is `product`.
    pub(super) fn new(
        fused: FusedLinear,
        product: &TensorDesc,
        call: &CallDesc,
        device: &DeviceSpec,
    ) -> Result<Self> {
        let wide = is_wide(&fused, product, call)?;
        let x = type_name(product.dtype)?;
        let sizes = fused.head_sizes(call)?;
        // A thread processes 8 elements of each half of rotated pairs, or 8 that are not rotated.
        let lanes = sizes.map(|[size, _, pairs]| ((size - pairs) / WIDE).next_power_of_two().clamp(1, 32));
        let heads = match (fused.epilogue, lanes) {
            (Epilogue::Heads(heads), Some(lanes)) => {
                let keys = &operand(call, heads.caches[0])?.shape;
                let count = heads.columns[0] / keys[3].max(1) + 2 * keys[1];
                let [blocks, threads] = if wide {
                    head_blocks(count, lanes)
                } else {
                    [count.div_ceil(HEAD_THREADS / 32), HEAD_THREADS]
                };
                let at_once = device.sm_count * (HEADS_AT_ONCE / threads);
                let rows = if wide { at_once.div_ceil(blocks.max(1)) } else { MAX_GRID };
                Some(([blocks, threads], rows))
            }
            _ => None,
        };
        let mut spec = match fused.epilogue {
            Epilogue::Heads(heads) => {
                let weight = |index: usize| match heads.norms {
                    Some(norms) => operand(call, norms[index].1).and_then(|weight| type_name(weight.dtype)),
                    None => Ok("f32"),
                };
                let over_all = fused.norm_span(call)? == Some(NormSpan::AllHeads);
                let defines: [(_, &dyn Display); 6] = [
                    ("X", &x),
                    ("BIAS", &"f32"),
                    ("HEAD_NORMS", &i32::from(heads.norms.is_some())),
                    ("OVER_ALL_HEADS", &i32::from(over_all)),
                    ("QUERY_GAIN", &weight(0)?),
                    ("KEY_GAIN", &weight(1)?),
                ];
                KernelSpec::new("linear/heads.cu", if wide { "heads_wide" } else { "heads" }, defines)
            }
            _ => {
                let defines: [(_, &dyn Display); 2] = [("X", &x), ("BIAS", &"f32")];
                let entry = if wide { "apply_epilogue_wide" } else { "apply_epilogue_rows" };
                KernelSpec::new("linear/apply_epilogue.cu", entry, defines)
            }
        };
        spec.defines.push(("WIDE", i32::from(wide).to_string()));
        if let (true, Some(([_, threads], _)), Some(lanes), Some([_, _, pairs])) = (wide, heads, lanes, sizes)
        {
            spec.defines.extend([
                ("LANES", lanes.to_string()),
                ("PAIRS", pairs.to_string()),
                ("THREADS", threads.to_string()),
                ("AT_ONCE", HEADS_AT_ONCE.to_string()),
            ]);
        }
        spec.defines.extend(fused.epilogue_defines(call, result(call, 0)?.dtype)?);
        Ok(Self { spec, fused, heads, results: if wide { WIDE } else { 1 } })
    }

    /// The launch for a product that is bound.
    pub(super) fn launch(
        &self,
        frame: &Frame,
        product: &Bound,
        function: &Arc<Function>,
    ) -> Result<Option<LaunchOp>> {
        let (fused, y) = (&self.fused, frame.result(0)?);
        let mut bounds = fused.row_operands(frame)?;
        bounds.push(y);
        let (rows, outputs) = (product.size(0), product.size(1));
        let parameters = Parameters::default()
            .extent(rows, &bounds)
            .rows(product)
            .structure(&fused.epilogue_params(frame, y, false)?);
        let Epilogue::Heads(heads) = fused.epilogue else {
            let items = match self.results {
                // One thread per pair; tiles of eight pairs may extend past the last output.
                1 => outputs.div_ceil(16) * 8 + 8,
                results => y.size(1) / results,
            };
            return Ok(LaunchOp::kernel(function, plane(rows, items), THREADS, parameters));
        };
        let mut parameters = parameters;
        for index in 0..2 {
            let (norm, weight) = heads.norms.map_or((RmsNorm { eps: 0.0, weight_offset: 0.0 }, 0), |norms| {
                (norms[index].0, frame.address(norms[index].1))
            });
            parameters = parameters.address(weight).float(norm.eps).float(norm.weight_offset);
        }
        let ([blocks, threads], at_once) =
            self.heads.ok_or_else(|| Error::internal("heads without a size"))?;
        Ok(LaunchOp::kernel(function, [blocks, evenly(rows, at_once), 1], threads, parameters))
    }
}

/// Whether all rows allow vectors of [`WIDE`] elements.
fn is_wide(fused: &FusedLinear, product: &TensorDesc, call: &CallDesc) -> Result<bool> {
    let whole = |tensor: &TensorDesc| tensor.strides[0].is_multiple_of(WIDE);
    let results = result(call, 0)?;
    let rows = whole(product) && whole(results) && results.shape[1].is_multiple_of(WIDE);
    Ok(rows
        && match fused.epilogue {
            Epilogue::Sum(_, residual) => whole(operand(call, residual)?),
            Epilogue::Heads(heads) => {
                let cache = |index: usize| {
                    let strides = &operand(call, heads.caches[index])?.strides;
                    Ok::<_, Error>(strides.iter().take(3).all(|stride| stride.is_multiple_of(WIDE)))
                };
                let sizes = fused.head_sizes(call)?.unwrap_or_default();
                sizes.iter().all(|size| size.is_multiple_of(WIDE)) && cache(0)? && cache(1)?
            }
            _ => true,
        })
}
