//! Trying plugins out, each in a process of its own: loading one runs its code, which may crash, hang or end the process.

use anyhow::{Context, Result, anyhow, bail};
use dsrun_core::discovery::{Origin, Places, Plugin, discover};
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

/// How long a plugin may take to load and list its devices: drivers may have to start.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Begins the line with the answer: what the plugin prints may be around it.
const MARK: &str = "dsrun-probe: ";
/// How long its output may take once it has ended.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often it is looked whether the process has ended.
const INTERVAL: Duration = Duration::from_millis(5);
/// The most that is kept of what a plugin prints.
const OUTPUT_BYTES: u64 = 1 << 20;

/// In the process of its own: loads the plugin of a file and lists its devices, as a line for [`devices`].
pub(crate) fn inside(file: &Path) -> Result<String> {
    let places = Places { files: vec![(Origin::Argument, file.to_owned())], folders: Vec::new() };
    let probes = discover(&places).probe();
    let probe = probes.first().context("there is no plugin that could be loaded")?;
    Ok(format!("\n{MARK}{}", serde_json::to_string(probe)?))
}

/// The names of the devices of a plugin.
///
/// # Errors
/// Why it cannot be used.
pub(crate) fn devices(plugin: &Plugin) -> Result<Vec<String>> {
    let program = env::current_exe().context("this program's own file is not known")?;
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

/// What a process left.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) output: String,
    errors: String,
}

/// Runs a command to its end, or kills it when its time is up.
pub(crate) fn run(mut command: Command, timeout: Duration) -> Result<Ended> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("no process can be started")?;
    let output = child.stdout.take().map(read);
    let errors = child.stderr.take().map(read);
    let status = wait(&mut child, timeout)?;
    // A process that it left behind may hold the pipes open: what has not come soon after its end does not come.
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
            // It may have ended by itself just now.
            let _ = child.kill();
            child.wait()?;
            bail!("it did not answer within {} s", timeout.as_secs());
        }
        thread::sleep(INTERVAL);
    }
}

/// Reads a pipe to its end on a thread of its own.
fn read(pipe: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is still worth showing, and nobody may be there to be told.
        let _ = pipe.take(OUTPUT_BYTES).read_to_end(&mut bytes);
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}
