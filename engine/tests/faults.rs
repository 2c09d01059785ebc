//! A device whose n-th call of a kind fails, for every n, alone or as one of several ranks: no answer is wrong, nobody waits forever, and
//! no memory stays behind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{Code, device::Device};
use dsrun_engine::{
    EmbeddingRequest, EngineOptions, EnginePlan, ExpertsIn, KvIn, PrefixStore, Request, SamplingOptions,
    Speculation, WeightsIn,
    passes::{
        partition::PipelineOptions,
        shard::{MeshCosts, ShardPolicy},
    },
    service::{Service, ServiceError, ServiceOptions, TokenStream},
};
use dsrun_test_support::faulty_device::{Fault, FaultyDevice, Operation};
use rstest::rstest;
use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};
use support::{device, exact, open};

/// The time limit of one run. Reaching it means that somebody waits forever.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs without a fault, the least calls of which are those that are made to fail.
const RUNS: usize = 3;

/// Runs until one has the call that is made to fail.
const TRIES: usize = 5;

/// Tokens of each answer.
const TOKENS: usize = 6;

/// Host memory for the buffers that layers are read into from disk, and for no whole layer beside them.
const DISK_BUFFERS: u64 = 250 << 10;

/// A way to serve, with the calls to the device that only it makes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Room for about two of three answers, so that requests are pre-empted, and swapped to host memory.
    Swapped,
    /// That, with all keys and values in host memory, and steps that copy them: with more than 16 tokens.
    CacheInHost,
    /// Layers are copied to the device in every step.
    WeightsInHost,
    /// Layers are packed into a file at the first start, and read from it in every step.
    WeightsOnDisk,
    /// Steps of few tokens read experts in host memory, others copy them.
    ExpertsInHost,
    /// The model is its own draft model.
    Draft,
    /// Prompts that were evicted come back from host memory or a file.
    Prefixes,
    /// The device is one of two tensor-parallel ranks, or holds one of two stages: the first, which schedules, or the second.
    Split { stages: usize, rank: usize },
}

impl Way {
    fn is_split(self) -> bool {
        matches!(self, Self::Split { .. })
    }

    fn model(self) -> &'static str {
        if self == Self::ExpertsInHost { "mixtral" } else { "llama3" }
    }

    fn options(self, folder: &Path) -> EngineOptions {
        let room = EngineOptions { ignore_end: true, context: Some(32), kv_tokens: Some(96), ..exact(8, 3) };
        let swapped = EngineOptions { kv_tokens: Some(36), swap_tokens: 32, ..room.clone() };
        let none = Some(0);
        match self {
            Self::Swapped => swapped,
            Self::CacheInHost => {
                EngineOptions { kv_in: KvIn::Host, resident_layers: none, step_tokens: 20, ..swapped }
            }
            Self::WeightsInHost => {
                EngineOptions { weights_in: WeightsIn::Host, resident_layers: none, ..room }
            }
            Self::WeightsOnDisk => EngineOptions {
                weights_in: WeightsIn::Disk(folder.to_owned()),
                resident_layers: none,
                host_memory: Some(DISK_BUFFERS),
                ..room
            },
            Self::ExpertsInHost => {
                EngineOptions { experts: ExpertsIn::Host, resident_layers: none, step_tokens: 20, ..room }
            }
            Self::Split { stages, .. } => {
                // Exchanges count as free, so that a model as small as this one is split.
                let costs = MeshCosts {
                    latency_us: 0.0,
                    gather_latency_us: 0.0,
                    link_bandwidth: 1e15,
                    ..MeshCosts::HOST
                };
                EngineOptions {
                    shard: ShardPolicy { costs: Some(costs), ..ShardPolicy::default() },
                    pipeline: PipelineOptions { stages, ..PipelineOptions::default() },
                    ..room
                }
            }
            Self::Draft => EngineOptions { speculation: Some(Speculation::Draft { tokens: 3 }), ..room },
            Self::Prefixes => EngineOptions {
                prefix_store: PrefixStore {
                    host_bytes: 1 << 14,
                    folder: Some(folder.to_owned()),
                    ..PrefixStore::default()
                },
                ..EngineOptions { kv_tokens: Some(36), ..room }
            },
        }
    }
}

