//! Arguments of `dsrun completions` and `dsrun man`.

use clap::Args;
use clap_complete::Shell;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell that the script is for.
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// A folder for the pages of all commands, such as ~/.local/share/man/man1; without it the page of dsrun is printed.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: Option<PathBuf>,
}
