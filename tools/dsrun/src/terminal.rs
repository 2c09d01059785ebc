//! Output for people: progress bars, the status line, notes and errors.

use crate::interrupt;
use anyhow::Result;
use dsrun_models::fetch::Progress;
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

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

    fn styled(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Writes a note to standard error, unless quiet.
    pub(crate) fn note(&self, text: &str) {
        if !self.quiet {
            self.line(&self.styled("2", text));
        }
    }

    /// Writes an error with its causes and hints to standard error.
    pub(crate) fn error(&self, error: &anyhow::Error) {
        let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
        self.line(&format!("{} {}", self.styled("1;31", "error:"), causes.join(": ")));
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
        let mode = match (live, std::io::stdout().is_terminal()) {
            (true, true) => StatusLine::reserve().map_or(Live::No, Live::Bottom),
            (true, false) => Live::Spinner(self.bar("", None)),
            (false, _) => Live::No,
        };
        if let Live::Spinner(spinner) = &mode
            && let Ok(style) = ProgressStyle::with_template("{spinner} {msg}")
        {
            spinner.set_style(style);
        }
        StreamWriter { mode, colour: self.colour, drawn: None, started: Instant::now(), tokens: 0 }
    }
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

/// The bottom line of the terminal, which is excluded from scrolling.
struct StatusLine {
    row: u16,
}

impl StatusLine {
    /// Reserves the bottom line, if the height of the terminal is known.
    fn reserve() -> Option<Self> {
        let (_, terminal_size::Height(row)) = terminal_size::terminal_size_of(std::io::stderr())?;
        if row < 4 {
            return None;
        }
        interrupt::on_exit(RELEASE);
        // A line break and one line up make sure that the cursor is not in the bottom line. Then the scroll region is set to
        // the lines above. Setting it moves the cursor, so the cursor is saved and restored around it.
        write_escapes(&format!("\n\x1b[A\x1b7\x1b[1;{}r\x1b8", row - 1));
        Some(Self { row })
    }

    fn draw(&self, text: &str) {
        write_escapes(&format!("\x1b7\x1b[{};1H\x1b[2K{text}\x1b8", self.row));
    }
}

/// The escape sequence that lets the whole terminal scroll again.
const RELEASE: &str = "\x1b7\x1b[r\x1b8";

impl Drop for StatusLine {
    fn drop(&mut self) {
        self.draw("");
        write_escapes(RELEASE);
        interrupt::on_exit("");
    }
}

fn write_escapes(text: &str) {
    let mut stream = std::io::stderr().lock();
    // A failure to write to standard error cannot be reported.
    let _ = stream.write_all(text.as_bytes()).and_then(|()| stream.flush());
}

/// The place of the live statistics.
enum Live {
    /// They are not shown.
    No,
    /// Text and statistics share a terminal: the statistics have its bottom line.
    Bottom(StatusLine),
    /// The text does not go to the terminal: the statistics are the message of a spinner.
    Spinner(ProgressBar),
}

/// Writes streamed text, with a line of live statistics.
pub(crate) struct StreamWriter {
    mode: Live,
    colour: bool,
    drawn: Option<Instant>,
    started: Instant,
    tokens: usize,
}

impl StreamWriter {
    /// Writes the text of one more token.
    pub(crate) fn token(&mut self, text: &str) -> Result<()> {
        if self.tokens == 0 {
            // The rate is that of decoding: the clock starts with the first token.
            self.started = Instant::now();
        }
        self.tokens += 1;
        if !text.is_empty() {
            let mut output = std::io::stdout().lock();
            output.write_all(text.as_bytes())?;
            output.flush()?;
        }
        if self.tokens > 1 && self.drawn.is_none_or(|drawn| drawn.elapsed() >= REDRAW) {
            self.draw();
        }
        Ok(())
    }

    fn draw(&mut self) {
        let rate = (self.tokens - 1) as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
        let figures = format!("{} tokens, {rate:.1} tokens/s", self.tokens);
        match &self.mode {
            Live::No => {}
            Live::Spinner(spinner) => spinner.set_message(figures),
            Live::Bottom(line) if self.colour => line.draw(&format!("\x1b[2m{figures}\x1b[0m")),
            Live::Bottom(line) => line.draw(&figures),
        }
        self.drawn = Some(Instant::now());
    }

    /// Ends the text with a line break and removes the statistics.
    pub(crate) fn finish(self) -> Result<()> {
        drop(self);
        let mut output = std::io::stdout().lock();
        output.write_all(b"\n")?;
        output.flush()?;
        Ok(())
    }
}

impl Drop for StreamWriter {
    fn drop(&mut self) {
        if let Live::Spinner(spinner) = &self.mode {
            spinner.finish_and_clear();
        }
    }
}
