//! Backends that are wrong in one way each: the suite is held to catch every one.
//!
//! One plugin holds them all. It is the CPU backend with the fault that the environment variable `DSRUN_MUTANT` names;
//! `none` is no fault. Faults stand in `faults.rs`, what they claim in `table.rs`; `families.rs` has faults of every op, named
//! `extent_ignored::linear`.

mod change;
mod families;
mod faults;
mod faulty_caches;
mod faulty_calls;
mod faulty_experts;
mod faulty_groups;
mod faulty_latents;
mod faulty_masks;
mod faulty_process;
mod harmless;
mod late;
mod number_families;
mod raw;
mod snapshot;
mod table;
mod tensor;
mod wrap;

use dsrun_core::{Code, Error, Result};
use dsrun_plugin_sdk::{
    Export,
    raw::{dsr_host_api, dsr_plugin_api, dsr_status},
};
use faults::Fault;
use std::sync::Arc;
use wrap::MutantBackend;

/// Names the mutant.
const VARIABLE: &str = "DSRUN_MUTANT";

/// The fault that the environment asks for, and what to say of it.
fn fault() -> Result<(&'static Fault, String)> {
    let unavailable = |message| Error::new(Code::Unavailable, message);
    let missing = |_| unavailable(format!("{VARIABLE} names no mutant"));
    let name = std::env::var(VARIABLE).map_err(missing)?;
    if name == table::FAULTLESS {
        return Ok((&faults::NONE, "The CPU backend, faultless".into()));
    }
    if let Some(member) = families::members().into_iter().find(|member| member.name() == name) {
        let description =
            format!("Wrong: {} {}; {} says so", member.op.op, member.family.about, member.caught_by);
        return Ok((Box::leak(Box::new(member.fault)), description));
    }
    if let Some(harmless) = harmless::HARMLESS.iter().find(|harmless| harmless.fault.name == name) {
        return Ok((&harmless.fault, format!("Right: it {}", harmless.about)));
    }
    let mutant = table::MUTANTS.iter().find(|mutant| mutant.name == name);
    let mutant = mutant.ok_or_else(|| unavailable(format!("there is no mutant `{name}` ({VARIABLE})")))?;
    let fault = faults::of(mutant.name);
    let fault = fault.ok_or_else(|| Error::internal(format!("mutant `{name}` has no fault")))?;
    Ok((fault, format!("Wrong: {}; {} says so", mutant.fault, mutant.caught_by)))
}

static EXPORT: Export = Export::new(
    || {
        let (fault, description) = fault()?;
        Ok(Arc::new(MutantBackend::new(fault, description)))
    },
    cfg!(panic = "abort"),
);

/// The entry of this plugin: as `export_backend!` writes it, and then whatever is wrong with the tables themselves.
///
/// # Safety
/// For a loader that keeps to `dsrun.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsrun_plugin_entry_v0(
    host: *const dsr_host_api,
    plugin: *mut *const dsr_plugin_api,
) -> *mut dsr_status {
    // SAFETY: passed on.
    let status = unsafe { EXPORT.enter_library(host, plugin) };
    if let (true, Ok((fault, _))) = (status.is_null(), fault()) {
        // SAFETY: just entered, with success.
        unsafe { raw::distort(fault, host, plugin) };
    }
    status
}
