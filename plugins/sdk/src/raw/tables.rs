//! The function tables of host and plugin.

use super::*;

/// The functions of the host. The table is valid forever. Any thread may call the functions at any time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_host_api {
    /// sizeof(dsr_host_api) of the host.
    pub struct_size: u32,
    /// DSR_ABI_MAJOR of the host.
    pub abi_major: u16,
    /// DSR_ABI_MINOR of the host.
    pub abi_minor: u16,
    /// The first argument of the functions.
    pub host: *mut dsr_host,
    /// The path of the file that this plugin was loaded from; empty if it is linked into the program.
    pub library_path: dsr_str,
    /// Makes an error from a copy of `error`; the caller owns it. It is never NULL: if `error` cannot be read, the new error says
    /// so.
    pub status_new:
        Option<unsafe extern "C" fn(host: *mut dsr_host, error: *const dsr_error) -> *mut dsr_status>,
    /// Reads an error. The texts are valid until the error is freed. Success (NULL) reads as code 0 and empty texts.
    pub status_get:
        Option<unsafe extern "C" fn(host: *mut dsr_host, status: *const dsr_status, error: *mut dsr_error)>,
    /// Frees an error that the plugin received and does not return. NULL is allowed.
    pub status_free: Option<unsafe extern "C" fn(host: *mut dsr_host, status: *mut dsr_status)>,
    /// Sets a text to a copy of `value`, replacing an earlier one.
    pub text_set: Option<unsafe extern "C" fn(host: *mut dsr_host, text: *mut dsr_text, value: dsr_str)>,
    /// Writes to the log of the host with a DSR_LOG_* level. A plugin may call it while it holds locks.
    pub log: Option<unsafe extern "C" fn(host: *mut dsr_host, level: u32, message: dsr_str)>,
    /// Validates the description of a call; the error names op, argument and field. The host validates a call before it calls a
    /// plugin. A plugin that other callers may use begins query and plan with this function. If `kept` is not NULL, it is set to
    /// a copy for validate_arguments, which the plugin owns and frees with checked_call_free.
    pub validate_call: Option<
        unsafe extern "C" fn(
            host: *mut dsr_host,
            call: *const dsr_call_desc,
            kept: *mut *mut dsr_checked_call,
        ) -> *mut dsr_status,
    >,
    /// Validates the arguments of a bind: sizes, offsets, alignment, aliasing, and the types of weights. `call` is the planned
    /// call; `limits` describes the buffers and weights of the plugin.
    pub validate_arguments: Option<
        unsafe extern "C" fn(
            host: *mut dsr_host,
            call: *const dsr_checked_call,
            arguments: *const dsr_arguments,
            limits: *const dsr_bind_limits,
        ) -> *mut dsr_status,
    >,
    /// Frees a call that validate_call has kept. NULL is allowed.
    pub checked_call_free: Option<unsafe extern "C" fn(host: *mut dsr_host, call: *mut dsr_checked_call)>,
    /// Returns the function table of the extension with this name, or NULL if the host does not have it.
    pub get_extension: Option<unsafe extern "C" fn(host: *mut dsr_host, name: dsr_str) -> *const c_void>,
}

/// The functions of a plugin. The table is valid forever, because the host does not unload plugins. Any thread may call the
/// functions at any time. Tables and functions are not NULL unless their comments allow it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_plugin_api {
    /// sizeof(dsr_plugin_api) of the plugin.
    pub struct_size: u32,
    /// DSR_ABI_MAJOR of the plugin.
    pub abi_major: u16,
    /// DSR_ABI_MINOR of the plugin.
    pub abi_minor: u16,
    /// DSR_PLUGIN_* flags.
    pub flags: u64,
    /// The first argument of the functions; may be NULL.
    pub backend: *mut dsr_backend,
    /// The name that users select it by: lower-case letters, digits and "-".
    pub name: dsr_str,
    /// Its version.
    pub version: dsr_str,
    /// A one-line description.
    pub description: dsr_str,
    /// Sets the number of devices that are present now; may be 0. DSR_CODE_UNAVAILABLE if a driver or library is missing; the
    /// message names it and where it was searched for.
    pub device_count:
        Option<unsafe extern "C" fn(backend: *mut dsr_backend, count: *mut u32) -> *mut dsr_status>,
    /// Describes device number `position`, below device_count.
    pub device_info: Option<
        unsafe extern "C" fn(
            backend: *mut dsr_backend,
            position: u32,
            info: *mut dsr_device_info,
        ) -> *mut dsr_status,
    >,
    /// Opens a device, or a share of one. The host owns it and closes it once, after freeing everything made from it. `options`
    /// may be NULL. DSR_CODE_INVALID_ARGUMENT if there is no such device or an option cannot be met.
    pub device_open: Option<
        unsafe extern "C" fn(
            backend: *mut dsr_backend,
            index: u32,
            options: *const dsr_device_options,
            device: *mut *mut dsr_device,
        ) -> *mut dsr_status,
    >,
    /// Closes a device.
    pub device_close: Option<unsafe extern "C" fn(device: *mut dsr_device)>,
    /// Fills in the properties of the device, which never change while it is open.
    pub device_properties: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            properties: *mut dsr_device_properties,
        ) -> *mut dsr_status,
    >,
    /// Memory.
    pub memory: *const dsr_memory_api,
    /// Streams.
    pub stream: *const dsr_stream_api,
    /// Events.
    pub event: *const dsr_event_api,
    /// Ops.
    pub op: *const dsr_op_api,
    /// Graphs. May be NULL; then the host replays calls one by one.
    pub graph: *const dsr_graph_api,
    /// Collectives. May be NULL; then collective calls have a dsr_transport.
    pub comm: *const dsr_comm_api,
    /// Returns the function table of the extension with this name, or NULL if the plugin does not have it. May be NULL.
    pub get_extension:
        Option<unsafe extern "C" fn(backend: *mut dsr_backend, name: dsr_str) -> *const c_void>,
}

