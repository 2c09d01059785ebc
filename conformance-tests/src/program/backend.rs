//! Finding and opening the backend under test.

use super::arguments::Target;
use crate::subject::Subject;
use anyhow::{Context, Result};
use dsrun_core::{
    abi::PluginBackend,
    device::{Backend, DeviceOptions},
    discovery::{Origin, Places, discover},
    op::Profile,
};
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, sync::Arc};

/// Threads of a CPU device: more than one, so that work which is shared out is tested as such.
const THREADS: usize = 2;

/// Who the backend is, and what it claims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) name: String,
    pub(crate) version: String,
    /// The file it was loaded from, if it is a plugin.
    pub(crate) library: Option<PathBuf>,
    /// The device's name.
    pub(crate) device: String,
    /// The profiles it claims, by name.
    pub(crate) profiles: Vec<String>,
    /// The element types it takes, by name.
    pub(crate) dtypes: Vec<String>,
}

/// Opens the device that is tested. Runs code of the backend.
pub(crate) fn open(target: &Target, linked: &[Arc<dyn Backend>]) -> Result<Subject> {
    let options = DeviceOptions { threads: Some(THREADS), ..DeviceOptions::default() };
    let (name, index) = (&target.backend, target.device);
    let subject = match linked.iter().find(|backend| backend.info().name == *name) {
        Some(backend) => Subject::linked(backend.clone(), index, options),
        None => Subject::plugin(find_plugin(name, linked)?, index, options),
    };
    subject.with_context(|| format!("cannot open device {index} of backend {name}"))
}

/// A path names a plugin's manifest or library; a name is looked for as `dsrun` does.
fn find_plugin(name: &str, linked: &[Arc<dyn Backend>]) -> Result<PluginBackend> {
    let is_path = name.contains(std::path::is_separator) || PathBuf::from(name).is_file();
    if is_path {
        let path = std::path::absolute(name).with_context(|| format!("{name} is no path"))?;
        let report = discover(&Places::of_process([path]));
        let plugin = report.plugins.iter().find(|plugin| plugin.origin == Origin::Argument);
        let plugin = plugin.with_context(|| format!("there is no plugin {name}"))?;
        return Ok(plugin.load()?);
    }
    let plugin = discover(&Places::of_process([])).load(name);
    plugin.with_context(|| {
        let names: Vec<&str> = linked.iter().map(|backend| backend.info().name.as_str()).collect();
        format!(
            "no backend `{name}` is linked in (there are: {}); a plugin is also found by the path of its library or manifest",
            names.join(", ")
        )
    })
}

/// Who an open backend is.
pub(crate) fn identity(subject: &Subject) -> Identity {
    let (info, properties) = (subject.backend().info(), subject.device().properties());
    Identity {
        name: info.name.clone(),
        version: info.version.clone(),
        library: subject.loaded().and_then(PluginBackend::library).map(Into::into),
        device: properties.name.clone(),
        profiles: properties.profiles.iter().map(|profile| profile.name().to_owned()).collect(),
        dtypes: properties.dtypes.iter().map(|dtype| dtype.name().to_owned()).collect(),
    }
}

/// The profiles a backend is held to: those asked for, or else those it claims, or else the first.
pub(crate) fn profiles(asked: &[Profile], claimed: &[Profile]) -> Vec<Profile> {
    let chosen = if asked.is_empty() { claimed } else { asked };
    if chosen.is_empty() { vec![Profile::LlmCore1] } else { chosen.to_vec() }
}
