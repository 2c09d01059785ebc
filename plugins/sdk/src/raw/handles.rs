//! Opaque handles: types whose contents only one side knows.

/// An error; NULL means success. Only dsr_host_api.status_new makes errors. The receiver of an error owns it, and returns it or
/// frees it with dsr_host_api.status_free.
pub struct dsr_status {
    _opaque: [u8; 0],
}

/// The host: the first argument of its functions.
pub struct dsr_host {
    _opaque: [u8; 0],
}

/// The receiver of a text, to be set with dsr_host_api.text_set.
pub struct dsr_text {
    _opaque: [u8; 0],
}

/// A validated call that the host keeps for a plugin: see dsr_host_api.validate_call.
pub struct dsr_checked_call {
    _opaque: [u8; 0],
}

/// The plugin's own data; NULL if it needs none.
pub struct dsr_backend {
    _opaque: [u8; 0],
}

/// An open device, made by the plugin.
pub struct dsr_device {
    _opaque: [u8; 0],
}

/// A piece of memory, made by the plugin.
pub struct dsr_buffer {
    _opaque: [u8; 0],
}

/// A stream: a queue of work that runs in order, made by the plugin.
pub struct dsr_stream {
    _opaque: [u8; 0],
}

/// An event: a point in a stream, made by the plugin.
pub struct dsr_event {
    _opaque: [u8; 0],
}

/// A weight in the layout of the device, made by the plugin.
pub struct dsr_weight {
    _opaque: [u8; 0],
}

/// A planned call, made by the plugin.
pub struct dsr_plan {
    _opaque: [u8; 0],
}

/// A planned call with its arguments, made by the plugin.
pub struct dsr_call {
    _opaque: [u8; 0],
}

/// Captured calls, made by the plugin.
pub struct dsr_graph {
    _opaque: [u8; 0],
}

/// A rank's membership in a group of the plugin's own collective library, made by the plugin.
pub struct dsr_comm {
    _opaque: [u8; 0],
}
