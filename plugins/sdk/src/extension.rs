//! The names of extensions: tables that a plugin may have and hosts ask for by name.

/// The name of the extension that reports what a plugin finds on the machine: a [`dsr_diagnose_api`](crate::raw::dsr_diagnose_api).
pub(crate) const DIAGNOSE: &str = "diagnose";
/// The name of the extension that compiles kernels ahead of time: a [`dsr_prepare_api`](crate::raw::dsr_prepare_api).
pub(crate) const PREPARE: &str = "prepare";
