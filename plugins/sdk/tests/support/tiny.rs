//! A backend of a few ops on heap memory, with all optional parts, and with faults on demand.

use dsrun_core::{
    Code, DType, Error, Result, WeightReader, WeightType,
    checked::{ValidArguments, ValidCall},
    collective::{Collective, Comm, host::HostCollective, host::HostComm},
    device::{
        Backend, BackendInfo, Buffer, BufferSlice, Device, DeviceInfo, DeviceOptions, DeviceProperties,
        Event, Finding, Flushed, MemoryKind, MemoryUse, Stream,
    },
    graph::{CallList, Graph, Graphs},
    kernels::{
        Argument, Arguments, BoundCall, Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc,
    },
    op::{Op, Profile},
};
use std::{
    any::Any,
    ptr::NonNull,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Live objects of the tiny backend in this process: streams, buffers, weights, plans, bound calls, graphs.
pub(crate) static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Counts an object while it lives.
#[derive(Debug)]
struct Counted;

impl Counted {
    fn new() -> Self {
        LIVE.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Debug)]
pub(crate) struct Tiny {
    info: BackendInfo,
    panics_when_listed: bool,
}

impl Tiny {
    pub(crate) fn new() -> Self {
        let info = BackendInfo {
            name: "tiny".into(),
            version: "1.2.3".into(),
            description: "a backend for tests – with a dash".into(),
        };
        Self { info, panics_when_listed: false }
    }

    pub(crate) fn that_panics_when_listed() -> Self {
        Self { panics_when_listed: true, ..Self::new() }
    }
}

impl Backend for Tiny {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        assert!(!self.panics_when_listed, "listing devices panics");
        let device = |index, memory_bytes| DeviceInfo { index, name: format!("tiny {index}"), memory_bytes };
        Ok(vec![device(0, Some(1 << 20)), device(7, None)])
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        if ![0, 7].contains(&index) {
            return Err(Error::new(Code::Unavailable, format!("no device {index}")).at("index"));
        }
        if tracing::enabled!(tracing::Level::DEBUG) {
            tracing::debug!(index, "opened a tiny device");
        }
        Ok(Arc::new(TinyDevice {
            properties: DeviceProperties {
                name: format!("tiny {index} with {options:?}"),
                memory_bytes: 1 << 20,
                alignment: 4,
                dtypes: vec![DType::F32, DType::U8],
                profiles: vec![Profile::LlmCore1, Profile::LlmDist1],
                strict_nan: true,
                flushed: Flushed { operands: vec![DType::BF16], results: vec![DType::F32, DType::F16] },
                unified_memory: index == 0,
                binds_pinned: index == 0,
            },
            used: Arc::default(),
        }))
    }

    fn describe(&self, name: &str) -> Result<Arc<dyn Device>> {
        match name {
            "zeroth" => self.open(0, &DeviceOptions::default()),
            _ => Err(Error::invalid(format!("{name:?} is unknown")).at("device")),
        }
    }

    fn diagnose(&self) -> Vec<Finding> {
        assert!(!self.panics_when_listed, "listing findings panics");
        let finding = |subject: &str, present, detail: &str| Finding {
            subject: subject.into(),
            present,
            detail: detail.into(),
        };
        vec![finding("a library", true, "1.2 in /usr/lib"), finding("a driver – of sorts", false, "")]
    }
}

#[derive(Debug)]
struct TinyDevice {
    properties: DeviceProperties,
    used: Arc<AtomicU64>,
}

impl Device for TinyDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        let used = self.used.load(Ordering::SeqCst);
        MemoryUse { used, free: (1u64 << 20).checked_sub(used) }
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        if bytes > 1 << 20 {
            return Err(Error::new(
                Code::OutOfMemory,
                format!("{bytes} bytes requested, {} are free", 1 << 20),
            ));
        }
        self.used.fetch_add(bytes as u64, Ordering::SeqCst);
        let data = Mutex::new(vec![0; bytes].into_boxed_slice());
        Ok(Arc::new(Heap { data, kind, used: self.used.clone(), _counted: Counted::new() }))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(TinyStream { clock: 0, _counted: Counted::new() }))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(TinyEvent(Mutex::new(None))))
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        (self.properties.unified_memory).then_some(self)
    }

    fn collective(&self) -> Option<&dyn Collective> {
        static HOST: HostCollective = HostCollective;
        (self.properties.unified_memory).then_some(&HOST)
    }
}

