//! The command line, parsed by clap. The doc comments are the help text.

use clap::{Args, Parser, Subcommand};
use dsrun_core::op::Profile;
use std::{num::NonZeroUsize, path::PathBuf};

/// Hold a backend to the conformance suite: every op against a scalar f64 oracle, and how the backend behaves.
#[derive(Debug, Parser)]
#[command(
    name = "dsrun-conformance",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  dsrun-conformance run ./libmy_backend.so --profile llm-core-1
  dsrun-conformance run cpu --op 'rms_norm' --op '*attention*'
  dsrun-conformance run my.dsrun.toml --case linear/bf16/property-1f3a

Exit status: 0 if everything passed, 1 if a case failed, 2 if the backend cannot be loaded or the command is wrong."
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the suite, or a part of it, on a backend.
    Run(Box<Run>),
    /// List the ids of all cases and checks.
    List(List),
    /// Run the requests on standard input, in a process that may crash.
    #[command(hide = true)]
    Worker(Worker),
}

/// The backend and device under test.
#[derive(Clone, Debug, Args)]
pub(crate) struct Target {
    /// The backend: the path of a plugin's library or manifest, or a name that `dsrun backends` lists.
    #[arg(value_name = "PATH|NAME")]
    pub(crate) backend: String,
    /// The device of the backend.
    #[arg(long, default_value_t = 0, value_name = "INDEX")]
    pub(crate) device: usize,
    /// Require these profiles: an op of theirs that the backend does not support is a failure. By default, the profiles that
    /// the device claims.
    #[arg(long, value_name = "PROFILE", value_delimiter = ',', value_parser = profile)]
    pub(crate) profile: Vec<Profile>,
}

/// The cases to run or list.
#[derive(Clone, Debug, Args)]
pub(crate) struct Selection {
    /// Only cases of these ops; `*` matches any characters, `check` selects the checks of behaviour. May be given several times.
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    pub(crate) op: Vec<String>,
    /// Also the checks on tensors of more than 2^31 elements, which take up to 26 GB of memory.
    #[arg(long)]
    pub(crate) large: bool,
    /// The seed of the random cases.
    #[arg(long, default_value_t = crate::suite::SEED, value_name = "NUMBER")]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) target: Target,
    #[command(flatten)]
    pub(crate) selection: Selection,
    /// Only these cases, by their ids. May be given several times.
    #[arg(long, value_name = "ID", num_args = 1.., conflicts_with_all = ["op", "seed", "large"])]
    pub(crate) case: Vec<String>,
    /// Also write the results to a JSON file.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Also write the results to a JUnit XML file.
    #[arg(long, value_name = "FILE")]
    pub(crate) junit: Option<PathBuf>,
    /// Also write a Markdown page with a table of ops and element types, for publication.
    #[arg(long, value_name = "FILE")]
    pub(crate) markdown: Option<PathBuf>,
    /// Show the seconds of each op beside those in a JSON file of another run, such as one of the backend `cpu`.
    #[arg(long, value_name = "FILE")]
    pub(crate) compare: Option<PathBuf>,
    /// A TOML file of known failures, each with a reason and an expiry date.
    #[arg(long, value_name = "FILE")]
    pub(crate) waivers: Option<PathBuf>,
    /// Number of processes that run cases in parallel. By default, one for each core, at most 16.
    #[arg(long, value_name = "COUNT")]
    pub(crate) jobs: Option<NonZeroUsize>,
    /// After the cases, repeat them with other seeds for this many seconds, or until one fails.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub(crate) soak: Option<u64>,
    /// Time limit of a case, in seconds.
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    #[command(flatten)]
    pub(crate) selection: Selection,
}

#[derive(Debug, Args)]
pub(crate) struct Worker {
    #[command(flatten)]
    pub(crate) target: Target,
}

fn profile(text: &str) -> Result<Profile, String> {
    let found = Profile::ALL.into_iter().find(|profile| profile.name() == text);
    found.ok_or_else(|| {
        let names: Vec<&str> = Profile::ALL.iter().map(|profile| profile.name()).collect();
        format!("the profiles are {}", names.join(", "))
    })
}

impl Selection {
    /// Whether cases of an op are selected.
    pub(crate) fn wants(&self, op: &str) -> bool {
        self.op.is_empty() || self.op.iter().any(|pattern| matches(pattern, op))
    }
}

/// Whether a text matches a pattern in which `*` stands for any characters.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((before, after)) => text.strip_prefix(before).is_some_and(|rest| {
            (0..=rest.len()).any(|skipped| rest.is_char_boundary(skipped) && matches(after, &rest[skipped..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use rstest::rstest;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[rstest]
    #[case("add", "add", true)]
    #[case("add", "add_rms_norm", false)]
    #[case("add*", "add_rms_norm", true)]
    #[case("*norm", "add_rms_norm", true)]
    #[case("*norm", "norm_linear", false)]
    #[case("*a*o*", "attention", true)]
    #[case("*", "", true)]
    #[case("a*b*", "ba", false)]
    fn stars_match_any_characters(#[case] pattern: &str, #[case] text: &str, #[case] expected: bool) {
        assert_eq!(matches(pattern, text), expected);
    }
}
