//! The column of the cursor in a terminal, as far as the written text determines it.
//!
//! A terminal that has filled a line keeps its cursor in the last column and wraps with the next character. Saving and
//! restoring the cursor loses this state in many terminals, so that the next character overwrites the last one. The status line may
//! therefore be drawn only while the cursor is certainly not at the right margin.

use unicode_width::UnicodeWidthChar;

/// A place on the screen, relative to the line that the text began in. Column `width` means that the next character wraps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    row: usize,
    column: usize,
}

impl Place {
    fn advance(&mut self, columns: usize, width: usize) {
        if columns > 0 && self.column + columns > width {
            self.row += 1;
            self.column = 0;
        }
        self.column += columns;
    }
}

/// The possible places of the cursor: terminals disagree about the width of some characters.
#[derive(Clone, Copy, Debug)]
pub(super) struct CursorColumn {
    width: usize,
    /// The place if the terminal takes every character as narrow as any terminal does.
    narrow: Place,
    /// The place if the terminal takes every character as wide as any terminal does.
    wide: Place,
    /// Whether the last character joins the next one to itself.
    joins: bool,
    /// Whether a control character was written whose effect is not followed.
    lost: bool,
}

impl CursorColumn {
    /// A cursor in the first column of a terminal with `width` columns.
    pub(super) fn new(width: usize) -> Self {
        Self { width, narrow: Place::default(), wide: Place::default(), joins: false, lost: false }
    }

    /// Follows a text that is written.
    pub(super) fn write(&mut self, text: &str) {
        text.chars().for_each(|character| self.add(character));
    }

    /// Sets the width of the terminal. Terminals differ in how they wrap present text again, so the column is known from the next
    /// line on.
    pub(super) fn resize(&mut self, width: usize) {
        if self.width != width {
            self.width = width;
            self.lost = true;
        }
    }

    /// Whether the cursor is certainly not at the right margin.
    pub(super) fn is_clear_of_margin(&self) -> bool {
        !self.lost && self.narrow.row == self.wide.row && self.wide.column < self.width
    }

    fn add(&mut self, character: char) {
        let joined = std::mem::take(&mut self.joins);
        match character {
            '\n' => *self = Self::new(self.width),
            '\r' => {
                self.narrow.column = 0;
                self.wide.column = 0;
            }
            '\t' => {
                for place in [&mut self.narrow, &mut self.wide] {
                    let stop = (place.column / 8 + 1) * 8;
                    place.column = stop.min(self.width.saturating_sub(1)).max(place.column);
                }
            }
            _ if character.is_control() => self.lost = true,
            _ => {
                let (least, most) = columns(character);
                self.narrow.advance(if joined { 0 } else { least }, self.width);
                self.wide.advance(most, self.width);
                self.joins = character == ZERO_WIDTH_JOINER;
            }
        }
    }
}

/// Joins the emoji around it into one.
const ZERO_WIDTH_JOINER: char = '\u{200d}';

/// The fewest and the most columns that terminals give to a character.
fn columns(character: char) -> (usize, usize) {
    match character {
        ' '..='~' => (1, 1),
        // Soft hyphens, and selectors that turn a character into a wide emoji.
        '\u{ad}' | '\u{fe0f}' => (0, 1),
        // Letters of flags, of which two may be drawn as one.
        '\u{1f1e6}'..='\u{1f1ff}' => (1, 2),
        // Skin tones, which may be drawn as a colour of the emoji before them.
        '\u{1f3fb}'..='\u{1f3ff}' => (0, 2),
        _ => {
            let least = character.width().unwrap_or(0);
            (least, character.width_cjk().unwrap_or(0).max(least))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("", true)]
    #[case("123456789", true)]
    #[case("1234567890", false)]
    #[case("1234567890a", true)]
    #[case("1234567890\n", true)]
    // A wide character that does not fit leaves the last column empty.
    #[case("123456789世", true)]
    #[case("世界世界世", false)]
    // These quotation marks have one or two columns.
    #[case("12345678“", false)]
    #[case("1234567“", true)]
    #[case("12345678“”z\n", true)]
    #[case("1234\t", true)]
    #[case("a\u{8}", false)]
    #[case("a\u{8}\nb", true)]
    // Two emoji with a joiner have two or four columns.
    #[case("1234567👩\u{200d}🔬", false)]
    #[case("12345👩\u{200d}🔬", true)]
    fn the_margin_is_avoided_wherever_the_cursor_may_be(#[case] text: &str, #[case] clear: bool) {
        let mut column = CursorColumn::new(10);
        column.write(text);
        assert_eq!(column.is_clear_of_margin(), clear, "{column:?}");
    }

    #[test]
    fn after_a_change_of_width_the_column_is_known_from_the_next_line_on() {
        let mut column = CursorColumn::new(10);
        column.write("abc");
        column.resize(20);
        assert!(!column.is_clear_of_margin());
        column.write("\nabc");
        assert!(column.is_clear_of_margin());
    }
}
