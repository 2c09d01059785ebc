//! A product with what stands in front of it and behind it: the regions of a decoder layer.
//!
//! A body is read as norm?, linear, and then nothing, a residual sum, an activation, or what makes queries, keys and values
//! of the product. Few rows of half precision take one launch (see [`super::band`]). Else it takes up to three: the norm into
//! scratch memory, the product by whichever kernel [`super::linear`] has for it into scratch memory, and one kernel for all
//! that is behind it; or the latter two in one (see [`super::batch`]). So every number of rows is native, and one compiled
//! program serves them all.

use crate::{
    arch::DeviceSpec,
    driver::{
        context::Context,
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, MAX_GRID, Parameters},
    },
    ops::{
        KernelPlan, THREADS, WIDE,
        body::{BodyReader, made, value},
        evenly,
        frame::{Bound, Frame},
        gemm::{
            decode_gemm,
            linear::{Args, Layer},
            packed_gemm, small_batch,
        },
        norm, operand, plane, result, type_name, weight_type,
    },
};
use dsrun_core::{
    DType, Error, Result, TensorDesc, WeightType,
    kernels::CallDesc,
    op::{
        Activation, Add, GateLayout, GatedActivation, LayerNorm, Nonlinearity, Op, RmsNorm, Rope, RopePairing,
    },
    program::Call,
    region::{Region, well_known::Norm as Norms},
};
use std::{fmt::Display, ops::Range, sync::Arc};

/// A norm in front, with the operands that are its vectors.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) enum Norm {
    Rms(RmsNorm, usize),
    Layer(LayerNorm, Option<usize>, Option<usize>),
}

impl Norm {
    /// The operand that is its weight.
    pub(in crate::ops) fn weight(&self) -> Option<usize> {
        match self {
            Self::Rms(_, gain) => Some(*gain),
            Self::Layer(_, gain, _) => *gain,
        }
    }

    /// The operand that is its bias.
    pub(in crate::ops) fn bias(&self) -> Option<usize> {
        match self {
            Self::Rms(..) => None,
            Self::Layer(_, _, shift) => *shift,
        }
    }
}

impl Norm {
    /// Its attributes, as bits that are equal for equal norms: the kind, epsilon, and the offset of the weight.
    pub(in crate::ops) fn scalars(self) -> [u32; 3] {
        match self {
            Self::Rms(op, _) => [1, op.eps.to_bits(), op.weight_offset.to_bits()],
            Self::Layer(op, ..) => [2, op.eps.to_bits(), 0],
        }
    }

    /// Its epsilon, and the offset of its weight.
    pub(in crate::ops) fn eps_and_offset(self) -> (f32, f32) {
        match self {
            Self::Rms(op, _) => (op.eps, op.weight_offset),
            Self::Layer(op, ..) => (op.eps, 0.0),
        }
    }

    /// The norm that the next call of a body is, with the values it reads and makes; the inner `None`: one that is not understood.
    #[allow(clippy::option_option, reason = "no norm, and a norm that no kernel takes, differ")]
    fn read(reader: &mut BodyReader<'_>) -> Option<Option<(Self, usize, usize)>> {
        let (norm, call) = reader.take(Norms::of)?;
        let norm = match norm {
            Norms::Rms(op) => value(call, 1).map(|weight| Self::Rms(op, weight)),
            Norms::Layer(op) => Some(Self::Layer(op, value(call, 1), value(call, 2))),
        };
        Some((|| Some((norm?, value(call, 0)?, made(call, 0)?)))())
    }
}

/// How queries and keys are turned, and the operands that say by how much.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct RopeParams {
    pub(in crate::ops) pairing: RopePairing,
    pub(in crate::ops) scales: [f32; 2],
    pub(in crate::ops) positions: usize,
    pub(in crate::ops) frequencies: usize,
}

/// What makes queries, keys and values of a product.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Heads {
    /// Norms of the heads of queries and keys, with the operands that are their weights.
    pub(in crate::ops) norms: Option<[(RmsNorm, usize); 2]>,
    pub(in crate::ops) rope: Option<RopeParams>,
    /// The caches and the slots.
    pub(in crate::ops) caches: [usize; 2],
    pub(in crate::ops) slots: usize,
    /// Columns of queries, keys and values.
    pub(in crate::ops) columns: [usize; 3],
}

