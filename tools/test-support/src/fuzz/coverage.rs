//! The coverage counters of an instrumented build.
//!
//! `-C passes=sancov-module` with `-sanitizer-coverage-inline-8bit-counters` counts every edge of the control flow in a byte, and
//! passes the bytes of all modules to [`__sanitizer_cov_8bit_counters_init`] when the program starts. In other builds nothing calls it.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU8, Ordering},
};

/// Start and length of every range of counters, in bytes.
static RANGES: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Registers the counters of a module. Instrumented code calls it before `main`.
///
/// # Safety
/// `start` and `stop` must delimit a range of counters that exists as long as the process.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
    let range = (start as usize, (stop as usize).saturating_sub(start as usize));
    let mut ranges = RANGES.lock().unwrap_or_else(PoisonError::into_inner);
    // Each object file registers the whole range of the program.
    if range.1 > 0 && !ranges.contains(&range) {
        ranges.push(range);
    }
}

/// The edges that inputs have reached, each with the magnitudes of its counts.
pub(super) struct Coverage {
    counters: Vec<&'static [AtomicU8]>,
    seen: Vec<u8>,
}

impl Coverage {
    pub(super) fn new() -> Self {
        let ranges = RANGES.lock().unwrap_or_else(PoisonError::into_inner);
        let counters: Vec<&'static [AtomicU8]> = ranges
            .iter()
            // SAFETY: The range holds counters that exist as long as the process. Everything that reads them does so through atomics;
            // instrumented code increments them as plain bytes, where a lost count is harmless.
            .map(|(start, length)| unsafe { std::slice::from_raw_parts(*start as *const AtomicU8, *length) })
            .collect();
        let seen = vec![0; counters.iter().map(|range| range.len()).sum()];
        Self { counters, seen }
    }

    /// Sets all counters to 0.
    pub(super) fn clear(&self) {
        self.counters.iter().copied().flatten().for_each(|counter| counter.store(0, Ordering::Relaxed));
    }

    /// Whether the counters have an edge, or a magnitude of its count, for the first time.
    pub(super) fn is_new(&mut self) -> bool {
        let mut new = false;
        for (counter, seen) in self.counters.iter().copied().flatten().zip(&mut self.seen) {
            let count = counter.load(Ordering::Relaxed);
            if count > 0 {
                let magnitude = 1 << count.ilog2();
                new |= *seen & magnitude == 0;
                *seen |= magnitude;
            }
        }
        new
    }

    /// The number of edges that were reached so far.
    pub(super) fn reached(&self) -> usize {
        self.seen.iter().filter(|seen| **seen > 0).count()
    }
}
