//! Arguments of `dsrun serve`.

use crate::serve::ServeSettings;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// A TOML file with settings: every flag below, without the leading dashes, is a key. Flags take precedence.
    #[arg(long, value_name = "PATH")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) settings: ServeSettings,
}
