//! Query, prepack, plan and bind.

use crate::{
    context::Context,
    launch::{Frame, Function, Step},
    memory::CudaBuffer,
    ops::{
        self, Recipe,
        layers::{Part, Traffic},
    },
    spec::{KernelSpec, Machine},
    stream::CudaStream,
    weight::{self, CudaWeight},
};
use dsrun_core::{
    Result, WeightReader,
    device::{MemoryKind, Stream},
    kernels::{
        Arguments, BoundCall, CallDesc, Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc,
    },
};
use std::{fmt, sync::Arc};

/// Whether and how a machine runs a call.
pub(crate) fn support(call: &CallDesc, machine: &Machine) -> Support {
    match call.validate().and_then(|()| ops::recipe(call, machine)) {
        Ok(recipe) => Support {
            workspace_bytes: recipe.workspace,
            persistent_bytes: recipe.persistent,
            batch_invariant: recipe.batch_invariant,
            ..Support::native()
        },
        Err(error) => Support::no(error.to_string()),
    }
}

/// What a handle computes.
#[derive(Debug)]
pub(crate) struct CudaKernels {
    pub(crate) context: Arc<Context>,
}

impl Kernels for CudaKernels {
    fn query(&self, call: &CallDesc) -> Result<Support> {
        Ok(support(call, &self.context.machine))
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

    fn plan(&self, call: &CallDesc) -> Result<Arc<dyn Plan>> {
        call.validate()?;
        let recipe = ops::recipe(call, &self.context.machine)?;
        let functions =
            recipe.kernels.iter().map(|spec| self.context.function(spec)).collect::<Result<_>>()?;
        Ok(Arc::new(CudaPlan { context: self.context.clone(), call: call.clone(), recipe, functions }))
    }
}

/// A recipe with its kernels loaded.
struct CudaPlan {
    context: Arc<Context>,
    call: CallDesc,
    recipe: Recipe,
    functions: Vec<Arc<Function>>,
}

impl fmt::Debug for CudaPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaPlan").field("call", &self.call).finish_non_exhaustive()
    }
}

impl Plan for CudaPlan {
    fn workspace_bytes(&self) -> usize {
        self.recipe.workspace
    }

    fn bind(self: Arc<Self>, arguments: &Arguments) -> Result<Box<dyn BoundCall>> {
        let persistent = match self.recipe.persistent {
            0 => None,
            bytes => Some(Arc::new(CudaBuffer::new(self.context.clone(), bytes, MemoryKind::Device)?)),
        };
        let frame = Frame::bind(&self.call, arguments, &self.context, persistent)?;
        let steps = (self.recipe.steps)(&frame, &self.functions, &self.context)?;
        let machine = &self.context.machine;
        let part = if machine.skinny { Part::of(&self.call, &frame, machine)?.map(Arc::new) } else { None };
        let traffic = Arc::new(Traffic::of(&frame)?);
        tracing::trace!(op = self.call.op.name(), steps = steps.len(), buffers = frame.kept(), "bound");
        Ok(Box::new(CudaCall {
            _frame: frame,
            work: Work { plan: self, steps: steps.into(), part, traffic },
        }))
    }
}

/// What a call enqueues: launches with all parameters filled in. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    plan: Arc<CudaPlan>,
    steps: Arc<[Step]>,
    /// What it is in a decoder layer.
    pub(crate) part: Option<Arc<Part>>,
    /// The memory it reads and writes.
    pub(crate) traffic: Arc<Traffic>,
}

impl Work {
    /// What it does.
    pub(crate) fn call(&self) -> &CallDesc {
        &self.plan.call
    }

    /// The kernels it launches.
    pub(crate) fn kernels(&self) -> &[KernelSpec] {
        &self.plan.recipe.kernels
    }

    /// What it launches.
    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    pub(crate) fn enqueue(&self, stream: &mut CudaStream) -> Result<()> {
        let enqueued = self.steps.iter().try_for_each(|step| step.enqueue(&self.plan.context, stream));
        enqueued.map_err(|error| error.in_op(self.plan.call.op.name()))
    }
}

/// A call that is bound.
#[derive(Debug)]
struct CudaCall {
    /// Keeps buffers and weights alive.
    _frame: Frame,
    work: Work,
}

impl BoundCall for CudaCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        let plan = &self.work.plan;
        let in_op = |error: dsrun_core::Error| error.in_op(plan.call.op.name());
        let stream = CudaStream::own(stream, &plan.context).map_err(in_op)?;
        if let Some(recorded) = &mut stream.recorded {
            recorded.push(self.work.clone());
            return Ok(());
        }
        plan.context.enter().map_err(in_op)?;
        self.work.enqueue(stream)
    }
}
