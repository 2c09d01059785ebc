//! The command line of `cargo xtask`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::install::Profile;

/// The text of `--help`.
pub(crate) const USAGE: &str = "\
Project tasks of dsrun.

usage: cargo xtask ci [--only STEP]... [--list]
       cargo xtask docs
       cargo xtask header
       cargo xtask install --prefix DIR [--profile PROFILE]

  ci             run every step, then say which failed and how to rerun it
    --only STEP  run this step only; may be given several times
    --list       print the steps and what each runs
  docs           write the generated pages of the book: the op table
  header         write the generated C header of the plugin ABI: plugins/sdk/include/dsrun.h
  install        build and install programs, plugins and headers
    --prefix DIR where: DIR/bin, DIR/lib/dsrun/backends.d, DIR/include
    --profile P  release, or dev: quick to build, slow to run; release if not given
";

/// The task that the command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// Print [`USAGE`].
    Help,
    /// Print the steps of `ci`.
    List,
    /// Write the generated pages of the book.
    Docs,
    /// Write the C header of the plugin ABI.
    Header,
    /// Build and install.
    Install { prefix: PathBuf, profile: Profile },
    /// Run the steps named, or all of them when none is.
    Ci { only: Vec<String> },
}

/// Reads the arguments that follow the program's name.
pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Task> {
    match arguments.next().as_deref() {
        None | Some("help" | "-h" | "--help") => return Ok(Task::Help),
        Some("ci") => {}
        Some("install") => return parse_install(arguments),
        Some(name @ ("docs" | "header")) => match arguments.next().as_deref() {
            None => return Ok(if name == "docs" { Task::Docs } else { Task::Header }),
            Some("-h" | "--help") => return Ok(Task::Help),
            Some(other) => bail!("`{name}` takes no argument `{other}`; see `cargo xtask --help`"),
        },
        Some(other) => bail!("no task is named `{other}`; see `cargo xtask --help`"),
    }
    let mut only = Vec::new();
    let mut list = false;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "-h" | "--help" => return Ok(Task::Help),
            "--list" => list = true,
            "--only" => match arguments.next() {
                Some(step) => only.push(step),
                None => bail!("`--only` needs the name of a step; see `cargo xtask ci --list`"),
            },
            other => match other.strip_prefix("--only=") {
                Some(step) => only.push(step.to_owned()),
                None => bail!("`ci` takes no argument `{other}`; see `cargo xtask --help`"),
            },
        }
    }
    Ok(if list { Task::List } else { Task::Ci { only } })
}

fn parse_install(mut arguments: impl Iterator<Item = String>) -> Result<Task> {
    let (mut prefix, mut profile) = (None, Profile::Release);
    while let Some(argument) = arguments.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument.as_str(), None),
        };
        match name {
            "-h" | "--help" => return Ok(Task::Help),
            "--prefix" | "--profile" => {
                let value = value.or_else(|| arguments.next()).filter(|value| !value.is_empty());
                let value =
                    value.with_context(|| format!("`{name}` needs a value; see `cargo xtask --help`"))?;
                match name {
                    "--prefix" => prefix = Some(PathBuf::from(value)),
                    _ => profile = Profile::from_name(&value)?,
                }
            }
            other => bail!("`install` takes no argument `{other}`; see `cargo xtask --help`"),
        }
    }
    let prefix = prefix.context("`install` needs `--prefix DIR`, such as `--prefix ~/.local`")?;
    Ok(Task::Install { prefix, profile })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn parse_words(words: &str) -> Result<Task> {
        parse(words.split_whitespace().map(str::to_owned))
    }

    #[rstest]
    #[case("", Task::Help)]
    #[case("ci --help", Task::Help)]
    #[case("docs", Task::Docs)]
    #[case("header", Task::Header)]
    #[case("ci", Task::Ci { only: vec![] })]
    #[case("ci --only fmt --only=test", Task::Ci { only: vec!["fmt".into(), "test".into()] })]
    #[case("ci --only fmt --list", Task::List)]
    #[case("install --prefix a", Task::Install { prefix: "a".into(), profile: Profile::Release })]
    #[case("install --profile=dev --prefix=a", Task::Install { prefix: "a".into(), profile: Profile::Dev })]
    #[case("install --help", Task::Help)]
    fn accepts(#[case] words: &str, #[case] expected: Task) {
        assert_eq!(parse_words(words).unwrap(), expected);
    }

    #[rstest]
    #[case("cy", "`cy`")]
    #[case("ci --only", "needs the name")]
    #[case("ci --fast", "`--fast`")]
    #[case("docs ops", "`ops`")]
    #[case("install", "--prefix DIR")]
    #[case("install --prefix", "needs a value")]
    #[case("install --prefix a --profile fast", "`fast`")]
    #[case("install a", "`a`")]
    #[case("header dsrun.h", "`dsrun.h`")]
    fn refuses_and_names_the_argument(#[case] words: &str, #[case] part: &str) {
        let message = parse_words(words).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}
