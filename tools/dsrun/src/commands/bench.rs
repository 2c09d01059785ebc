//! `dsrun bench`: measures speed.

mod abi;
mod all_reduce;
mod bandwidth;
mod kernels;
mod latency;
mod median;
mod plot;
mod prefill;
mod prompts;
mod serve;
mod soak;
mod streaming;
mod throughput;

use crate::{
    arguments::{Bench, BenchCommand},
    terminal::Terminal,
};
use anyhow::Result;

pub(crate) fn run(command: &Bench, terminal: &Terminal) -> Result<()> {
    match &command.command {
        BenchCommand::Latency(command) => latency::run(command, terminal),
        BenchCommand::Abi(command) => abi::run(command, terminal),
        BenchCommand::Prefill(command) => prefill::run(command, terminal),
        BenchCommand::Throughput(command) => throughput::run(command, terminal),
        BenchCommand::Kernels(command) => kernels::run(command, terminal),
        BenchCommand::Serve(command) => serve::run(command, terminal),
        BenchCommand::AllReduce(command) => all_reduce::run(command, terminal),
        BenchCommand::Plot(command) => plot::run(command, terminal),
        BenchCommand::Soak(command) => soak::run(command, terminal),
    }
}
