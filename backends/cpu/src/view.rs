//! Operands of a running call: memory as slices of rows.
//!
//! [`Views`] is what binding makes: for every tensor a checked range of memory. [`Frame`] opens it for one run: it reads the
//! extents, then hands out each tensor as a slice that borrows the frame. That this is sound rests on three things:
//!
//! 1. [`Views::bind`] has checked that every range lies in a live buffer of the device, is aligned, and that no result
//!    overlaps another tensor, except the operand that it updates.
//! 2. A frame exists only while the device is locked, so nothing else reads or writes its buffers.
//! 3. A result is handed out once, and an operand that is updated in place only as the result.

mod floats;

use crate::{device::Core, kernels::HostWeight, packed::PackedMatrix, stream::locate};
use bytemuck::Pod;
use dsrun_core::{
    DType, Error, Result, TensorDesc, TensorType,
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc},
};
pub(crate) use floats::{Floats, FloatsMut, SharedFloats};
use half::{bf16, f16};
use std::{any::Any, cell::Cell, ptr::NonNull, sync::Arc};

/// The most operands or results of a call this backend runs.
const MAX_TENSORS: usize = 16;

/// A Rust type that is an element type.
pub(crate) trait Element: Pod + Send + Sync {
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty: $dtype:ident),*) => {$(
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements!(f32: F32, f16: F16, bf16: BF16, i32: I32, u32: U32, i8: I8, u8: U8);

/// A tensor bound to memory.
#[derive(Debug)]
struct View {
    pointer: NonNull<u8>,
    /// Elements from the first to the last, gaps between rows included.
    span: usize,
    dtype: DType,
    rank: usize,
    shape: [usize; TensorType::MAX_RANK],
    strides: [usize; TensorType::MAX_RANK],
    extent: Option<NonNull<i32>>,
    /// Keeps buffers alive.
    _buffers: [Option<Arc<crate::memory::HostBuffer>>; 2],
}

impl View {
    fn bind(desc: &TensorDesc, binding: &Binding, core: &Arc<Core>) -> Result<Self> {
        desc.validate()?;
        let (buffer, pointer) = locate(&binding.slice, core)?;
        let bytes = desc.bytes()?;
        if binding.slice.bytes < bytes {
            let message = format!("is {} bytes, needs {bytes}", binding.slice.bytes);
            return Err(Error::invalid(message).field("bytes"));
        }
        if pointer.align_offset(desc.dtype.bytes()) != 0 {
            let message = format!("is at byte {}, must be aligned to its elements", binding.slice.offset);
            return Err(Error::invalid(message).field("offset"));
        }
        let (extent_buffer, extent) = match &binding.extent {
            None => (None, None),
            Some(_) if !desc.bounded => {
                return Err(Error::invalid("was not planned as bounded").field("extent"));
            }
            Some(extent) => {
                let (buffer, pointer) = locate(extent, core).map_err(|error| error.field("extent"))?;
                if extent.bytes < 4 || pointer.align_offset(4) != 0 {
                    return Err(Error::invalid("must be four bytes at a multiple of four").field("extent"));
                }
                (Some(buffer), Some(pointer.cast()))
            }
        };
        let mut view = Self {
            pointer,
            span: bytes / desc.dtype.bytes(),
            dtype: desc.dtype,
            rank: desc.shape.len(),
            shape: [1; TensorType::MAX_RANK],
            strides: [1; TensorType::MAX_RANK],
            extent,
            _buffers: [Some(buffer), extent_buffer],
        };
        view.shape[..desc.shape.len()].copy_from_slice(&desc.shape);
        view.strides[..desc.strides.len()].copy_from_slice(&desc.strides);
        Ok(view)
    }

    /// Addresses of the first byte and of the one behind the last.
    fn range(&self) -> (usize, usize) {
        let start = self.pointer.addr().get();
        (start, start + self.span * self.dtype.bytes())
    }

    fn overlaps(&self, other: &Self) -> bool {
        let ((start, end), (other_start, other_end)) = (self.range(), other.range());
        start < other_end && other_start < end && start < end && other_start < other_end
    }

    /// How many rows are real.
    ///
    /// # Safety
    /// The device must be locked, and no reference to the extent's memory may be in use.
    unsafe fn rows(&self) -> usize {
        let size = self.shape[0];
        // SAFETY: binding has checked that the extent is an aligned i32 in a live buffer; the rest is the caller's.
        let extent = self.extent.map(|pointer| unsafe { pointer.read() });
        extent.map_or(size, |extent| usize::try_from(extent).unwrap_or(0).min(size))
    }
}

/// An operand bound to memory or to a weight.
#[derive(Debug)]
enum BoundOperand {
    Absent,
    Tensor(View),
    /// A tensor that a result updates, and that is reached through the result only.
    Updated,
    Weight(Arc<HostWeight>),
}

/// All tensors and weights of a bound call.
#[derive(Debug)]
pub(crate) struct Views {
    operands: Vec<BoundOperand>,
    results: Vec<View>,
}

// SAFETY: views point into buffers that they keep alive and that may be used from any thread; they do so only through
// frames, for which the device is locked.
unsafe impl Send for Views {}

impl Views {
    /// Checks arguments against their description and the device.
    pub(crate) fn bind(call: &CallDesc, arguments: &Arguments, core: &Arc<Core>) -> Result<Self> {
        let (operands, results) = (arguments.operands.len(), arguments.results.len());
        if (operands, results) != (call.operands.len(), call.results.len())
            || operands.max(results) > MAX_TENSORS
        {
            let message = format!("{operands} operands and {results} results bound, not as described");
            return Err(Error::invalid(message).field("operands"));
        }
        let mut views = Self { operands: Vec::with_capacity(operands), results: Vec::with_capacity(results) };
        for (index, (desc, argument)) in call.operands.iter().zip(&arguments.operands).enumerate() {
            let bound = bind_operand(desc.as_ref(), argument.as_ref(), core);
            views.operands.push(bound.map_err(|error| error.at(&call.operand_name(index)))?);
        }
        for (index, (desc, binding)) in call.results.iter().zip(&arguments.results).enumerate() {
            let bound = View::bind(desc, binding, core).and_then(|view| views.push_result(call, index, view));
            bound.map_err(|error| error.at(&call.result_name(index)))?;
        }
        Ok(views)
    }

    fn push_result(&mut self, call: &CallDesc, index: usize, mut view: View) -> Result<()> {
        if let Some(operand) = call.op.updates(index).and_then(|operand| self.operands.get_mut(operand)) {
            match operand {
                BoundOperand::Tensor(updated) if updated.range() == view.range() => {
                    if view.extent.is_none() {
                        view.extent = updated.extent;
                        view._buffers[1] = updated._buffers[1].take();
                    }
                    *operand = BoundOperand::Updated;
                }
                _ => return Err(Error::invalid("must be bound to the operand it updates").field("slice")),
            }
        }
        let operands = self.operands.iter().filter_map(|operand| match operand {
            BoundOperand::Tensor(view) => Some(view),
            _ => None,
        });
        // Operands that later results update are still among them: those must not overlap either.
        if operands.chain(&self.results).any(|other| view.overlaps(other)) {
            return Err(Error::invalid("shares storage with another operand or result").field("slice"));
        }
        self.results.push(view);
        Ok(())
    }
}

fn bind_operand(
    desc: Option<&OperandDesc>,
    argument: Option<&Argument>,
    core: &Arc<Core>,
) -> Result<BoundOperand> {
    match (desc, argument) {
        (None, None) => Ok(BoundOperand::Absent),
        (Some(OperandDesc::Tensor(desc)), Some(Argument::Tensor(binding))) => {
            View::bind(desc, binding, core).map(BoundOperand::Tensor)
        }
        (Some(OperandDesc::Weight(desc)), Some(Argument::Weight(weight))) => {
            if weight.weight_type() != desc {
                let message = format!("is {:?}, was planned as {desc:?}", weight.weight_type());
                return Err(Error::invalid(message).field("weight_type"));
            }
            let any: Arc<dyn Any + Send + Sync> = weight.clone();
            any.downcast().map(BoundOperand::Weight).map_err(|_| Error::invalid("belongs to another backend"))
        }
        _ => Err(Error::invalid("is not bound as it was planned")),
    }
}

/// A tensor during a run, with its elements as `D`.
#[derive(Debug)]
pub(crate) struct Tensor<'a, D> {
    pub(crate) data: D,
    pub(crate) shape: &'a [usize],
    pub(crate) strides: &'a [usize],
    /// How many rows of the first dimension are real.
    pub(crate) rows: usize,
}

impl<'a, D> Tensor<'a, D> {
    /// The size of the last dimension.
    pub(crate) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Where row `index` of a matrix starts.
    pub(crate) fn row_start(&self, index: usize) -> usize {
        index * self.strides[0]
    }

    /// Whether the first `rows` rows of a matrix follow each other without gaps.
    pub(crate) fn is_dense(&self, rows: usize) -> bool {
        rows < 2 || self.strides[0] == self.width()
    }

    pub(crate) fn with<E>(self, data: impl FnOnce(D) -> E) -> Tensor<'a, E> {
        Tensor { data: data(self.data), shape: self.shape, strides: self.strides, rows: self.rows }
    }
}

