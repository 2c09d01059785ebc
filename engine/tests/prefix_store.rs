//! Tests of the prefix cache outside the device: answers and logits are those without it, after evictions, restarts and damage.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/lagging.rs"]
mod lagging;
mod support;

use dsrun_core::device::{Device, DeviceOptions};
use dsrun_engine::{
    CachePrecision, Engine, EngineOptions, EnginePlan, Precision, PrefixStore, Request, Statistics,
    passes::quantize::{Policy, Scheme},
};
use dsrun_models::model::Model;
use lagging::{Fault, LaggingDevice, Pace};
use rstest::rstest;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};
use support::{device, exact, fixtures, late::LateDevice, open};

/// Tokens of a prompt, of which all but the last page are found again.
const PROMPT: usize = 41;
const FOUND: u64 = 40;

/// A token, the logarithm of its probability, and those of the most likely tokens, to the bit.
type Answer = Vec<(u32, u32, Vec<(u32, u32)>)>;

fn prompt(number: u32) -> Vec<u32> {
    (0..PROMPT as u32).map(|token| (token * 7 + number * 31 + 3) % 96).collect()
}

/// Room for one request, so that each prompt evicts the one before it.
fn options(store: PrefixStore) -> EngineOptions {
    EngineOptions {
        ignore_end: true,
        context: Some(64),
        kv_tokens: Some(64),
        prefix_store: store,
        ..exact(16, 1)
    }
}

fn in_host(bytes: u64) -> PrefixStore {
    PrefixStore { host_bytes: bytes, ..PrefixStore::default() }
}

fn in_folder(folder: &Path) -> PrefixStore {
    PrefixStore { folder: Some(folder.to_owned()), ..PrefixStore::default() }
}

fn start(model: &Model, device: Arc<dyn Device>, options: &EngineOptions) -> Engine {
    EnginePlan::new(model, &*device, options).unwrap().load(model, device, &mut |_, _| {}).unwrap()
}

/// The answer to a request, and how many tokens of its prompt were cached.
fn ask(engine: &mut Engine, request: Request) -> (Answer, usize) {
    engine.submit(request).unwrap();
    let (mut answer, mut cached) = (Vec::new(), 0);
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            let top = event.top.iter().map(|(token, log)| (*token, log.to_bits())).collect();
            answer.push((event.token, event.log_probability.to_bits(), top));
            cached = event.cached;
        }
    }
    (answer, cached)
}

fn request(number: u32) -> Request {
    Request { max_tokens: Some(12), top_log_probabilities: 5, ..Request::new(prompt(number)) }
}

fn answer(engine: &mut Engine, number: u32) -> (Answer, usize) {
    ask(engine, request(number))
}

/// The answers to the first prompts without a store.
fn expected(model: &Model, options: &EngineOptions) -> Vec<Answer> {
    let options =
        EngineOptions { prefix_cache: false, prefix_store: PrefixStore::default(), ..options.clone() };
    let mut engine = start(model, device(), &options);
    (0..3).map(|number| answer(&mut engine, number).0).collect()
}

fn hits(statistics: &Statistics) -> [u64; 2] {
    [statistics.host_hit_tokens, statistics.folder_hit_tokens]
}

/// The files of pages in a folder.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

#[rstest]
fn evicted_prompts_come_back_from_host_memory(
    #[values("llama3", "qwen2_5", "gemma3")] name: &str,
    #[values("f32", "bf16", "int8", "int8_cache")] format: &str,
    #[values(false, true)] late: bool,
) {
    let model = open(name);
    let quantize = (format == "int8").then(|| Policy::of(Scheme::W8A16));
    let precision = if format == "bf16" { Precision::Bf16 } else { Precision::F32 };
    let kv_precision = if format == "int8_cache" { CachePrecision::Int8 } else { CachePrecision::Keep };
    let options = EngineOptions { precision, kv_precision, quantize, ..options(in_host(1 << 20)) };
    let expected = expected(&model, &options);
    let device = if late { LateDevice::open() } else { device() };
    let mut engine = start(&model, device, &options);
    for round in 0..3 {
        for number in 0..3 {
            let (found, cached) = answer(&mut engine, number);
            assert_eq!(found, expected[number as usize], "round {round}, prompt {number}");
            assert_eq!(cached as u64, if round == 0 { 0 } else { FOUND });
        }
    }
    assert_eq!(hits(engine.statistics()), [6 * FOUND, 0]);
    assert!(engine.statistics().prefix_host_bytes > 0);
}

