//! Reads the body of a region call by call.

use dsrun_core::{
    op::Op,
    program::{Call, ValueId},
    region::Region,
};

/// An iterator over the calls of a body.
#[derive(Clone, Copy)]
pub(super) struct BodyReader<'a> {
    calls: &'a [Call],
}

impl<'a> BodyReader<'a> {
    /// A reader at the first call.
    pub(super) fn new(region: &'a Region) -> Self {
        Self { calls: region.calls() }
    }

    /// The next call, without taking it.
    pub(super) fn peek(&self) -> Option<&'a Call> {
        self.calls.first()
    }

    /// Whether all calls are taken.
    pub(super) fn is_done(&self) -> bool {
        self.calls.is_empty()
    }

    /// Takes the next call if `wanted` returns a value for its op.
    pub(super) fn take<T>(&mut self, wanted: impl Fn(&'a Op) -> Option<T>) -> Option<(T, &'a Call)> {
        let (call, rest) = self.calls.split_first()?;
        let op = wanted(&call.op)?;
        self.calls = rest;
        Some((op, call))
    }
}

/// The value id of operand `index` of a call; `None` if it is absent.
pub(super) fn value(call: &Call, index: usize) -> Option<usize> {
    call.operands.get(index).copied().flatten().map(ValueId::index)
}

/// The value id of result `index` of a call.
pub(super) fn made(call: &Call, index: usize) -> Option<usize> {
    call.results.get(index).copied().map(ValueId::index)
}
