//! Lookups of rows by index.

use crate::{
    floats::{FloatFrame, FloatOutput},
    kernel::Kernel,
    packed::PackedMatrix,
    parallel::Worker,
};
use dsrun_core::{
    Result,
    kernels::PackedWeight,
    op::{Embed, GatherRows},
};
use dsrun_host::Frame;

/// Decodes row `index` into `out`, or zeros if there is no such row.
fn decode(table: &PackedMatrix, index: Option<i64>, out: &mut [f32]) {
    let index = index.and_then(|index| usize::try_from(index).ok());
    match index.filter(|index| *index < table.weight_type().rows()) {
        Some(index) => table.row(index, out),
        None => out.fill(0.0),
    }
}

impl Kernel for Embed {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (ids, table) = (frame.input::<i32>(0)?, frame.weight::<PackedMatrix>(1)?);
        let positions = frame
            .has(2)
            .then(|| Ok((frame.input::<i32>(2)?, frame.weight::<PackedMatrix>(3)?)))
            .transpose()?;
        let rows = positions.as_ref().map_or(ids.rows, |(positions, _)| ids.rows.min(positions.rows));
        frame.floats_mut(0)?.fill_rows(&mut worker.team, rows, 2, |row, out, lane| {
            let id = i64::from(ids.at(row));
            // An index of -1 skips, so the offset is added to valid indices only.
            decode(table, (id >= 0).then_some(id - i64::from(self.first_row)), out);
            if let Some((positions, table)) = &positions {
                let position = i64::from(positions.at(row));
                let [learned] = lane.split([out.len()]);
                decode(table, (position >= 0).then_some(position + i64::from(self.position_offset)), learned);
                out.iter_mut().zip(learned).for_each(|(out, learned)| *out += *learned);
            }
        });
        Ok(())
    }
}

impl Kernel for GatherRows {
    fn run(&self, frame: &Frame<'_>, _: &mut Worker<'_>) -> Result<()> {
        let (x, indices) = (frame.bytes(0)?, frame.input::<i32>(1)?);
        let mut y = frame.bytes_mut(0)?;
        let width = x.width();
        for row in 0..y.rows.min(indices.rows) {
            if let Some(index) = indices.index(row, x.rows) {
                let start = y.row_start(row);
                y.data.range_mut(start, width).copy_from_slice(x.data.range(x.row_start(index), width));
            }
        }
        Ok(())
    }
}
