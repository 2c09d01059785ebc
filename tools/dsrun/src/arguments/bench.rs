//! Arguments of `dsrun bench`.

use super::{
    lengths::Lengths,
    setup::{DevicesArguments, Dtype, EngineArguments, ModelArguments, SetupArguments, SpeculationArguments},
    values::{MemorySize, at_least_two, positive, share, whole},
};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the time to the first token and the time per token.
    Latency(Latency),
    /// Measure the overhead of the default backend as a plugin.
    Abi(Abi),
    /// Measure how fast prompts are processed, or the texts of an encoder.
    Prefill(Prefill),
    /// Measure the tokens per second of many requests at once.
    Throughput(Throughput),
    /// Measure each kind of call of a decode step, and how close it is to the memory bandwidth. Larger regions that a device
    /// runs in one launch for small batches are measured call by call.
    Kernels(BenchKernels),
    /// Measure all-reduces over several devices, for tensors of several sizes.
    AllReduce(BenchAllReduce),
    /// Measure the latency of an OpenAI-compatible server under load.
    Serve(BenchServe),
    /// Draw latency over throughput from the output of `bench serve --json`, for several servers or settings.
    Plot(BenchPlot),
    /// Put load on a dsrun server, with clients that disconnect now and then, and compare every answer with that of an idle
    /// server.
    Soak(Soak),
}

/// Repeats and output of a benchmark.
#[derive(Debug, Args)]
pub(crate) struct MeasureArguments {
    /// The number of measurements; the median is shown.
    #[arg(long, default_value_t = 3, value_name = "COUNT", value_parser = positive)]
    pub(crate) repeat: usize,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Latency {
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = positive)]
    pub(crate) prompt: usize,
    /// Tokens to generate for each prompt.
    #[arg(long = "gen", default_value_t = 64, value_name = "TOKENS", value_parser = at_least_two)]
    pub(crate) generate: usize,
    /// Number of prompts that run at the same time.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: usize,
    /// Write what each rank runs when, as a file that Perfetto and Chrome's trace viewer open. Calls are then launched one by one. If
    /// there are several processes, each writes a file, with its number after the name.
    #[arg(long, value_name = "PATH")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) measure: MeasureArguments,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Prefill {
    /// Tokens of the prompts to measure, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "128,512", value_name = "TOKENS", value_parser = positive)]
    pub(crate) prompt: Vec<usize>,
    /// Number of prompts that run at the same time.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: usize,
    /// Seconds of idle time before each run, to measure a prompt on a device that was idle. Runs in quick succession bring a device
    /// to its power limit, where it lowers its clock.
    #[arg(long, default_value_t = 0, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=60))]
    pub(crate) pause: u64,
    #[command(flatten)]
    pub(crate) measure: MeasureArguments,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
}

#[derive(Debug, Args)]
pub(crate) struct Throughput {
    /// Requests that are submitted at once.
    #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = positive)]
    pub(crate) requests: usize,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = positive)]
    pub(crate) prompt: usize,
    /// Tokens to generate for each request.
    #[arg(long = "gen", default_value_t = 128, value_name = "TOKENS", value_parser = positive)]
    pub(crate) generate: usize,
    /// Number of requests that run at the same time; all of them if not given.
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: Option<usize>,
    /// Tokens that the KV cache holds; as many as all requests need, or as fit into memory, if not given.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) kv_tokens: Option<usize>,
    /// Tokens of KV cache that are swapped to host memory when a request is pre-empted; beyond that they are recomputed. 0 if not
    /// given.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) swap_tokens: Option<usize>,
    /// Write what each rank runs when, as a file that Perfetto and Chrome's trace viewer open. Calls are then launched one by one. If
    /// there are several processes, each writes a file, with its number after the name.
    #[arg(long, value_name = "PATH")]
    pub(crate) trace: Option<PathBuf>,
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
    /// Number of requests that generate at the same time.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = positive)]
    pub(crate) batch: usize,
    /// Tokens of context of each request.
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = positive)]
    pub(crate) past: usize,
    #[command(flatten)]
    pub(crate) measure: MeasureArguments,
    #[command(flatten)]
    pub(crate) setup: SetupArguments,
}

#[derive(Debug, Args)]
pub(crate) struct BenchAllReduce {
    /// Bytes of each rank's tensor, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    #[arg(default_value = "1KiB,4KiB,16KiB,64KiB,256KiB,512KiB,1MiB,2MiB,4MiB,8MiB,16MiB")]
    pub(crate) size: Vec<MemorySize>,
    /// The type of the elements.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16, value_name = "TYPE")]
    pub(crate) dtype: Dtype,
    /// Measure nothing, but compare so many all-reduces of each size with the sums of the ranks' numbers, bit by bit, while ranks are
    /// late at random.
    #[arg(long, value_name = "COUNT", value_parser = positive, conflicts_with = "repeat")]
    pub(crate) check: Option<usize>,
    #[command(flatten)]
    pub(crate) measure: MeasureArguments,
    #[command(flatten)]
    pub(crate) devices: DevicesArguments,
}

