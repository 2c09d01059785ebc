//! The shim of the extension `prepare`, which opens offline devices.

use super::{
    objects::hand_out,
    table::{backend, table},
};
use crate::{host_table::returned, prefix, raw::*};

pub(super) const PREPARE: dsr_prepare_api = table!(dsr_prepare_api { device_describe });

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
