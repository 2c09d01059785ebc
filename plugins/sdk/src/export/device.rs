//! Shims of the plugin table itself, and of memory.

use super::{
    diagnose, group,
    objects::{give_back, hand_out, object},
    op, stream,
    table::{backend, table},
};
use crate::{
    decode,
    host_table::{host, returned, value_or},
    prefix,
    raw::*,
};
use dsrun_core::{
    Error,
    device::{Backend, Buffer, Device, DeviceInfo, DeviceProperties, Flushed},
};
use std::{ffi::c_void, ptr, sync::Arc};

/// The table of a backend without the pointer `backend`. Its texts belong to the backend, which is never dropped.
pub(super) fn plugin_api(backend: &Arc<dyn Backend>, aborts_on_panic: bool) -> dsr_plugin_api {
    let info = backend.info();
    dsr_plugin_api {
        abi_major: DSR_ABI_MAJOR,
        abi_minor: DSR_ABI_MINOR,
        flags: if aborts_on_panic { DSR_PLUGIN_ABORTS_ON_PANIC } else { 0 },
        name: prefix::str_of(&info.name),
        version: prefix::str_of(&info.version),
        description: prefix::str_of(&info.description),
        device_count: Some(device_count),
        device_info: Some(device_info),
        device_open: Some(device_open),
        device_close: Some(device_close),
        device_properties: Some(device_properties),
        memory: const { &MEMORY },
        stream: const { &stream::STREAM },
        event: const { &stream::EVENT },
        op: const { &op::OP },
        graph: const { &group::GRAPH },
        comm: const { &group::COMM },
        get_extension: Some(diagnose::get_extension),
        ..prefix::zeroed()
    }
}

const MEMORY: dsr_memory_api = table!(dsr_memory_api { allocate, free, host_pointer, memory_use });

unsafe extern "C" fn device_count(raw: *mut dsr_backend, count: *mut u32) -> *mut dsr_status {
    returned(|| {
        prefix::check_out(count, "count")?;
        // SAFETY: the caller passes our backend and a place for the count.
        unsafe { prefix::put(count, "count", backend(raw)?.devices()?.len() as u32) }
    })
}

unsafe extern "C" fn device_info(
    raw: *mut dsr_backend,
    position: u32,
    info: *mut dsr_device_info,
) -> *mut dsr_status {
    returned(|| {
        // SAFETY: the caller passes our backend and a struct to be filled.
        let (backend, mut filled) = unsafe { (backend(raw)?, prefix::read(info)?) };
        let devices = backend.devices()?;
        let found: &DeviceInfo = devices.get(position as usize).ok_or_else(|| {
            Error::invalid(format!("is {position}, must be below {} (devices)", devices.len())).at("position")
        })?;
        let too_far = |_| Error::internal(format!("device index {} exceeds 32 bits", found.index));
        filled.index = u32::try_from(found.index).map_err(too_far)?;
        filled.memory_bytes = found.memory_bytes.unwrap_or(DSR_NONE);
        host()?.set_text(filled.name, &found.name);
        // SAFETY: read above.
        unsafe { prefix::write(info, &filled) };
        Ok(())
    })
}

unsafe extern "C" fn device_open(
    raw: *mut dsr_backend,
    index: u32,
    options: *const dsr_device_options,
    device: *mut *mut dsr_device,
) -> *mut dsr_status {
    returned(|| {
        prefix::check_out(device, "device")?;
        let options = if options.is_null() {
            dsrun_core::device::DeviceOptions::default()
        } else {
            // SAFETY: the caller passes options that can be read.
            decode::options(&unsafe { prefix::read(options) }?)?
        };
        // SAFETY: the caller passes our backend and a place for the device.
        unsafe {
            let opened = backend(raw)?.open(index as usize, &options)?;
            prefix::put(device, "device", hand_out(opened))
        }
    })
}

unsafe extern "C" fn device_close(device: *mut dsr_device) {
    // SAFETY: the caller passes our device, once.
    unsafe { give_back::<Arc<dyn Device>>(device) }
}

