//! Arguments of `dsrun quantize`.

use super::setup::{DeviceArguments, Dtype, policy};
use clap::Args;
use dsrun_engine::passes::quantize::Policy;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["policy", "budget"]))]
pub(crate) struct Quantize {
    /// The model, as for --model elsewhere.
    #[arg(default_value = dsrun_models::fetch::DEFAULT_MODEL)]
    pub(crate) model: String,
    /// The policy: a scheme (`w8a16`, `w8a8`, `w4a16`, `keep`), the name of a format, or a TOML file.
    #[arg(long, value_name = "POLICY", value_parser = policy)]
    pub(crate) policy: Option<Policy>,
    /// Instead of a policy: choose a format of 4 or 8 bits for each weight, with at most this many bits for a weight on average,
    /// scales included (4.5, for example).
    #[arg(long, value_name = "BITS")]
    pub(crate) budget: Option<f64>,
    /// Write the chosen policy, not the model.
    #[arg(long, conflicts_with = "policy")]
    pub(crate) policy_only: bool,
    /// The folder to write, or with --policy-only the file. It must not exist.
    #[arg(long, short, value_name = "PATH")]
    pub(crate) output: PathBuf,
    /// Element type of matrices that are not quantised; `keep` keeps their types, and converts GGUF blocks to f16.
    #[arg(long, value_enum, default_value_t = Dtype::Keep)]
    pub(crate) dtype: Dtype,
    /// Use only files on this machine.
    #[arg(long)]
    pub(crate) offline: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) device: DeviceArguments,
}
