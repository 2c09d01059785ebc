//! The settings of a server: flags, and a file with the same keys.

use crate::arguments::{CacheDtype, Dtype, LauncherName, MemorySize, Weights};
use anyhow::{Context, Result, bail};
use clap::{
    Args, ValueEnum,
    builder::{NonEmptyStringValueParser, RangedU64ValueParser},
};
use dsrun_engine::{ExpertsIn, KvIn, Speculation, WeightsIn};
use serde::{Deserialize, Deserializer, Serialize, de};
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

/// The largest step that is timed by default. Beyond it, prompts get no faster on common GPUs, and activations take memory.
const TUNED_STEP: usize = 2048;

/// The longest timeout in seconds, a year: far longer ones overflow the clock.
const LONGEST_TIMEOUT: u64 = 365 * 24 * 3600;

/// Headings of the help.
const ENGINE: &str = "Device and engine";
const ADDRESS: &str = "Address and access";
const LIMITS: &str = "Limits";

/// The form of the access log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AccessLog {
    /// There is none.
    #[default]
    Off,
    /// A line of text for each request.
    Text,
    /// A JSON object in a line for each request.
    Json,
}

/// The settings of a server. Every field is a flag and a key of the file, and has a default.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct ServeSettings {
    /// The model: a name, a path or a Hugging Face id, as for --model elsewhere.
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// The same as MODEL, which takes precedence.
    #[serde(skip)]
    #[arg(long = "model", short = 'm', value_name = "MODEL")]
    pub(crate) model_flag: Option<String>,
    /// Where weights come from: the model's file, or random numbers in the shapes of its configuration.
    #[arg(long, value_enum)]
    pub(crate) weights: Option<Weights>,
    /// Use only files on this machine.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) offline: Option<bool>,
    /// A Jinja file to use as chat template, instead of the model's own.
    #[arg(long, value_name = "PATH")]
    pub(crate) chat_template: Option<PathBuf>,
    /// The name of the model in requests; the name that it was loaded by if not given.
    #[arg(long, alias = "alias", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) served_model_name: Option<String>,

    /// The backend: a name that `dsrun backends` lists, or the path of a plugin's library or manifest.
    #[arg(help_heading = ENGINE, long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    /// The device of the backend; 0 if not given.
    #[arg(help_heading = ENGINE, long, value_name = "INDEX")]
    pub(crate) device: Option<usize>,
    /// Split the model over this many ranks by tensor parallelism: consecutive devices from --device on. Ranks on the CPU share its
    /// threads and its memory.
    #[arg(help_heading = ENGINE, long, alias = "tensor-parallel-size", value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) tp: Option<u16>,
    /// Divide the layers into this many stages, each on devices of its own, that work on different requests at the same time
    /// (pipeline parallelism). With --tp, each stage has that many ranks.
    #[arg(help_heading = ENGINE, long, alias = "pipeline-parallel-size", value_name = "STAGES", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) pp: Option<u16>,
    /// The ranks of each stage and the stages in one flag, such as `tp=2,pp=2`.
    #[arg(help_heading = ENGINE, long, value_name = "AXES", conflicts_with_all = ["tp", "pp"])]
    pub(crate) mesh: Option<String>,
    /// The first layer of each stage but the first, such as `8,20`; balanced by their costs if not given.
    #[arg(help_heading = ENGINE, long, value_delimiter = ',', value_name = "LAYERS")]
    pub(crate) stages: Option<Vec<usize>>,
    /// Split the model over these devices, such as `0,1`: one rank on each. With --replicas, each engine takes the next of them.
    #[arg(help_heading = ENGINE, long, value_delimiter = ',', value_name = "INDICES", conflicts_with = "device")]
    pub(crate) devices: Option<Vec<usize>>,
    /// A TOML file that pins how weights are split over ranks; a search decides about all others.
    #[arg(help_heading = ENGINE, long, value_name = "PATH")]
    pub(crate) shard: Option<String>,
    /// The launcher that has started several processes of this command, each with some of the ranks; the one whose variables are set
    /// if not given.
    #[arg(help_heading = ENGINE, long, value_enum, value_name = "NAME")]
    pub(crate) launcher: Option<LauncherName>,
    /// The host and port where the processes meet; that of the launcher if not given.
    #[arg(help_heading = ENGINE, long, value_name = "HOST:PORT")]
    pub(crate) rendezvous: Option<String>,
    /// Threads a CPU device may use; all cores if not given.
    #[arg(help_heading = ENGINE, long, short, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,
    /// Memory of the device that may be used, such as `20GB` or `8GiB`; all that is free if not given. On several devices, of each.
    #[arg(help_heading = ENGINE, long, value_name = "SIZE")]
    pub(crate) gpu_memory: Option<MemorySize>,
    /// Where the weights of layers are kept; `auto` if not given. Those in host memory are copied to the device for every step; as
    /// many layers as fit stay on the device. With `disk:FOLDER`, layers that do not fit into host memory are read from a file there
    /// for every step.
    #[arg(help_heading = ENGINE, long, value_name = "auto|device|host|disk:FOLDER")]
    pub(crate) weights_in: Option<WeightsIn>,
    /// Where the weights of experts are kept; `auto` if not given. `host` keeps those of layers that do not fit on the device in host
    /// memory, and all other weights on the device. Steps of few tokens read only the experts that they choose.
    #[arg(help_heading = ENGINE, long, value_name = "auto|host")]
    pub(crate) experts: Option<ExpertsIn>,
    /// Where the KV cache is kept; `device` if not given. `host` keeps that of layers that do not fit on the device in host
    /// memory. Contexts and the number of requests may then be larger. Generation reads it there, over the link; steps with prompts copy
    /// what they need.
    #[arg(help_heading = ENGINE, long, value_name = "device|host")]
    pub(crate) kv_in: Option<KvIn>,
    /// With `--weights-in disk:FOLDER`, the host memory that weights may take; half of what is available if not given.
    #[arg(help_heading = ENGINE, long, value_name = "SIZE")]
    pub(crate) host_memory: Option<MemorySize>,
    /// If weights or the KV cache are in host memory, the most layers whose weights, or keys and values, stay on the device; as many as fit if not given.
    #[arg(help_heading = ENGINE, long, value_name = "COUNT")]
    pub(crate) resident_layers: Option<usize>,
    /// Element type of weights, activations and cache; `keep` uses the weights' types in the file.
    #[arg(help_heading = ENGINE, long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// Element type of the KV cache. `keep`, the default, uses the type of the activations, or f16 if that is f32, unless --exact or
    /// --dtype is given. `int8`, on the CPU, holds 1.8 times the tokens of f16, in groups of 32 elements with a scale each.
    #[arg(help_heading = ENGINE, long, alias = "kv-cache-dtype", value_enum, hide_possible_values = true, value_name = "keep|f32|bf16|f16|int8")]
    pub(crate) kv_dtype: Option<CacheDtype>,
    /// Round numbers only as the types of weights and activations say. Otherwise CPUs round the inputs of layers with quantised
    /// weights to 8 bits, in groups of 32, and keep the KV cache of f32 activations in f16: faster, and hardly less precise.
    #[arg(help_heading = ENGINE, long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) exact: Option<bool>,
    /// Quantise weights when they are loaded: `w8a16`, `w4a16`, `w8a8` (activations too), `mxfp4` (of experts only), the name of a
    /// format such as `int4g64z_f16`, or a TOML file with a policy for each weight.
    #[arg(help_heading = ENGINE, long, value_name = "POLICY")]
    pub(crate) quantize: Option<String>,
    /// Tokens a prompt and its answer may have together; the model's limit, as far as the memory has room for it, if not given.
    #[arg(help_heading = ENGINE, long, short, visible_alias = "ctx-size", alias = "max-model-len", value_name = "TOKENS")]
    pub(crate) context: Option<usize>,
    /// The most tokens of a step. If not given, steps of growing size, up to 2048, are timed when the model is loaded, and the
    /// smallest size is chosen that processes prompts nearly as fast as any: a larger one would only delay other answers.
    #[arg(help_heading = ENGINE, long, alias = "max-num-batched-tokens", value_name = "TOKENS")]
    pub(crate) step_tokens: Option<usize>,
    /// Whether to time steps when the model is loaded: up to --step-tokens, if both are given. With `false` and no --step-tokens,
    /// a step has 256 tokens.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) tune_step: Option<bool>,
    /// Do not compile the steps of all sizes before requests are served, but each when it is first needed.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_warm_up: Option<bool>,
    /// Answers that are generated at the same time. If not given, as many as the memory suggests: up to 256 on accelerators, up to
    /// 16 on the CPU.
    #[arg(help_heading = ENGINE, long, aliases = ["max-num-seqs", "parallel"], value_name = "COUNT")]
    pub(crate) max_requests: Option<usize>,
    /// Tokens the KV cache holds over all answers; if not given, enough for each one's whole context, as far as the memory has room
    /// (on the CPU, half of what is free).
    #[arg(help_heading = ENGINE, long, value_name = "TOKENS")]
    pub(crate) kv_tokens: Option<usize>,
    /// Tokens of KV cache that are swapped to host memory when an answer is pre-empted; beyond that they are recomputed. 0 if not
    /// given.
    #[arg(help_heading = ENGINE, long, value_name = "TOKENS")]
    pub(crate) swap_tokens: Option<usize>,
    /// Do not keep the KV cache of prompts for later requests with the same prefix.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_prefix_cache: Option<bool>,
    /// Host memory for prefixes that the KV cache has no room for any more, so that prompts that begin with them are not computed
    /// again. None if not given.
    #[arg(help_heading = ENGINE, long, value_name = "SIZE")]
    pub(crate) prefix_cache_host: Option<MemorySize>,
    /// A folder that keeps the KV cache of prompts and answers from run to run. Several processes may share it.
    #[arg(help_heading = ENGINE, long, value_name = "FOLDER")]
    pub(crate) prefix_cache: Option<PathBuf>,
    /// The most bytes of files in the folder of --prefix-cache, 16GiB if not given. What was not used for longest is deleted first.
    #[arg(help_heading = ENGINE, long, value_name = "SIZE")]
    pub(crate) prefix_cache_size: Option<MemorySize>,
    /// Propose tokens and let the model check several of them in one step; answers stay the same. `ngram`, or `ngram:K` for at most
    /// K at a time (7), proposes the tokens that followed the last ones earlier in the text: that pays where answers repeat their
    /// prompts or themselves. `draft`, or `draft:K` (4), asks the model of --draft. Pays while few answers run at a time. Requests
    /// with penalties or structured output do not speculate.
    #[arg(help_heading = ENGINE, long, value_name = "HOW")]
    pub(crate) speculate: Option<Speculation>,
    /// A draft model: a second, much smaller model with the same tokenizer that proposes tokens (--speculate draft).
    #[arg(help_heading = ENGINE, long, value_name = "MODEL")]
    pub(crate) draft: Option<String>,
    /// Give answers that are the same to the bit whatever else the server does, with the kernels of the device that guarantee this;
    /// refuse a device that has none.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) batch_invariant: Option<bool>,
    /// The number of engines, each with the whole model, on consecutive devices; 1 if not given. With --tp each takes as many
    /// devices as it has ranks.
    #[arg(help_heading = ENGINE, long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) replicas: Option<u16>,
    /// Run every primitive separately instead of fused, for comparison.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_fuse: Option<bool>,
    /// Read the tokens of each step before the next is launched, for comparison.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_launch_ahead: Option<bool>,
    /// Process whole prompts before any answer is generated, instead of beside generation, for comparison.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) prompts_first: Option<bool>,
    /// Launch every call separately instead of capturing steps as graphs, for comparison.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_graphs: Option<bool>,

    /// The address to listen at; 127.0.0.1, which only this machine can reach, if not given.
    #[serde(deserialize_with = "host_of_file")]
    #[arg(help_heading = ADDRESS, long, value_name = "ADDRESS", value_parser = host)]
    pub(crate) host: Option<IpAddr>,
    /// The port; 8000 if not given, any free one if 0.
    #[arg(help_heading = ADDRESS, long, short, value_name = "PORT")]
    pub(crate) port: Option<u16>,
    /// A file with API keys, one per line, each followed by its rights, if it has any: `priority` (may set a priority above 0) or
    /// `metrics` (reads /metrics, which other keys then do not). DSRUN_API_KEYS may have more, separated by commas. Without keys,
    /// access is open.
    #[arg(help_heading = ADDRESS, long, value_name = "PATH")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// An API key; may be given several times. Other users of this machine can see it, so that a file is safer.
    #[arg(help_heading = ADDRESS, long, value_name = "KEY")]
    pub(crate) api_key: Option<Vec<String>>,
    /// A name that requests may have in their header `Host`, such as that of a proxy; may be given several times. Without API keys,
    /// a server at a loopback address answers loopback names only, so that no web page can reach it under a name of its own.
    #[arg(help_heading = ADDRESS, long, value_name = "NAME")]
    pub(crate) allow_host: Option<Vec<String>>,
    /// An origin such as `https://example.org` whose web pages may use the server, or `*` for all; may be given several times.
    #[arg(help_heading = ADDRESS, long, value_name = "ORIGIN")]
    pub(crate) cors_origin: Option<Vec<String>>,
    /// A file with the server's certificate and the intermediate ones, as PEM.
    #[arg(help_heading = ADDRESS, long, alias = "ssl-certfile", requires = "tls_key", value_name = "PATH")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// A file with the certificate's private key, as PEM.
    #[arg(help_heading = ADDRESS, long, alias = "ssl-keyfile", requires = "tls_cert", value_name = "PATH")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Write a line to standard error for each request: as text, as JSON, or not, which is the default.
    #[arg(help_heading = LIMITS, long, value_enum, value_name = "FORM")]
    pub(crate) access_log: Option<AccessLog>,
    /// The URL of an OpenTelemetry collector that gets traces of requests over OTLP, such as `http://localhost:4318`. The variables
    /// OTEL_EXPORTER_OTLP_ENDPOINT and the like work, too.
    #[arg(help_heading = LIMITS, long, value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,
    /// Refuse fields of requests that have no effect here, such as `store`, instead of logging them.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = LIMITS)]
    pub(crate) strict_fields: Option<bool>,
    /// The most requests that may wait to start; more are answered with 429. 512 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "COUNT")]
    pub(crate) queue: Option<usize>,
    /// Requests of a client (by key, or by address) per minute; not limited if not given.
    #[arg(help_heading = LIMITS, long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) requests_per_minute: Option<u32>,
    /// The most bytes of a request's body; 4194304 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "BYTES")]
    pub(crate) body_limit: Option<usize>,
    /// The most bytes of all bodies together that are being read or wait to be prepared; more are answered with 429. 67108864 if not
    /// given, or four times --body-limit if that is more.
    #[arg(help_heading = LIMITS, long, value_name = "BYTES")]
    pub(crate) pending_limit: Option<usize>,
    /// The most bytes of tokens and responses in memory that clients have not read yet; more requests are answered with 429. 67108864
    /// if not given.
    #[arg(help_heading = LIMITS, long, value_name = "BYTES")]
    pub(crate) unsent_limit: Option<usize>,
    /// The most bytes of stored responses of /v1/responses, beyond which the oldest are forgotten; 67108864 if not given. With 0, nothing
    /// is stored.
    #[arg(help_heading = LIMITS, long, value_name = "BYTES")]
    pub(crate) response_store: Option<usize>,
    /// The most connections at a time; 4096 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "COUNT")]
    pub(crate) connections: Option<usize>,
    /// Seconds to wait for the head of a request, also on an idle connection; 30 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS", value_parser = timeout())]
    pub(crate) header_timeout: Option<u64>,
    /// Seconds to wait for the body of a request; 30 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS", value_parser = timeout())]
    pub(crate) body_timeout: Option<u64>,
    /// Seconds that a client may take to read a piece of its answer; 30 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS", value_parser = timeout())]
    pub(crate) write_timeout: Option<u64>,
    /// Seconds from a request to the end of its answer; 600 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS", value_parser = timeout())]
    pub(crate) request_timeout: Option<u64>,
    /// Seconds that a step of an engine may take. Beyond it the engine gets no requests while another one serves, and if none does, the
    /// server is not ready; 60 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS", value_parser = timeout())]
    pub(crate) step_timeout: Option<u64>,
    /// Seconds that answers may continue after the server was asked to end (SIGTERM, Ctrl-C); 60 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS", value_parser = timeout())]
    pub(crate) drain_timeout: Option<u64>,
}

