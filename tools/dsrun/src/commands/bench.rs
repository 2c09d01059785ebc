//! `dsrun bench`: measure speed.

mod abi;
mod bandwidth;
mod latency;

use crate::{
    arguments::{Bench, BenchCommand},
    terminal::Terminal,
};
use anyhow::Result;

pub(crate) fn run(command: &Bench, terminal: &Terminal) -> Result<()> {
    match &command.command {
        BenchCommand::Latency(command) => latency::run(command, terminal),
        BenchCommand::Abi(command) => abi::run(command, terminal),
    }
}
