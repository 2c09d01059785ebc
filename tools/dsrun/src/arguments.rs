//! The command line, as clap parses it. The doc comments are the help text.

mod backends;
mod bench;
mod eval;
mod generate;
mod lengths;
mod models;
mod names;
mod plan;
mod quantize;
mod serve;
mod setup;
mod shell;
mod values;

pub(crate) use backends::{Backends, Doctor, Kernels, KernelsBuild, KernelsCommand};
pub(crate) use bench::{
    Abi, Bench, BenchAllReduce, BenchCommand, BenchKernels, BenchPlot, BenchServe, Latency, Prefill, Soak,
    Throughput,
};
use clap::{Parser, Subcommand};
pub(crate) use eval::{Eval, EvalCommand, Perplexity};
pub(crate) use generate::{Chat, Generate};
pub(crate) use lengths::Lengths;
pub(crate) use models::{Inspect, Logits, Models, ModelsCommand, Pull};
pub(crate) use names::{command as command_line, parse};
pub(crate) use plan::Plan;
pub(crate) use quantize::Quantize;
pub(crate) use serve::{AccessLog, Serve, ServeSettings};
pub(crate) use setup::{
    CacheDtype, DeviceArguments, DevicesArguments, Dtype, EngineArguments, LauncherName, ModelArguments,
    SamplingArguments, SpeculationArguments, Weights, mesh, policy, shard_policy,
};
pub(crate) use shell::{Completions, Man};
pub(crate) use values::MemorySize;

/// Generate text with transformer models.
#[derive(Debug, Parser)]
#[command(
    name = "dsrun",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  dsrun generate \"Why is the sky blue?\"
  dsrun chat --model path/to/model.gguf
  dsrun bench latency --model llama-1b --weights random --prompt 128 --gen 32

Every flag can also be given by an environment variable: --max-tokens by DSRUN_MAX_TOKENS, and so on."
)]
pub(crate) struct Arguments {
    /// Print only results and errors.
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
    /// What to log to standard error: error, warn, info, debug, trace, or a filter such as dsrun_engine=debug.
    #[arg(long, global = true, env = "DSRUN_LOG", value_name = "FILTER", value_parser = values::log_filter)]
    pub(crate) log: Option<String>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue a prompt.
    Generate(Generate),
    /// Chat with a model.
    Chat(Chat),
    /// Fetch a model, and print its path.
    Pull(Pull),
    /// List or remove fetched models.
    Models(Models),
    /// Show a model: configuration, memory plan, tensors, program.
    Inspect(Inspect),
    /// Predict memory and speed of a model on devices that need not be present.
    Plan(Plan),
    /// Print the logits of a text, position by position.
    Logits(Logits),
    /// List backends and devices.
    Backends(Backends),
    /// Check whether this machine and each backend work.
    Doctor(Doctor),
    /// Build the kernels of a model ahead of time.
    Kernels(Kernels),
    /// Serve a model over HTTP with OpenAI's API.
    Serve(Box<Serve>),
    /// Measure speed.
    Bench(Bench),
    /// Measure the quality of a model.
    Eval(Eval),
    /// Write a model with quantised weights, for dsrun and other programs.
    Quantize(Quantize),
    /// Print the script with which a shell completes the command line.
    Completions(Completions),
    /// Print the manual page, or write those of all commands to a folder.
    Man(Man),
}

impl Command {
    /// Lets a model that is given without a flag take the place of the flag.
    fn take_given_model(&mut self) {
        let (given, setup) = match self {
            Self::Chat(command) => (command.given_model.take(), &mut command.setup),
            Self::Inspect(command) => (command.given_model.take(), &mut command.setup),
            Self::Logits(command) => (command.given_model.take(), &mut command.setup),
            _ => return,
        };
        if let Some(model) = given {
            setup.model.model = model;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        names::command().debug_assert();
    }
}
