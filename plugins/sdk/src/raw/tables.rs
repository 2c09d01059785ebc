//! The tables of functions that host and plugin give each other.

use super::*;

/// What the host gives a plugin. It is valid for ever. All functions may be called from any thread, at the same time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_host_api {
    /// sizeof(dsr_host_api) of the host.
    pub struct_size: u32,
    /// DSR_ABI_MAJOR of the host.
    pub abi_major: u16,
    /// DSR_ABI_MINOR of the host.
    pub abi_minor: u16,
    /// First argument of the functions.
    pub host: *mut dsr_host,
    /// The file this plugin was loaded from; empty if it is linked into the program.
    pub library_path: dsr_str,
    /// Makes an error. Copies the texts; the caller owns the result. Never NULL: if `error` cannot be read, the result says so.
    pub status_new:
        Option<unsafe extern "C" fn(host: *mut dsr_host, error: *const dsr_error) -> *mut dsr_status>,
    /// Reads an error. The texts are valid until it is freed. Success (NULL) reads as code 0 and empty texts.
    pub status_get:
        Option<unsafe extern "C" fn(host: *mut dsr_host, status: *const dsr_status, error: *mut dsr_error)>,
    /// Frees an error that the plugin got and does not return. NULL is allowed.
    pub status_free: Option<unsafe extern "C" fn(host: *mut dsr_host, status: *mut dsr_status)>,
    /// Sets a text the host asked for; the last one counts. Copies it.
    pub text_set: Option<unsafe extern "C" fn(host: *mut dsr_host, text: *mut dsr_text, value: dsr_str)>,
    /// Writes to the host's log with a DSR_LOG_* level. May be called while the plugin holds locks.
    pub log: Option<unsafe extern "C" fn(host: *mut dsr_host, level: u32, message: dsr_str)>,
    /// Checks everything that can be wrong with a call. The host does this in front of every plugin; a plugin that checks what
    /// it is given, whoever calls it, begins query and plan with this. The error names op, argument and field. If `kept` is not
    /// NULL it takes a copy for validate_arguments, which the plugin owns and frees with checked_call_free.
    pub validate_call: Option<
        unsafe extern "C" fn(
            host: *mut dsr_host,
            call: *const dsr_call_desc,
            kept: *mut *mut dsr_checked_call,
        ) -> *mut dsr_status,
    >,
    /// Checks everything that can be wrong with the arguments of a bind: sizes, offsets, alignment, aliases, the types of
    /// weights. `call` is what was planned; `limits` asks the plugin about its own buffers and weights.
    pub validate_arguments: Option<
        unsafe extern "C" fn(
            host: *mut dsr_host,
            call: *const dsr_checked_call,
            arguments: *const dsr_arguments,
            limits: *const dsr_bind_limits,
        ) -> *mut dsr_status,
    >,
    /// Frees a copy of a call. NULL is allowed.
    pub checked_call_free: Option<unsafe extern "C" fn(host: *mut dsr_host, call: *mut dsr_checked_call)>,
    /// A table of functions that are not in this version, by name; NULL if the host does not have it.
    pub get_extension: Option<unsafe extern "C" fn(host: *mut dsr_host, name: dsr_str) -> *const c_void>,
}

/// What a plugin gives the host. It is valid for ever; the host does not unload plugins. Functions may be called from any
/// thread, at the same time. Tables and functions are never NULL unless they say so.
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
    /// First argument of the functions; may be NULL.
    pub backend: *mut dsr_backend,
    /// The name users select it by: lower case, digits and "-".
    pub name: dsr_str,
    /// Its version.
    pub version: dsr_str,
    /// What it is, in a line.
    pub description: dsr_str,
    /// How many devices there are now: 0 if there are none. DSR_CODE_UNAVAILABLE if a driver or library is missing: the message
    /// says which, and where it was looked for.
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
    /// Opens a device, or a share of one. The host owns it and closes it once, when everything made from it is freed. `options`
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
    /// What the device is and can do; always the same for an open device.
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
    /// Graphs; may be NULL: the host replays calls one by one.
    pub graph: *const dsr_graph_api,
    /// Collectives; may be NULL: calls that need them are given a dsr_transport.
    pub comm: *const dsr_comm_api,
    /// A table of functions that are not in this version, by name; NULL if there is none. May be NULL itself.
    pub get_extension:
        Option<unsafe extern "C" fn(backend: *mut dsr_backend, name: dsr_str) -> *const c_void>,
}

