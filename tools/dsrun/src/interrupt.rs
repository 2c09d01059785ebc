//! Handles Ctrl-C: the first asks the running answer to stop, the second ends the program.

use crate::echo;
use anyhow::{Context, Result};
use std::{
    io::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Makes Ctrl-C do nothing: the terminal sends it to the leading process too, which ends this one.
pub(crate) fn leave_to_leader() -> Result<()> {
    ctrlc::set_handler(|| {}).context("cannot catch Ctrl-C")
}

/// Whether Ctrl-C was pressed since the last [`take`].
static PRESSED: AtomicBool = AtomicBool::new(false);

/// The escape sequences that restore the terminal when the program is ended.
static RESTORE: Mutex<&str> = Mutex::new("");

/// Sets the escape sequences that are written to the terminal if the program is ended from now on.
pub(crate) fn on_exit(escapes: &'static str) {
    *RESTORE.lock().unwrap_or_else(PoisonError::into_inner) = escapes;
}

/// Makes Ctrl-C set a flag instead of ending the program. A second Ctrl-C while the flag is set ends the program.
pub(crate) fn listen() -> Result<()> {
    let handler = || {
        if PRESSED.swap(true, Ordering::SeqCst) {
            let restore = RESTORE.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = std::io::stderr().write_all(restore.as_bytes());
            echo::restore();
            #[expect(
                clippy::exit,
                reason = "the user asks a second time, and the running step cannot be stopped"
            )]
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).context("cannot catch Ctrl-C")
}

/// Whether Ctrl-C was pressed since the last [`take`].
pub(crate) fn happened() -> bool {
    PRESSED.load(Ordering::SeqCst)
}

/// Clears the flag, and returns whether Ctrl-C was pressed.
pub(crate) fn take() -> bool {
    PRESSED.swap(false, Ordering::SeqCst)
}
