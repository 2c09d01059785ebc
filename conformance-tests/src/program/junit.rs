//! Results as JUnit XML for continuous-integration systems.

use super::{
    record::{Outcome, Record},
    summary::Summary,
};
use std::fmt::Write;

/// Renders the document, which has a test suite for each op.
pub(crate) fn render(summary: &Summary) -> String {
    let mut ops: Vec<&str> = Vec::new();
    for record in &summary.cases {
        if ops.last() != Some(&record.op.as_str()) && !ops.contains(&record.op.as_str()) {
            ops.push(&record.op);
        }
    }
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let all: Vec<&Record> = summary.cases.iter().collect();
    put(&mut xml, &format!("<testsuites name=\"dsrun-conformance\" {}>\n", counts(&all, summary.seconds)));
    for op in ops {
        let records: Vec<&Record> = summary.cases.iter().filter(|record| record.op == op).collect();
        let seconds = records.iter().map(|record| record.seconds).sum();
        put(&mut xml, &format!("  <testsuite name=\"{}\" {}>\n", escape(op), counts(&records, seconds)));
        records.iter().for_each(|record| case(&mut xml, record));
        xml.push_str("  </testsuite>\n");
    }
    xml.push_str("</testsuites>\n");
    xml
}

fn case(xml: &mut String, record: &Record) {
    let class =
        record.dtype.as_ref().map_or_else(|| record.op.clone(), |dtype| format!("{}.{dtype}", record.op));
    let (name, class) = (escape(&record.id), escape(&class));
    put(xml, &format!("    <testcase name=\"{name}\" classname=\"{class}\" time=\"{:.6}\"", record.seconds));
    let Some(element) = element(record) else {
        xml.push_str("/>\n");
        return;
    };
    let first = record.messages.first().map_or("", String::as_str);
    let (reason, text) = match &record.waiver {
        Some(waiver) => {
            (format!("waived until {}: {}", waiver.expires, waiver.reason), record.messages.join("\n"))
        }
        None => (first.to_owned(), format!("{}\nreplay: {}", record.messages.join("\n"), record.replay)),
    };
    let (reason, text) = (escape(&reason), escape(&text));
    put(xml, &format!(">\n      <{element} message=\"{reason}\">{text}</{element}>\n    </testcase>\n"));
}

/// The XML element for a case that did not pass.
fn element(record: &Record) -> Option<&'static str> {
    match record.status {
        Outcome::Pass => None,
        Outcome::Waived => Some("skipped"),
        Outcome::Unsupported if !record.required => Some("skipped"),
        Outcome::Unsupported | Outcome::Fail => Some("failure"),
        Outcome::Crash | Outcome::Timeout => Some("error"),
    }
}

fn counts(records: &[&Record], seconds: f64) -> String {
    let count = |wanted| records.iter().filter(|record| element(record) == Some(wanted)).count();
    format!(
        "tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{seconds:.6}\"",
        records.len(),
        count("failure"),
        count("error"),
        count("skipped")
    )
}

fn put(xml: &mut String, text: &str) {
    // Writing to a string cannot fail.
    let _ = xml.write_str(text);
}

/// Escapes text for elements and attributes of XML 1.0.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' => escaped.push_str("&#10;"),
            '\t' => escaped.push_str("&#9;"),
            // XML 1.0 has no notation for other control characters and these two.
            '\u{0}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("a < \"b\" & c\n\u{1}"), "a &lt; &quot;b&quot; &amp; c&#10;\u{fffd}");
    }
}
