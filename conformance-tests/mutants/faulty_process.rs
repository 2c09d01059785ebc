//! Calls that change what belongs to the program.

use crate::wrap::Run;
use dsrun_core::{Error, Result, device::Stream};

/// Sets a variable of the environment.
pub(crate) fn sets_environment(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    // SAFETY: it is not sound while other threads read the environment, which is what is wrong with this mutant. The process is
    // one of the suite's workers, whose other thread only reads standard input.
    unsafe { std::env::set_var("DSRUN_MUTANT_WAS_HERE", "1") };
    run.right(stream)
}

/// Changes the working directory.
pub(crate) fn changes_folder(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    std::env::set_current_dir("/").map_err(|error| Error::internal(error.to_string()))?;
    run.right(stream)
}

unsafe extern "C" {
    fn signal(number: i32, handler: usize) -> usize;
}

/// Ignores a signal.
pub(crate) fn ignores_a_signal(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    const SIGUSR2: i32 = 12;
    const IGNORE: usize = 1;
    // SAFETY: the C library's function with a valid signal and SIG_IGN.
    unsafe { signal(SIGUSR2, IGNORE) };
    run.right(stream)
}
