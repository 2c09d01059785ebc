//! Streamed text in a pseudo-terminal: the screen shows every character.

use super::*;
use rstest::rstest;
use rustix::{
    fs::{Mode, OFlags, open},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use std::{cell::Cell, fs::File, io::Read, thread};
use unicode_width::UnicodeWidthChar;

thread_local! {
    /// The size of the pseudo-terminal of the test that this thread runs.
    static SIZE: Cell<(u16, u16)> = const { Cell::new((0, 0)) };
}

fn size() -> Option<(Width, Height)> {
    let (columns, rows) = SIZE.get();
    Some((Width(columns), Height(rows)))
}

/// A terminal that forgets, when it restores the cursor, that the next character has to wrap.
struct Screen {
    columns: usize,
    rows: usize,
    /// Whether characters of ambiguous width have two columns.
    wide: bool,
    /// A line has a character or nothing in each column, and whether it continues in the next line.
    lines: Vec<(Vec<Option<char>>, bool)>,
    /// Lines that were scrolled away.
    history: Vec<(Vec<Option<char>>, bool)>,
    /// The last line that scrolls.
    bottom: usize,
    row: usize,
    column: usize,
    saved: (usize, usize),
}

impl Screen {
    fn new(columns: usize, rows: usize, wide: bool) -> Self {
        let lines = vec![(vec![None; columns], false); rows];
        Self {
            columns,
            rows,
            wide,
            lines,
            history: Vec::new(),
            bottom: rows - 1,
            row: 0,
            column: 0,
            saved: (0, 0),
        }
    }

    fn show(&mut self, text: &str) {
        let mut rest = text;
        while let Some(character) = rest.chars().next() {
            rest = &rest[character.len_utf8()..];
            match character {
                '\x1b' => rest = self.escape(rest),
                '\r' => self.column = 0,
                '\n' => self.line_feed(),
                '\t' => self.column = ((self.column / 8 + 1) * 8).min(self.columns - 1).max(self.column),
                _ => self.put(character),
            }
        }
    }

    /// Executes an escape sequence, and returns the text after it.
    fn escape<'a>(&mut self, text: &'a str) -> &'a str {
        if let Some(rest) = text.strip_prefix('7') {
            self.saved = (self.row, self.column.min(self.columns - 1));
            return rest;
        }
        if let Some(rest) = text.strip_prefix('8') {
            (self.row, self.column) = self.saved;
            return rest;
        }
        let text = text.strip_prefix('[').expect("a control sequence");
        let end = text.find(|letter: char| letter.is_ascii_alphabetic()).expect("an end");
        let numbers: Vec<usize> = text[..end]
            .split(';')
            .filter(|part| !part.is_empty())
            .map(|part| part.parse().expect("a number"))
            .collect();
        match (&text[end..=end], numbers.as_slice()) {
            ("A", []) => self.row = self.row.saturating_sub(1),
            ("H", [row, column]) => (self.row, self.column) = (row - 1, column - 1),
            ("K", [2]) => self.lines[self.row] = (vec![None; self.columns], false),
            ("m", _) => {}
            ("r", []) => (self.bottom, self.row, self.column) = (self.rows - 1, 0, 0),
            ("r", [1, bottom]) => (self.bottom, self.row, self.column) = (bottom - 1, 0, 0),
            other => panic!("an unknown control sequence: {other:?}"),
        }
        &text[end + 1..]
    }

    fn line_feed(&mut self) {
        if self.row == self.bottom {
            let line = self.lines.remove(0);
            self.history.push(line);
            self.lines.insert(self.bottom, (vec![None; self.columns], false));
        } else {
            self.row += 1;
        }
    }

    fn put(&mut self, character: char) {
        let width =
            if self.wide { character.width_cjk() } else { character.width() }.expect("no control character");
        if self.column + width > self.columns {
            self.lines[self.row].1 = true;
            self.column = 0;
            self.line_feed();
        }
        self.lines[self.row].0[self.column] = Some(character);
        self.column += width;
    }

    /// Everything that scrolled, without the breaks of long lines.
    fn text(&self) -> String {
        let mut text = String::new();
        for (line, continues) in self.history.iter().chain(&self.lines[..=self.bottom]) {
            text.extend(line.iter().flatten());
            if !continues {
                text.push('\n');
            }
        }
        text
    }
}

const TEXT: &str = "Once upon a time there was a dog that liked to run through the long grass behind the house.\n\
    世界は広いので、犬は毎日新しい道を歩きました。今日は山へ行き、明日は海へ行きます。それから家に帰って、よく眠りました。\n\
    “Where are you going?” — “Far away…” said the dog; ±1 km, 2 × 3 = 6, §4, “again” and “again” and “again” and on.\n\
    mixed 世 widths 界 in one 広 very long line that 犬 goes on and on 道 until it has wrapped 歩 a few times 山 over.";

#[rstest]
fn no_character_is_lost_at_the_right_margin(
    #[values(2, 3, 10, 11, 40, 79, 80, 133)] columns: u16,
    #[values(false, true)] wide: bool,
) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
    grantpt(&master).expect("it is ours");
    unlockpt(&master).expect("it is usable");
    let name = ptsname(&master, Vec::new()).expect("a name");
    let slave = || -> File {
        open(&*name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("the other side").into()
    };
    let rows = 8;
    let window = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&master, window).expect("a size");
    let terminal = slave();
    let reported = terminal_size::terminal_size_of(&terminal).expect("a size");
    assert_eq!(reported, (Width(columns), Height(rows)));
    SIZE.set((columns, rows));

    let mut master = File::from(master);
    let reader = thread::spawn(move || {
        // Reading fails once the other side is closed.
        let mut shown = Vec::new();
        let _ = master.read_to_end(&mut shown);
        String::from_utf8(shown).expect("text")
    });
    let line = StatusLine::reserve(Box::new(slave()), size, true).expect("the size is known");
    let mut writer = StreamWriter::new(Box::new(slave()), Live::Bottom(line), Duration::ZERO);
    for character in TEXT.chars() {
        writer.token(character.encode_utf8(&mut [0; 4])).expect("it is written");
    }
    writer.finish().expect("it is written");
    drop(terminal);
    let shown = reader.join().expect("it is read");
    let drawn = shown.matches("tokens").count();
    assert!(drawn > 20 || columns < 10, "the status line was drawn {drawn} times");

    let mut screen = Screen::new(columns.into(), rows.into(), wide);
    screen.show(&shown);
    let text = screen.text();
    assert_eq!(text.trim_end_matches('\n'), TEXT);
}
