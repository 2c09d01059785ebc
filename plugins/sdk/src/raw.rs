//! The types of the C ABI, named as in C. `include/dsrun.h` is generated from this file and those in `raw/`.
//!
//! Every type is valid when all its bytes are zero, holds integers rather than enums, and has no bit fields, booleans or
//! unions. A type that may grow begins with its size. The comments here become those of the header, so they address a reader
//! who writes C.

#![allow(non_camel_case_types, reason = "named as in the C header")]

mod constants;
mod handles;
mod tables;

pub use constants::*;
pub use handles::*;
use std::ffi::{c_char, c_void};
pub use tables::*;

/// UTF-8 text without a terminating zero. It is empty if `length` is 0, whatever `data` is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_str {
    /// The first byte.
    pub data: *const c_char,
    /// The number of bytes.
    pub length: usize,
}

/// The contents of an error.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_error {
    /// sizeof(dsr_error).
    pub struct_size: u32,
    /// One of DSR_CODE_*.
    pub code: u32,
    /// The message: what is wrong and what to do.
    pub message: dsr_str,
    /// The op at fault; may be empty.
    pub op: dsr_str,
    /// The operand, result or attribute at fault; may be empty.
    pub argument: dsr_str,
    /// The field of the argument, such as `dtype` or `shape[1]`; may be empty.
    pub field: dsr_str,
}

/// A device that can be opened. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_device_info {
    /// sizeof(dsr_device_info) of the host.
    pub struct_size: u32,
    /// The index that device_open takes.
    pub index: u32,
    /// The size of its memory in bytes, or DSR_NONE if unknown.
    pub memory_bytes: u64,
    /// Receives the product name.
    pub name: *mut dsr_text,
}

/// A thing that a backend looks for on a machine, and whether it is present. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_finding {
    /// sizeof(dsr_finding) of the host.
    pub struct_size: u32,
    /// 1 if it is present and usable, else 0.
    pub present: u32,
    /// Receives what was looked for: a driver, a library, a processor feature, a folder.
    pub subject: *mut dsr_text,
    /// Receives the version and location found, or where it was searched for and what to do.
    pub detail: *mut dsr_text,
}

/// Options for opening a device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_device_options {
    /// sizeof(dsr_device_options) of the host.
    pub struct_size: u32,
    /// The share of the compute units that this handle may use, above 0 and up to 1; 0 means all.
    pub compute_share: f32,
    /// The number of threads that a CPU device may use, or DSR_NONE for all cores.
    pub threads: u64,
    /// The limit in bytes on memory that this handle holds, or DSR_NONE.
    pub memory_limit: u64,
    /// DSR_OPTION_* flags.
    pub flags: u64,
}

/// The properties and capabilities of a device. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_device_properties {
    /// sizeof(dsr_device_properties) of the host.
    pub struct_size: u32,
    /// The alignment in bytes that buffer offsets of arguments have; a power of two.
    pub alignment: u32,
    /// The size of its memory in bytes; 0 if unknown.
    pub memory_bytes: u64,
    /// The float types that its kernels support: bit n stands for DSR_DTYPE_* = n. The profiles below hold for these types.
    /// Integer types have no bits, and an op may refuse a mix of types.
    pub dtypes: u64,
    /// The profiles of which it supports every op: bit n stands for DSR_PROFILE_* = n.
    pub profiles: u64,
    /// DSR_DEVICE_* flags.
    pub flags: u64,
    /// Receives the product name.
    pub name: *mut dsr_text,
    /// The float types whose subnormal numbers the device may take for zero in operands: bit n stands for DSR_DTYPE_* = n.
    pub flushed_operands: u64,
    /// The float types of which a result may be zero, with its sign, where it is subnormal: bit n stands for DSR_DTYPE_* = n.
    pub flushed_results: u64,
}

