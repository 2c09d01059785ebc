//! The command line, as clap reads it. The doc comments are the help text.

use crate::{commands::bench::Lengths, serve::ServeSettings};
use clap::{Args, Parser, Subcommand, ValueEnum};
use dsrun_engine::{
    Precision, Speculation,
    passes::quantize::{Policy, Scheme},
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

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
  dsrun bench latency --model llama-1b --weights random --prompt 128 --gen 32"
)]
pub(crate) struct Arguments {
    /// Print nothing but results and errors.
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
    /// What to log to standard error: error, warn, info, debug, trace, or a filter such as dsrun_engine=debug.
    #[arg(long, global = true, env = "DSRUN_LOG", value_name = "FILTER")]
    pub(crate) log: Option<String>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue a prompt.
    Generate(Generate),
    /// Talk with a model.
    Chat(Chat),
    /// Fetch a model, and print where it is.
    Pull(Pull),
    /// List or remove fetched models.
    Models(Models),
    /// Show a model: configuration, memory plan, tensors, program.
    Inspect(Inspect),
    /// Print the logits of a text, position by position.
    Logits(Logits),
    /// List backends and devices.
    Backends(Backends),
    /// Check what this machine and each backend offer, and whether they work.
    Doctor(Doctor),
    /// Prepare what a backend builds for a model.
    Kernels(Kernels),
    /// Serve a model over HTTP, in the manner of OpenAI's API.
    Serve(Box<Serve>),
    /// Measure speed.
    Bench(Bench),
    /// Measure how good answers are.
    Eval(Eval),
    /// Write a model with its weights rounded to integers, for this and other programs.
    Quantize(Quantize),
}

/// Which model, and where it comes from.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    /// A name (`smollm2`), a path (GGUF file, safetensors file or folder), or a Hugging Face id (`owner/name`,
    /// `owner/name@revision` or `owner/name:file.gguf`). With --weights random also a preset such as llama-1b.
    #[arg(long, short, default_value = dsrun_models::fetch::DEFAULT_MODEL, value_name = "MODEL")]
    pub(crate) model: String,
    /// Where weights come from: the model's file, or made up from its configuration.
    #[arg(long, value_enum, default_value_t = Weights::File)]
    pub(crate) weights: Weights,
    /// Use only what is on this machine.
    #[arg(long)]
    pub(crate) offline: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Weights {
    /// As the model's file has them.
    File,
    /// Random, the same every time.
    Random,
}

/// Which device, and how much of it.
#[derive(Debug, Args)]
pub(crate) struct DeviceArguments {
    /// The backend: a name that `dsrun backends` lists, or the path of a plugin's library or manifest.
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    /// The device of the backend.
    #[arg(long, default_value_t = 0, value_name = "INDEX")]
    pub(crate) device: usize,
    /// Threads a CPU device may use; all cores if not given.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,
}

/// How the engine is set up.
#[derive(Debug, Args)]
pub(crate) struct EngineArguments {
    /// Element type of weights, activations and cache; `keep` leaves weights as the file has them.
    #[arg(long, value_enum, default_value_t = Dtype::Keep)]
    pub(crate) dtype: Dtype,
    /// Tokens a prompt and its answer may have together; the model's limit, at most 2048, if not given. For `eval
    /// perplexity` the tokens of a window, 512 if not given.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) context: Option<usize>,
    /// Tokens a step may process: longer prompts are cut into chunks. 256 if not given; `bench prefill` takes whole prompts.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) step_tokens: Option<usize>,
    /// Run every primitive by itself instead of fused, to compare.
    #[arg(long)]
    pub(crate) no_fuse: bool,
    /// Read every token before the next step is launched, to compare.
    #[arg(long)]
    pub(crate) no_launch_ahead: bool,
    /// Process prompts whole, and before anything is generated, instead of beside it, to compare.
    #[arg(long)]
    pub(crate) prompts_first: bool,
    /// Launch every call by itself instead of capturing steps as graphs, to compare.
    #[arg(long)]
    pub(crate) no_graphs: bool,
    /// Quantise weights as they are loaded: `w8a16`, `w4a16`, `w8a8` (activations too), the name of a format such as
    /// `int4g64z_f16`, or a TOML file that says what becomes of which weight.
    #[arg(long, value_name = "POLICY", value_parser = policy)]
    pub(crate) quantize: Option<Policy>,
}