/// Memory. Any thread may call the functions at any time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_memory_api {
    /// sizeof(dsr_memory_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Allocates zeroed memory of a DSR_MEMORY_* kind. The host owns it and frees it once. DSR_CODE_OUT_OF_MEMORY with the
    /// requested and free bytes; DSR_CODE_FAILED_PRECONDITION during capture.
    pub allocate: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            bytes: u64,
            kind: u32,
            buffer: *mut *mut dsr_buffer,
        ) -> *mut dsr_status,
    >,
    /// Frees memory after all enqueued work that uses it is done; waits if necessary.
    pub free: Option<unsafe extern "C" fn(buffer: *mut dsr_buffer)>,
    /// Returns the address at which the host can access a buffer until it is freed, or NULL if it cannot. Accesses do not race
    /// with work on streams.
    pub host_pointer: Option<unsafe extern "C" fn(buffer: *mut dsr_buffer) -> *mut c_void>,
    /// Fills in the memory use of the device handle.
    pub memory_use: Option<
        unsafe extern "C" fn(device: *mut dsr_device, memory_use: *mut dsr_memory_use) -> *mut dsr_status,
    >,
}

/// Streams. A stream is used by one thread at a time and may move between threads. Work runs in order and may run later;
/// functions that enqueue report wrong arguments only. A device fault surfaces when a stream or event is waited for, and is
/// permanent: after DSR_CODE_DEVICE_LOST only freeing works.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_stream_api {
    /// sizeof(dsr_stream_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Creates a stream. The host owns it and frees it once.
    pub create: Option<
        unsafe extern "C" fn(device: *mut dsr_device, stream: *mut *mut dsr_stream) -> *mut dsr_status,
    >,
    /// Frees a stream after finishing its work.
    pub free: Option<unsafe extern "C" fn(stream: *mut dsr_stream)>,
    /// Enqueues a copy from the host. `source` may be reused as soon as this returns. `length` is that of `destination`.
    pub upload: Option<
        unsafe extern "C" fn(
            stream: *mut dsr_stream,
            source: *const c_void,
            length: usize,
            destination: *const dsr_slice,
        ) -> *mut dsr_status,
    >,
    /// Waits for all work enqueued so far, then copies bytes to the host. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    pub download: Option<
        unsafe extern "C" fn(
            stream: *mut dsr_stream,
            source: *const dsr_slice,
            destination: *mut c_void,
            length: usize,
            what: dsr_str,
            timeout_nanoseconds: u64,
        ) -> *mut dsr_status,
    >,
    /// Enqueues a copy between two ranges of the same length, which do not overlap.
    pub copy: Option<
        unsafe extern "C" fn(
            stream: *mut dsr_stream,
            source: *const dsr_slice,
            destination: *const dsr_slice,
        ) -> *mut dsr_status,
    >,
    /// Enqueues setting every byte of a range to `byte`, below 256.
    pub fill: Option<
        unsafe extern "C" fn(
            stream: *mut dsr_stream,
            destination: *const dsr_slice,
            byte: u32,
        ) -> *mut dsr_status,
    >,
    /// Records an event, which completes when all work enqueued so far has completed.
    pub record:
        Option<unsafe extern "C" fn(stream: *mut dsr_stream, event: *mut dsr_event) -> *mut dsr_status>,
    /// Makes later work on this stream wait for an event recorded on any stream of the plugin.
    pub wait: Option<unsafe extern "C" fn(stream: *mut dsr_stream, event: *mut dsr_event) -> *mut dsr_status>,
    /// Waits for all work enqueued so far. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    pub synchronize: Option<
        unsafe extern "C" fn(
            stream: *mut dsr_stream,
            what: dsr_str,
            timeout_nanoseconds: u64,
        ) -> *mut dsr_status,
    >,
}

