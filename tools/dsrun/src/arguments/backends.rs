//! Arguments of `dsrun backends`, `doctor` and `kernels`.

use super::{
    setup::{SetupArguments, SpeculationArguments},
    values::positive,
};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct Backends {
    /// Also print every folder that was searched for plugins, load each plugin in a separate process, and print its devices or
    /// its error.
    #[arg(long)]
    pub(crate) explain: bool,
    /// Used by --explain for that process: load the plugin of a file, and print its devices as JSON.
    #[arg(long, hide = true, exclusive = true, value_name = "PATH")]
    pub(crate) probe: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Check this backend only: a name that `dsrun backends` lists, or the path of a plugin's library or manifest.
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    /// Also measure and check data exchange between these devices of the backend, such as `0,1`, or between `all`.
    #[arg(long, value_name = "INDICES")]
    pub(crate) devices: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Kernels {
    #[command(subcommand)]
    pub(crate) command: KernelsCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KernelsCommand {
    /// Build the kernels that a model needs on a device, so that the first request does not wait for them.
    ///
    /// Kernels are built for the device of this machine, or with --for for another one. Machines with the same device and libraries
    /// may share the cache.
    Build(KernelsBuild),
}

#[derive(Debug, Args)]
pub(crate) struct KernelsBuild {
    /// The maximum number of requests that will run at the same time.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: usize,
    /// Build for a device of another machine, by a name that the backend knows, such as h200: for example for a container image
    /// built on a machine without a GPU. An unknown name prints the known ones.
    #[arg(long = "for", visible_alias = "arch", value_name = "DEVICE", conflicts_with_all = ["device", "threads", "tp", "pp", "mesh", "devices", "batch_invariant"])]
    pub(crate) absent: Option<String>,
    /// Number of kernels built at the same time; the number of processors if not given.
    #[arg(long, short, value_name = "COUNT", value_parser = positive)]
    pub(crate) jobs: Option<usize>,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}
