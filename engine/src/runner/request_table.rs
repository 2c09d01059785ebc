//! The host's copy of the request table, updated when a request gets a row or pages.
//!
//! The host knows every column of the table except the last token and the token counts, which the device updates. It keeps a copy
//! of the columns it knows, in the device's layout, and uploads the changes before a step, merging uploads where that is cheaper.

use super::executor::Executor;
use crate::{
    error::Result,
    plan::{FixedSizes, StepState},
    sampling::SamplingOptions,
};
use dsrun_core::{
    device::{BufferSlice, Device, MemoryKind},
    op::SAMPLING_COLUMNS,
};
use std::ops::Range;

/// Bytes of an element: all columns are of 32 bits.
const ELEMENT: usize = 4;

/// Up to this many unchanged bytes are uploaded to merge two uploads into one: they take about as long as the overhead of an
/// upload.
const UPLOAD_BYTES: usize = 64 << 10;

/// The columns that the host keeps.
#[derive(Clone, Copy, Debug)]
enum Column {
    Length,
    Parameters,
    Seeds,
    BlockTable,
}

impl Column {
    const ALL: [Self; 4] = [Self::Length, Self::Parameters, Self::Seeds, Self::BlockTable];

    /// The state of the program that holds the column.
    fn state(self) -> StepState {
        match self {
            Self::Length => StepState::Length,
            Self::Parameters => StepState::Parameters,
            Self::Seeds => StepState::Seeds,
            Self::BlockTable => StepState::BlockTable,
        }
    }

    /// Elements of a row.
    fn width(self, fixed: FixedSizes) -> usize {
        match self {
            Self::Length => 1,
            Self::Parameters => SAMPLING_COLUMNS,
            Self::Seeds => 2,
            Self::BlockTable => fixed.blocks,
        }
    }
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableRow<'a> {
    /// Tokens of the request in the KV cache.
    pub(crate) length: usize,
    /// Pages of the request.
    pub(crate) pages: &'a [i32],
    /// How tokens are chosen.
    pub(crate) sampling: &'a SamplingOptions,
}

/// The host's copy of the table.
#[derive(Debug)]
pub(crate) struct RequestTable {
    memory: BufferSlice,
    copy: Vec<u32>,
    /// The first element of each column, and the elements of a row of it.
    columns: [(usize, usize); Column::ALL.len()],
    /// Elements that are changed and not yet uploaded.
    changed: Vec<Range<usize>>,
}

impl RequestTable {
    /// Allocates the columns on the device, side by side.
    ///
    /// # Errors
    /// If there is too little memory.
    pub(crate) fn new(device: &dyn Device, fixed: FixedSizes) -> Result<Self> {
        let alignment = device.properties().alignment.max(ELEMENT);
        let mut end = 0;
        let columns = Column::ALL.map(|column| {
            let (start, width) = (end, column.width(fixed));
            end = (start + fixed.requests * width * ELEMENT).next_multiple_of(alignment);
            (start / ELEMENT, width)
        });
        let memory = BufferSlice::whole(device.allocate(end.max(1), MemoryKind::Device)?);
        Ok(Self { memory, copy: vec![0; end / ELEMENT], columns, changed: Vec::new() })
    }

    /// The memory of a state of the program, if it is one of the columns.
    ///
    /// # Errors
    /// If the state is larger than the column.
    pub(crate) fn state(&self, name: &str, bytes: usize) -> Result<Option<BufferSlice>> {
        let state = StepState::from_name(name);
        let column = Column::ALL.into_iter().find(|column| Some(column.state()) == state);
        let Some(column) = column else { return Ok(None) };
        Ok(Some(self.memory.slice(self.columns[column as usize].0 * ELEMENT, bytes)?))
    }

    /// The memory of the table on the device.
    pub(super) fn memory(&self) -> &BufferSlice {
        &self.memory
    }

    /// The elements of a row in a column.
    fn range(&self, column: Column, slot: usize) -> Range<usize> {
        let (start, width) = self.columns[column as usize];
        start + slot * width..start + (slot + 1) * width
    }

    /// Sets a row.
    pub(super) fn place(&mut self, slot: usize, row: TableRow<'_>) {
        let [length, parameters, seeds, pages] = Column::ALL.map(|column| self.range(column, slot));
        self.copy[length.start] = row.length as u32;
        self.copy[parameters.clone()].copy_from_slice(&row.sampling.row().map(f32::to_bits));
        self.copy[seeds.clone()].copy_from_slice(&row.sampling.seed_row());
        let table = &mut self.copy[pages.clone()];
        let (held, rest) = table.split_at_mut(row.pages.len().min(table.len()));
        held.iter_mut().zip(row.pages).for_each(|(entry, page)| *entry = *page as u32);
        rest.fill(-1i32 as u32);
        self.changed.extend([length, parameters, seeds, pages]);
    }

    /// Sets the pages of a row from index `from` on.
    pub(crate) fn set_pages(&mut self, slot: usize, pages: &[i32], from: usize) {
        let row = self.range(Column::BlockTable, slot);
        let range = row.start + from..(row.start + pages.len()).min(row.end);
        for (entry, page) in self.copy[range.clone()].iter_mut().zip(&pages[from..]) {
            *entry = *page as u32;
        }
        self.changed.push(range);
    }

    /// Sets the length of a row, if it differs: after a draft, the device's length includes rejected tokens.
    pub(crate) fn rewind(&mut self, slot: usize, length: usize) {
        let range = self.range(Column::Length, slot);
        if self.copy[range.start] != length as u32 {
            self.copy[range.start] = length as u32;
            self.changed.push(range);
        }
    }

    /// Advances the host's copy of a length, as the device advances its own.
    pub(crate) fn advance(&mut self, slot: usize, tokens: usize) {
        let range = self.range(Column::Length, slot);
        self.copy[range.start] += tokens as u32;
    }

    /// The host's copy of a length.
    pub(crate) fn length(&self, slot: usize) -> usize {
        self.copy[self.range(Column::Length, slot).start] as usize
    }

    /// Uploads the changes, in order after the steps in flight.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn upload(&mut self, executor: &mut Executor) -> Result<()> {
        let start = self.changed.iter().map(|range| range.start).min().unwrap_or(0);
        let end = self.changed.iter().map(|range| range.end).max().unwrap_or(0);
        if (end - start) * ELEMENT <= self.changed.len() * UPLOAD_BYTES {
            self.changed.clear();
            self.changed.extend((end > start).then_some(start..end));
        }
        for range in self.changed.drain(..) {
            let bytes: &[u8] = bytemuck::cast_slice(&self.copy[range.clone()]);
            executor.upload_table(range.start * ELEMENT, bytes)?;
        }
        Ok(())
    }
}
