//! `dsrun bench plot`: draws the results of several runs of `bench serve` as one figure.

use super::serve::{Run, draw};
use crate::{arguments::BenchPlot, terminal::Terminal};
use anyhow::{Context, Result};
use std::path::Path;

pub(crate) fn run(command: &BenchPlot, terminal: &Terminal) -> Result<()> {
    let runs = command.runs.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    draw(&joined(runs), &command.output, terminal)
}

fn read(path: &Path) -> Result<Run> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not the output of `bench serve --json`", path.display()))
}

/// Joins runs of equal labels, with their points in the order of throughput.
fn joined(runs: Vec<Run>) -> Vec<Run> {
    let mut joined: Vec<Run> = Vec::new();
    for run in runs {
        match joined.iter_mut().find(|known| known.label == run.label) {
            Some(known) => known.points.extend(run.points),
            None => joined.push(run),
        }
    }
    for run in &mut joined {
        run.points.sort_by(|a, b| a.requests_per_second.total_cmp(&b.requests_per_second));
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(label: &str, rates: &[f64]) -> Run {
        let figures = json!({"p50": 1.0, "p95": 2.0, "p99": null});
        let point = |rate: &f64| {
            json!({
                "load": "", "answered": 1, "failed": 0, "seconds": 1.0, "requests_per_second": rate,
                "prompt_tokens_per_second": 1.0, "tokens_per_second": 1.0, "first_token_seconds": figures,
                "token_seconds": figures, "gap_seconds": figures, "answer_seconds": figures,
                "effective_requests_per_second": 1.0, "errors": [],
            })
        };
        let run = json!({
            "label": label, "model": "m", "prompt_tokens": "1", "generated_tokens": "1", "requests": 1,
            "sla": {"prompt_tokens_per_second": 1.0, "tokens_per_second": 1.0},
            "points": rates.iter().map(point).collect::<Vec<_>>(),
        });
        serde_json::from_value(run).expect("it is a run")
    }

    #[test]
    fn runs_of_equal_labels_are_one_curve() {
        let joined = joined(vec![run("a", &[3.0]), run("b", &[2.0]), run("a", &[1.0, 4.0])]);
        let curves: Vec<(&str, Vec<f64>)> = joined
            .iter()
            .map(|run| (&*run.label, run.points.iter().map(|point| point.requests_per_second).collect()))
            .collect();
        assert_eq!(curves, [("a", vec![1.0, 3.0, 4.0]), ("b", vec![2.0])]);
    }
}
