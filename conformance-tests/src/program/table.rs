//! The table of results by op and element type.

use super::record::{Outcome, Record};
use dsrun_core::DType;

/// The explanation of the cells.
pub(crate) const LEGEND: &str = "Number of cases that passed; passed/run where some did not, with ! for a failure; - where the \
                                 device does not support the op and need not.";

/// A table with a row for each op and a column for each element type.
#[derive(Debug)]
pub(crate) struct Table<'a> {
    /// Element types; `None` for checks, which have no type.
    pub(crate) columns: Vec<Option<&'a str>>,
    /// The cells of each op; `None` where there are no cases.
    pub(crate) rows: Vec<(&'a str, Vec<Option<Cell>>)>,
}

impl<'a> Table<'a> {
    pub(crate) fn of(records: &'a [Record]) -> Self {
        let mut ops: Vec<&str> = Vec::new();
        for record in records {
            if !ops.contains(&record.op.as_str()) {
                ops.push(&record.op);
            }
        }
        let has = |dtype: &Option<&str>| records.iter().any(|record| record.dtype.as_deref() == *dtype);
        let columns: Vec<Option<&str>> =
            DType::ALL.iter().map(|dtype| Some(dtype.name())).chain([None]).filter(has).collect();
        let cell = |op: &str, dtype: Option<&str>| {
            let mut of = records
                .iter()
                .filter(|record| record.op == op && record.dtype.as_deref() == dtype)
                .peekable();
            of.peek()?;
            let mut cell = Cell::default();
            of.for_each(|record| cell.count(record));
            Some(cell)
        };
        let rows =
            ops.iter().map(|op| (*op, columns.iter().map(|dtype| cell(op, *dtype)).collect())).collect();
        Self { columns, rows }
    }
}

/// The heading of a column.
pub(crate) fn heading(dtype: Option<&str>) -> String {
    dtype.unwrap_or("-").to_owned()
}

/// The counts of a cell.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cell {
    passed: usize,
    run: usize,
    pub(crate) failed: usize,
    /// The largest error of cases that passed, relative to its limit; `None` if all results were exact.
    pub(crate) worst: Option<f64>,
}

impl Cell {
    fn count(&mut self, record: &Record) {
        // An optional op that is not supported is not counted.
        if record.status == Outcome::Unsupported && !record.required {
            return;
        }
        let passed = record.status == Outcome::Pass;
        self.run += 1;
        self.passed += usize::from(passed);
        self.failed += usize::from(record.is_failure());
        if let Some(worst) = record.worst.as_ref().filter(|worst| passed && worst.ratio.0 > 0.0) {
            self.worst = Some(self.worst.map_or(worst.ratio.0, |other| other.max(worst.ratio.0)));
        }
    }

    pub(crate) fn text(self) -> String {
        match self {
            Self { run: 0, .. } => "-".into(),
            Self { failed: 0, passed, run, .. } if passed == run => passed.to_string(),
            Self { failed, passed, run, .. } => {
                format!("{passed}/{run}{}", if failed > 0 { "!" } else { "" })
            }
        }
    }
}
