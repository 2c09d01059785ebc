//! The metrics of the server, and `/metrics` in the text format of Prometheus.

use super::replicas::Replicas;
use dsrun_engine::{Histogram as StepHistogram, Phase, Statistics};
use std::{
    collections::BTreeMap,
    fmt::{Display, Write},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Upper bounds of the buckets of times, in seconds.
const BOUNDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// A counter or a gauge.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn take(&self, count: u64) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }

    /// Adds one while the result lives.
    pub(crate) fn hold(&self) -> Held<'_> {
        self.add(1);
        Held(self)
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One that is counted by a [`Count`] until it is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a>(&'a Count);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.take(1);
    }
}

/// A histogram of times.
#[derive(Debug, Default)]
pub(crate) struct Times {
    counts: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Times {
    pub(crate) fn record(&self, time: Duration) {
        let bucket = BOUNDS.partition_point(|bound| *bound < time.as_secs_f64());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// The metrics of the server. The engine has its own statistics.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// Requests by path and status.
    requests: Mutex<BTreeMap<(String, u16), u64>>,
    /// Answers in progress.
    pub(crate) answers_open: Count,
    /// Answers whose client disconnected before their end.
    pub(crate) disconnects: Count,
    /// Texts embedded.
    pub(crate) embeddings: Count,
    pub(crate) connections_open: Count,
    pub(crate) connections_refused: Count,
    pub(crate) panics: Count,
    /// From a request to its first token.
    pub(crate) first_token: Times,
    /// From a token to the next.
    pub(crate) per_token: Times,
    /// From a request to its whole answer.
    pub(crate) answer: Times,
}

impl Metrics {
    /// Counts a request. `path` is a path of the router, so the number of paths is bounded.
    pub(crate) fn count_request(&self, path: &str, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((path.to_owned(), status)).or_insert(0) += 1;
    }

    /// The number of requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).values().sum()
    }

    /// All metrics as text, those of the engines included once there are any. `pending_bytes` are the bytes of bodies whose
    /// requests are not prepared yet, `unsent_bytes` those of responses and tokens that clients have not read yet.
    pub(crate) fn text(
        &self,
        pending_bytes: usize,
        unsent_bytes: usize,
        engine: Option<&Replicas>,
    ) -> String {
        let mut page = Page::default();
        page.single(
            "dsrun_pending_body_bytes",
            "gauge",
            "Bytes of bodies whose requests are not prepared yet.",
            pending_bytes,
        );
        page.single(
            "dsrun_unsent_response_bytes",
            "gauge",
            "Bytes of responses and tokens that clients have not read yet.",
            unsent_bytes,
        );
        page.head("dsrun_requests_total", "counter", "HTTP requests, by path and status.");
        for ((path, status), count) in self.requests.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            page.line("dsrun_requests_total", &format!("path=\"{path}\",status=\"{status}\""), count);
        }
        let counts = [
            ("dsrun_answers_open", "gauge", "Answers in progress.", &self.answers_open),
            (
                "dsrun_disconnects_total",
                "counter",
                "Clients that disconnected before their answer's end.",
                &self.disconnects,
            ),
            ("dsrun_embeddings_total", "counter", "Texts embedded.", &self.embeddings),
            ("dsrun_connections_open", "gauge", "Connections.", &self.connections_open),
            (
                "dsrun_connections_refused_total",
                "counter",
                "Connections refused because of the limit.",
                &self.connections_refused,
            ),
            ("dsrun_panics_total", "counter", "Requests that ended in a defect of the server.", &self.panics),
        ];
        for (name, kind, help, count) in counts {
            page.single(name, kind, help, count.get());
        }
        let times = [
            ("dsrun_first_token_seconds", "From a request to its first token.", &self.first_token),
            ("dsrun_token_seconds", "From a token to the next.", &self.per_token),
            ("dsrun_answer_seconds", "From a request to its whole answer.", &self.answer),
        ];
        for (name, help, times) in times {
            page.head(name, "histogram", help);
            let counts: Vec<u64> = times.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
            let sum = Duration::from_nanos(times.nanoseconds.load(Ordering::Relaxed));
            page.histogram(name, "", &BOUNDS, &counts, sum);
        }
        if let Some(engine) = engine {
            page.engine(&engine.statistics());
            page.replicas(engine);
        }
        page.text
    }
}

/// An answer in progress. If it is dropped before its end, its client has disconnected.
#[derive(Debug)]
pub(crate) struct OpenAnswer {
    metrics: Arc<Metrics>,
    ended: bool,
}

impl OpenAnswer {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        metrics.answers_open.add(1);
        Self { metrics, ended: false }
    }

    /// Marks the answer as complete, or as ended by the server.
    pub(crate) fn end(&mut self) {
        self.ended = true;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }
}

impl Drop for OpenAnswer {
    fn drop(&mut self) {
        self.metrics.answers_open.take(1);
        if !self.ended {
            self.metrics.disconnects.add(1);
        }
    }
}

