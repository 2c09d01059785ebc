//! Versions, limits, flags and kinds. The numbers of codes, element types, formats and ops are those of the types in core.

/// The major version of this ABI. While it is 0, host and plugin must also have the same minor version.
pub const DSR_ABI_MAJOR: u16 = 0;
/// The minor version of this ABI.
pub const DSR_ABI_MINOR: u16 = 2;

/// The maximum number of dimensions of a tensor or weight.
pub const DSR_MAX_RANK: usize = 6;
/// The value of an absent number.
pub const DSR_NONE: u64 = u64::MAX;
/// The number of an absent value in a region.
pub const DSR_NO_VALUE: u32 = u32::MAX;

/// In dsr_plugin_api.flags: a panic aborts the process. The host refuses such a plugin.
pub const DSR_PLUGIN_ABORTS_ON_PANIC: u64 = 1;

/// Levels of dsr_host_api.log: a failure.
pub const DSR_LOG_ERROR: u32 = 1;
/// A problem that does not stop the work.
pub const DSR_LOG_WARN: u32 = 2;
/// Information for users.
pub const DSR_LOG_INFO: u32 = 3;
/// Information for developers.
pub const DSR_LOG_DEBUG: u32 = 4;
/// Verbose information for developers.
pub const DSR_LOG_TRACE: u32 = 5;

/// In dsr_device_options.flags: kernels are chosen so that a row's result does not depend on the other rows of a call.
pub const DSR_OPTION_BATCH_INVARIANT: u64 = 1;

/// In dsr_device_properties.flags: NaN in an input makes exactly the outputs that depend on it NaN.
pub const DSR_DEVICE_STRICT_NAN: u64 = 1;
/// The host can read device memory in place.
pub const DSR_DEVICE_UNIFIED_MEMORY: u64 = 2;
/// The device supports the graph table.
pub const DSR_DEVICE_GRAPHS: u64 = 4;
/// The device supports the comm table.
pub const DSR_DEVICE_COLLECTIVES: u64 = 8;
/// Calls take tensors in pinned memory wherever they take them in device memory, with the same results.
pub const DSR_DEVICE_BINDS_PINNED: u64 = 16;

/// Kinds of memory: device memory.
pub const DSR_MEMORY_DEVICE: u32 = 1;
/// Pinned host memory that the device can access. It has a host pointer.
pub const DSR_MEMORY_PINNED: u32 = 2;

/// In dsr_tensor_desc.flags: a call may bind an extent that makes the first dimension shorter.
pub const DSR_TENSOR_BOUNDED: u32 = 1;

/// Kinds of operands: absent.
pub const DSR_OPERAND_ABSENT: u32 = 0;
/// A tensor.
pub const DSR_OPERAND_TENSOR: u32 = 1;
/// A packed weight.
pub const DSR_OPERAND_WEIGHT: u32 = 2;

/// In dsr_support.flags: the device runs the call.
pub const DSR_SUPPORT_NATIVE: u32 = 1;
/// A graph may capture the call.
pub const DSR_SUPPORT_CAPTURE_SAFE: u32 = 2;
/// Each row's result is bit-identical whatever other rows are in the batch.
pub const DSR_SUPPORT_BATCH_INVARIANT: u32 = 4;

/// In dsr_packed_layout.flags: packed bytes can be moved with copy_packed and adopt.
pub const DSR_PACKED_RELOCATABLE: u32 = 1;
/// Kernels also read packed bytes in pinned memory: adopt takes ranges of it.
pub const DSR_PACKED_READABLE_WHEN_PINNED: u32 = 2;

/// In dsr_weight_desc.flags: the weight is never written again once it is packed.
pub const DSR_WEIGHT_IMMUTABLE: u32 = 1;
