//! The rows of a KV cache: how the elements that a head has for a token are stored.
//!
//! Ops, models and backends take the layout from here; whatever moves pages moves whole rows.
//!
//! A row of a float cache holds the elements of the head. A row of an i8 cache holds a signed byte `q` for each element, and after
//! them a scale `s` for each group of [`CACHE_GROUP`] consecutive elements, the last of which may be shorter. A scale is a
//! little-endian f32, at any alignment. Element `i` is `q[i] * s[i / CACHE_GROUP]`.

use crate::DType;

/// The elements of a row of an i8 cache that share a scale.
pub const CACHE_GROUP: usize = 32;

/// The bytes of a scale in a row of an i8 cache.
pub const CACHE_SCALE_BYTES: usize = 4;

/// The size of the last dimension of a cache whose heads have `head_size` elements: that of a row.
pub const fn cache_row_size(dtype: DType, head_size: usize) -> usize {
    match dtype {
        DType::I8 => {
            head_size.saturating_add(head_size.div_ceil(CACHE_GROUP).saturating_mul(CACHE_SCALE_BYTES))
        }
        _ => head_size,
    }
}

/// The number of elements of a head whose rows in a cache have `row_size` elements, the inverse of [`cache_row_size`]; `None` if
/// no head has such rows.
pub const fn cache_head_size(dtype: DType, row_size: usize) -> Option<usize> {
    let DType::I8 = dtype else { return Some(row_size) };
    let scales = row_size.div_ceil(CACHE_GROUP + CACHE_SCALE_BYTES);
    match row_size.checked_sub(scales * CACHE_SCALE_BYTES) {
        Some(head_size) if head_size.div_ceil(CACHE_GROUP) == scales => Some(head_size),
        _ => None,
    }
}
