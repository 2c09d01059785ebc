//! What only one side can look into.

/// An error of the host; NULL means success. Made by dsr_host_api.status_new only, so that it outlives the plugin. Whoever
/// gets one owns it, and returns it on or frees it with dsr_host_api.status_free.
pub struct dsr_status {
    _opaque: [u8; 0],
}

/// The host, as its functions want to be given it.
pub struct dsr_host {
    _opaque: [u8; 0],
}

/// A text the host wants to be told: see dsr_host_api.text_set.
pub struct dsr_text {
    _opaque: [u8; 0],
}

/// A call that was checked, kept by the host for a plugin: see dsr_host_api.validate_call.
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

/// A queue of work that runs in order, made by the plugin.
pub struct dsr_stream {
    _opaque: [u8; 0],
}

/// A point in a stream, made by the plugin.
pub struct dsr_event {
    _opaque: [u8; 0],
}

/// A weight in the device's own layout, made by the plugin.
pub struct dsr_weight {
    _opaque: [u8; 0],
}

/// A prepared op, made by the plugin.
pub struct dsr_plan {
    _opaque: [u8; 0],
}

/// A plan with its arguments, made by the plugin.
pub struct dsr_call {
    _opaque: [u8; 0],
}

/// Calls captured for replay, made by the plugin.
pub struct dsr_graph {
    _opaque: [u8; 0],
}

/// A rank's membership in a group of the plugin's own collective library, made by the plugin.
pub struct dsr_comm {
    _opaque: [u8; 0],
}
