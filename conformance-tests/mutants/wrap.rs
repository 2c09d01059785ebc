//! The CPU backend, with a fault between it and the caller.
//!
//! Buffers, streams and events are its own; devices, plans and calls stand in front of its own.

#[path = "wrap/comm.rs"]
mod comm;
#[path = "wrap/kept.rs"]
mod kept;
#[path = "wrap/pinned.rs"]
mod pinned;
#[path = "wrap/stream.rs"]
mod stream;

use crate::{
    faults::Fault,
    late::{self, LateEvent},
    snapshot::Snapshot,
};
use comm::{MutantCollective, unwrapped};
use dsrun_core::{
    Affine, Code, Error, Result, WeightReader,
    checked::{CheckedPlan, ValidArguments, ValidCall},
    collective::Collective,
    device::{
        Backend, BackendInfo, Buffer, BufferSlice, Device, DeviceInfo, DeviceOptions, DeviceProperties,
        Event, Flushed, MemoryKind, MemoryUse, Stream,
    },
    graph::{Graph, Graphs},
    kernels::{
        Argument, Arguments, BoundCall, CallDesc, Kernels, OperandDesc, PackedLayout, PackedWeight, Plan,
        Support, WeightDesc,
    },
    lowered_region::LoweredPlan,
    op::Op,
};
use dsrun_cpu::CpuBackend;
use kept::KeptWeight;
use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, LocalKey},
};
pub(crate) use stream::StreamFault;
use stream::{MutantEvent, MutantStream, inner_stream};

/// The backend.
#[derive(Debug)]
pub(crate) struct MutantBackend {
    inner: CpuBackend,
    info: BackendInfo,
    fault: &'static Fault,
}

impl MutantBackend {
    pub(crate) fn new(fault: &'static Fault, description: String) -> Self {
        let info =
            BackendInfo { name: "mutant".into(), version: env!("CARGO_PKG_VERSION").into(), description };
        Self { inner: CpuBackend::new(), info, fault }
    }
}

impl Backend for MutantBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let mut devices = self.inner.devices()?;
        if self.fault.nameless {
            devices.iter_mut().for_each(|device| device.name.clear());
        }
        Ok(devices)
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        let mut options = options.clone();
        if self.fault.limit_ignored {
            options.memory_limit = None;
        }
        let index = if self.fault.every_index_opens { 0 } else { index };
        let inner = self.inner.open(index, &options).map_err(|error| match error.code() {
            code if self.fault.status_without_message => Error::new(code, ""),
            _ => error,
        })?;
        let mut properties = inner.properties().clone();
        if self.fault.alignment_overstated {
            // Larger than any allocator aligns by chance.
            properties.alignment <<= 16;
        }
        if self.fault.declares_flushing {
            properties.flushed =
                Flushed { operands: properties.dtypes.clone(), results: properties.dtypes.clone() };
        }
        static OPENED: AtomicU64 = AtomicU64::new(0);
        let before = OPENED.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Shared {
            inner,
            fault: self.fault,
            latest: Mutex::default(),
            leaked: Mutex::default(),
            weights: Mutex::default(),
            streams: AtomicU64::new(0),
            uncounted: AtomicU64::new(0),
            left_behind: if self.fault.handles_leak { 4096 * before } else { 0 },
        });
        Ok(Arc::new(MutantDevice::new(properties, shared)))
    }
}

/// What is wrong with the account of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccountFault {
    /// Packed weights are not counted.
    WeightsUncounted,
    /// Buffers are never freed.
    NeverFreed,
    /// A handle counts what all handles allocate.
    SharedByHandles,
}

/// Bytes that all handles have allocated.
static ALLOCATED: AtomicU64 = AtomicU64::new(0);

/// What a device, its plans and its calls share.
pub(crate) struct Shared {
    inner: Arc<dyn Device>,
    fault: &'static Fault,
    /// The last plan of each op.
    latest: Mutex<HashMap<String, CheckedPlan>>,
    leaked: Mutex<Vec<Leaked>>,
    /// The rows of packed weights by the address of the weight.
    weights: Mutex<HashMap<usize, Arc<KeptWeight>>>,
    /// How many streams were made.
    streams: AtomicU64,
    /// Bytes that are held and not counted.
    uncounted: AtomicU64,
    /// Bytes that handles before this one have left behind.
    left_behind: u64,
}

