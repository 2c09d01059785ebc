//! Arguments of `dsrun serve`.

mod settings;

use clap::Args;
pub(crate) use settings::{AccessLog, ServeSettings};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// A TOML file with settings: every flag below, without the leading dashes, is a key. Flags take precedence.
    #[arg(long, value_name = "PATH")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) settings: ServeSettings,
}