/// What a run gave: each answer or its error, and the embedding or its error; several ranks give none.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    answers: Vec<Result<Vec<u32>, String>>,
    embedding: Option<Result<Vec<u32>, String>>,
}

fn answer(mut stream: TokenStream) -> Result<Vec<u32>, String> {
    let mut tokens = Vec::new();
    while let Some(event) = stream.blocking_next() {
        tokens.push(event.map_err(|error: ServiceError| error.to_string())?.token);
    }
    assert_eq!(tokens.len(), TOKENS, "an answer ends early without an error");
    Ok(tokens)
}

/// Loads the model and serves three answers, the last of them once more, and an embedding; the error if it does not load.
fn serve(way: Way, device: Arc<dyn Device>, folder: &Path) -> Result<Outcome, String> {
    let (model, options) = (&open(way.model()), way.options(folder));
    // The device is the first, unless another rank comes before it.
    let mut devices = vec![device];
    if let Way::Split { rank, .. } = way {
        devices.insert(1 - rank, self::device());
    }
    let device = devices[0].clone();
    let plan = match way {
        Way::Split { .. } => EnginePlan::on_devices(model, &devices, &options),
        Way::Draft => EnginePlan::with_draft(model, &Arc::new(open(way.model())), &*device, &options),
        _ => EnginePlan::new(model, &*device, &options),
    };
    let plan = plan.map_err(|error| error.to_string())?;
    let engine = plan.load(model, device, &mut |_, _| {}).map_err(|error| error.to_string())?;
    let service = Service::start(engine, &ServiceOptions::default()).unwrap();
    let handle = service.handle();
    // One of them has a penalty, so that the tokens that it has are counted on the device.
    let request = |index: u32| Request {
        max_tokens: Some(TOKENS),
        sampling: SamplingOptions {
            repetition_penalty: if index == 1 { 1.5 } else { 1.0 },
            ..SamplingOptions::default()
        },
        ..Request::new((0..5 + 4 * index).map(|token| (token * 7 + index) % 96).collect::<Vec<u32>>())
    };
    let asked: Vec<_> = (0..3).map(|index| handle.submit(request(index))).collect();
    let embed = || handle.embed(EmbeddingRequest { tokens: vec![3, 1, 4], ..EmbeddingRequest::default() });
    let embedded = (!way.is_split()).then(embed);
    let answers = asked.into_iter().map(|asked| answer(asked.map_err(|error| error.to_string())?));
    let mut answers: Vec<_> = answers.collect();
    answers.push(handle.submit(request(2)).map_err(|error| error.to_string()).and_then(answer));
    let bits = |vector: Vec<f32>| vector.into_iter().map(f32::to_bits).collect();
    let embedding = embedded.map(|embedded| {
        embedded.and_then(|embedded| embedded.blocking()).map(bits).map_err(|error| error.to_string())
    });
    service.stop(PATIENCE).unwrap();
    Ok(Outcome { answers, embedding })
}

/// The same with a time limit. A panic while the model is loaded is an error like others.
fn serve_in_time(way: Way, device: &Arc<FaultyDevice>, folder: &Path, what: &str) -> Result<Outcome, String> {
    let (sender, receiver) = mpsc::channel();
    let (device, folder): (Arc<dyn Device>, _) = (device.clone(), folder.to_owned());
    thread::spawn(move || {
        let served = catch_unwind(AssertUnwindSafe(|| serve(way, device, &folder)));
        let _ = sender.send(served.unwrap_or_else(|_| Err("it panicked".to_owned())));
    });
    receiver.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what}: it does not end"))
}

#[rstest]
#[case::error(Fault::Error(Code::OutOfMemory))]
#[case::lost(Fault::Lost)]
#[case::panic(Fault::Panic)]
fn a_fault_anywhere_gives_an_error_or_the_right_answer(
    #[case] fault: Fault,
    #[values(
        Operation::Allocate,
        Operation::Create,
        Operation::Upload,
        Operation::Copy,
        Operation::Fill,
        Operation::Record,
        Operation::Wait,
        Operation::Prepack,
        Operation::Plan,
        Operation::Bind,
        Operation::Launch,
        Operation::Capture,
        Operation::Replay
    )]
    operation: Operation,
) {
    check_faults(Way::Swapped, fault, operation);
}

