//! The constants and the parameters of an epilogue in `linear/epilogue.cuh`.

use crate::ops::{
    cache,
    frame::{Bound, Frame},
    gemm::fused_linear::{Epilogue, FusedLinear, Heads},
    operand, type_name,
};
use dsrun_core::{
    DType, Error, Result,
    kernels::CallDesc,
    op::{GateLayout, RopePairing},
};

impl FusedLinear {
    /// The constants of the epilogue, whose results are of type `y`.
    pub(super) fn epilogue_defines(&self, call: &CallDesc, y: DType) -> Result<Vec<(&'static str, String)>> {
        let (mut epilogue, mut function, mut interleaved) = (0, 1, false);
        let (mut rope, mut neighbours, mut cache) = (false, false, DType::F32);
        match self.epilogue {
            Epilogue::Nothing => {}
            Epilogue::Sum(..) => epilogue = 1,
            Epilogue::Activation(op) => (epilogue, function) = (2, op.function as u32),
            Epilogue::Gate(op) => {
                (epilogue, function) = (3, op.function as u32);
                interleaved = op.layout == GateLayout::Interleaved;
            }
            Epilogue::Heads(heads) => {
                epilogue = 4;
                rope = heads.rope.is_some();
                neighbours = heads.rope.is_some_and(|rope| rope.pairing == RopePairing::Neighbours);
                cache = operand(call, heads.caches[0])?.dtype;
            }
        }
        Ok([
            ("EPILOGUE", epilogue.to_string()),
            ("FUNCTION", function.to_string()),
            ("INTERLEAVED", i32::from(interleaved).to_string()),
            ("ROPE", i32::from(rope).to_string()),
            ("NEIGHBOURS", i32::from(neighbours).to_string()),
            ("CACHE", type_name(cache)?.to_owned()),
            ("Y", type_name(y)?.to_owned()),
        ]
        .into())
    }

    /// `struct Epilogue` of `linear/epilogue.cuh` with results in `y`, with or without the bias.
    pub(super) fn epilogue_params(&self, frame: &Frame, y: &Bound, with_bias: bool) -> Result<[u64; 26]> {
        let bits = |low: f32, high: f32| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
        let mut words = [0; 26];
        words[0] = frame.weight(self.weight)?.layout.rows as u64;
        words[1] = self.bias.filter(|_| with_bias).map_or(0, |bias| frame.address(bias));
        words[2] = y.address;
        words[3] = y.stride(0) as u64;
        match self.epilogue {
            Epilogue::Nothing => {}
            Epilogue::Sum(op, residual) => {
                let residual = frame.tensor(residual)?;
                words[4] = residual.address;
                words[5] = residual.stride(0) as u64;
                words[6] = bits(op.alpha, 0.0);
            }
            Epilogue::Activation(op) => words[6] = bits(0.0, op.limit),
            Epilogue::Gate(op) => words[6] = bits(0.0, op.limit),
            Epilogue::Heads(heads) => {
                let (keys, values) = (frame.result(1)?, frame.result(2)?);
                let size = keys.size(3);
                words[7] = (heads.columns[0] / size.max(1)) as u64;
                words[8..11].copy_from_slice(&[keys.size(1) as u64, size as u64, values.size(3) as u64]);
                if let Some(rope) = heads.rope {
                    let frequencies = frame.tensor(rope.frequencies)?;
                    words[11] = frequencies.size(0) as u64;
                    words[12] = frame.tensor(rope.positions)?.address;
                    words[13] = frequencies.address;
                    words[14] = bits(rope.scales[0], rope.scales[1]);
                }
                words[15] = frame.tensor(heads.slots)?.address;
                words[16] = keys.size(0) as u64;
                words[17] = keys.size(2) as u64;
                words[18] = keys.address;
                words[19..22].copy_from_slice(&cache::strides(keys));
                words[22] = values.address;
                words[23..26].copy_from_slice(&cache::strides(values));
            }
        }
        Ok(words)
    }

    /// Same as [`Self::epilogue_params`] with the bias, for rows from `first` on.
    pub(super) fn epilogue_params_from(&self, frame: &Frame, y: &Bound, first: usize) -> Result<[u64; 26]> {
        let mut words = self.epilogue_params(frame, y, true)?;
        if first == 0 {
            return Ok(words);
        }
        let element = y.desc.dtype.bytes() as u64;
        words[2] += first as u64 * words[3] * element;
        match self.epilogue {
            Epilogue::Sum(..) => words[4] += first as u64 * words[5] * element,
            Epilogue::Heads(_) => {
                // The words of positions, if present, and of slots.
                for word in [12, 15] {
                    words[word] += if words[word] == 0 { 0 } else { first as u64 * 4 };
                }
            }
            _ => {}
        }
        Ok(words)
    }

    /// The key and value sizes of a head, and its rotated pairs; fails for heads that no kernel supports.
    pub(in crate::ops) fn head_sizes(&self, call: &CallDesc) -> Result<Option<[usize; 3]>> {
        let Epilogue::Heads(heads) = self.epilogue else { return Ok(None) };
        let (keys, values) = (operand(call, heads.caches[0])?, operand(call, heads.caches[1])?);
        let (size, value_size) = (keys.shape[3], values.shape[3]);
        let pairs = match heads.rope {
            Some(rope) => operand(call, rope.frequencies)?.shape[0],
            None => 0,
        };
        if size == 0 || !heads.columns[0].is_multiple_of(size) {
            let message = format!("query width {} is not a multiple of head size {size}", heads.columns[0]);
            return Err(Error::unsupported(message));
        }
        for (_, weight) in heads.norms.iter().flatten() {
            let width = operand(call, *weight)?.shape[0];
            if width != size {
                let message =
                    format!("CUDA has no fused kernel for norms of {width} elements in heads of {size}");
                return Err(Error::unsupported(message));
            }
        }
        Ok(Some([size, value_size, pairs]))
    }

    /// The numbers of query and KV heads, the key and value sizes of a head, and its rotated pairs.
    pub(in crate::ops) fn heads(&self, call: &CallDesc) -> Result<Option<[usize; 5]>> {
        let (Epilogue::Heads(heads), Some([size, value_size, pairs])) =
            (self.epilogue, self.head_sizes(call)?)
        else {
            return Ok(None);
        };
        let kv_heads = operand(call, heads.caches[0])?.shape[1];
        Ok(Some([heads.columns[0] / size, kv_heads, size, value_size, pairs]))
    }

    /// The element type of the KV cache that heads are written to.
    pub(super) fn cache_type(&self, call: &CallDesc) -> Option<DType> {
        match self.epilogue {
            Epilogue::Heads(heads) => call.tensor(heads.caches[0]).map(|cache| cache.dtype),
            _ => None,
        }
    }

    /// Whether heads are normalised, which needs whole heads, while a tile has only a part of a head.
    pub(in crate::ops) fn norms_heads(&self) -> bool {
        matches!(self.epilogue, Epilogue::Heads(Heads { norms: Some(_), .. }))
    }
}
