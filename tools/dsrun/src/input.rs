//! Where prompts come from.

use anyhow::{Context, Result, bail};
use std::{
    io::{IsTerminal, Read},
    path::Path,
};

/// The largest prompt that is read: far more than any context holds.
const MAX_BYTES: u64 = 64 << 20;

/// The prompt: the text given, a file's, or standard input's for `-` and where nothing is given.
pub(crate) fn prompt(text: Option<&str>, file: Option<&Path>) -> Result<String> {
    match (text, file) {
        (_, Some(path)) => {
            let file =
                std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            read(file).with_context(|| format!("cannot read {}", path.display()))
        }
        (Some(text), None) if text != "-" => Ok(text.to_owned()),
        (text, None) => {
            let input = std::io::stdin();
            if text.is_none() && input.is_terminal() {
                bail!(
                    "there is no prompt\nhint: give one (dsrun generate \"...\"), or `-` to type it and end with Ctrl-D"
                );
            }
            read(input.lock()).context("cannot read the prompt from standard input")
        }
    }
}

/// Reads text to its end. A last line break is not part of a prompt.
fn read(source: impl Read) -> Result<String> {
    let mut bytes = Vec::new();
    source.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        bail!("it is longer than {MAX_BYTES} bytes");
    }
    let mut text = String::from_utf8(bytes).map_err(|error| {
        anyhow::anyhow!("it is not UTF-8: byte {} is wrong", error.utf8_error().valid_up_to())
    })?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_break_at_the_end_is_dropped() {
        assert_eq!(read(&b"a\nb\r\n"[..]).unwrap(), "a\nb");
        assert_eq!(read(&b"a\n\n"[..]).unwrap(), "a\n");
        assert_eq!(read(&b""[..]).unwrap(), "");
    }

    #[test]
    fn bytes_that_are_not_text_are_refused_with_their_place() {
        assert!(read(&b"ab\xff"[..]).unwrap_err().to_string().contains("byte 2"));
    }
}
