//! Server-sent events, in the form that OpenAI-compatible servers send: `data:` lines with JSON, and `[DONE]`.

use anyhow::{Context, Result, bail};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::Value;

/// The stream of events of a response.
#[derive(Debug)]
pub(crate) struct Events {
    body: Incoming,
    lines: Lines,
    done: bool,
}

impl Events {
    pub(super) fn new(body: Incoming) -> Self {
        Self { body, lines: Lines::default(), done: false }
    }

    /// The next event; `None` after `[DONE]`.
    ///
    /// # Errors
    /// If the server sends an error or the stream breaks off.
    pub(crate) async fn next(&mut self) -> Result<Option<Value>> {
        loop {
            while let Some(line) = self.lines.next() {
                let Some(data) = line.strip_prefix("data:") else { continue };
                let data = data.trim();
                if data == "[DONE]" {
                    self.done = true;
                    return Ok(None);
                }
                let event: Value = serde_json::from_str(data).context("an event is not JSON")?;
                if let Some(error) = event.get("error") {
                    bail!("the server failed: {}", error["message"].as_str().unwrap_or(data));
                }
                return Ok(Some(event));
            }
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame.context("the stream breaks off")?.into_data() {
                        self.lines.bytes.extend_from_slice(&data);
                    }
                }
                None if self.done => return Ok(None),
                None => bail!("the stream ends without [DONE]"),
            }
        }
    }
}

/// Splits received bytes into lines.
#[derive(Debug, Default)]
struct Lines {
    bytes: Vec<u8>,
}

impl Lines {
    /// The next complete line, without its line break.
    fn next(&mut self) -> Option<String> {
        let end = self.bytes.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.bytes.drain(..=end).collect();
        Some(String::from_utf8_lossy(line.trim_ascii_end()).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_returned_once_it_is_complete() {
        let mut lines = Lines::default();
        lines.bytes.extend_from_slice(b"data: {}\r\n\r\ndat");
        assert_eq!(lines.next().as_deref(), Some("data: {}"));
        assert_eq!(lines.next().as_deref(), Some(""));
        assert_eq!(lines.next(), None);
        lines.bytes.extend_from_slice(b"a: 1\n");
        assert_eq!(lines.next().as_deref(), Some("data: 1"));
    }
}
