//! The input of a chat: messages, commands, and their history, which is kept across starts.

use anyhow::Result;
use dsrun_models::fetch::FetchOptions;
use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

/// The most lines of the history.
const MAX_LINES: usize = 1000;

/// The commands, for `/help`.
pub(super) const HELP: &str = "/help shows this, /reset clears the conversation, /exit or Ctrl-D ends it. Ctrl-C stops an answer. \
    A message that begins with / needs a blank before it.";

/// A line that was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// Nothing.
    Empty,
    Exit,
    Reset,
    Help,
    /// An unknown command.
    Unknown(String),
    /// A message for the model.
    Message,
}

impl Input {
    pub(super) fn of(line: &str) -> Self {
        let Some(command) = line.strip_prefix('/') else {
            return if line.trim().is_empty() { Self::Empty } else { Self::Message };
        };
        match command.trim() {
            "exit" | "quit" | "bye" => Self::Exit,
            "reset" | "clear" => Self::Reset,
            "help" | "?" => Self::Help,
            command => Self::Unknown(command.to_owned()),
        }
    }
}

/// The history of what was typed, in a file that only its user can read.
pub(super) struct History {
    path: PathBuf,
}

impl History {
    /// The history in the folder of the cache.
    pub(super) fn open() -> Result<Self> {
        Ok(Self { path: FetchOptions::from_env()?.cache.join("chat_history") })
    }

    /// The lines so far, the oldest first. A file that cannot be read is no history.
    pub(super) fn lines(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.path).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let lines = &lines[lines.len().saturating_sub(MAX_LINES)..];
        if lines.len() < text.lines().count() {
            // Shortened here, so that it does not grow for ever.
            let _ = fs::write(&self.path, lines.iter().map(|line| format!("{line}\n")).collect::<String>());
        }
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    /// Adds a line. A chat goes on without its history, so a failure is only logged.
    pub(super) fn add(&self, line: &str) {
        if let Err(error) = append(&self.path, line) {
            tracing::info!(path = %self.path.display(), %error, "the history of the chat is not kept");
        }
    }
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut options = OpenOptions::new();
    options.append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    writeln!(options.open(path)?, "{}", line.replace(['\n', '\r'], " "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("", Input::Empty)]
    #[case("  ", Input::Empty)]
    #[case("Hello", Input::Message)]
    #[case(" /usr/bin is a folder", Input::Message)]
    #[case("/exit ", Input::Exit)]
    #[case("/help", Input::Help)]
    #[case("/reset", Input::Reset)]
    #[case("/rest now", Input::Unknown("rest now".into()))]
    #[case("/", Input::Unknown(String::new()))]
    fn commands_begin_with_a_slash(#[case] line: &str, #[case] input: Input) {
        assert_eq!(Input::of(line), input);
    }

    #[test]
    fn the_history_is_kept_and_bounded() {
        let folder = tempfile::tempdir().expect("a folder");
        let history = History { path: folder.path().join("inner/chat_history") };
        assert!(history.lines().is_empty());
        (0..MAX_LINES + 5).for_each(|index| history.add(&format!("line\n{index}")));
        let lines = history.lines();
        assert_eq!((lines.len(), lines[0].as_str()), (MAX_LINES, "line 5"));
        assert_eq!(history.lines(), lines);
    }
}
