//! Inference of a small multilayer perceptron on one device, over the stages of a pipeline, and over tensor-parallel ranks, divided by
//! the same passes as language models.
//!
//!     cargo run --release -p dsrun-engine --example mlp -- [--layers 784,512,512,10] [--batch 4096] [--ranks 2] [--rounds 15]
//!
//! Every rank has one thread of the CPU. The batch is divided into micro-batches, as many as the first column says. The bubble is the
//! share of time in which stages idle; beside it is the prediction of the simulator from the mean time of a micro-batch on each
//! stage, and GPipe's formula for equal stages. `docs/src/performance/pipeline.md` has results.

#![allow(clippy::print_stdout, reason = "a program for people")]

#[path = "mlp/network.rs"]
mod network;
#[path = "mlp/rank.rs"]
mod rank;

use dsrun_core::{
    collective::{Comm, host::HostComm},
    device::{Backend, DeviceOptions},
    program::Program,
};
use dsrun_engine::{
    LaunchedStep,
    passes::{
        partition::{PipelineOptions, partition, stage_of_rank},
        shard::{MeshCosts, ShardPolicy, shard},
    },
    planner::timeline::Timeline,
};
use network::Network;
use rank::{Measured, Rank};
use std::{
    error::Error,
    sync::{Arc, Barrier},
    thread,
};

/// The numbers of micro-batches that are measured.
const MICRO_BATCHES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

struct Arguments {
    layers: Vec<usize>,
    batch: usize,
    ranks: usize,
    rounds: usize,
}

impl Arguments {
    fn parse() -> Result<Self> {
        let mut own = Self { layers: vec![784, 512, 512, 10], batch: 4096, ranks: 2, rounds: 15 };
        let mut words = std::env::args().skip(1);
        while let Some(flag) = words.next() {
            let value = words.next().ok_or_else(|| format!("{flag} has no value"))?;
            let number = || value.parse::<usize>().map_err(|error| format!("{flag} {value}: {error}"));
            match flag.as_str() {
                "--layers" => {
                    own.layers = value.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?
                }
                "--batch" => own.batch = number()?,
                "--ranks" => own.ranks = number()?,
                "--rounds" => own.rounds = number()?,
                _ => return Err(format!("there is no flag {flag}").into()),
            }
        }
        if own.layers.len() < 2
            || own.layers.contains(&0)
            || own.batch == 0
            || own.ranks < 2
            || own.rounds == 0
        {
            return Err("--layers needs two widths, --ranks two ranks, and no number may be 0".into());
        }
        Ok(own)
    }
}

