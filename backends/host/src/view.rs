//! Operands of a running call: memory as slices of rows.
//!
//! Binding makes [`Views`], a checked range of memory for every tensor. [`Views::open`] locks the device and gives a [`Frame`]: it
//! reads the extents, then hands out each tensor as a slice that borrows the frame. Three invariants make this sound:
//!
//! 1. [`ValidArguments`] are long enough for their descriptions and aligned, and no result overlaps another tensor, except the
//!    operand that it updates. [`Views::bind`] has checked that every range lies in a live buffer of the device.
//! 2. A frame holds the lock of its device, so nothing else reads or writes the device's buffers while it lives.
//! 3. A result is handed out once, and an operand that is updated in place only as the result.

use crate::{
    host::Host,
    memory::{HostBuffer, locate},
    weight::HostWeight,
};
use bytemuck::Pod;
use dsrun_core::{
    DType, Error, Result, TensorDesc, TensorType,
    checked::{ValidArguments, ValidCall, ValidOperand},
    kernels::{Binding, PackedWeight},
};
use half::{bf16, f16};
use std::{
    any::Any,
    ptr::NonNull,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicU32, Ordering},
    },
};

/// The maximum number of operands and of results of a call.
const MAX_TENSORS: usize = 16;

/// A Rust type that is an element type.
pub trait Element: Pod + Send + Sync {
    /// The element type.
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
    /// The buffers of elements and extent, kept alive.
    _buffers: [Option<Arc<HostBuffer>>; 2],
}

