//! Results for the terminal: a table of ops and element types, then every failure.

use super::{
    record::{Outcome, Record, failures},
    summary::Summary,
    table::{Cell, LEGEND, Table, heading},
    times::Reference,
};
use std::fmt::Write;

/// The default width of text.
pub(crate) const WIDTH: usize = 100;
/// The minimum width that text is wrapped to.
const NARROWEST: usize = 30;
/// Number of failures shown in full; for the others only the commands are.
const SHOWN: usize = 30;
/// Number of messages shown for one failure.
const MESSAGES: usize = 8;

/// The layout of text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub(crate) width: usize,
    pub(crate) colour: bool,
}

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Renders the report.
pub(crate) fn render(summary: &Summary, reference: Option<&Reference>, style: Style) -> String {
    let style = Style { width: style.width.max(NARROWEST), ..style };
    let mut text = String::new();
    table(&mut text, &summary.cases, style);
    let failures = failures(&summary.cases);
    for record in failures.iter().take(SHOWN) {
        failure(&mut text, record, style);
    }
    if failures.len() > SHOWN {
        line(&mut text, &format!("\nand {} more:", failures.len() - SHOWN));
        failures.iter().skip(SHOWN).for_each(|record| line(&mut text, &format!("  {}", record.replay)));
    }
    let waived: Vec<&Record> =
        summary.cases.iter().filter(|record| record.status == Outcome::Waived).collect();
    if !waived.is_empty() {
        line(&mut text, "\nwaived:");
        for record in waived {
            let (reason, until) = record
                .waiver
                .as_ref()
                .map_or(("", ""), |waiver| (waiver.reason.as_str(), waiver.expires.as_str()));
            wrap(&mut text, &format!("{} until {until}: {reason}", record.id), "  ", style.width);
        }
    }
    if let Some(reference) = reference {
        line(&mut text, "");
        reference.lines(&summary.cases).iter().for_each(|of_op| line(&mut text, of_op));
    }
    line(&mut text, "");
    wrap(&mut text, &summary.total(), "", style.width);
    wrap(
        &mut text,
        &format!("{}, tested for {}", summary.subject(), summary.profiles.join(", ")),
        "",
        style.width,
    );
    if let Some(unclaimed) = summary.unclaimed() {
        wrap(&mut text, &unclaimed, "", style.width);
    }
    let verdict = if summary.passed { style.paint("1;32", "PASSED") } else { style.paint("1;31", "FAILED") };
    line(&mut text, &verdict);
    text
}

/// Renders the table of cases that passed, by op and element type.
fn table(text: &mut String, records: &[Record], style: Style) {
    let Table { columns, rows } = Table::of(records);
    let shown = |cell: &Option<Cell>| cell.map_or_else(String::new, |cell| cell.text());
    let first = rows.iter().map(|(op, _)| op.len()).max().unwrap_or(0).max("op".len());
    let widths: Vec<usize> = (0..columns.len())
        .map(|column| {
            let cells = rows.iter().map(|(_, cells)| shown(&cells[column]).len());
            cells.max().unwrap_or(0).max(heading(columns[column]).len())
        })
        .collect();
    let paint = |cell: &Option<Cell>, text: String| match cell {
        Some(cell) if cell.failed > 0 => style.paint("31", &text),
        _ => text,
    };
    if first + widths.iter().map(|width| width + 2).sum::<usize>() <= style.width {
        let headings: String = columns
            .iter()
            .zip(&widths)
            .map(|(dtype, width)| format!("  {:>width$}", heading(*dtype)))
            .collect();
        line(text, &format!("{:first$}{headings}", "op"));
        for (op, cells) in &rows {
            let cells: String = cells
                .iter()
                .zip(&widths)
                .map(|(cell, width)| paint(cell, format!("  {:>width$}", shown(cell))))
                .collect();
            line(text, format!("{op:first$}{cells}").trim_end());
        }
    } else {
        // Too narrow for columns: a line for each op.
        for (op, cells) in &rows {
            let there = cells.iter().zip(&columns).filter(|(cell, _)| cell.is_some());
            let cells: Vec<String> = there
                .map(|(cell, dtype)| {
                    let name = dtype.map_or_else(String::new, |dtype| format!("{dtype} "));
                    format!("{name}{}", shown(cell))
                })
                .collect();
            wrap(text, &format!("{op}: {}", cells.join(", ")), "", style.width);
        }
    }
    line(text, "");
    wrap(text, LEGEND, "", style.width);
}