/// Events. Any thread may call the functions at any time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_event_api {
    /// sizeof(dsr_event_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Creates an event. The host owns it and frees it once.
    pub create:
        Option<unsafe extern "C" fn(device: *mut dsr_device, event: *mut *mut dsr_event) -> *mut dsr_status>,
    /// Frees an event.
    pub free: Option<unsafe extern "C" fn(event: *mut dsr_event)>,
    /// Sets `reached` to 1 if the last recorded point is reached or the event was never recorded, else to 0.
    pub reached: Option<unsafe extern "C" fn(event: *mut dsr_event, reached: *mut u32) -> *mut dsr_status>,
    /// Waits until the last recorded point is reached. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    pub synchronize: Option<
        unsafe extern "C" fn(
            event: *mut dsr_event,
            what: dsr_str,
            timeout_nanoseconds: u64,
        ) -> *mut dsr_status,
    >,
    /// Sets the time from an earlier event to this one; DSR_NONE if the device does not measure time. DSR_CODE_INVALID_ARGUMENT
    /// if either was never recorded.
    pub elapsed: Option<
        unsafe extern "C" fn(
            event: *mut dsr_event,
            earlier: *mut dsr_event,
            nanoseconds: *mut u64,
        ) -> *mut dsr_status,
    >,
}

/// Ops. Any thread may call the functions at any time, except that one thread at a time uses a bound call or stream.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_op_api {
    /// sizeof(dsr_op_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Says whether and how the device runs a call. This is cheap. That the device does not run it is an answer and not an error.
    pub query: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            call: *const dsr_call_desc,
            support: *mut dsr_support,
        ) -> *mut dsr_status,
    >,
    /// Says which layout the device would give a weight. This is cheap. DSR_CODE_UNSUPPORTED if it cannot hold this format.
    pub prepack_query: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            weight: *const dsr_weight_desc,
            layout: *mut dsr_packed_layout,
        ) -> *mut dsr_status,
    >,
    /// Packs a weight into device memory, in the layout of prepack_query. The host owns the result and frees it once. The plugin
    /// returns errors of the reader. `rows` is valid until this returns.
    pub prepack: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            stream: *mut dsr_stream,
            weight: *const dsr_weight_desc,
            rows: *const dsr_row_reader,
            packed: *mut *mut dsr_weight,
        ) -> *mut dsr_status,
    >,
    /// Returns the number of bytes that a packed weight holds on the device.
    pub weight_bytes: Option<unsafe extern "C" fn(weight: *mut dsr_weight) -> u64>,
    /// Frees a packed weight after all enqueued work that uses it is done.
    pub weight_free: Option<unsafe extern "C" fn(weight: *mut dsr_weight)>,
    /// Plans a call that query calls native; may compile, tune and allocate. The host owns the plan, uses it for any number of
    /// bound calls, and frees it once, after them. DSR_CODE_UNSUPPORTED if the device does not run the call.
    pub plan: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            call: *const dsr_call_desc,
            plan: *mut *mut dsr_plan,
        ) -> *mut dsr_status,
    >,
    /// Frees a plan.
    pub plan_free: Option<unsafe extern "C" fn(plan: *mut dsr_plan)>,
    /// Returns the number of bytes of scratch memory that a bound call needs.
    pub plan_workspace: Option<unsafe extern "C" fn(plan: *mut dsr_plan) -> u64>,
    /// Binds a call to its arguments. The host owns the bound call and frees it once; until then it keeps the plan, buffers and
    /// weights.
    pub bind: Option<
        unsafe extern "C" fn(
            plan: *mut dsr_plan,
            arguments: *const dsr_arguments,
            call: *mut *mut dsr_call,
        ) -> *mut dsr_status,
    >,
    /// Enqueues a bound call. It neither allocates nor waits.
    pub enqueue:
        Option<unsafe extern "C" fn(call: *mut dsr_call, stream: *mut dsr_stream) -> *mut dsr_status>,
    /// Frees a bound call. What it has enqueued may still be pending, and runs to its end all the same; so it does when its plan
    /// is freed after it. Buffers and weights wait for that by themselves.
    pub call_free: Option<unsafe extern "C" fn(call: *mut dsr_call)>,
    /// Enqueues a copy of the packed bytes of a weight to a range as long as its layout, in device or pinned memory. May be NULL
    /// if no layout is DSR_PACKED_RELOCATABLE.
    pub copy_packed: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            stream: *mut dsr_stream,
            weight: *mut dsr_weight,
            destination: *const dsr_slice,
        ) -> *mut dsr_status,
    >,
    /// Makes a packed weight of a range of memory that holds packed bytes of the same description whenever a call uses the weight:
    /// device memory, or pinned memory if the layout is DSR_PACKED_READABLE_WHEN_PINNED. The host owns the result, frees it once,
    /// and keeps the buffer until then; it may replace the bytes between calls that use the weight. May be NULL if no layout is
    /// DSR_PACKED_RELOCATABLE.
    pub adopt: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            weight: *const dsr_weight_desc,
            memory: *const dsr_slice,
            packed: *mut *mut dsr_weight,
        ) -> *mut dsr_status,
    >,
}

