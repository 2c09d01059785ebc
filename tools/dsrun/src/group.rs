//! Ranks on open devices, each on a thread of its own, to measure and check what they exchange.

use anyhow::{Context, Result, bail};
use dsrun_core::{
    TensorDesc,
    checked::CheckedPlan,
    collective::Comm,
    device::{BufferSlice, Device, MemoryKind, Stream},
    kernels::{Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc},
    op::Op,
};
use std::{sync::Arc, thread, time::Duration};

/// The time limit for joining, and for each wait.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A rank of a group, with a stream and a tensor.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) comm: Arc<dyn Comm>,
    pub(crate) stream: Box<dyn Stream>,
    pub(crate) tensor: TensorDesc,
    /// The memory of the tensor.
    pub(crate) memory: BufferSlice,
}

/// A tensor and its memory.
pub(crate) struct Place {
    pub(crate) tensor: TensorDesc,
    pub(crate) memory: BufferSlice,
}

impl Rank {
    /// Binds a collective to the tensor, which it reads, or also updates.
    pub(crate) fn bind(&self, op: impl Into<Op>, updates: bool) -> Result<Box<dyn BoundCall>> {
        let own = Place { tensor: self.tensor.clone(), memory: self.memory.clone() };
        self.bind_to(op, &own, updates.then_some(&own), Some(self.comm.clone()))
    }

    /// Binds an op of one operand; a collective if there is a group.
    pub(crate) fn bind_to(
        &self,
        op: impl Into<Op>,
        operand: &Place,
        result: Option<&Place>,
        comm: Option<Arc<dyn Comm>>,
    ) -> Result<Box<dyn BoundCall>> {
        let operands = vec![Some(OperandDesc::Tensor(operand.tensor.clone()))];
        let results = result.iter().map(|result| result.tensor.clone()).collect();
        let call = CallDesc { op: op.into(), operands, results, comm };
        let plan = CheckedPlan::new(&*self.device, call.validate()?)?;
        let workspace = match plan.workspace_bytes() {
            0 => None,
            bytes => Some(BufferSlice::whole(self.device.allocate(bytes, MemoryKind::Device)?)),
        };
        let results = result.iter().map(|result| Binding::new(result.memory.clone())).collect();
        let operands = vec![Some(Argument::Tensor(Binding::new(operand.memory.clone())))];
        Ok(plan.bind(&Arguments { operands, results, workspace })?)
    }

    /// Waits until the stream has done all that was enqueued.
    pub(crate) fn wait(&mut self, what: &str) -> Result<()> {
        Ok(self.stream.synchronize(what, LIMIT)?)
    }
}

/// Runs each rank of a group of devices, with a tensor, on a thread of its own.
pub(crate) fn on_ranks<T: Send>(
    devices: &[Arc<dyn Device>],
    tensor: &TensorDesc,
    run: impl Fn(&mut Rank) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let collective = |device: usize| {
        let none = || format!("{} has no collectives", devices[device].properties().name);
        devices[device].collective().with_context(none)
    };
    let id = collective(0)?.group_id(None)?;
    let run = &run;
    let rank = |rank: usize| -> Result<T> {
        let device = devices[rank].clone();
        let comm = collective(rank)?.join(&id, rank, devices.len(), LIMIT)?;
        let memory = device.allocate(tensor.bytes()?, MemoryKind::Device)?;
        let (stream, memory, tensor) = (device.stream()?, BufferSlice::whole(memory), tensor.clone());
        let done = run(&mut Rank { rank, device, comm: comm.clone(), stream, tensor, memory });
        done.inspect_err(|error| comm.abort(&format!("{error:#}")))
    };
    let results: Vec<Result<T>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..devices.len()).map(|index| scope.spawn(move || rank(index))).collect();
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        joined.map(|result| result.unwrap_or_else(|_| bail!("a rank panicked"))).collect()
    });
    results.into_iter().collect()
}
