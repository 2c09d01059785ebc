//! Streamed text, with a line of live statistics.

use super::{REDRAW, column::CursorColumn};
use crate::interrupt;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    io::Write,
    time::{Duration, Instant},
};
use terminal_size::{Height, Width};

/// The fewest lines of a terminal with a status line.
const LEAST_ROWS: u16 = 4;

/// The escape sequence that lets the whole terminal scroll again.
const RELEASE: &str = "\x1b7\x1b[r\x1b8";

/// The columns and rows of a terminal, if they are known.
type Size = fn() -> Option<(Width, Height)>;

/// The bottom line of the terminal, which is excluded from scrolling.
struct StatusLine {
    output: Box<dyn Write>,
    size: Size,
    rows: u16,
    colour: bool,
    column: CursorColumn,
}

impl StatusLine {
    /// Reserves the bottom line, if the size of the terminal is known.
    fn reserve(output: Box<dyn Write>, size: Size, colour: bool) -> Option<Self> {
        let (Width(columns), Height(rows)) = size()?;
        if rows < LEAST_ROWS {
            return None;
        }
        interrupt::on_exit(RELEASE);
        let column = CursorColumn::new(columns.into());
        let mut line = Self { output, size, rows, colour, column };
        // A line break and one line up make sure that the cursor is not in the bottom line.
        line.escapes("\n\x1b[A");
        line.set_region();
        Some(line)
    }

    /// Limits scrolling to the lines above. That moves the cursor, so the cursor is saved and restored around it.
    fn set_region(&mut self) {
        self.escapes(&format!("\x1b7\x1b[1;{}r\x1b8", self.rows - 1));
    }

    /// Draws the text, unless the cursor may be at the right margin. Returns whether it was drawn.
    fn draw(&mut self, text: &str) -> bool {
        let Some((Width(columns), Height(rows))) = (self.size)() else { return false };
        self.column.resize(columns.into());
        if !self.column.is_clear_of_margin() || rows < LEAST_ROWS {
            return false;
        }
        if rows != self.rows {
            self.rows = rows;
            self.set_region();
        }
        // A longer text would wrap, and scroll the terminal.
        let text: String = text.chars().take(usize::from(columns.saturating_sub(1))).collect();
        let text = if self.colour { format!("\x1b[2m{text}\x1b[0m") } else { text };
        self.escapes(&format!("\x1b7\x1b[{};1H\x1b[2K{text}\x1b8", self.rows));
        true
    }

    fn escapes(&mut self, text: &str) {
        // A failure to write to standard error cannot be reported.
        let _ = self.output.write_all(text.as_bytes()).and_then(|()| self.output.flush());
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        // Only a line break follows, so the state at the right margin may be lost here.
        self.escapes(&format!("\x1b7\x1b[{};1H\x1b[2K\x1b8{RELEASE}", self.rows));
        interrupt::on_exit("");
    }
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
    text: Box<dyn Write>,
    live: Live,
    redraw: Duration,
    drawn: Option<Instant>,
    started: Instant,
    tokens: usize,
}

impl StreamWriter {
    fn new(text: Box<dyn Write>, live: Live, redraw: Duration) -> Self {
        Self { text, live, redraw, drawn: None, started: Instant::now(), tokens: 0 }
    }

    /// A writer without statistics.
    pub(super) fn plain() -> Self {
        Self::new(Box::new(std::io::stdout()), Live::No, REDRAW)
    }

    /// A writer of text that does not go to the terminal; `spinner` shows the statistics.
    pub(super) fn with_spinner(spinner: ProgressBar) -> Self {
        // The template is a constant and valid; otherwise the default style is used.
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            spinner.set_style(style);
        }
        Self::new(Box::new(std::io::stdout()), Live::Spinner(spinner), REDRAW)
    }

    /// A writer of text to the terminal, whose bottom line shows the statistics.
    pub(super) fn with_status_line(colour: bool) -> Self {
        let size = || terminal_size::terminal_size_of(std::io::stderr());
        let line = StatusLine::reserve(Box::new(std::io::stderr()), size, colour);
        Self::new(Box::new(std::io::stdout()), line.map_or(Live::No, Live::Bottom), REDRAW)
    }

    /// Writes the text of one more token.
    pub(crate) fn token(&mut self, text: &str) -> Result<()> {
        if self.tokens == 0 {
            // The rate is that of decoding: the clock starts with the first token.
            self.started = Instant::now();
        }
        self.tokens += 1;
        if !text.is_empty() {
            self.text.write_all(text.as_bytes())?;
            self.text.flush()?;
            if let Live::Bottom(line) = &mut self.live {
                line.column.write(text);
            }
        }
        if self.tokens > 1 && self.drawn.is_none_or(|drawn| drawn.elapsed() >= self.redraw) {
            self.draw();
        }
        Ok(())
    }

    fn draw(&mut self) {
        let rate = (self.tokens - 1) as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
        let figures = format!("{} tokens, {rate:.1} tokens/s", self.tokens);
        let drawn = match &mut self.live {
            Live::No => true,
            Live::Spinner(spinner) => {
                spinner.set_message(figures);
                true
            }
            Live::Bottom(line) => line.draw(&figures),
        };
        if drawn {
            self.drawn = Some(Instant::now());
        }
    }

    /// Ends the text with a line break and removes the statistics.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.end();
        self.text.write_all(b"\n")?;
        self.text.flush()?;
        Ok(())
    }

    /// Removes the statistics.
    fn end(&mut self) {
        if let Live::Spinner(spinner) = std::mem::replace(&mut self.live, Live::No) {
            spinner.finish_and_clear();
        }
    }
}

impl Drop for StreamWriter {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(all(test, unix))]
mod tests;