#[derive(Debug, Args)]
pub(crate) struct BenchServe {
    /// The server, such as http://localhost:8000.
    pub(crate) url: String,
    /// The model to request; the first that the server lists if not given.
    #[arg(long, short, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// The API key of the server.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// Tokens of prompts: 512, uniform:100-900 or normal:2600/780 (mean and deviation). If neither this nor --gen is given, 512 and
    /// 128, or less on a server that is too slow for several such requests within a load.
    #[arg(long, value_name = "LENGTHS")]
    pub(crate) prompt: Option<Lengths>,
    /// The most tokens of answers, in the same form; 128 if not given.
    #[arg(long = "gen", value_name = "LENGTHS")]
    pub(crate) generate: Option<Lengths>,
    /// Requests of each load; as many as end within --seconds if not given.
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    pub(crate) requests: Option<usize>,
    /// Seconds of each load, if --requests is not given. Every client sends at least one request.
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    #[arg(conflicts_with = "requests")]
    pub(crate) seconds: u64,
    /// Open loop: requests per second that arrive at random, however many are running; several rates are measured in turn.
    #[arg(long, value_delimiter = ',', value_name = "RATES")]
    pub(crate) rate: Vec<f64>,
    /// Closed loop: number of clients, each of which waits for its answer before its next request; several numbers are measured
    /// in turn.
    #[arg(long, value_delimiter = ',', value_name = "COUNTS", value_parser = positive)]
    pub(crate) clients: Vec<usize>,
    /// Requests before the first load that are not measured.
    #[arg(long, default_value_t = 2, value_name = "COUNT")]
    pub(crate) warm_up: usize,
    /// Request chat completions instead of completions; prompts are then words.
    #[arg(long)]
    pub(crate) chat: bool,
    /// Send prompts as words instead of tokens, for servers that do not accept tokens.
    #[arg(long)]
    pub(crate) text: bool,
    /// Token ids of prompts are drawn below this.
    #[arg(long, default_value_t = 10_000, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) vocabulary: u32,
    /// Request the ids of tokens, too, for models without a tokenizer; the server must support the field `return_token_ids`.
    #[arg(long, conflicts_with = "chat")]
    pub(crate) token_ids: bool,
    /// Request answers that continue past the model's end tokens; the server must support the field `ignore_eos`.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Service level: the first token must arrive within the prompt's length divided by this many tokens per second.
    #[arg(long, default_value_t = 512.0, value_name = "NUMBER")]
    pub(crate) sla_prompt: f64,
    /// Service level: tokens per second after the first token.
    #[arg(long, default_value_t = 4.0, value_name = "NUMBER")]
    pub(crate) sla_gen: f64,
    /// Seconds after which a request is counted as failed.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = whole)]
    pub(crate) timeout: u64,
    /// Seed of lengths, prompts and arrivals.
    #[arg(long, default_value_t = 0, value_name = "NUMBER", value_parser = whole)]
    pub(crate) seed: u64,
    /// Draw latency over throughput, as SVG.
    #[arg(long, value_name = "PATH")]
    pub(crate) plot: Option<PathBuf>,
    /// The name of this run in the plot; the model's name if not given.
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchPlot {
    /// Files with the output of `bench serve --json`. Files of equal labels (--label) are drawn as one curve.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) runs: Vec<PathBuf>,
    /// The picture to write, as SVG.
    #[arg(long, short, value_name = "PATH")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Soak {
    /// The server, such as http://localhost:8000.
    pub(crate) url: String,
    /// The API key of the server.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// Number of concurrent clients.
    #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = positive)]
    pub(crate) clients: usize,
    /// Duration in seconds.
    #[arg(long, default_value_t = 120, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    pub(crate) seconds: u64,
    /// Number of different questions; each is first asked once on the idle server.
    #[arg(long, default_value_t = 16, value_name = "COUNT", value_parser = positive)]
    pub(crate) questions: usize,
    /// Words of questions: 512, uniform:100-900 or normal:2600/780 (mean and deviation).
    #[arg(long, default_value = "uniform:8-64", value_name = "LENGTHS")]
    pub(crate) prompt: Lengths,
    /// Tokens of answers, in the same form.
    #[arg(long = "gen", default_value = "uniform:8-64", value_name = "LENGTHS")]
    pub(crate) generate: Lengths,
    /// The share of answers during which clients disconnect, from 0 to 1.
    #[arg(long, default_value_t = 0.25, value_name = "NUMBER", value_parser = share)]
    pub(crate) leave: f64,
    /// Answers may differ where the two best tokens of the solo answer are closer than this, in log probabilities.
    #[arg(long, default_value_t = 0.05, value_name = "NUMBER")]
    pub(crate) tolerance: f64,
    /// Compare the log-probabilities of tokens, too, without any tolerance, and sample every other answer. The server needs
    /// --batch-invariant for this.
    #[arg(long, conflicts_with = "tolerance")]
    pub(crate) bits: bool,
    /// Ask with token ids instead of words, for models without a tokenizer.
    #[arg(long)]
    pub(crate) token_ids: bool,
    /// Token ids of questions are below this.
    #[arg(long, default_value_t = 1000, requires = "token_ids", value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) vocabulary: u32,
    /// Seed of questions and clients.
    #[arg(long, default_value_t = 0, value_name = "NUMBER", value_parser = whole)]
    pub(crate) seed: u64,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Abi {
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = positive)]
    pub(crate) prompt: usize,
    /// Steps to measure per run: tokens to generate.
    #[arg(long, default_value_t = 200, value_name = "COUNT", value_parser = positive)]
    pub(crate) steps: usize,
    /// Runs.
    #[arg(long, default_value_t = 3, value_name = "COUNT", value_parser = positive)]
    pub(crate) repeat: usize,
    /// The library or manifest of the default backend's plugin, if it is not installed.
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
