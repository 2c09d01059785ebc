//! Probes plugins, each in a process of its own: loading a plugin runs its code, which may crash, hang or end the process.

use anyhow::{Context, Result, anyhow, bail};
use dsrun_plugin_sdk::discovery::{Origin, Places, Plugin, discover};
use serde_json::Value;
use std::{
    env,
    io::Read,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// The time limit for a plugin to load and list its devices; drivers may have to start first.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The start of the line with the answer, which tells it from lines that the plugin prints.
const MARK: &str = "dsrun-probe: ";
/// The time limit for the output of a process after its end.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit for a process to end once it is killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval at which the process is polled for its end.
const INTERVAL: Duration = Duration::from_millis(5);
/// The maximum output of a plugin that is kept.
const OUTPUT_BYTES: u64 = 1 << 20;

/// Runs inside the probe process: loads the plugin of a file and lists its devices as a line for [`devices`].
pub(crate) fn inside(file: &Path) -> Result<String> {
    let places = Places { files: vec![(Origin::Argument, file.to_owned())], folders: Vec::new() };
    let probes = discover(&places).probe();
    let probe = probes.first().context("there is no plugin that could be loaded")?;
    Ok(format!("\n{MARK}{}", serde_json::to_string(probe)?))
}

/// The names of the devices of a plugin.
///
/// # Errors
/// The reason why the plugin cannot be used.
pub(crate) fn devices(plugin: &Plugin) -> Result<Vec<String>> {
    let program = env::current_exe().context("the path of this program is unknown")?;
    let mut command = Command::new(program);
    command.args(["backends", "--probe"]).arg(plugin.file());
    let Ended { status, output, errors } = run(command, TIMEOUT)?;
    if !status.success() {
        let last = errors.trim().lines().last().map(|line| format!(": {line}")).unwrap_or_default();
        bail!("the process that loaded it ended with {status}{last}");
    }
    let silent = || anyhow!("the process that loaded it did not answer");
    let answer = output.lines().find_map(|line| line.strip_prefix(MARK)).ok_or_else(silent)?;
    let answer: Value = serde_json::from_str(answer).map_err(|_| silent())?;
    let devices = &answer["devices"];
    if let Some(error) = devices["Err"].as_str() {
        bail!("{error}");
    }
    let names = devices["Ok"].as_array().ok_or_else(silent)?;
    Ok(names.iter().map(|name| name.as_str().unwrap_or_default().to_owned()).collect())
}

/// The result of a process that ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) output: String,
    errors: String,
}

/// Runs a command to its end, or kills it at the time limit.
pub(crate) fn run(mut command: Command, timeout: Duration) -> Result<Ended> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start a process")?;
    let output = child.stdout.take().map(read);
    let errors = child.stderr.take().map(read);
    let status = wait(&mut child, timeout)?;
    // A child of the process may hold the pipes open: output that does not arrive soon after its end is given up.
    let text = |reader: Option<mpsc::Receiver<String>>| {
        reader.and_then(|reader| reader.recv_timeout(OUTPUT_TIMEOUT).ok()).unwrap_or_default()
    };
    Ok(Ended { status, output: text(output), errors: text(errors) })
}

fn wait(child: &mut Child, timeout: Duration) -> Result<ExitStatus> {
    let end = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= end {
            kill(child);
            bail!("the process did not answer within {} s", timeout.as_secs());
        }
        thread::sleep(INTERVAL);
    }
}

/// Kills a process and waits for its end, but no longer than [`KILL_TIMEOUT`]: one that waits for a driver may not end.
fn kill(child: &mut Child) {
    // Killing fails if the process has just ended by itself.
    let _ = child.kill();
    let end = Instant::now() + KILL_TIMEOUT;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
        thread::sleep(INTERVAL);
    }
}

/// Reads a pipe to its end on a thread of its own.
fn read(pipe: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // The output before an error is still worth showing, and the receiver may be gone.
        let _ = pipe.take(OUTPUT_BYTES).read_to_end(&mut bytes);
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}
