//! The extension `diagnose` of a plugin.

use super::plugin::{Plugin, call};
use crate::{extension, host, prefix, raw::*};
use dsrun_core::{Result, device::Finding};

/// The findings of a plugin; empty if it does not have the extension.
pub(super) fn findings(plugin: &Plugin) -> Result<Vec<Finding>> {
    let Plugin { tables, health } = plugin;
    let Some(table) = plugin.extension::<dsr_diagnose_api>(extension::DIAGNOSE)? else {
        return Ok(Vec::new());
    };
    let mut count = 0;
    health.call("plugin", || Ok(call!(table, finding_count(tables.api.backend, &raw mut count))))?;
    let one = |position| {
        let (mut subject, mut detail) = (host::TextSink::default(), host::TextSink::default());
        let mut finding =
            dsr_finding { subject: subject.as_raw(), detail: detail.as_raw(), ..prefix::zeroed() };
        let place = &raw mut finding;
        health.call("plugin", || Ok(call!(table, finding(tables.api.backend, position, place))))?;
        let present = finding.present != 0;
        Ok(Finding { subject: subject.into_text(), present, detail: detail.into_text() })
    };
    (0..count).map(one).collect()
}
