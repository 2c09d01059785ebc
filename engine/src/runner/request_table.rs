//! The request table, as the host keeps it: what it brings to the device when a request is placed or gets pages.
//!
//! The host knows all of a row but the last token and the counts of tokens, which the device advances. So it keeps a copy of
//! these columns in the device's layout, and brings what has changed before a step in one piece if that is cheaper than piece
//! by piece.

use crate::{error::Result, plan::FixedSizes, sampling::SamplingOptions};
use dsrun_core::{
    device::{BufferSlice, Device, MemoryKind, Stream},
    op::SAMPLING_COLUMNS,
};
use std::ops::Range;

/// Bytes of an element: all columns are of 32 bits.
const ELEMENT: usize = 4;

/// Bytes that may be brought beside those that changed if that saves an upload: about as long as one takes by itself.
const UPLOAD_BYTES: usize = 64 << 10;

/// The columns that the host keeps, by the names of their states.
const COLUMNS: [&str; 4] = ["length", "parameters", "seeds", "block_table"];

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row<'a> {
    /// Tokens in the KV cache.
    pub(crate) length: usize,
    /// Pages.
    pub(crate) pages: &'a [i32],
    /// How tokens are chosen.
    pub(crate) sampling: &'a SamplingOptions,
}

/// The host's copy of the table.
#[derive(Debug)]
pub(crate) struct RequestTable {
    memory: BufferSlice,
    copy: Vec<u32>,
    /// Where each of [`COLUMNS`] starts, and how many elements a row of it has.
    columns: [(usize, usize); COLUMNS.len()],
    /// Elements that the device does not have yet.
    changed: Vec<Range<usize>>,
}

impl RequestTable {
    /// Allocates the columns on the device, side by side.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(crate) fn new(device: &dyn Device, fixed: FixedSizes) -> Result<Self> {
        let alignment = device.properties().alignment.max(ELEMENT);
        let mut end = 0;
        let columns = [1, SAMPLING_COLUMNS, 2, fixed.blocks].map(|width| {
            let start = end;
            end = (start + fixed.requests * width * ELEMENT).next_multiple_of(alignment);
            (start / ELEMENT, width)
        });
        let memory = BufferSlice::whole(device.allocate(end.max(1), MemoryKind::Device)?);
        Ok(Self { memory, copy: vec![0; end / ELEMENT], columns, changed: Vec::new() })
    }

    /// Where a state of the program is, if it is one of the columns.
    ///
    /// # Errors
    /// If it is longer than planned.
    pub(crate) fn state(&self, name: &str, bytes: usize) -> Result<Option<BufferSlice>> {
        let Some(column) = COLUMNS.iter().position(|column| *column == name) else { return Ok(None) };
        Ok(Some(self.memory.slice(self.columns[column].0 * ELEMENT, bytes)?))
    }

    /// The elements of a row in one of the columns.
    fn range(&self, column: usize, slot: usize) -> Range<usize> {
        let (start, width) = self.columns[column];
        start + slot * width..start + (slot + 1) * width
    }

    /// Sets a row.
    pub(crate) fn place(&mut self, slot: usize, row: Row<'_>) {
        let [length, parameters, seeds, pages] = [0, 1, 2, 3].map(|column| self.range(column, slot));
        self.copy[length.start] = row.length as u32;
        self.copy[parameters.clone()].copy_from_slice(&row.sampling.row().map(f32::to_bits));
        self.copy[seeds.clone()].copy_from_slice(&row.sampling.seed_row());
        let table = &mut self.copy[pages.clone()];
        let (held, rest) = table.split_at_mut(row.pages.len().min(table.len()));
        held.iter_mut().zip(row.pages).for_each(|(entry, page)| *entry = *page as u32);
        rest.fill(-1i32 as u32);
        self.changed.extend([length, parameters, seeds, pages]);
    }

    /// Sets a row's pages from page `from` on.
    pub(crate) fn grow(&mut self, slot: usize, pages: &[i32], from: usize) {
        let row = self.range(3, slot);
        let range = row.start + from..(row.start + pages.len()).min(row.end);
        for (entry, page) in self.copy[range.clone()].iter_mut().zip(&pages[from..]) {
            *entry = *page as u32;
        }
        self.changed.push(range);
    }

    /// Sets a row's length where the device counts tokens that were proposed in vain.
    pub(crate) fn rewind(&mut self, slot: usize, length: usize) {
        let range = self.range(0, slot);
        if self.copy[range.start] != length as u32 {
            self.copy[range.start] = length as u32;
            self.changed.push(range);
        }
    }

    /// Notes that the device advances a row's length by itself.
    pub(crate) fn advance(&mut self, slot: usize, tokens: usize) {
        let range = self.range(0, slot);
        self.copy[range.start] += tokens as u32;
    }

    /// Brings what has changed to the device. What steps before this one do is done before.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn upload(&mut self, stream: &mut dyn Stream) -> Result<()> {
        let start = self.changed.iter().map(|range| range.start).min().unwrap_or(0);
        let end = self.changed.iter().map(|range| range.end).max().unwrap_or(0);
        if (end - start) * ELEMENT <= self.changed.len() * UPLOAD_BYTES {
            self.changed.clear();
            self.changed.extend((end > start).then_some(start..end));
        }
        for range in self.changed.drain(..) {
            let bytes: &[u8] = bytemuck::cast_slice(&self.copy[range.clone()]);
            stream.upload(bytes, &self.memory.slice(range.start * ELEMENT, bytes.len())?)?;
        }
        Ok(())
    }
}
