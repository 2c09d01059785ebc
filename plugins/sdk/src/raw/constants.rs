//! Versions, limits, flags and kinds. Numbers of codes, element types, formats and ops are those of the Rust types.

/// Major version of this ABI. While it is 0, host and plugin must have the same minor version too.
pub const DSR_ABI_MAJOR: u16 = 0;
/// Minor version of this ABI.
pub const DSR_ABI_MINOR: u16 = 2;

/// The most dimensions of a tensor or weight.
pub const DSR_MAX_RANK: usize = 6;
/// "No value" where a number may be left out.
pub const DSR_NONE: u64 = u64::MAX;
/// "No value" in place of the number of a value in a region.
pub const DSR_NO_VALUE: u32 = u32::MAX;

/// In dsr_plugin_api.flags: built so that a panic ends the process. The host refuses such a plugin.
pub const DSR_PLUGIN_ABORTS_ON_PANIC: u64 = 1;

/// Levels of dsr_host_api.log.
pub const DSR_LOG_ERROR: u32 = 1;
/// Something works, but not as well as it could.
pub const DSR_LOG_WARN: u32 = 2;
/// For users.
pub const DSR_LOG_INFO: u32 = 3;
/// For developers.
pub const DSR_LOG_DEBUG: u32 = 4;
/// For developers, much of it.
pub const DSR_LOG_TRACE: u32 = 5;

/// In dsr_device_properties.flags: NaN in an input shows in exactly the results that depend on it.
pub const DSR_DEVICE_STRICT_NAN: u64 = 1;
/// The host can read the device's memory in place.
pub const DSR_DEVICE_UNIFIED_MEMORY: u64 = 2;
/// The graph table works on this device.
pub const DSR_DEVICE_GRAPHS: u64 = 4;
/// The comm table works on this device.
pub const DSR_DEVICE_COLLECTIVES: u64 = 8;

/// Kinds of memory: on the device.
pub const DSR_MEMORY_DEVICE: u32 = 1;
/// On the host, reachable by the device; has a host pointer.
pub const DSR_MEMORY_PINNED: u32 = 2;

/// In dsr_tensor_desc.flags: a call may bind an extent that makes the first dimension shorter.
pub const DSR_TENSOR_BOUNDED: u32 = 1;

/// Kinds of operands: left out.
pub const DSR_OPERAND_ABSENT: u32 = 0;
/// A tensor.
pub const DSR_OPERAND_TENSOR: u32 = 1;
/// A packed weight.
pub const DSR_OPERAND_WEIGHT: u32 = 2;

/// In dsr_support.flags: the device runs the call itself.
pub const DSR_SUPPORT_NATIVE: u32 = 1;
/// The call may be captured in a graph.
pub const DSR_SUPPORT_CAPTURE_SAFE: u32 = 2;
/// A row's result does not depend on the other rows, to the bit.
pub const DSR_SUPPORT_BATCH_INVARIANT: u32 = 4;

/// In dsr_weight_desc.flags: the weight never changes once it is packed.
pub const DSR_WEIGHT_IMMUTABLE: u32 = 1;
