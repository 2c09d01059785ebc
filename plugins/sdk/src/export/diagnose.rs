//! The lookup of extensions, and the shims of the extension `diagnose`.

use super::{
    prepare::PREPARE,
    table::{backend, table},
};
use crate::{
    extension,
    host_table::{host, returned},
    prefix,
    raw::*,
};
use dsrun_core::Error;
use std::{ffi::c_void, ptr};

const DIAGNOSE: dsr_diagnose_api = table!(dsr_diagnose_api { finding_count, finding });

/// Finds the table of an extension.
pub(super) unsafe extern "C" fn get_extension(_: *mut dsr_backend, name: dsr_str) -> *const c_void {
    // SAFETY: the caller passes a readable text.
    match &*unsafe { prefix::text(name) } {
        extension::DIAGNOSE => ptr::from_ref(const { &DIAGNOSE }).cast(),
        extension::PREPARE => ptr::from_ref(const { &PREPARE }).cast(),
        _ => ptr::null(),
    }
}

unsafe extern "C" fn finding_count(raw: *mut dsr_backend, count: *mut u32) -> *mut dsr_status {
    returned(|| {
        prefix::check_out(count, "count")?;
        // SAFETY: the caller passes our backend and a place for the count.
        unsafe { prefix::put(count, "count", backend(raw)?.diagnose().len() as u32) }
    })
}

unsafe extern "C" fn finding(
    raw: *mut dsr_backend,
    position: u32,
    finding: *mut dsr_finding,
) -> *mut dsr_status {
    returned(|| {
        // SAFETY: the caller passes our backend and a struct to be filled.
        let (backend, mut filled) = unsafe { (backend(raw)?, prefix::read(finding)?) };
        let findings = backend.diagnose();
        let found = findings.get(position as usize).ok_or_else(|| {
            Error::invalid(format!("is {position}, must be below {} (findings)", findings.len()))
                .at("position")
        })?;
        filled.present = u32::from(found.present);
        host()?.set_text(filled.subject, &found.subject);
        host()?.set_text(filled.detail, &found.detail);
        // SAFETY: read above.
        unsafe { prefix::write(finding, &filled) };
        Ok(())
    })
}
