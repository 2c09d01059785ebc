//! The constants and the parameters of an epilogue in `linear/epilogue.cuh`.

use crate::{
    driver::kernel_struct::{Pointer, declaration, header, kernel_struct},
    ops::{
        bound::Bound,
        frame::Frame,
        gemm::fused_linear::{Epilogue, FusedLinear, Heads, NormSpan},
        operand,
        params::Strides,
        type_name,
    },
};
use dsrun_core::{
    DType, Error, Result,
    kernels::CallDesc,
    op::{GateLayout, RopePairing},
};

kernel_struct! {
    /// Parameters of an epilogue.
    pub(super) struct EpilogueParams {
        pub(super) outputs: i64 = "i64",
        /// May be null.
        pub(super) bias: Pointer = "const BIAS*",
        pub(super) y: Pointer = "Y*",
        pub(super) y_row: i64 = "i64",
        /// A residual sum: y = added + alpha * product.
        pub(super) added: Pointer = "const Y*",
        pub(super) added_row: i64 = "i64",
        pub(super) alpha: f32 = "float",
        /// The limit of an activation; 0 for none.
        pub(super) limit: f32 = "float",
        /// Query, key and value: their heads.
        pub(super) query_heads: i64 = "i64",
        pub(super) kv_heads: i64 = "i64",
        pub(super) key_size: i64 = "i64",
        pub(super) value_size: i64 = "i64",
        /// The rotated pairs of a head.
        pub(super) pairs: i64 = "i64",
        pub(super) positions: Pointer = "const int*",
        pub(super) frequencies: Pointer = "const float*",
        pub(super) query_scale: f32 = "float",
        pub(super) key_scale: f32 = "float",
        /// The slots of rows in the cache.
        pub(super) places: Pointer = "const int*",
        pub(super) pages: i64 = "i64",
        /// The slots of a page.
        pub(super) slots: i64 = "i64",
        pub(super) keys: Pointer = "CACHE*",
        pub(super) key_strides: Strides = "Strides",
        pub(super) values: Pointer = "CACHE*",
        pub(super) value_strides: Strides = "Strides",
    }
}

/// The generated header of these parameters.
pub(in crate::ops) fn params_header() -> (String, String) {
    let text = header("Parameters of the epilogue of products.", &[declaration::<EpilogueParams>()]);
    ("linear/epilogue_params.cuh".to_owned(), text)
}

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

    /// The parameters of the epilogue with results in `y`, with or without the bias.
    pub(super) fn epilogue_params(
        &self,
        frame: &Frame,
        y: &Bound,
        with_bias: bool,
    ) -> Result<EpilogueParams> {
        let mut params = EpilogueParams {
            outputs: frame.weight(self.weight)?.layout.rows as i64,
            bias: self.bias.filter(|_| with_bias).map_or(0, |bias| frame.address(bias)),
            y: y.address,
            y_row: y.stride(0) as i64,
            ..EpilogueParams::default()
        };
        match self.epilogue {
            Epilogue::Nothing => {}
            Epilogue::Sum(op, residual) => {
                let residual = frame.tensor(residual)?;
                params.added = residual.address;
                params.added_row = residual.stride(0) as i64;
                params.alpha = op.alpha;
            }
            Epilogue::Activation(op) => params.limit = op.limit,
            Epilogue::Gate(op) => params.limit = op.limit,
            Epilogue::Heads(heads) => {
                let (keys, values) = (frame.result(1)?, frame.result(2)?);
                let size = keys.size(3);
                params.query_heads = (heads.columns[0] / size.max(1)) as i64;
                params.kv_heads = keys.size(1) as i64;
                params.key_size = size as i64;
                params.value_size = values.size(3) as i64;
                if let Some(rope) = heads.rope {
                    let frequencies = frame.tensor(rope.frequencies)?;
                    params.pairs = frequencies.size(0) as i64;
                    params.positions = frame.tensor(rope.positions)?.address;
                    params.frequencies = frequencies.address;
                    [params.query_scale, params.key_scale] = rope.scales;
                }
                params.places = frame.tensor(heads.slots)?.address;
                params.pages = keys.size(0) as i64;
                params.slots = keys.size(2) as i64;
                params.keys = keys.address;
                params.key_strides = Strides::of(keys);
                params.values = values.address;
                params.value_strides = Strides::of(values);
            }
        }
        Ok(params)
    }

    /// Same as [`Self::epilogue_params`] with the bias, for rows from `first` on.
    pub(super) fn epilogue_params_from(
        &self,
        frame: &Frame,
        y: &Bound,
        first: usize,
    ) -> Result<EpilogueParams> {
        let mut params = self.epilogue_params(frame, y, true)?;
        let (first, element) = (first as u64, y.desc.dtype.bytes() as u64);
        params.y += first * params.y_row as u64 * element;
        params.added += first * params.added_row as u64 * element;
        // The positions and slots of rows, if present.
        for rows in [&mut params.positions, &mut params.places] {
            *rows += if *rows == 0 { 0 } else { first * size_of::<i32>() as u64 };
        }
        Ok(params)
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
        self.norm_span(call)?;
        Ok(Some([size, value_size, pairs]))
    }

    /// What the norms of queries and keys cover; fails for others than those of each head, or over all heads.
    pub(in crate::ops) fn norm_span(&self, call: &CallDesc) -> Result<Option<NormSpan>> {
        let Epilogue::Heads(Heads { norms: Some(norms), caches, columns, .. }) = self.epilogue else {
            return Ok(None);
        };
        let size = operand(call, caches[0])?.shape[3];
        let width = |index: usize| Ok::<_, Error>(operand(call, norms[index].1)?.shape[0]);
        match [width(0)?, width(1)?] {
            widths if widths == [size; 2] => Ok(Some(NormSpan::EachHead)),
            widths if widths == columns[..2] => Ok(Some(NormSpan::AllHeads)),
            [query, key] => Err(Error::unsupported(format!(
                "CUDA has no fused kernel for norms of {query} and {key} elements over heads of {size}"
            ))),
        }
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
