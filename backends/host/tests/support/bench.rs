//! A device and what it takes to run one call on it.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part, and has failed if it cannot go on")]

use bytemuck::Pod;
use dsrun_core::{
    BytesReader, DType, Result, TensorDesc, WeightFormat, WeightType,
    checked::CheckedPlan,
    collective::Comm,
    device::{Backend, BufferSlice, Device, DeviceOptions, MemoryKind},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, WeightDesc},
    op::Op,
};
use half::{bf16, f16};
use std::{sync::Arc, time::Duration};

/// The longest a copy may take.
const SECOND: Duration = Duration::from_secs(1);

/// An operand: what is planned for and what is bound.
pub(crate) type Operand = (OperandDesc, Argument);

pub(crate) struct Bench {
    pub(crate) device: Arc<dyn Device>,
}

pub(crate) fn desc(dtype: DType, shape: &[usize]) -> TensorDesc {
    TensorDesc::dense(dtype, shape)
}

pub(crate) fn tensor(desc: TensorDesc) -> OperandDesc {
    OperandDesc::Tensor(desc)
}

pub(crate) fn arguments(operands: Vec<Option<BufferSlice>>, results: Vec<BufferSlice>) -> Arguments {
    let operand = |slice: BufferSlice| Argument::Tensor(Binding::new(slice));
    Arguments {
        operands: operands.into_iter().map(|slice| slice.map(operand)).collect(),
        results: results.into_iter().map(Binding::new).collect(),
        workspace: None,
    }
}

/// Element types that tests upload.
pub(crate) trait Number: Pod {
    const DTYPE: DType;
}

impl Number for f32 {
    const DTYPE: DType = DType::F32;
}

impl Number for i32 {
    const DTYPE: DType = DType::I32;
}

impl Number for u32 {
    const DTYPE: DType = DType::U32;
}

impl Bench {
    pub(crate) fn new(backend: &dyn Backend, threads: usize) -> Self {
        let options = DeviceOptions { threads: Some(threads), ..DeviceOptions::default() };
        Self { device: backend.open(0, &options).unwrap() }
    }

    pub(crate) fn upload<T: Pod>(&self, values: &[T]) -> BufferSlice {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let slice = BufferSlice::whole(self.device.allocate(bytes.len(), MemoryKind::Device).unwrap());
        self.device.stream().unwrap().upload(bytes, &slice).unwrap();
        slice
    }

    pub(crate) fn download<T: Pod>(&self, slice: &BufferSlice) -> Vec<T> {
        let mut values = vec![T::zeroed(); slice.bytes / size_of::<T>()];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        self.device.stream().unwrap().download(slice, bytes, "a result", SECOND).unwrap();
        values
    }

    pub(crate) fn operand<T: Number>(&self, values: &[T], shape: &[usize]) -> Operand {
        (tensor(desc(T::DTYPE, shape)), Argument::Tensor(Binding::new(self.upload(values))))
    }

    pub(crate) fn floats_slice(&self, dtype: DType, values: &[f32]) -> BufferSlice {
        match dtype {
            DType::F16 => self.upload(&values.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>()),
            DType::BF16 => self.upload(&values.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>()),
            _ => self.upload(values),
        }
    }

    pub(crate) fn floats(&self, dtype: DType, values: &[f32], shape: &[usize]) -> Operand {
        (tensor(desc(dtype, shape)), Argument::Tensor(Binding::new(self.floats_slice(dtype, values))))
    }

    pub(crate) fn read_floats(&self, dtype: DType, slice: &BufferSlice) -> Vec<f32> {
        match dtype {
            DType::F16 => self.download::<f16>(slice).into_iter().map(f16::to_f32).collect(),
            DType::BF16 => self.download::<bf16>(slice).into_iter().map(bf16::to_f32).collect(),
            _ => self.download(slice),
        }
    }

    /// A dense f32 weight.
    pub(crate) fn weight(&self, values: &[f32], outputs: usize, inputs: usize) -> Operand {
        let weight_type =
            WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![outputs, inputs] };
        let weight = WeightDesc { weight_type: weight_type.clone(), immutable: true };
        let mut reader =
            BytesReader::new(weight_type.clone(), bytemuck::cast_slice::<_, u8>(values)).unwrap();
        let mut stream = self.device.stream().unwrap();
        let packed = self.device.kernels().prepack(stream.as_mut(), &weight, &mut reader).unwrap();
        (OperandDesc::Weight(weight_type), Argument::Weight(packed))
    }

    /// Plans, binds and runs a call.
    pub(crate) fn run(
        &self,
        op: impl Into<Op>,
        operands: Vec<Option<Operand>>,
        results: Vec<(TensorDesc, Binding)>,
    ) -> Result<()> {
        self.run_with(op, operands, results, None)
    }

    pub(crate) fn run_with(
        &self,
        op: impl Into<Op>,
        operands: Vec<Option<Operand>>,
        results: Vec<(TensorDesc, Binding)>,
        comm: Option<Arc<dyn Comm>>,
    ) -> Result<()> {
        let (descs, operands) = operands
            .into_iter()
            .map(|operand| operand.map_or((None, None), |(desc, argument)| (Some(desc), Some(argument))))
            .unzip();
        let (result_descs, results) = results.into_iter().unzip();
        let call = CallDesc { op: op.into(), operands: descs, results: result_descs, comm };
        let plan = CheckedPlan::new(self.device.as_ref(), call.validate()?)?;
        let bound = plan.bind(&Arguments { operands, results, workspace: None })?;
        bound.enqueue(self.device.stream()?.as_mut())
    }
}