#[derive(Debug)]
struct Heap {
    data: Mutex<Box<[u8]>>,
    kind: MemoryKind,
    used: Arc<AtomicU64>,
    _counted: Counted,
}

impl Drop for Heap {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes() as u64, Ordering::SeqCst);
    }
}

impl Buffer for Heap {
    fn bytes(&self) -> usize {
        self.data.lock().unwrap().len()
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn host_pointer(&self) -> Option<NonNull<u8>> {
        let pointer = NonNull::new(self.data.lock().unwrap().as_mut_ptr());
        pointer.filter(|_| self.kind == MemoryKind::Pinned)
    }
}

fn heap(slice: &BufferSlice) -> Result<&Heap> {
    let any: &dyn Any = &*slice.buffer;
    any.downcast_ref().ok_or_else(|| Error::invalid("belongs to another backend").field("buffer"))
}

fn read(slice: &BufferSlice) -> Result<Vec<u8>> {
    Ok(heap(slice)?.data.lock().unwrap()[slice.offset..][..slice.bytes].to_vec())
}

fn write(slice: &BufferSlice, bytes: &[u8]) -> Result<()> {
    heap(slice)?.data.lock().unwrap()[slice.offset..][..bytes.len()].copy_from_slice(bytes);
    Ok(())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[derive(Debug)]
struct TinyStream {
    clock: u64,
    _counted: Counted,
}

impl Stream for TinyStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        if source.len() != destination.bytes {
            return Err(
                Error::invalid(format!("{} bytes for {}", source.len(), destination.bytes)).at("source")
            );
        }
        write(destination, source)
    }

    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()> {
        self.synchronize(what, timeout)?;
        destination.copy_from_slice(&read(source)?);
        Ok(())
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        write(destination, &read(source)?)
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        write(destination, &vec![byte; destination.bytes])
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let any: &dyn Any = event;
        let event: &TinyEvent =
            any.downcast_ref().ok_or_else(|| Error::invalid("belongs to another backend").at("event"))?;
        self.clock += 5;
        *event.0.lock().unwrap() = Some(self.clock);
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        event.reached().map(drop)
    }

    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()> {
        if timeout.is_zero() {
            return Err(Error::new(Code::Timeout, format!("waited {timeout:?} for {what}")));
        }
        Ok(())
    }
}

#[derive(Debug)]
struct TinyEvent(Mutex<Option<u64>>);

impl Event for TinyEvent {
    fn reached(&self) -> Result<bool> {
        Ok(true)
    }

    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()> {
        if timeout.is_zero() {
            return Err(Error::new(Code::Timeout, what));
        }
        Ok(())
    }

    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>> {
        let any: &dyn Any = earlier;
        let earlier: &Self =
            any.downcast_ref().ok_or_else(|| Error::invalid("belongs to another backend").at("event"))?;
        let (Some(late), Some(early)) = (*self.0.lock().unwrap(), *earlier.0.lock().unwrap()) else {
            return Ok(None);
        };
        Ok(Some(Duration::from_nanos(late - early)))
    }
}

#[derive(Debug)]
struct Packed {
    weight_type: WeightType,
    values: Vec<f32>,
    _counted: Counted,
}

impl PackedWeight for Packed {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn bytes(&self) -> usize {
        4 * self.values.len()
    }
}

