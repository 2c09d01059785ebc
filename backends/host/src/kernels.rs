//! Query, prepack, plan, bind and enqueue.

use crate::{
    collective::{self, Exchange, Staging},
    host::Host,
    memory::{ALIGNMENT, PackedMemory, locate, reserve},
    stream::HostStream,
    view::{Frame, Views},
    weight::HostWeight,
};
use dsrun_core::{
    Error, Result, WeightReader,
    checked::{ValidArguments, ValidCall},
    collective::host::HostComm,
    device::{BufferSlice, MemoryKind, Stream},
    kernels::{
        BoundCall, CallDesc, Kernels, OperandDesc, PackedLayout, PackedWeight, Plan, Support, WeightDesc,
        check_packed_range,
    },
    op::Op,
};
use std::{any::Any, cell::RefCell, fmt::Debug, sync::Arc};

/// How a backend computes: how it packs weights and runs ops.
///
/// Shapes come with the tensors of a [`Frame`], so a kernel consists of the attributes of its op.
pub trait Compute: Debug + Send + Sync + 'static {
    /// A weight in the backend's layout.
    type Weight: PackedWeight;

    /// An op prepared to run.
    type Kernel: Debug + Send + Sync;

    /// The layout the backend would keep a weight in.
    ///
    /// # Errors
    /// [`dsrun_core::Code::Unsupported`] if the backend cannot keep this format; if the size overflows.
    fn layout(&self, weight: &WeightDesc) -> Result<PackedLayout>;

    /// Packs a weight.
    ///
    /// # Errors
    /// Same as [`Self::layout`]; those of the reader; [`dsrun_core::Code::OutOfMemory`].
    fn pack(&self, weight: &WeightDesc, rows: &mut dyn WeightReader, host: &Host) -> Result<Self::Weight>;

    /// Writes the packed bytes of a weight to `out`, which is as long as the layout says.
    ///
    /// # Errors
    /// [`dsrun_core::Code::Unsupported`] if its layout is not relocatable.
    fn image(&self, _weight: &Self::Weight, _out: &mut [u8]) -> Result<()> {
        Err(Error::unsupported("the backend cannot copy packed weights"))
    }

    /// Makes a weight of memory that holds its packed bytes whenever a kernel runs with it.
    ///
    /// # Errors
    /// As [`Self::image`].
    fn adopt(&self, _weight: &WeightDesc, _memory: PackedMemory) -> Result<Self::Weight> {
        Err(Error::unsupported("the backend cannot adopt packed weights"))
    }

    /// Prepares an op. Collectives, page moves and the ops of the request table never get here.
    ///
    /// # Errors
    /// [`dsrun_core::Code::Unsupported`], with the reason, if the backend does not run it.
    fn kernel(&self, op: &Op) -> Result<Self::Kernel>;

    /// Whether a row's result does not depend on which other rows are in the batch, to the bit.
    fn is_batch_invariant(&self, op: &Op) -> bool;

    /// Runs a kernel once. Calls of one device handle never run at the same time.
    ///
    /// # Errors
    /// Those of the kernel.
    fn run(&self, kernel: &Self::Kernel, frame: &Frame<'_>, host: &Host) -> Result<()>;
}

/// An op whose implementation all host backends share.
pub(crate) trait SharedOp: Debug + Send + Sync {
    /// Runs the op once.
    fn run(&self, frame: &Frame<'_>) -> Result<()>;
}

#[derive(Debug)]
enum Implementation<K> {
    Compute(K),
    Shared(Box<dyn SharedOp>),
    Collective(Box<dyn Exchange>, Arc<HostComm>),
}

/// What the kernels, plans and calls of a device handle share.
#[derive(Debug)]
struct Shared<C> {
    host: Arc<Host>,
    compute: C,
}

/// The kernels of a device handle.
#[derive(Debug)]
pub(crate) struct HostKernels<C>(Arc<Shared<C>>);

impl<C: Compute> HostKernels<C> {
    pub(crate) fn new(host: Arc<Host>, compute: C) -> Self {
        Self(Arc::new(Shared { host, compute }))
    }

