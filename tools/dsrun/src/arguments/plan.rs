//! Arguments of `dsrun plan`.

use super::{
    setup::{Dtype, Mesh, mesh_within, policy},
    values::positive,
};
use clap::Args;
use dsrun_engine::{KvIn, passes::quantize::Policy};
use std::path::PathBuf;

/// The most ranks of a stage, and the most stages, of a plan.
const MOST: u16 = 1024;

fn planned_mesh(text: &str) -> Result<Mesh, String> {
    mesh_within(text, MOST)
}

#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// The model, as for --model elsewhere, or a preset such as llama-70b, whose weights are not needed.
    #[arg(default_value = dsrun_models::fetch::DEFAULT_MODEL)]
    pub(crate) model: String,
    /// The number of devices.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = positive)]
    pub(crate) devices: usize,
    /// One mesh only, such as `tp=2,pp=2`: ranks of each stage, and stages. If not given, all meshes of the devices are shown, the
    /// fastest first.
    #[arg(long, value_name = "AXES", value_parser = planned_mesh)]
    pub(crate) mesh: Option<Mesh>,
    /// The kind of device: a100, h100, h200, b200, l40s, rtx-4090, rtx-5090, or host for ranks that share a CPU.
    #[arg(long, value_name = "NAME", default_value = "h100")]
    pub(crate) device: String,
    /// Gigabytes of memory of a device, instead of the value for its kind.
    #[arg(long, value_name = "GB")]
    pub(crate) memory: Option<f64>,
    /// Gigabytes per second that a device reads from its memory.
    #[arg(long, value_name = "GB/S")]
    pub(crate) memory_bandwidth: Option<f64>,
    /// Floating-point operations per second of a device, in trillions.
    #[arg(long, value_name = "TFLOPS")]
    pub(crate) operations: Option<f64>,
    /// Gigabytes per second that a device exchanges with others.
    #[arg(long, value_name = "GB/S")]
    pub(crate) link_bandwidth: Option<f64>,
    /// Microseconds of an exchange, besides its bytes.
    #[arg(long, value_name = "MICROSECONDS")]
    pub(crate) latency_us: Option<f64>,
    /// Gigabytes per second that a device copies from host memory, for models that do not fit on the devices.
    #[arg(long, value_name = "GB/S")]
    pub(crate) host_bandwidth: Option<f64>,
    /// Devices of a host, if the devices are those of several hosts with a network between them.
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    pub(crate) per_host: Option<usize>,
    /// Gigabytes per second that a device exchanges with those of other hosts; 50 if not given.
    #[arg(long, value_name = "GB/S", requires = "per_host")]
    pub(crate) network_bandwidth: Option<f64>,
    /// Microseconds of an exchange between hosts, besides its bytes; 12 if not given.
    #[arg(long, value_name = "MICROSECONDS", requires = "per_host")]
    pub(crate) network_latency_us: Option<f64>,
    /// Number of requests that generate at the same time.
    #[arg(long, short, value_name = "REQUESTS", default_value_t = 1, value_parser = positive)]
    pub(crate) batch: usize,
    /// Tokens of each request in the KV cache; the model's limit, at most 2048, if not given.
    #[arg(long, short = 'c', value_name = "TOKENS", value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// Tokens of a prompt; half of the context if not given.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) prompt: Option<usize>,
    /// Maximum number of tokens of a step; 256 for each 4 GiB of the device's memory, up to 2048, if not given.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) step_tokens: Option<usize>,
    /// Divide prompts and generating requests into this many micro-batches, instead of many for prompts and one for each stage for
    /// requests that generate.
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    pub(crate) micro_batches: Option<usize>,
    /// Element type of weights, activations and cache; `keep` uses the weights' types in the file.
    #[arg(long, value_enum, default_value_t = Dtype::Keep)]
    pub(crate) dtype: Dtype,
    /// How weights are quantised when they are loaded: a scheme such as w4a16, or the path of a policy.
    #[arg(long, value_name = "SCHEME", value_parser = policy)]
    pub(crate) quantize: Option<Policy>,
    /// Where the KV cache is kept: `host` keeps that of layers that do not fit on the device in host memory, where generation reads it.
    #[arg(long, default_value_t = KvIn::Device, value_name = "device|host")]
    pub(crate) kv_in: KvIn,
    /// Print the bottleneck of each stage of the first mesh, and how its number of micro-batches compares with others.
    #[arg(long)]
    pub(crate) explain: bool,
    /// Draw a timeline of the stages of the first mesh as SVG: the prompts of all requests, and answers of 16 tokens.
    #[arg(long, value_name = "PATH")]
    pub(crate) timeline: Option<PathBuf>,
    /// Use only files on this machine.
    #[arg(long)]
    pub(crate) offline: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
