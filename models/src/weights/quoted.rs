//! Names from files, made fit for error messages.

use std::fmt;

/// Longest part of a name that is shown, in characters.
const SHOWN: usize = 80;

/// A name in back ticks, with control characters escaped and shortened when very long: a file may hold a gigabyte
/// where a name should be.
pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`")?;
        let mut characters = self.0.chars();
        for character in characters.by_ref().take(SHOWN) {
            match character {
                '\'' | '"' => write!(f, "{character}")?,
                other => write!(f, "{}", other.escape_debug())?,
            }
        }
        f.write_str(if characters.next().is_some() { "..`" } else { "`" })
    }
}

/// The same, as a value that errors can keep.
pub(crate) fn quoted(name: &str) -> String {
    Quoted(name).to_string()
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn long_and_unprintable_names_are_tamed() {
        assert_eq!(quoted("blk.0.\"x\""), "`blk.0.\"x\"`");
        assert_eq!(quoted("a\u{1b}[2J"), "`a\\u{1b}[2J`");
        assert_eq!(quoted(&"é".repeat(100_000)).chars().count(), 80 + 4);
    }
}
