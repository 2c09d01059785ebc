//! Arguments that several commands share: which model, on which device, and how it runs.

use super::values::{MemorySize, kept_tokens, positive, whole};
use clap::{Args, ValueEnum};
use dsrun_engine::{
    CachePrecision, ExpertsIn, KvIn, Launcher, Precision, Speculation, WeightsIn,
    passes::{
        partition::PipelineOptions,
        quantize::{Policy, Scheme},
        shard::ShardPolicy,
    },
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The model, the engine and the devices, for all commands that run a model.
#[derive(Debug, Args)]
pub(crate) struct SetupArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    #[command(flatten)]
    pub(crate) engine: EngineArguments,
    #[command(flatten)]
    pub(crate) devices: DevicesArguments,
}

/// The model, and the source of its weights.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArguments {
    /// A name (`smollm2`), a path (GGUF file or any part of one, safetensors file, or folder), or a Hugging Face id (`owner/name`,
    /// `owner/name@revision`, `owner/name:file.gguf` or `owner/name:Q4_K_M`). With --weights random also a preset such as llama-1b.
    #[arg(long, short, default_value = dsrun_models::fetch::DEFAULT_MODEL, value_name = "MODEL")]
    pub(crate) model: String,
    /// Where weights come from: the model's file, or random numbers in the shapes of its configuration.
    #[arg(long, value_enum, default_value_t = Weights::File)]
    pub(crate) weights: Weights,
    /// Use only files on this machine.
    #[arg(long)]
    pub(crate) offline: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Weights {
    /// The weights of the model's file.
    File,
    /// Random weights, the same every time.
    Random,
}

/// The device, and how much of it is used.
#[derive(Debug, Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArguments {
    /// The backend: a name that `dsrun backends` lists, or the path of a plugin's library or manifest. If not given, an accelerator
    /// whose plugin is installed, or else the CPU.
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    /// The device of the backend.
    #[arg(long, default_value_t = 0, value_name = "INDEX")]
    pub(crate) device: usize,
    /// Threads a CPU device may use; all cores if not given.
    #[arg(long, short, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,
    /// Memory of the device that may be used, such as `20GB` or `8GiB`; all free memory if not given. With several devices, of
    /// each.
    #[arg(long, value_name = "SIZE")]
    pub(crate) gpu_memory: Option<MemorySize>,
}

/// The heading of the options for several devices in the help.
const SEVERAL: &str = "Several devices";

/// One device, or several that a model is split over.
#[derive(Debug, Args)]
pub(crate) struct DevicesArguments {
    #[command(flatten)]
    pub(crate) device: DeviceArguments,
    /// Give bit-identical answers whatever else runs, with the kernels of the device that guarantee this; refuse a device that has
    /// none.
    #[arg(long)]
    pub(crate) batch_invariant: bool,
    /// Split the model over this many ranks by tensor parallelism: consecutive devices from --device on. Ranks on the CPU share its
    /// threads and its memory.
    #[arg(help_heading = SEVERAL, long, alias = "tensor-parallel-size", value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) tp: Option<u16>,
    /// Divide the layers into this many stages on separate devices, which work on different requests at the same time
    /// (pipeline parallelism). With --tp, each stage has that many ranks.
    #[arg(help_heading = SEVERAL, long, alias = "pipeline-parallel-size", value_name = "STAGES", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) pp: Option<u16>,
    /// The ranks of each stage and the stages in one flag, such as `tp=2,pp=2`.
    #[arg(help_heading = SEVERAL, long, value_name = "AXES", value_parser = mesh, conflicts_with_all = ["tp", "pp"])]
    pub(crate) mesh: Option<Mesh>,
    /// The first layer of each stage but the first, such as `8,20`; balanced by their costs if not given.
    #[arg(help_heading = SEVERAL, long, value_delimiter = ',', value_name = "LAYERS")]
    pub(crate) stages: Vec<usize>,
    /// Divide both prompts and generating requests into this many micro-batches, for comparison. By default a prompt has many, and
    /// requests that generate have one for each stage.
    #[arg(help_heading = SEVERAL, long, value_name = "COUNT", value_parser = positive)]
    pub(crate) micro_batches: Option<usize>,
    /// Split the model over these devices, such as `0,1`: one rank on each.
    #[arg(help_heading = SEVERAL, long, value_delimiter = ',', value_name = "INDICES", conflicts_with = "device")]
    pub(crate) devices: Vec<usize>,
    /// Let ranks share --device if there are too few devices, and divide its memory. This is slower than one rank: it is for
    /// testing a split.
    #[arg(help_heading = SEVERAL, long, conflicts_with = "devices")]
    pub(crate) share_device: bool,
    /// A TOML file that pins how weights are split over ranks; a search decides about all others.
    #[arg(help_heading = SEVERAL, long, value_name = "PATH", value_parser = shard_policy)]
    pub(crate) shard: Option<ShardPolicy>,
    /// The launcher that started several processes of this command, each with some of the ranks.
    #[arg(help_heading = SEVERAL, long, value_enum, default_value_t = LauncherName::Auto, value_name = "NAME")]
    pub(crate) launcher: LauncherName,
    /// The host and port where the processes meet; that of the launcher if not given.
    #[arg(help_heading = SEVERAL, long, value_name = "HOST:PORT")]
    pub(crate) rendezvous: Option<String>,
}

