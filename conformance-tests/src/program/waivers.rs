//! Waivers: a TOML file of known failures.
//!
//! ```toml
//! [[waiver]]
//! cases = ["linear_q4_0/bf16/strided"]
//! reason = "rows with gaps are not supported yet: https://example.org/issues/7"
//! expires = "2027-01-31"
//! ```
//!
//! A waiver lists its cases one by one, with a reason and the last day on which it holds. A case that passes and is still
//! waived is a failure, so that a waiver does not outlive its reason.

use super::record::{Outcome, Record, Waived};
use anyhow::{Context, Result, bail};
use jiff::civil::Date;
use serde::Deserialize;
use std::{collections::HashMap, path::Path};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    waiver: Vec<Waiver>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Waiver {
    cases: Vec<String>,
    reason: String,
    expires: String,
}

/// Known failures, by the id of the case.
#[derive(Debug, Default)]
pub(crate) struct Waivers(HashMap<String, (Waived, Date)>);

impl Waivers {
    /// Reads a file.
    ///
    /// # Errors
    /// If the file cannot be read or has an unknown key, or if a waiver lacks a reason, cases or a date, or repeats a case.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read waivers from {name}"))?;
        Self::parse(&text).with_context(|| format!("{name} is not a file of waivers"))
    }

    fn parse(text: &str) -> Result<Self> {
        let file: File = toml::from_str(text)?;
        let mut waivers = HashMap::new();
        for Waiver { cases, reason, expires } in file.waiver {
            if cases.is_empty() || reason.trim().is_empty() {
                bail!("a waiver needs `cases` and a `reason`");
            }
            let day: Date = expires
                .parse()
                .with_context(|| format!("`expires` must be a date such as 2027-01-31, not `{expires}`"))?;
            for case in cases {
                let waived = Waived { reason: reason.clone(), expires: expires.clone() };
                if waivers.insert(case.clone(), (waived, day)).is_some() {
                    bail!("{case} is waived twice");
                }
            }
        }
        Ok(Self(waivers))
    }

    /// Marks known failures as waived, and waived cases that pass as failures.
    pub(crate) fn apply(&self, records: &mut [Record], today: Date) {
        for record in records {
            let Some((waived, expires)) = self.0.get(&record.id) else { continue };
            if *expires < today {
                record.messages.push(format!("its waiver expired on {}: {}", waived.expires, waived.reason));
            } else if record.is_failure() {
                record.status = Outcome::Waived;
                record.waiver = Some(waived.clone());
            } else {
                record.status = Outcome::Fail;
                record.messages.push(format!("waiver no longer needed: {}", waived.reason));
            }
        }
    }

    /// Ids of waived cases that have no record.
    pub(crate) fn unused(&self, records: &[Record]) -> Vec<&str> {
        let is_unused = |id: &&String| !records.iter().any(|record| record.id == **id);
        let mut unused: Vec<&str> = self.0.keys().filter(is_unused).map(String::as_str).collect();
        unused.sort_unstable();
        unused
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::civil::date;
    use rstest::rstest;

    const FILE: &str =
        "[[waiver]]\ncases = [\"add/f32/prime\"]\nreason = \"known\"\nexpires = \"2026-06-30\"\n";

    #[rstest]
    #[case::fails(Outcome::Fail, date(2026, 6, 30), Outcome::Waived, false)]
    #[case::crashes(Outcome::Crash, date(2026, 1, 1), Outcome::Waived, false)]
    #[case::lacks(Outcome::Unsupported, date(2026, 1, 1), Outcome::Waived, false)]
    #[case::expired(Outcome::Fail, date(2026, 7, 1), Outcome::Fail, true)]
    #[case::passes(Outcome::Pass, date(2026, 1, 1), Outcome::Fail, true)]
    #[case::passes_expired(Outcome::Pass, date(2026, 7, 1), Outcome::Pass, false)]
    fn waivers_hold_until_they_expire(
        #[case] status: Outcome,
        #[case] today: Date,
        #[case] expected: Outcome,
        #[case] fails: bool,
    ) {
        let waivers = Waivers::parse(FILE).expect("the file is right");
        let mut records = [
            Record::new("add/f32/prime", status, Vec::new()),
            Record::new("add/f32/seven", status, Vec::new()),
        ];
        waivers.apply(&mut records, today);
        assert_eq!((records[0].status, records[0].is_failure()), (expected, fails));
        assert_eq!(records[1].status, status);
    }

    #[rstest]
    #[case::unknown_key(
        "[[waiver]]\ncases = [\"a\"]\nreason = \"r\"\nexpires = \"2026-01-01\"\nissue = 7\n",
        "issue"
    )]
    #[case::unknown_table("[waivers]\n", "waivers")]
    #[case::no_reason("[[waiver]]\ncases = [\"a\"]\nreason = \" \"\nexpires = \"2026-01-01\"\n", "reason")]
    #[case::no_expiry("[[waiver]]\ncases = [\"a\"]\nreason = \"r\"\n", "expires")]
    #[case::no_date("[[waiver]]\ncases = [\"a\"]\nreason = \"r\"\nexpires = \"soon\"\n", "soon")]
    #[case::twice("[[waiver]]\ncases = [\"a\", \"a\"]\nreason = \"r\"\nexpires = \"2026-01-01\"\n", "twice")]
    fn malformed_files_are_refused(#[case] text: &str, #[case] says: &str) {
        let error = Waivers::parse(text).expect_err("the file is wrong");
        assert!(format!("{error:#}").contains(says), "{error:#}");
    }

    #[test]
    fn unused_waivers_are_reported() {
        let waivers = Waivers::parse(FILE).expect("the file is right");
        assert_eq!(waivers.unused(&[]), ["add/f32/prime"]);
        assert!(waivers.unused(&[Record::new("add/f32/prime", Outcome::Pass, Vec::new())]).is_empty());
    }
}
