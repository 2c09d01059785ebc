//! Oracle of `embed` and `gather_rows`.

use super::Real;

/// Row `index - first` of a table of `columns` columns; `None` if the table does not have that row.
fn row(table: &[Real], columns: usize, index: i64) -> Option<&[Real]> {
    let start = usize::try_from(index).ok()?.checked_mul(columns)?;
    table.get(start..start + columns)
}

/// The embedding of a token: the sum of its row and, if there are learned positions, the row of its position.
pub fn embed(
    id: i32,
    table: &[Real],
    first_row: u32,
    position: Option<(i32, &[Real], u32)>,
    columns: usize,
) -> Vec<Real> {
    let token = row(table, columns, i64::from(id) - i64::from(first_row));
    let place = position.and_then(|(position, table, offset)| {
        // Position -1 means no position, whatever the offset.
        let index = if position < 0 { -1 } else { i64::from(position) + i64::from(offset) };
        row(table, columns, index)
    });
    let one = |column: usize| {
        let [a, b] = [token, place].map(|row| row.map_or(Real::default(), |row| row[column]));
        Real::new(a.value + b.value, a.magnitude + b.magnitude)
    };
    (0..columns).map(one).collect()
}

/// The source row of each result row; `None` if the result row is not written. `rows` is the extent of the operand.
pub fn gather(indices: &[i32], rows: usize) -> Vec<Option<usize>> {
    indices.iter().map(|index| usize::try_from(*index).ok().filter(|index| *index < rows)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embed_by_hand() {
        let real = |value: f64| Real::new(value, value);
        let (table, positions) = ([1.0, 2.0, 3.0, 4.0].map(real), [10.0, 20.0, 30.0, 40.0].map(real));
        let values = |id, position| {
            let reals = embed(id, &table, 5, position, 2);
            reals.into_iter().map(|real| real.value).collect::<Vec<_>>()
        };
        assert_eq!(values(6, None), [3.0, 4.0]);
        assert_eq!(values(4, None), [0.0, 0.0]);
        assert_eq!(values(7, None), [0.0, 0.0]);
        assert_eq!(values(-1, None), [0.0, 0.0]);
        assert_eq!(values(5, Some((0, &positions, 1))), [31.0, 42.0]);
        assert_eq!(values(5, Some((1, &positions, 1))), [1.0, 2.0]);
        assert_eq!(values(5, Some((-1, &positions, 1))), [1.0, 2.0]);
    }

    #[test]
    fn gather_by_hand() {
        assert_eq!(gather(&[2, -1, 0, 3, -7], 3), [Some(2), None, Some(0), None, None]);
    }
}
