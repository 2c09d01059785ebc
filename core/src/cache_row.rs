//! The rows of a KV cache: how the elements that a head has for a token are stored.
//!
//! Ops, models and backends take the layout from here; whatever moves pages moves whole rows.

use crate::DType;

/// The bytes of the scale at the end of each row of an i8 cache.
pub const CACHE_SCALE_BYTES: usize = 4;

/// The size of the last dimension of a cache whose heads have `head_size` elements: the elements of the row that a head has for a
/// slot.
///
/// A row of a float cache holds the elements of the head. A row of an i8 cache holds `head_size` signed bytes `q`, and after them
/// their scale `s`, a little-endian f32 in [`CACHE_SCALE_BYTES`] bytes of any alignment; the elements of the head are `q[i] * s`.
pub const fn cache_row_size(dtype: DType, head_size: usize) -> usize {
    match dtype {
        DType::I8 => head_size.saturating_add(CACHE_SCALE_BYTES),
        _ => head_size,
    }
}

/// The number of elements of a head whose rows in a cache have `row_size` elements, the inverse of [`cache_row_size`]; `None` if
/// a row is too short for its scale.
pub const fn cache_head_size(dtype: DType, row_size: usize) -> Option<usize> {
    match dtype {
        DType::I8 => row_size.checked_sub(CACHE_SCALE_BYTES),
        _ => Some(row_size),
    }
}
