//! The report of `bench serve`: the figures of each load, computed from the outcomes of its requests.

use super::load::{Answered, Arrivals, Record};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt::Write};

/// The span in tokens of the moving average of the times between tokens, that of FastGen's benchmark.
const EMA_SPAN: f64 = 16.0;

/// The service level that an answer has to meet to count in the effective throughput (FastGen).
///
/// The first token comes within `prompt tokens / prompt_tokens_per_second`, and the exponential moving average of the times
/// between tokens stays below `1 / tokens_per_second`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sla {
    /// Prompt tokens per second until the first token.
    pub(crate) prompt_tokens_per_second: f64,
    /// Tokens per second after the first token, at any time.
    pub(crate) tokens_per_second: f64,
}

/// The results of a run of `bench serve`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// The label of the run in the plot.
    pub(crate) label: String,
    pub(crate) model: String,
    /// The distribution of prompt lengths.
    pub(crate) prompt_tokens: String,
    /// The distribution of answer lengths.
    pub(crate) generated_tokens: String,
    /// Requests of each load, if they were given.
    #[serde(default)]
    pub(crate) requests: Option<usize>,
    /// Seconds of each load, if they decide about the number of requests.
    #[serde(default)]
    pub(crate) load_seconds: Option<u64>,
    pub(crate) sla: Sla,
    pub(crate) points: Vec<Point>,
}

/// The figures of one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    /// The load: requests per second, or clients.
    pub(crate) load: String,
    /// Requests that were answered.
    pub(crate) answered: usize,
    /// Requests that failed.
    pub(crate) failed: usize,
    /// The time from the first request to the end of the last answer.
    pub(crate) seconds: f64,
    pub(crate) requests_per_second: f64,
    pub(crate) prompt_tokens_per_second: f64,
    pub(crate) tokens_per_second: f64,
    /// Time to the first token.
    pub(crate) first_token_seconds: Percentiles,
    /// Time per token after the first, of each answer.
    pub(crate) token_seconds: Percentiles,
    /// Time from each token to the next, over all answers.
    pub(crate) gap_seconds: Percentiles,
    /// Time to the whole answer.
    pub(crate) answer_seconds: Percentiles,
    /// Answers per second that met the service level.
    pub(crate) effective_requests_per_second: f64,
    /// The distinct errors and their counts.
    pub(crate) errors: Vec<Failure>,
}

/// An error and its number of occurrences.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) message: String,
    pub(crate) count: usize,
}

/// Percentiles of a set of values; NaN for the empty set.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Percentiles {
    #[serde(with = "nullable")]
    pub(crate) p50: f64,
    #[serde(with = "nullable")]
    pub(crate) p95: f64,
    #[serde(with = "nullable")]
    pub(crate) p99: f64,
}

/// Writes NaN as `null`, because JSON has no NaN.
mod nullable {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(*value)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
    }
}

impl Percentiles {
    pub(super) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        // Nearest rank: the smallest value such that at least `share` of all values do not exceed it.
        let at = |share: f64| {
            let rank = (share * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
        };
        Self { p50: at(0.50), p95: at(0.95), p99: at(0.99) }
    }
}

