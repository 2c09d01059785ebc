//! Query, prepack, plan, bind and run.
//!
//! A kernel here is an op's own attribute struct: `impl Kernel for RmsNorm` says how the CPU runs it. Shapes come with the
//! bound tensors, so a plan has nothing else to remember.

use crate::{
    device::Core,
    memory::Reservation,
    ops::{self, Staging},
    packed::{self, PackedMatrix},
    parallel::Worker,
    stream::HostStream,
    view::{Frame, Views},
};
use dsrun_core::{
    Error, Result, WeightReader, WeightType,
    collective::host::HostComm,
    device::Stream,
    kernels::{
        Arguments, BoundCall, CallDesc, Kernels, OperandDesc, PackedLayout, PackedWeight, Plan, Support,
        WeightDesc,
    },
    op::Op,
};
use std::{any::Any, cell::RefCell, fmt::Debug, sync::Arc};

/// How the CPU runs an op.
pub(crate) trait Kernel: Debug + Send + Sync {
    /// Runs it once.
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()>;
}

/// How ranks exchange the data of a collective, in three steps: the device is locked in the first and the last only.
pub(crate) trait Exchange: Debug + Send + Sync {
    /// Copies out what the other ranks need.
    fn collect(&self, frame: &Frame<'_>, comm: &HostComm, staging: &mut Staging) -> Result<()>;

    /// Exchanges it.
    fn exchange(&self, comm: &HostComm, staging: &mut Staging) -> Result<()>;

    /// Copies in what came.
    fn deliver(&self, frame: &Frame<'_>, comm: &HostComm, staging: &Staging) -> Result<()>;
}

#[derive(Debug)]
enum Implementation {
    Kernel(Box<dyn Kernel>),
    Collective(Box<dyn Exchange>, Arc<HostComm>),
}

/// How the CPU runs a call, or an error that says why it does not.
fn implementation(call: &CallDesc) -> Result<Implementation> {
    let kernel: Box<dyn Kernel> = match &call.op {
        Op::Embed(op) => Box::new(*op),
        Op::RmsNorm(op) => Box::new(*op),
        Op::LayerNorm(op) => Box::new(*op),
        Op::Linear(op) => Box::new(*op),
        Op::Matmul(op) => Box::new(*op),
        Op::Activation(op) => Box::new(*op),
        Op::GatedActivation(op) => Box::new(*op),
        Op::Rope(op) => Box::new(*op),
        Op::KvWrite(op) => Box::new(*op),
        Op::PageCopy(op) => Box::new(*op),
        Op::PageGather(op) => Box::new(*op),
        Op::PageScatter(op) => Box::new(*op),
        Op::AttentionPrepare(op) => Box::new(*op),
        Op::PagedAttention(op) => Box::new(*op),
        Op::Attention(op) => Box::new(*op),
        Op::Add(op) => Box::new(*op),
        Op::Cast(op) => Box::new(*op),
        Op::Fill(op) => Box::new(*op),
        Op::Columns(op) => Box::new(*op),
        Op::GatherRows(op) => Box::new(*op),
        Op::PrepareStep(op) => Box::new(*op),
        Op::LogitProcess(op) => Box::new(*op),
        Op::Argmax(op) => Box::new(*op),
        Op::Sample(op) => Box::new(*op),
        Op::CommitTokens(op) => Box::new(*op),
        Op::QuantPerToken(op) => Box::new(*op),
        Op::LinearW8A8(op) => Box::new(*op),
        Op::Region(region) => ops::region::kernel(region)?,
        Op::AllReduce(op) => return collective(Box::new(*op), call),
        Op::AllGather(op) => return collective(Box::new(*op), call),
        Op::ReduceScatter(op) => return collective(Box::new(*op), call),
        Op::AllToAll(op) => return collective(Box::new(*op), call),
        Op::Broadcast(op) => return collective(Box::new(*op), call),
        Op::Send(op) => return collective(Box::new(*op), call),
        Op::Receive(op) => return collective(Box::new(*op), call),
        Op::Barrier(op) => return collective(Box::new(*op), call),
        other => {
            return Err(Error::unsupported(format!("the CPU backend has no kernel for {}", other.name())));
        }
    };
    for operand in call.operands.iter().flatten() {
        if let OperandDesc::Weight(weight) = operand {
            let weight = WeightDesc { weight_type: weight.clone(), uses: Vec::new(), immutable: false };
            packed::layout(&weight)?;
        }
    }
    Ok(Implementation::Kernel(kernel))
}

fn collective(exchange: Box<dyn Exchange>, call: &CallDesc) -> Result<Implementation> {
    let comm = call.comm.clone().ok_or_else(|| Error::invalid("is missing").at("comm"))?;
    let any: Arc<dyn Any + Send + Sync> = comm;
    let comm =
        any.downcast::<HostComm>().map_err(|_| Error::invalid("belongs to another backend").at("comm"))?;
    ops::collective::check(call)?;
    Ok(Implementation::Collective(exchange, comm))
}

/// What a handle of the CPU computes.
#[derive(Debug)]
pub(crate) struct HostKernels {
    core: Arc<Core>,
}

impl HostKernels {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }
}

impl Kernels for HostKernels {
    fn query(&self, call: &CallDesc) -> Result<Support> {
        match call.validate().and_then(|()| implementation(call)) {
            // No work list is wanted, no scratch memory, and nothing is held: that is what `native` says.
            Ok(_) => Ok(Support::native()),
            Err(error) => Ok(Support::no(error.to_string())),
        }
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        packed::layout(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        HostStream::check(stream, &self.core)?;
        let reservation = self.core.account.reserve(packed::layout(weight)?.bytes)?;
        let matrix = PackedMatrix::pack(weight, rows, &self.core.pool)?;
        Ok(Arc::new(HostWeight { matrix, _reservation: reservation }))
    }

    fn plan(&self, call: &CallDesc) -> Result<Arc<dyn Plan>> {
        call.validate()?;
        let implementation = implementation(call)?;
        Ok(Arc::new(HostPlan { core: self.core.clone(), call: call.clone(), implementation }))
    }
}

/// A packed weight, counted.
#[derive(Debug)]
pub(crate) struct HostWeight {
    matrix: PackedMatrix,
    _reservation: Reservation,
}

impl HostWeight {
    pub(crate) fn matrix(&self) -> &PackedMatrix {
        &self.matrix
    }
}

impl PackedWeight for HostWeight {
    fn weight_type(&self) -> &WeightType {
        self.matrix.weight_type()
    }