impl Kernels for TinyDevice {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        Ok(match &call.op {
            Op::Argmax(_) => panic!("argmax panics when queried"),
            Op::Region(region) => Support::no(region.encoding()),
            Op::AttentionPrepare(_) => Support { work_words: 33, persistent_bytes: 44, ..Support::native() },
            Op::LayerNorm(_) => Support { workspace_bytes: 16, batch_invariant: false, ..Support::native() },
            Op::Cast(_) | Op::Linear(_) | Op::AllReduce(_) | Op::Columns(_) | Op::Barrier(_) => {
                Support::native()
            }
            op => Support::no(format!("tiny has no {op}")),
        })
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        if weight.weight_type.format.is_quantised() {
            let message = format!("tiny has no {}", weight.weight_type.format);
            return Err(Error::unsupported(message).at("weight_type").field("format"));
        }
        let name = if weight.immutable { "immutable" } else { "changing" };
        Ok(PackedLayout {
            bytes: 4 * weight.weight_type.elements()?,
            name: name.into(),
            relocatable: false,
            readable_when_pinned: false,
        })
    }

    fn prepack(
        &self,
        _: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        let (all, columns) = (weight.weight_type.rows(), weight.weight_type.columns());
        let mut values = vec![0.0; all * columns];
        // Read from the last row to the first, to test that any order works.
        for row in (0..all).rev() {
            weight
                .weight_type
                .format
                .decode_row(&rows.rows(row, 1)?, &mut values[row * columns..][..columns])?;
        }
        Ok(Arc::new(Packed { weight_type: weight.weight_type.clone(), values, _counted: Counted::new() }))
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let workspace = self.query(call)?.workspace_bytes;
        Ok(Arc::new(TinyPlan { call: call.clone(), workspace, _counted: Counted::new() }))
    }
}

impl Graphs for TinyDevice {
    fn capture(&self, _: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        Ok(Box::new(TinyGraph { calls: CallList::new(calls), _counted: Counted::new() }))
    }
}

#[derive(Debug)]
struct TinyGraph {
    calls: CallList,
    _counted: Counted,
}

impl Graph for TinyGraph {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        self.calls.launch(stream)
    }
}

#[derive(Debug)]
struct TinyPlan {
    call: ValidCall,
    workspace: usize,
    _counted: Counted,
}

impl Plan for TinyPlan {
    fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let arguments = arguments.arguments().clone();
        Ok(Box::new(TinyCall { plan: self, arguments, _counted: Counted::new() }))
    }
}

#[derive(Debug)]
struct TinyCall {
    plan: Arc<TinyPlan>,
    arguments: Arguments,
    _counted: Counted,
}

impl TinyCall {
    fn tensor(&self, index: usize) -> Result<&BufferSlice> {
        match &self.arguments.operands[index] {
            Some(Argument::Tensor(binding)) => Ok(&binding.slice),
            _ => Err(Error::internal("is not a tensor")),
        }
    }
}

impl BoundCall for TinyCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        let any: &mut dyn Any = stream;
        any.downcast_mut::<TinyStream>()
            .ok_or_else(|| Error::invalid("belongs to another backend").at("stream"))?;
        let result = self.arguments.results.first().map(|binding| &binding.slice);
        match (&self.plan.call.op, result) {
            (Op::Cast(_), Some(result)) => {
                let extent = self.arguments.results[0].extent.as_ref().map(read).transpose()?;
                let rows = extent.map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap()) as usize);
                let desc = &self.plan.call.results[0];
                let real = rows.unwrap_or(desc.shape[0]) * desc.shape[1] * desc.dtype.bytes();
                write(result, &read(self.tensor(0)?)?[..real])
            }
            (Op::Linear(_), Some(result)) => {
                let Some(Argument::Weight(weight)) = &self.arguments.operands[1] else {
                    return Err(Error::internal("is not a weight"));
                };
                let any: &dyn Any = &**weight;
                let weight: &Packed = any
                    .downcast_ref()
                    .ok_or_else(|| Error::invalid("belongs to another backend").at("weight"))?;
                let columns = weight.weight_type.columns();
                let x = floats(&read(self.tensor(0)?)?);
                let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>();
                let y: Vec<f32> = x
                    .chunks(columns)
                    .flat_map(|x| weight.values.chunks(columns).map(move |w| dot(x, w)))
                    .collect();
                write(result, &bytes_of(&y))
            }
            (Op::AllReduce(op), Some(result)) => {
                let mut bytes = read(result)?;
                self.comm()?.all_reduce(&mut bytes, self.plan.call.results[0].dtype, op.reduction)?;
                write(result, &bytes)
            }
            (Op::Barrier(_), None) => self.comm()?.barrier(),
            (op, _) => panic!("tiny does not run {op}"),
        }
    }
}

impl TinyCall {
    fn comm(&self) -> Result<&HostComm> {
        let comm: &dyn Comm = self.plan.call.comm.as_deref().ok_or_else(|| Error::internal("no group"))?;
        let any: &dyn Any = comm;
        any.downcast_ref().ok_or_else(|| Error::invalid("is not a group of the host").at("comm"))
    }
}
