//! Ctrl-C: the first lets the program stop its children and end, the second ends it at once.

use anyhow::{Context, Result};
use std::{
    process,
    sync::atomic::{AtomicBool, Ordering},
};

/// The exit status of a program that was interrupted, as shells have it.
pub(crate) const STATUS: u8 = 130;

static HAPPENED: AtomicBool = AtomicBool::new(false);

/// From here on Ctrl-C sets a mark.
pub(crate) fn listen() -> Result<()> {
    let mark = || {
        if HAPPENED.swap(true, Ordering::SeqCst) {
            // The children see the end of their standard input, and end too.
            #[expect(clippy::exit, reason = "the user insists")]
            process::exit(i32::from(STATUS));
        }
    };
    ctrlc::set_handler(mark).context("Ctrl-C cannot be caught")
}

/// Whether Ctrl-C was pressed.
pub(crate) fn happened() -> bool {
    HAPPENED.load(Ordering::SeqCst)
}