/// Which model runs on which device, and how: what all commands share that run one.
#[derive(Debug, Args)]
pub(crate) struct SetupArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    #[command(flatten)]
    pub(crate) engine: EngineArguments,
    #[command(flatten)]
    pub(crate) device: DeviceArguments,
}

/// How a benchmark measures and reports.
#[derive(Debug, Args)]
pub(crate) struct MeasureArguments {
    /// How often to measure; the median is shown.
    #[arg(long, default_value_t = 3, value_name = "COUNT", value_parser = positive)]
    pub(crate) repeat: usize,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How tokens are proposed, for commands that generate some.
#[derive(Debug, Default, Args)]
pub(crate) struct SpeculationArguments {
    /// Propose tokens and let the model check several in one step; the answer stays the same. `ngram`, or `ngram:K` for at most
    /// K at a time (7), takes what followed the last tokens where they stood before: that pays where answers repeat the prompt
    /// or themselves (code that is edited, quotes, lists). `draft`, or `draft:K` (4), asks the model of --draft. Pays while few
    /// requests run. Requests with penalties go without.
    #[arg(long, value_name = "HOW")]
    pub(crate) speculate: Option<Speculation>,
    /// A second, much smaller model that proposes tokens (--speculate draft): one with the same tokenizer. Named as for --model,
    /// and found where --weights says.
    #[arg(long, value_name = "MODEL")]
    pub(crate) draft: Option<String>,
}

impl SpeculationArguments {
    /// How tokens are proposed; a second model that is named is used.
    pub(crate) fn speculation(&self) -> Option<Speculation> {
        let draft = Speculation::Draft { tokens: Speculation::DRAFT_TOKENS };
        self.speculate.or(self.draft.is_some().then_some(draft))
    }
}

/// Reads a policy: one way for all weights, or a file.
pub(crate) fn policy(text: &str) -> Result<Policy, String> {
    match text.parse::<Scheme>() {
        Ok(scheme) => Ok(Policy::of(scheme)),
        Err(_) if std::path::Path::new(text).exists() => {
            let file = std::fs::read_to_string(text).map_err(|error| format!("cannot be read: {error}"))?;
            Policy::from_toml(&file).map_err(|error| error.to_string())
        }
        Err(error) => Err(format!("{error}; and there is no such file")),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dtype {
    /// Weights as the file has them.
    Keep,
    /// 32-bit floats.
    F32,
    /// Brain floats.
    Bf16,
    /// 16-bit floats.
    F16,
}

impl From<Dtype> for Precision {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Keep => Self::Keep,
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
            Dtype::F16 => Self::F16,
        }
    }
}

/// How tokens are chosen. What is not given is as the model suggests; greedy if it suggests nothing.
#[derive(Debug, Default, Args)]
pub(crate) struct SamplingArguments {
    /// 0 takes the likeliest token; 1 samples from the model's own distribution.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    #[arg(long, value_name = "COUNT")]
    pub(crate) top_k: Option<u32>,
    /// Keep the likeliest tokens until their probabilities reach this.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least this likely, relative to the likeliest.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Make tokens seen before less likely: divides their logits.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Make tokens generated before less likely: subtracted once.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Make tokens generated before less likely: subtracted for every time.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Seed of the random draws: equal seeds give equal answers.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    pub(crate) seed: u64,
    /// The most tokens of an answer.
    #[arg(long, short = 'n', value_name = "COUNT", value_parser = positive)]
    pub(crate) max_tokens: Option<usize>,
    /// A text that ends the answer; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// The prompt; `-` or nothing reads standard input.
    pub(crate) prompt: Option<String>,
    /// Read the prompt from a file.
    #[arg(long, short, conflicts_with = "prompt", value_name = "PATH")]
    pub(crate) file: Option<PathBuf>,
    /// What the model is told before the prompt, if its chat template takes that.
    #[arg(long, conflicts_with = "raw", value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Continue the bare prompt, without the chat template.
    #[arg(long)]
    pub(crate) raw: bool,
    /// Print one JSON object: text, tokens, finish_reason, timings.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Chat {
    /// What the model is told before the conversation.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// The model, as for --model elsewhere.
    #[arg(default_value = dsrun_models::fetch::DEFAULT_MODEL)]
    pub(crate) model: String,
    /// Use only what is on this machine.
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
    /// Remove a fetched model from the cache.
    Remove {
        /// Its name, as `dsrun models` shows it.
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// List the tensors of the file.
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Print the model as a program of primitive ops.
    #[arg(long)]
    pub(crate) program: bool,
    /// Print the program as it runs on the device, its ops fused.
    #[arg(long, requires = "program", conflicts_with = "no_fuse")]
    pub(crate) fused: bool,
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
    /// The text; special tokens in it are taken as such. `-` reads standard input.
    #[arg(long, required_unless_present = "tokens", conflicts_with = "tokens", value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// Token ids, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "IDS")]
    pub(crate) tokens: Vec<u32>,
    /// How many of the largest logits to print.
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

#[derive(Debug, Args)]
pub(crate) struct Backends {
    /// Also print every place that was searched for plugins, load each plugin (in a process of its own), and print what came
    /// of it.
    #[arg(long)]
    pub(crate) explain: bool,
    /// That process: load the plugin of a file, and print its devices as JSON.
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
    /// They are for the device at hand, or, with --for, for one that is not here. Machines with the same device and libraries may
    /// share the cache.
    Build(KernelsBuild),
}

#[derive(Debug, Args)]
pub(crate) struct KernelsBuild {
    /// Requests that will run side by side.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: usize,
    /// Build for a device that is not here, by a name that the backend knows: h200, say, while an image is made on a machine
    /// without a GPU. A name that it does not know has it list those that it does.
    #[arg(long = "for", visible_alias = "arch", value_name = "DEVICE", conflicts_with_all = ["device", "threads"])]
    pub(crate) absent: Option<String>,
    /// Kernels built at the same time; as many as there are processors if not given.
    #[arg(long, short, value_name = "COUNT", value_parser = positive)]
    pub(crate) jobs: Option<usize>,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// A TOML file with settings: every flag below, without the dashes in front, is a key. Flags win.
    #[arg(long, value_name = "PATH")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) settings: ServeSettings,
}

#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the time to the first token and the time per token.
    Latency(Latency),
    /// Measure what it costs to reach the default backend as a plugin.
    Abi(Abi),
    /// Measure how fast prompts are processed.
    Prefill(Prefill),
    /// Measure how many tokens per second many requests at once get out of the engine.
    Throughput(Throughput),
    /// Measure each kind of call of a step that generates, and how near it is to what memory allows.
    Kernels(BenchKernels),
    /// Measure how fast an OpenAI-compatible server answers, over the load on it.
    Serve(BenchServe),
    /// Draw latency over throughput from what `bench serve --json` printed, of several servers or settings beside each other.
    Plot(BenchPlot),
    /// Load a server of this program for a while, leave now and then, and compare every answer with a solo one.
    Soak(Soak),
}

#[derive(Debug, Args)]
pub(crate) struct Soak {
    /// The server, such as http://localhost:8000.
    pub(crate) url: String,
    /// The key that the server wants to see.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// Clients that ask side by side.
    #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = positive)]
    pub(crate) clients: usize,
    /// How long they go on asking.
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    pub(crate) seconds: u64,
    /// Different questions; each is asked once, alone, in the beginning.
    #[arg(long, default_value_t = 16, value_name = "COUNT", value_parser = positive)]
    pub(crate) questions: usize,
    /// Words of questions: 512, uniform:100-900 or normal:2600/780 (mean and deviation).
    #[arg(long, default_value = "uniform:8-64", value_name = "LENGTHS")]
    pub(crate) prompt: Lengths,
    /// Tokens of answers, in the same form.
    #[arg(long = "gen", default_value = "uniform:8-64", value_name = "LENGTHS")]
    pub(crate) generate: Lengths,
    /// How often clients leave in the middle of an answer: from 0, never, to 1, always.
    #[arg(long, default_value_t = 0.25, value_name = "NUMBER", value_parser = share)]
    pub(crate) leave: f64,
    /// Answers may differ where the best two tokens of the solo answer are closer than this, as logarithms of probabilities.
    #[arg(long, default_value_t = 0.05, value_name = "NUMBER")]
    pub(crate) tolerance: f64,
    /// Seed of questions and clients.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    pub(crate) seed: u64,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchServe {
    /// The server, such as http://localhost:8000.
    pub(crate) url: String,
    /// The model to ask for; the first that the server lists if not given.
    #[arg(long, short, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// The key that the server wants to see.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// Tokens of prompts: 512, uniform:100-900 or normal:2600/780 (mean and deviation).
    #[arg(long, default_value = "512", value_name = "LENGTHS")]
    pub(crate) prompt: Lengths,
    /// The most tokens of answers, in the same form.
    #[arg(long = "gen", default_value = "128", value_name = "LENGTHS")]
    pub(crate) generate: Lengths,
    /// Requests of each load.
    #[arg(long, default_value_t = 128, value_name = "COUNT", value_parser = positive)]
    pub(crate) requests: usize,
    /// Open loop: requests per second that arrive at random, however many are running; several are measured in turn.
    #[arg(long, value_delimiter = ',', value_name = "RATES")]
    pub(crate) rate: Vec<f64>,
    /// Closed loop: clients that each wait for their answer before they ask again; several are measured in turn.
    #[arg(long, value_delimiter = ',', value_name = "COUNTS", value_parser = positive)]
    pub(crate) clients: Vec<usize>,
    /// Requests before the first load, which are not measured.
    #[arg(long, default_value_t = 2, value_name = "COUNT")]
    pub(crate) warm_up: usize,
    /// Ask for chat completions instead of completions; prompts are words then.
    #[arg(long)]
    pub(crate) chat: bool,
    /// Send prompts as words instead of tokens, for servers that take no tokens.
    #[arg(long)]
    pub(crate) text: bool,
    /// Tokens of prompts are drawn below this.
    #[arg(long, default_value_t = 10_000, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) vocabulary: u32,
    /// Ask for the ids of tokens too, for models without a tokenizer; the server must know the field `return_token_ids`.
    #[arg(long, conflicts_with = "chat")]
    pub(crate) token_ids: bool,
    /// Ask for answers that go on past the model's end tokens; the server must know the field `ignore_eos`.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Service level: the first token must come within the prompt's length over this many tokens per second.
    #[arg(long, default_value_t = 512.0, value_name = "NUMBER")]
    pub(crate) sla_prompt: f64,
    /// Service level: tokens per second from there on.
    #[arg(long, default_value_t = 4.0, value_name = "NUMBER")]
    pub(crate) sla_gen: f64,
    /// Seconds after which a request counts as failed.
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub(crate) timeout: u64,
    /// Seed of lengths, prompts and arrivals.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    pub(crate) seed: u64,
    /// Draw latency over throughput, as SVG.
    #[arg(long, value_name = "PATH")]
    pub(crate) plot: Option<PathBuf>,
    /// What the plot calls this run; the model's name if not given.
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchPlot {
    /// Files that `bench serve --json` has written. Those of equal labels (--label) are drawn as one curve.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) runs: Vec<PathBuf>,
    /// The picture to write, as SVG.
    #[arg(long, short, value_name = "PATH")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Prefill {
    /// Tokens of the prompts to measure, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "128,512", value_name = "TOKENS", value_parser = positive)]
    pub(crate) prompt: Vec<usize>,
    /// Prompts that run side by side.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: usize,
    /// Seconds without work in front of each run: what a prompt takes on a device that was idle. Runs that follow each other
    /// bring a device to its power limit, where it lowers its clock.
    #[arg(long, default_value_t = 0, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=60))]
    pub(crate) pause: u64,
    #[command(flatten)]
    pub(crate) measure: MeasureArguments,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Throughput {
    /// Requests that come at once.
    #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = positive)]
    pub(crate) requests: usize,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = positive)]
    pub(crate) prompt: usize,
    /// Tokens to generate for each request.
    #[arg(long = "gen", default_value_t = 128, value_name = "TOKENS", value_parser = positive)]
    pub(crate) generate: usize,
    /// Requests that run side by side; all of them if not given.
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: Option<usize>,
    /// Tokens that the KV cache holds; as many as all requests need, or as fit into memory, if not given.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) kv_tokens: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}

#[derive(Debug, Args)]
pub(crate) struct BenchKernels {
    /// Requests that generate side by side.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: usize,
    /// Tokens that each request has already.
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = positive)]
    pub(crate) past: usize,
    #[command(flatten)]
    pub(crate) measure: MeasureArguments,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Latency {
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = positive)]
    pub(crate) prompt: usize,
    /// Tokens to generate for each prompt.
    #[arg(long = "gen", default_value_t = 64, value_name = "TOKENS", value_parser = at_least_two)]
    pub(crate) generate: usize,
    /// Prompts that run side by side.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: usize,
    #[command(flatten)]
    pub(crate) measure: MeasureArguments,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Abi {
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = positive)]
    pub(crate) prompt: usize,
    /// Steps to measure in a run: tokens to generate.
    #[arg(long, default_value_t = 200, value_name = "COUNT", value_parser = positive)]
    pub(crate) steps: usize,
    /// Runs.
    #[arg(long, default_value_t = 3, value_name = "COUNT", value_parser = positive)]
    pub(crate) repeat: usize,
    /// The library or manifest of the default backend as a plugin, if it is not installed.
    #[arg(long, value_name = "PATH")]
    pub(crate) plugin: Option<PathBuf>,
    /// Threads a CPU device may use; all cores if not given.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    #[command(flatten)]
    pub(crate) engine: EngineArguments,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["policy", "budget"]))]