/// Graphs. One thread at a time uses a graph or stream.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_graph_api {
    /// sizeof(dsr_graph_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Captures calls, in order, for replay on streams of this device. Capturing runs no call. The host owns the graph and frees
    /// it once; until then it keeps the calls.
    pub capture: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            stream: *mut dsr_stream,
            calls: *const *mut dsr_call,
            count: usize,
            graph: *mut *mut dsr_graph,
        ) -> *mut dsr_status,
    >,
    /// Enqueues all captured calls.
    pub launch:
        Option<unsafe extern "C" fn(graph: *mut dsr_graph, stream: *mut dsr_stream) -> *mut dsr_status>,
    /// Frees a graph.
    pub free: Option<unsafe extern "C" fn(graph: *mut dsr_graph)>,
}

/// Collectives of the plugin's own library. Any thread may call the functions at any time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_comm_api {
    /// sizeof(dsr_comm_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Makes the id of a new group. One rank calls it, and the host passes the id to the others. If some ranks run in other
    /// processes, `address` is the IP address at which these reach this process, else it is empty. A library that finds its own
    /// way between processes need not use it; one that cannot reach other processes returns DSR_CODE_UNSUPPORTED.
    pub group_id: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            address: dsr_str,
            id: *mut dsr_group_id,
        ) -> *mut dsr_status,
    >,
    /// Joins a group, and waits until all ranks have joined. The host owns the membership and frees it once, after all plans that
    /// use it. DSR_CODE_TIMEOUT names the missing ranks.
    pub join: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            id: *const dsr_group_id,
            rank: u32,
            ranks: u32,
            timeout_nanoseconds: u64,
            comm: *mut *mut dsr_comm,
        ) -> *mut dsr_status,
    >,
    /// Leaves a group.
    pub free: Option<unsafe extern "C" fn(comm: *mut dsr_comm)>,
    /// Returns the error of a collective that has failed after it was enqueued, or NULL.
    pub status: Option<unsafe extern "C" fn(comm: *mut dsr_comm) -> *mut dsr_status>,
    /// Makes every wait in this group, on every rank, fail at once.
    pub abort: Option<unsafe extern "C" fn(comm: *mut dsr_comm, reason: dsr_str)>,
}

/// The extension "diagnose" of a plugin: what it looks for on this machine and what it finds, for people to read.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_diagnose_api {
    /// sizeof(dsr_diagnose_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Sets the number of findings.
    pub finding_count:
        Option<unsafe extern "C" fn(backend: *mut dsr_backend, count: *mut u32) -> *mut dsr_status>,
    /// Describes finding number `position`, below finding_count.
    pub finding: Option<
        unsafe extern "C" fn(
            backend: *mut dsr_backend,
            position: u32,
            finding: *mut dsr_finding,
        ) -> *mut dsr_status,
    >,
}

/// The extension "prepare" of a plugin: it compiles kernels ahead of the first request, on a machine without the device. Any
/// thread may call the function at any time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_prepare_api {
    /// sizeof(dsr_prepare_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Opens an offline device: one of this model that need not be present. It is closed like others. It answers query,
    /// prepack_query and plan as the real device would, but allocates no memory and runs nothing. DSR_CODE_INVALID_ARGUMENT with
    /// the known names if `name` is unknown or ambiguous; DSR_CODE_UNSUPPORTED if the plugin knows no names.
    pub device_describe: Option<
        unsafe extern "C" fn(
            backend: *mut dsr_backend,
            name: dsr_str,
            device: *mut *mut dsr_device,
        ) -> *mut dsr_status,
    >,
}

/// The type of `dsrun_plugin_entry_v0`, the one symbol that a plugin exports. The host calls it once for each load, before any
/// other function. `host` is valid forever. Sets `plugin` to the table of the plugin, which is valid forever.
pub type dsr_plugin_entry =
    unsafe extern "C" fn(host: *const dsr_host_api, plugin: *mut *const dsr_plugin_api) -> *mut dsr_status;
