//! Reads prompts from arguments, files and standard input.

use anyhow::{Context, Result, bail};
use std::{
    io::{IsTerminal, Read},
    path::Path,
};

/// The maximum size of a prompt, which is far more than any context holds.
const MAX_BYTES: u64 = 64 << 20;

/// Reads the prompt from `file`, or takes it from `text`; standard input is read for the text `-` and without arguments.
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
            let prompt = read(input.lock()).context("cannot read the prompt from standard input")?;
            if prompt.is_empty() {
                bail!("there is no text: standard input is empty");
            }
            Ok(prompt)
        }
    }
}

/// Reads text to its end, and drops one line break at the end.
fn read(source: impl Read) -> Result<String> {
    let mut bytes = Vec::new();
    source.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        bail!("the text is longer than {MAX_BYTES} bytes");
    }
    let mut text = String::from_utf8(bytes).map_err(|error| {
        anyhow::anyhow!("the text is not UTF-8: byte {} is invalid", error.utf8_error().valid_up_to())
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
    fn errors_about_invalid_utf8_name_the_byte() {
        assert!(read(&b"ab\xff"[..]).unwrap_err().to_string().contains("byte 2"));
    }
}