impl ServeSettings {
    /// The settings of a file, overridden by `flags`.
    ///
    /// # Errors
    /// If the file cannot be read, is not TOML, or has unknown keys.
    pub(crate) fn load(file: Option<&Path>, flags: &Self) -> Result<Self> {
        let model = flags.model.clone().or_else(|| flags.model_flag.clone());
        let flags = &Self { model, model_flag: None, ..flags.clone() };
        let Some(path) = file else { return Ok(flags.clone()) };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("the configuration {} cannot be read", path.display()))?;
        // Parsed before it is merged, so that an error has the line.
        let from_file: Self = toml::from_str(&text)
            .with_context(|| format!("the configuration {} is not valid", path.display()))?;
        let mut both = toml::Table::try_from(from_file)?;
        both.extend(toml::Table::try_from(flags)?);
        let both: Self = both.try_into()?;
        both.check()?;
        Ok(both)
    }

    /// Checks what the flags' parsers check of flags, for keys of a file.
    fn check(&self) -> Result<()> {
        let counts = [
            ("threads", self.threads.map(u64::from), u64::from(u16::MAX)),
            ("tp", self.tp.map(u64::from), 64),
            ("pp", self.pp.map(u64::from), 64),
            ("replicas", self.replicas.map(u64::from), 64),
            ("queue", self.queue.map(|count| count as u64), u64::from(u32::MAX)),
            ("requests-per-minute", self.requests_per_minute.map(u64::from), u64::from(u32::MAX)),
        ];
        let timeouts = [
            ("header-timeout", self.header_timeout),
            ("body-timeout", self.body_timeout),
            ("write-timeout", self.write_timeout),
            ("request-timeout", self.request_timeout),
            ("step-timeout", self.step_timeout),
            ("drain-timeout", self.drain_timeout),
        ];
        let counts = counts.map(|(key, value, most)| (key, value, 1, most));
        let timeouts = timeouts.map(|(key, value)| (key, value, 0, LONGEST_TIMEOUT));
        for (key, value, least, most) in counts.into_iter().chain(timeouts) {
            if let Some(value) = value.filter(|value| !(least..=most).contains(value)) {
                bail!("{key} is {value}, but must be from {least} to {most}");
            }
        }
        if self.device.is_some() && self.devices.is_some() {
            bail!("device and devices are both given: leave one of them out");
        }
        if self.served_model_name.as_ref().is_some_and(String::is_empty) {
            bail!("served-model-name is empty: give a name, or leave it out");
        }
        if self.devices.as_ref().is_some_and(Vec::is_empty) {
            bail!("devices is empty, but must name at least one device");
        }
        if self.tls_cert.is_some() != self.tls_key.is_some() {
            bail!("tls-cert and tls-key belong together: give both or none");
        }
        Ok(())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (self.host.unwrap_or(Ipv4Addr::LOCALHOST.into()), self.port.unwrap_or(8000)).into()
    }

    pub(crate) fn queue(&self) -> usize {
        self.queue.unwrap_or(512)
    }

    /// Whether steps are timed, and the most tokens of a step with this many requests.
    pub(crate) fn step(&self, max_requests: usize) -> (bool, Option<usize>) {
        let tune = self.tune_step.unwrap_or(self.step_tokens.is_none());
        // Leaves room for prompts, however many answers run.
        let room = TUNED_STEP.max(2 * max_requests);
        (tune, self.step_tokens.or(tune.then_some(room)))
    }

    pub(crate) fn body_limit(&self) -> usize {
        self.body_limit.unwrap_or(4 << 20)
    }

    pub(crate) fn pending_limit(&self) -> usize {
        self.pending_limit.unwrap_or_else(|| self.body_limit().saturating_mul(4).max(64 << 20))
    }

    pub(crate) fn unsent_limit(&self) -> usize {
        self.unsent_limit.unwrap_or(64 << 20)
    }

    pub(crate) fn response_store(&self) -> usize {
        self.response_store.unwrap_or(64 << 20)
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.unwrap_or(4096)
    }

    pub(crate) fn header_timeout(&self) -> Duration {
        seconds(self.header_timeout, 30)
    }

    pub(crate) fn body_timeout(&self) -> Duration {
        seconds(self.body_timeout, 30)
    }

    pub(crate) fn write_timeout(&self) -> Duration {
        seconds(self.write_timeout, 30)
    }

    pub(crate) fn request_timeout(&self) -> Duration {
        seconds(self.request_timeout, 600)
    }

    pub(crate) fn step_timeout(&self) -> Duration {
        seconds(self.step_timeout, 60)
    }

    pub(crate) fn drain_timeout(&self) -> Duration {
        seconds(self.drain_timeout, 60)
    }
}