#[rstest]
#[case::more_than_a_prompt(2)]
#[case::less_than_a_prompt(1)]
fn host_memory_is_bounded(#[case] prompts: u64) {
    let model = open("llama3");
    let expected = expected(&model, &options(PrefixStore::default()));
    let plan = EnginePlan::new(&model, &*device(), &options(PrefixStore::default())).unwrap();
    let page = plan.memory().kv_cache / 16;
    let limit = page * 7 * prompts;
    let mut engine = start(&model, device(), &options(in_host(limit)));
    for number in [0, 1, 2, 0, 1, 2, 2, 1, 0] {
        assert_eq!(answer(&mut engine, number).0, expected[number as usize]);
        assert!(engine.statistics().prefix_host_bytes <= limit);
    }
}

#[test]
fn a_second_start_finds_the_prompts_of_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let (model, options) = (open("llama3"), options(in_folder(folder.path())));
    let expected = expected(&model, &options);
    let mut engine = start(&model, device(), &options);
    let steps: Vec<u64> = (0..3)
        .map(|number| {
            let before = engine.statistics().steps;
            assert_eq!(answer(&mut engine, number), (expected[number as usize].clone(), 0));
            engine.statistics().steps - before
        })
        .collect();
    drop(engine);
    let files = pages(folder.path());
    // Thirteen full pages of each prompt and its answer; the last token of an answer is never computed.
    assert_eq!(files.len(), 3 * 13);
    assert!(files.iter().all(|path| path.extension().is_some_and(|extension| extension == "page")));
    for _ in 0..2 {
        // The context and the number of pages may differ.
        let options =
            EngineOptions { context: Some(60), kv_tokens: Some(128), max_requests: 2, ..options.clone() };
        let mut engine = start(&model, device(), &options);
        for number in 0..3 {
            let before = engine.statistics().steps;
            assert_eq!(answer(&mut engine, number), (expected[number as usize].clone(), FOUND as usize));
            // Without the two steps of sixteen tokens that the prompt took before.
            assert_eq!(engine.statistics().steps - before, steps[number as usize] - 2);
        }
        let statistics = engine.statistics();
        assert_eq!((hits(statistics), statistics.prefix_hit_tokens), ([0, 3 * FOUND], 3 * FOUND));
        assert_eq!((statistics.pages_written, statistics.pages_damaged), (0, 0));
    }
    assert_eq!(pages(folder.path()), files);
}

#[test]
fn many_requests_with_both_tiers_get_the_answers_that_they_get_alone() {
    let folder = tempfile::tempdir().unwrap();
    let model = open("llama3");
    let alone = options(PrefixStore::default());
    let expected: Vec<Answer> = {
        let mut engine = start(&model, device(), &EngineOptions { prefix_cache: false, ..alone.clone() });
        (0..8).map(|number| answer(&mut engine, number % 5).0).collect()
    };
    let store = PrefixStore { host_bytes: 30_000, ..in_folder(folder.path()) };
    for (round, swap_tokens) in [0, 64, 0].into_iter().enumerate() {
        let options = EngineOptions {
            kv_tokens: Some(128),
            max_requests: 4,
            swap_tokens,
            prefix_store: store.clone(),
            ..alone.clone()
        };
        let mut engine = start(&model, LateDevice::open(), &options);
        let ids: Vec<_> = (0..8).map(|number| engine.submit(request(number % 5)).unwrap()).collect();
        let mut answers = vec![Vec::new(); 8];
        while !engine.is_idle() {
            for event in engine.step().unwrap() {
                let index = ids.iter().position(|id| *id == event.request).unwrap();
                let top = event.top.iter().map(|(token, log)| (*token, log.to_bits())).collect();
                answers[index].push((event.token, event.log_probability.to_bits(), top));
            }
        }
        assert_eq!(answers, expected, "round {round}");
        assert_eq!(engine.pages_in_use(), 0);
        assert!(round == 0 || engine.statistics().folder_hit_tokens > 0, "{:?}", engine.statistics());
    }
}

#[test]
fn salted_prompts_are_found_by_their_salt_only() {
    let folder = tempfile::tempdir().unwrap();
    let (model, options) = (open("llama3"), options(in_folder(folder.path())));
    let salted = |salt: Option<&str>| Request { cache_salt: salt.map(str::to_owned), ..request(0) };
    drop(ask(&mut start(&model, device(), &options), salted(Some("a"))));
    for (salt, found) in [(None, 0), (Some("b"), 0), (Some("a"), FOUND as usize), (None, FOUND as usize)] {
        let mut engine = start(&model, device(), &options);
        assert_eq!(ask(&mut engine, salted(salt)).1, found, "{salt:?}");
    }
}

