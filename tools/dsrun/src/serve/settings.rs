//! How a server is set up: flags, and a file with the same keys.

use crate::arguments::{Dtype, Weights};
use anyhow::{Context, Result, bail};
use clap::Args;
use dsrun_engine::Speculation;
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

/// Tokens of the largest step that is timed if nobody says how large one may be. Beyond it, prompts of common GPUs get no faster,
/// and activations take memory.
const TUNED_STEP: usize = 2048;

/// Parts of the help.
const ENGINE: &str = "Device and engine";
const ADDRESS: &str = "Address and access";
const LIMITS: &str = "Limits";

/// How a server is set up. Every field is a flag and a key of the file; what is not given has a default.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct ServeSettings {
    /// The model: a name, a path or a Hugging Face id, as for --model elsewhere.
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// Where weights come from: the model's file, or made up from its configuration.
    #[arg(long, value_enum)]
    pub(crate) weights: Option<Weights>,
    /// Use only what is on this machine.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) offline: Option<bool>,
    /// A Jinja file to use as chat template, instead of the model's own.
    #[arg(long, value_name = "PATH")]
    pub(crate) chat_template: Option<PathBuf>,
    /// The name of the model in requests; as it was asked for if not given.
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,

    /// The backend: a name that `dsrun backends` lists, or the path of a plugin's library or manifest.
    #[arg(help_heading = ENGINE, long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    /// The device of the backend; 0 if not given.
    #[arg(help_heading = ENGINE, long, value_name = "INDEX")]
    pub(crate) device: Option<usize>,
    /// Threads a CPU device may use; all cores if not given.
    #[arg(help_heading = ENGINE, long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,
    /// Element type of weights, activations and cache; `keep` leaves weights as the file has them.
    #[arg(help_heading = ENGINE, long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// Quantise weights as they are loaded: `w8a16`, `w4a16`, `w8a8` (activations too), the name of a format such as
    /// `int4g64z_f16`, or a TOML file that says what becomes of which weight.
    #[arg(help_heading = ENGINE, long, value_name = "POLICY")]
    pub(crate) quantize: Option<String>,
    /// Tokens a prompt and its answer may have together; the model's limit, at most 2048, if not given.
    #[arg(help_heading = ENGINE, long, value_name = "TOKENS")]
    pub(crate) context: Option<usize>,
    /// Tokens a step may process. If not given, steps of growing size, up to 2048, are timed when the model is loaded, and the
    /// smallest is taken that processes prompts nearly as fast as any: larger ones would only delay the tokens of other answers.
    #[arg(help_heading = ENGINE, long, value_name = "TOKENS")]
    pub(crate) step_tokens: Option<usize>,
    /// Whether to time steps when the model is loaded: up to --step-tokens, if both are given. With `false` and no --step-tokens,
    /// a step has 256.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) tune_step: Option<bool>,
    /// Do not compile the steps of all sizes before requests are served, but each when it first comes up.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_warm_up: Option<bool>,
    /// Answers that are generated at the same time; 16 if not given.
    #[arg(help_heading = ENGINE, long, value_name = "COUNT")]
    pub(crate) max_requests: Option<usize>,
    /// Tokens the KV cache holds over all answers; enough for each one's whole context if not given.
    #[arg(help_heading = ENGINE, long, value_name = "TOKENS")]
    pub(crate) kv_tokens: Option<usize>,
    /// Tokens of KV cache that host memory takes in for answers that had to yield their place; beyond that it is computed once
    /// more. 0 if not given.
    #[arg(help_heading = ENGINE, long, value_name = "TOKENS")]
    pub(crate) swap_tokens: Option<usize>,
    /// Do not keep prompts for later requests that begin alike.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_prefix_cache: Option<bool>,
    /// Propose tokens and let the model check several in one step; answers stay the same. `ngram`, or `ngram:K` for at most K at
    /// a time (7), takes what followed the last tokens where they stood before: that pays where answers repeat their prompts or
    /// themselves. `draft`, or `draft:K` (4), asks the model of --draft. Pays while few answers run at a time. Requests with
    /// penalties or a form to keep to go without.
    #[arg(help_heading = ENGINE, long, value_name = "HOW")]
    pub(crate) speculate: Option<Speculation>,
    /// A second, much smaller model that proposes tokens (--speculate draft): one with the same tokenizer.
    #[arg(help_heading = ENGINE, long, value_name = "MODEL")]
    pub(crate) draft: Option<String>,
    /// Engines side by side, each with the whole model, on one device after the other; 1 if not given.
    #[arg(help_heading = ENGINE, long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) replicas: Option<u16>,
    /// Run every primitive by itself instead of fused, to compare.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_fuse: Option<bool>,
    /// Read the tokens of each step before the next is launched, to compare.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_launch_ahead: Option<bool>,
    /// Process prompts whole, and before anything is generated, instead of beside it, to compare.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) prompts_first: Option<bool>,
    /// Launch every call by itself instead of capturing steps as graphs, to compare.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    #[arg(help_heading = ENGINE)]
    pub(crate) no_graphs: Option<bool>,

    /// The address to listen at; 127.0.0.1, which only this machine reaches, if not given.
    #[arg(help_heading = ADDRESS, long, value_name = "ADDRESS")]
    pub(crate) host: Option<IpAddr>,
    /// The port; 8000 if not given, any free one if 0.
    #[arg(help_heading = ADDRESS, long, short, value_name = "PORT")]
    pub(crate) port: Option<u16>,
    /// A file with API keys, one per line. Further keys can be in DSRUN_API_KEYS, with commas. Without any, everybody may ask.
    #[arg(help_heading = ADDRESS, long, value_name = "PATH")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// A file with the server's certificate and those between it and the authority, as PEM.
    #[arg(help_heading = ADDRESS, long, requires = "tls_key", value_name = "PATH")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// A file with the certificate's private key, as PEM.
    #[arg(help_heading = ADDRESS, long, requires = "tls_cert", value_name = "PATH")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Requests that may wait to be started; more are answered with 429. 512 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "COUNT")]
    pub(crate) queue: Option<usize>,
    /// Requests of a client (by key, or by address) per minute; not limited if not given.
    #[arg(help_heading = LIMITS, long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) requests_per_minute: Option<u32>,
    /// Bytes of a request's body; 4194304 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "BYTES")]
    pub(crate) body_limit: Option<usize>,
    /// Connections at a time; 4096 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "COUNT")]
    pub(crate) connections: Option<usize>,
    /// Seconds to wait for the head of a request, also on an idle connection; 30 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS")]
    pub(crate) header_timeout: Option<u64>,
    /// Seconds to wait for the body of a request; 30 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS")]
    pub(crate) body_timeout: Option<u64>,
    /// Seconds that a client may take to read a piece of its answer; 30 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS")]
    pub(crate) write_timeout: Option<u64>,
    /// Seconds from a request to the end of its answer; 600 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS")]
    pub(crate) request_timeout: Option<u64>,
    /// Seconds that answers may go on after the server was asked to end (SIGTERM, Ctrl-C); 60 if not given.
    #[arg(help_heading = LIMITS, long, value_name = "SECONDS")]
    pub(crate) drain_timeout: Option<u64>,
}

