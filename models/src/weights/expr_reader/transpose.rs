//! Reading a matrix the other way round.

use super::{Converter, Part, TensorSource, rows_of};
use dsrun_core::{Result, WeightFormat};
use std::borrow::Cow;

/// Rows of a matrix that are read at a time to transpose it: the lines of the result they touch stay in the cache.
const TRANSPOSED_ROWS: usize = 64;

impl Part {
    /// Columns `first .. first + count` of a matrix as rows.
    pub(super) fn transpose<'s>(
        &self,
        source: &'s dyn TensorSource,
        of: &'s Self,
        first: usize,
        count: usize,
    ) -> Result<Cow<'s, [u8]>> {
        let (format, columns) = (of.weight_type.format, of.weight_type.columns());
        let mut out = vec![0; count * self.row_bytes];
        let mut converter = Converter::default();
        let rows = of.weight_type.rows();
        for start in (0..rows).step_by(TRANSPOSED_ROWS) {
            let bytes = of.read(source, start, TRANSPOSED_ROWS.min(rows - start))?;
            for (row, bytes) in rows_of(&bytes, of.row_bytes).enumerate() {
                match self.weight_type.format {
                    WeightFormat::Dense(dtype) if format == self.weight_type.format => {
                        let wanted = first * dtype.bytes()..(first + count) * dtype.bytes();
                        let elements = bytes.get(wanted).unwrap_or_default().chunks_exact(dtype.bytes());
                        put_column(&mut out, self.row_bytes, start + row, elements);
                    }
                    _ => {
                        let values = converter.decode(format, bytes, columns)?;
                        let elements = values.get(first..first + count).unwrap_or_default();
                        let elements = elements.iter().map(|value| value.to_le_bytes());
                        put_column(&mut out, self.row_bytes, start + row, elements);
                    }
                }
            }
        }
        Ok(Cow::Owned(out))
    }
}

/// Writes element `column` of each row of `out`.
fn put_column(
    out: &mut [u8],
    row_bytes: usize,
    column: usize,
    elements: impl Iterator<Item = impl AsRef<[u8]>>,
) {
    for (row, element) in out.chunks_exact_mut(row_bytes.max(1)).zip(elements) {
        let element = element.as_ref();
        let place = row.get_mut(column * element.len()..).and_then(|rest| rest.get_mut(..element.len()));
        if let Some(place) = place {
            place.copy_from_slice(element);
        }
    }
}