pub(crate) struct Quantize {
    /// The model, as for --model elsewhere.
    #[arg(default_value = dsrun_models::fetch::DEFAULT_MODEL)]
    pub(crate) model: String,
    /// What is rounded to what: a word (`w8a16`, `w8a8`, `w4a16`, `keep`), the name of a format, or a TOML file.
    #[arg(long, value_name = "POLICY", value_parser = policy)]
    pub(crate) policy: Option<Policy>,
    /// Instead of a policy: choose a format of 4 or 8 bits for each weight, so that one takes at most this many bits on
    /// average, scales included (4.5, for example).
    #[arg(long, value_name = "BITS")]
    pub(crate) budget: Option<f64>,
    /// Write the policy that was chosen, not the model.
    #[arg(long, conflicts_with = "policy")]
    pub(crate) policy_only: bool,
    /// The folder to write, or with --policy-only the file. It must not be there.
    #[arg(long, short, value_name = "PATH")]
    pub(crate) output: PathBuf,
    /// Element type of matrices that are not rounded to integers; `keep` leaves them as they are, and turns blocks of GGUF
    /// files into f16.
    #[arg(long, value_enum, default_value_t = Dtype::Keep)]
    pub(crate) dtype: Dtype,
    /// Use only what is on this machine.
    #[arg(long)]
    pub(crate) offline: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) device: DeviceArguments,
}

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
    /// Only so many windows from the start of the text.
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    pub(crate) chunks: Option<usize>,
    /// Begin a window every so many tokens, and count its last so many. Without it windows follow each other, and the second
    /// half of each counts.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) stride: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        other => other.map_err(|_| "must be a whole number".into()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("must be a number from 0 to 1".into()),
    }
}

fn at_least_two(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0 | 1) => Err("must be at least 2: the time per token is measured between tokens".into()),
        other => other.map_err(|_| "must be a whole number".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