impl ServeSettings {
    /// The settings of a file, but for those that `flags` give.
    ///
    /// # Errors
    /// If the file cannot be read, is no TOML, or has keys that there are not.
    pub(crate) fn load(file: Option<&Path>, flags: &Self) -> Result<Self> {
        let Some(path) = file else { return Ok(flags.clone()) };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("the configuration {} cannot be read", path.display()))?;
        // Checked by itself first: then the error points at the line.
        let from_file: Self = toml::from_str(&text)
            .with_context(|| format!("the configuration {} is not valid", path.display()))?;
        let mut both = toml::Table::try_from(from_file)?;
        both.extend(toml::Table::try_from(flags)?);
        let both: Self = both.try_into()?;
        if both.tls_cert.is_some() != both.tls_key.is_some() {
            bail!("tls-cert and tls-key belong together: give both or none");
        }
        Ok(both)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (self.host.unwrap_or(Ipv4Addr::LOCALHOST.into()), self.port.unwrap_or(8000)).into()
    }

    pub(crate) fn queue(&self) -> usize {
        self.queue.unwrap_or(512)
    }

    pub(crate) fn max_requests(&self) -> usize {
        self.max_requests.unwrap_or(16)
    }

    /// Whether steps are timed, and the most tokens of one.
    pub(crate) fn step(&self) -> (bool, Option<usize>) {
        let tune = self.tune_step.unwrap_or(self.step_tokens.is_none());
        // Room for prompts, however many answers run.
        let room = TUNED_STEP.max(2 * self.max_requests());
        (tune, self.step_tokens.or(tune.then_some(room)))
    }

    pub(crate) fn body_limit(&self) -> usize {
        self.body_limit.unwrap_or(4 << 20)
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

    pub(crate) fn drain_timeout(&self) -> Duration {
        seconds(self.drain_timeout, 60)
    }
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
    fn flags_win_over_the_file() {
        let (_folder, path) = file("model = \"a\"\nport = 1\nqueue = 2\ndtype = \"f32\"\noffline = true\n");
        let flags = ServeSettings { port: Some(3), ..ServeSettings::default() };
        let settings = ServeSettings::load(Some(&path), &flags).expect("it is read");
        assert_eq!(settings.model.as_deref(), Some("a"));
        assert_eq!((settings.port, settings.queue, settings.offline), (Some(3), Some(2), Some(true)));
        assert_eq!(settings.dtype, Some(Dtype::F32));
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
            ServeSettings { tune_step, step_tokens, ..ServeSettings::default() }.step()
        };
        assert_eq!(step(None, None), (true, Some(TUNED_STEP)));
        assert_eq!(step(None, Some(512)), (false, Some(512)));
        assert_eq!(step(Some(true), Some(512)), (true, Some(512)));
        assert_eq!(step(Some(false), None), (false, None));
        let many = ServeSettings { max_requests: Some(4096), ..ServeSettings::default() };
        assert_eq!(many.step(), (true, Some(8192)));
    }

    #[test]
    fn a_certificate_needs_its_key() {
        let (_folder, path) = file("tls-cert = \"a\"\n");
        assert!(ServeSettings::load(Some(&path), &ServeSettings::default()).is_err());
    }
}
