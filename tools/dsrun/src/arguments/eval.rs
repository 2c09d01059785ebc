//! Arguments of `dsrun eval`.

use super::{setup::SetupArguments, values::positive};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct Eval {
    #[command(subcommand)]
    pub(crate) command: EvalCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// Measure how well a model predicts a text, as llama.cpp's perplexity does.
    Perplexity(Perplexity),
}

#[derive(Debug, Args)]
pub(crate) struct Perplexity {
    /// The text; `-` reads standard input. Special tokens in it are plain text.
    pub(crate) file: PathBuf,
    /// The number of windows from the start of the text; all if not given.
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    pub(crate) chunks: Option<usize>,
    /// The distance between the starts of windows, and the number of tokens at the end of each that are counted. If not given,
    /// windows do not overlap, and the second half of each is counted.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) stride: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
}
