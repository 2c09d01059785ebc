//! Implements core's kernel traits: query, prepack, plan and bind.

use crate::{
    arch::DeviceSpec,
    driver::{
        context::Context,
        launch::{Function, Launches},
        memory::CudaBuffer,
        stream::CudaStream,
    },
    ops::{
        self, KernelPlan,
        frame::Frame,
        weight::{self, CudaWeight},
    },
};
use dsrun_core::{
    Error, Result, WeightReader,
    checked::{ValidArguments, ValidCall},
    device::{BufferSlice, MemoryKind, Stream},
    kernels::{BoundCall, Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
};
use std::{any::Any, fmt, sync::Arc};

/// Whether and how a device runs a call.
pub(crate) fn support(call: &ValidCall, device: &DeviceSpec) -> Support {
    match ops::plan(call, device) {
        Ok(plan) => Support {
            workspace_bytes: plan.workspace,
            persistent_bytes: plan.persistent,
            batch_invariant: plan.batch_invariant,
            ..Support::native()
        },
        Err(error) => Support::no(error.to_string()),
    }
}

/// The kernels of a device handle.
#[derive(Debug)]
pub(crate) struct CudaKernels {
    pub(crate) context: Arc<Context>,
    pub(crate) device: DeviceSpec,
}

impl CudaKernels {
    /// The device's current properties.
    fn device(&self) -> DeviceSpec {
        DeviceSpec { shared: self.context.is_shared(), ..self.device }
    }
}

impl Kernels for CudaKernels {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        Ok(support(call, &self.device()))
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        weight::packed_layout(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        let stream = CudaStream::own(stream, &self.context)?;
        Ok(Arc::new(CudaWeight::pack(&self.context, stream, weight, rows)?))
    }

    fn copy_packed(
        &self,
        stream: &mut dyn Stream,
        weight: &Arc<dyn PackedWeight>,
        destination: &BufferSlice,
    ) -> Result<()> {
        let own = (&**weight as &dyn Any).downcast_ref::<CudaWeight>();
        let own = own.ok_or_else(|| Error::invalid("belongs to another backend").at("weight"))?;
        own.copy_to(CudaStream::own(stream, &self.context)?, destination)
    }

    fn adopt(&self, weight: &WeightDesc, memory: &BufferSlice) -> Result<Arc<dyn PackedWeight>> {
        Ok(Arc::new(CudaWeight::adopt(&self.context, weight, memory)?))
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let plan = ops::plan(call, &self.device())?;
        let functions = plan.kernels.iter().map(|spec| self.context.function(spec)).collect::<Result<_>>()?;
        Ok(Arc::new(CudaPlan { context: self.context.clone(), call: call.clone(), plan, functions }))
    }
}

/// A kernel plan with its kernels loaded.
struct CudaPlan {
    context: Arc<Context>,
    call: ValidCall,
    plan: KernelPlan,
    functions: Vec<Arc<Function>>,
}

impl fmt::Debug for CudaPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaPlan").field("call", &self.call).finish_non_exhaustive()
    }
}

impl Plan for CudaPlan {
    fn workspace_bytes(&self) -> usize {
        self.plan.workspace
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let persistent = match self.plan.persistent {
            0 => None,
            bytes => Some(Arc::new(CudaBuffer::new(self.context.clone(), bytes, MemoryKind::Device)?)),
        };
        let frame = Frame::bind(&self.call, arguments.arguments(), &self.context, persistent)?;
        let launches = (self.plan.launches)(&frame, &self.functions, &self.context)?;
        tracing::trace!(op = self.call.op.name(), launches = launches.len(), buffers = frame.kept(), "bound");
        let rendezvous = ops::rendezvous(&self.call, &self.context)?;
        let launches = Launches::new(self.call.op.name(), launches, rendezvous);
        Ok(Box::new(CudaCall { _frame: frame, plan: self, launches }))
    }
}

/// A call that is bound.
#[derive(Debug)]
struct CudaCall {
    /// Keeps buffers and weights alive.
    _frame: Frame,
    /// Keeps data alive that launches share, such as cuBLASLt descriptors.
    plan: Arc<CudaPlan>,
    launches: Launches,
}

impl BoundCall for CudaCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        let context = &self.plan.context;
        let stream = CudaStream::own(stream, context).map_err(|error| self.launches.blame(error))?;
        if let Some(recorded) = &mut stream.recorded {
            recorded.push(self.launches.clone());
            return Ok(());
        }
        context.enter().map_err(|error| self.launches.blame(error))?;
        self.launches.run(context, stream)
    }
}