#[rstest]
#[case::a_changed_byte(&|bytes: &mut Vec<u8>| bytes[200] ^= 1)]
#[case::a_changed_key(&|bytes: &mut Vec<u8>| bytes[10] ^= 1)]
#[case::cut(&|bytes: &mut Vec<u8>| bytes.truncate(bytes.len() - 1))]
#[case::empty(&Vec::clear)]
#[case::longer(&|bytes: &mut Vec<u8>| bytes.push(0))]
fn damaged_pages_are_computed_again(#[case] damage: &dyn Fn(&mut Vec<u8>)) {
    let folder = tempfile::tempdir().unwrap();
    let (model, options) = (open("llama3"), options(in_folder(folder.path())));
    let expected = expected(&model, &options);
    drop(answer(&mut start(&model, device(), &options), 0));
    let files = pages(folder.path());
    for path in &files {
        let sound = fs::read(path).unwrap();
        let mut bytes = sound.clone();
        damage(&mut bytes);
        fs::write(path, bytes).unwrap();
        let mut engine = start(&model, device(), &options);
        let (found, cached) = answer(&mut engine, 0);
        assert_eq!(found, expected[0]);
        // A page behind the prompt is not read, so it stays.
        let damaged = engine.statistics().pages_damaged;
        assert_eq!((cached < FOUND as usize, damaged), if damaged > 0 { (true, 1) } else { (false, 0) });
        drop(engine);
        if damaged == 0 {
            fs::write(path, &sound).unwrap();
        }
        assert_eq!(fs::read(path).unwrap(), sound, "it is written again");
    }
    assert_eq!(pages(folder.path()), files);
}

#[test]
fn pages_of_another_model_or_format_are_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let first = options(in_folder(folder.path()));
    let copy = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixtures().join("llama3")).unwrap() {
        let file = file.unwrap().path();
        fs::copy(&file, copy.path().join(file.file_name().unwrap())).unwrap();
    }
    let model = Model::open(copy.path()).unwrap();
    drop(answer(&mut start(&model, device(), &first), 0));
    let cached = |model: &Model, options: &EngineOptions| answer(&mut start(model, device(), options), 0).1;
    assert_eq!(cached(&model, &first), FOUND as usize);
    assert_eq!(cached(&open("qwen2_5"), &first), 0);
    for other in [
        EngineOptions { precision: Precision::Bf16, ..first.clone() },
        EngineOptions { kv_precision: CachePrecision::Bf16, ..first.clone() },
        EngineOptions { kv_precision: CachePrecision::Int8, ..first.clone() },
        EngineOptions { block_size: 8, ..first.clone() },
        EngineOptions { quantize: Some(Policy::of(Scheme::W8A16)), ..first.clone() },
    ] {
        assert_eq!(cached(&model, &other), 0, "{other:?}");
    }
    // Other weights in files of the same names, lengths and times of change.
    drop(model);
    for number in 1..=3 {
        let path = copy.path().join(format!("model-0000{number}-of-00003.safetensors"));
        let (mut bytes, time) = (fs::read(&path).unwrap(), path.metadata().unwrap().modified().unwrap());
        let end = bytes.len();
        bytes[end / 2..].iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
        fs::write(&path, bytes).unwrap();
        fs::File::options().append(true).open(&path).unwrap().set_modified(time).unwrap();
    }
    assert_eq!(cached(&Model::open(copy.path()).unwrap(), &first), 0);
}

#[test]
fn engines_that_run_at_the_same_time_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (model, options) = (open("llama3"), options(in_folder(folder.path())));
    let expected = expected(&model, &options);
    std::thread::scope(|scope| {
        for first in 0..3 {
            let (model, options, expected) = (&model, &options, &expected);
            scope.spawn(move || {
                let mut engine = start(model, device(), options);
                for number in (first..first + 6).map(|number| number % 3) {
                    assert_eq!(answer(&mut engine, number).0, expected[number as usize]);
                }
                assert_eq!(engine.statistics().pages_damaged, 0);
            });
        }
    });
    assert_eq!(pages(folder.path()).len(), 3 * 13);
}

#[test]
fn a_small_limit_keeps_the_folder_small_and_answers_right() {
    let folder = tempfile::tempdir().unwrap();
    let model = open("llama3");
    let unlimited = options(in_folder(folder.path()));
    let expected = expected(&model, &unlimited);
    drop(answer(&mut start(&model, device(), &unlimited), 0));
    let size = pages(folder.path())[0].metadata().unwrap().len();
    let store = PrefixStore { folder_bytes: 6 * size, ..in_folder(folder.path()) };
    let mut engine = start(&model, device(), &options(store));
    for number in [0, 1, 2, 2, 1, 0] {
        assert_eq!(answer(&mut engine, number).0, expected[number as usize]);
    }
    drop(engine);
    assert!(pages(folder.path()).len() <= 6);
}

