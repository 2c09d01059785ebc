//! The checks in front of every backend, made once per plan and once per binding.

use crate::{
    Error, Result,
    device::{BufferSlice, Device},
    kernels::{Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc, Plan},
    tensor::TensorDesc,
};
use std::sync::Arc;

/// A plan whose description was checked, and which checks what it is bound to.
#[derive(Clone, Debug)]
pub struct CheckedPlan {
    call: Arc<CallDesc>,
    plan: Arc<dyn Plan>,
    alignment: usize,
}

impl CheckedPlan {
    /// Checks a description and plans it.
    ///
    /// # Errors
    /// As [`CallDesc::validate`] and [`crate::kernels::Kernels::plan`]; a call the device does not run is
    /// [`crate::Code::Unsupported`] with the device's reason.
    pub fn new(device: &dyn Device, call: CallDesc) -> Result<Self> {
        call.validate()?;
        let in_op = |error: Error| error.in_op(call.op.name());
        let support = device.kernels().query(&call).map_err(in_op)?;
        if !support.native {
            return Err(in_op(Error::unsupported(support.reason)));
        }
        let plan = device.kernels().plan(&call).map_err(in_op)?;
        Ok(Self { alignment: device.properties().alignment, plan, call: Arc::new(call) })
    }

    /// Checks arguments as [`Self::bind`] does, for a backend that asks about them.
    pub fn check_arguments(
        call: CallDesc,
        plan: Arc<dyn Plan>,
        alignment: usize,
        arguments: &Arguments,
    ) -> Result<()> {
        let checked = Self { call: Arc::new(call), plan, alignment };
        checked.check(arguments).map_err(|error| error.in_op(checked.call.op.name()))
    }

    /// What was planned.
    pub fn call(&self) -> &CallDesc {
        &self.call
    }