impl Point {
    pub(super) fn new(arrivals: &Arrivals, records: &[Record], sla: &Sla) -> Self {
        let answers: Vec<&Answered> =
            records.iter().filter_map(|record| record.outcome.as_ref().ok()).collect();
        let ends = records.iter().filter_map(|record| Some(record.due + record.outcome.as_ref().ok()?.end));
        let start = records.iter().map(|record| record.due).fold(f64::INFINITY, f64::min);
        let seconds = (ends.fold(0.0, f64::max) - start).max(f64::MIN_POSITIVE);
        let rate = |count: usize| if answers.is_empty() { 0.0 } else { count as f64 / seconds };
        let mut errors = BTreeMap::new();
        for error in records.iter().filter_map(|record| record.outcome.as_ref().err()) {
            *errors.entry(error.clone()).or_insert(0) += 1;
        }
        let percentiles = |value: fn(&Answered) -> Option<f64>| {
            Percentiles::of(answers.iter().filter_map(|answer| value(answer)).collect())
        };
        Self {
            load: arrivals.to_string(),
            answered: answers.len(),
            failed: records.len() - answers.len(),
            seconds: if answers.is_empty() { 0.0 } else { seconds },
            requests_per_second: rate(answers.len()),
            prompt_tokens_per_second: rate(answers.iter().map(|answer| answer.prompt_tokens).sum()),
            tokens_per_second: rate(answers.iter().map(|answer| answer.tokens).sum()),
            first_token_seconds: percentiles(|answer| answer.pieces.first().copied()),
            token_seconds: percentiles(token_seconds),
            gap_seconds: Percentiles::of(answers.iter().copied().flat_map(gaps).collect()),
            answer_seconds: percentiles(|answer| Some(answer.end)),
            effective_requests_per_second: rate(
                answers.iter().filter(|answer| sla.is_met_by(answer)).count(),
            ),
            errors: errors.into_iter().map(|(message, count)| Failure { message, count }).collect(),
        }
    }
}

/// The mean time between tokens of an answer.
fn token_seconds(answer: &Answered) -> Option<f64> {
    let (first, last) = (answer.pieces.first()?, answer.pieces.last()?);
    (answer.tokens > 1).then(|| (last - first) / (answer.tokens - 1) as f64)
}

/// The times between the tokens of an answer. If a server sends several tokens per piece, all pieces are taken to have the
/// average number of tokens.
fn gaps(answer: &Answered) -> impl Iterator<Item = f64> {
    let tokens_per_piece = (answer.tokens as f64 / answer.pieces.len() as f64).max(1.0);
    answer.pieces.windows(2).map(move |pair| (pair[1] - pair[0]) / tokens_per_piece)
}

impl Sla {
    fn is_met_by(&self, answer: &Answered) -> bool {
        let Some(first) = answer.pieces.first() else { return false };
        if *first > answer.prompt_tokens as f64 / self.prompt_tokens_per_second {
            return false;
        }
        let decay = 1.0 - 2.0 / (EMA_SPAN + 1.0);
        let (mut sum, mut weight) = (0.0, 0.0);
        gaps(answer).all(|gap| {
            sum = sum * decay + gap;
            weight = weight * decay + 1.0;
            sum / weight < 1.0 / self.tokens_per_second
        })
    }
}