/// The memory use of a device handle. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_memory_use {
    /// sizeof(dsr_memory_use) of the host.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Bytes that live buffers and weights of this handle hold.
    pub used: u64,
    /// Bytes that can still be allocated, or DSR_NONE if unknown.
    pub free: u64,
}

/// A tensor as a call is planned for it, with the largest sizes it will have. The size of the struct never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_tensor_desc {
    /// One of DSR_DTYPE_*.
    pub dtype: u32,
    /// The number of dimensions, at most DSR_MAX_RANK.
    pub rank: u32,
    /// The sizes, outermost first; 0 from `rank` on.
    pub shape: [u64; DSR_MAX_RANK],
    /// The distance between neighbours of each dimension, in elements; 1 in the last; 0 from `rank` on.
    pub strides: [u64; DSR_MAX_RANK],
    /// DSR_TENSOR_* flags.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

/// The shape and storage format of a weight. The size of the struct never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_weight_type {
    /// One of DSR_FORMAT_*.
    pub format: u32,
    /// The number of dimensions; a matrix is outputs by inputs.
    pub rank: u32,
    /// The sizes, outermost first; 0 from `rank` on.
    pub shape: [u64; DSR_MAX_RANK],
    /// 0.
    pub reserved: [u32; 2],
}

/// An operand as a call is planned for it. The size of the struct never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_operand_desc {
    /// One of DSR_OPERAND_*.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
    /// With DSR_OPERAND_TENSOR: the tensor.
    pub tensor: dsr_tensor_desc,
    /// With DSR_OPERAND_WEIGHT: the type it was packed from.
    pub weight: dsr_weight_type,
}

/// A call in the body of a region. The size of the struct never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_region_call {
    /// One of DSR_OP_*, but not DSR_OP_REGION.
    pub op: u32,
    /// sizeof(the op's attribute struct).
    pub attributes_size: u32,
    /// The op's attribute struct, such as dsr_linear_attributes.
    pub attributes: *const c_void,
    /// The values of its operands, one for each operand of the op; DSR_NO_VALUE for an absent operand.
    pub operands: *const u32,
    /// The values of its results, one for each result of the op.
    pub results: *const u32,
    /// Length of `operands`.
    pub operand_count: u32,
    /// Length of `results`.
    pub result_count: u32,
}

/// A fused op, defined by a body of calls. Values are numbered: the operands first, then the results of each call in order.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_region {
    /// sizeof(dsr_region) of the caller.
    pub struct_size: u32,
    /// The number of operands of the region.
    pub operand_count: u32,
    /// A name for messages. It does not affect what the region computes.
    pub name: dsr_str,
    /// The body, in order.
    pub calls: *const dsr_region_call,
    /// The values that are the results of the region.
    pub results: *const u32,
    /// Length of `calls`.
    pub call_count: u32,
    /// Length of `results`.
    pub result_count: u32,
}

