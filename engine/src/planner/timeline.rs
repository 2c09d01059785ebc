//! The timeline of a pipeline: when each stage runs which step, on a virtual clock.

use crate::{schedule::LaunchedStep, trace::Trace};
use std::{collections::BTreeMap, fmt::Write};

/// The name of the op by which a stage waits for the one before it.
const RECEIVE: &str = "receive";

/// A step on a stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The stage.
    pub stage: usize,
    /// The number of the step.
    pub step: usize,
    /// When the stage begins with the step.
    pub start: f64,
    /// When it has ended.
    pub end: f64,
    /// Tokens of the step.
    pub tokens: usize,
}

/// The timeline of a pipeline: when each stage runs which step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// The number of stages.
    pub stages: usize,
    /// All steps on all stages.
    pub spans: Vec<Span>,
}

impl Timeline {
    /// The timeline of steps, given in launch order. A stage starts a step once it has finished its previous step, the previous
    /// stage has finished this step, and the steps that were complete at the launch are complete. `time` returns the time of a
    /// step on a stage; host work takes no time.
    pub fn replay(steps: &[LaunchedStep], stages: usize, time: &dyn Fn(usize, &LaunchedStep) -> f64) -> Self {
        let mut spans = Vec::with_capacity(steps.len() * stages);
        let (mut free, mut ended) = (vec![0.0f64; stages], Vec::with_capacity(steps.len()));
        for (number, step) in steps.iter().enumerate() {
            let mut ready =
                step.completed.checked_sub(1).and_then(|last| ended.get(last)).copied().unwrap_or(0.0);
            for (stage, free) in free.iter_mut().enumerate() {
                let start = free.max(ready);
                let end = start + time(stage, step);
                spans.push(Span { stage, step: number, start, end, tokens: step.tokens });
                (*free, ready) = (end, end);
            }
            ended.push(ready);
        }
        Self { stages, spans }
    }

    /// The timeline that an engine has recorded, of the first rank of each stage. A stage starts a step when it has received the data
    /// of the previous stage; its collectives over the ranks of the stage count as its work.
    pub fn of_trace(trace: &Trace) -> Self {
        let all = trace.spans();
        let stages = all.iter().map(|span| span.stage + 1).max().unwrap_or(0);
        let mut spans: Vec<Span> = Vec::new();
        for stage in 0..stages {
            let rank = all.iter().filter(|span| span.stage == stage).map(|span| span.rank).min();
            let mut steps = BTreeMap::new();
            for span in all.iter().filter(|span| Some(span.rank) == rank) {
                let own = steps.entry(span.step).or_insert(Span {
                    stage,
                    step: span.step,
                    start: span.start_us,
                    end: span.end_us,
                    tokens: span.tokens,
                });
                own.end = own.end.max(span.end_us);
                if span.name == RECEIVE {
                    own.start = own.start.max(span.end_us);
                }
            }
            spans.extend(steps.into_values());
        }
        let first = spans.iter().map(|span| span.start).fold(f64::INFINITY, f64::min);
        for span in &mut spans {
            (span.start, span.end) = (span.start - first, span.end - first);
        }
        Self { stages, spans }
    }

    /// When the last step has ended.
    pub fn end(&self) -> f64 {
        self.spans.iter().map(|span| span.end).fold(0.0, f64::max)
    }

    /// The pipeline bubble: the share of time in which stages are idle, from the start of the first step to the end of the last.
    pub fn bubble(&self) -> f64 {
        let all = self.end() * self.stages as f64;
        let busy: f64 = self.spans.iter().map(|span| span.end - span.start).sum();
        if all > 0.0 { 1.0 - busy / all } else { 0.0 }
    }

    /// Draws the timeline as SVG: a row for each stage, a box for each step with its tokens. `unit` names the unit of time.
    pub fn svg(&self, unit: &str) -> String {
        const ROW: f64 = 28.0;
        const LEFT: f64 = 70.0;
        const TOP: f64 = 30.0;
        const WIDTH: f64 = 960.0;
        let end = self.end().max(f64::MIN_POSITIVE);
        let (width, height) = (LEFT + WIDTH + 20.0, TOP + ROW * self.stages as f64 + 24.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"18\">{:.1} {unit}, idle {:.1}%</text>\n",
            self.end(),
            100.0 * self.bubble()
        );
        let mut add = |line: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _ = svg.write_fmt(line);
        };
        for stage in 0..self.stages {
            let y = TOP + ROW * stage as f64;
            add(format_args!("<text x=\"8\" y=\"{}\">stage {}</text>\n", y + 17.0, stage + 1));
            add(format_args!(
                "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{WIDTH}\" height=\"{}\" fill=\"#f0f0f0\"/>\n",
                ROW - 4.0
            ));
        }
        // Prompts and generation differ in colour (Okabe and Ito, 2008), and neighbouring steps in brightness.
        let most = self.spans.iter().map(|span| span.tokens).max().unwrap_or(0);
        for span in &self.spans {
            let colour = if 2 * span.tokens > most { "#0072b2" } else { "#e69f00" };
            let opacity = if span.step % 2 == 0 { 0.9 } else { 0.65 };
            let (x, y) = (LEFT + WIDTH * span.start / end, TOP + ROW * span.stage as f64);
            let wide = WIDTH * (span.end - span.start) / end;
            add(format_args!(
                "<rect x=\"{x:.2}\" y=\"{y}\" width=\"{wide:.2}\" height=\"{}\" fill=\"{colour}\" fill-opacity=\"{opacity}\">\
                 <title>step {} of {} tokens, {:.1} to {:.1} {unit}</title></rect>\n",
                ROW - 4.0,
                span.step,
                span.tokens,
                span.start,
                span.end
            ));
        }
        svg.push_str("</svg>\n");
        svg
    }
}