/// Memory. Any thread, at the same time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_memory_api {
    /// sizeof(dsr_memory_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Allocates memory of a DSR_MEMORY_* kind. Its contents are zero. The host owns it and frees it once.
    /// DSR_CODE_OUT_OF_MEMORY says what was asked for and what is free; DSR_CODE_FAILED_PRECONDITION during capture.
    pub allocate: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            bytes: u64,
            kind: u32,
            buffer: *mut *mut dsr_buffer,
        ) -> *mut dsr_status,
    >,
    /// Frees memory, once all work that was enqueued with it is done. Waits if it has to.
    pub free: Option<unsafe extern "C" fn(buffer: *mut dsr_buffer)>,
    /// The address by which the host may access it, valid until it is freed; NULL if the host may not. Accesses do not race
    /// with work on streams.
    pub host_pointer: Option<unsafe extern "C" fn(buffer: *mut dsr_buffer) -> *mut c_void>,
    /// Memory in use.
    pub memory_use: Option<
        unsafe extern "C" fn(device: *mut dsr_device, memory_use: *mut dsr_memory_use) -> *mut dsr_status,
    >,
}

/// Streams. A stream is used by one thread at a time and may move between threads. Work runs in order, and may run later: what
/// enqueues reports wrong arguments only. A fault of the device shows where the stream or an event is waited for, and stays:
/// after DSR_CODE_DEVICE_LOST only freeing works.
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
    /// Frees a stream. Its work is finished first.
    pub free: Option<unsafe extern "C" fn(stream: *mut dsr_stream)>,
    /// Copies bytes from the host. `source` may be reused as soon as this returns. `length` is that of `destination`.
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
    /// Copies bytes on the device. The ranges are equally long and do not overlap.
    pub copy: Option<
        unsafe extern "C" fn(
            stream: *mut dsr_stream,
            source: *const dsr_slice,
            destination: *const dsr_slice,
        ) -> *mut dsr_status,
    >,
    /// Sets every byte to `byte`, below 256.
    pub fill: Option<
        unsafe extern "C" fn(
            stream: *mut dsr_stream,
            destination: *const dsr_slice,
            byte: u32,
        ) -> *mut dsr_status,
    >,
    /// Lets `event` mark the point reached when everything enqueued so far is done.
    pub record:
        Option<unsafe extern "C" fn(stream: *mut dsr_stream, event: *mut dsr_event) -> *mut dsr_status>,
    /// Lets later work wait for an event recorded on any stream of the plugin.
    pub wait: Option<unsafe extern "C" fn(stream: *mut dsr_stream, event: *mut dsr_event) -> *mut dsr_status>,
    /// Waits until everything enqueued so far is done. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    pub synchronize: Option<
        unsafe extern "C" fn(
            stream: *mut dsr_stream,
            what: dsr_str,
            timeout_nanoseconds: u64,
        ) -> *mut dsr_status,
    >,
}

/// Events. Any thread, at the same time.
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
    /// Sets `reached` to 1 if the point last recorded is reached or none ever was, else to 0.
    pub reached: Option<unsafe extern "C" fn(event: *mut dsr_event, reached: *mut u32) -> *mut dsr_status>,
    /// Waits until it is reached. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    pub synchronize: Option<
        unsafe extern "C" fn(
            event: *mut dsr_event,
            what: dsr_str,
            timeout_nanoseconds: u64,
        ) -> *mut dsr_status,
    >,
    /// Time from an earlier event to this one; DSR_NONE if the device keeps no time. DSR_CODE_INVALID_ARGUMENT if one of the
    /// two was never recorded.
    pub elapsed: Option<
        unsafe extern "C" fn(
            event: *mut dsr_event,
            earlier: *mut dsr_event,
            nanoseconds: *mut u64,
        ) -> *mut dsr_status,
    >,
}