/// Formats the figures as a table.
pub(super) fn table(run: &Run) -> String {
    let mut text = format!(
        "{}: prompts of {} tokens, answers of {}; {} per load\n\
         service level: first token within prompt / {} tokens/s, then {} tokens/s\n\n\
         {:>16} {:>9} {:>9} {:>9} {:>23} {:>20} {:>20} {:>7}\n\
         {:>16} {:>9} {:>9} {:>9} {:>23} {:>20} {:>20} {:>7}",
        run.model,
        run.prompt_tokens,
        run.generated_tokens,
        match (run.requests, run.load_seconds) {
            (Some(requests), _) => format!("{requests} requests"),
            (None, seconds) => format!("{} s", seconds.unwrap_or_default()),
        },
        run.sla.prompt_tokens_per_second,
        run.sla.tokens_per_second,
        "load",
        "requests",
        "effective",
        "tokens",
        "first token, ms",
        "per token, ms",
        "between tokens, ms",
        "failed",
        "",
        "/s",
        "/s",
        "/s",
        "p50     p95     p99",
        "p50    p95    p99",
        "p50    p95    p99",
        "",
    );
    for point in &run.points {
        let (first, token, gap) = (&point.first_token_seconds, &point.token_seconds, &point.gap_seconds);
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "\n{:>16} {:>9.2} {:>9.2} {:>9.1} {:>7.1} {:>7.1} {:>7.1} {:>6.1} {:>6.1} {:>6.1} {:>6.1} {:>6.1} {:>6.1} {:>7}",
            point.load,
            point.requests_per_second,
            point.effective_requests_per_second,
            point.tokens_per_second,
            first.p50 * 1e3,
            first.p95 * 1e3,
            first.p99 * 1e3,
            token.p50 * 1e3,
            token.p95 * 1e3,
            token.p99 * 1e3,
            gap.p50 * 1e3,
            gap.p95 * 1e3,
            gap.p99 * 1e3,
            point.failed,
        );
    }
    if run.points.iter().any(|point| point.answered > 0 && point.first_token_seconds.p50.is_nan()) {
        text.push_str(
            "\n\nThe server sent no text. For a model without a tokenizer, count tokens with --token-ids.",
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLA: Sla = Sla { prompt_tokens_per_second: 512.0, tokens_per_second: 4.0 };

    fn answer(pieces: &[f64]) -> Answered {
        Answered {
            prompt_tokens: 512,
            tokens: pieces.len(),
            pieces: pieces.to_vec(),
            end: *pieces.last().unwrap_or(&0.0),
        }
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let percentiles = Percentiles::of((1..=100).rev().map(f64::from).collect());
        assert_eq!(percentiles, Percentiles { p50: 50.0, p95: 95.0, p99: 99.0 });
        assert_eq!(Percentiles::of(vec![3.0]), Percentiles { p50: 3.0, p95: 3.0, p99: 3.0 });
        assert!(Percentiles::of(Vec::new()).p50.is_nan());
    }

    #[test]
    fn the_service_level_is_that_of_fastgen() {
        assert!(SLA.is_met_by(&answer(&[0.9, 1.1, 1.3])));
        assert!(!SLA.is_met_by(&answer(&[1.1, 1.2])), "the first token is late");
        assert!(!SLA.is_met_by(&answer(&[])), "nothing came");
        // One gap of 0.5 s after many of 0.1 s: the average goes to 0.1 + 0.4 * 2 / 17 and a bit, below 0.25 s.
        let mut pieces: Vec<f64> = (0..40).map(|index| 0.5 + 0.1 * f64::from(index)).collect();
        pieces.push(pieces[39] + 0.5);
        assert!(SLA.is_met_by(&answer(&pieces)));
        // The same gap at the start is all there is to average.
        assert!(!SLA.is_met_by(&answer(&[0.5, 1.0, 1.1])));
    }

    #[test]
    fn rates_are_over_the_time_from_first_request_to_last_answer() {
        let record = |due, pieces: &[f64]| Record { due, outcome: Ok(answer(pieces)) };
        let failed = Record { due: 0.5, outcome: Err("gone".into()) };
        let records = [record(0.0, &[0.5, 0.6]), record(1.0, &[0.5, 0.7, 1.0]), failed];
        let point = Point::new(&Arrivals::Clients(2), &records, &SLA);
        assert_eq!((point.answered, point.failed), (2, 1));
        assert_eq!(point.seconds, 2.0);
        assert_eq!(point.requests_per_second, 1.0);
        assert_eq!(point.tokens_per_second, 2.5);
        assert_eq!(point.errors, [Failure { message: "gone".into(), count: 1 }]);
        assert_eq!(point.token_seconds.p99, 0.25);
        assert!((point.gap_seconds.p50 - 0.2).abs() < 1e-9 && (point.gap_seconds.p95 - 0.3).abs() < 1e-9);
    }

    #[test]
    fn a_load_without_answers_has_nan_figures_that_survive_json() {
        let failed = Record { due: 0.0, outcome: Err("gone".into()) };
        let point = Point::new(&Arrivals::Clients(1), &[failed], &SLA);
        assert_eq!(point.requests_per_second, 0.0);
        let json = serde_json::to_string(&point).expect("it is written");
        let back: Point = serde_json::from_str(&json).expect("it is read");
        assert!(back.first_token_seconds.p50.is_nan());
        assert_eq!(back.failed, 1);
    }
}
