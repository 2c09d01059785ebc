//! Faults of the tables themselves, which no backend behind `export_backend!` could have.

use crate::faults::Fault;
use dsrun_plugin_sdk::raw::{
    dsr_call_desc, dsr_device, dsr_host_api, dsr_op_api, dsr_plugin_api, dsr_status, dsr_support,
};
use std::sync::OnceLock;

/// What stands in place of a plugin's `query`.
pub(crate) type Query =
    unsafe extern "C" fn(*mut dsr_device, *const dsr_call_desc, *mut dsr_support) -> *mut dsr_status;

/// The tables that are distorted.
struct Original {
    host: dsr_host_api,
    op: dsr_op_api,
}

// SAFETY: copies of tables that are valid for ever, and whose functions may be called from any thread.
unsafe impl Send for Original {}
// SAFETY: as above.
unsafe impl Sync for Original {}

static ORIGINAL: OnceLock<Original> = OnceLock::new();

/// Puts another function into a plugin's table, if that is its fault.
///
/// # Safety
/// The plugin has been entered with this host, and has given this table.
pub(crate) unsafe fn distort(fault: &Fault, host: *const dsr_host_api, plugin: *mut *const dsr_plugin_api) {
    let Some(query) = fault.raw_query else { return };
    // SAFETY: both tables were used already, and the plugin's was written where `plugin` points.
    unsafe {
        let mut api = **plugin;
        if api.op.is_null() {
            // What a host of another version is given.
            return;
        }
        let original = ORIGINAL.get_or_init(|| Original { host: *host, op: *api.op });
        api.op = Box::leak(Box::new(dsr_op_api { query: Some(query), ..original.op }));
        *plugin = Box::leak(Box::new(api));
    }
}

/// Fills in all of an answer, whatever size the caller states.
pub(crate) unsafe extern "C" fn answers_too_long(
    device: *mut dsr_device,
    call: *const dsr_call_desc,
    support: *mut dsr_support,
) -> *mut dsr_status {
    let Some(query) = ORIGINAL.get().and_then(|original| original.op.query) else {
        return std::ptr::null_mut();
    };
    // SAFETY: passed on. That the answer is as long as this program knows it is what this fault takes for granted.
    unsafe {
        let status = query(device, call, support);
        if status.is_null() {
            (*support).workspace_bytes = 0;
            (*support).persistent_bytes = 0;
            (*support).work_words = 0;
        }
        status
    }
}

/// Runs whatever it is asked for.
pub(crate) unsafe extern "C" fn checks_nothing(
    device: *mut dsr_device,
    call: *const dsr_call_desc,
    support: *mut dsr_support,
) -> *mut dsr_status {
    if let Some(Original { host, op }) = ORIGINAL.get()
        && let (Some(query), Some(free)) = (op.query, host.status_free)
    {
        // SAFETY: passed on; the error is freed once, and not returned.
        unsafe { free(host.host, query(device, call, support)) };
    }
    std::ptr::null_mut()
}