/// What stands behind a product.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) enum Epilogue {
    Nothing,
    /// A residual, which is this operand.
    Sum(Add, usize),
    Activation(Activation),
    Gate(GatedActivation),
    Heads(Heads),
}

/// Norm, product and what is behind it. Numbers are those of the call's operands.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct FusedLinear {
    pub(in crate::ops) norm: Option<Norm>,
    pub(in crate::ops) x: usize,
    /// Scales of the rows of `x`, where those are bytes.
    pub(in crate::ops) scales: Option<usize>,
    pub(in crate::ops) weight: usize,
    pub(in crate::ops) bias: Option<usize>,
    /// Element type of the product.
    pub(in crate::ops) product: DType,
    pub(in crate::ops) epilogue: Epilogue,
}

impl Epilogue {
    /// What becomes of a product, as far as the next calls of a body tell, and the numbers of the results.
    fn read(reader: &mut BodyReader<'_>, product: usize) -> Option<(Self, Vec<usize>)> {
        if let Some(heads) = Heads::read(reader, product) {
            return heads;
        }
        let Some(call) = reader.peek() else { return Some((Self::Nothing, vec![product])) };
        let epilogue = match &call.op {
            Op::Add(op) if value(call, 1) == Some(product) && absent(call, 2..4) => {
                value(call, 0).map(|residual| Self::Sum(*op, residual))
            }
            Op::Activation(op) if value(call, 0) == Some(product) && absent(call, 1..2) => {
                Some(Self::Activation(*op))
            }
            Op::GatedActivation(op)
                if value(call, 0) == Some(product)
                    && absent(call, 1..3)
                    && op.layout != GateLayout::Separate =>
            {
                Some(Self::Gate(*op))
            }
            _ => None,
        };
        let Some(epilogue) = epilogue else { return Some((Self::Nothing, vec![product])) };
        reader.take(|_| Some(()))?;
        Some((epilogue, vec![made(call, 0)?]))
    }
}

/// Whether these operands of a call are left out.
fn absent(call: &Call, operands: Range<usize>) -> bool {
    operands.into_iter().all(|index| value(call, index).is_none())
}

impl Heads {
    /// What makes queries, keys and values of a product, with the numbers of the query and both caches: `None` if the next call takes no
    /// columns of it, an inner `None` if what follows is not understood.
    #[allow(clippy::option_option, reason = "no heads, and heads that no kernel takes, differ")]
    fn read(reader: &mut BodyReader<'_>, product: usize) -> Option<Option<(Epilogue, Vec<usize>)>> {
        let first = reader.peek()?;
        let columns = matches!(first.op, Op::Columns(_)) && value(first, 0) == Some(product);
        columns.then(|| Self::read_columns(reader, product))
    }

    fn read_columns(reader: &mut BodyReader<'_>, product: usize) -> Option<(Epilogue, Vec<usize>)> {
        let mut columns = [0; 3];
        let mut values = [product; 3];
        let mut start = 0;
        for (count, part) in columns.iter_mut().zip(&mut values) {
            let (op, call) = reader.take(|op| if let Op::Columns(op) = op { Some(*op) } else { None })?;
            if value(call, 0) != Some(product) || op.start as usize != start {
                return None;
            }
            *count = op.count as usize;
            *part = made(call, 0)?;
            start += *count;
        }
        let [mut query, mut key, values] = values;
        let rms = |op: &Op| if let Op::RmsNorm(op) = op { Some(*op) } else { None };
        let mut norms = None;
        if let Some((first, call)) = reader.take(rms) {
            let (second, other) = reader.take(rms)?;
            if (value(call, 0), value(other, 0)) != (Some(query), Some(key)) {
                return None;
            }
            norms = Some([(first, value(call, 1)?), (second, value(other, 1)?)]);
            (query, key) = (made(call, 0)?, made(other, 0)?);
        }
        let rotation = |op: &Op| if let Op::Rope(op) = op { Some(*op) } else { None };
        let mut rope = None;
        if let Some((first, call)) = reader.take(rotation) {
            let (second, other): (Rope, _) = reader.take(rotation)?;
            let alike = (1..3).all(|index| value(call, index) == value(other, index));
            if (value(call, 0), value(other, 0)) != (Some(query), Some(key))
                || !alike
                || first.pairing != second.pairing
            {
                return None;
            }
            rope = Some(RopeParams {
                pairing: first.pairing,
                scales: [first.scale, second.scale],
                positions: value(call, 1)?,
                frequencies: value(call, 2)?,
            });
            (query, key) = (made(call, 0)?, made(other, 0)?);
        }
        let (_, call) = reader.take(|op| matches!(op, Op::KvWrite(_)).then_some(()))?;
        if (value(call, 2), value(call, 3)) != (Some(key), Some(values)) {
            return None;
        }
        let caches = [value(call, 0)?, value(call, 1)?];
        let slots = value(call, 4)?;
        let results = vec![query, made(call, 0)?, made(call, 1)?];
        Some((Epilogue::Heads(Self { norms, rope, caches, slots, columns }), results))
    }
}

