//! The kernels: `add`, `columns` and `rms_norm` in f32. Weights are refused, because none of these ops reads one.

use crate::{
    HostDevice,
    memory::{HostBuffer, HostStream},
};
use dsrun_core::{
    DType, Error, Result, TensorDesc, WeightReader,
    checked::{ValidArguments, ValidCall, ValidOperand},
    device::Stream,
    kernels::{
        Binding, BoundCall, CallDesc, Kernels, OperandDesc, PackedLayout, PackedWeight, Plan, Support,
        WeightDesc,
    },
    op::Op,
};
use std::{cell::RefCell, sync::Arc};

/// The reason why this device does not run a call; `None` if it does.
fn refusal(call: &CallDesc) -> Option<String> {
    if !matches!(call.op, Op::Add(_) | Op::Columns(_) | Op::RmsNorm(_)) {
        return Some(format!("this backend has no kernel for {}", call.op.name()));
    }
    let operands = call.operands.iter().flatten().filter_map(|operand| match operand {
        OperandDesc::Tensor(tensor) => Some(tensor),
        OperandDesc::Weight(_) => None,
    });
    let other = operands.chain(&call.results).find(|tensor| tensor.dtype != DType::F32)?;
    Some(format!("{} is not supported, only f32 is", other.dtype))
}

impl Kernels for HostDevice {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        Ok(refusal(call).map_or_else(Support::native, Support::no))
    }

    fn prepack_query(&self, _: &WeightDesc) -> Result<PackedLayout> {
        Err(Error::unsupported("this backend does not pack weights yet"))
    }

    fn prepack(
        &self,
        _: &mut dyn Stream,
        weight: &WeightDesc,
        _: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        Err(self
            .prepack_query(weight)
            .err()
            .unwrap_or_else(|| Error::unsupported("this backend does not pack weights yet")))
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        match refusal(call) {
            Some(reason) => Err(Error::unsupported(reason)),
            None => Ok(Arc::new(HostPlan { call: call.clone() })),
        }
    }
}

/// A planned call. A real backend compiles and tunes when it plans.
#[derive(Debug)]
struct HostPlan {
    call: ValidCall,
}

impl Plan for HostPlan {
    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let tensor = |operand| match operand {
            Some(ValidOperand::Tensor(desc, binding)) => Tensor::new(desc, binding).map(Some),
            _ => Ok(None),
        };
        let operands = arguments.operands().map(tensor).collect::<Result<Vec<_>>>()?;
        let result = arguments.results().next();
        let (desc, binding) = result.ok_or_else(|| Error::internal("every op has a result"))?;
        let result = Tensor::new(desc, binding)?;
        let widest = operands.iter().flatten().chain([&result]).map(Tensor::width).max().unwrap_or(0);
        // Enqueueing must not allocate, so binding allocates the row buffer.
        let rows = RefCell::new([(); 2].map(|()| vec![0.0; widest]));
        Ok(Box::new(HostCall { plan: self, operands, result, rows }))
    }
}

/// A call with its arguments.
#[derive(Debug)]
struct HostCall {
    plan: Arc<HostPlan>,
    operands: Vec<Option<Tensor>>,
    result: Tensor,
    /// A buffer for two rows.
    rows: RefCell<[Vec<f32>; 2]>,
}

impl BoundCall for HostCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        HostStream::check(stream)?;
        if self.result.width() == 0 {
            // Rows without elements have no memory.
            return Ok(());
        }
        let mut rows =
            self.rows.try_borrow_mut().map_err(|_| Error::internal("the call is already running"))?;
        let [out, other] = &mut *rows;
        let out = &mut out[..self.result.width()];
        let real =
            self.operands.iter().flatten().filter(|operand| operand.desc.shape.len() > 1).map(Tensor::rows);
        for row in 0..real.fold(self.result.rows(), usize::min) {
            self.row(row, out, other);
            self.result.write(row, out);
        }
        Ok(())
    }
}

