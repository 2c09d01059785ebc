//! A fuzzer for tests: it mutates inputs, keeps those that reach new code, and reports an input that panics, takes too long or takes
//! too much memory.
//!
//! A target is a test that calls [`Fuzzer::run`]. Under `cargo test` it runs a fixed number of inputs, the same every time, and keeps
//! those whose outcome is new. With `DSRUN_FUZZ_SECONDS` it runs for that time, and with `DSRUN_FUZZ_FOLDER` its inputs are kept from run
//! to run. A build with coverage counters keeps the inputs that reach new code, too:
//!
//! ```sh
//! export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
//! DSRUN_FUZZ_SECONDS=600 cargo test --target x86_64-unknown-linux-gnu --target-dir target/fuzz -p dsrun-models --test fuzz
//! DSRUN_FUZZ_SECONDS=600 cargo test --target x86_64-unknown-linux-gnu --target-dir target/fuzz -p dsrun --bin dsrun -- fuzz
//! ```
//!
//! Reproduce a finding with `DSRUN_FUZZ_INPUT=FILE cargo test ..`.

mod coverage;
mod edit;
mod random;

pub use edit::{edit_bytes, edit_json};
pub use random::Random;

use crate::counting_allocator::peak_of;
use coverage::Coverage;
use std::{
    any::Any,
    collections::HashSet,
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The variable with the seconds that each target runs, instead of its number of inputs.
pub const SECONDS: &str = "DSRUN_FUZZ_SECONDS";
/// The variable with the seed of a run with a time limit; another one every time if it is not set.
pub const SEED: &str = "DSRUN_FUZZ_SEED";
/// The variable with the folder that keeps inputs from run to run.
pub const FOLDER: &str = "DSRUN_FUZZ_FOLDER";
/// The variable with the file of a single input to run.
pub const INPUT: &str = "DSRUN_FUZZ_INPUT";

/// The time limit of one input. Reaching it means that the code hangs.
const PATIENCE: Duration = Duration::from_secs(30);
/// The most bytes of an input, unless a seed is longer.
const MAX_BYTES: usize = 64 << 10;
/// The most inputs that are kept.
const MAX_KEPT: usize = 20_000;

/// Changes an input in place. The third argument is another input, to take parts of.
type Edit<'a> = Box<dyn Fn(&mut Random, &mut Vec<u8>, &[u8]) + 'a>;

/// A fuzz target while it is set up.
pub struct Fuzzer<'a> {
    name: &'a str,
    seeds: Vec<Vec<u8>>,
    words: Vec<Vec<u8>>,
    edit: Option<Edit<'a>>,
    inputs: usize,
    memory: Option<Box<dyn Fn(usize) -> usize + 'a>>,
}

/// The results of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The number of inputs that ran.
    pub runs: u64,
    /// The number of inputs that were kept.
    pub kept: usize,
    /// The number of coverage counters that were reached; 0 without coverage.
    pub edges: usize,
}

impl<'a> Fuzzer<'a> {
    /// A target with a name that is unique in the repository.
    pub fn new(name: &'a str) -> Self {
        Self { name, seeds: Vec::new(), words: Vec::new(), edit: None, inputs: 2000, memory: None }
    }

    /// Adds inputs to start from.
    #[must_use]
    pub fn seeds<S: Into<Vec<u8>>>(mut self, seeds: impl IntoIterator<Item = S>) -> Self {
        self.seeds.extend(seeds.into_iter().map(Into::into));
        self
    }

    /// Adds words of the format, which edits insert.
    #[must_use]
    pub fn words<W: AsRef<[u8]>>(mut self, words: impl IntoIterator<Item = W>) -> Self {
        self.words.extend(words.into_iter().map(|word| word.as_ref().to_vec()));
        self
    }

    /// Edits three of four inputs in a way that keeps the structure of the format.
    #[must_use]
    pub fn edit(mut self, edit: impl Fn(&mut Random, &mut Vec<u8>, &[u8]) + 'a) -> Self {
        self.edit = Some(Box::new(edit));
        self
    }

    /// Edits inputs as JSON; see [`edit_json`].
    #[must_use]
    pub fn json(self) -> Self {
        let words: Vec<String> =
            self.words.iter().filter_map(|word| String::from_utf8(word.clone()).ok()).collect();
        self.edit(move |random, input, other| edit_json(random, input, other, &words))
    }