impl FusedLinear {
    /// A linear layer by itself: operands `x`, `weight`, `bias`.
    pub(super) fn of_linear(call: &CallDesc, product: DType) -> Self {
        let bias = call.tensor(2).map(|_| 2);
        Self { norm: None, x: 0, scales: None, weight: 1, bias, product, epilogue: Epilogue::Nothing }
    }

    /// A linear layer over bytes by itself: operands `x`, `scales`, `weight`, `bias`.
    pub(super) fn of_linear_w8a8(call: &CallDesc, product: DType) -> Self {
        let bias = call.tensor(3).map(|_| 3);
        Self { norm: None, x: 0, scales: Some(1), weight: 2, bias, product, epilogue: Epilogue::Nothing }
    }

    /// The fused linear layer that a region's body is, if it is one; its operands are those of the region.
    pub(in crate::ops) fn of_region(region: &Region) -> Option<Self> {
        let mut reader = BodyReader::new(region);
        let (fused, results) = Self::read(&mut reader)?;
        let whole = reader.is_done() && region.results().iter().map(|value| value.index()).eq(results);
        (whole && fused.values().all(|value| value < region.operands())).then_some(fused)
    }

    /// Reads a fused linear layer from the next calls of a body, as long as it gets, and the numbers of its results. Its operands may
    /// be any values of the body.
    pub(in crate::ops) fn read(reader: &mut BodyReader<'_>) -> Option<(Self, Vec<usize>)> {
        let norm = match Norm::read(reader) {
            Some(norm) => Some(norm?),
            None => None,
        };
        // The element type of the product, and whether its activations are quantised.
        let ((dtype, quantised), call) = reader.take(|op| match op {
            Op::Linear(op) => Some((op.dtype, false)),
            Op::LinearW8A8(op) if norm.is_none() => Some((op.dtype, true)),
            _ => None,
        })?;
        let x = value(call, 0)?;
        let (norm, x) = match norm {
            Some((norm, input, normed)) if normed == x => (Some(norm), input),
            Some(_) => return None,
            None => (None, x),
        };
        let scales = if quantised { Some(value(call, 1)?) } else { None };
        let weight = 1 + usize::from(quantised);
        let (weight, bias) = (value(call, weight)?, value(call, weight + 1));
        let (epilogue, results) = Epilogue::read(reader, made(call, 0)?)?;
        Some((Self { norm, x, scales, weight, bias, product: dtype, epilogue }, results))
    }

    /// The scale of a sum's product and the limit of an activation: `alpha` and `limit` of the kernels.
    pub(in crate::ops) fn scalars(&self) -> [f32; 2] {
        match self.epilogue {
            Epilogue::Nothing | Epilogue::Heads(_) => [0.0; 2],
            Epilogue::Sum(op, _) => [op.alpha, 0.0],
            Epilogue::Activation(op) => [0.0, op.limit],
            Epilogue::Gate(op) => [0.0, op.limit],
        }
    }

    /// The nonlinearity of its activation; the identity if it has none.
    pub(in crate::ops) fn function(&self) -> u32 {
        match self.epilogue {
            Epilogue::Activation(op) => op.function as u32,
            Epilogue::Gate(op) => op.function as u32,
            _ => Nonlinearity::Relu as u32,
        }
    }

