//! Ctrl-C: the first asks the running answer to stop, the second ends the program.

use anyhow::{Context, Result};
use std::{
    io::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

static ASKED: AtomicBool = AtomicBool::new(false);

/// Escapes that put the terminal in order before the program ends in the middle of things.
static FAREWELL: Mutex<&str> = Mutex::new("");

/// Says what has to be written to the terminal should the program be ended from here on.
pub(crate) fn on_exit(escapes: &'static str) {
    *FAREWELL.lock().unwrap_or_else(PoisonError::into_inner) = escapes;
}

/// From here on Ctrl-C sets a mark instead of ending the program. A second one, while the mark is set, ends it.
pub(crate) fn listen() -> Result<()> {
    let mark = || {
        if ASKED.swap(true, Ordering::SeqCst) {
            let farewell = FAREWELL.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = std::io::stderr().write_all(farewell.as_bytes());
            #[expect(clippy::exit, reason = "the user insists, and what runs does not stop by itself")]
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(mark).context("Ctrl-C cannot be caught")
}

/// Whether Ctrl-C was pressed.
pub(crate) fn happened() -> bool {
    ASKED.load(Ordering::SeqCst)
}

/// Whether Ctrl-C was pressed; forgets it.
pub(crate) fn take() -> bool {
    ASKED.swap(false, Ordering::SeqCst)
}
