//! The backends of this process, by name.

use crate::{Code, Error, Result, device::Backend};
use std::sync::Arc;

/// The backends that can be used, in the order they were registered. The first is the default.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
}

impl Registry {
    /// No backends yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a backend that is linked into the process.
    ///
    /// # Errors
    /// If its name is taken, or is not made of lower-case letters, digits and `-`.
    pub fn register(&mut self, backend: Arc<dyn Backend>) -> Result<()> {
        let name = &backend.info().name;
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || !name.chars().all(is_part) {
            return Err(Error::invalid(format!(
                "{name:?} is no backend name: lower-case letters, digits and `-`"
            )));
        }
        if self.backends.iter().any(|other| other.info().name == *name) {
            return Err(Error::invalid(format!("a backend `{name}` is there already")));
        }
        self.backends.push(backend);
        Ok(())
    }

    /// All backends.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        &self.backends
    }

    /// The backend of this name, or the default.
    ///
    /// # Errors
    /// [`Code::Unavailable`], with the names there are.
    pub fn backend(&self, name: Option<&str>) -> Result<&Arc<dyn Backend>> {
        let found = match name {
            Some(name) => self.backends.iter().find(|backend| backend.info().name == name),
            None => self.backends.first(),
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = self.backends.iter().map(|backend| backend.info().name.as_str()).collect();
            let message = match name {
                Some(name) => format!("there is no backend `{name}`, only {}", names.join(", ")),
                None => "there is no backend".into(),
            };
            Error::new(Code::Unavailable, message)
        })
    }
}
