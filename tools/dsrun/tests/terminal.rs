//! `chat` and `generate` in a pseudo-terminal.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../src/serve/tests/model.rs"]
mod model;

use rstest::rstest;
use rustix::{
    fs::{Mode, OFlags, open},
    io::{FdFlags, fcntl_setfd},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Action, LocalModes, Winsize, tcflow, tcgetattr, tcsetwinsize},
};
use std::{
    fs::{self, File},
    io::{Read, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// The time limit of any wait. Reaching it means that the process hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A text that the model does not write.
const TYPED: &str = "TYPED: 0123456789";

/// The program in a pseudo-terminal.
struct Session {
    process: Child,
    keyboard: File,
    terminal: File,
    screen: Arc<Mutex<Vec<u8>>>,
    cache: TempDir,
    _model: TempDir,
}

impl Session {
    /// Starts a conversation with answers of so many tokens, and waits until it asks for a line.
    fn chat(tokens: &str) -> Self {
        Self::chat_with(&["--quiet"], tokens)
    }

    fn chat_with(flags: &[&str], tokens: &str) -> Self {
        let chat = Self::start("chat", flags, &[], tokens);
        chat.wait("a prompt", |chat| chat.shown().contains("> "));
        chat
    }

    /// Starts a command with a model, flags in front of it and arguments behind.
    fn start(command: &str, flags: &[&str], arguments: &[&str], tokens: &str) -> Self {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let terminal = File::from(open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap());
        fcntl_setfd(&terminal, FdFlags::CLOEXEC).unwrap();
        fcntl_setfd(&keyboard, FdFlags::CLOEXEC).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&terminal, size).unwrap();
        assert!(echoes(&terminal));
        let (model, cache) = (model::tiny(), tempfile::tempdir().unwrap());
        let process = Command::new(env!("CARGO_BIN_EXE_dsrun"))
            .args([command, "--temperature", "0", "-n", tokens])
            .args(flags)
            .args(["-m".as_ref(), model.path().as_os_str()])
            .args(arguments)
            .env("TERM", "xterm")
            .env("NO_COLOR", "1")
            .env("HF_HUB_OFFLINE", "1")
            .env("DSRUN_CACHE", cache.path())
            .stdin(terminal.try_clone().unwrap())
            .stdout(terminal.try_clone().unwrap())
            .stderr(terminal.try_clone().unwrap())
            .spawn()
            .unwrap();
        let keyboard = File::from(keyboard);
        let screen = Arc::new(Mutex::new(Vec::new()));
        let (mut output, shown) = (keyboard.try_clone().unwrap(), screen.clone());
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                shown.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        Self { process, keyboard, terminal, screen, cache, _model: model }
    }

    /// Types a line.
    fn types(&mut self, line: &str) {
        write!(self.keyboard, "{line}\r").unwrap();
    }

    /// What was written to the terminal.
    fn written(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned()
    }

    /// The same without escape sequences.
    fn shown(&self) -> String {
        let text = self.written();
        let mut parts = text.split("\x1b[");
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |shown, part| {
            shown + part.trim_start_matches(|c: char| !c.is_ascii_alphabetic()).get(1..).unwrap_or_default()
        })
    }

    /// Asks a question, and waits until the answer to it is being written.
    fn asks(&mut self, question: &str) {
        self.types(question);
        self.wait("an answer", |chat| {
            chat.shown().rsplit_once(&format!("{question}\r\n")).is_some_and(|(_, answer)| answer.len() > 10)
        });
    }

    /// Stops the output to the terminal at once, as Ctrl-S does a little later.
    fn stops_output(&self) {
        tcflow(&self.terminal, Action::OOff).unwrap();
    }

    fn signal(&self, name: &str) {
        let id = self.process.id().to_string();
        // The process may have ended.
        let _ = Command::new("kill").args(["-s", name, &id]).status().unwrap();
    }

    fn wait(&self, what: &str, is_there: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_there(self) {
            assert!(Instant::now() < end, "{what} does not come: {:?}", self.shown());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process has ended, and does something from time to time until then.
    fn ended(&mut self, meanwhile: impl Fn(&Self)) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "it does not end: {:?}", self.shown());
            meanwhile(self);
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Whether a terminal shows what is typed.
fn echoes(terminal: &File) -> bool {
    let modes = tcgetattr(terminal).unwrap().local_modes;
    modes.contains(LocalModes::ECHO | LocalModes::ICANON)
}

#[test]
fn keys_typed_during_an_answer_are_the_next_line_and_not_in_the_answer() {
    let mut chat = Session::chat("1000");
    chat.asks("Hello");
    chat.types(TYPED);
    let history = chat.cache.path().join("chat_history");
    let lines = format!("Hello\n{TYPED}\n");
    chat.wait("the next line", |_| fs::read_to_string(&history).is_ok_and(|text| text == lines));
    let line = format!("{TYPED}\r\n");
    chat.wait("the line on the screen", |chat| chat.shown().contains(&line));
    let shown = chat.shown();
    let (before, _) = shown.split_once(&line).unwrap();
    let prompt = before.rsplit('\n').next().map(|prompt| prompt.replace('\r', ""));
    assert_eq!(prompt.as_deref(), Some("> "), "{shown:?}");
    assert!(!before.contains("TYPED"), "{shown:?}");
}

#[test]
fn a_line_that_cannot_be_read_ends_no_conversation() {
    let mut chat = Session::chat("1000");
    chat.keyboard.write_all(b"\xff\xfe\r").unwrap();
    chat.wait("an error", |chat| chat.shown().contains("error: the line is not UTF-8"));
    chat.types("/nosuch");
    chat.wait("an error", |chat| chat.shown().contains("error: there is no command /nosuch"));
    chat.types("/exit");
    assert_eq!(chat.ended(|_| ()).code(), Some(0));
}

#[test]
fn the_terminal_is_restored_at_the_end() {
    let mut chat = Session::chat("1000");
    chat.asks("Hello");
    assert!(!echoes(&chat.terminal));
    chat.types("/exit");
    assert_eq!(chat.ended(|_| ()).code(), Some(0));
    assert!(echoes(&chat.terminal));
}

#[test]
fn the_terminal_is_restored_after_interrupts() {
    let mut chat = Session::chat("3900");
    chat.asks("Hello");
    // The program writes, so it cannot see that it shall stop: the second interrupt ends it.
    chat.stops_output();
    assert_eq!(chat.ended(|chat| chat.signal("INT")).code(), Some(130));
    assert!(echoes(&chat.terminal));
}

#[rstest]
#[case("TERM", 15)]
#[case("HUP", 1)]
fn the_terminal_is_restored_when_a_signal_ends_the_program(#[case] name: &str, #[case] number: i32) {
    let mut chat = Session::chat("3900");
    chat.asks("Hello");
    assert!(!echoes(&chat.terminal));
    chat.signal(name);
    assert_eq!(chat.ended(|_| ()).signal(), Some(number));
    assert!(echoes(&chat.terminal));
}

#[test]
fn the_terminal_is_restored_when_a_signal_ends_the_program_at_its_prompt() {
    let mut chat = Session::chat("1000");
    assert!(!echoes(&chat.terminal));
    chat.signal("TERM");
    assert_eq!(chat.ended(|_| ()).signal(), Some(15));
    assert!(echoes(&chat.terminal));
}

#[test]
fn a_signal_ends_the_program_while_the_output_is_stopped() {
    let mut chat = Session::chat_with(&[], "3900");
    chat.asks("Hello");
    chat.stops_output();
    chat.signal("TERM");
    assert_eq!(chat.ended(|_| ()).signal(), Some(15));
    assert!(echoes(&chat.terminal));
}

#[rstest]
#[case("TERM", 15)]
#[case("HUP", 1)]
fn the_whole_terminal_scrolls_again_when_a_signal_ends_an_answer(#[case] name: &str, #[case] number: i32) {
    // The lines above the one with the statistics scroll, and then all lines.
    let (above, all) = ("\x1b[1;23r", "\x1b[r");
    let mut answer = Session::start("generate", &[], &["Hello"], "3900");
    answer.wait("an answer with statistics", |answer| {
        answer
            .written()
            .split_once(above)
            .is_some_and(|(_, text)| text.contains("\x1b[24;1H") && text.len() > 500)
    });
    answer.signal(name);
    assert_eq!(answer.ended(|_| ()).signal(), Some(number));
    answer.wait("the end of the region", |answer| {
        answer.written().rsplit_once(above).is_some_and(|(_, text)| text.contains(all))
    });
}
