//! Weights that a fault keeps as they are stored.

use dsrun_core::{Affine, Result, WeightReader, WeightType};

/// A weight with the bytes of its rows.
pub(super) struct KeptWeight {
    weight_type: WeightType,
    rows: Vec<Vec<u8>>,
}

impl KeptWeight {
    pub(super) fn read(reader: &mut dyn WeightReader) -> Result<Self> {
        let weight_type = reader.weight_type().clone();
        let rows = (0..weight_type.rows()).map(|row| Ok(reader.rows(row, 1)?.to_vec()));
        Ok(Self { rows: rows.collect::<Result<_>>()?, weight_type })
    }

    /// All elements, row by row.
    pub(super) fn elements(&self) -> Option<Vec<f32>> {
        let (format, columns) = (self.weight_type.format, self.weight_type.columns());
        let mut elements = vec![0.0; columns * self.rows.len()];
        for (row, out) in self.rows.iter().zip(elements.chunks_exact_mut(columns.max(1))) {
            format.decode_row(row, out).ok()?;
        }
        Some(elements)
    }

    /// All integers, row by row, each with the map of its group; `None` for a dense weight.
    pub(super) fn integers(&self) -> Option<Vec<(u8, Affine)>> {
        let (format, columns) = (self.weight_type.format, self.weight_type.columns());
        let group = format.group(columns);
        let mut all = Vec::new();
        for row in &self.rows {
            let mut integers = vec![0; columns];
            let mut maps = vec![Affine::default(); columns.div_ceil(group)];
            format.unpack_row(row, &mut integers, &mut maps).ok()?;
            all.extend(integers.into_iter().enumerate().map(|(column, q)| (q, maps[column / group])));
        }
        Some(all)
    }
}
