//! The registry of the backends of this process.

use crate::{Code, Error, Result, device::Backend};
use std::sync::Arc;

/// The registered backends, in order of registration. The first is the default.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a backend.
    ///
    /// # Errors
    /// If its name is taken, empty, or has other characters than lower-case letters, digits and `-`.
    pub fn register(&mut self, backend: Arc<dyn Backend>) -> Result<()> {
        let name = &backend.info().name;
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || !name.chars().all(is_part) {
            return Err(Error::invalid(format!(
                "backend name {name:?} is invalid; use lower-case letters, digits and `-`"
            )));
        }
        if self.backends.iter().any(|other| other.info().name == *name) {
            return Err(Error::invalid(format!("backend `{name}` is already registered")));
        }
        self.backends.push(backend);
        Ok(())
    }

    /// All backends.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        &self.backends
    }

    /// The backend of this name, or the default if `name` is `None`.
    ///
    /// # Errors
    /// [`Code::Unavailable`] with the registered names if there is no such backend.
    pub fn backend(&self, name: Option<&str>) -> Result<&Arc<dyn Backend>> {
        let found = match name {
            Some(name) => self.backends.iter().find(|backend| backend.info().name == name),
            None => self.backends.first(),
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = self.backends.iter().map(|backend| backend.info().name.as_str()).collect();
            let message = match name {
                Some(name) => {
                    format!("there is no backend `{name}`; the registered ones are {}", names.join(", "))
                }
                None => "no backend is registered".into(),
            };
            Error::new(Code::Unavailable, message)
        })
    }
}