impl View {
    fn bind(desc: &TensorDesc, binding: &Binding, host: &Arc<Host>) -> Result<Self> {
        let (buffer, pointer) = locate(&binding.slice, host)?;
        debug_assert_eq!(
            pointer.align_offset(desc.dtype.bytes()),
            0,
            "buffers and valid offsets are aligned"
        );
        let (extent_buffer, extent) = match &binding.extent {
            None => (None, None),
            Some(extent) => {
                let (buffer, pointer) = locate(extent, host).map_err(|error| error.field("extent"))?;
                (Some(buffer), Some(pointer.cast()))
            }
        };
        let mut view = Self {
            pointer,
            span: desc.bytes()? / desc.dtype.bytes(),
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

    /// Rows below the extent.
    ///
    /// # Safety
    /// The device must be locked, and no reference to the extent's memory may be in use.
    unsafe fn rows(&self) -> usize {
        let size = self.shape[0];
        // SAFETY: a valid extent is an aligned i32, and binding has found it in a live buffer; the rest is the caller's.
        let extent = self.extent.map(|pointer| unsafe { pointer.read() });
        extent.map_or(size, |extent| usize::try_from(extent).unwrap_or(0).min(size))
    }
}

/// An operand bound to memory or to a weight.
#[derive(Debug)]
enum BoundOperand {
    Absent,
    Tensor(View),
    /// A tensor that a result updates; only the result reaches its memory.
    Updated,
    Weight(Arc<dyn PackedWeight>),
}

/// All tensors and weights of a bound call.
#[derive(Debug)]
pub(crate) struct Views {
    host: Arc<Host>,
    operands: Vec<BoundOperand>,
    results: Vec<View>,
}

// SAFETY: views point into buffers that they keep alive and that may be used from any thread; they do so only through
// frames, for which the device is locked.
unsafe impl Send for Views {}
// SAFETY: as above; a frame hands out each result once, whichever thread asks.
unsafe impl Sync for Views {}

impl Views {
    /// Finds the memory of valid arguments on a device whose weights are packed as `W`.
    ///
    /// # Errors
    /// If a buffer or weight is another backend's, or another handle's.
    pub(crate) fn bind<W: PackedWeight>(arguments: ValidArguments<'_>, host: &Arc<Host>) -> Result<Self> {
        let call = arguments.call();
        if call.operands.len().max(call.results.len()) > MAX_TENSORS {
            return Err(Error::unsupported(format!("has more than {MAX_TENSORS} operands or results")));
        }
        let bind = |(index, operand)| {
            bind_operand::<W>(operand, host).map_err(|error| error.at(&call.operand_name(index)))
        };
        let operands = arguments.operands().enumerate().map(bind).collect::<Result<_>>()?;
        let results = Vec::with_capacity(call.results.len());
        let mut views = Self { host: host.clone(), operands, results };
        for (index, (desc, binding)) in arguments.results().enumerate() {
            let view = View::bind(desc, binding, host).map_err(|error| error.at(&call.result_name(index)))?;
            views.push_result(call, index, view);
        }
        Ok(views)
    }

    /// Waits for the device's turn, and opens the tensors for one run. A thread that opens a second frame of a device while it
    /// holds one deadlocks.
    pub(crate) fn open(&self) -> Frame<'_> {
        let turn = self.host.lock();
        let (mut operand_rows, mut result_rows) = ([0; MAX_TENSORS], [0; MAX_TENSORS]);
        for (rows, operand) in operand_rows.iter_mut().zip(&self.operands) {
            if let BoundOperand::Tensor(view) = operand {
                // SAFETY: the device is locked, and nothing was handed out yet.
                *rows = unsafe { view.rows() };
            }
        }
        for (rows, view) in result_rows.iter_mut().zip(&self.results) {
            // SAFETY: as above.
            *rows = unsafe { view.rows() };
        }
        Frame { views: self, operand_rows, result_rows, taken: AtomicU32::new(0), _turn: turn }
    }

    fn push_result(&mut self, call: &ValidCall, index: usize, mut view: View) {
        let updated = call.op.updates(index).and_then(|operand| self.operands.get_mut(operand));
        if let Some(operand) = updated
            && let BoundOperand::Tensor(updated) = std::mem::replace(operand, BoundOperand::Updated)
            && view.extent.is_none()
        {
            let [_, buffer] = updated._buffers;
            (view.extent, view._buffers[1]) = (updated.extent, buffer);
        }
        self.results.push(view);
    }
}

fn bind_operand<W: PackedWeight>(
    operand: Option<ValidOperand<'_>>,
    host: &Arc<Host>,
) -> Result<BoundOperand> {
    match operand {
        None => Ok(BoundOperand::Absent),
        Some(ValidOperand::Tensor(desc, binding)) => {
            View::bind(desc, binding, host).map(BoundOperand::Tensor)
        }
        Some(ValidOperand::Weight(weight)) => {
            let packed: &dyn Any = weight.as_ref();
            if !packed.is::<HostWeight<W>>() {
                return Err(Error::invalid("belongs to another backend"));
            }
            Ok(BoundOperand::Weight(weight.clone()))
        }
    }
}

/// A tensor during a run, with its elements as `D`.
#[derive(Debug)]
pub struct Tensor<'a, D> {
    /// The elements, from the first to the last, gaps between rows included.
    pub data: D,
    /// The sizes, outermost first.
    pub shape: &'a [usize],
    /// Distance between neighbours of each dimension, in elements.
    pub strides: &'a [usize],
    /// Rows of the first dimension below the extent.
    pub rows: usize,
}

impl<'a, D> Tensor<'a, D> {
    /// The size of the last dimension.
    pub fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Where row `index` of a matrix starts.
    pub fn row_start(&self, index: usize) -> usize {
        index * self.strides[0]
    }

    /// Elements from one row of a matrix to the next; at least 1, and at least a row.
    pub fn row_stride(&self) -> usize {
        self.strides[0].max(self.width()).max(1)
    }

    /// Whether the first `rows` rows of a matrix follow one another without gaps.
    pub fn is_dense(&self, rows: usize) -> bool {
        rows < 2 || self.strides[0] == self.width()
    }

    /// The same tensor with its elements in another form.
    pub fn with<E>(self, data: impl FnOnce(D) -> E) -> Tensor<'a, E> {
        Tensor { data: data(self.data), shape: self.shape, strides: self.strides, rows: self.rows }
    }
}

impl<T: Copy> Tensor<'_, &[T]> {
    /// Element `index` of a vector.
    pub fn at(&self, index: usize) -> T {
        self.data[index * self.strides[0]]
    }

    /// Row `index` of a matrix.
    pub fn row(&self, index: usize) -> &[T] {
        if self.width() == 0 { &[] } else { &self.data[self.row_start(index)..][..self.width()] }
    }
}

