//! Handles Ctrl-C: the first asks the running answer to stop, the second ends the program. Restores the terminal when a signal ends it.

use crate::echo;
use anyhow::{Context, Result};
use std::{
    io::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

/// Makes Ctrl-C do nothing: the terminal sends it to the leading process too, which ends this one.
pub(crate) fn leave_to_leader() -> Result<()> {
    ctrlc::set_handler(|| {}).context("cannot catch Ctrl-C")
}

/// Whether Ctrl-C was pressed since the last [`take`].
static PRESSED: AtomicBool = AtomicBool::new(false);

/// The escape sequences that restore the terminal when the program is ended.
static RESTORE: Mutex<&str> = Mutex::new("");

/// How long the end of the program waits until the escape sequences are written. A terminal whose output is stopped takes none.
const PATIENCE: Duration = Duration::from_millis(200);

/// Sets the escape sequences that are written to the terminal if the program is ended from now on.
pub(crate) fn on_exit(escapes: &'static str) {
    *RESTORE.lock().unwrap_or_else(PoisonError::into_inner) = escapes;
}

/// What SIGTERM does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Termination {
    /// It ends the program.
    Ends,
    /// It sets the flag, as Ctrl-C does, so that the command removes what it has written in part.
    Stops,
}

/// Makes Ctrl-C set a flag instead of ending the program. A second Ctrl-C while the flag is set ends the program. Other signals that
/// end it restore the terminal first.
pub(crate) fn listen(termination: Termination) -> Result<()> {
    let handler = || {
        if PRESSED.swap(true, Ordering::SeqCst) {
            restore_terminal();
            #[expect(
                clippy::exit,
                reason = "the user asks a second time, and the running step cannot be stopped"
            )]
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).context("cannot catch Ctrl-C")?;
    catch_signals(termination)
}

/// Makes the signals that end the program restore the terminal of standard input first. Without such a terminal they keep their effect,
/// unless SIGTERM stops: `nohup` may have made the program ignore SIGHUP.
#[cfg(unix)]
fn catch_signals(termination: Termination) -> Result<()> {
    use signal_hook::{
        consts::{SIGHUP, SIGQUIT, SIGTERM},
        iterator::Signals,
        low_level::emulate_default_handler,
    };
    let caught: &[_] = match (std::io::IsTerminal::is_terminal(&std::io::stdin()), termination) {
        (true, _) => &[SIGHUP, SIGQUIT, SIGTERM],
        (false, Termination::Stops) => &[SIGTERM],
        (false, Termination::Ends) => return Ok(()),
    };
    let mut signals = Signals::new(caught).context("cannot catch signals")?;
    let handler = move || {
        for signal in signals.forever() {
            let stops = signal == SIGTERM && termination == Termination::Stops;
            if stops && !PRESSED.swap(true, Ordering::SeqCst) {
                continue;
            }
            restore_terminal();
            // It fails for unknown signals only.
            let _ = emulate_default_handler(signal);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(handler).context("cannot catch signals")?;
    Ok(())
}

/// Does nothing: only Ctrl-C ends programs here.
#[cfg(not(unix))]
fn catch_signals(_: Termination) -> Result<()> {
    Ok(())
}

/// Restores the terminal, unless this process is in the background, where that would stop it.
fn restore_terminal() {
    if echo::in_background() {
        return;
    }
    let escapes = *RESTORE.lock().unwrap_or_else(PoisonError::into_inner);
    if !escapes.is_empty() {
        let (written, end) = mpsc::channel();
        let write = move || {
            let _ = std::io::stderr().write_all(escapes.as_bytes());
            let _ = written.send(());
        };
        // Another thread may hold standard error while it waits for the terminal.
        let _ = thread::Builder::new().spawn(write);
        let _ = end.recv_timeout(PATIENCE);
    }
    echo::restore();
}

/// Whether Ctrl-C was pressed since the last [`take`].
pub(crate) fn happened() -> bool {
    PRESSED.load(Ordering::SeqCst)
}

/// Clears the flag, and returns whether Ctrl-C was pressed.
pub(crate) fn take() -> bool {
    PRESSED.swap(false, Ordering::SeqCst)
}
