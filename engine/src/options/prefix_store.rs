//! Where the prefix cache keeps pages outside the device.

use crate::error::{EngineError, Result};
use std::path::PathBuf;

/// Where the prefix cache keeps pages that are no longer on the device, for later requests with the same prefix.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct PrefixStore {
    /// Bytes of host memory for pages that the device had to evict.
    pub host_bytes: u64,
    /// A folder that keeps every full page from run to run. Several processes may share it.
    pub folder: Option<PathBuf>,
    /// The most bytes of files in the folder, those of other models included. The least recently used pages are deleted first.
    pub folder_bytes: u64,
}

impl PrefixStore {
    /// The most bytes of files in the folder by default.
    pub const DEFAULT_FOLDER_BYTES: u64 = 16 << 30;

    /// Whether any page is kept.
    pub fn is_on(&self) -> bool {
        self.host_bytes > 0 || self.folder.is_some()
    }

    /// The option that turns it on, and its value, for errors.
    pub(crate) fn option(&self) -> (&'static str, String) {
        match &self.folder {
            Some(folder) => ("prefix-cache", folder.display().to_string()),
            None => ("prefix-cache-host", self.host_bytes.to_string()),
        }
    }

    /// # Errors
    /// If it is on although `rule` forbids that.
    pub(crate) fn refuse(&self, rule: &str) -> Result<()> {
        let (option, value) = self.option();
        if self.is_on() { Err(EngineError::option(option, value, rule)) } else { Ok(()) }
    }
}

impl Default for PrefixStore {
    fn default() -> Self {
        Self { host_bytes: 0, folder: None, folder_bytes: Self::DEFAULT_FOLDER_BYTES }
    }
}