/// A flag's parser of seconds.
fn timeout() -> RangedU64ValueParser {
    RangedU64ValueParser::new().range(..=LONGEST_TIMEOUT)
}

/// Reads an address to listen at.
fn host(text: &str) -> Result<IpAddr, String> {
    if text.eq_ignore_ascii_case("localhost") {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    let address = text.trim_start_matches('[').trim_end_matches(']').parse();
    address.map_err(|_| {
        "must be an address of this machine such as 127.0.0.1, ::1 or localhost, or 0.0.0.0 or :: for all of them".to_owned()
    })
}

fn host_of_file<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| host(&text).map_err(de::Error::custom)).transpose()
}

fn seconds(given: Option<u64>, default: u64) -> Duration {
    Duration::from_secs(given.unwrap_or(default))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("serve.toml");
        std::fs::write(&path, text).expect("it is written");
        (folder, path)
    }

    #[test]
    fn flags_take_precedence_over_the_file() {
        let (_folder, path) = file(
            "model = \"a\"\nport = 1\nqueue = 2\ndtype = \"f32\"\nkv-dtype = \"int8\"\noffline = true\n",
        );
        let flags = ServeSettings { port: Some(3), ..ServeSettings::default() };
        let settings = ServeSettings::load(Some(&path), &flags).expect("it is read");
        assert_eq!(settings.model.as_deref(), Some("a"));
        assert_eq!((settings.port, settings.queue, settings.offline), (Some(3), Some(2), Some(true)));
        assert_eq!((settings.dtype, settings.kv_dtype), (Some(Dtype::F32), Some(CacheDtype::Int8)));
    }

    #[test]
    fn a_host_is_an_address_or_this_machine() {
        for (text, address) in
            [("localhost", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("::1", "::1"), ("[::]", "::")]
        {
            assert_eq!(host(text).expect(text).to_string(), address);
            let (_folder, path) = file(&format!("host = {text:?}\n"));
            let settings = ServeSettings::load(Some(&path), &ServeSettings::default()).expect(text);
            assert_eq!(settings.host.expect("it is given").to_string(), address);
        }
        assert!(host("example.org").is_err_and(|error| error.contains("0.0.0.0")));
        let (_folder, path) = file("port = 1\nhost = \"example.org\"\n");
        let error = ServeSettings::load(Some(&path), &ServeSettings::default()).expect_err("it is refused");
        assert!(format!("{error:#}").contains("line 2"), "{error:#}");
    }

    #[test]
    fn unknown_keys_are_refused_by_name_and_line() {
        let (_folder, path) = file("port = 1\nspeed = 9\n");
        let error = ServeSettings::load(Some(&path), &ServeSettings::default()).expect_err("it is refused");
        let message = format!("{error:#}");
        assert!(message.contains("line 2") && message.contains("speed"), "{message}");
    }

    #[test]
    fn speculation_is_read_from_the_file() {
        let (_folder, path) = file("speculate = \"draft:3\"\ndraft = \"owner/name:file.gguf\"\n");
        let settings = ServeSettings::load(Some(&path), &ServeSettings::default()).expect("it is read");
        assert_eq!(settings.speculate, Some(Speculation::Draft { tokens: 3 }));
        assert_eq!(settings.draft.as_deref(), Some("owner/name:file.gguf"));
        let (_folder, path) = file("port = 1\nspeculate = \"draft:x\"\n");
        let error = ServeSettings::load(Some(&path), &ServeSettings::default()).expect_err("it is refused");
        let message = format!("{error:#}");
        assert!(message.contains("line 2") && message.contains("`draft:K`"), "{message}");
    }

    #[test]
    fn steps_are_timed_unless_their_size_is_given() {
        let step = |tune_step, step_tokens| {
            ServeSettings { tune_step, step_tokens, ..ServeSettings::default() }.step(16)
        };
        assert_eq!(step(None, None), (true, Some(TUNED_STEP)));
        assert_eq!(step(None, Some(512)), (false, Some(512)));
        assert_eq!(step(Some(true), Some(512)), (true, Some(512)));
        assert_eq!(step(Some(false), None), (false, None));
        assert_eq!(ServeSettings::default().step(4096), (true, Some(8192)));
    }

    #[test]
    fn values_outside_their_range_are_refused_in_a_file() {
        for (line, key) in [
            ("threads = 0", "threads is 0"),
            ("tp = 0", "tp is 0"),
            ("pp = 65", "pp is 65"),
            ("devices = []", "devices is empty"),
            ("served-model-name = \"\"", "served-model-name is empty"),
            ("device = 1\ndevices = [0, 1]", "device and devices are both given"),
            ("replicas = 65", "replicas is 65"),
            ("requests-per-minute = 0", "requests-per-minute is 0"),
            ("request-timeout = 9223372036854775807", "request-timeout is 9223372036854775807"),
            ("drain-timeout = 31536001", "drain-timeout is 31536001"),
        ] {
            let (_folder, path) = file(line);
            let error = ServeSettings::load(Some(&path), &ServeSettings::default()).expect_err(line);
            assert!(error.to_string().contains(key), "{line}: {error}");
        }
    }

    #[test]
    fn a_certificate_needs_its_key() {
        let (_folder, path) = file("tls-cert = \"a\"\n");
        assert!(ServeSettings::load(Some(&path), &ServeSettings::default()).is_err());
    }
}
