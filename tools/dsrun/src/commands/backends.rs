//! `dsrun backends`: what can run models here.

use super::{print, print_json};
use crate::{arguments::Backends, session::registry};
use anyhow::Result;
use dsrun_core::device::{Backend, DeviceInfo};
use dsrun_engine::Bytes;
use serde_json::{Value, json};

pub(crate) fn run(command: &Backends) -> Result<()> {
    let registry = registry()?;
    if command.json {
        let backends: Vec<Value> = registry.backends().iter().map(|backend| as_json(&**backend)).collect();
        return print_json(&backends);
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
    Ok(())
}

fn line(device: &DeviceInfo) -> String {
    let memory = device.memory_bytes.map(|bytes| format!(", {}", Bytes(bytes))).unwrap_or_default();
    format!("device {}: {}{memory}", device.index, device.name)
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
