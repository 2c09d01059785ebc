//! The operands and results of a bound call: their addresses, and references that keep them alive.

use crate::{
    driver::{context::Context, launch::Parameters, memory::CudaBuffer},
    ops::{bound::Bound, params::ExtentParams, weight::CudaWeight},
};
use dsrun_core::{
    Error, Result, TensorDesc,
    device::Buffer,
    kernels::{Argument, Arguments, Binding, CallDesc},
};
use std::{any::Any, sync::Arc};

#[derive(Clone, Debug)]
enum Operand {
    Tensor(Bound),
    Weight(Arc<CudaWeight>),
}

/// An operand of a call in the body of a region.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    /// The operand of the region with this number.
    Operand(usize),
    /// A tensor in scratch memory.
    Scratch(&'a Bound),
}

/// The operands and results of a bound call.
#[derive(Debug)]
pub(crate) struct Frame {
    operands: Vec<Option<Operand>>,
    pub(crate) results: Vec<Bound>,
    pub(crate) workspace: u64,
    /// Zeroed memory of this bound call alone.
    pub(crate) persistent: u64,
    keep: Vec<Arc<CudaBuffer>>,
}

impl Frame {
    pub(crate) fn bind(
        call: &CallDesc,
        arguments: &Arguments,
        context: &Arc<Context>,
        persistent: Option<Arc<CudaBuffer>>,
    ) -> Result<Self> {
        let mut keep = Vec::new();
        let mut tensor = |desc: &TensorDesc, binding: &Binding| -> Result<Bound> {
            let (buffer, address) = CudaBuffer::locate(&binding.slice, context)?;
            keep.push(buffer);
            let mut extent = 0;
            if let Some(slice) = &binding.extent {
                let (buffer, address) = CudaBuffer::locate(slice, context)?;
                keep.push(buffer);
                extent = address;
            }
            Ok(Bound { desc: desc.clone(), address, extent })
        };
        let mut operands = Vec::new();
        for (index, argument) in arguments.operands.iter().enumerate() {
            let bound = match argument {
                None => None,
                Some(Argument::Tensor(binding)) => {
                    let missing = || Error::invalid("was planned without a tensor");
                    let desc = call.tensor(index).ok_or_else(missing);
                    let bound = desc.and_then(|desc| tensor(desc, binding));
                    Some(Operand::Tensor(bound.map_err(|error| error.at(&call.operand_name(index)))?))
                }
                Some(Argument::Weight(weight)) => {
                    let any: Arc<dyn Any + Send + Sync> = weight.clone();
                    let own = any.downcast::<CudaWeight>().map_err(|_| {
                        Error::invalid("belongs to another backend").at(&call.operand_name(index))
                    })?;
                    Some(Operand::Weight(own))
                }
            };
            operands.push(bound);
        }
        let mut results = Vec::new();
        for (index, (desc, binding)) in call.results.iter().zip(&arguments.results).enumerate() {
            results.push(tensor(desc, binding).map_err(|error| error.at(&call.result_name(index)))?);
        }
        let mut workspace = 0;
        if let Some(slice) = &arguments.workspace {
            let (buffer, address) =
                CudaBuffer::locate(slice, context).map_err(|error| error.at("workspace"))?;
            keep.push(buffer);
            workspace = address;
        }
        let own = persistent.as_ref().map_or(0, |buffer| buffer.pointer);
        keep.extend(persistent);
        keep.retain(|buffer| buffer.bytes() > 0);
        Ok(Self { operands, results, workspace, persistent: own, keep })
    }

    /// The frame of a call in the body of this region. It borrows from this frame: it keeps nothing alive and has no memory
    /// unless the caller gives it some of this one's.
    pub(crate) fn within(&self, operands: &[Option<Source<'_>>], results: Vec<Bound>) -> Self {
        let operand = |source: &Option<Source<'_>>| match (*source)? {
            Source::Operand(index) => self.operands.get(index)?.clone(),
            Source::Scratch(bound) => Some(Operand::Tensor(bound.clone())),
        };
        let operands = operands.iter().map(operand).collect();
        Self { operands, results, workspace: 0, persistent: 0, keep: Vec::new() }
    }

    /// The tensor operand at `index`, if it is present.
    pub(crate) fn optional(&self, index: usize) -> Option<&Bound> {
        match self.operands.get(index)?.as_ref()? {
            Operand::Tensor(bound) => Some(bound),
            Operand::Weight(_) => None,
        }
    }

    /// The address of the tensor operand at `index`, or 0.
    pub(crate) fn address(&self, index: usize) -> u64 {
        self.optional(index).map_or(0, |bound| bound.address)
    }

    /// The tensor operand at `index`.
    pub(crate) fn tensor(&self, index: usize) -> Result<&Bound> {
        self.optional(index).ok_or_else(|| Error::internal(format!("operand {index} is not a tensor")))
    }

    /// The weight at `index`, if it is present.
    pub(crate) fn optional_weight(&self, index: usize) -> Option<&Arc<CudaWeight>> {
        match self.operands.get(index)?.as_ref()? {
            Operand::Weight(weight) => Some(weight),
            Operand::Tensor(_) => None,
        }
    }

    /// The weight at `index`.
    pub(crate) fn weight(&self, index: usize) -> Result<&Arc<CudaWeight>> {
        self.optional_weight(index).ok_or_else(|| Error::internal(format!("operand {index} is not a weight")))
    }

    /// The result at `index`.
    pub(crate) fn result(&self, index: usize) -> Result<&Bound> {
        self.results.get(index).ok_or_else(|| Error::internal(format!("there is no result {index}")))
    }

    /// The number of buffers that the frame keeps alive.
    pub(crate) fn kept(&self) -> usize {
        self.keep.len()
    }
}

impl Parameters {
    /// Appends a tensor as two parameters: address and row stride.
    #[must_use]
    pub(crate) fn rows(self, tensor: &Bound) -> Self {
        let stride = tensor.stride(0);
        self.address(tensor.address).size(stride)
    }

    /// Appends the extent of these tensors, each of which has at most `rows` rows.
    #[must_use]
    pub(crate) fn extent(self, rows: usize, tensors: &[&Bound]) -> Self {
        self.structure(&ExtentParams::of(rows, tensors))
    }
}
