//! Reading and checking the tables of a plugin.

use crate::{prefix, prefix::Prefixed, raw::*};
use dsrun_core::{Code, Error, Result};

/// Copies of the tables of a plugin, in which no required function is null.
#[derive(Clone, Copy)]
pub(super) struct Tables {
    pub(super) api: dsr_plugin_api,
    pub(super) memory: dsr_memory_api,
    pub(super) stream: dsr_stream_api,
    pub(super) event: dsr_event_api,
    pub(super) op: dsr_op_api,
    pub(super) graph: Option<dsr_graph_api>,
    pub(super) comm: Option<dsr_comm_api>,
}

/// Refuses a table in which a required slot is null.
macro_rules! require {
    ($table:expr; $($slot:ident),* $(,)?) => {
        $(if $table.$slot.is_none() {
            return Err(lacks(&$table, stringify!($slot)));
        })*
    };
}

fn mismatch(message: impl Into<String>) -> Error {
    Error::new(Code::AbiMismatch, message)
}

fn lacks<T: Prefixed>(table: &T, slot: &str) -> Error {
    // SAFETY: every table begins with its size.
    let stated = unsafe { std::ptr::from_ref(table).cast::<u32>().read() } as usize;
    let whole = size_of::<T>();
    let reason = match stated < whole {
        true => format!(": the table has {stated} bytes, needs {whole}"),
        false => String::new(),
    };
    mismatch(format!("the plugin's {} has no `{slot}`{reason}", T::NAME))
}

/// # Safety
/// The pointer is null or to a table.
unsafe fn table<T: Prefixed>(pointer: *const T) -> Result<T> {
    // SAFETY: as the caller says.
    unsafe { prefix::read(pointer) }
        .map_err(|error| mismatch(format!("the plugin's table is invalid: {error}")))
}

impl Tables {
    /// Reads and checks all tables, the version before anything else.
    ///
    /// # Safety
    /// The pointer is null or to a plugin's table.
    pub(super) unsafe fn read(pointer: *const dsr_plugin_api) -> Result<Self> {
        // SAFETY: as the caller says.
        let api = unsafe { table(pointer) }?;
        let version = (api.abi_major, api.abi_minor);
        // Before 1.0 minor versions are incompatible with each other.
        if version != (DSR_ABI_MAJOR, DSR_ABI_MINOR) {
            return Err(mismatch(format!(
                "speaks version {}.{} of the plugin ABI, this program {DSR_ABI_MAJOR}.{DSR_ABI_MINOR}: use a plugin \
                 built for this version",
                version.0, version.1
            )));
        }
        if api.flags & DSR_PLUGIN_ABORTS_ON_PANIC != 0 {
            return Err(mismatch(
                "was built with panic = \"abort\", so a panic in it would end this program: build it with \
                 panic = \"unwind\"",
            ));
        }
        let unknown = api.flags & !DSR_PLUGIN_ABORTS_ON_PANIC;
        if unknown != 0 {
            return Err(mismatch(format!(
                "the plugin has flags that this program does not know: {unknown:#x}"
            )));
        }
        for (name, missing) in [
            ("memory", api.memory.is_null()),
            ("stream", api.stream.is_null()),
            ("event", api.event.is_null()),
            ("op", api.op.is_null()),
        ] {
            if missing {
                return Err(lacks(&api, name));
            }
        }
        require!(api; device_count, device_info, device_open, device_close, device_properties);
        // SAFETY: pointers of a plugin's table are to tables.
        let tables = unsafe {
            Self {
                memory: table(api.memory)?,
                stream: table(api.stream)?,
                event: table(api.event)?,
                op: table(api.op)?,
                graph: (!api.graph.is_null()).then(|| table(api.graph)).transpose()?,
                comm: (!api.comm.is_null()).then(|| table(api.comm)).transpose()?,
                api,
            }
        };
        require!(tables.memory; allocate, free, host_pointer, memory_use);
        require!(tables.stream; create, free, upload, download, copy, fill, record, wait, synchronize);
        require!(tables.event; create, free, reached, synchronize, elapsed);
        require!(
            tables.op; query, prepack_query, prepack, weight_bytes, weight_free, plan, plan_free, plan_workspace, bind,
            enqueue, call_free
        );
        if let Some(graph) = tables.graph {
            require!(graph; capture, launch, free);
        }
        if let Some(comm) = tables.comm {
            require!(comm; group_id, join, free, status, abort);
        }
        Ok(tables)
    }
}
