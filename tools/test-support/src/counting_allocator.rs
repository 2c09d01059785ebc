//! An allocator that counts, thread by thread, how much memory is in use.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes in use on this thread, and the most there have been. Signed: memory may be freed by another thread than
    /// the one that took it.
    static USED: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// The system's allocator, counted.
pub struct Counting;

fn count(change: isize) {
    // Fails only while the thread ends, when nothing is measured any more.
    let _ = USED.try_with(|used| {
        let (now, peak) = used.get();
        used.set((now + change, peak.max(now + change)));
    });
}

// SAFETY: Every call goes to the system's allocator as it is; counting takes no memory, because the cell is constant
// and needs no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: As the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: As the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // While it is copied there may be both.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: As the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Runs `work` and returns the most memory it had in use at a time, beyond what was in use before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = USED.get().0;
    USED.set((before, before));
    let result = work();
    let peak = USED.get().1 - before;
    (result, peak.max(0) as usize)
}