impl Tensor<'_, &[i32]> {
    /// Element `index` of a vector as an index below `limit`; `None` if it is negative, too large, or past the extent.
    pub fn index(&self, index: usize, limit: usize) -> Option<usize> {
        if index >= self.rows {
            return None;
        }
        usize::try_from(self.at(index)).ok().filter(|value| *value < limit)
    }
}

impl<T: Copy> Tensor<'_, &mut [T]> {
    /// Element `index` of a vector.
    pub fn at_mut(&mut self, index: usize) -> &mut T {
        &mut self.data[index * self.strides[0]]
    }

    /// Row `index` of a matrix.
    pub fn row_mut(&mut self, index: usize) -> &mut [T] {
        let width = self.width();
        if width == 0 { &mut [] } else { &mut self.data[index * self.strides[0]..][..width] }
    }
}

/// Elements of any type as bytes.
#[derive(Debug)]
pub struct Bytes<D> {
    data: D,
    element: usize,
}

impl<D: AsRef<[u8]>> Bytes<D> {
    /// Bytes of an element.
    pub fn element(&self) -> usize {
        self.element
    }

    /// The bytes of elements `start .. start + count`.
    pub fn range(&self, start: usize, count: usize) -> &[u8] {
        if count == 0 { &[] } else { &self.data.as_ref()[start * self.element..][..count * self.element] }
    }
}

impl Bytes<&mut [u8]> {
    /// The bytes of elements `start .. start + count`.
    pub fn range_mut(&mut self, start: usize, count: usize) -> &mut [u8] {
        if count == 0 { &mut [] } else { &mut self.data[start * self.element..][..count * self.element] }
    }
}

/// The tensors and weights of a call while it runs. The frame holds the lock of its device.
pub struct Frame<'a> {
    views: &'a Views,
    operand_rows: [usize; MAX_TENSORS],
    result_rows: [usize; MAX_TENSORS],
    /// Bit `i`: result `i` was handed out.
    taken: AtomicU32,
    _turn: MutexGuard<'a, ()>,
}

