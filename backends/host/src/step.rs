//! The request table: deriving a step's inputs, recording its tokens.

use crate::{kernels::SharedOp, view::Frame};
use dsrun_core::{
    Result,
    op::{CommitTokens, IN_PROMPT, PrepareStep},
};

/// A count of 0 or more as a size.
fn size(count: i32) -> usize {
    usize::try_from(count).unwrap_or(0)
}

/// An index or length for the device. A size beyond i32, which no tensor has, becomes -1, the index that skips.
fn number(size: usize) -> i32 {
    i32::try_from(size).unwrap_or(-1)
}

impl SharedOp for PrepareStep {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let (requests, lengths) = (frame.input::<i32>(0)?, frame.input::<i32>(1)?);
        let (sources, prompt) = (frame.input::<i32>(2)?, frame.input::<i32>(3)?);
        let (wanted, table) = (frame.input::<i32>(4)?, frame.input::<i32>(5)?);
        let (last_token, finished) = (frame.input::<i32>(6)?, frame.input::<i32>(7)?);
        let (mut ids, mut positions) = (frame.output::<i32>(0)?, frame.output::<i32>(1)?);
        let (mut slots, mut query_start) = (frame.output::<i32>(2)?, frame.output::<i32>(3)?);
        let (mut query_length, mut kv_length) = (frame.output::<i32>(4)?, frame.output::<i32>(5)?);
        let (mut tables, mut row_positions) = (frame.output::<i32>(6)?, frame.output::<i32>(7)?);
        let (mut length, mut counts) = (frame.output::<i32>(8)?, frame.output::<i32>(9)?);
        let tokens = ids.rows.min(positions.rows).min(slots.rows);
        let sequences = [requests.rows, lengths.rows, sources.rows, query_start.rows, query_length.rows]
            .into_iter()
            .chain([kv_length.rows, tables.rows])
            .fold(usize::MAX, usize::min);
        let capacity = table.rows.min(last_token.rows).min(finished.rows).min(length.rows).min(counts.rows);
        let (block, vocabulary) = (self.block_size as usize, counts.width());

        for row in 0..tokens {
            (*ids.at_mut(row), *positions.at_mut(row), *slots.at_mut(row)) = (-1, -1, -1);
        }
        let mut start = 0;
        for sequence in 0..sequences {
            *query_start.at_mut(sequence) = number(start);
            *query_length.at_mut(sequence) = 0;
            *kv_length.at_mut(sequence) = 0;
            let Some(request) = requests.index(sequence, capacity) else {
                tables.row_mut(sequence).fill(-1);
                continue;
            };
            let pages = table.row(request);
            tables.row_mut(sequence).copy_from_slice(pages);
            let source = usize::try_from(sources.at(sequence)).ok();
            let brought = if source.is_some() { size(lengths.at(sequence)) } else { 1 };
            let brought = brought.min(tokens - start);
            if finished.at(request) == 0 {
                let before = length.at_mut(request);
                let first = size(*before);
                for offset in 0..brought {
                    let (row, position) = (start + offset, first.saturating_add(offset));
                    let id = match source {
                        Some(source) => {
                            let index = source.saturating_add(offset);
                            let id = if index < prompt.rows { prompt.at(index) } else { -1 };
                            if let Some(count) = counts.row_mut(request).get_mut(size_or_none(id, vocabulary))
                            {
                                *count |= IN_PROMPT;
                            }
                            id
                        }
                        None => last_token.at(request),
                    };
                    let page = pages.get(position / block.max(1)).and_then(|page| u32::try_from(*page).ok());
                    let slot = page.and_then(|page| {
                        (page as usize).checked_mul(block)?.checked_add(position % block.max(1))
                    });
                    *ids.at_mut(row) = id;
                    *positions.at_mut(row) = number(position);
                    *slots.at_mut(row) = slot.map_or(-1, number);
                }
                *before = number(first.saturating_add(brought).min(i32::MAX as usize));
                *query_length.at_mut(sequence) = number(brought);
                *kv_length.at_mut(sequence) = *before;
            }
            start += brought;
        }
        for row in 0..wanted.rows.min(row_positions.rows) {
            let position = wanted.index(row, tokens).map_or(-1, |row| *positions.at_mut(row));
            *row_positions.at_mut(row) = if position < 0 { -1 } else { position.saturating_add(1) };
        }
        Ok(())
    }
}

/// `id` as an index; `limit`, which is outside, if the id is negative.
fn size_or_none(id: i32, limit: usize) -> usize {
    usize::try_from(id).unwrap_or(limit)
}

impl SharedOp for CommitTokens {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let (requests, ids, stop) = (frame.input::<i32>(0)?, frame.input::<i32>(1)?, frame.input::<i32>(2)?);
        let (mut last_token, mut finished) = (frame.output::<i32>(0)?, frame.output::<i32>(1)?);
        let mut counts = frame.output::<i32>(2)?;
        let capacity = last_token.rows.min(finished.rows).min(counts.rows);
        for row in 0..requests.rows.min(ids.rows) {
            let Some(request) = requests.index(row, capacity) else { continue };
            let Some(id) = ids.index(row, counts.width()) else { continue };
            if *finished.at_mut(request) != 0 {
                continue;
            }
            *last_token.at_mut(request) = number(id);
            let count = &mut counts.row_mut(request)[id];
            // A full count stays, because the bit above it is `IN_PROMPT`.
            if *count & (IN_PROMPT - 1) != IN_PROMPT - 1 {
                *count += 1;
            }
            if (0..stop.rows).any(|index| stop.at(index) == number(id)) {
                *finished.at_mut(request) = 1;
            }
        }
        Ok(())
    }
}
