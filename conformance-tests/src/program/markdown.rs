//! Results as a Markdown page for publication: the conditions, a table of ops and element types, and the failures.

use super::{
    record::{Record, failures},
    summary::Summary,
    table::{Cell, LEGEND, Table, heading},
};

/// Renders the page.
pub(crate) fn render(summary: &Summary) -> String {
    let verdict = if summary.passed { "Passed" } else { "Failed" };
    let mut page = format!("**{verdict}.** {}.\n\n{}.\n\n", summary.total(), summary.conditions());
    if let Some(unclaimed) = summary.unclaimed() {
        page += &format!("{}.\n\n", capitalised(&unclaimed));
    }
    page += &table(&summary.cases);
    page += &format!("\n{LEGEND} In brackets: the largest error relative to its limit.\n");
    let failures = failures(&summary.cases);
    if !failures.is_empty() {
        page += "\nFailures:\n\n";
        for record in failures {
            let shown = record.shown();
            let message = shown.messages.first().map_or("", String::as_str);
            page += &format!("- `{}` ({}): {}\n", shown.id, record.status.name(), escape(message));
        }
    }
    page
}

/// A sentence with a capital letter at its beginning.
fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn table(records: &[Record]) -> String {
    let Table { columns, rows } = Table::of(records);
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let shown = |cell: &Option<Cell>| {
        let Some(cell) = cell else { return String::new() };
        cell.worst.map_or_else(|| cell.text(), |worst| format!("{} ({worst:.2})", cell.text()))
    };
    let headings: Vec<String> =
        [String::from("op")].into_iter().chain(columns.iter().copied().map(heading)).collect();
    let mut text = line(&headings) + &format!("|{}\n", "---|".repeat(headings.len()));
    for (op, cells) in rows {
        let cells: Vec<String> = [format!("`{op}`")].into_iter().chain(cells.iter().map(shown)).collect();
        text += &line(&cells);
    }
    text
}

/// Escapes a message so that Markdown shows it verbatim, on one line.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        if "\\`*_[]<>|".contains(letter) {
            escaped.push('\\');
        }
        escaped.push(if letter.is_control() { ' ' } else { letter });
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::{
        super::record::{Number, Outcome, WorstElement},
        *,
    };

    #[test]
    fn a_table_has_a_row_for_each_op() {
        let worst = |ratio| {
            let [found, expected, limit] = [Number(1.0); 3];
            Some(WorstElement {
                result: "y".into(),
                index: vec![0],
                found,
                expected,
                limit,
                ratio: Number(ratio),
            })
        };
        let records = [
            Record { worst: worst(0.25), ..Record::new("add/f32/a", Outcome::Pass, Vec::new()) },
            Record { worst: worst(0.5), ..Record::new("add/f32/b", Outcome::Pass, Vec::new()) },
            // The table shows the largest error of the cases that passed.
            Record { worst: worst(7.0), ..Record::new("add/bf16/a", Outcome::Fail, Vec::new()) },
            Record::new("check/x", Outcome::Pass, Vec::new()),
        ];
        let expected = "| op | f32 | bf16 | - |\n|---|---|---|---|\n| `add` | 2 (0.50) | 0/1! |  |\n| `check` |  |  | 1 |\n";
        assert_eq!(table(&records), expected);
    }

    #[test]
    fn messages_are_shown_verbatim() {
        assert_eq!(escape("y[0] is *1*\nnot `2`"), "y\\[0\\] is \\*1\\* not \\`2\\`");
    }
}
