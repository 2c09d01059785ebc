//! Collectives through host memory, by the host collectives of core.
//!
//! WebGPU has no collective library and no host callbacks in a stream. So enqueueing a collective waits for the work before it,
//! and copies the results back before it returns.

use crate::driver::{
    context::Context,
    memory::{Storage, WgpuBuffer},
    stream::WgpuStream,
};
use dsrun_core::{
    Error, Result, TensorDesc, WeightReader, WeightType,
    checked::{CheckedPlan, ValidArguments, ValidCall},
    device::{BufferSlice, Device, DeviceOptions, MemoryKind, Stream},
    kernels::{
        Argument, Arguments, Binding, BoundCall, PackedLayout, PackedWeight, Plan, Support, WeightDesc,
    },
    op::Op,
};
use dsrun_host::{Compute, Frame, Host};
use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

/// The longest wait for the work before a collective.
const TIMEOUT: Duration = Duration::from_secs(600);

/// A host backend without its own kernels: it runs only the ops that all host backends share, the collectives.
#[derive(Debug)]
struct NoKernels;

/// The uninhabited weight and kernel type of [`NoKernels`].
#[derive(Debug)]
enum Nothing {}

impl PackedWeight for Nothing {
    fn weight_type(&self) -> &WeightType {
        match *self {}
    }

    fn bytes(&self) -> usize {
        match *self {}
    }
}

fn no_kernels() -> Error {
    Error::unsupported("only collectives run in host memory")
}

impl Compute for NoKernels {
    type Weight = Nothing;
    type Kernel = Nothing;

    fn layout(&self, _: &WeightDesc) -> Result<PackedLayout> {
        Err(no_kernels())
    }

    fn pack(&self, _: &WeightDesc, _: &mut dyn WeightReader, _: &Host) -> Result<Nothing> {
        Err(no_kernels())
    }

    fn kernel(&self, _: &Op) -> Result<Nothing> {
        Err(no_kernels())
    }

    fn is_batch_invariant(&self, _: &Op) -> bool {
        true
    }

    fn run(&self, kernel: &Nothing, _: &Frame<'_>, _: &Host) -> Result<()> {
        match *kernel {}
    }
}

/// The collectives of a device handle.
#[derive(Default)]
pub(crate) struct Exchange {
    host: OnceLock<Arc<dyn Device>>,
}

impl Exchange {
    /// The host device that runs the collectives, opened when first needed.
    fn host(&self) -> Result<&Arc<dyn Device>> {
        if let Some(host) = self.host.get() {
            return Ok(host);
        }
        let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
        let host = dsrun_host::open("collectives", 0, &options, |_| NoKernels)?;
        Ok(self.host.get_or_init(|| host))
    }

    /// Says whether a collective can run.
    pub(crate) fn query(&self, call: &ValidCall) -> Result<Support> {
        self.host()?.kernels().query(call)
    }

    /// Plans a collective.
    ///
    /// # Errors
    /// If it cannot run, or belongs to a group of another backend.
    pub(crate) fn plan(&self, context: &Arc<Context>, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let host = self.host()?.clone();
        let plan = CheckedPlan::new(&*host, call.clone())?;
        Ok(Arc::new(ExchangePlan { context: context.clone(), host, plan }))
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").finish_non_exhaustive()
    }
}

/// A planned collective.
struct ExchangePlan {
    context: Arc<Context>,
    host: Arc<dyn Device>,
    plan: CheckedPlan,
}

impl fmt::Debug for ExchangePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExchangePlan").field("op", &self.plan.call().op.name()).finish_non_exhaustive()
    }
}

impl Plan for ExchangePlan {
    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let mut images = Images { plan: &self, known: Vec::new() };
        let mut operands = Vec::new();
        for operand in &arguments.arguments().operands {
            operands.push(match operand {
                Some(Argument::Tensor(binding)) => Some(Argument::Tensor(images.of_binding(binding)?)),
                Some(Argument::Weight(_)) => return Err(Error::internal("a collective has no weights")),
                _ => None,
            });
        }
        let (mut results, mut returned) = (Vec::new(), Vec::new());
        for (desc, binding) in arguments.results() {
            let image = images.of_binding(binding)?;
            returned.extend(rows_of(desc, &binding.slice, &image.slice)?);
            results.push(image);
        }
        let images = images.known;
        let call = self.plan.bind(&Arguments { operands, results, workspace: None })?;
        Ok(Box::new(ExchangeCall { plan: self, images, call, returned }))
    }
}