/// Ops. Any thread, at the same time, but for enqueue: a bound call and a stream are used by one thread at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_op_api {
    /// sizeof(dsr_op_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Whether and how the device runs a call. Cheap. What cannot be run is an answer and no error.
    pub query: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            call: *const dsr_call_desc,
            support: *mut dsr_support,
        ) -> *mut dsr_status,
    >,
    /// How the device would keep a weight. Cheap. DSR_CODE_UNSUPPORTED if it cannot keep this format.
    pub prepack_query: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            weight: *const dsr_weight_desc,
            layout: *mut dsr_packed_layout,
        ) -> *mut dsr_status,
    >,
    /// Brings a weight to the device in the layout that prepack_query named. The host owns the result and frees it once. Errors
    /// of the reader are returned on. `rows` is valid until this returns.
    pub prepack: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            stream: *mut dsr_stream,
            weight: *const dsr_weight_desc,
            rows: *const dsr_row_reader,
            packed: *mut *mut dsr_weight,
        ) -> *mut dsr_status,
    >,
    /// Bytes a packed weight holds on the device.
    pub weight_bytes: Option<unsafe extern "C" fn(weight: *mut dsr_weight) -> u64>,
    /// Frees a packed weight, once all work that was enqueued with it is done.
    pub weight_free: Option<unsafe extern "C" fn(weight: *mut dsr_weight)>,
    /// Prepares a call that query answers natively. May compile, tune and allocate. The host owns the plan, uses it for any
    /// number of bound calls, and frees it once, after them. DSR_CODE_UNSUPPORTED if the device does not run the call.
    pub plan: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            call: *const dsr_call_desc,
            plan: *mut *mut dsr_plan,
        ) -> *mut dsr_status,
    >,
    /// Frees a plan.
    pub plan_free: Option<unsafe extern "C" fn(plan: *mut dsr_plan)>,
    /// Scratch memory a bound call needs.
    pub plan_workspace: Option<unsafe extern "C" fn(plan: *mut dsr_plan) -> u64>,
    /// Fixes the arguments of a call. The host owns the bound call and frees it once; it keeps plan, buffers and weights until
    /// then.
    pub bind: Option<
        unsafe extern "C" fn(
            plan: *mut dsr_plan,
            arguments: *const dsr_arguments,
            call: *mut *mut dsr_call,
        ) -> *mut dsr_status,
    >,
    /// Enqueues a bound call. Never allocates, never waits.
    pub enqueue:
        Option<unsafe extern "C" fn(call: *mut dsr_call, stream: *mut dsr_stream) -> *mut dsr_status>,
    /// Frees a bound call.
    pub call_free: Option<unsafe extern "C" fn(call: *mut dsr_call)>,
}

/// Capturing and replaying work. A graph and a stream are used by one thread at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_graph_api {
    /// sizeof(dsr_graph_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Captures calls, in order, for replay on streams of this device. None of them runs. The host owns the graph and frees it
    /// once; it keeps the calls until then.
    pub capture: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            stream: *mut dsr_stream,
            calls: *const *mut dsr_call,
            count: usize,
            graph: *mut *mut dsr_graph,
        ) -> *mut dsr_status,
    >,
    /// Enqueues all of it.
    pub launch:
        Option<unsafe extern "C" fn(graph: *mut dsr_graph, stream: *mut dsr_stream) -> *mut dsr_status>,
    /// Frees a graph.
    pub free: Option<unsafe extern "C" fn(graph: *mut dsr_graph)>,
}

/// Collectives of the plugin's own library. Any thread, at the same time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_comm_api {
    /// sizeof(dsr_comm_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Makes the name of a new group. One rank does, and the host brings it to the others.
    pub group_id:
        Option<unsafe extern "C" fn(device: *mut dsr_device, id: *mut dsr_group_id) -> *mut dsr_status>,
    /// Joins a group, and waits until all ranks have. The host owns the membership and frees it once, after every plan that uses
    /// it. DSR_CODE_TIMEOUT names the ranks that are missing.
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
    /// The error of a collective that failed after it was enqueued, or NULL.
    pub status: Option<unsafe extern "C" fn(comm: *mut dsr_comm) -> *mut dsr_status>,
    /// Makes everything that waits in this group, on any rank, fail now.
    pub abort: Option<unsafe extern "C" fn(comm: *mut dsr_comm, reason: dsr_str)>,
}

/// The extension "diagnose" of a plugin: what it uses on this machine, and what it found of it, for people.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_diagnose_api {
    /// sizeof(dsr_diagnose_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// How many findings there are.
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

/// The extension "prepare" of a plugin: what it builds is built ahead of the first request, also on a machine without the device.
/// Any thread, at the same time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_prepare_api {
    /// sizeof(dsr_prepare_api) of the plugin.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// A device that is not here, by a name that the plugin knows it by; closed as others are. It answers query, prepack_query and
    /// plan as the device would, has no memory to allocate, and runs nothing. DSR_CODE_INVALID_ARGUMENT if the name is not known
    /// or says too little: the message says which names there are. DSR_CODE_UNSUPPORTED if there are none.
    pub device_describe: Option<
        unsafe extern "C" fn(
            backend: *mut dsr_backend,
            name: dsr_str,
            device: *mut *mut dsr_device,
        ) -> *mut dsr_status,
    >,
    /// Builds what a graph of such calls, in this order, would need beside what planning each of them builds.
    pub graph_prepare: Option<
        unsafe extern "C" fn(
            device: *mut dsr_device,
            calls: *const *const dsr_call_desc,
            count: usize,
        ) -> *mut dsr_status,
    >,
}

/// The one symbol a plugin exports, as `dsrun_plugin_entry_v0`. Called once for every load, before anything else. `host` is
/// valid for ever. Sets `plugin` to the plugin's table, which is valid for ever.
pub type dsr_plugin_entry =
    unsafe extern "C" fn(host: *const dsr_host_api, plugin: *mut *const dsr_plugin_api) -> *mut dsr_status;