    fn bytes(&self) -> usize {
        self.matrix.bytes()
    }
}

#[derive(Debug)]
struct HostPlan {
    core: Arc<Core>,
    call: CallDesc,
    implementation: Implementation,
}

impl Plan for HostPlan {
    fn bind(self: Arc<Self>, arguments: &Arguments) -> Result<Box<dyn BoundCall>> {
        let views = Views::bind(&self.call, arguments, &self.core)?;
        Ok(Box::new(HostCall { plan: self, views, staging: RefCell::default() }))
    }
}

#[derive(Debug)]
struct HostCall {
    plan: Arc<HostPlan>,
    views: Views,
    /// Used by collectives only.
    staging: RefCell<Staging>,
}

impl HostCall {
    fn run(&self) -> Result<()> {
        let core = &*self.plan.core;
        match &self.plan.implementation {
            Implementation::Kernel(kernel) => {
                let mut scratch = core.lock();
                // SAFETY: the lock is held until the frame is gone, and this is the only frame made under it.
                let frame = unsafe { Frame::new(&self.views) };
                kernel.run(&frame, &mut Worker::new(&core.pool, &mut scratch))
            }
            Implementation::Collective(exchange, comm) => {
                let mut staging = self
                    .staging
                    .try_borrow_mut()
                    .map_err(|_| Error::internal("the call is running already"))?;
                {
                    let _turn = core.lock();
                    // SAFETY: as above.
                    let frame = unsafe { Frame::new(&self.views) };
                    exchange.collect(&frame, comm, &mut staging)?;
                }
                exchange.exchange(comm, &mut staging)?;
                let _turn = core.lock();
                // SAFETY: as above; the frame before is gone.
                let frame = unsafe { Frame::new(&self.views) };
                exchange.deliver(&frame, comm, &staging)
            }
        }
    }
}

impl BoundCall for HostCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        HostStream::check(stream, &self.plan.core)
            .and_then(|()| self.run())
            .map_err(|error| error.in_op(self.plan.call.op.name()))
    }
}