impl<T: Copy> Tensor<'_, &[T]> {
    /// Element `index` of a vector.
    pub(crate) fn at(&self, index: usize) -> T {
        self.data[index * self.strides[0]]
    }

    /// Row `index` of a matrix.
    pub(crate) fn row(&self, index: usize) -> &[T] {
        if self.width() == 0 { &[] } else { &self.data[self.row_start(index)..][..self.width()] }
    }
}

impl Tensor<'_, &[i32]> {
    /// Element `index` of a vector as an index below `limit`; `None` if it is negative, too large, or not real.
    pub(crate) fn index(&self, index: usize, limit: usize) -> Option<usize> {
        if index >= self.rows {
            return None;
        }
        usize::try_from(self.at(index)).ok().filter(|value| *value < limit)
    }
}

impl<T: Copy> Tensor<'_, &mut [T]> {
    /// Element `index` of a vector.
    pub(crate) fn at_mut(&mut self, index: usize) -> &mut T {
        &mut self.data[index * self.strides[0]]
    }

    /// Row `index` of a matrix.
    pub(crate) fn row_mut(&mut self, index: usize) -> &mut [T] {
        let width = self.width();
        if width == 0 { &mut [] } else { &mut self.data[index * self.strides[0]..][..width] }
    }
}

/// Elements of any type, as bytes.
#[derive(Debug)]
pub(crate) struct Bytes<D> {
    data: D,
    element: usize,
}

