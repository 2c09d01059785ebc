//! The result of a case, as workers send it to the parent and as reports show it.

use crate::{
    runner::{Report, Status},
    suite::{Group, Item},
    verdict::{self, Verdict},
};
use serde::{Deserialize, Serialize};

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    /// All results are right.
    Pass,
    /// A result is wrong.
    Fail,
    /// The backend does not support the case.
    Unsupported,
    /// The worker process exited.
    Crash,
    /// The case did not finish in time.
    Timeout,
    /// The case did not pass, and a waiver says that this is known.
    Waived,
}

impl Outcome {
    pub(crate) const ALL: [Self; 6] =
        [Self::Pass, Self::Fail, Self::Unsupported, Self::Crash, Self::Timeout, Self::Waived];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Unsupported => "unsupported",
            Self::Crash => "crash",
            Self::Timeout => "timeout",
            Self::Waived => "waived",
        }
    }
}

/// The result of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: String,
    /// The op whose table has the case, or `check`.
    pub(crate) op: String,
    /// The element type of the table; `None` for checks.
    pub(crate) dtype: Option<String>,
    pub(crate) status: Outcome,
    /// Whether the profiles require the case, so that `unsupported` is a failure.
    pub(crate) required: bool,
    /// Descriptions of what is wrong, or the reason why the case is not supported.
    pub(crate) messages: Vec<String>,
    /// The element with the largest ratio of error to limit.
    pub(crate) worst: Option<WorstElement>,
    /// The result with the largest ratio of mean squared error to limit.
    pub(crate) mean_square: Option<MeanSquare>,
    pub(crate) seconds: f64,
    /// The number of elements of all tensors of the case; 0 for a check.
    pub(crate) elements: usize,
    /// The choices that made a random case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) choices: Option<Vec<usize>>,
    /// The simplest case that fails in the same way as this random one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) simplest: Option<Box<Self>>,
    /// The waiver that covers the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) waiver: Option<Waived>,
    /// The command that runs this case, or its simplest form, alone.
    pub(crate) replay: String,
}

/// An element of a result and its limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorstElement {
    pub(crate) result: String,
    pub(crate) index: Vec<usize>,
    pub(crate) found: Number,
    pub(crate) expected: Number,
    pub(crate) limit: Number,
    /// Error over limit: above 1 is wrong.
    pub(crate) ratio: Number,
}

/// The mean of squared relative errors of a result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeanSquare {
    pub(crate) result: String,
    pub(crate) value: Number,
    pub(crate) limit: Number,
}

/// Why a failure is waived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waived {
    pub(crate) reason: String,
    pub(crate) expires: String,
}

/// A number that is written as text if it is not finite, because JSON has no notation for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Written", from = "Written")]
pub(crate) struct Number(pub(crate) f64);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Finite(f64),
    Other(String),
}

impl From<Number> for Written {
    fn from(Number(value): Number) -> Self {
        if value.is_finite() { Self::Finite(value) } else { Self::Other(value.to_string()) }
    }
}

impl From<Written> for Number {
    fn from(written: Written) -> Self {
        match written {
            Written::Finite(value) => Self(value),
            Written::Other(text) => Self(text.parse().unwrap_or(f64::NAN)),
        }
    }
}

impl Record {
    /// The record of a case of which only the outcome is known.
    pub(crate) fn new(id: &str, status: Outcome, messages: Vec<String>) -> Self {
        let group = Group::of(id);
        Self {
            id: id.to_owned(),
            op: group
                .map_or_else(|| id.split('/').next().unwrap_or_default().into(), |group| group.op().into()),
            dtype: group.and_then(|group| group.dtype()).map(|dtype| dtype.name().into()),
            status,
            required: true,
            messages,
            worst: None,
            mean_square: None,
            seconds: 0.0,
            elements: 0,
            choices: None,
            simplest: None,
            waiver: None,
            replay: String::new(),
        }
    }