    /// The values it reads.
    fn values(&self) -> impl Iterator<Item = usize> {
        let mut values = vec![self.x, self.weight];
        values.extend(self.scales.into_iter().chain(self.bias));
        values.extend(self.norm.into_iter().flat_map(|norm| [norm.weight(), norm.bias()]).flatten());
        match self.epilogue {
            Epilogue::Nothing | Epilogue::Activation(_) | Epilogue::Gate(_) => {}
            Epilogue::Sum(_, residual) => values.push(residual),
            Epilogue::Heads(heads) => {
                values.extend(heads.norms.into_iter().flatten().map(|(_, weight)| weight));
                values.extend(heads.rope.into_iter().flat_map(|rope| [rope.positions, rope.frequencies]));
                values.extend(heads.caches.into_iter().chain([heads.slots]));
            }
        }
        values.into_iter()
    }

    /// Operands over the rows, beside the results: their extents count.
    fn row_operands(&self) -> Vec<usize> {
        let mut operands = vec![self.x];
        operands.extend(self.scales);
        match self.epilogue {
            Epilogue::Sum(_, residual) => operands.push(residual),
            Epilogue::Heads(heads) => {
                operands.push(heads.slots);
                operands.extend(heads.rope.map(|turn| turn.positions));
            }
            _ => {}
        }
        operands
    }

    /// Everything whose extent says how many rows are real.
    pub(super) fn bounds<'a>(&self, frame: &'a Frame) -> Result<Vec<&'a Bound>> {
        let mut bounds =
            self.row_operands().into_iter().map(|index| frame.tensor(index)).collect::<Result<Vec<_>>>()?;
        bounds.push(frame.result(0)?);
        Ok(bounds)
    }

    /// The constants of `linear/epilogue.cuh`.
    pub(super) fn defines(&self, call: &CallDesc) -> Result<Vec<(&'static str, String)>> {
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
                neighbours = heads.rope.is_some_and(|turn| turn.pairing == RopePairing::Neighbours);
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
            ("Y", type_name(result(call, 0)?.dtype)?.to_owned()),
        ]
        .into())
    }

    /// `struct Epilogue` of `linear/epilogue.cuh`, with or without the bias.
    pub(super) fn epilogue_params(&self, frame: &Frame, with_bias: bool) -> Result<[u64; 26]> {
        let y = frame.result(0)?;
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
                if let Some(turn) = heads.rope {
                    let frequencies = frame.tensor(turn.frequencies)?;
                    words[11] = frequencies.size(0) as u64;
                    words[12] = frame.tensor(turn.positions)?.address;
                    words[13] = frequencies.address;
                    words[14] = bits(turn.scales[0], turn.scales[1]);
                }
                words[15] = frame.tensor(heads.slots)?.address;
                words[16] = keys.size(0) as u64;
                words[17] = keys.size(2) as u64;
                words[18] = keys.address;
                words[19..22].copy_from_slice(&crate::ops::cache::strides(keys));
                words[22] = values.address;
                words[23..26].copy_from_slice(&crate::ops::cache::strides(values));
            }
        }
        Ok(words)
    }

    /// The same with the bias, for rows from `first` on: what lies over rows begins there.
    pub(super) fn epilogue_params_from(&self, frame: &Frame, first: usize) -> Result<[u64; 26]> {
        let mut words = self.epilogue_params(frame, true)?;
        if first == 0 {
            return Ok(words);
        }
        let y = frame.result(0)?;
        let element = y.desc.dtype.bytes() as u64;
        words[2] += first as u64 * words[3] * element;
        match self.epilogue {
            Epilogue::Sum(..) => words[4] += first as u64 * words[5] * element,
            Epilogue::Heads(_) => {
                // Positions, where there are some, and slots.
                for word in [12, 15] {
                    words[word] += if words[word] == 0 { 0 } else { first as u64 * 4 };
                }
            }
            _ => {}
        }
        Ok(words)
    }

    /// Sizes of a head's key and value and how many pairs are turned; refuses heads that no kernel takes.
    pub(in crate::ops) fn head_sizes(&self, call: &CallDesc) -> Result<Option<[usize; 3]>> {
        let Epilogue::Heads(heads) = self.epilogue else { return Ok(None) };
        let (keys, values) = (operand(call, heads.caches[0])?, operand(call, heads.caches[1])?);
        let (size, value_size) = (keys.shape[3], values.shape[3]);
        let pairs = match heads.rope {
            Some(turn) => operand(call, turn.frequencies)?.shape[0],
            None => 0,
        };
        if size == 0 || !heads.columns[0].is_multiple_of(size) {
            let message = format!("{} columns of queries are no heads of {size}", heads.columns[0]);
            return Err(Error::unsupported(message));
        }
        for (_, gain) in heads.norms.iter().flatten() {
            let width = operand(call, *gain)?.shape[0];
            if width != size {
                let message = format!("CUDA has no fused kernel for norms of {width} in heads of {size}");
                return Err(Error::unsupported(message));
            }
        }
        Ok(Some([size, value_size, pairs]))
    }

    /// Heads of queries and of keys, sizes of a head's key and value, and pairs that are turned: as [`Self::epilogue`] has them.
    pub(in crate::ops) fn heads(&self, call: &CallDesc) -> Result<Option<[usize; 5]>> {
        let (Epilogue::Heads(heads), Some([size, value_size, pairs])) =
            (self.epilogue, self.head_sizes(call)?)
        else {
            return Ok(None);
        };
        let kv_heads = operand(call, heads.caches[0])?.shape[1];
        Ok(Some([heads.columns[0] / size, kv_heads, size, value_size, pairs]))
    }

    /// The size of heads, all alike, that are turned by pairs half a head apart, if at all, so that what has 8 elements of a half and
    /// of the other can finish them and write them 16 bytes at a time.
    pub(super) fn halves(&self, call: &CallDesc) -> Result<Option<usize>> {
        let Epilogue::Heads(heads) = self.epilogue else { return Ok(None) };
        let [size, value_size, pairs] = self.head_sizes(call)?.unwrap_or_default();
        let turned = match heads.rope {
            Some(turn) => turn.pairing == RopePairing::Halves && pairs * 2 == size,
            None => true,
        };
        let mut written = vec![&result(call, 0)?.strides[..1]];
        for cache in heads.caches {
            written.push(&operand(call, cache)?.strides[..3]);
        }
        let whole = written.into_iter().flatten().all(|stride| stride.is_multiple_of(WIDE));
        let fits = turned && whole && value_size == size;
        Ok((fits && !self.norms_heads()).then_some(size))
    }

    /// The element type of the caches that heads are kept in.
    pub(super) fn cache_type(&self, call: &CallDesc) -> Result<DType> {
        match self.epilogue {
            Epilogue::Heads(heads) => Ok(operand(call, heads.caches[0])?.dtype),
            _ => Err(Error::internal("no heads")),
        }
    }

    /// Whether heads are normed: then a tile does not know all it needs.
    pub(in crate::ops) fn norms_heads(&self) -> bool {
        matches!(self.epilogue, Epilogue::Heads(Heads { norms: Some(_), .. }))
    }
}