/// The axes of --mesh: ranks that divide each layer, and stages that divide the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mesh {
    pub(crate) tp: u16,
    pub(crate) pp: u16,
}

/// The most ranks of a stage, and the most stages, of a model that runs.
const MOST_RANKS: u16 = 64;

/// Parses the axes of a mesh.
pub(crate) fn mesh(text: &str) -> Result<Mesh, String> {
    mesh_within(text, MOST_RANKS)
}

/// Parses the axes of a mesh, each with at most `most` ranks.
pub(crate) fn mesh_within(text: &str, most: u16) -> Result<Mesh, String> {
    let (mut tp, mut pp) = (None, None);
    for part in text.split(',') {
        let form = || format!("`{part}` is not an axis with a size, such as tp=2 or pp=2");
        let (axis, size) = part.trim().split_once('=').ok_or_else(form)?;
        let size: u16 = size.parse().map_err(|_| form())?;
        if !(1..=most).contains(&size) {
            return Err(format!("{axis} is {size}, but must be from 1 to {most}"));
        }
        let known = match axis {
            "tp" => &mut tp,
            "pp" => &mut pp,
            _ => return Err(format!("there is no axis `{axis}`; the axes are tp and pp")),
        };
        if known.replace(size).is_some() {
            return Err(format!("axis {axis} is named twice"));
        }
    }
    Ok(Mesh { tp: tp.unwrap_or(1), pp: pp.unwrap_or(1) })
}

impl DevicesArguments {
    /// The ranks of each stage, if the user says how many.
    pub(crate) fn tensor_ranks(&self) -> Option<usize> {
        self.mesh.map(|mesh| mesh.tp).or(self.tp).map(usize::from)
    }

    /// The number of stages.
    pub(crate) fn pipeline_stages(&self) -> usize {
        usize::from(self.mesh.map(|mesh| mesh.pp).or(self.pp).unwrap_or(1))
    }

