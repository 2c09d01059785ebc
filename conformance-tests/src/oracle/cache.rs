//! Oracle of `kv_write`, `page_gather` and `page_scatter`: the destinations of copies.

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
    fn elements_by_hand() {
        // Page 1 of [2 pages, 3 heads, 4 slots, 5 elements] starts at 60; head 2 in it at 100; slot 3 at 115.
        assert_eq!(element([2, 3, 4, 5], 1, 2, 3, 4), 119);
    }
}
