//! Lookups of rows by index.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, operand, rows, store, store_rows},
    weight::Weight,
};
use candle_core::{DType, Tensor};
use dsrun_core::{
    kernels::PackedWeight,
    op::{Embed, GatherRows},
};
use dsrun_host::Frame;

impl Kernel for Embed {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, if frame.has(2) { &[0, 2] } else { &[0] }, &[0]);
        // y[t] = table[ids[t] - first_row] (+ position_table[positions[t] + position_offset])
        let mut y = picked(frame, 0, rows, -i64::from(self.first_row))?;
        if frame.has(2) {
            y = (y + picked(frame, 2, rows, i64::from(self.position_offset))?)?;
        }
        store(frame, 0, &y)
    }
}

/// For each index of operand `indices`, a row of the weight that follows it: `weight[index + offset]`, or zeros for an index of -1 or
/// a row that is not there.
fn picked(frame: &Frame<'_>, indices: usize, rows: usize, offset: i64) -> Result<Tensor> {
    let weight: &Weight = frame.weight(indices + 1)?;
    let (count, width) = (weight.weight_type().rows(), weight.weight_type().columns());
    let indices = frame.input::<i32>(indices)?;
    let zeros = Tensor::zeros((rows, width), DType::F32, CPU)?;
    if count == 0 {
        return Ok(zeros);
    }
    let place = |row: usize| {
        let index = Some(i64::from(indices.at(row))).filter(|index| *index >= 0)?;
        usize::try_from(index + offset).ok().filter(|place| *place < count)
    };
    let places: Vec<Option<usize>> = (0..rows).map(place).collect();
    let there: Vec<u8> = places.iter().map(|place| u8::from(place.is_some())).collect();
    let there = Tensor::from_vec(there, (rows, 1), CPU)?.broadcast_as((rows, width))?;
    let places: Vec<u32> = places.into_iter().map(|place| place.unwrap_or(0) as u32).collect();
    let picked = weight.rows(&Tensor::from_vec(places, rows, CPU)?)?;
    Ok(there.where_cond(&picked, &zeros)?)
}

impl Kernel for GatherRows {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let sources = frame.operand_rows(0);
        let (x, indices) = (operand(frame, 0, sources)?, frame.input::<i32>(1)?);
        // y[r] = x[rows[r]]; a row whose index is -1 or past the extent is not written
        let pairs = (0..rows(frame, &[1], &[0]))
            .filter_map(|row| indices.index(row, sources).map(|index| (row, index as u32)));
        let (rows, indices): (Vec<usize>, Vec<u32>) = pairs.unzip();
        if rows.is_empty() {
            return Ok(());
        }
        store_rows(frame, 0, &rows, &x.index_select(&Tensor::new(indices, CPU)?, 0)?)
    }
}