    /// Finds the implementation of a call, or says why there is none.
    fn implementation(&self, call: &CallDesc) -> Result<Implementation<C::Kernel>> {
        if let Some(exchange) = collective::exchange(&call.op) {
            let comm = call.comm.clone().ok_or_else(|| Error::invalid("is missing").at("comm"))?;
            let any: Arc<dyn Any + Send + Sync> = comm;
            let comm = any
                .downcast::<HostComm>()
                .map_err(|_| Error::invalid("belongs to another backend").at("comm"))?;
            collective::check(call)?;
            return Ok(Implementation::Collective(exchange, comm));
        }
        if let Some(op) = shared_op(&call.op) {
            return Ok(Implementation::Shared(op));
        }
        let kernel = self.0.compute.kernel(&call.op)?;
        for operand in call.operands.iter().flatten() {
            if let OperandDesc::Weight(weight) = operand {
                let weight = WeightDesc { weight_type: weight.clone(), immutable: false };
                self.0.compute.layout(&weight)?;
            }
        }
        Ok(Implementation::Compute(kernel))
    }
}

/// The op, if all host backends share its implementation: it moves bytes or counts tokens, and computes no floats.
fn shared_op(op: &Op) -> Option<Box<dyn SharedOp>> {
    Some(match op {
        Op::PageGather(op) => Box::new(*op),
        Op::PageScatter(op) => Box::new(*op),
        Op::PrepareStep(op) => Box::new(*op),
        Op::CommitTokens(op) => Box::new(*op),
        _ => return None,
    })
}

impl<C: Compute> Kernels for HostKernels<C> {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        match self.implementation(call) {
            // `native` means no work list, no scratch memory and no persistent memory.
            Ok(implementation) => {
                let computes = matches!(implementation, Implementation::Compute(_));
                let batch_invariant = !computes || self.0.compute.is_batch_invariant(&call.op);
                Ok(Support { batch_invariant, ..Support::native() })
            }
            Err(error) => Ok(Support::no(error.to_string())),
        }
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        self.0.compute.layout(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        let Shared { host, compute } = &*self.0;
        HostStream::check(stream, host)?;
        let reservation = reserve(&host.account, compute.layout(weight)?.bytes)?;
        let packed = compute.pack(weight, rows, host)?;
        Ok(Arc::new(HostWeight::own(packed, reservation)))
    }

    fn copy_packed(
        &self,
        stream: &mut dyn Stream,
        weight: &Arc<dyn PackedWeight>,
        destination: &BufferSlice,
    ) -> Result<()> {
        let Shared { host, compute } = &*self.0;
        HostStream::check(stream, host)?;
        let own = (&**weight as &dyn Any).downcast_ref::<HostWeight<C::Weight>>();
        let own = own.ok_or_else(|| Error::invalid("belongs to another backend").at("weight"))?;
        if destination.bytes != own.bytes() {
            let message =
                format!("is {} bytes, but the packed weight has {}", destination.bytes, own.bytes());
            return Err(Error::invalid(message).at("destination").field("bytes"));
        }
        if own.overlaps(destination) {
            return Err(Error::invalid("overlaps the weight").at("destination"));
        }
        let (_buffer, pointer) = locate(destination, host).map_err(|error| error.at("destination"))?;
        let _turn = host.lock();
        // SAFETY: the range was just found in a live buffer of this device, whose lock is held, and it is not the memory of the
        // weight.
        let out = unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), destination.bytes) };
        compute.image(own.packed(), out)
    }

    fn adopt(&self, weight: &WeightDesc, memory: &BufferSlice) -> Result<Arc<dyn PackedWeight>> {
        let Shared { host, compute } = &*self.0;
        let layout = compute.layout(weight)?;
        check_packed_range(&layout, memory, ALIGNMENT)?;
        if memory.buffer.kind() != MemoryKind::Device && !layout.readable_when_pinned {
            return Err(Error::invalid("is not device memory").at("memory"));
        }
        let packed = compute.adopt(weight, PackedMemory::new(memory, host)?)?;
        Ok(Arc::new(HostWeight::adopted(packed, memory.clone())))
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let implementation = self.implementation(call)?;
        Ok(Arc::new(HostPlan { shared: self.0.clone(), call: call.clone(), implementation }))
    }
}

#[derive(Debug)]
struct HostPlan<C: Compute> {
    shared: Arc<Shared<C>>,
    call: ValidCall,
    implementation: Implementation<C::Kernel>,
}

impl<C: Compute> Plan for HostPlan<C> {
    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let views = Views::bind::<C::Weight>(arguments, &self.shared.host)?;
        Ok(Box::new(HostCall { plan: self, views, staging: RefCell::default() }))
    }
}

#[derive(Debug)]
struct HostCall<C: Compute> {
    plan: Arc<HostPlan<C>>,
    views: Views,
    /// Used by collectives only.
    staging: RefCell<Staging>,
}

impl<C: Compute> HostCall<C> {
    fn run(&self) -> Result<()> {
        let Shared { host, compute } = &*self.plan.shared;
        match &self.plan.implementation {
            Implementation::Compute(kernel) => compute.run(kernel, &self.views.open(), host),
            Implementation::Shared(op) => op.run(&self.views.open()),
            Implementation::Collective(exchange, comm) => {
                let staging = self.staging.try_borrow_mut();
                let mut staging = staging.map_err(|_| Error::internal("the call is running already"))?;
                exchange.collect(&self.views.open(), comm, &mut staging)?;
                exchange.exchange(comm, &mut staging)?;
                exchange.deliver(&self.views.open(), comm, &staging)
            }
        }
    }
}

impl<C: Compute> BoundCall for HostCall<C> {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        HostStream::check(stream, &self.plan.shared.host)
            .and_then(|()| self.run())
            .map_err(|error| error.in_op(self.plan.call.op.name()))
    }
}
