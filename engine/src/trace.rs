//! Records when each rank runs which step and which collective, to find out where the time of a split model goes.
//!
//! A [`Trace`] is attached to a plan with [`EnginePlan::trace`](crate::EnginePlan::trace), and recording is switched with
//! [`Engine::record_trace`](crate::Engine::record_trace). Times are those of the device's clock, or of the host where the device
//! has none. The calls of a traced engine are launched one by one rather than as captured graphs, so that collectives can be timed;
//! where launches are the bottleneck its steps take longer.
//!
//! [`Trace::chrome`] writes the format of Chrome's trace viewer, which Perfetto (<https://ui.perfetto.dev>) opens as well;
//! [`Timeline::of_trace`](crate::planner::timeline::Timeline::of_trace) makes the timeline that the
//! [simulator](crate::planner::simulation) predicts.

use crate::error::Result;
use dsrun_core::{
    Error,
    device::{Device, Event, Stream},
    kernels::BoundCall,
    op::Op,
};
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

/// The time limit for the event that relates a device's clock to that of the host.
const CLOCK_TIMEOUT: Duration = Duration::from_secs(120);

/// Spans that may be unfinished before the finished ones are moved to the trace.
const MOST_PENDING: usize = 1024;

/// The maximum number of spans of a trace. Later ones are not recorded.
const MOST_SPANS: usize = 2_000_000;

/// What a span shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// The launch of a step, or of a part of it where the host works in between.
    Step,
    /// A collective within a step. Its time includes waiting for the other ranks.
    Collective,
}

/// A period in which a rank runs something.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSpan {
    /// The rank.
    pub rank: usize,
    /// The pipeline stage of the rank.
    pub stage: usize,
    /// The number of the step since recording began. Every rank runs the same steps in the same order.
    pub step: usize,
    /// Tokens of the step.
    pub tokens: usize,
    /// What is shown.
    pub kind: SpanKind,
    /// The op of a collective, or the segments of a step.
    pub name: &'static str,
    /// Microseconds from the start of the trace to the start of the span.
    pub start_us: f64,
    /// Microseconds from the start of the trace to the end of the span.
    pub end_us: f64,
}

/// The spans of all ranks of this process.
pub struct Trace {
    start: Instant,
    /// The same moment on the clock that processes share.
    start_time: SystemTime,
    spans: Mutex<Vec<TraceSpan>>,
}

impl Default for Trace {
    fn default() -> Self {
        Self { start: Instant::now(), start_time: SystemTime::now(), spans: Mutex::default() }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").field("spans", &self.lock().len()).finish_non_exhaustive()
    }
}

impl Trace {
    fn lock(&self) -> MutexGuard<'_, Vec<TraceSpan>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All spans recorded so far, by rank and start. Those of steps in flight are missing.
    pub fn spans(&self) -> Vec<TraceSpan> {
        let mut spans = self.lock().clone();
        spans.sort_by(|a, b| a.rank.cmp(&b.rank).then(a.start_us.total_cmp(&b.start_us)));
        spans
    }

    /// Forgets all spans.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// The trace in the JSON format of Chrome's trace viewer: a process for each stage, and in it a thread for each rank. Times are
    /// microseconds of the system's clock since 1970, so that the traces of several processes can be merged.
    pub fn chrome(&self) -> String {
        let spans = self.spans();
        let since = self.start_time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let start = since.as_secs_f64() * 1e6;
        let mut events = Vec::with_capacity(spans.len() + 8);
        let mut named = Vec::new();
        for span in &spans {
            let TraceSpan { rank, stage, step, tokens, name, .. } = span;
            if !named.contains(rank) {
                named.push(*rank);
                for (what, text) in
                    [("process_name", format!("stage {stage}")), ("thread_name", format!("rank {rank}"))]
                {
                    events.push(format!(
                        r#"{{"ph":"M","name":"{what}","pid":{stage},"tid":{rank},"args":{{"name":"{text}"}}}}"#
                    ));
                }
            }
            let category = match span.kind {
                SpanKind::Step => "step",
                SpanKind::Collective => "collective",
            };
            let (at, took) = (start + span.start_us, (span.end_us - span.start_us).max(0.0));
            events.push(format!(
                r#"{{"ph":"X","cat":"{category}","name":"{name}","pid":{stage},"tid":{rank},"ts":{at:.3},"dur":{took:.3},"args":{{"step":{step},"tokens":{tokens}}}}}"#
            ));
        }
        format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
    }
}

/// Records the spans of one rank.
#[derive(Clone, Debug)]
pub(crate) struct RankTrace {
    recorder: Arc<Mutex<Recorder>>,
}

/// A span whose events may not be reached yet.
#[derive(Debug)]
struct Pending {
    kind: SpanKind,
    name: &'static str,
    step: usize,
    tokens: usize,
    begin: Point,
    end: Point,
}

/// A point in a stream, and when the host enqueued it.
#[derive(Debug)]
struct Point {
    event: Arc<dyn Event>,
    host: Instant,
}

#[derive(Debug)]
struct Recorder {
    trace: Arc<Trace>,
    device: Arc<dyn Device>,
    rank: usize,
    stage: usize,
    /// A point that the host has waited for, while recording; it relates the clocks of host and device.
    origin: Option<Point>,
    /// The number of the current step, counted from 1, and its tokens.
    step: usize,
    tokens: usize,
    pending: Vec<Pending>,
}

impl RankTrace {
    /// A recorder for a rank, which records nothing yet.
    pub(crate) fn new(trace: Arc<Trace>, device: Arc<dyn Device>, rank: usize, stage: usize) -> Self {
        let (origin, pending) = (None, Vec::new());
        let recorder = Recorder { trace, device, rank, stage, origin, step: 0, tokens: 0, pending };
        Self { recorder: Arc::new(Mutex::new(recorder)) }
    }