/// A rank of a group of the host: collectives over host memory, for plugins without a collective library. Every rank calls the
/// same functions in the same order. A function waits for the other ranks up to the timeout of the group, and fails with
/// DSR_CODE_TIMEOUT or DSR_CODE_COMMUNICATION. One thread at a time uses it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_transport {
    /// sizeof(dsr_transport) of the host.
    pub struct_size: u32,
    /// This rank.
    pub rank: u32,
    /// The number of ranks in the group.
    pub ranks: u32,
    /// 0.
    pub reserved: u32,
    /// The first argument of every function.
    pub context: *mut c_void,
    /// Reduces `bytes` (elements of DSR_DTYPE_*) over all ranks with DSR_REDUCTION_*, in place.
    pub all_reduce: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            bytes: *mut c_void,
            length: usize,
            dtype: u32,
            reduction: u32,
        ) -> *mut dsr_status,
    >,
    /// Reduces the `ranks * length` bytes of `source` over all ranks, and writes the `length` bytes that are this rank's share
    /// to `destination`.
    pub reduce_scatter: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            source: *const c_void,
            destination: *mut c_void,
            length: usize,
            dtype: u32,
            reduction: u32,
        ) -> *mut dsr_status,
    >,
    /// Gathers the `length` bytes of every rank, in the order of ranks: `ranks * length` bytes.
    pub all_gather: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            source: *const c_void,
            destination: *mut c_void,
            length: usize,
        ) -> *mut dsr_status,
    >,
    /// Exchanges blocks: block j of `source` goes to rank j, and block j of `destination` comes from rank j. Both are `length`
    /// bytes long, a multiple of `ranks`, and do not overlap.
    pub all_to_all: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            source: *const c_void,
            destination: *mut c_void,
            length: usize,
        ) -> *mut dsr_status,
    >,
    /// Copies the bytes of rank `root` to all ranks, in place.
    pub broadcast: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            bytes: *mut c_void,
            length: usize,
            root: u32,
        ) -> *mut dsr_status,
    >,
    /// Waits until all ranks have reached the barrier.
    pub barrier: Option<unsafe extern "C" fn(context: *mut c_void) -> *mut dsr_status>,
    /// Sends bytes to another rank without waiting for it.
    pub send: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            bytes: *const c_void,
            length: usize,
            peer: u32,
        ) -> *mut dsr_status,
    >,
    /// Receives a message of exactly `length` bytes from another rank.
    pub receive: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            bytes: *mut c_void,
            length: usize,
            peer: u32,
        ) -> *mut dsr_status,
    >,
    /// Returns the error with which the group has failed, or NULL. Any thread may call it.
    pub status: Option<unsafe extern "C" fn(context: *mut c_void) -> *mut dsr_status>,
    /// Makes every wait in this group, on every rank, fail at once. Any thread may call it.
    pub abort: Option<unsafe extern "C" fn(context: *mut c_void, reason: dsr_str)>,
}

/// A call to be planned. All it points to belongs to the caller and is valid until the function returns, except `comm` and
/// `transport`, which are valid as long as the plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_call_desc {
    /// sizeof(dsr_call_desc) of the caller.
    pub struct_size: u32,
    /// One of DSR_OP_*.
    pub op: u32,
    /// The op's attribute struct, such as dsr_linear_attributes.
    pub attributes: *const c_void,
    /// One for each operand of the op, including absent ones.
    pub operands: *const dsr_operand_desc,
    /// One for each result of the op. A result that updates an operand has the same description.
    pub results: *const dsr_tensor_desc,
    /// sizeof(the op's attribute struct).
    pub attributes_size: u32,
    /// Length of `operands`.
    pub operand_count: u32,
    /// Length of `results`.
    pub result_count: u32,
    /// 0.
    pub flags: u32,
    /// With DSR_OP_REGION: the body.
    pub region: *const dsr_region,
    /// For a collective, or a region with collectives, with the plugin's own library: the rank's membership in the group.
    pub comm: *mut dsr_comm,
    /// For such a call without one: the transport of the host.
    pub transport: *const dsr_transport,
    /// For such a call: this rank.
    pub rank: u32,
    /// For such a call: the number of ranks in the group.
    pub ranks: u32,
}

/// The answer to whether and how a device runs a call. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_support {
    /// sizeof(dsr_support) of the host.
    pub struct_size: u32,
    /// DSR_SUPPORT_* flags; without DSR_SUPPORT_NATIVE the device does not run the call.
    pub flags: u32,
    /// Bytes of scratch memory that a bound call needs.
    pub workspace_bytes: u64,
    /// Bytes of memory that a plan or its bound calls hold until they are freed.
    pub persistent_bytes: u64,
    /// For DSR_OP_ATTENTION_PREPARE: the length that the device needs for its work list.
    pub work_words: u64,
    /// Receives the reason if the device does not run the call: which element type, shape or feature is missing.
    pub reason: *mut dsr_text,
}

