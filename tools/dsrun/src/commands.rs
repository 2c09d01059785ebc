//! The commands of the program, one module each.

pub(crate) mod backends;
pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod kernels;
pub(crate) mod logits;
pub(crate) mod models;
pub(crate) mod plan;
pub(crate) mod quantize;
pub(crate) mod serve;
pub(crate) mod shell;

use anyhow::Result;
use dsrun_engine::Statistics;
use serde::Serialize;
use std::io::Write;

/// Prints a value as JSON to standard output.
fn print_json(value: &impl Serialize) -> Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}

/// A line about how many of the proposed tokens were accepted, if any were proposed.
fn speculation_line(statistics: &Statistics) -> Option<String> {
    let Statistics { proposed_tokens: proposed, accepted_tokens: accepted, .. } = statistics;
    (*proposed > 0).then(|| format!("{accepted} of {proposed} proposed tokens were accepted"))
}

/// Prints a line to standard output.
fn print(line: &str) -> Result<()> {
    writeln!(std::io::stdout().lock(), "{line}")?;
    Ok(())
}
