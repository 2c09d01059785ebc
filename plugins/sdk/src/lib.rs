//! The C ABI of dsrun, for backends in dynamic libraries.
//!
//! A plugin is a dynamic library that exports one function, through which host and plugin exchange function tables. The C
//! header `include/dsrun.h` is generated from [`raw`].
//!
//! | item | does |
//! |---|---|
//! | [`raw`], [`layout`] | define the tables and structs of the ABI, and their layout in memory |
//! | [`export_backend!`] | exports a Rust [`Backend`](dsrun_core::device::Backend) from a dynamic library |
//! | [`PluginBackend`] | loads a plugin and makes it a `Backend` |
//! | [`discovery`] | finds plugins and reads their manifests, without running their code |
//! | [`backend_entry!`] | puts a linked backend behind its own tables, for tests |
//!
//! # Rules
//!
//! - **One symbol**, with the major version in its name. Tables only grow at the end. While the major version is 0, host and
//!   plugin must also have the same minor version.
//! - **Structs that may grow begin with their size.** A reader copies `min(struct_size, its own size)` bytes into a zeroed
//!   struct, so a missing field is zero, and zero means the behaviour before the field existed. Sizes are never compared for
//!   equality.
//! - **Plain types.** Integers and `#define`s; no enums, booleans, bit fields or unions. No Rust type crosses.
//! - **Errors** are objects of the host (`dsr_status`), which makes and frees them; null is success. After an error, output
//!   arguments are untouched.
//! - **Handles** are the plugin's pointers, freed exactly once. The host keeps parents alive longer than children, so a plugin
//!   needs no reference counts.
//! - **Nothing unwinds** across the boundary. Rust shims catch panics, `dsrun.hpp` catches C++ exceptions; both become
//!   [`Code::Panic`](dsrun_core::Code::Panic). The host then stops using the object, and keeps running.
//! - **Threads.** Plugin and device functions may be called from any thread at the same time. A stream, bound call or graph is
//!   used by one thread at a time and may move between threads. A plugin calls back into the host under a lock of its own only
//!   to log, and to make and free errors. A plugin does not exit the process, install signal handlers, write to
//!   standard output, or change the environment, the working directory or the floating-point mode of the calling thread.
//! - **Libraries are never unloaded.**
//! - **Validation** happens once on each side: the host validates before it calls a plugin, and a plugin validates what it is
//!   given, because anyone may call its tables. The host offers its checks to plugins (`validate_call`, `validate_arguments`).

mod comm;
mod decode;
pub mod discovery;
mod encode;
mod export;
mod extension;
mod host;
mod host_table;
pub mod layout;
mod loader;
mod prefix;
pub mod raw;
mod status;

#[doc(hidden)]
pub use dsrun_core;

pub use export::Export;
pub use host::LiveObjects;
pub(crate) use loader::find_library;
pub use loader::{PluginBackend, take_status};
pub use status::NO_MESSAGE;
