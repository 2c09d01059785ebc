//! What people see: progress bars, the line of live figures, figures at the end, errors.

use anyhow::Result;
use dsrun_models::fetch::Progress;
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

/// How often the line of live figures is drawn again.
const REDRAW: Duration = Duration::from_millis(100);

/// Standard output and standard error, and what may be done with them.
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

    /// Something worth knowing, on standard error; nothing if quiet.
    pub(crate) fn note(&self, text: &str) {
        if !self.quiet {
            self.line(&self.styled("2", text));
        }
    }

    /// A failure, its causes and hints, on standard error.
    pub(crate) fn error(&self, error: &anyhow::Error) {
        let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
        self.line(&format!("{} {}", self.styled("1;31", "error:"), causes.join(": ")));
    }

    fn line(&self, text: &str) {
        // Nobody is left to tell if standard error is gone.
        let _ = writeln!(std::io::stderr().lock(), "{text}");
    }

    /// A bar for a number of bytes, or a spinner if the number is not known.
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
        // The templates are ours and valid; a default bar would do all the same.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(REDRAW);
        bar
    }

    /// A writer for text that streams in.
    pub(crate) fn stream(&self) -> StreamWriter {
        let live = self.rich && !self.quiet;
        let mode = match (live, std::io::stdout().is_terminal()) {
            (true, true) => Live::Below,
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

/// Progress of fetching a model, as a bar.
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

/// Where live figures go.
enum Live {
    /// Nowhere.
    No,
    /// Text and figures share a terminal: figures stand in the line below the text.
    Below,
    /// Text goes elsewhere: figures have the terminal to themselves.
    Spinner(ProgressBar),
}

/// Writes text as it comes in, with a line of live figures.
pub(crate) struct StreamWriter {
    mode: Live,
    colour: bool,
    drawn: Option<Instant>,
    started: Instant,
    tokens: usize,
}

impl StreamWriter {
    /// Writes text of one more token.
    pub(crate) fn token(&mut self, text: &str) -> Result<()> {
        if self.tokens == 0 {
            // Speed is that of decoding: the clock starts with the first token.
            self.started = Instant::now();
        }
        self.tokens += 1;
        self.clear_below();
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

    fn figures(&self) -> String {
        let rate = (self.tokens - 1) as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
        format!("{} tokens, {rate:.1} tokens/s", self.tokens)
    }

    fn draw(&mut self) {
        match &self.mode {
            Live::No => {}
            Live::Spinner(spinner) => spinner.set_message(self.figures()),
            Live::Below => {
                let (dim, plain) = if self.colour { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
                // Make room below (which may scroll), come back, remember the place, write below, return to the place.
                let line = format!("\x1bD\x1b[A\x1b7\x1b[B\r\x1b[2K{dim}{}{plain}\x1b8", self.figures());
                let _ = write!(std::io::stderr().lock(), "{line}");
            }
        }
        self.drawn = Some(Instant::now());
    }

    /// Takes the figures away, so that text may flow over their line.
    fn clear_below(&mut self) {
        if matches!(self.mode, Live::Below) && self.drawn.is_some() {
            let _ = write!(std::io::stderr().lock(), "\x1b7\x1b[B\r\x1b[2K\x1b8");
        }
    }

    /// Ends the text with a line break.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.clear_below();
        self.drawn = None;
        if let Live::Spinner(spinner) = &self.mode {
            spinner.finish_and_clear();
        }
        let mut output = std::io::stdout().lock();
        output.write_all(b"\n")?;
        output.flush()?;
        Ok(())
    }
}

impl Drop for StreamWriter {
    fn drop(&mut self) {
        self.clear_below();
        if let Live::Spinner(spinner) = &self.mode {
            spinner.finish_and_clear();
        }
    }
}