    /// How layers are divided into stages.
    pub(crate) fn pipeline(&self) -> PipelineOptions {
        PipelineOptions {
            stages: self.pipeline_stages(),
            first_layers: self.stages.clone(),
            micro_batches: self.micro_batches,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LauncherName {
    /// The launcher whose variables are set.
    #[default]
    Auto,
    /// No launcher: this is the only process.
    None,
    /// torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    Torchrun,
    /// Slurm's srun.
    Slurm,
    /// Open MPI's mpirun.
    OpenMpi,
    /// Kubernetes' LeaderWorkerSet.
    LeaderWorkerSet,
}

impl From<LauncherName> for Launcher {
    fn from(name: LauncherName) -> Self {
        match name {
            LauncherName::Auto => Self::Auto,
            LauncherName::None => Self::None,
            LauncherName::Torchrun => Self::Torchrun,
            LauncherName::Slurm => Self::Slurm,
            LauncherName::OpenMpi => Self::OpenMpi,
            LauncherName::LeaderWorkerSet => Self::LeaderWorkerSet,
        }
    }
}

/// Options of the engine.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArguments {
    /// Element type of weights, activations and cache; `keep` uses the weights' types in the file.
    #[arg(long, value_enum, default_value_t = Dtype::Keep)]
    pub(crate) dtype: Dtype,
    /// Element type of the KV cache. `keep` uses the type of the activations, or f16 if that is f32, unless --exact or --dtype is
    /// given. `int8`, on the CPU, holds 1.8 times the tokens of f16, in groups of 32 elements with a scale each.
    #[arg(long, alias = "kv-cache-dtype", value_enum, default_value_t = CacheDtype::Keep, hide_possible_values = true)]
    #[arg(value_name = "keep|f32|bf16|f16|int8")]
    pub(crate) kv_dtype: CacheDtype,
    /// Round numbers only as the types of weights and activations say. Otherwise CPUs round the inputs of layers with quantised
    /// weights to 8 bits, in groups of 32, and keep the KV cache of f32 activations in f16: faster, and hardly less precise.
    #[arg(long)]
    pub(crate) exact: bool,
    /// Tokens a prompt and its answer may have together. If not given, the model's limit, if memory allows (on the CPU, a quarter
    /// of the free memory), and at most 2048 in benchmarks. For `eval perplexity` the tokens of a window, 512 if not given.
    #[arg(long, short = 'c', visible_alias = "ctx-size", alias = "max-model-len", value_name = "TOKENS")]
    pub(crate) context: Option<usize>,
    /// Maximum number of tokens of a step: longer prompts are split into chunks. 256 if not given, on a device with memory of its own
    /// for each 4 GiB that are free, up to 2048; `bench prefill` processes whole prompts.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) step_tokens: Option<usize>,
    /// Run every primitive separately instead of fused, for comparison.
    #[arg(long)]
    pub(crate) no_fuse: bool,
    /// Read every token before the next step is launched, for comparison.
    #[arg(long)]
    pub(crate) no_launch_ahead: bool,
    /// Process whole prompts before any request generates, instead of mixing both, for comparison.
    #[arg(long)]
    pub(crate) prompts_first: bool,
    /// Launch every call separately instead of capturing steps as graphs, for comparison.
    #[arg(long)]
    pub(crate) no_graphs: bool,
    /// Quantise weights at load: `w8a16`, `w4a16`, `w8a8` (activations too), `mxfp4` (of experts only), the name of a format such
    /// as `int4g64z_f16`, or a TOML file with a policy for each weight.
    #[arg(long, value_name = "POLICY", value_parser = policy)]
    pub(crate) quantize: Option<Policy>,
    /// Where the weights of layers are kept. Those in host memory are copied to the device for every step; as many layers as fit stay
    /// on the device. With `disk:FOLDER`, layers that do not fit into host memory are read from a file there for every step.
    #[arg(long, default_value_t = WeightsIn::Auto, value_name = "auto|device|host|disk:FOLDER")]
    pub(crate) weights_in: WeightsIn,
    /// Where the weights of experts are kept: `host` keeps those of layers that do not fit on the device in host memory, and all other
    /// weights on the device. Steps of few tokens read only the experts that they choose.
    #[arg(long, default_value_t = ExpertsIn::Auto, value_name = "auto|host")]
    pub(crate) experts: ExpertsIn,
    /// Where the KV cache is kept: `host` keeps that of layers that do not fit on the device in host memory. Contexts
    /// and the number of requests may then be larger. Generation reads it there, over the link; steps with prompts copy what they need.
    #[arg(long, default_value_t = KvIn::Device, value_name = "device|host")]
    pub(crate) kv_in: KvIn,
    /// With `--weights-in disk:FOLDER`, the host memory that weights may take; half of what is available if not given.
    #[arg(long, value_name = "SIZE")]
    pub(crate) host_memory: Option<MemorySize>,
    /// If weights or the KV cache are in host memory, the maximum number of layers whose weights, or keys and values, stay on the
    /// device; as many as fit if not given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) resident_layers: Option<usize>,
    /// Host memory for prefixes that the KV cache has no room for any more, so that prompts that begin with them are not computed
    /// again. None if not given.
    #[arg(long, value_name = "SIZE")]
    pub(crate) prefix_cache_host: Option<MemorySize>,
    /// A folder that keeps the KV cache of prompts and answers from run to run. Several processes may share it.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) prefix_cache: Option<PathBuf>,
    /// The most bytes of files in the folder of --prefix-cache, 16GiB if not given. What was not used for longest is deleted first.
    #[arg(long, value_name = "SIZE", requires = "prefix_cache")]
    pub(crate) prefix_cache_size: Option<MemorySize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dtype {
    /// The types of the file.
    #[value(alias = "auto")]
    #[serde(alias = "auto")]
    Keep,
    /// 32-bit floats.
    F32,
    /// Brain floats: 16 bits with the exponent of f32.
    Bf16,
    /// 16-bit floats.
    F16,
}

/// An element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CacheDtype {
    /// The type of the activations, or f16 if that is f32.
    #[value(alias = "auto")]
    #[serde(alias = "auto")]
    Keep,
    /// 32-bit floats.
    F32,
    /// Brain floats: 16 bits with the exponent of f32.
    Bf16,
    /// 16-bit floats.
    F16,
    /// Signed bytes with a scale for each 32.
    Int8,
}

impl From<CacheDtype> for CachePrecision {
    fn from(dtype: CacheDtype) -> Self {
        match dtype {
            CacheDtype::Keep => Self::Keep,
            CacheDtype::F32 => Self::F32,
            CacheDtype::Bf16 => Self::Bf16,
            CacheDtype::F16 => Self::F16,
            CacheDtype::Int8 => Self::Int8,
        }
    }
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

/// Parses a policy: a scheme for all weights, or a file.
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

/// Reads the file of --shard.
pub(crate) fn shard_policy(path: &str) -> Result<ShardPolicy, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot be read: {error}"))?;
    ShardPolicy::from_toml(&text).map_err(|error| error.to_string())
}

/// Options of speculation, for commands that generate tokens.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpeculationArguments {
    /// Propose tokens and let the model verify several of them in one step; the answer stays the same. `ngram`, or `ngram:K` for
    /// at most K at a time (7), proposes the tokens that followed the last ones earlier in the text, which pays off where answers
    /// repeat the prompt or themselves (edited code, quotes, lists). `draft`, or `draft:K` (4), uses the model of --draft. Pays
    /// off while few requests run. Requests with penalties do not speculate.
    #[arg(long, value_name = "HOW")]
    pub(crate) speculate: Option<Speculation>,
    /// A draft model: a second, much smaller model with the same tokenizer that proposes tokens (--speculate draft). Named as for
    /// --model, with weights from the same source.
    #[arg(long, value_name = "MODEL")]
    pub(crate) draft: Option<String>,
}

impl SpeculationArguments {
    /// The speculation to use; naming a draft model enables it.
    pub(crate) fn speculation(&self) -> Option<Speculation> {
        let draft = Speculation::Draft { tokens: Speculation::DRAFT_TOKENS };
        self.speculate.or(self.draft.is_some().then_some(draft))
    }
}

/// Sampling options. The defaults are the model's own; if it has none, those that suit its size.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArguments {
    /// Temperature: 0 takes the most likely token; 1 samples from the model's own distribution.
    #[arg(long, alias = "temp", value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Keep this many of the most likely tokens; 0 keeps all.
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = kept_tokens)]
    pub(crate) top_k: Option<u32>,
    /// Keep the most likely tokens until their probabilities sum to this.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least this likely, relative to the most likely one.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Make tokens of the prompt and the answer less likely: divides their logits.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Make generated tokens less likely: subtracted once from their logits.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Make generated tokens less likely: subtracted from their logits for every time they were generated.
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Seed of the random numbers: equal seeds give equal answers.
    #[arg(long, default_value_t = 0, value_name = "NUMBER", value_parser = whole)]
    pub(crate) seed: u64,
    /// Maximum number of tokens of an answer.
    #[arg(long, short = 'n', alias = "n-predict", value_name = "COUNT", value_parser = positive)]
    pub(crate) max_tokens: Option<usize>,
    /// A string that ends the answer; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}