    /// The number of inputs under `cargo test`; 2000 if not given.
    #[must_use]
    pub fn inputs(mut self, inputs: usize) -> Self {
        self.inputs = inputs;
        self
    }

    /// The most bytes of memory for an input of a length, if the test binary has the
    /// [counting allocator](crate::counting_allocator::Counting).
    #[must_use]
    pub fn memory(mut self, limit: impl Fn(usize) -> usize + 'a) -> Self {
        self.memory = Some(Box::new(limit));
        self
    }

    /// Runs the target. It returns its outcome, such as an error; inputs of a new outcome are kept. Digits do not make an outcome new.
    ///
    /// # Panics
    /// If an input makes the target panic, or take too much memory. The message names the file of the input.
    pub fn run(self, target: impl Fn(&[u8]) -> String) -> Summary {
        if let Some(path) = env::var_os(INPUT) {
            let input = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            Run::new(&self, &target).run(&input);
            return Summary { runs: 1, kept: 0, edges: 0 };
        }
        Run::new(&self, &target).search()
    }

    fn edited(&self, random: &mut Random, input: &mut Vec<u8>, other: &[u8]) {
        for _ in 0..1 + random.below(3) {
            match &self.edit {
                Some(edit) if random.below(4) > 0 => edit(random, input, other),
                _ => edit_bytes(random, input, other, &self.words),
            }
        }
    }
}

/// The input that runs now, and since when.
type Current = Arc<Mutex<Option<(Instant, Vec<u8>)>>>;

/// A target while it runs.
struct Run<'a, 'b, T> {
    fuzzer: &'b Fuzzer<'a>,
    target: &'b T,
    coverage: Coverage,
    outcomes: HashSet<u64>,
    folder: Option<PathBuf>,
    current: Current,
    /// Ends the watching thread when it is dropped.
    _running: Arc<()>,
}

impl<'a, 'b, T: Fn(&[u8]) -> String> Run<'a, 'b, T> {
    fn new(fuzzer: &'b Fuzzer<'a>, target: &'b T) -> Self {
        let folder = env::var_os(FOLDER).map(|folder| PathBuf::from(folder).join(fuzzer.name));
        if let Some(folder) = &folder {
            fs::create_dir_all(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        }
        let (current, running) = (Current::default(), Arc::default());
        watch(fuzzer.name.to_owned(), &current, &running);
        Self {
            fuzzer,
            target,
            coverage: Coverage::new(),
            outcomes: HashSet::new(),
            folder,
            current,
            _running: running,
        }
    }

    fn search(&mut self) -> Summary {
        let mut kept = self.fuzzer.seeds.clone();
        kept.extend(self.folder.iter().flat_map(|folder| saved(folder)));
        if kept.is_empty() {
            kept.push(Vec::new());
        }
        let longest = kept.iter().map(Vec::len).fold(MAX_BYTES, usize::max);
        for input in &kept {
            self.run(input);
        }
        let limit = number(SECONDS).map(|seconds| Instant::now() + Duration::from_secs(seconds));
        // A run with a time limit goes on from the inputs of earlier ones, so it should not repeat their edits.
        let new = || u64::from(process::id()) << 32 | kept.len() as u64;
        let mut random = Random::new(limit.map_or(0, |_| number(SEED).unwrap_or_else(new)));
        let mut runs = kept.len() as u64;
        while limit.map_or(runs < self.fuzzer.inputs as u64, |limit| Instant::now() < limit) {
            // The newest inputs are the most promising ones.
            let newest = random.below(2) == 0;
            let at = if newest {
                kept.len() - 1 - random.below(kept.len().min(32))
            } else {
                random.below(kept.len())
            };
            let mut input = kept[at].clone();
            let other = random.below(kept.len());
            self.fuzzer.edited(&mut random, &mut input, &kept[other]);
            input.truncate(longest);
            runs += 1;
            if self.run(&input) && kept.len() < MAX_KEPT {
                if let Some(folder) = &self.folder {
                    // It only helps the next run.
                    let _ = fs::write(folder.join(format!("{:016x}", hash(&input))), &input);
                }
                kept.push(input);
            }
        }
        let summary = Summary { runs, kept: kept.len(), edges: self.coverage.reached() };
        if limit.is_some() {
            let Summary { runs, kept, edges } = summary;
            report(&format!("{}: {runs} inputs, {kept} kept, {edges} edges reached", self.fuzzer.name));
        }
        summary
    }

    /// Runs an input. Returns whether it reaches new code, or has a new outcome.
    fn run(&mut self, input: &[u8]) -> bool {
        if let Some(folder) = &self.folder {
            // What ends the process, such as an overflow of the stack, leaves its input here.
            let _ = fs::write(folder.join(CURRENT), input);
        }
        *lock(&self.current) = Some((Instant::now(), input.to_vec()));
        self.coverage.clear();
        let (result, peak) = peak_of(|| catch_unwind(AssertUnwindSafe(|| (self.target)(input))));
        *lock(&self.current) = None;
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(panic) => self.fail(input, message(&*panic)),
        };
        if let Some(most) =
            self.fuzzer.memory.as_ref().map(|limit| limit(input.len())).filter(|most| peak > *most)
        {
            self.fail(
                input,
                &format!("it takes {peak} bytes of memory for {}, but may take {most}", input.len()),
            );
        }
        let outcome: String = outcome.chars().filter(|character| !character.is_numeric()).collect();
        self.coverage.is_new() | self.outcomes.insert(hash(outcome.as_bytes()))
    }