/// What is never given back.
enum Leaked {
    Buffer(#[allow(dead_code, reason = "held")] Arc<dyn Buffer>),
    Weight(#[allow(dead_code, reason = "held")] Arc<dyn PackedWeight>),
}

impl Shared {
    fn leak(&self, leaked: Leaked) {
        self.leaked.lock().unwrap_or_else(PoisonError::into_inner).push(leaked);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("fault", self.fault).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct MutantDevice {
    properties: DeviceProperties,
    kernels: MutantKernels,
    graphs: MutantGraphs,
    collective: MutantCollective,
    shared: Arc<Shared>,
}

impl MutantDevice {
    fn new(properties: DeviceProperties, shared: Arc<Shared>) -> Self {
        Self {
            properties,
            kernels: MutantKernels(shared.clone()),
            graphs: MutantGraphs(shared.clone()),
            collective: MutantCollective(shared.clone()),
            shared,
        }
    }
}

impl Device for MutantDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        let memory = self.shared.inner.memory();
        let uncounted = self.shared.uncounted.load(Ordering::Relaxed);
        let of_others = match self.shared.fault.accounts {
            Some(AccountFault::SharedByHandles) => ALLOCATED.load(Ordering::Relaxed),
            _ => 0,
        };
        let used = (memory.used + self.shared.left_behind + of_others).saturating_sub(uncounted);
        MemoryUse { used, ..memory }
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        let fault = self.shared.fault;
        let bytes = if fault.size_wraps { bytes & 0xFFFF_FFFF } else { bytes };
        let buffer = self.shared.inner.allocate(bytes, kind).map_err(|error| match error.code() {
            Code::OutOfMemory if fault.out_of_memory_misnamed => Error::internal(error.message()),
            _ => error,
        })?;
        match fault.accounts {
            Some(AccountFault::SharedByHandles) => {
                ALLOCATED.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            Some(AccountFault::NeverFreed) => self.shared.leak(Leaked::Buffer(buffer.clone())),
            _ => {}
        }
        if fault.memory_not_zeroed {
            self.stream()?.fill(&BufferSlice::whole(buffer.clone()), 0xCC)?;
        }
        Ok(buffer)
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        let number = self.shared.streams.fetch_add(1, Ordering::Relaxed);
        let (inner, fault) = (self.shared.inner.stream()?, self.shared.fault);
        Ok(Box::new(MutantStream { inner, fault, number, on_host: None }))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        let inner = self.shared.inner.event()?;
        if let Some(fault) = self.shared.fault.stream.filter(|fault| fault.is_late()) {
            let (device, early) = (self.shared.inner.clone(), fault == StreamFault::EventsEarly);
            return Ok(Arc::new(LateEvent { inner, device, recorded: AtomicU64::new(u64::MAX), early }));
        }
        Ok(if self.shared.fault.events_refused { Arc::new(MutantEvent(inner)) } else { inner })
    }

    fn kernels(&self) -> &dyn Kernels {
        &self.kernels
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(&self.graphs)
    }

    fn collective(&self) -> Option<&dyn Collective> {
        Some(&self.collective)
    }
}

#[derive(Debug)]
struct MutantKernels(Arc<Shared>);

impl MutantKernels {
    /// The plan of a region that the CPU backend has no kernel for, as the plans of its body, faults included.
    fn lowered(&self, call: &ValidCall) -> Result<Option<LoweredPlan>> {
        if !matches!(call.op, Op::Region(_)) || self.0.inner.kernels().query(call)?.native {
            return Ok(None);
        }
        let device = MutantDevice::new(self.0.inner.properties().clone(), self.0.clone());
        let mut plan = |call| CheckedPlan::new(&device, call);
        match LoweredPlan::new(call, device.properties.alignment, &mut plan) {
            Ok(plan) => Ok(Some(plan)),
            Err(error) if error.code() == Code::Unsupported => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Kernels for MutantKernels {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        let mut support = self.0.inner.kernels().query(&unwrapped(call)?)?;
        if let Some(plan) = self.lowered(call)? {
            support = Support { workspace_bytes: plan.workspace_bytes(), ..Support::native() };
        }
        if let Some(query) = self.0.fault.query {
            query(call, &mut support);
        }
        Ok(support)
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        self.0.inner.kernels().prepack_query(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        let (stream, _) = inner_stream(stream);
        let packed = self.0.inner.kernels().prepack(stream, weight, rows)?;
        if self.0.fault.accounts == Some(AccountFault::WeightsUncounted) {
            self.0.uncounted.fetch_add(packed.bytes() as u64, Ordering::Relaxed);
        }
        if self.0.fault.weights_kept {
            let kept = KeptWeight::read(rows)?;
            let mut weights = self.0.weights.lock().unwrap_or_else(PoisonError::into_inner);
            weights.insert(address(&packed), Arc::new(kept));
        }
        if self.0.fault.weights_leak {
            self.0.leak(Leaked::Weight(packed.clone()));
        }
        Ok(packed)
    }

    fn copy_packed(
        &self,
        stream: &mut dyn Stream,
        weight: &Arc<dyn PackedWeight>,
        destination: &BufferSlice,
    ) -> Result<()> {
        let (stream, _) = inner_stream(stream);
        self.0.inner.kernels().copy_packed(stream, weight, destination)?;
        if self.0.fault.packed_short && destination.bytes > 0 {
            stream.fill(&destination.slice(destination.bytes - 1, 1)?, 0x5A)?;
        }
        Ok(())
    }

    fn adopt(&self, weight: &WeightDesc, memory: &BufferSlice) -> Result<Arc<dyn PackedWeight>> {
        if self.0.fault.pinned_copied && memory.buffer.kind() == MemoryKind::Pinned {
            return self.0.inner.kernels().adopt(weight, &self.0.copied(memory)?);
        }
        let early = BufferSlice { offset: 0, ..memory.clone() };
        self.0.inner.kernels().adopt(weight, if self.0.fault.adopted_early { &early } else { memory })
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let (fault, call) = (self.0.fault, unwrapped(call)?);
        if let Some(refusal) = fault.plan.and_then(|plan| plan(&call)) {
            return Err(refusal);
        }
        if let Some(plan) = self.lowered(&call)? {
            return Ok(Arc::new(MutantRegion(Arc::new(plan))));
        }
        let inner = CheckedPlan::new(&*self.0.inner, call.clone())?;
        let mut other = CallDesc::clone(&call);
        let changed = fault.variant.is_some_and(|variant| variant(&mut other));
        let variant = changed.then(|| CheckedPlan::new(&*self.0.inner, other.validate()?)).transpose()?;
        if fault.stale_plan {
            let mut latest = self.0.latest.lock().unwrap_or_else(PoisonError::into_inner);
            latest.insert(call.op.name().to_owned(), inner.clone());
        }
        Ok(Arc::new(MutantPlan { shared: self.0.clone(), inner, variant }))
    }
}

#[derive(Debug)]
struct MutantPlan {
    shared: Arc<Shared>,
    inner: CheckedPlan,
    /// Another call that runs in place of this one, or next to it.
    variant: Option<CheckedPlan>,
}

impl Plan for MutantPlan {
    fn workspace_bytes(&self) -> usize {
        self.shared.fault.workspace
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let (fault, arguments) = (self.shared.fault, arguments.arguments());
        let is_meant = fault.op.is_none_or(|op| op == self.inner.call().op.name());
        let mut changed = arguments.clone();
        if let Some(change) = fault.arguments.filter(|_| is_meant) {
            change(&mut changed);
        }
        if fault.pinned_operand_copied && self.inner.call().op.updates(0).is_none() {
            changed.operands.iter_mut().flatten().try_for_each(|operand| self.shared.unpin(operand))?;
        }
        let mut plan = self.inner.clone();
        if fault.stale_plan {
            let latest = self.shared.latest.lock().unwrap_or_else(PoisonError::into_inner);
            plan = latest.get(plan.call().op.name()).cloned().unwrap_or(plan);
        }
        let inner = match plan.bind(&changed) {
            Ok(bound) => Some(bound),
            Err(_) if fault.error_swallowed => None,
            Err(error) => return Err(error),
        };
        let variant = match &self.variant {
            None => None,
            Some(plan) => {
                let mut arguments = arguments.clone();
                for (operand, desc) in arguments.operands.iter_mut().zip(&plan.call().operands) {
                    if desc.is_none() {
                        *operand = None;
                    }
                }
                Some(plan.bind(&arguments)?)
            }
        };
        let snapshot = match fault.copied_when_bound && is_meant {
            true => Some(Snapshot::take(&mut *self.shared.inner.stream()?, arguments)?),
            false => None,
        };
        Ok(Box::new(Run {
            is_meant,
            shared: self.shared.clone(),
            call: self.inner.call().clone(),
            arguments: arguments.clone(),
            inner,
            variant,
            thread: thread::current().id(),
            runs: AtomicU64::new(0),
            snapshot: RefCell::new(snapshot),
            stream: Cell::new(0),
        }))
    }
}

/// The plan of a region as the plans of its body.
#[derive(Debug)]
struct MutantRegion(Arc<LoweredPlan>);

impl Plan for MutantRegion {
    fn workspace_bytes(&self) -> usize {
        self.0.workspace_bytes()
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        Ok(Box::new(Within { flag: &IN_REGION, call: self.0.clone().bind(arguments)? }))
    }
}

/// A bound call.
pub(crate) struct Run {
    shared: Arc<Shared>,
    pub(crate) call: ValidCall,
    pub(crate) arguments: Arguments,
    inner: Option<Box<dyn BoundCall>>,
    variant: Option<Box<dyn BoundCall>>,
    /// The one that bound it.
    pub(crate) thread: thread::ThreadId,
    runs: AtomicU64,
    /// The operands when a graph was launched for the first time, or when the call was bound.
    pub(crate) snapshot: RefCell<Option<Snapshot>>,
    /// Whether the fault is one of this op.
    is_meant: bool,
    /// The stream that it runs on, counted from 0.
    pub(crate) stream: Cell<u64>,
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("call", &self.call).finish_non_exhaustive()
    }
}

impl Run {
    /// Runs the call as it should.
    pub(crate) fn right(&self, stream: &mut dyn Stream) -> Result<()> {
        self.inner.as_ref().map_or(Ok(()), |inner| inner.enqueue(stream))
    }

    /// Runs the other call, if there is one for this op.
    pub(crate) fn other(&self, stream: &mut dyn Stream) -> Result<()> {
        match &self.variant {
            Some(variant) => variant.enqueue(stream),
            None => self.right(stream),
        }
    }

    pub(crate) fn has_other(&self) -> bool {
        self.variant.is_some()
    }

    /// The name of the op; regions have one of their own.
    pub(crate) fn op(&self) -> &str {
        self.call.op.name()
    }

    /// The name of the fault.
    pub(crate) fn fault_name(&self) -> &'static str {
        self.shared.fault.name
    }

    /// Whether an operand of this number is a tensor.
    pub(crate) fn operand(&self, index: usize) -> Option<&dsrun_core::TensorDesc> {
        match self.call.operands.get(index)?.as_ref()? {
            OperandDesc::Tensor(desc) => Some(desc),
            OperandDesc::Weight(_) => None,
        }
    }

    /// The elements of the weight operand at `index`, row by row, if the fault keeps them.
    pub(crate) fn weight(&self, index: usize) -> Option<Vec<f32>> {
        self.kept_weight(index)?.elements()
    }

    /// The integers of the quantised weight operand at `index`, row by row, each with the map of its group, if the fault keeps them.
    pub(crate) fn weight_integers(&self, index: usize) -> Option<Vec<(u8, Affine)>> {
        self.kept_weight(index)?.integers()
    }

    fn kept_weight(&self, index: usize) -> Option<Arc<KeptWeight>> {
        let Some(Some(Argument::Weight(weight))) = self.arguments.operands.get(index) else { return None };
        let weights = self.shared.weights.lock().unwrap_or_else(PoisonError::into_inner);
        weights.get(&address(weight)).cloned()
    }

    /// A number that no other bound call has meanwhile.
    pub(crate) fn address(&self) -> usize {
        (&raw const *self).addr()
    }

    /// How often it ran before.
    pub(crate) fn count(&self) -> u64 {
        self.runs.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn leak(&self, bytes: usize) -> Result<()> {
        let buffer = self.shared.inner.allocate(bytes, MemoryKind::Device)?;
        self.shared.leak(Leaked::Buffer(buffer));
        Ok(())
    }
}

fn address(weight: &Arc<dyn PackedWeight>) -> usize {
    Arc::as_ptr(weight).cast::<()>().addr()
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.shared.fault.stream == Some(StreamFault::FreedForgotten) {
            late::forget(self.address());
        }
    }
}

impl BoundCall for Run {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        let (stream, number) = inner_stream(stream);
        self.stream.set(number);
        if self.shared.fault.stream.is_some_and(StreamFault::is_late) {
            return late::call(self, stream);
        }
        match self.shared.fault.run.filter(|_| self.is_meant) {
            Some(run) => run(self, stream),
            None => self.right(stream),
        }
    }
}

thread_local! {
    /// Whether a graph is being launched.
    static IN_GRAPH: Cell<bool> = const { Cell::new(false) };
    /// Whether the body of a region runs.
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

/// Whether the call that runs on this thread is one of a graph.
pub(crate) fn in_graph() -> bool {
    IN_GRAPH.get()
}

/// Whether the call that runs on this thread is one of the body of a region.
pub(crate) fn in_region() -> bool {
    IN_REGION.get()
}

/// A call with a flag that is set while the call runs.
#[derive(Debug)]
struct Within {
    flag: &'static LocalKey<Cell<bool>>,
    call: Box<dyn BoundCall>,
}

impl BoundCall for Within {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        let before = self.flag.replace(true);
        let result = self.call.enqueue(stream);
        self.flag.set(before);
        result
    }
}

#[derive(Debug)]
struct MutantGraphs(Arc<Shared>);

impl Graphs for MutantGraphs {
    fn capture(&self, stream: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        let graphs = self.0.inner.graphs();
        let graphs = graphs.ok_or_else(|| Error::internal("the CPU backend has graphs"))?;
        let captured = |call| Box::new(Within { flag: &IN_GRAPH, call }) as Box<dyn BoundCall>;
        let (stream, _) = inner_stream(stream);
        Ok(Box::new(MutantGraph(graphs.capture(stream, calls.into_iter().map(captured).collect())?)))
    }
}

#[derive(Debug)]
struct MutantGraph(Box<dyn Graph>);

impl Graph for MutantGraph {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        self.0.launch(inner_stream(stream).0)
    }
}
