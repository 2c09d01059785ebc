//! The seconds that cases take, against those of a reference: the results of another run.

use super::record::{Outcome, Record};
use anyhow::{Context, Result};
use serde::Deserialize;
use std::{collections::HashMap, fs, path::Path};

/// Cases shorter than this are not compared one by one: what they take is the suite's own time.
const SHORTEST: f64 = 0.02;
/// Number of cases shown.
const SHOWN: usize = 8;

/// The seconds of another run.
#[derive(Debug)]
pub(crate) struct Reference {
    /// The backend and device of that run.
    name: String,
    seconds: HashMap<String, f64>,
}

/// The seconds of an op's cases here and in the reference, in both of which they passed.
#[derive(Debug, PartialEq)]
struct Row<'a> {
    name: &'a str,
    cases: usize,
    seconds: f64,
    reference: f64,
}

#[derive(Deserialize)]
struct Results {
    backend: Named,
    device: Named,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct Case {
    id: String,
    status: Outcome,
    seconds: f64,
}

impl Row<'_> {
    fn ratio(&self) -> f64 {
        self.seconds / self.reference.max(f64::MIN_POSITIVE)
    }
}

impl Reference {
    /// Reads a file that `--json` has written.
    ///
    /// # Errors
    /// If there is no such file, or something else is in it.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is no file that --json has written", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let Results { backend, device, cases } = serde_json::from_str(text)?;
        let passed = cases.into_iter().filter(|case| case.status == Outcome::Pass);
        let seconds = passed.map(|case| (case.id, case.seconds)).collect();
        Ok(Self { name: format!("{} on {}", backend.name, device.name), seconds })
    }

    /// Lines with the seconds of each op, and the cases that are the slowest beside the reference.
    pub(crate) fn lines(&self, records: &[Record]) -> Vec<String> {
        let mut ops: Vec<Row<'_>> = Vec::new();
        let mut cases: Vec<Row<'_>> = Vec::new();
        for record in records.iter().filter(|record| record.status == Outcome::Pass) {
            let Some(reference) = self.seconds.get(&record.id).copied() else { continue };
            let seconds = record.seconds;
            let index = ops.iter().position(|row| row.name == record.op).unwrap_or_else(|| {
                ops.push(Row { name: &record.op, cases: 0, seconds: 0.0, reference: 0.0 });
                ops.len() - 1
            });
            let row = &mut ops[index];
            (row.cases, row.seconds, row.reference) =
                (row.cases + 1, row.seconds + seconds, row.reference + reference);
            if seconds >= SHORTEST {
                cases.push(Row { name: &record.id, cases: 1, seconds, reference });
            }
        }
        let total = Row {
            name: "all",
            cases: ops.iter().map(|row| row.cases).sum(),
            seconds: ops.iter().map(|row| row.seconds).sum(),
            reference: ops.iter().map(|row| row.reference).sum(),
        };
        let shown = |row: &Row<'_>| {
            let Row { name, cases, seconds, reference } = row;
            format!(
                "{name}: {cases} cases, {seconds:.2} s, reference {reference:.2} s, {:.1} times",
                row.ratio()
            )
        };
        cases.sort_by(|a, b| b.ratio().total_cmp(&a.ratio()));
        let slowest = cases.iter().take(SHOWN).map(|row| {
            format!(
                "  {}: {:.3} s, reference {:.3} s, {:.1} times",
                row.name,
                row.seconds,
                row.reference,
                row.ratio()
            )
        });
        [format!("Seconds of cases that passed, beside {}:", self.name)]
            .into_iter()
            .chain(ops.iter().chain([&total]).map(shown))
            .chain(["the slowest beside it:".to_owned()])
            .chain(slowest)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_and_cases_are_compared_where_both_passed() {
        let text = r#"{"schema": 1, "backend": {"name": "cpu", "version": "1"}, "device": {"name": "a processor"}, "cases": [
            {"id": "add/f32/a", "status": "pass", "seconds": 0.5},
            {"id": "add/f32/b", "status": "pass", "seconds": 0.25},
            {"id": "add/f32/c", "status": "fail", "seconds": 0.25}]}"#;
        let reference = Reference::parse(text).expect("it is a file of results");
        let of = |id: &str, seconds: f64| Record { seconds, ..Record::new(id, Outcome::Pass, Vec::new()) };
        let records =
            [of("add/f32/a", 1.0), of("add/f32/b", 1.0), of("add/f32/c", 9.0), of("cast/f32/a", 9.0)];
        let lines = reference.lines(&records);
        assert_eq!(lines[0], "Seconds of cases that passed, beside cpu on a processor:");
        assert_eq!(lines[1], "add: 2 cases, 2.00 s, reference 0.75 s, 2.7 times");
        assert_eq!(lines[2], "all: 2 cases, 2.00 s, reference 0.75 s, 2.7 times");
        assert_eq!(lines[4], "  add/f32/b: 1.000 s, reference 0.250 s, 4.0 times");
        assert!(Reference::parse("{}").is_err());
    }
}
