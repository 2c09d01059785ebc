//! A server process, for tests that use it as a client does.

// Each test binary compiles this module and uses a part of it.
#![allow(dead_code)]

use super::model;
use snapbox::cmd::cargo_bin;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

pub(crate) const KEY: &str = "secret";

/// The time limit of any wait. Reaching it means that the server hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A server process with the tiny model.
pub(crate) struct Server {
    pub(crate) process: Child,
    pub(crate) output: BufReader<ChildStdout>,
    pub(crate) url: String,
    _model: TempDir,
}

impl Server {
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::start_as(flags, &mut Command::new(cargo_bin!("dsrun")))
    }

    pub(crate) fn start_as(flags: &[&str], command: &mut Command) -> Self {
        Self::start_with(model::tiny(), flags, command)
    }

    /// Starts a server of the model in a folder.
    pub(crate) fn start_with(model: TempDir, flags: &[&str], command: &mut Command) -> Self {
        let mut process = command
            .args(["--quiet", "serve"])
            .arg(model.path())
            .args(["--port", "0", "--served-model-name", "tiny"])
            .args(if flags.contains(&"--context") {
                &[][..]
            } else {
                &["--context", "4096", "--kv-tokens", "12288"]
            })
            .args(flags)
            .env("DSRUN_API_KEYS", KEY)
            .env("NO_COLOR", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let url =
            line.trim().strip_prefix("ready at ").unwrap_or_else(|| panic!("it did not start: {line:?}"));
        Self { url: url.to_owned(), process, output, _model: model }
    }

    /// Streams a completion of `tokens` tokens, and returns the whole response with its head.
    pub(crate) fn stream(&self, tokens: usize) -> impl FnOnce() -> String + Send + 'static {
        assert!(tokens < model::CONTEXT);
        let body = format!(
            r#"{{"model": "tiny", "prompt": "ab", "max_tokens": {tokens}, "temperature": 0, "ignore_eos": true,
               "stream": true, "stream_options": {{"include_usage": true}}}}"#
        );
        let address = self.url.strip_prefix("http://").unwrap().to_owned();
        move || {
            let mut connection = TcpStream::connect(address).unwrap();
            connection.set_read_timeout(Some(PATIENCE)).unwrap();
            write!(
                connection,
                "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {KEY}\r\n\
                 content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )
            .unwrap();
            let mut answer = Vec::new();
            // An aborted connection is not an answer.
            let _ = connection.read_to_end(&mut answer);
            String::from_utf8_lossy(&answer).into_owned()
        }
    }

    #[cfg(unix)]
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.process.id().to_string()).status();
        assert!(status.unwrap().success());
    }

    /// The exit code, once the process has ended.
    pub(crate) fn ended(&mut self) -> Option<i32> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < end, "the server does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name)
}

pub(crate) fn succeeded(output: &Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
}
