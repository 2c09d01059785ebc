//! Arguments of `dsrun generate` and `dsrun chat`.

use super::setup::{SamplingArguments, SetupArguments, SpeculationArguments};
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// The prompt; `-` or nothing reads standard input.
    pub(crate) prompt: Option<String>,
    /// Read the prompt from a file.
    #[arg(long, short, conflicts_with = "prompt", value_name = "PATH")]
    pub(crate) file: Option<PathBuf>,
    /// The system message before the prompt, if the chat template has one.
    #[arg(long, conflicts_with = "raw", value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Continue the prompt without the chat template.
    #[arg(long)]
    pub(crate) raw: bool,
    /// Print one JSON object: text, tokens, finish_reason, timings.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write what each rank runs when, as a file that Perfetto and Chrome's trace viewer open. Calls are then launched one by one. If
    /// there are several processes, each writes a file, with its number after the name.
    #[arg(long, value_name = "PATH")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Chat {
    /// The model: the same as --model, over which it takes precedence.
    #[arg(value_name = "MODEL")]
    pub(crate) given_model: Option<String>,
    /// The system message before the conversation.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}
