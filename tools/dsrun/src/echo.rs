//! Keys that are typed while an answer is written do not appear in it.

#[cfg(unix)]
use rustix::{
    process::getpgrp,
    termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr},
};
#[cfg(unix)]
use std::{
    io::stdin,
    sync::{Mutex, PoisonError},
};

/// The modes of the terminal before its echo was turned off.
#[cfg(unix)]
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// As long as this lives, the terminal does not show what is typed. A line editor shows it all the same, and what is typed before it
/// reads a line becomes a part of that line.
pub(crate) struct NoEcho(());

impl NoEcho {
    pub(crate) fn start() -> Self {
        #[cfg(unix)]
        if let Ok(before) = tcgetattr(stdin()) {
            let mut modes = before.clone();
            modes.local_modes.remove(LocalModes::ECHO);
            *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
            // Without effect, keys only appear in answers.
            let _ = tcsetattr(stdin(), OptionalActions::Now, &modes);
        }
        Self(())
    }
}

impl Drop for NoEcho {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal the modes it had before [`NoEcho::start`].
pub(crate) fn restore() {
    #[cfg(unix)]
    if let Some(before) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // The terminal may be gone.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &before);
    }
}

/// Whether this process is in the background of its terminal. The system stops such a process when it changes the modes.
pub(crate) fn in_background() -> bool {
    #[cfg(unix)]
    return tcgetpgrp(stdin()).is_ok_and(|foreground| foreground != getpgrp());
    #[cfg(not(unix))]
    false
}
