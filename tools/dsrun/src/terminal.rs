//! Output for people: progress bars, the status line, notes and errors.

mod column;
mod stream;

use dsrun_models::fetch::Progress;
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    io::{IsTerminal, Write},
    time::Duration,
};
pub(crate) use stream::StreamWriter;

/// The interval at which the status line is redrawn.
const REDRAW: Duration = Duration::from_millis(100);

/// Standard output and standard error, and their capabilities.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terminal {
    quiet: bool,
    /// Standard error is a terminal that understands escapes.
    rich: bool,
    colour: bool,
}

impl Terminal {
    pub(crate) fn new(quiet: bool) -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let rich = std::io::stderr().is_terminal() && !dumb;
        let colour = rich && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { quiet, rich, colour }
    }

    /// Whether text on standard error has colours.
    pub(crate) fn has_colour(&self) -> bool {
        self.colour
    }

    fn styled(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Writes a note to standard error, unless quiet.
    pub(crate) fn note(&self, text: &str) {
        if !self.quiet {
            self.line(&self.styled("2", text));
        }
    }

    /// Writes a note to standard error, also if quiet.
    pub(crate) fn always(&self, text: &str) {
        self.line(&self.styled("2", text));
    }

    /// Writes an error with its causes and hints to standard error.
    pub(crate) fn error(&self, error: &anyhow::Error) {
        self.line(&format!("{} {}", self.styled("1;31", "error:"), with_causes(error)));
    }

    fn line(&self, text: &str) {
        // A failure to write to standard error cannot be reported.
        let _ = writeln!(std::io::stderr().lock(), "{text}");
    }

    /// A progress bar in bytes, or a spinner if the total is unknown.
    pub(crate) fn bar(&self, what: &str, total: Option<u64>) -> ProgressBar {
        if self.quiet || !self.rich {
            return ProgressBar::hidden();
        }
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        let template = if total.is_some() {
            "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}"
        } else {
            "{spinner} {msg} {binary_bytes}"
        };
        // The templates are constants and valid; otherwise the default style is used.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(REDRAW);
        bar
    }

    /// A progress bar for a count, whose total the caller sets later.
    pub(crate) fn counter(&self, what: &str) -> ProgressBar {
        let bar = self.bar(what, Some(0));
        // The template is valid, as in `bar`.
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {elapsed}") {
            bar.set_style(style);
        }
        bar
    }

    /// A writer for streamed text.
    pub(crate) fn stream(&self) -> StreamWriter {
        let live = self.rich && !self.quiet;
        match (live, std::io::stdout().is_terminal()) {
            (true, true) => StreamWriter::with_status_line(self.colour),
            (true, false) => StreamWriter::with_spinner(self.bar("", None)),
            (false, _) => StreamWriter::plain(),
        }
    }
}

/// An error with its causes, but for those whose text stands in the one before.
fn with_causes(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        text if text.contains(&cause) => text.to_owned(),
        text => format!("{text}: {cause}"),
    })
}

/// A progress bar for fetching a model.
pub(crate) struct FetchBar<'a> {
    terminal: &'a Terminal,
    bar: Option<ProgressBar>,
}

impl<'a> FetchBar<'a> {
    pub(crate) fn new(terminal: &'a Terminal) -> Self {
        Self { terminal, bar: None }
    }
}

impl Progress for FetchBar<'_> {
    fn begin(&mut self, what: &str, total_bytes: Option<u64>) {
        if !self.terminal.rich {
            self.terminal.note(what);
        }
        self.bar = Some(self.terminal.bar(what, total_bytes));
    }

    fn advance(&mut self, bytes_so_far: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes_so_far);
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let cause = || anyhow::anyhow!("it is not JSON");
        let said = |context: &'static str| with_causes(&cause().context(context));
        assert_eq!(said("config.json: it is not JSON"), "config.json: it is not JSON");
        assert_eq!(said("config.json"), "config.json: it is not JSON");
    }
}
