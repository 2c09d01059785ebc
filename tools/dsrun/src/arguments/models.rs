//! Arguments of `dsrun pull`, `models`, `inspect` and `logits`.

use super::{
    setup::{SetupArguments, SpeculationArguments},
    values::positive,
};
use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// The model, as for --model elsewhere.
    #[arg(default_value = dsrun_models::fetch::DEFAULT_MODEL)]
    pub(crate) model: String,
    /// Use only files on this machine.
    #[arg(long)]
    pub(crate) offline: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Models {
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Option<ModelsCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelsCommand {
    /// List the fetched models, as without a command.
    List,
    /// Remove a fetched model from the cache.
    Remove {
        /// The name that `dsrun models` shows.
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// The model: the same as --model, over which it takes precedence.
    #[arg(value_name = "MODEL")]
    pub(crate) given_model: Option<String>,
    /// List the tensors of the file.
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Print the model as a program of primitive ops.
    #[arg(long)]
    pub(crate) program: bool,
    /// Print the program with the fused ops that steps of every size share on the device.
    #[arg(long, conflicts_with = "no_fuse")]
    pub(crate) fused: bool,
    /// Print the program of a step of this many tokens: every call is one that the device runs in this step.
    #[arg(long, conflicts_with = "fused", value_name = "TOKENS", value_parser = positive)]
    pub(crate) step: Option<usize>,
    /// The number of requests in the step, each of which samples a token; memory is planned for as many.
    #[arg(long, requires = "step", value_name = "COUNT", default_value_t = 1, value_parser = positive)]
    pub(crate) requests: usize,
    /// Plan for a device of another machine, by a name that the backend knows, such as h200. An unknown name prints the known ones.
    #[arg(long = "for", value_name = "DEVICE", conflicts_with_all = ["device", "threads", "tp", "pp", "mesh", "devices", "batch_invariant"])]
    pub(crate) absent: Option<String>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Logits {
    /// The model: the same as --model, over which it takes precedence.
    #[arg(value_name = "MODEL")]
    pub(crate) given_model: Option<String>,
    /// The text; special tokens in it are parsed as such. `-` reads standard input.
    #[arg(long, required_unless_present = "tokens", conflicts_with = "tokens", value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// Token ids, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "IDS")]
    pub(crate) tokens: Vec<u32>,
    /// Number of the largest logits to print.
    #[arg(long, default_value_t = 10, value_name = "COUNT")]
    pub(crate) top: usize,
    /// Only these positions, counted from 0, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "POSITIONS")]
    pub(crate) at: Vec<usize>,
    /// Print one JSON object: tokens, mean_nll, positions.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
}
