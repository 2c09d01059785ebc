//! Finds and opens the backend under test.

use super::arguments::Target;
use crate::subject::Subject;
use anyhow::{Context, Result};
use dsrun_core::{
    DType,
    device::{Backend, DeviceOptions},
    op::Profile,
};
use dsrun_plugin_sdk::{
    PluginBackend,
    discovery::{Origin, Places, discover},
};
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, sync::Arc};

/// Threads of a CPU device: more than one, so that the suite covers work that is split between threads.
const THREADS: usize = 2;

/// Name, version and claims of a backend and its device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) name: String,
    pub(crate) version: String,
    /// The file that the backend was loaded from, if it is a plugin.
    pub(crate) library: Option<PathBuf>,
    /// The device's name.
    pub(crate) device: String,
    /// Names of the profiles that the device claims.
    pub(crate) profiles: Vec<String>,
    /// Names of the element types that the device supports.
    pub(crate) dtypes: Vec<String>,
    /// Guarantees that the device does not give, and so is not tested for.
    pub(crate) unclaimed: Vec<String>,
}

/// Opens the device under test. This runs code of the backend.
pub(crate) fn open(target: &Target, linked: &[Arc<dyn Backend>]) -> Result<Subject> {
    let options = DeviceOptions { threads: Some(THREADS), ..DeviceOptions::default() };
    let (name, index) = (&target.backend, target.device);
    let subject = match linked.iter().find(|backend| backend.info().name == *name) {
        Some(backend) => Subject::linked(backend.clone(), index, options),
        None => Subject::plugin(find_plugin(name, linked)?, index, options),
    };
    subject.with_context(|| format!("cannot open device {index} of backend {name}"))
}

/// Finds a plugin by the path of its manifest or library, or by name in the places that `dsrun` searches.
fn find_plugin(name: &str, linked: &[Arc<dyn Backend>]) -> Result<PluginBackend> {
    let is_path = name.contains(std::path::is_separator) || PathBuf::from(name).is_file();
    if is_path {
        let path = std::path::absolute(name).with_context(|| format!("`{name}` is not a path"))?;
        let report = discover(&Places::of_process([path]));
        let plugin = report.plugins.iter().find(|plugin| plugin.origin == Origin::Argument);
        let plugin = plugin.with_context(|| format!("no plugin is found at `{name}`"))?;
        return Ok(plugin.load()?);
    }
    let plugin = discover(&Places::of_process([])).load(name);
    plugin.with_context(|| {
        let names: Vec<&str> = linked.iter().map(|backend| backend.info().name.as_str()).collect();
        format!(
            "no backend `{name}` is linked in (linked in are: {}); to test a plugin, give the path of its library or manifest",
            names.join(", ")
        )
    })
}

/// The identity of an open backend.
pub(crate) fn identity(subject: &Subject) -> Identity {
    let (info, properties) = (subject.backend().info(), subject.device().properties());
    Identity {
        name: info.name.clone(),
        version: info.version.clone(),
        library: subject.loaded().and_then(PluginBackend::library).map(Into::into),
        device: properties.name.clone(),
        profiles: properties.profiles.iter().map(|profile| profile.name().to_owned()).collect(),
        dtypes: properties.dtypes.iter().map(|dtype| dtype.name().to_owned()).collect(),
        unclaimed: unclaimed(subject),
    }
}

/// The guarantees that a device does not give.
fn unclaimed(subject: &Subject) -> Vec<String> {
    let (device, properties) = (subject.device(), subject.device().properties());
    let names = |dtypes: &[DType]| dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
    let mut unclaimed = Vec::new();
    if !properties.strict_nan {
        unclaimed.push("NaN in exactly the results that depend on it".to_owned());
    }
    for (what, flushed) in
        [("operands", &properties.flushed.operands), ("results", &properties.flushed.results)]
    {
        if !flushed.is_empty() {
            unclaimed.push(format!("subnormal {what} of {}", names(flushed)));
        }
    }
    if device.graphs().is_none() {
        unclaimed.push("graphs".to_owned());
    }
    if device.collective().is_none() {
        unclaimed.push("collectives".to_owned());
    }
    unclaimed
}

/// The profiles that are required: those asked for, or else those the device claims, or else `llm-core-1`.
pub(crate) fn profiles(asked: &[Profile], claimed: &[Profile]) -> Vec<Profile> {
    let chosen = if asked.is_empty() { claimed } else { asked };
    if chosen.is_empty() { vec![Profile::LlmCore1] } else { chosen.to_vec() }
}