impl HostCall {
    /// Reads a row of an operand, from column `start` on; `None` if the operand is absent. A vector has one row.
    fn read<'a>(&self, operand: usize, row: usize, start: usize, into: &'a mut [f32]) -> Option<&'a [f32]> {
        self.operands.get(operand)?.as_ref().map(|tensor| tensor.read(row, start, into))
    }

    /// Computes a row of the result.
    fn row(&self, row: usize, out: &mut [f32], other: &mut [f32]) {
        // No row of the result is wider than the buffer.
        let width = out.len();
        let (other, _) = other.split_at_mut(width);
        match &self.plan.call.op {
            Op::Add(op) => {
                // y = a + alpha * (b + bias) + c
                self.read(1, row, 0, out);
                if let Some(bias) = self.read(3, 0, 0, other) {
                    out.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
                }
                out.iter_mut().for_each(|y| *y *= op.alpha);
                for term in [0, 2] {
                    if let Some(term) = self.read(term, row, 0, other) {
                        out.iter_mut().zip(term).for_each(|(y, term)| *y += term);
                    }
                }
            }
            Op::Columns(op) => {
                self.read(0, row, op.start as usize, out);
            }
            Op::RmsNorm(op) => {
                // y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset), group by group
                self.read(0, row, 0, out);
                let group = self.operands[1].as_ref().map_or(width, Tensor::width);
                if let Some(weight) = self.read(1, 0, 0, &mut other[..group]) {
                    for x in out.chunks_mut(group.max(1)) {
                        let squares: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
                        let factor = 1.0 / (squares / group as f64 + f64::from(op.eps)).sqrt();
                        for (x, weight) in x.iter_mut().zip(weight) {
                            *x = (f64::from(*x) * factor * (f64::from(*weight) + f64::from(op.weight_offset)))
                                as f32;
                        }
                    }
                }
            }
            // `refusal` refuses all other ops.
            _ => {}
        }
    }
}

/// A tensor of one or two dimensions, with its memory.
#[derive(Debug)]
struct Tensor {
    desc: TensorDesc,
    buffer: Arc<HostBuffer>,
    offset: usize,
    /// The memory of the extent, the number of valid rows; without it all rows are valid.
    extent: Option<(Arc<HostBuffer>, usize)>,
}

impl Tensor {
    fn new(desc: &TensorDesc, binding: &Binding) -> Result<Self> {
        let extent = binding.extent.as_ref();
        Ok(Self {
            desc: desc.clone(),
            buffer: HostBuffer::of(&binding.slice)?,
            offset: binding.slice.offset,
            extent: extent.map(|slice| Ok((HostBuffer::of(slice)?, slice.offset))).transpose()?,
        })
    }

    fn width(&self) -> usize {
        self.desc.shape.last().copied().unwrap_or(0)
    }

    /// The number of valid rows. Rows beyond the extent are neither read nor written.
    fn rows(&self) -> usize {
        let all = self.desc.shape.first().copied().unwrap_or(0);
        let Some((buffer, offset)) = &self.extent else { return all };
        let extent = buffer
            .lock()
            .get(*offset..)
            .and_then(|bytes| bytes.first_chunk().copied())
            .map(i32::from_le_bytes);
        extent.map_or(all, |extent| usize::try_from(extent).unwrap_or(0).min(all))
    }

    /// The bytes of `count` elements of a row.
    fn range(&self, row: usize, start: usize, count: usize) -> std::ops::Range<usize> {
        let stride = if self.desc.shape.len() > 1 { self.desc.strides[0] } else { 0 };
        let first = self.offset + 4 * (row * stride + start);
        first..first + 4 * count
    }

    fn read<'a>(&self, row: usize, start: usize, into: &'a mut [f32]) -> &'a [f32] {
        let bytes = self.buffer.lock();
        let bytes = &bytes[self.range(row, start, into.len())];
        into.iter_mut()
            .zip(bytes.as_chunks().0)
            .for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
        into
    }

    fn write(&self, row: usize, values: &[f32]) {
        let mut bytes = self.buffer.lock();
        let bytes = &mut bytes[self.range(row, 0, values.len())];
        bytes
            .as_chunks_mut()
            .0
            .iter_mut()
            .zip(values)
            .for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    }
}