/// The description of a weight to pack.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_weight_desc {
    /// sizeof(dsr_weight_desc) of the caller.
    pub struct_size: u32,
    /// DSR_WEIGHT_* flags.
    pub flags: u32,
    /// The shape and storage format of the rows to pack.
    pub weight_type: dsr_weight_type,
}

/// A device's layout for a weight. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_packed_layout {
    /// sizeof(dsr_packed_layout) of the host.
    pub struct_size: u32,
    /// DSR_PACKED_* flags.
    pub flags: u32,
    /// The number of bytes on the device.
    pub bytes: u64,
    /// Receives the name of the layout, private to the plugin and its version.
    pub name: *mut dsr_text,
}

/// The source of a weight's rows, in the canonical layout of its format: consecutive, without padding, little-endian.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_row_reader {
    /// sizeof(dsr_row_reader) of the caller.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// The first argument of `rows`.
    pub context: *mut c_void,
    /// Sets `data` to the bytes of rows first .. first + count, which belong to the host and are valid until the next call or
    /// until prepack returns. Rows may be read in any order, and more than once. One thread at a time may call it.
    pub rows: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            first: u64,
            count: u64,
            bytes: *mut *const c_void,
            length: *mut usize,
        ) -> *mut dsr_status,
    >,
}

/// A range of a buffer. The size of the struct never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_slice {
    /// The buffer.
    pub buffer: *mut dsr_buffer,
    /// The byte at which the range starts.
    pub offset: u64,
    /// The length of the range in bytes.
    pub bytes: u64,
}

/// The argument of an operand or result. The size of the struct never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_argument {
    /// One of DSR_OPERAND_*.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
    /// With DSR_OPERAND_TENSOR: the range that holds its elements.
    pub slice: dsr_slice,
    /// With a bounded tensor: an i32 in device memory, the number of valid rows of the first dimension. Without a buffer all
    /// rows are valid.
    pub extent: dsr_slice,
    /// With DSR_OPERAND_WEIGHT: the packed weight.
    pub weight: *mut dsr_weight,
}

/// The arguments of a call. All it points to belongs to the caller and is valid until the function returns, except buffers and
/// weights, which are valid as long as the bound call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_arguments {
    /// sizeof(dsr_arguments) of the caller.
    pub struct_size: u32,
    /// Length of `operands`.
    pub operand_count: u32,
    /// One for each operand of the description.
    pub operands: *const dsr_argument,
    /// One for each result. A result that updates an operand is bound to the same range.
    pub results: *const dsr_argument,
    /// Length of `results`.
    pub result_count: u32,
    /// 0.
    pub flags: u32,
    /// Scratch memory; without a buffer if the plan needs none.
    pub workspace: dsr_slice,
}

/// A plugin's knowledge of its buffers, weights and plan, for dsr_host_api.validate_arguments.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_bind_limits {
    /// sizeof(dsr_bind_limits) of the plugin.
    pub struct_size: u32,
    /// The alignment in bytes that the device requires.
    pub alignment: u32,
    /// Bytes of scratch memory that the plan needs.
    pub workspace_bytes: u64,
    /// The first argument of the functions.
    pub context: *mut c_void,
    /// Returns the length of a buffer in bytes, or DSR_NONE if the buffer is not one of this plugin.
    pub buffer_bytes: Option<unsafe extern "C" fn(context: *mut c_void, buffer: *const dsr_buffer) -> u64>,
    /// Sets the type that a weight was packed from, and returns 1; returns 0 if the weight is not one of this plugin. May be NULL
    /// if no op of the plugin takes a weight.
    pub weight_type: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            weight: *const dsr_weight,
            weight_type: *mut dsr_weight_type,
        ) -> u32,
    >,
}

/// The id of a group while its ranks join.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_group_id {
    /// The bytes that one rank made and passed to the others.
    pub bytes: [u8; 128],
}
