//! Shims of the extension `prepare`, which compiles kernels ahead of time.

use super::{
    device::{backend, table},
    group::MAX_CALLS,
    hand_out, object,
    op::call_desc,
    returned,
};
use crate::{prefix, raw::*};
use dsrun_core::{Result, device::Device};
use std::sync::Arc;

pub(super) const PREPARE: dsr_prepare_api = table!(dsr_prepare_api { device_describe, graph_prepare });

unsafe extern "C" fn device_describe(
    raw: *mut dsr_backend,
    name: dsr_str,
    device: *mut *mut dsr_device,
) -> *mut dsr_status {
    returned(|| {
        prefix::check_out(device, "device")?;
        // SAFETY: the caller passes our backend, a readable text, and a place for the device.
        unsafe {
            let described = backend(raw)?.describe(&prefix::text(name))?;
            prefix::put(device, "device", hand_out(described))
        }
    })
}

unsafe extern "C" fn graph_prepare(
    device: *mut dsr_device,
    calls: *const *const dsr_call_desc,
    count: usize,
) -> *mut dsr_status {
    // SAFETY: the caller passes our device, and readable descriptions.
    returned(|| unsafe {
        let device = object::<Arc<dyn Device>>(device)?;
        let calls = prefix::array(calls, count, MAX_CALLS, "calls")?;
        let calls = calls.iter().map(|call| call_desc(*call)).collect::<Result<Vec<_>>>()?;
        device.graphs().map_or(Ok(()), |graphs| graphs.prepare(&calls))
    })
}