impl<D: AsRef<[u8]>> Bytes<D> {
    /// Bytes of an element.
    pub(crate) fn element(&self) -> usize {
        self.element
    }

    /// The bytes of elements `start .. start + count`.
    pub(crate) fn range(&self, start: usize, count: usize) -> &[u8] {
        if count == 0 { &[] } else { &self.data.as_ref()[start * self.element..][..count * self.element] }
    }
}

impl Bytes<&mut [u8]> {
    /// The bytes of elements `start .. start + count`.
    pub(crate) fn range_mut(&mut self, start: usize, count: usize) -> &mut [u8] {
        if count == 0 { &mut [] } else { &mut self.data[start * self.element..][..count * self.element] }
    }

    /// Copies `count` elements from one place to another.
    pub(crate) fn copy_within(&mut self, source: usize, destination: usize, count: usize) {
        let (source, count) = (source * self.element, count * self.element);
        self.data.copy_within(source..source + count, destination * self.element);
    }
}

/// The tensors and weights of a call while it runs. See the [module documentation](self).
pub(crate) struct Frame<'a> {
    views: &'a Views,
    operand_rows: [usize; MAX_TENSORS],
    result_rows: [usize; MAX_TENSORS],
    /// Bit `i`: result `i` was handed out.
    taken: Cell<u32>,
}