    fn fail(&self, input: &[u8], message: &str) -> ! {
        let path = save(self.fuzzer.name, input);
        panic!(
            "{}: {message}\nthe input is {}; {INPUT}={} runs it alone",
            self.fuzzer.name,
            path.display(),
            path.display()
        )
    }
}

impl<T> Drop for Run<'_, '_, T> {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            let _ = fs::remove_file(folder.join(CURRENT));
        }
    }
}

/// The number in a variable, if it is set.
fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, but must be a number")))
}

/// The name of the file with the input that runs now.
const CURRENT: &str = "current";

fn lock(current: &Current) -> std::sync::MutexGuard<'_, Option<(Instant, Vec<u8>)>> {
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the process if an input takes too long.
fn watch(name: String, current: &Current, running: &Arc<()>) {
    let (current, running) = (current.clone(), Arc::downgrade(running));
    thread::spawn(move || {
        while running.strong_count() > 0 {
            thread::sleep(Duration::from_secs(1));
            if let Some((start, input)) = &*lock(&current)
                && start.elapsed() > PATIENCE
            {
                let path = save(&name, input);
                report(&format!("{name}: an input takes more than {PATIENCE:?}: {}", path.display()));
                process::abort();
            }
        }
    });
}

#[allow(clippy::print_stderr, reason = "a test has no other way to say how far it got")]
fn report(message: &str) {
    eprintln!("{message}");
}

/// Saves an input that fails.
fn save(name: &str, input: &[u8]) -> PathBuf {
    let folder = env::var_os(FOLDER).map_or_else(env::temp_dir, PathBuf::from);
    let path = folder.join(format!("finding-{name}-{:016x}", hash(input)));
    // The message has the reason why the test fails, whether the input is saved or not.
    let _ = fs::write(&path, input);
    path
}

fn saved(folder: &Path) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| !path.ends_with(CURRENT)).collect();
    paths.sort();
    paths.iter().filter_map(|path| fs::read(path).ok()).collect()
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it panics")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader with a defect behind three checks.
    fn deep(input: &[u8]) -> String {
        match input {
            [b'a', b'b', b'c', ..] => panic!("found"),
            [b'a', b'b', ..] => "two".to_owned(),
            [b'a', ..] => "one".to_owned(),
            _ => "none".to_owned(),
        }
    }

    #[test]
    fn inputs_with_new_outcomes_lead_further() {
        let found = catch_unwind(|| Fuzzer::new("deep").seeds(["xyzw"]).inputs(100_000).run(deep));
        let panic = found.expect_err("the defect is found");
        assert!(message(&*panic).starts_with("deep: found"), "{}", message(&*panic));
    }

    #[test]
    fn equal_runs_have_equal_results() {
        let run = || {
            Fuzzer::new("equal")
                .seeds(["{\"a\": [1, 2]}"])
                .words(["b"])
                .json()
                .run(|input| format!("{}", input.len()))
        };
        assert_eq!(run(), run());
        assert_eq!(run().runs, 2000);
    }
}
