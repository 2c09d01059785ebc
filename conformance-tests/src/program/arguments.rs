//! The command line, as clap reads it. The doc comments are the help text.

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
    Run(Run),
    /// List the ids of all cases and checks.
    List(List),
    /// Run what standard input asks for, in a process that may crash.
    #[command(hide = true)]
    Worker(Worker),
}

/// Which device of which backend.
#[derive(Clone, Debug, Args)]
pub(crate) struct Target {
    /// The backend: the path of a plugin's library or manifest, or a name that `dsrun backends` lists.
    #[arg(value_name = "PATH|NAME")]
    pub(crate) backend: String,
    /// The device of the backend.
    #[arg(long, default_value_t = 0, value_name = "INDEX")]
    pub(crate) device: usize,
    /// Hold the backend to these profiles: what one of their ops does not run is a failure. Those the device claims, if not
    /// given.
    #[arg(long, value_name = "PROFILE", value_delimiter = ',', value_parser = profile)]
    pub(crate) profile: Vec<Profile>,
}

/// Which cases.
#[derive(Clone, Debug, Args)]
pub(crate) struct Selection {
    /// Only cases of these ops; `*` stands for any letters, `check` for the checks of behaviour. May be given several times.
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    pub(crate) op: Vec<String>,
    /// Another seed draws other cases.
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
    #[arg(long, value_name = "ID", num_args = 1.., conflicts_with_all = ["op", "seed"])]
    pub(crate) case: Vec<String>,
    /// Also write the results to a file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Also write the results to a file, as JUnit XML.
    #[arg(long, value_name = "FILE")]
    pub(crate) junit: Option<PathBuf>,
    /// Also write a page of Markdown to a file: a table of ops and element types, to publish.
    #[arg(long, value_name = "FILE")]
    pub(crate) markdown: Option<PathBuf>,
    /// A TOML file of failures that are known, each with a reason and a day on which it expires.
    #[arg(long, value_name = "FILE")]
    pub(crate) waivers: Option<PathBuf>,
    /// Processes that run cases side by side; as many as there are cores, at most 8, if not given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) jobs: Option<NonZeroUsize>,
    /// Seconds that one case may take.
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
    /// Whether cases of an op are wanted.
    pub(crate) fn wants(&self, op: &str) -> bool {
        self.op.is_empty() || self.op.iter().any(|pattern| matches(pattern, op))
    }
}

/// Whether a text fits a pattern in which `*` stands for any letters.
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
    fn stars_stand_for_any_letters(#[case] pattern: &str, #[case] text: &str, #[case] expected: bool) {
        assert_eq!(matches(pattern, text), expected);
    }
}