/// A bit mask of numbers.
fn mask(numbers: impl Iterator<Item = u32>) -> u64 {
    numbers.fold(0, |mask, number| mask | 1u64.checked_shl(number).unwrap_or(0))
}

unsafe extern "C" fn device_properties(
    raw: *mut dsr_device,
    properties: *mut dsr_device_properties,
) -> *mut dsr_status {
    returned(|| {
        // SAFETY: the caller passes our device and a struct to be filled.
        let (device, mut filled) = unsafe { (object::<Arc<dyn Device>>(raw)?, prefix::read(properties)?) };
        let DeviceProperties {
            name,
            memory_bytes,
            alignment,
            dtypes,
            profiles,
            strict_nan,
            flushed,
            unified_memory,
            binds_pinned,
        } = device.properties();
        let Flushed { operands, results } = flushed;
        let flags = [
            (*strict_nan, DSR_DEVICE_STRICT_NAN),
            (*unified_memory, DSR_DEVICE_UNIFIED_MEMORY),
            (*binds_pinned, DSR_DEVICE_BINDS_PINNED),
            (device.graphs().is_some(), DSR_DEVICE_GRAPHS),
            (device.collective().is_some(), DSR_DEVICE_COLLECTIVES),
        ];
        let too_large = |_| Error::internal(format!("alignment {alignment} exceeds 32 bits"));
        filled.alignment = u32::try_from(*alignment).map_err(too_large)?;
        filled.memory_bytes = *memory_bytes;
        filled.dtypes = mask(dtypes.iter().map(|dtype| *dtype as u32));
        filled.flushed_operands = mask(operands.iter().map(|dtype| *dtype as u32));
        filled.flushed_results = mask(results.iter().map(|dtype| *dtype as u32));
        filled.profiles = mask(profiles.iter().map(|profile| *profile as u32));
        filled.flags = flags.iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag);
        host()?.set_text(filled.name, name);
        // SAFETY: read above.
        unsafe { prefix::write(properties, &filled) };
        Ok(())
    })
}

unsafe extern "C" fn allocate(
    device: *mut dsr_device,
    bytes: u64,
    kind: u32,
    buffer: *mut *mut dsr_buffer,
) -> *mut dsr_status {
    returned(|| {
        prefix::check_out(buffer, "buffer")?;
        let (bytes, kind) = (prefix::size(bytes, "bytes")?, decode::memory_kind(kind)?);
        // SAFETY: the caller passes our device and a place for the buffer.
        unsafe {
            let made = object::<Arc<dyn Device>>(device)?.allocate(bytes, kind)?;
            prefix::put(buffer, "buffer", hand_out(made))
        }
    })
}

unsafe extern "C" fn free(buffer: *mut dsr_buffer) {
    // SAFETY: the caller passes our buffer, once.
    unsafe { give_back::<Arc<dyn Buffer>>(buffer) }
}

unsafe extern "C" fn host_pointer(buffer: *mut dsr_buffer) -> *mut c_void {
    value_or(ptr::null_mut(), || {
        // SAFETY: the caller passes our buffer.
        let pointer = unsafe { object::<Arc<dyn Buffer>>(buffer) }?.host_pointer();
        Ok(pointer.map_or(ptr::null_mut(), |pointer| pointer.as_ptr().cast()))
    })
}

unsafe extern "C" fn memory_use(device: *mut dsr_device, memory_use: *mut dsr_memory_use) -> *mut dsr_status {
    returned(|| {
        // SAFETY: the caller passes our device and a struct to be filled.
        let (device, mut filled) = unsafe { (object::<Arc<dyn Device>>(device)?, prefix::read(memory_use)?) };
        let found = device.memory();
        filled.used = found.used;
        filled.free = found.free.unwrap_or(DSR_NONE);
        // SAFETY: read above.
        unsafe { prefix::write(memory_use, &filled) };
        Ok(())
    })
}