    /// The record of an item that ran to its end.
    pub(crate) fn of(item: &Item, report: &Report, required: bool, seconds: f64) -> Self {
        let (status, messages) = match &report.status {
            Status::Passed => (Outcome::Pass, Vec::new()),
            Status::Failed(failures) => (Outcome::Fail, failures.clone()),
            Status::Unsupported(reason) => (Outcome::Unsupported, vec![reason.clone()]),
        };
        Self {
            required,
            worst: worst(&report.verdicts),
            mean_square: mean_square(&report.verdicts),
            seconds,
            elements: item.elements(),
            choices: item.choices.clone(),
            ..Self::new(&item.id, status, messages)
        }
    }

    /// The case to look at first: the simplest one that fails in this way.
    pub(crate) fn shown(&self) -> &Self {
        self.simplest.as_deref().unwrap_or(self)
    }

    /// Whether the record counts as a failure of the backend.
    pub(crate) fn is_failure(&self) -> bool {
        match self.status {
            Outcome::Pass | Outcome::Waived => false,
            Outcome::Unsupported => self.required,
            Outcome::Fail | Outcome::Crash | Outcome::Timeout => true,
        }
    }
}

/// The failures among records: ops in the order of the records, and of each op the smallest case first.
pub(crate) fn failures(records: &[Record]) -> Vec<&Record> {
    let mut failures: Vec<&Record> = records.iter().filter(|record| record.is_failure()).collect();
    let mut ops: Vec<&str> = Vec::new();
    for record in &failures {
        if !ops.contains(&record.op.as_str()) {
            ops.push(&record.op);
        }
    }
    let place = |record: &Record| ops.iter().position(|op| *op == record.op);
    failures.sort_by_key(|record| (place(record), record.shown().elements));
    failures
}

fn worst(verdicts: &[(String, Verdict)]) -> Option<WorstElement> {
    let all = verdicts.iter().filter_map(|(name, verdict)| Some((name, verdict.worst.as_ref()?)));
    let (result, worst) = all.max_by(|(_, a), (_, b)| a.ratio.total_cmp(&b.ratio))?;
    let verdict::Worst { index, found, expected, limit, ratio } = worst.clone();
    Some(WorstElement {
        result: result.clone(),
        index,
        found: Number(found),
        expected: Number(expected),
        limit: Number(limit),
        ratio: Number(ratio),
    })
}

fn mean_square(verdicts: &[(String, Verdict)]) -> Option<MeanSquare> {
    let all = verdicts.iter().filter_map(|(name, verdict)| Some((name, verdict.mean_square?)));
    let share = |mean: &verdict::MeanSquare| mean.value / mean.limit;
    let (result, mean) = all.max_by(|(_, a), (_, b)| share(a).total_cmp(&share(b)))?;
    Some(MeanSquare { result: result.clone(), value: Number(mean.value), limit: Number(mean.limit) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_lacks_are_kept() {
        for value in [1.5, f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            let text = serde_json::to_string(&Number(value)).expect("a number is written");
            let Number(back) = serde_json::from_str(&text).expect("a number is read");
            assert!(back == value || back.is_nan() && value.is_nan(), "{text}");
        }
    }

    #[test]
    fn failures_of_an_op_begin_with_the_smallest() {
        let of = |id: &str, elements: usize| Record {
            elements,
            ..Record::new(id, if elements == 1 { Outcome::Pass } else { Outcome::Fail }, Vec::new())
        };
        let drawn = Record {
            simplest: Some(Box::new(of("add/bf16/property-1@0", 4))),
            ..of("add/bf16/property-1", 90)
        };
        let records =
            [of("linear/f32/a", 7), of("add/f32/a", 50), of("add/f32/b", 1), of("add/bf16/a", 5), drawn];
        let ids: Vec<&str> = failures(&records).iter().map(|record| record.id.as_str()).collect();
        assert_eq!(ids, ["linear/f32/a", "add/bf16/property-1", "add/bf16/a", "add/f32/a"]);
    }

    #[test]
    fn a_case_is_filed_under_its_table() {
        let record = Record::new("linear_q4_0/bf16/strided", Outcome::Crash, Vec::new());
        assert_eq!((record.op.as_str(), record.dtype.as_deref()), ("linear", Some("bf16")));
        let record = Record::new("check/device_listing", Outcome::Pass, Vec::new());
        assert_eq!((record.op.as_str(), record.dtype), ("check", None));
    }
}