/// The text of `/metrics` while it is written.
#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = match labels {
            "" => writeln!(self.text, "{name} {value}"),
            labels => writeln!(self.text, "{name}{{{labels}}} {value}"),
        };
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.line(name, "", value);
    }

    fn histogram(&mut self, name: &str, label: &str, bounds: &[f64], counts: &[u64], sum: Duration) {
        let comma = if label.is_empty() { "" } else { "," };
        let mut total = 0;
        let bounds = bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(counts) {
            total += count;
            self.line(&format!("{name}_bucket"), &format!("{label}{comma}le=\"{bound}\""), total);
        }
        self.line(&format!("{name}_sum"), label, sum.as_secs_f64());
        self.line(&format!("{name}_count"), label, total);
    }

    fn replicas(&mut self, replicas: &Replicas) {
        let health = replicas.health();
        let serving = health.iter().filter(|engine| engine.serving).count();
        let age = health.iter().filter_map(|engine| engine.step_age).max().unwrap_or_default();
        self.single("dsrun_engines", "gauge", "Engines.", health.len());
        self.single("dsrun_engines_serving", "gauge", "Engines that get requests.", serving);
        self.single(
            "dsrun_step_age_seconds",
            "gauge",
            "Age of the oldest step in progress.",
            age.as_secs_f64(),
        );
        self.single("dsrun_engine_failures_total", "counter", "Failures of engines.", replicas.failures());
        let help = "Requests that moved from an engine that failed before it began them.";
        self.single("dsrun_moved_requests_total", "counter", help, replicas.moved());
    }

    fn engine(&mut self, engine: &Statistics) {
        let (gauge, counter) = ("gauge", "counter");
        let values = [
            ("dsrun_requests_waiting", gauge, "Requests that wait to start.", engine.waiting as u64),
            ("dsrun_requests_running", gauge, "Running requests.", engine.running as u64),
            ("dsrun_kv_blocks", gauge, "Blocks of the KV cache.", engine.pages_total as u64),
            (
                "dsrun_kv_blocks_in_use",
                gauge,
                "Blocks that running requests hold.",
                engine.pages_in_use as u64,
            ),
            (
                "dsrun_kv_blocks_cached",
                gauge,
                "Blocks that no request holds, but that keep a prefix.",
                engine.pages_cached as u64,
            ),
            ("dsrun_steps_total", counter, "Steps of the model.", engine.steps),
            (
                "dsrun_compiled_steps_total",
                counter,
                "Steps compiled; a request waited for each one after the start.",
                engine.compiled_steps,
            ),
            ("dsrun_submitted_total", counter, "Requests submitted to the engine.", engine.requests),
            ("dsrun_finished_total", counter, "Requests that ran to their end.", engine.finished),
            ("dsrun_cancelled_total", counter, "Requests that were cancelled.", engine.cancelled),
            (
                "dsrun_prompt_tokens_total",
                counter,
                "Prompt tokens of started requests.",
                engine.prompt_tokens,
            ),
            (
                "dsrun_prefix_hit_tokens_total",
                counter,
                "Prompt tokens found in the cache.",
                engine.prefix_hit_tokens,
            ),
            (
                "dsrun_prefix_host_hit_tokens_total",
                counter,
                "Tokens of the prefix cache loaded from host memory.",
                engine.host_hit_tokens,
            ),
            (
                "dsrun_prefix_folder_hit_tokens_total",
                counter,
                "Tokens of the prefix cache loaded from its folder.",
                engine.folder_hit_tokens,
            ),
            (
                "dsrun_prefix_host_bytes",
                gauge,
                "Bytes of host memory that the prefix cache takes.",
                engine.prefix_host_bytes,
            ),
            (
                "dsrun_prefix_blocks_written_total",
                counter,
                "Blocks written to the folder of the prefix cache.",
                engine.pages_written,
            ),
            (
                "dsrun_prefix_blocks_damaged_total",
                counter,
                "Blocks in the folder of the prefix cache that were damaged, and computed again.",
                engine.pages_damaged,
            ),
            ("dsrun_generated_tokens_total", counter, "Tokens generated.", engine.generated_tokens),
            ("dsrun_preemptions_total", counter, "Pre-emptions of requests.", engine.preemptions),
            (
                "dsrun_proposed_tokens_total",
                counter,
                "Tokens proposed by speculation.",
                engine.proposed_tokens,
            ),
            (
                "dsrun_accepted_tokens_total",
                counter,
                "Proposed tokens that were accepted.",
                engine.accepted_tokens,
            ),
        ];
        for (name, kind, help, value) in values {
            self.single(name, kind, help, value);
        }
        self.head("dsrun_step_seconds", "histogram", "Time of each phase of a step on the host.");
        for (phase, histogram) in Phase::ALL.iter().zip(&engine.phases) {
            let label = format!("phase=\"{}\"", phase.name());
            self.histogram(
                "dsrun_step_seconds",
                &label,
                &StepHistogram::BOUNDS,
                histogram.counts(),
                histogram.sum(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_in_the_format_of_prometheus() {
        let metrics = Metrics::default();
        metrics.count_request("/v1/models", 200);
        metrics.count_request("/v1/models", 200);
        metrics.first_token.record(Duration::from_millis(3));
        metrics.first_token.record(Duration::from_secs(400));
        let open = metrics.answers_open.hold();
        let text = metrics.text(0, 0, None);
        for line in [
            "dsrun_requests_total{path=\"/v1/models\",status=\"200\"} 2",
            "dsrun_answers_open 1",
            "dsrun_first_token_seconds_bucket{le=\"0.0025\"} 0",
            "dsrun_first_token_seconds_bucket{le=\"0.005\"} 1",
            "dsrun_first_token_seconds_bucket{le=\"300\"} 1",
            "dsrun_first_token_seconds_bucket{le=\"+Inf\"} 2",
            "dsrun_first_token_seconds_sum 400.003",
            "dsrun_first_token_seconds_count 2",
            "# TYPE dsrun_first_token_seconds histogram",
        ] {
            assert!(text.lines().any(|written| written == line), "{line} is missing in\n{text}");
        }
        drop(open);
        assert!(metrics.text(0, 0, None).contains("\ndsrun_answers_open 0\n"));
    }
}