impl Frame<'_> {
    /// Whether operand `index` was bound.
    pub fn has(&self, index: usize) -> bool {
        !matches!(self.views.operands.get(index), None | Some(BoundOperand::Absent))
    }

    fn operand(&self, index: usize) -> Result<&View> {
        match self.views.operands.get(index) {
            Some(BoundOperand::Tensor(view)) => Ok(view),
            _ => Err(Error::internal(format!("operand {index} is not a readable tensor"))),
        }
    }

    fn result(&self, index: usize) -> Result<&View> {
        let view = self.views.results.get(index).ok_or_else(|| no_result(index))?;
        let bit = 1 << index;
        if self.taken.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return Err(Error::internal(format!("result {index} is in use already")));
        }
        Ok(view)
    }

    /// The elements of a view of this frame.
    fn slice<T: Element>(view: &View) -> Result<&[T]> {
        expect_dtype::<T>(view.dtype)?;
        // SAFETY: binding has checked that `span` elements from `pointer` on are aligned and lie in a live buffer, whose
        // memory was zeroed when it was allocated; all their bit patterns are valid. By points 2 and 3 of the module
        // documentation nothing writes them while the frame lives.
        Ok(unsafe { std::slice::from_raw_parts(view.pointer.cast().as_ptr(), view.span) })
    }

    /// # Safety
    /// `view` was just handed out by [`Self::result`], and is not used again.
    #[expect(clippy::mut_from_ref, reason = "`result` hands each result out once")]
    unsafe fn slice_mut<T: Element>(view: &View) -> Result<&mut [T]> {
        expect_dtype::<T>(view.dtype)?;
        // SAFETY: as in `slice`; by points 1 to 3 of the module documentation and by this function's contract, this is the
        // only reference to these elements.
        Ok(unsafe { std::slice::from_raw_parts_mut(view.pointer.cast().as_ptr(), view.span) })
    }

    fn tensor<D>(view: &View, rows: usize, data: D) -> Tensor<'_, D> {
        Tensor { data, shape: &view.shape[..view.rank], strides: &view.strides[..view.rank.max(1)], rows }
    }

    /// Operand `index`, of element type `T`.
    ///
    /// # Errors
    /// If the operand is not a readable tensor, or of another type.
    pub fn input<T: Element>(&self, index: usize) -> Result<Tensor<'_, &[T]>> {
        let view = self.operand(index)?;
        Ok(Self::tensor(view, self.operand_rows[index], Self::slice(view)?))
    }

    /// Operand `index`, of any element type.
    ///
    /// # Errors
    /// If the operand is not a readable tensor.
    pub fn bytes(&self, index: usize) -> Result<Tensor<'_, Bytes<&[u8]>>> {
        let view = self.operand(index)?;
        let length = view.span * view.dtype.bytes();
        // SAFETY: as in `slice`; bytes need no alignment.
        let data = unsafe { std::slice::from_raw_parts(view.pointer.as_ptr(), length) };
        Ok(Self::tensor(view, self.operand_rows[index], Bytes { data, element: view.dtype.bytes() }))
    }

    /// Operand `index`, a weight that the backend packed as `W`.
    ///
    /// # Errors
    /// If the operand is not such a weight.
    pub fn weight<W: PackedWeight>(&self, index: usize) -> Result<&W> {
        let weight: Option<&dyn Any> = match self.views.operands.get(index) {
            Some(BoundOperand::Weight(weight)) => Some(weight.as_ref()),
            _ => None,
        };
        let weight = weight.and_then(|weight| weight.downcast_ref::<HostWeight<W>>());
        weight
            .map(HostWeight::packed)
            .ok_or_else(|| Error::internal(format!("operand {index} is not a packed weight")))
    }

    /// Result `index`, of element type `T`. Handed out once.
    ///
    /// # Errors
    /// If there is no such result, it was handed out before, or is of another type.
    #[expect(clippy::mut_from_ref, reason = "`result` hands each result out once")]
    pub fn output<T: Element>(&self, index: usize) -> Result<Tensor<'_, &mut [T]>> {
        let view = self.result(index)?;
        // SAFETY: the view was just handed out.
        let data = unsafe { Self::slice_mut(view) }?;
        Ok(Self::tensor(view, self.result_rows[index], data))
    }

    /// Result `index`, of any element type. Handed out once.
    ///
    /// # Errors
    /// If there is no such result, or it was handed out before.
    #[expect(clippy::mut_from_ref, reason = "`result` hands each result out once")]
    pub fn bytes_mut(&self, index: usize) -> Result<Tensor<'_, Bytes<&mut [u8]>>> {
        let view = self.result(index)?;
        let length = view.span * view.dtype.bytes();
        // SAFETY: as in `slice_mut`; bytes need no alignment.
        let data = unsafe { std::slice::from_raw_parts_mut(view.pointer.as_ptr(), length) };
        Ok(Self::tensor(view, self.result_rows[index], Bytes { data, element: view.dtype.bytes() }))
    }

    /// Rows of operand `index` below its extent; 0 if the operand is not a readable tensor.
    pub fn operand_rows(&self, index: usize) -> usize {
        self.operand_rows.get(index).copied().unwrap_or(0)
    }

    /// Rows of result `index` below its extent; 0 if there is no such result.
    pub fn result_rows(&self, index: usize) -> usize {
        self.result_rows.get(index).copied().unwrap_or(0)
    }

    /// The element type of result `index`.
    ///
    /// # Errors
    /// If there is no such result.
    pub fn result_dtype(&self, index: usize) -> Result<DType> {
        self.views.results.get(index).map(|view| view.dtype).ok_or_else(|| no_result(index))
    }

    /// The element type of operand `index`.
    ///
    /// # Errors
    /// If the operand is not a readable tensor.
    pub fn operand_dtype(&self, index: usize) -> Result<DType> {
        self.operand(index).map(|view| view.dtype)
    }
}

fn no_result(index: usize) -> Error {
    Error::internal(format!("there is no result {index}"))
}

fn expect_dtype<T: Element>(dtype: DType) -> Result<()> {
    if dtype == T::DTYPE {
        return Ok(());
    }
    Err(Error::internal(format!("{dtype} elements read as {}", T::DTYPE)))
}
