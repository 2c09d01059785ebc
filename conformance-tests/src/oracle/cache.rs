//! Oracle of `kv_write`, `page_gather` and `page_scatter`: the destinations of copies, and the rows of i8 caches.

use super::quant;
use crate::tensor::Tensor;
use dsrun_core::{
    DType,
    cache_row::{CACHE_GROUP, CACHE_SCALE_BYTES, cache_head_size},
};

/// The bytes of a row of an i8 cache; `None` for integers that are not defined, which are those of a group with a value that is
/// not finite.
pub fn quantised_row(values: &[f64]) -> Vec<Option<u8>> {
    let (mut row, mut scales) = (Vec::new(), Vec::new());
    for group in values.chunks(CACHE_GROUP) {
        if group.iter().all(|value| value.is_finite()) {
            let (scale, integers) = quant::quantise(group);
            row.extend(integers.into_iter().map(|integer| Some(integer as i8 as u8)));
            scales.push(scale as f32);
        } else {
            row.extend(vec![None; group.len()]);
            scales.push(f32::NAN);
        }
    }
    row.extend(scales.into_iter().flat_map(f32::to_le_bytes).map(Some));
    row
}

/// The elements of a cache `[pages, heads, block, row]`, without the scales of an i8 cache.
pub fn elements(cache: &Tensor) -> Vec<f64> {
    let row = cache.shape.last().copied().filter(|row| cache.dtype == DType::I8 && *row > 0);
    let Some((row, size)) = row.and_then(|row| Some((row, cache_head_size(DType::I8, row)?))) else {
        return cache.values();
    };
    let mut elements = Vec::new();
    for row in cache.bits.chunks_exact(row) {
        let (integers, scales) = row.split_at(size);
        let scale = |bytes: &[u32; CACHE_SCALE_BYTES]| f32::from_le_bytes(bytes.map(|byte| byte as u8));
        let scales = scales.as_chunks().0.iter().map(scale);
        for (group, scale) in integers.chunks(CACHE_GROUP).zip(scales) {
            elements.extend(group.iter().map(|byte| f64::from(*byte as u8 as i8) * f64::from(scale)));
        }
    }
    elements
}

/// The page of a slot and its index in the page; `None` if the slot is -1 or out of range.
pub fn place(slot: i32, pages: usize, block: usize) -> Option<(usize, usize)> {
    let slot = usize::try_from(slot).ok()?;
    (slot / block < pages).then_some((slot / block, slot % block))
}

/// The page with this index; `None` if it is -1 or out of range.
pub fn page(index: i32, pages: usize) -> Option<usize> {
    usize::try_from(index).ok().filter(|index| *index < pages)
}

/// The index of an element in a dense cache `[pages, heads, block, size]`.
pub fn element(
    [_, heads, block, size]: [usize; 4],
    page: usize,
    head: usize,
    place: usize,
    index: usize,
) -> usize {
    ((page * heads + head) * block + place) * size + index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_and_pages_by_hand() {
        assert_eq!(place(17, 2, 16), Some((1, 1)));
        assert_eq!(place(32, 2, 16), None);
        assert_eq!(place(-1, 2, 16), None);
        assert_eq!((page(1, 2), page(2, 2), page(-1, 2)), (Some(1), None, None));
    }

    #[test]
    fn rows_of_bytes_by_hand() {
        // The scale is 254 / 127 = 2, or 0x4000_0000; 3 / 2 is a tie, to even.
        let row = quantised_row(&[254.0, -3.0, 0.0]);
        assert_eq!(row, [127, 0xFE, 0, 0, 0, 0, 0x40].map(Some));
        let bits = row.into_iter().flatten().map(u32::from).collect();
        let cache = Tensor { dtype: DType::I8, shape: vec![1, 1, 1, 7], bits };
        assert_eq!(elements(&cache), [254.0, -4.0, 0.0]);
        assert_eq!(quantised_row(&[0.0, -0.0]), [Some(0); 6]);
        // The second group has its own scale, 1 / 127.
        let two = quantised_row(&[[0.0; CACHE_GROUP].as_slice(), &[1.0]].concat());
        assert_eq!(
            (two.len(), two[CACHE_GROUP], two[CACHE_GROUP + 1]),
            (CACHE_GROUP + 9, Some(127), Some(0))
        );
        let broken = quantised_row(&[1.0, f64::INFINITY]);
        assert_eq!(broken, [None, None, Some(0), Some(0), Some(0xC0), Some(0x7F)]);
    }

    #[test]
    fn elements_by_hand() {
        // Page 1 of [2 pages, 3 heads, 4 slots, 5 elements] starts at 60; head 2 in it at 100; slot 3 at 115.
        assert_eq!(element([2, 3, 4, 5], 1, 2, 3, 4), 119);
    }
}