/// Makes the launches of a part of a chain, whose input may be in scratch memory.
type Part =
    Box<dyn Fn(&Frame, &Bound, u64, &[Arc<Function>], &Context) -> Result<Vec<LaunchOp>> + Send + Sync>;

/// A tensor in scratch memory: rows at multiples of 16 bytes, for the kernels behind.
fn scratch(dtype: DType, like: &TensorDesc, columns: usize) -> (TensorDesc, usize) {
    let stride = (columns * dtype.bytes()).next_multiple_of(16) / dtype.bytes();
    let mut desc = TensorDesc::dense(dtype, &[like.shape[0], columns]);
    desc.strides[0] = stride;
    desc.bounded = like.bounded;
    let bytes = (like.shape[0] * stride * dtype.bytes()).next_multiple_of(256);
    (desc, bytes)
}

/// How a chain is run.
pub(in crate::ops) fn plan(chain: FusedLinear, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    chain.head_sizes(call)?;
    if let Some(band) = decode_gemm::plan(&chain, operand(call, chain.x)?, call, device)? {
        return Ok(band.recipe(chain));
    }
    if let Some(packed) = packed_gemm::plan(&chain, operand(call, chain.x)?, call, device)? {
        return Ok(packed.recipe(chain));
    }
    match (chain.norm, chain.epilogue) {
        (None, _) => behind_norm(chain, operand(call, chain.x)?, call, device).map(|rest| KernelPlan {
            kernels: rest.kernels,
            workspace: rest.workspace,
            persistent: rest.persistent,
            batch_invariant: rest.batch_invariant,
            launches: Box::new(move |frame, functions, context| {
                (rest.launches)(frame, frame.tensor(chain.x)?, frame.workspace, functions, context)
            }),
        }),
        (Some(Norm::Rms(op, gain)), Epilogue::Nothing) => match norm_within(chain, op, gain, call, device)? {
            Some(recipe) => Ok(recipe),
            None => norm_first(chain, Norm::Rms(op, gain), call, device),
        },
        (Some(norm), _) => norm_first(chain, norm, call, device),
    }
}

