//! The file of `--trace`: what each rank ran when.

use crate::{devices::Devices, terminal::Terminal};
use anyhow::{Context, Result};
use dsrun_engine::Trace;
use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Writes a trace when it is dropped, after the engine, so that the ranks have ended.
#[derive(Debug)]
pub(crate) struct TraceFile<'a> {
    trace: Arc<Trace>,
    path: PathBuf,
    file: File,
    terminal: &'a Terminal,
}

impl<'a> TraceFile<'a> {
    /// Opens the file of a trace if the user asks for one, and makes the engines on these devices record it. A process that follows
    /// another appends its number to the name.
    pub(crate) fn open(
        path: Option<&Path>,
        devices: &mut Devices,
        terminal: &'a Terminal,
    ) -> Result<Option<Self>> {
        let Some(path) = path else { return Ok(None) };
        let mut path = path.to_owned();
        if let Some(process) = devices.processes().map(|processes| processes.process()).filter(|own| *own > 0)
        {
            let mut name = path.into_os_string();
            name.push(format!(".{process}"));
            path = name.into();
        }
        let file =
            File::create(&path).with_context(|| format!("--trace {} cannot be written", path.display()))?;
        let trace = Arc::new(Trace::default());
        devices.record(&trace);
        Ok(Some(Self { trace, path, file, terminal }))
    }
}

impl Drop for TraceFile<'_> {
    fn drop(&mut self) {
        let path = self.path.display();
        match self.file.write_all(self.trace.chrome().as_bytes()) {
            Ok(()) => {
                self.terminal.note(&format!("the trace is in {path}; https://ui.perfetto.dev shows it"))
            }
            Err(error) => self.terminal.note(&format!("the trace cannot be written to {path}: {error}")),
        }
    }
}
