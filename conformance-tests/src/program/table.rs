//! Results by op and element type, as people read them.

use super::record::{Outcome, Record};
use dsrun_core::DType;

/// What is written in a cell.
pub(crate) const LEGEND: &str = "Cases that passed; passed/run where not all did, with ! where that is a failure; - where the \
                                 device does not run it and need not.";

/// A row for each op, a column for each element type; checks have none.
#[derive(Debug)]
pub(crate) struct Table<'a> {
    pub(crate) columns: Vec<Option<&'a str>>,
    /// Of each op and type, if there are cases.
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

/// What stands above a column.
pub(crate) fn heading(dtype: Option<&str>) -> String {
    dtype.unwrap_or("-").to_owned()
}

/// What a cell of the table counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cell {
    passed: usize,
    run: usize,
    pub(crate) failed: usize,
    /// The largest error of what passed, as a part of what is allowed; of what need not be exact.
    pub(crate) worst: Option<f64>,
}

impl Cell {
    fn count(&mut self, record: &Record) {
        // What is optional and not there is not counted.
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