/// Measures programs, one for each rank, with `count` micro-batches. Returns the median round of each rank, by the time of the slowest
/// rank.
fn measure(
    network: &Network,
    programs: &[Program],
    comms: Option<Vec<HostComm>>,
    count: usize,
    rounds: usize,
) -> Result<Vec<Measured>> {
    let comms = comms.map_or_else(
        || programs.iter().map(|_| None).collect::<Vec<_>>(),
        |comms| comms.into_iter().map(Some).collect(),
    );
    let comms = comms.into_iter().map(|comm| comm.map(|comm| Arc::new(comm) as Arc<dyn Comm>));
    let start = Barrier::new(programs.len());
    let ranks: Vec<Result<Vec<Measured>>> = thread::scope(|scope| {
        let run = |(program, comm): (&'_ Program, Option<Arc<dyn Comm>>)| {
            let (program, start) = (program.clone(), &start);
            scope.spawn(move || -> Result<Vec<Measured>> {
                let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
                let device = dsrun_cpu::CpuBackend::new().open(0, &options)?;
                let mut rank = Rank::new(&program, network, device, comm)?;
                // The first round warms up.
                (0..=rounds)
                    .map(|_| {
                        start.wait();
                        rank.run(count)
                    })
                    .skip(1)
                    .collect()
            })
        };
        let threads: Vec<_> = programs.iter().zip(comms).map(run).collect();
        let panicked = |_| Err("a rank panicked".into());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    let ranks = ranks.into_iter().collect::<Result<Vec<_>>>()?;
    let total = |round: usize| ranks.iter().map(|rank| rank[round].seconds).fold(0.0, f64::max);
    let mut order: Vec<usize> = (0..rounds).collect();
    order.sort_by(|a, b| total(*a).total_cmp(&total(*b)));
    let median = order[rounds / 2];
    Ok(ranks.into_iter().map(|mut rank| rank.swap_remove(median)).collect())
}

fn milliseconds(ranks: &[Measured]) -> f64 {
    ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max) * 1e3
}

fn main() -> Result<()> {
    let Arguments { layers, batch, ranks, rounds } = Arguments::parse()?;
    println!("perceptron {layers:?}, batch of {batch}, f32, ranks of one thread, median of {rounds}");
    println!(
        "{:>13} {:>12} {:>10} {:>9} {:>9} {:>10} {:>9} {:>10} {:>8}",
        "micro-batches",
        "1 device ms",
        "pp ms",
        "bubble",
        "simulated",
        "GPipe's",
        "speed-up",
        "tp ms",
        "speed-up"
    );
    for count in MICRO_BATCHES.into_iter().filter(|count| batch.is_multiple_of(*count)) {
        let network = Network::new(&layers, batch / count)?;
        let costs = MeshCosts { tokens: batch / count, ..MeshCosts::HOST };
        let sizes = |_: &str| None;
        let pipeline = PipelineOptions { stages: ranks, ..PipelineOptions::default() };
        let stages = partition(&network.program, &pipeline, &costs, &sizes, None)?;
        let staged: Vec<Program> =
            (0..ranks).map(|rank| stages[stage_of_rank(rank, ranks)].program.clone()).collect();
        // The weights are split even where the search would rather leave them whole.
        let policy = ShardPolicy::from_toml(&network.split())?;
        let split = shard(&network.program, ranks, &policy, &costs, &sizes, None)?.programs;

        let one = measure(&network, std::slice::from_ref(&network.program), None, count, rounds)?;
        let pp = measure(&network, &staged, Some(HostComm::group(ranks)?), count, rounds)?;
        let tp = measure(&network, &split, Some(HostComm::group(ranks)?), count, rounds)?;
        let expected = &one[0].outputs;
        for (name, found) in [("stages", &pp[0].outputs), ("ranks", &tp[0].outputs)] {
            let pairs = found.iter().zip(expected);
            let error = pairs.map(|(found, expected)| (found - expected).abs()).fold(0.0f32, f32::max);
            if found.len() != expected.len() || error > 1e-4 {
                return Err(format!("the outputs of {name} are off by {error}").into());
            }
        }
        let busy: f64 = pp.iter().map(|rank| rank.busy).sum();
        let bubble = 1.0 - busy * 1e3 / (milliseconds(&pp) * ranks as f64);
        let step = |completed| LaunchedStep { tokens: batch / count, sequences: 1, completed };
        let time = |stage: usize, _: &LaunchedStep| {
            let rank = (0..ranks).find(|rank| stage_of_rank(*rank, ranks) == stage).unwrap_or(0);
            pp[rank].busy / count as f64
        };
        let simulated = Timeline::replay(&vec![step(0); count], ranks, &time).bubble();
        let formula = (ranks - 1) as f64 / (count + ranks - 1) as f64;
        let [one, pp, tp] = [milliseconds(&one), milliseconds(&pp), milliseconds(&tp)];
        println!(
            "{count:>13} {one:>12.2} {pp:>10.2} {:>8.1}% {:>8.1}% {:>9.1}% {:>8.2}x {tp:>10.2} {:>7.2}x",
            100.0 * bubble,
            100.0 * simulated,
            100.0 * formula,
            one / pp,
            one / tp
        );
    }
    Ok(())
}
