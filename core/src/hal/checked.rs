//! Validation: the checks in front of every backend, and the types that prove they have passed.
//!
//! | type | proves |
//! |---|---|
//! | [`ValidCall`] | a call's description is valid; only [`CallDesc::validate`] makes one |
//! | [`ValidArguments`] | arguments fit a valid call; only [`CheckedPlan::bind`] makes one |
//!
//! [`Kernels`](crate::kernels::Kernels) and [`Plan`] take these types, so no caller can skip validation and no backend needs to
//! repeat it.

mod arguments;

use crate::{
    Error, Result,
    device::Device,
    kernels::{Arguments, BoundCall, CallDesc, OperandDesc, Plan},
    op::{AllGather, AllToAll, Op, Receive, ReduceScatter, Send as SendOp},
};
pub use arguments::{BindLimits, ValidArguments, ValidOperand};
use std::{ops::Deref, sync::Arc};

/// A call description that [`CallDesc::validate`] has accepted. Clones share it.
#[derive(Clone, Debug)]
pub struct ValidCall(Arc<CallDesc>);

impl Deref for ValidCall {
    type Target = CallDesc;

    fn deref(&self) -> &CallDesc {
        &self.0
    }
}

impl CallDesc {
    /// Checks the whole description: the operands against the op's signature and shapes, each
    /// tensor's strides and size, the results against inference, and the ranks of a collective.
    ///
    /// # Errors
    /// Names op, argument and field.
    pub fn validate(self) -> Result<ValidCall> {
        match self.check() {
            Ok(()) => Ok(ValidCall(Arc::new(self))),
            Err(error) => Err(error.in_op(self.op.name())),
        }
    }

    fn check(&self) -> Result<()> {
        for (index, operand) in self.operands.iter().enumerate() {
            match operand {
                Some(OperandDesc::Tensor(tensor)) => tensor.validate(),
                Some(OperandDesc::Weight(weight)) => weight.bytes().map(|_| ()),
                None => Ok(()),
            }
            .map_err(|error| error.at(&self.operand_name(index)))?;
        }
        let inferred = self.op.infer(&self.operand_types())?;
        if inferred.len() != self.results.len() {
            let message = format!("has {} results, needs {}", self.results.len(), inferred.len());
            return Err(Error::invalid(message).field("results"));
        }
        for (index, (result, inferred)) in self.results.iter().zip(&inferred).enumerate() {
            let name = self.result_name(index);
            result.validate().map_err(|error| error.at(&name))?;
            let found = result.tensor_type();
            if found != *inferred {
                let field = if found.dtype == inferred.dtype { "shape" } else { "dtype" };
                return Err(Error::invalid(format!("is {found}, must be {inferred}")).at(&name).field(field));
            }
            let updated = self.op.updates(index).and_then(|operand| self.tensor(operand));
            if updated.is_some_and(|updated| updated != result) {
                let message = "must be described as the operand it updates";
                return Err(Error::invalid(message).at(&name).field("strides"));
            }
        }
        match (self.op.mesh_axis(), &self.comm) {
            (Some(axis), None) => {
                Err(Error::invalid(format!("is missing: the op needs the ranks of axis {}", axis.name()))
                    .at("comm"))
            }
            (None, Some(_)) => Err(Error::invalid("must be absent: the op is not a collective").at("comm")),
            (Some(_), Some(comm)) => match &self.op {
                Op::Region(region) => {
                    let ops = region.calls().iter().map(|call| &call.op);
                    ops.into_iter().try_for_each(|op| check_ranks(op, comm.rank(), comm.ranks()))
                }
                op => check_ranks(op, comm.rank(), comm.ranks()),
            },
            (None, None) => Ok(()),
        }
    }
}

/// Checks the attributes of a collective against its group, because buffer sizes follow from them.
fn check_ranks(op: &Op, rank: usize, ranks: usize) -> Result<()> {
    let (attribute, value, fits) = match op {
        Op::AllGather(AllGather { ranks: value, .. })
        | Op::ReduceScatter(ReduceScatter { ranks: value, .. })
        | Op::AllToAll(AllToAll { ranks: value, .. }) => ("ranks", *value, *value as usize == ranks),
        Op::Broadcast(op) => ("root", op.root, (op.root as usize) < ranks),
        Op::Send(SendOp { peer, .. }) | Op::Receive(Receive { peer, .. }) => {
            ("peer", *peer, (*peer as usize) < ranks && *peer as usize != rank)
        }
        _ => return Ok(()),
    };
    if fits {
        return Ok(());
    }
    Err(Error::invalid(format!("is {value}, which does not fit rank {rank} of {ranks}")).at(attribute))
}

/// A plan for a valid call. It validates arguments when it binds them.
#[derive(Clone, Debug)]
pub struct CheckedPlan {
    call: ValidCall,
    plan: Arc<dyn Plan>,
    alignment: usize,
}

impl CheckedPlan {
    /// Plans a call.
    ///
    /// # Errors
    /// As [`crate::kernels::Kernels::plan`]; a call the device does not run is [`crate::Code::Unsupported`] with the device's
    /// reason.
    pub fn new(device: &dyn Device, call: ValidCall) -> Result<Self> {
        let in_op = |error: Error| error.in_op(call.op.name());
        let support = device.kernels().query(&call).map_err(in_op)?;
        if !support.native {
            return Err(in_op(Error::unsupported(support.reason)));
        }
        let plan = device.kernels().plan(&call).map_err(in_op)?;
        Ok(Self { alignment: device.properties().alignment, plan, call })
    }

    /// The call that was planned.
    pub fn call(&self) -> &ValidCall {
        &self.call
    }

    /// Bytes of scratch memory that a bound call needs.
    pub fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }

    /// Checks the arguments and binds them.
    ///
    /// # Errors
    /// As [`ValidCall::check_arguments`] and [`Plan::bind`].
    pub fn bind(&self, arguments: &Arguments) -> Result<Box<dyn BoundCall>> {
        let limits = BindLimits { alignment: self.alignment, workspace_bytes: self.plan.workspace_bytes() };
        let valid = ValidArguments::new(&self.call, arguments, limits)?;
        self.plan.clone().bind(valid).map_err(|error| error.in_op(self.call.op.name()))
    }
}
