//! Shims of the plugin table itself, and of memory.

use super::{
    Made, Object, exclusive, give_back, group, hand_out, host, object, op, returned, stream, value_or,
};
use crate::{decode, prefix, raw::*};
use dsrun_core::{
    Error, Result,
    device::{Backend, Buffer, Device, DeviceInfo, DeviceProperties},
};
use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, Mutex},
};

impl Object for Arc<dyn Device> {
    type Raw = dsr_device;
    const KIND: usize = 1;
    const NAME: &'static str = "device";
}

impl Object for Arc<dyn Buffer> {
    type Raw = dsr_buffer;
    const KIND: usize = 2;
    const NAME: &'static str = "buffer";
}

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
        get_extension: Some(super::diagnose::get_extension),
        ..prefix::zeroed()
    }
}

/// A table with its size, whose reserved fields are 0.
macro_rules! table {
    ($type:ident { $($function:ident),* $(,)? }) => {
        $type {
            struct_size: size_of::<$type>() as u32,
            reserved: 0,
            $($function: Some($function),)*
        }
    };
}
pub(super) use table;

const MEMORY: dsr_memory_api = table!(dsr_memory_api { allocate, free, host_pointer, memory_use });

/// # Safety
/// `backend` is null or that of our table.
pub(super) unsafe fn backend<'a>(backend: *mut dsr_backend) -> Result<&'a Arc<dyn Backend>> {
    // SAFETY: as the caller says; it is never freed.
    let made = unsafe { backend.cast::<Made>().as_ref() };
    Ok(&made.ok_or_else(|| Error::invalid("is null").at("backend"))?.backend)
}

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
        let DeviceProperties { name, memory_bytes, alignment, dtypes, profiles, strict_nan, unified_memory } =
            device.properties();
        let flags = [
            (*strict_nan, DSR_DEVICE_STRICT_NAN),
            (*unified_memory, DSR_DEVICE_UNIFIED_MEMORY),
            (device.graphs().is_some(), DSR_DEVICE_GRAPHS),
            (device.collective().is_some(), DSR_DEVICE_COLLECTIVES),
        ];
        let too_large = |_| Error::internal(format!("alignment {alignment} exceeds 32 bits"));
        filled.alignment = u32::try_from(*alignment).map_err(too_large)?;
        filled.memory_bytes = *memory_bytes;
        filled.dtypes = mask(dtypes.iter().map(|dtype| *dtype as u32));
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

/// The buffers and weights of this backend.
pub(super) struct Ours;

impl decode::Objects for Ours {
    fn buffer(&mut self, handle: *mut dsr_buffer) -> Result<Arc<dyn Buffer>> {
        // SAFETY: the handle is in what the caller of a shim passes, so it is null or our buffer.
        unsafe { object::<Arc<dyn Buffer>>(handle) }.cloned()
    }

    fn weight(&mut self, handle: *mut dsr_weight) -> Result<Arc<dyn dsrun_core::kernels::PackedWeight>> {
        // SAFETY: as above, for a weight.
        unsafe { object::<Arc<dyn dsrun_core::kernels::PackedWeight>>(handle) }.cloned()
    }
}

/// Runs with exclusive access to a stream.
///
/// # Safety
/// `raw` is null or our stream.
pub(super) unsafe fn with_stream<T>(
    raw: *mut dsr_stream,
    run: impl FnOnce(&mut dyn dsrun_core::device::Stream) -> Result<T>,
) -> Result<T> {
    // SAFETY: as the caller says.
    let stream = unsafe { object::<Mutex<Box<dyn dsrun_core::device::Stream>>>(raw) }?;
    let mut stream = exclusive(stream, "stream")?;
    run(&mut **stream)
}