/// A range of device memory, the pinned memory that it is copied to, and the slice that the collective works on.
#[derive(Debug)]
struct Image {
    device: BufferSlice,
    pinned: BufferSlice,
    host: BufferSlice,
}

/// The host images of the arguments of a call.
struct Images<'a> {
    plan: &'a ExchangePlan,
    known: Vec<Image>,
}

impl Images<'_> {
    /// The image of a range; a result that updates an operand shares the operand's image.
    fn of(&mut self, slice: &BufferSlice) -> Result<BufferSlice> {
        if let Some(image) = self.known.iter().find(|image| image.device.same(slice)) {
            return Ok(image.host.clone());
        }
        let ExchangePlan { context, host, .. } = self.plan;
        WgpuBuffer::locate(slice, context)?.device_memory()?;
        let pinned = Arc::new(WgpuBuffer::new(context.clone(), slice.bytes, MemoryKind::Pinned)?);
        let host = BufferSlice::new(host.allocate(slice.bytes, MemoryKind::Device)?, 0, slice.bytes)?;
        let pinned = BufferSlice::new(pinned, 0, slice.bytes)?;
        self.known.push(Image { device: slice.clone(), pinned, host: host.clone() });
        Ok(host)
    }

    fn of_binding(&mut self, binding: &Binding) -> Result<Binding> {
        let slice = self.of(&binding.slice)?;
        let extent = binding.extent.as_ref().map(|extent| self.of(extent)).transpose()?;
        Ok(Binding { slice, extent })
    }
}

/// The ranges of a result to copy back, as host and device memory: a single range, or each row if rows have gaps, which may
/// belong to other tensors.
fn rows_of(desc: &TensorDesc, device: &BufferSlice, host: &BufferSlice) -> Result<Vec<[BufferSlice; 2]>> {
    let bytes = desc.bytes()?;
    let (&[rows, width], &[stride, 1]) = (desc.shape.as_slice(), desc.strides.as_slice()) else {
        return Ok(vec![[host.slice(0, bytes)?, device.slice(0, bytes)?]]);
    };
    if stride == width || rows <= 1 {
        return Ok(vec![[host.slice(0, bytes)?, device.slice(0, bytes)?]]);
    }
    let (row, step) = (width * desc.dtype.bytes(), stride * desc.dtype.bytes());
    (0..rows).map(|index| Ok([host.slice(index * step, row)?, device.slice(index * step, row)?])).collect()
}

/// A bound collective.
#[derive(Debug)]
struct ExchangeCall {
    plan: Arc<ExchangePlan>,
    images: Vec<Image>,
    call: Box<dyn BoundCall>,
    /// The ranges to copy back, as host and device memory.
    returned: Vec<[BufferSlice; 2]>,
}

impl ExchangeCall {
    fn run(&self, stream: &mut WgpuStream) -> Result<()> {
        let what = format!("the work in front of {}", self.plan.plan.call().op.name());
        for image in &self.images {
            stream.copy(&image.device, &image.pinned)?;
        }
        stream.synchronize(&what, TIMEOUT)?;
        let mut host = self.plan.host.stream()?;
        for Image { pinned, host: memory, .. } in &self.images {
            let buffer = WgpuBuffer::locate(pinned, &self.plan.context)?;
            let Storage::Host(bytes) = &buffer.storage else {
                return Err(Error::internal("pinned memory is not host memory"));
            };
            host.upload(&bytes.read(0, pinned.bytes), memory)?;
        }
        self.call.enqueue(&mut *host)?;
        for [from, to] in &self.returned {
            let mut bytes = vec![0; from.bytes];
            host.download(from, &mut bytes, &what, TIMEOUT)?;
            stream.upload(&bytes, to)?;
        }
        Ok(())
    }
}

impl BoundCall for ExchangeCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        let context = &self.plan.context;
        let stream = WgpuStream::own(stream, context);
        stream
            .and_then(|stream| context.check().and_then(|()| self.run(stream)))
            .map_err(|error| error.in_op(self.plan.plan.call().op.name()))
    }
}