/// What differs in other ways to serve: what they allocate and copy, and the events that order it.
#[rstest]
#[case::cache_in_host(Way::CacheInHost, &[])]
#[case::weights_in_host(Way::WeightsInHost, &[Operation::Prepack])]
#[case::weights_on_disk(Way::WeightsOnDisk, &[Operation::Prepack, Operation::Download, Operation::Wait])]
#[case::experts_in_host(Way::ExpertsInHost, &[Operation::Prepack])]
#[case::draft(Way::Draft, &[Operation::Upload, Operation::Bind])]
#[case::prefixes(Way::Prefixes, &[Operation::Wait])]
fn a_fault_in_any_way_of_serving_gives_an_error_or_the_right_answer(
    #[case] way: Way,
    #[case] more: &[Operation],
) {
    let common = [Operation::Allocate, Operation::Create, Operation::Copy, Operation::Record];
    let launches = [Operation::Capture, Operation::Replay];
    for operation in common.iter().chain(&launches).chain(more) {
        check_faults(way, Fault::Error(Code::OutOfMemory), *operation);
    }
}

/// The other rank neither waits for the one that fails nor answers without it.
#[rstest]
#[case::first_of_two_ranks(Way::Split { stages: 1, rank: 0 })]
#[case::second_of_two_ranks(Way::Split { stages: 1, rank: 1 })]
#[case::first_of_two_stages(Way::Split { stages: 2, rank: 0 })]
#[case::second_of_two_stages(Way::Split { stages: 2, rank: 1 })]
fn a_fault_of_a_rank_gives_an_error_or_the_right_answer(#[case] way: Way) {
    for operation in [Operation::Allocate, Operation::Create, Operation::Prepack, Operation::Launch] {
        check_faults(way, Fault::Error(Code::OutOfMemory), operation);
    }
    for operation in [Operation::Bind, Operation::Replay] {
        check_faults(way, Fault::Panic, operation);
    }
}

fn check_faults(way: Way, fault: Fault, operation: Operation) {
    let sound = |folder: &Path| {
        let device = FaultyDevice::new(device());
        let served = serve_in_time(way, &device, folder, "no fault").expect("without a fault it is served");
        (served, device.count(operation))
    };
    let folder = || tempfile::tempdir().unwrap();
    let (expected, count) = sound(folder().path());
    let mut all = expected.answers.iter().chain(&expected.embedding);
    assert!(all.all(Result::is_ok), "{expected:?}");
    // How requests share steps depends on when they arrive, so runs may differ by a few calls.
    let count = (1..RUNS).map(|_| sound(folder().path()).1).fold(count, usize::min);
    assert!(count > 0, "{way:?} has no {operation:?}");
    // Every call up to a number, then ever fewer of them: a run repeats the same step.
    let calls = (1..=count).filter(|nth| *nth <= 16 || *nth % (nth / 8) == 0 || nth + 4 > count);
    for nth in calls {
        let what = format!("{way:?}, {operation:?} {nth} of {count}");
        let faulty = || {
            let (device, folder) = (FaultyDevice::new(device()), folder());
            device.arm(operation, nth, fault);
            let found = serve_in_time(way, &device, folder.path(), &what);
            (device, folder, found)
        };
        let mut runs = (0..TRIES).map(|_| faulty());
        let (device, folder, found) =
            runs.find(|(device, ..)| device.has_failed()).unwrap_or_else(|| panic!("{what} does not come"));
        if let Ok(found) = found {
            let pairs = found.answers.iter().zip(&expected.answers);
            for (found, expected) in pairs.chain(found.embedding.iter().zip(&expected.embedding)) {
                assert!(found.is_err() || found == expected, "{what}: {found:?}, not {expected:?}");
            }
        }
        assert_eq!(device.memory().used, 0, "{what}: memory stays behind");
        // What was written before the fault is used by the next start, or made again.
        if fs::read_dir(folder.path()).unwrap().next().is_some() {
            assert_eq!(sound(folder.path()).0, expected, "after {what}");
        }
    }
}