/// Norm and product in one launch, by the kernels for few rows of any type and format.
fn norm_within(
    chain: FusedLinear,
    op: RmsNorm,
    gain: usize,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<KernelPlan>> {
    let (x, y, weight) = (operand(call, chain.x)?, result(call, 0)?, weight_type(call, chain.weight)?);
    let bias = chain.bias.map(|bias| operand(call, bias)).transpose()?.map(|bias| bias.dtype);
    let norm = Some((op, operand(call, gain)?.dtype));
    let layer = Layer { x, weight, y, bias, norm, residual: None, gate: None, bytes: false, scratch: false };
    if !layer.takes_norm(device) || operand(call, gain)?.shape != [weight.columns()] {
        return Ok(None);
    }
    let layered = layer.plan(device)?;
    let kernels = layered.kernels.clone();
    let launches = Box::new(move |frame: &Frame, functions: &[Arc<Function>], context: &Context| {
        let (x, y) = (frame.tensor(chain.x)?, frame.result(0)?);
        if y.size(0) == 0 || y.size(1) == 0 {
            return Ok(Vec::new());
        }
        let places = Args {
            x,
            weight: frame.weight(chain.weight)?,
            bias: chain.bias.map_or(0, |bias| frame.address(bias)),
            gain: frame.address(gain),
            scales: 0,
            residual: None,
            y,
            bounds: &[x, y],
            workspace: frame.workspace,
        };
        layered.launches(&places, functions, context)
    });
    Ok(Some(KernelPlan { kernels, workspace: 0, persistent: 0, batch_invariant: true, launches }))
}

/// The norm into scratch memory, and then the rest.
fn norm_first(chain: FusedLinear, norm: Norm, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let x = operand(call, chain.x)?;
    let (normed, normed_bytes) = scratch(x.dtype, x, x.shape[1]);
    let first = norm::in_front(norm, x, &normed, call, device)?;
    let rest = behind_norm(FusedLinear { norm: None, ..chain }, &normed, call, device)?;
    let mut kernels = vec![first.spec.clone()];
    kernels.extend(rest.kernels);
    Ok(KernelPlan {
        kernels,
        workspace: normed_bytes + rest.workspace,
        persistent: rest.persistent,
        batch_invariant: rest.batch_invariant,
        launches: Box::new(move |frame, functions, context| {
            let x = frame.tensor(chain.x)?;
            let [function, functions @ ..] = functions else {
                return Err(Error::internal("a recipe without a kernel"));
            };
            let between = Bound { desc: normed.clone(), address: frame.workspace, extent: x.extent };
            let mut steps: Vec<LaunchOp> = first.step(frame, x, &between, function)?.into_iter().collect();
            let workspace = frame.workspace + normed_bytes as u64;
            steps.extend((rest.launches)(frame, &between, workspace, functions, context)?);
            Ok(steps)
        }),
    })
}

/// A part of a recipe.
struct Rest {
    kernels: Vec<KernelSpec>,
    workspace: usize,
    persistent: usize,
    batch_invariant: bool,
    launches: Part,
}

/// Product and what is behind it, of activations `x`.
fn behind_norm(chain: FusedLinear, x: &TensorDesc, call: &CallDesc, device: &DeviceSpec) -> Result<Rest> {
    if let Some(band) = decode_gemm::plan(&chain, x, call, device)? {
        let (kernels, workspace, persistent) = (vec![band.spec.clone()], band.workspace, band.persistent);
        return Ok(Rest {
            kernels,
            workspace,
            persistent,
            batch_invariant: true,
            launches: Box::new(move |frame, x, workspace, functions, _| {
                let function =
                    functions.first().ok_or_else(|| Error::internal("a recipe without a kernel"))?;
                Ok(band.step(&chain, frame, x, workspace, function)?.into_iter().collect())
            }),
        });
    }
    if let Some(packed) = packed_gemm::plan(&chain, x, call, device)? {
        let (kernels, workspace, persistent) = (packed.specs.clone(), packed.workspace, packed.persistent);
        return Ok(Rest {
            kernels,
            workspace,
            persistent,
            batch_invariant: false,
            launches: Box::new(move |frame, x, workspace, functions, _| {
                packed.steps(&chain, frame, x, workspace, functions)
            }),
        });
    }
    if let Some(batch) = small_batch::plan(&chain, x, call, device)? {
        return Ok(Rest {
            kernels: vec![batch.spec.clone()],
            workspace: 0,
            persistent: 0,
            batch_invariant: false,
            launches: Box::new(move |frame, x, _, functions, _| {
                let function =
                    functions.first().ok_or_else(|| Error::internal("a recipe without a kernel"))?;
                Ok(batch.step(&chain, frame, x, function)?.into_iter().collect())
            }),
        });
    }
    let weight: &WeightType = weight_type(call, chain.weight)?;
    let y = result(call, 0)?;
    let bias = chain.bias.map(|bias| operand(call, bias)).transpose()?.map(|bias| bias.dtype);
    let mut layer = Layer {
        x,
        weight,
        y,
        bias,
        norm: None,
        residual: None,
        gate: None,
        bytes: chain.scales.is_some(),
        scratch: false,
    };
    // The one sum a product can end in by itself.
    let summed = match chain.epilogue {
        Epilogue::Sum(op, residual) if op.alpha == 1.0 && layer.takes_residual(device) => Some(residual),
        _ => None,
    };
    layer.residual = summed.map(|residual| operand(call, residual)).transpose()?;
    layer.gate = match chain.epilogue {
        Epilogue::Gate(op) if layer.takes_gate(op.layout, device) => Some(op),
        _ => None,
    };
    let direct = matches!(chain.epilogue, Epilogue::Nothing) || summed.is_some() || layer.gate.is_some();
    let (product, product_bytes) = match direct {
        true => (y.clone(), 0),
        false => scratch(chain.product, x, weight.rows()),
    };
    layer.y = &product;
    layer.scratch = !direct;
    let layered = layer.plan(device)?;
    let mut kernels = layered.kernels.clone();
    let last = if direct { None } else { Some(Conclusion::new(&chain, &product, call, device)?) };
    kernels.extend(last.as_ref().map(|last| last.spec.clone()));
    Ok(Rest {
        kernels,
        workspace: product_bytes + layered.workspace,
        persistent: 0,
        batch_invariant: layered.batch_invariant,
        launches: Box::new(move |frame, x, workspace, functions, context| {
            let y = frame.result(0)?;
            if x.size(0) == 0 || product.shape[1] == 0 {
                return Ok(Vec::new());
            }
            let between = match direct {
                true => y.clone(),
                false => Bound { desc: product.clone(), address: workspace, extent: x.extent },
            };
            let residual = summed.map(|residual| frame.tensor(residual)).transpose()?;
            let mut bounds = vec![x, &between];
            bounds.extend(residual);
            let places = Args {
                x,
                weight: frame.weight(chain.weight)?,
                bias: chain.bias.map_or(0, |bias| frame.address(bias)),
                gain: 0,
                scales: chain.scales.map_or(0, |scales| frame.address(scales)),
                residual,
                y: &between,
                bounds: &bounds,
                workspace: workspace + product_bytes as u64,
            };
            let own = functions.len() - usize::from(last.is_some());
            let mut steps = layered.launches(&places, functions.get(..own).unwrap_or_default(), context)?;
            if let (Some(last), Some(function)) = (&last, functions.last()) {
                steps.extend(last.step(&chain, frame, &between, function)?);
            }
            Ok(steps)
        }),
    })
}

/// The kernel behind a product in scratch memory.
struct Conclusion {
    spec: KernelSpec,
    /// Blocks of heads and their threads, and rows that there is room for at once.
    heads: Option<([usize; 2], usize)>,
    /// Results that a thread takes, of what is no heads.
    results: usize,
}

/// Threads of a block of the kernel for heads, element by element.
const HEAD_THREADS: usize = 128;
/// The most threads of a block of the one that takes them [`WIDE`] elements at a time, and those that a multiprocessor has
/// registers for.
const WIDE_HEAD_THREADS: usize = 256;
const HEADS_AT_ONCE: usize = 1024;

/// Blocks for so many heads of so many lanes, and their threads.
fn head_blocks(heads: usize, lanes: usize) -> [usize; 2] {
    let most = WIDE_HEAD_THREADS / lanes;
    // Heads of a block, of which whole warps have some.
    let in_block = heads.div_ceil(heads.div_ceil(most).max(1)).next_multiple_of(32 / lanes).max(32 / lanes);
    [heads.div_ceil(in_block), in_block * lanes]
}

impl Conclusion {
    fn new(chain: &FusedLinear, product: &TensorDesc, call: &CallDesc, device: &DeviceSpec) -> Result<Self> {
        let wide = Self::is_wide(chain, product, call)?;
        let x = type_name(product.dtype)?;
        let sizes = chain.head_sizes(call)?;
        // A thread takes a pair of 8 elements each, or 8 that are not turned.
        let lanes = sizes.map(|[size, _, pairs]| ((size - pairs) / WIDE).next_power_of_two().clamp(1, 32));
        let heads = match (chain.epilogue, lanes) {
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
        let mut spec = match chain.epilogue {
            Epilogue::Heads(heads) => {
                let gain = |index: usize| match heads.norms {
                    Some(norms) => operand(call, norms[index].1).and_then(|gain| type_name(gain.dtype)),
                    None => Ok("f32"),
                };
                let defines: [(_, &dyn Display); 5] = [
                    ("X", &x),
                    ("BIAS", &"f32"),
                    ("HEAD_NORMS", &i32::from(heads.norms.is_some())),
                    ("QUERY_GAIN", &gain(0)?),
                    ("KEY_GAIN", &gain(1)?),
                ];
                KernelSpec::new("linear/heads.cu", if wide { "heads_wide" } else { "heads" }, defines)
            }
            _ => {
                let defines: [(_, &dyn Display); 2] = [("X", &x), ("BIAS", &"f32")];
                let entry = if wide { "conclude_wide" } else { "conclude_rows" };
                KernelSpec::new("linear/conclude.cu", entry, defines)
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
        spec.defines.extend(chain.defines(call)?);
        Ok(Self { spec, heads, results: if wide { WIDE } else { 1 } })
    }

    /// Whether everything can be taken [`WIDE`] elements at a time, at any number of rows.
    fn is_wide(chain: &FusedLinear, product: &TensorDesc, call: &CallDesc) -> Result<bool> {
        let whole = |tensor: &TensorDesc| tensor.strides[0].is_multiple_of(WIDE);
        let results = result(call, 0)?;
        let rows = whole(product) && whole(results) && results.shape[1].is_multiple_of(WIDE);
        Ok(rows
            && match chain.epilogue {
                Epilogue::Sum(_, residual) => whole(operand(call, residual)?),
                Epilogue::Heads(heads) => {
                    let cache = |index: usize| {
                        let strides = &operand(call, heads.caches[index])?.strides;
                        Ok::<_, Error>(strides.iter().take(3).all(|stride| stride.is_multiple_of(WIDE)))
                    };
                    let sizes = chain.head_sizes(call)?.unwrap_or_default();
                    sizes.iter().all(|size| size.is_multiple_of(WIDE)) && cache(0)? && cache(1)?
                }
                _ => true,
            })
    }

    fn step(
        &self,
        chain: &FusedLinear,
        frame: &Frame,
        product: &Bound,
        function: &Arc<Function>,
    ) -> Result<Option<LaunchOp>> {
        let (rows, outputs) = (product.size(0), product.size(1));
        let parameters = Parameters::default()
            .extent(rows, &chain.bounds(frame)?)
            .rows(product)
            .words(chain.epilogue_params(frame, false)?);
        let Epilogue::Heads(heads) = chain.epilogue else {
            let items = match self.results {
                // A pair for each thread; tiles of eight pairs may reach past the last output.
                1 => outputs.div_ceil(16) * 8 + 8,
                results => frame.result(0)?.size(1) / results,
            };
            return Ok(LaunchOp::kernel(function, plane(rows, items), THREADS, parameters));
        };
        let mut parameters = parameters;
        for index in 0..2 {
            let (norm, gain) = heads.norms.map_or((RmsNorm { eps: 0.0, weight_offset: 0.0 }, 0), |norms| {
                (norms[index].0, frame.address(norms[index].1))
            });
            parameters = parameters.address(gain).float(norm.eps).float(norm.weight_offset);
        }
        let ([blocks, threads], at_once) =
            self.heads.ok_or_else(|| Error::internal("heads without a size"))?;
        Ok(LaunchOp::kernel(function, [blocks, evenly(rows, at_once), 1], threads, parameters))
    }
}