    /// Scratch memory a bound call needs.
    pub fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }

    /// Checks the arguments and binds them.
    ///
    /// # Errors
    /// Names op, argument and field: storage too short or misaligned, an extent where none is allowed, a weight of another
    /// type, results that overlap each other or an operand they do not update.
    pub fn bind(&self, arguments: &Arguments) -> Result<Box<dyn BoundCall>> {
        let bound = self.check(arguments).and_then(|()| self.plan.clone().bind(arguments));
        bound.map_err(|error| error.in_op(self.call.op.name()))
    }

    fn check(&self, arguments: &Arguments) -> Result<()> {
        let call = &*self.call;
        if arguments.operands.len() != call.operands.len() || arguments.results.len() != call.results.len() {
            let (operands, results) = (arguments.operands.len(), arguments.results.len());
            let message = format!("{operands} operands and {results} results bound, not as described");
            return Err(Error::invalid(message).field("operands"));
        }
        for (index, (desc, argument)) in call.operands.iter().zip(&arguments.operands).enumerate() {
            self.check_operand(desc.as_ref(), argument.as_ref())
                .map_err(|error| error.at(&call.operand_name(index)))?;
        }
        for (index, (desc, binding)) in call.results.iter().zip(&arguments.results).enumerate() {
            self.check_binding(desc, binding).map_err(|error| error.at(&call.result_name(index)))?;
        }
        let needed = self.plan.workspace_bytes();
        let given = arguments.workspace.as_ref().map_or(0, |workspace| workspace.bytes);
        if given < needed {
            return Err(Error::invalid(format!("is {given} bytes, needs {needed}"))
                .at("workspace")
                .field("bytes"));
        }
        if let Some(workspace) = &arguments.workspace {
            self.check_slice(workspace).map_err(|error| error.at("workspace"))?;
        }
        for index in 0..arguments.results.len() {
            self.check_aliases(index, arguments).map_err(|error| error.at(&call.result_name(index)))?;
        }
        if let Some(workspace) = &arguments.workspace {
            self.check_not_read(workspace, None, arguments).map_err(|error| error.at("workspace"))?;
        }
        Ok(())
    }

    fn check_operand(&self, desc: Option<&OperandDesc>, argument: Option<&Argument>) -> Result<()> {
        match (desc, argument) {
            (None, None) => Ok(()),
            (Some(OperandDesc::Tensor(desc)), Some(Argument::Tensor(binding))) => {
                self.check_binding(desc, binding)
            }
            (Some(OperandDesc::Weight(desc)), Some(Argument::Weight(weight))) => {
                if weight.weight_type() == desc {
                    return Ok(());
                }
                let message = format!("is {}, was planned as {desc}", weight.weight_type());
                Err(Error::invalid(message).field("weight_type"))
            }
            (None, Some(_)) => Err(Error::invalid("is bound, but was planned without")),
            (Some(_), None) => Err(Error::invalid("is missing")),
            (Some(OperandDesc::Tensor(_)), Some(_)) => {
                Err(Error::invalid("is a packed weight, must be a tensor"))
            }
            (Some(OperandDesc::Weight(_)), Some(_)) => {
                Err(Error::invalid("is a tensor, must be a packed weight"))
            }
        }
    }

    fn check_binding(&self, desc: &TensorDesc, binding: &Binding) -> Result<()> {
        let needed = desc.bytes()?;
        if binding.slice.bytes < needed {
            return Err(
                Error::invalid(format!("is {} bytes, needs {needed}", binding.slice.bytes)).field("bytes")
            );
        }
        self.check_slice(&binding.slice)?;
        match &binding.extent {
            Some(_) if !desc.bounded => Err(Error::invalid("was not planned as bounded").field("extent")),
            Some(extent) if extent.bytes < 4 || !extent.offset.is_multiple_of(4) => {
                Err(Error::invalid("must be four bytes at a multiple of four").field("extent"))
            }
            Some(extent) => check_inside(extent).map_err(|error| error.field("extent")),
            None => Ok(()),
        }
    }

    fn check_slice(&self, slice: &BufferSlice) -> Result<()> {
        check_inside(slice).map_err(|error| error.field("offset"))?;
        if slice.offset.is_multiple_of(self.alignment.max(1)) {
            return Ok(());
        }
        let message = format!("is at byte {}, must be a multiple of {}", slice.offset, self.alignment);
        Err(Error::invalid(message).field("offset"))
    }

    /// A result may share storage only with the operand it updates, and then exactly.
    fn check_aliases(&self, index: usize, arguments: &Arguments) -> Result<()> {
        let result = &arguments.results[index].slice;
        let updates = self.call.op.updates(index);
        if let Some(Some(Argument::Tensor(updated))) =
            updates.and_then(|operand| arguments.operands.get(operand))
            && !result.same(&updated.slice)
        {
            return Err(Error::invalid("must be bound to the operand it updates").field("slice"));
        }
        self.check_not_read(result, updates, arguments)?;
        let others = arguments.results[..index].iter().chain(&arguments.results[index + 1..]);
        let workspace = arguments.workspace.iter();
        if others.map(|other| &other.slice).chain(workspace).any(|other| result.overlaps(other)) {
            return Err(Error::invalid("shares storage with another result or the workspace").field("slice"));
        }
        Ok(())
    }

    /// What a call writes must not be what it reads: an operand (but for `updates`, the one a result takes over) or an
    /// extent.
    fn check_not_read(
        &self,
        written: &BufferSlice,
        updates: Option<usize>,
        arguments: &Arguments,
    ) -> Result<()> {
        let shares = |name: String| Err(Error::invalid(format!("shares storage with {name}")).field("slice"));
        let reads_extent =
            |binding: &Binding| binding.extent.as_ref().is_some_and(|extent| written.overlaps(extent));
        for (operand, argument) in arguments.operands.iter().enumerate() {
            let Some(Argument::Tensor(binding)) = argument else { continue };
            if updates != Some(operand) && written.overlaps(&binding.slice) {
                return shares(self.call.operand_name(operand));
            }
            if reads_extent(binding) {
                return shares(format!("the extent of {}", self.call.operand_name(operand)));
            }
        }
        match arguments.results.iter().position(reads_extent) {
            Some(result) => shares(format!("the extent of {}", self.call.result_name(result))),
            None => Ok(()),
        }
    }
}

/// The fields of a slice are public, so it need not have been made by [`BufferSlice::new`].
fn check_inside(slice: &BufferSlice) -> Result<()> {
    let whole = slice.buffer.bytes();
    if slice.offset.checked_add(slice.bytes).is_some_and(|end| end <= whole) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{} bytes at {} are not inside a buffer of {whole}",
        slice.bytes, slice.offset
    )))
}
