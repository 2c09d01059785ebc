//! Ctrl-C: the first makes the program stop its workers and exit, the second exits at once.

use anyhow::{Context, Result};
use std::{
    process,
    sync::atomic::{AtomicBool, Ordering},
};

/// The conventional exit status of a program interrupted by SIGINT.
pub(crate) const STATUS: u8 = 130;

static HAPPENED: AtomicBool = AtomicBool::new(false);

/// Installs the handler, which records that Ctrl-C was pressed.
pub(crate) fn listen() -> Result<()> {
    let mark = || {
        if HAPPENED.swap(true, Ordering::SeqCst) {
            // The workers exit too when their standard input is closed.
            #[expect(clippy::exit, reason = "Ctrl-C was pressed twice")]
            process::exit(i32::from(STATUS));
        }
    };
    ctrlc::set_handler(mark).context("the handler for Ctrl-C cannot be installed")
}

/// Whether Ctrl-C was pressed.
pub(crate) fn happened() -> bool {
    HAPPENED.load(Ordering::SeqCst)
}
