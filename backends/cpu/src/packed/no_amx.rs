//! The place of tiles on processors that have none.

use super::{
    integers::{Group, Product},
    panel::Integers,
};
use crate::lanes::InstructionSet;
use std::ops::Range;

pub(super) const ROWS_OF_TILE: usize = 16;
pub(super) const WORDS_OF_TILE: usize = 16;

/// That tiles can multiply blocks, which they never can.
pub(super) enum Tiled {}

impl Tiled {
    pub(super) fn new<B: Integers>(_: InstructionSet, _: usize) -> Option<Self> {
        None
    }

    pub(super) fn multiply<B: Integers>(&self, _: &Product<'_, B>, _: Range<usize>, _: &[Group]) {
        match *self {}
    }
}
