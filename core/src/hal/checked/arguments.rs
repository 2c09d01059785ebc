//! Validation of the arguments that a call is bound to.

use super::ValidCall;
use crate::{
    Error, Result,
    device::BufferSlice,
    kernels::{Argument, Arguments, Binding, OperandDesc, PackedWeight},
    tensor::TensorDesc,
};
use std::sync::Arc;

/// Arguments that fit a valid call, each beside its description. Only [`super::CheckedPlan::bind`] makes them.
#[derive(Clone, Copy, Debug)]
pub struct ValidArguments<'a> {
    call: &'a ValidCall,
    arguments: &'a Arguments,
}

/// An operand of a call with the argument it is bound to.
#[derive(Clone, Copy, Debug)]
pub enum ValidOperand<'a> {
    /// A tensor and its storage.
    Tensor(&'a TensorDesc, &'a Binding),
    /// A packed weight.
    Weight(&'a Arc<dyn PackedWeight>),
}

/// What a device and a plan require of arguments.
#[derive(Clone, Copy, Debug)]
pub struct BindLimits {
    /// Offsets must be multiples of this: [`crate::device::DeviceProperties::alignment`].
    pub alignment: usize,
    /// Bytes of scratch memory that the call needs: [`crate::kernels::Plan::workspace_bytes`].
    pub workspace_bytes: usize,
}

impl<'a> ValidArguments<'a> {
    pub(super) fn new(call: &'a ValidCall, arguments: &'a Arguments, limits: BindLimits) -> Result<Self> {
        call.check_arguments(arguments, limits)?;
        Ok(Self { call, arguments })
    }

    /// The call that the arguments fit.
    pub fn call(self) -> &'a ValidCall {
        self.call
    }

    /// The arguments without their descriptions.
    pub fn arguments(self) -> &'a Arguments {
        self.arguments
    }

    /// The operands in the order of the signature; `None` for those left out.
    pub fn operands(self) -> impl ExactSizeIterator<Item = Option<ValidOperand<'a>>> {
        let pairs = self.call.0.operands.iter().zip(&self.arguments.operands);
        pairs.map(|pair| match pair {
            (Some(OperandDesc::Tensor(desc)), Some(Argument::Tensor(binding))) => {
                Some(ValidOperand::Tensor(desc, binding))
            }
            (Some(OperandDesc::Weight(_)), Some(Argument::Weight(weight))) => {
                Some(ValidOperand::Weight(weight))
            }
            // `check_arguments` leaves only operands that both sides leave out.
            _ => None,
        })
    }

    /// The results in the order of the signature.
    pub fn results(self) -> impl ExactSizeIterator<Item = (&'a TensorDesc, &'a Binding)> {
        self.call.0.results.iter().zip(&self.arguments.results)
    }
}

impl ValidCall {
    /// Checks all arguments of this call.
    ///
    /// # Errors
    /// Names op, argument and field: storage too short or misaligned, an extent where none is allowed, a weight of another
    /// type, results that overlap each other or an operand they do not update.
    pub fn check_arguments(&self, arguments: &Arguments, limits: BindLimits) -> Result<()> {
        let checks = Checks { call: self, arguments, alignment: limits.alignment };
        checks.run(limits.workspace_bytes).map_err(|error| error.in_op(self.op.name()))
    }
}

/// The arguments of one call under check.
struct Checks<'a> {
    call: &'a ValidCall,
    arguments: &'a Arguments,
    alignment: usize,
}

impl Checks<'_> {
    fn run(&self, workspace_bytes: usize) -> Result<()> {
        let Self { call, arguments, .. } = *self;
        let (operands, results) = (arguments.operands.len(), arguments.results.len());
        if (operands, results) != (call.operands.len(), call.results.len()) {
            let (described, made) = (call.operands.len(), call.results.len());
            let message = format!(
                "{operands} operands and {results} results are bound, but the call has {described} and {made}"
            );
            return Err(Error::invalid(message).field("operands"));
        }
        for (index, (desc, argument)) in call.operands.iter().zip(&arguments.operands).enumerate() {
            self.check_operand(desc.as_ref(), argument.as_ref())
                .map_err(|error| error.at(&call.operand_name(index)))?;
        }
        for (index, (desc, binding)) in call.results.iter().zip(&arguments.results).enumerate() {
            self.check_binding(desc, binding).map_err(|error| error.at(&call.result_name(index)))?;
        }
        let given = arguments.workspace.as_ref().map_or(0, |workspace| workspace.bytes);
        if given < workspace_bytes {
            let message = format!("is {given} bytes, needs {workspace_bytes}");
            return Err(Error::invalid(message).at("workspace").field("bytes"));
        }
        if let Some(workspace) = &arguments.workspace {
            self.check_slice(workspace).map_err(|error| error.at("workspace"))?;
        }
        for index in 0..arguments.results.len() {
            self.check_aliases(index).map_err(|error| error.at(&call.result_name(index)))?;
        }
        if let Some(workspace) = &arguments.workspace {
            self.check_not_read(workspace, None).map_err(|error| error.at("workspace"))?;
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
                let message = format!(
                    "is {} bytes at byte {}, must be four at a multiple of four",
                    extent.bytes, extent.offset
                );
                Err(Error::invalid(message).field("extent"))
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

    /// Checks that a result shares storage only with the operand it updates, and with all of it.
    fn check_aliases(&self, index: usize) -> Result<()> {
        let result = &self.arguments.results[index].slice;
        let updates = self.call.op.updates(index);
        if let Some(Some(Argument::Tensor(updated))) =
            updates.and_then(|operand| self.arguments.operands.get(operand))
            && !result.same(&updated.slice)
        {
            return Err(Error::invalid("must be bound to the operand it updates").field("slice"));
        }
        self.check_not_read(result, updates)?;
        let others = self.arguments.results[..index].iter().chain(&self.arguments.results[index + 1..]);
        let workspace = self.arguments.workspace.iter();
        if others.map(|other| &other.slice).chain(workspace).any(|other| result.overlaps(other)) {
            return Err(Error::invalid("shares storage with another result or the workspace").field("slice"));
        }
        Ok(())
    }

    /// Checks that memory the call writes holds no extent and no operand, except `updates`, the operand that the result
    /// replaces.
    fn check_not_read(&self, written: &BufferSlice, updates: Option<usize>) -> Result<()> {
        let shares = |name: String| Err(Error::invalid(format!("shares storage with {name}")).field("slice"));
        let reads_extent =
            |binding: &Binding| binding.extent.as_ref().is_some_and(|extent| written.overlaps(extent));
        for (operand, argument) in self.arguments.operands.iter().enumerate() {
            let Some(Argument::Tensor(binding)) = argument else { continue };
            if updates != Some(operand) && written.overlaps(&binding.slice) {
                return shares(self.call.operand_name(operand));
            }
            if reads_extent(binding) {
                return shares(format!("the extent of {}", self.call.operand_name(operand)));
            }
        }
        match self.arguments.results.iter().position(reads_extent) {
            Some(result) => shares(format!("the extent of {}", self.call.result_name(result))),
            None => Ok(()),
        }
    }
}

/// Checks that a slice lies inside its buffer: its fields are public, so [`BufferSlice::new`] may not have seen it.
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
