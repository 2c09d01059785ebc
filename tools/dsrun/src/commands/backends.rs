//! `dsrun backends`: lists the backends and their devices. Plugins are loaded only with `--explain`, in processes of their own.

use super::{print, print_json};
use crate::{arguments::Backends, find_backend::registry, probe};
use anyhow::Result;
use dsrun_core::device::{Backend, DeviceInfo};
use dsrun_engine::Bytes;
use dsrun_plugin_sdk::discovery::{Places, Plugin, State, discover};
use serde_json::{Value, json};

pub(crate) fn run(command: &Backends) -> Result<()> {
    if let Some(file) = &command.probe {
        return print(&probe::inside(file)?);
    }
    let registry = registry()?;
    let report = discover(&Places::of_process([]));
    if command.json {
        let linked: Vec<Value> = registry.backends().iter().map(|backend| as_json(&**backend)).collect();
        let mut value = json!({ "linked": linked, "plugins": report.plugins, "places": report.places });
        if command.explain {
            value["loaded"] = report.ready().map(loaded_as_json).collect();
        }
        return print_json(&value);
    }
    for (index, backend) in registry.backends().iter().enumerate() {
        let info = backend.info();
        let default = if index == 0 { ", the default" } else { "" };
        print(&format!("{} {}: {}{default}", info.name, info.version, info.description))?;
        match backend.devices() {
            Ok(devices) => devices.iter().try_for_each(|device| print(&format!("  {}", line(device))))?,
            Err(error) => print(&format!("  not available: {error}"))?,
        }
    }
    if command.explain {
        print(report.to_string().trim_end())?;
        if report.ready().next().is_some() {
            print("devices of the plugins that are ready:")?;
        }
        return report.ready().try_for_each(|plugin| print(&loaded_lines(plugin)));
    }
    report.plugins.iter().try_for_each(|plugin| print(&plugin_line(plugin)))
}

fn line(device: &DeviceInfo) -> String {
    let memory = device.memory_bytes.map(|bytes| format!(", {}", Bytes(bytes))).unwrap_or_default();
    format!("device {}: {}{memory}", device.index, device.name)
}

fn plugin_line(plugin: &Plugin) -> String {
    let state = match &plugin.state {
        State::Ready => plugin.file().display().to_string(),
        State::Shadowed(_) | State::Broken(_) => plugin.problem().unwrap_or_default(),
    };
    let version = plugin.version.as_deref().unwrap_or_default();
    let ranks = plugin.state == State::Ready && plugin.default_rank > 0;
    let default = if ranks { ", the default where it finds a device" } else { "" };
    format!("{} {version} (plugin{default}): {state}", plugin.name)
}

fn loaded_lines(plugin: &Plugin) -> String {
    match probe::devices(plugin) {
        Ok(names) if names.is_empty() => format!("  {}: no devices on this machine", plugin.name),
        Ok(names) => {
            let line = |(index, name)| format!("  {}: device {index}: {name}", plugin.name);
            names.iter().enumerate().map(line).collect::<Vec<_>>().join("\n")
        }
        Err(error) => format!("  {}: not available: {error:#}", plugin.name),
    }
}

fn loaded_as_json(plugin: &Plugin) -> Value {
    match probe::devices(plugin) {
        Ok(devices) => json!({ "name": plugin.name, "devices": devices }),
        Err(error) => json!({ "name": plugin.name, "error": format!("{error:#}") }),
    }
}

fn as_json(backend: &dyn Backend) -> Value {
    let info = backend.info();
    let device = |device: &DeviceInfo| json!({ "index": device.index, "name": device.name, "memory_bytes": device.memory_bytes });
    let (devices, error) = match backend.devices() {
        Ok(devices) => (devices.iter().map(device).collect(), None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    json!({
        "name": info.name,
        "version": info.version,
        "description": info.description,
        "devices": devices,
        "error": error,
    })
}