/// The folder is taken away while the engine runs: nothing can be written or read any more.
#[test]
fn a_folder_that_fails_ends_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let (model, options) = (open("llama3"), options(in_folder(&folder.path().join("cache"))));
    let expected = expected(&model, &options);
    let mut engine = start(&model, device(), &options);
    assert_eq!(answer(&mut engine, 0).0, expected[0]);
    fs::rename(folder.path().join("cache"), folder.path().join("elsewhere")).unwrap();
    fs::write(folder.path().join("cache"), []).unwrap();
    for number in [1, 0, 2] {
        assert_eq!(answer(&mut engine, number).0, expected[number as usize]);
    }
    assert_eq!(engine.statistics().folder_hit_tokens, 0);
}

/// Streams run side by side, in any order that events allow.
#[rstest]
#[case::copies_late(Pace::Late, None, true)]
#[case::copies_early(Pace::Early, None, true)]
#[case::a_copy_is_not_awaited(Pace::Late, Some(Fault::CopyNotAwaited), false)]
#[case::a_page_is_copied_too_early(Pace::Early, Some(Fault::SlotReusedEarly), false)]
#[case::the_host_reads_too_early(Pace::Late, Some(Fault::HostDoesNotWait), false)]
fn events_order_moves_and_steps(#[case] pace: Pace, #[case] fault: Option<Fault>, #[case] right: bool) {
    let model = open("llama3");
    let options = options(in_host(1 << 20));
    let expected = expected(&model, &options);
    let device = LaggingDevice::open(&DeviceOptions::default(), pace, fault);
    let mut engine = start(&model, device, &options);
    let mut found = Vec::new();
    for _ in 0..2 {
        found.extend((0..3).map(|number| answer(&mut engine, number).0));
    }
    assert_eq!(found == [&expected[..], &expected[..]].concat(), right);
}

/// The same for requests that are swapped out and back.
#[rstest]
#[case::copies_late(Pace::Late, None, true)]
#[case::copies_early(Pace::Early, None, true)]
#[case::a_copy_is_not_awaited(Pace::Late, Some(Fault::CopyNotAwaited), false)]
#[case::a_page_is_copied_too_early(Pace::Early, Some(Fault::SlotReusedEarly), false)]
fn events_order_swaps_and_steps(#[case] pace: Pace, #[case] fault: Option<Fault>, #[case] right: bool) {
    let model = open("llama3");
    let options = EngineOptions {
        kv_tokens: Some(96),
        swap_tokens: 256,
        max_requests: 3,
        prefix_cache: false,
        ..options(PrefixStore::default())
    };
    let run = |device: Arc<dyn Device>| {
        let mut engine = start(&model, device, &options);
        let prompts: Vec<Vec<u32>> = (0..3).map(|number| prompt(number)[..20].to_vec()).collect();
        let answers = support::greedy(&mut engine, &prompts, 40);
        (answers, engine.statistics().preemptions)
    };
    let (expected, preemptions) = run(device());
    assert!(preemptions > 0);
    let found = run(LaggingDevice::open(&DeviceOptions::default(), pace, fault)).0;
    assert_eq!(found == expected, right);
}

#[test]
fn what_cannot_be_is_refused() {
    let model = open("llama3");
    let refused = |options: &EngineOptions| {
        let device = device();
        let plan = EnginePlan::new(&model, &*device, options);
        let loaded = plan.and_then(|plan| plan.load(&model, device, &mut |_, _| {}));
        loaded.err().unwrap().to_string()
    };
    let message = refused(&EngineOptions { prefix_cache: false, ..options(in_host(1000)) });
    assert!(message.starts_with("prefix-cache-host is 1000: needs the prefix cache"), "{message}");
    let message = refused(&options(in_host(u64::MAX)));
    assert!(message.contains("prefix-cache-host") && message.contains("available host memory"), "{message}");
    let folder = tempfile::tempdir().unwrap();
    let message = refused(&options(PrefixStore { folder_bytes: 10, ..in_folder(folder.path()) }));
    assert!(message.contains("prefix-cache-size is 10 B"), "{message}");
    let file = folder.path().join("file");
    fs::write(&file, []).unwrap();
    let message = refused(&options(in_folder(&file)));
    assert!(message.contains("prefix-cache is") && message.contains("cannot be written to"), "{message}");
    let devices = [device(), device()];
    let split = EnginePlan::on_devices(&model, &devices, &options(in_host(1000))).unwrap_err().to_string();
    assert!(split.contains("prefix-cache-host") && split.contains("several devices"), "{split}");
}