impl<'a> Frame<'a> {
    /// Opens the views of a call.
    ///
    /// # Safety
    /// The views' device must be locked until the frame and all it hands out are gone, and there must be no other frame of
    /// the device.
    pub(crate) unsafe fn new(views: &'a Views) -> Self {
        let (mut operand_rows, mut result_rows) = ([0; MAX_TENSORS], [0; MAX_TENSORS]);
        for (rows, operand) in operand_rows.iter_mut().zip(&views.operands) {
            if let BoundOperand::Tensor(view) = operand {
                // SAFETY: the device is locked, and nothing was handed out yet.
                *rows = unsafe { view.rows() };
            }
        }
        for (rows, view) in result_rows.iter_mut().zip(&views.results) {
            // SAFETY: as above.
            *rows = unsafe { view.rows() };
        }
        Self { views, operand_rows, result_rows, taken: Cell::new(0) }
    }

    /// Whether operand `index` was bound.
    pub(crate) fn has(&self, index: usize) -> bool {
        !matches!(self.views.operands.get(index), None | Some(BoundOperand::Absent))
    }

    fn operand(&self, index: usize) -> Result<&'a View> {
        match self.views.operands.get(index) {
            Some(BoundOperand::Tensor(view)) => Ok(view),
            _ => Err(Error::internal(format!("operand {index} is no tensor that can be read"))),
        }
    }

    fn result(&self, index: usize) -> Result<&'a View> {
        let view = self.views.results.get(index);
        let view = view.ok_or_else(|| Error::internal(format!("there is no result {index}")))?;
        let bit = 1 << index;
        if self.taken.replace(self.taken.get() | bit) & bit != 0 {
            return Err(Error::internal(format!("result {index} is in use already")));
        }
        Ok(view)
    }

    fn slice<T: Element>(view: &'a View) -> Result<&'a [T]> {
        expect_dtype::<T>(view.dtype)?;
        // SAFETY: binding has checked that `span` elements from `pointer` on are aligned and lie in a live buffer, whose
        // memory was zeroed when it was allocated; all their bit patterns are valid. By points 2 and 3 of the module
        // documentation nothing writes them while the frame lives.
        Ok(unsafe { std::slice::from_raw_parts(view.pointer.cast().as_ptr(), view.span) })
    }

    /// # Safety
    /// `view` was just handed out by [`Self::result`], and is not used again.
    #[expect(clippy::mut_from_ref, reason = "the view is an address; `result` hands it out once")]
    unsafe fn slice_mut<T: Element>(view: &'a View) -> Result<&'a mut [T]> {
        expect_dtype::<T>(view.dtype)?;
        // SAFETY: as in `slice`; by points 1 to 3 of the module documentation and by this function's contract, this is the
        // only reference to these elements.
        Ok(unsafe { std::slice::from_raw_parts_mut(view.pointer.cast().as_ptr(), view.span) })
    }

    fn tensor<D>(view: &'a View, rows: usize, data: D) -> Tensor<'a, D> {
        Tensor { data, shape: &view.shape[..view.rank], strides: &view.strides[..view.rank.max(1)], rows }
    }

    /// Operand `index`, of element type `T`.
    pub(crate) fn input<T: Element>(&self, index: usize) -> Result<Tensor<'a, &'a [T]>> {
        let view = self.operand(index)?;
        Ok(Self::tensor(view, self.operand_rows[index], Self::slice(view)?))
    }

    /// Operand `index`, of any float type.
    pub(crate) fn floats(&self, index: usize) -> Result<Tensor<'a, Floats<'a>>> {
        let view = self.operand(index)?;
        let data = match view.dtype {
            DType::F32 => Floats::F32(Self::slice(view)?),
            DType::F16 => Floats::F16(Self::slice(view)?),
            DType::BF16 => Floats::BF16(Self::slice(view)?),
            other => return Err(Error::internal(format!("{other} is no float type"))),
        };
        Ok(Self::tensor(view, self.operand_rows[index], data))
    }

    /// Operand `index` of any float type, if it was bound.
    pub(crate) fn optional_floats(&self, index: usize) -> Result<Option<Tensor<'a, Floats<'a>>>> {
        self.has(index).then(|| self.floats(index)).transpose()
    }

    /// Operand `index`, of any element type.
    pub(crate) fn bytes(&self, index: usize) -> Result<Tensor<'a, Bytes<&'a [u8]>>> {
        let view = self.operand(index)?;
        let length = view.span * view.dtype.bytes();
        // SAFETY: as in `slice`; bytes need no alignment.
        let data = unsafe { std::slice::from_raw_parts(view.pointer.as_ptr(), length) };
        Ok(Self::tensor(view, self.operand_rows[index], Bytes { data, element: view.dtype.bytes() }))
    }

    /// Operand `index`, a packed weight.
    pub(crate) fn weight(&self, index: usize) -> Result<&'a PackedMatrix> {
        match self.views.operands.get(index) {
            Some(BoundOperand::Weight(weight)) => Ok(weight.matrix()),
            _ => Err(Error::internal(format!("operand {index} is no packed weight"))),
        }
    }

    /// Result `index`, of element type `T`. Handed out once.
    pub(crate) fn output<T: Element>(&self, index: usize) -> Result<Tensor<'a, &'a mut [T]>> {
        let view = self.result(index)?;
        // SAFETY: the view was just handed out.
        let data = unsafe { Self::slice_mut(view) }?;
        Ok(Self::tensor(view, self.result_rows[index], data))
    }

    /// Result `index`, of any float type. Handed out once.
    pub(crate) fn floats_mut(&self, index: usize) -> Result<Tensor<'a, FloatsMut<'a>>> {
        let view = self.result(index)?;
        let data = match view.dtype {
            // SAFETY: the view was just handed out.
            DType::F32 => FloatsMut::F32(unsafe { Self::slice_mut(view) }?),
            // SAFETY: the view was just handed out.
            DType::F16 => FloatsMut::F16(unsafe { Self::slice_mut(view) }?),
            // SAFETY: the view was just handed out.
            DType::BF16 => FloatsMut::BF16(unsafe { Self::slice_mut(view) }?),
            other => return Err(Error::internal(format!("{other} is no float type"))),
        };
        Ok(Self::tensor(view, self.result_rows[index], data))
    }

    /// Result `index`, of any element type. Handed out once.
    pub(crate) fn bytes_mut(&self, index: usize) -> Result<Tensor<'a, Bytes<&'a mut [u8]>>> {
        let view = self.result(index)?;
        let length = view.span * view.dtype.bytes();
        // SAFETY: as in `slice_mut`; bytes need no alignment.
        let data = unsafe { std::slice::from_raw_parts_mut(view.pointer.as_ptr(), length) };
        Ok(Self::tensor(view, self.result_rows[index], Bytes { data, element: view.dtype.bytes() }))
    }

    /// How many rows of result `index` are real.
    pub(crate) fn result_rows(&self, index: usize) -> usize {
        self.result_rows.get(index).copied().unwrap_or(0)
    }

    /// Element type of result `index`.
    pub(crate) fn result_dtype(&self, index: usize) -> Result<DType> {
        let view = self.views.results.get(index);
        view.map(|view| view.dtype).ok_or_else(|| Error::internal(format!("there is no result {index}")))
    }

    /// Element type of operand `index`.
    pub(crate) fn operand_dtype(&self, index: usize) -> Result<DType> {
        self.operand(index).map(|view| view.dtype)
    }
}

fn expect_dtype<T: Element>(dtype: DType) -> Result<()> {
    if dtype == T::DTYPE {
        return Ok(());
    }
    Err(Error::internal(format!("{dtype} elements read as {}", T::DTYPE)))
}
