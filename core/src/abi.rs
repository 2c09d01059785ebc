//! The C ABI: backends as plugins.
//!
//! A plugin is a dynamic library with one exported function, which gives the host a table of functions and is given one. The
//! C header `core/include/dsrun.h` is generated from [`raw`]; [`export_backend!`](crate::export_backend) turns a Rust
//! [`Backend`](crate::device::Backend) into a plugin; [`PluginBackend`] turns a plugin into a `Backend`. Together they make the
//! loopback: a linked backend behind its own tables ([`backend_entry!`](crate::backend_entry)).
//!
//! # Rules
//!
//! - **One symbol**, with the major version in its name. Tables only ever grow at the end. While the major version is 0, host
//!   and plugin must have the same minor version too; all the same, the rules below are followed.
//! - **Structs say their size** where they may grow. A reader takes `min(struct_size, its own)` bytes into a zeroed copy: what is
//!   missing is zero, which means what was so before the field existed. Sizes are never compared for equality.
//! - **Plain types.** Integers and `#define`s, no enums, booleans, bit fields or unions. No Rust type crosses.
//! - **Errors** are objects of the host (`dsr_status`), which makes and frees them: null is success. On an error, what a function
//!   would have filled in is untouched.
//! - **Handles** are the plugin's pointers, freed exactly once. The host keeps parents alive longer than children, so a
//!   plugin counts nothing.
//! - **Nothing unwinds** across the boundary. Rust shims catch panics, `dsrun.hpp` catches C++ exceptions; both become
//!   [`Code::Panic`](crate::Code::Panic), after which the host uses the object no more, and lives.
//! - **Threads**: plugin and device functions may be called from any thread at the same time; a stream, bound call or graph is used
//!   by one thread at a time and may move. Nothing depends on which thread calls. No callback into the host is made under a lock of
//!   the plugin, but for `log` and those that make and free errors. A plugin does not exit the process, install signal
//!   handlers or change the environment.
//! - **Libraries are never unloaded.**
//! - **Checks** are made by the host in front of every plugin, and offered to it (`validate_call`, `validate_arguments`).

mod comm;
mod decode;
mod encode;
mod export;
mod host;
pub mod layout;
mod plugin;
mod prefix;
pub mod raw;
mod status;

/// The name of the extension by which a plugin tells what it found on the machine: a [`raw::dsr_diagnose_api`].
pub(crate) const DIAGNOSE_EXTENSION: &str = "diagnose";
/// The name of the extension by which a plugin builds ahead: a [`raw::dsr_prepare_api`].
pub(crate) const PREPARE_EXTENSION: &str = "prepare";

pub use export::Export;
pub(crate) use plugin::find_library;
pub use plugin::{PluginBackend, take_status};