fn failure(text: &mut String, record: &Record, style: Style) {
    let heading = format!("{} {}", record.status.name().to_uppercase(), record.id);
    line(text, "");
    line(text, &style.paint("1;31", &heading));
    if record.status == Outcome::Unsupported {
        wrap(text, "the profile requires this op, and the backend does not support it", "  ", style.width);
    }
    if let Some(simplest) = &record.simplest {
        wrap(text, &format!("the simplest case that fails in this way: {}", simplest.id), "  ", style.width);
        messages(text, simplest, style);
        wrap(text, &format!("the random case {}:", record.id), "  ", style.width);
    }
    messages(text, record, style);
    // Commands are not wrapped, so that they can be copied.
    line(text, &format!("  replay: {}", record.replay));
}

fn messages(text: &mut String, record: &Record, style: Style) {
    for message in record.messages.iter().take(MESSAGES) {
        wrap(text, message, "  ", style.width);
    }
    if record.messages.len() > MESSAGES {
        line(text, &format!("  and {} more", record.messages.len() - MESSAGES));
    }
    if let Some(worst) = record.worst.as_ref().filter(|worst| worst.ratio.0 > 1.0) {
        let worst = format!(
            "worst error: {:.3} times its limit, in {} at {:?}: {:e} for {:e} (± {:.1e})",
            worst.ratio.0, worst.result, worst.index, worst.found.0, worst.expected.0, worst.limit.0
        );
        wrap(text, &worst, "  ", style.width);
    }
}

fn line(text: &mut String, what: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{what}");
}

/// Wraps text between words, and indents each line.
fn wrap(text: &mut String, what: &str, indent: &str, width: usize) {
    let mut current = indent.to_owned();
    let mut is_empty = true;
    for word in what.split_whitespace() {
        if !is_empty && current.chars().count() + 1 + word.chars().count() > width {
            line(text, &current);
            current = format!("{indent}  ");
            is_empty = true;
        }
        if !is_empty {
            current.push(' ');
        }
        current.push_str(word);
        is_empty = false;
    }
    line(text, &current);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        let failed =
            vec!["y: 3 of 12 elements are wrong; first [0, 1] is 2e0, must be 1e0 ± 1.0e-7".to_owned()];
        let crashed = Record::new(
            "paged_attention/bf16/long",
            Outcome::Crash,
            vec!["the process ended by signal 11".into()],
        );
        let optional =
            Record { required: false, ..Record::new("norm_linear/f32/a", Outcome::Unsupported, Vec::new()) };
        vec![
            Record::new("add/f32/a", Outcome::Pass, Vec::new()),
            Record {
                replay: "run --case add/f32/b".into(),
                ..Record::new("add/f32/b", Outcome::Fail, failed)
            },
            crashed,
            optional,
            Record::new("check/x", Outcome::Pass, Vec::new()),
        ]
    }

    fn text(width: usize) -> String {
        let mut text = String::new();
        let style = Style { width, colour: false };
        let records = records();
        table(&mut text, &records, style);
        records
            .iter()
            .filter(|record| record.is_failure())
            .for_each(|record| failure(&mut text, record, style));
        text
    }

    #[test]
    fn wide_terminals_get_columns() {
        let text = text(80);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["op", "f32", "bf16", "-"]);
        assert_eq!(rows[1], ["add", "1/2!"]);
        assert_eq!(rows[2], ["paged_attention", "0/1!"]);
        assert_eq!(rows[3], ["norm_linear", "-"]);
        assert_eq!(rows[4], ["check", "1"]);
    }

    #[test]
    fn narrow_terminals_get_lines_that_fit() {
        const NARROW: usize = 28;
        let text = text(NARROW);
        assert!(text.contains("add: f32 1/2!\n"), "{text}");
        // Ids and commands are not wrapped, so that they can be copied.
        let is_wrapped =
            |line: &&str| !["replay:", "FAIL", "CRASH"].iter().any(|start| line.trim().starts_with(start));
        let long = text.lines().filter(is_wrapped).find(|line| line.chars().count() > NARROW);
        assert_eq!(long, None);
    }

    #[test]
    fn a_failure_says_what_is_wrong_and_how_to_run_it_again() {
        let text = text(100);
        assert!(text.contains("FAIL add/f32/b\n  y: 3 of 12 elements"), "{text}");
        assert!(text.contains("  replay: run --case add/f32/b\n"), "{text}");
        assert!(
            text.contains("CRASH paged_attention/bf16/long\n  the process ended by signal 11\n"),
            "{text}"
        );
    }
}