    fn lock(&self) -> MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts or stops recording. All enqueued work must have ended.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn switch(&self, on: bool, stream: &mut dyn Stream) -> Result<()> {
        let mut recorder = self.lock();
        recorder.collect();
        recorder.origin = None;
        if on {
            let event = recorder.device.event()?;
            stream.record(&*event)?;
            event.synchronize("the start of a trace", CLOCK_TIMEOUT)?;
            recorder.origin = Some(Point { event, host: Instant::now() });
            recorder.step = 0;
        }
        Ok(())
    }

    /// Notes that a step of so many tokens begins.
    pub(crate) fn begin_step(&self, tokens: usize) {
        let mut recorder = self.lock();
        recorder.step += 1;
        recorder.tokens = tokens;
    }

    /// Runs `enqueue`, and records a span around the work that it enqueues.
    ///
    /// # Errors
    /// Those of `enqueue`, and of the device.
    pub(crate) fn span<E: From<Error>>(
        &self,
        kind: SpanKind,
        name: &'static str,
        stream: &mut dyn Stream,
        enqueue: impl FnOnce(&mut dyn Stream) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let begin = self.lock().point(stream)?;
        enqueue(stream)?;
        let mut recorder = self.lock();
        if let (Some(begin), Some(end)) = (begin, recorder.point(stream)?) {
            let (step, tokens) = (recorder.step.saturating_sub(1), recorder.tokens);
            recorder.pending.push(Pending { kind, name, step, tokens, begin, end });
            if recorder.pending.len() > MOST_PENDING {
                recorder.collect();
            }
        }
        Ok(())
    }

    /// A bound collective that records a span whenever it runs.
    pub(crate) fn collective(&self, op: &Op, call: Box<dyn BoundCall>) -> Box<dyn BoundCall> {
        let name = op.signature().map_or("collective", |signature| signature.name);
        Box::new(TracedCall { trace: self.clone(), name, call })
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.collect();
    }
}

impl Recorder {
    /// Records a point in the stream, if recording is on.
    fn point(&self, stream: &mut dyn Stream) -> Result<Option<Point>, Error> {
        if self.origin.is_none() {
            return Ok(None);
        }
        let event = self.device.event()?;
        stream.record(&*event)?;
        Ok(Some(Point { event, host: Instant::now() }))
    }

    /// Moves the finished spans to the trace.
    fn collect(&mut self) {
        let Some(origin) = &self.origin else { return };
        let base = origin.host.saturating_duration_since(self.trace.start).as_secs_f64() * 1e6;
        let time = |point: &Point| {
            let on_device = point.event.elapsed_since(&*origin.event).ok().flatten();
            let on_host = || point.host.saturating_duration_since(origin.host);
            base + on_device.unwrap_or_else(on_host).as_secs_f64() * 1e6
        };
        // Work on a stream ends in its order. A device that has failed reaches nothing any more.
        let reached = |pending: &Pending| pending.end.event.reached().unwrap_or(false);
        let finished = self.pending.iter().position(|pending| !reached(pending));
        let finished = finished.unwrap_or(self.pending.len());
        let spans: Vec<TraceSpan> = (self.pending.drain(..finished))
            .map(|pending| TraceSpan {
                rank: self.rank,
                stage: self.stage,
                step: pending.step,
                tokens: pending.tokens,
                kind: pending.kind,
                name: pending.name,
                start_us: time(&pending.begin),
                end_us: time(&pending.end),
            })
            .collect();
        let mut all = self.trace.lock();
        let room = MOST_SPANS.saturating_sub(all.len());
        if room < spans.len() {
            tracing::warn!(
                rank = self.rank,
                most = MOST_SPANS,
                "the trace is full; later steps are not in it"
            );
        }
        all.extend(spans.into_iter().take(room));
    }
}

/// A bound collective that records a span whenever it runs.
#[derive(Debug)]
struct TracedCall {
    trace: RankTrace,
    name: &'static str,
    call: Box<dyn BoundCall>,
}

impl BoundCall for TracedCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<(), Error> {
        self.trace.span(SpanKind::Collective, self.name, stream, |stream| self.call.enqueue(stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_that_of_chrome() {
        let trace = Trace::default();
        let span = |rank: usize, kind: SpanKind, name: &'static str, start_us: f64| TraceSpan {
            rank,
            stage: 1 - rank,
            step: 3,
            tokens: 5,
            kind,
            name,
            start_us,
            end_us: start_us + 10.0,
        };
        trace.lock().extend([
            span(1, SpanKind::Step, "forward", 4.0),
            span(0, SpanKind::Collective, "receive", 2.0),
            span(0, SpanKind::Step, "forward", 1.0),
        ]);
        assert_eq!(trace.spans().iter().map(|span| span.start_us).collect::<Vec<_>>(), [1.0, 2.0, 4.0]);
        let text = trace.chrome();
        let parsed: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
        let events = parsed["traceEvents"].as_array().expect("events are a list");
        assert_eq!(events.len(), 7, "{text}");
        assert_eq!((&events[0]["ph"], &events[0]["args"]["name"]), (&"M".into(), &"stage 1".into()));
        let receive = events.iter().find(|event| event["name"] == "receive").expect("it is there");
        assert_eq!((&receive["ph"], &receive["cat"]), (&"X".into(), &"collective".into()));
        assert_eq!((&receive["pid"], &receive["tid"], &receive["dur"]), (&1.into(), &0.into(), &10.0.into()));
        assert_eq!((&receive["args"]["step"], &receive["args"]["tokens"]), (&3.into(), &5.into()));
    }
}
