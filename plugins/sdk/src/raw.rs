//! The types of the C ABI, named as in C. `include/dsrun.h` is generated from this file and those in `raw/`.
//!
//! Every type is valid when all its bytes are zero, holds integers rather than enums, and has no bit fields, booleans or
//! unions. What is read as a prefix starts with its size. Comments here become the header's comments, so they speak to
//! a reader who writes C.

#![allow(non_camel_case_types, reason = "named as in the C header")]

mod constants;
mod handles;
mod tables;

pub use constants::*;
pub use handles::*;
use std::ffi::{c_char, c_void};
pub use tables::*;

/// UTF-8 text, not ended by a zero. Empty if `length` is 0, whatever `data` is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_str {
    /// First byte.
    pub data: *const c_char,
    /// Number of bytes.
    pub length: usize,
}

/// What an error says.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_error {
    /// sizeof(dsr_error).
    pub struct_size: u32,
    /// One of DSR_CODE_*.
    pub code: u32,
    /// What is wrong and what to do about it.
    pub message: dsr_str,
    /// The op it is about; may be empty.
    pub op: dsr_str,
    /// The operand, result or attribute it is about; may be empty.
    pub argument: dsr_str,
    /// The field of the argument (such as `dtype` or `shape[1]`); may be empty.
    pub field: dsr_str,
}

/// A device before it is opened. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_device_info {
    /// sizeof(dsr_device_info) of the host.
    pub struct_size: u32,
    /// What device_open takes.
    pub index: u32,
    /// Bytes of memory, or DSR_NONE if not known.
    pub memory_bytes: u64,
    /// Takes the device's name for people.
    pub name: *mut dsr_text,
}

/// Something a backend uses on a machine, and whether it is there. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_finding {
    /// sizeof(dsr_finding) of the host.
    pub struct_size: u32,
    /// 1 if it is there and fit for use, else 0.
    pub present: u32,
    /// Takes what it is: a driver, a library, a feature of the processor, a folder.
    pub subject: *mut dsr_text,
    /// Takes which version, and where; or where it was looked for and what to do.
    pub detail: *mut dsr_text,
}

/// How a device is opened.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_device_options {
    /// sizeof(dsr_device_options) of the host.
    pub struct_size: u32,
    /// The share of the compute units this handle may use, above 0 and up to 1; 0 means all.
    pub compute_share: f32,
    /// Threads a CPU device may use, or DSR_NONE for all cores.
    pub threads: u64,
    /// The most bytes this handle may hold, or DSR_NONE.
    pub memory_limit: u64,
}

/// What a device is and can do. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_device_properties {
    /// sizeof(dsr_device_properties) of the host.
    pub struct_size: u32,
    /// Operands are bound at multiples of this many bytes: a power of two.
    pub alignment: u32,
    /// Bytes of memory; 0 if not known.
    pub memory_bytes: u64,
    /// Float types its kernels take: bit n stands for DSR_DTYPE_* = n. A profile is claimed for these; integers go without
    /// saying, and any op may still refuse a mix of types.
    pub dtypes: u64,
    /// Profiles it has all ops of: bit n stands for DSR_PROFILE_* = n.
    pub profiles: u64,
    /// DSR_DEVICE_* flags.
    pub flags: u64,
    /// Takes the device's name for people.
    pub name: *mut dsr_text,
}

/// Memory in use. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_memory_use {
    /// sizeof(dsr_memory_use) of the host.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Bytes held by live buffers and weights of this handle.
    pub used: u64,
    /// Bytes that can still be had, or DSR_NONE if not known.
    pub free: u64,
}

/// A tensor as it is planned for: the largest sizes that come. Its size never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_tensor_desc {
    /// One of DSR_DTYPE_*.
    pub dtype: u32,
    /// Dimensions, at most DSR_MAX_RANK.
    pub rank: u32,
    /// Sizes, outermost first; 0 behind `rank`.
    pub shape: [u64; DSR_MAX_RANK],
    /// Distance between neighbours of each dimension, in elements; 1 in the last; 0 behind `rank`.
    pub strides: [u64; DSR_MAX_RANK],
    /// DSR_TENSOR_* flags.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

/// Shape and storage format of a weight. Its size never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_weight_type {
    /// One of DSR_FORMAT_*.
    pub format: u32,
    /// Dimensions; a matrix is outputs by inputs.
    pub rank: u32,
    /// Sizes, outermost first; 0 behind `rank`.
    pub shape: [u64; DSR_MAX_RANK],
    /// 0.
    pub reserved: [u32; 2],
}

/// An operand as it is planned for. Its size never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_operand_desc {
    /// One of DSR_OPERAND_*.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
    /// With DSR_OPERAND_TENSOR.
    pub tensor: dsr_tensor_desc,
    /// With DSR_OPERAND_WEIGHT: the type it was packed from.
    pub weight: dsr_weight_type,
}

/// A call in the body of a region. Its size never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_region_call {
    /// One of DSR_OP_*, no region.
    pub op: u32,
    /// sizeof(the op's attribute struct).
    pub attributes_size: u32,
    /// The op's attribute struct, such as dsr_linear_attributes.
    pub attributes: *const c_void,
    /// The numbers of its operands, one for each of the op's; DSR_NO_VALUE for those left out.
    pub operands: *const u32,
    /// The numbers of its results, one for each of the op's.
    pub results: *const u32,
    /// Length of `operands`.
    pub operand_count: u32,
    /// Length of `results`.
    pub result_count: u32,
}

/// A fused op: a program of its own, whose meaning is its body. Values are numbered: first the operands, then the results of
/// each call in turn.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_region {
    /// sizeof(dsr_region) of the caller.
    pub struct_size: u32,
    /// Operands of the region.
    pub operand_count: u32,
    /// A name for people; no part of what the region is.
    pub name: dsr_str,
    /// The body, in order.
    pub calls: *const dsr_region_call,
    /// The numbers of the values that are the region's results.
    pub results: *const u32,
    /// Length of `calls`.
    pub call_count: u32,
    /// Length of `results`.
    pub result_count: u32,
}

/// A rank's membership in a group of the host: collectives over memory of the host, for plugins without a collective library.
/// Every rank calls the same functions in the same order; each waits for the others up to the group's time limit, and fails
/// with DSR_CODE_TIMEOUT or DSR_CODE_COMMUNICATION. One thread at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_transport {
    /// sizeof(dsr_transport) of the host.
    pub struct_size: u32,
    /// This rank.
    pub rank: u32,
    /// How many ranks there are.
    pub ranks: u32,
    /// 0.
    pub reserved: u32,
    /// First argument of every function.
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
    /// Reduces `source` over all ranks and gives each its share, in the order of ranks: `length` bytes of `ranks * length`.
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
    /// Puts the `length` bytes of every rank behind each other, in the order of ranks: `ranks * length` bytes.
    pub all_gather: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            source: *const c_void,
            destination: *mut c_void,
            length: usize,
        ) -> *mut dsr_status,
    >,
    /// Block j of `source` goes to rank j, block j of `destination` comes from rank j. Both are `length` bytes, a multiple of
    /// `ranks`, and do not overlap.
    pub all_to_all: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            source: *const c_void,
            destination: *mut c_void,
            length: usize,
        ) -> *mut dsr_status,
    >,
    /// Gives every rank the bytes of rank `root`, in place.
    pub broadcast: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            bytes: *mut c_void,
            length: usize,
            root: u32,
        ) -> *mut dsr_status,
    >,
    /// Waits until all ranks are here.
    pub barrier: Option<unsafe extern "C" fn(context: *mut c_void) -> *mut dsr_status>,
    /// Sends bytes to another rank, without waiting for it.
    pub send: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            bytes: *const c_void,
            length: usize,
            peer: u32,
        ) -> *mut dsr_status,
    >,
    /// Receives what another rank sends: exactly `length` bytes.
    pub receive: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            bytes: *mut c_void,
            length: usize,
            peer: u32,
        ) -> *mut dsr_status,
    >,
    /// The error that the group has failed with, or NULL. Any thread.
    pub status: Option<unsafe extern "C" fn(context: *mut c_void) -> *mut dsr_status>,
    /// Makes everything that waits in this group, on any rank, fail now. Any thread.
    pub abort: Option<unsafe extern "C" fn(context: *mut c_void, reason: dsr_str)>,
}

/// A call as it is planned for. Everything it points to is the caller's, and is valid until the function returns; `comm` and
/// `transport` are valid as long as the plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_call_desc {
    /// sizeof(dsr_call_desc) of the caller.
    pub struct_size: u32,
    /// One of DSR_OP_*.
    pub op: u32,
    /// The op's attribute struct, such as dsr_linear_attributes.
    pub attributes: *const c_void,
    /// One for each operand of the op, those left out included.
    pub operands: *const dsr_operand_desc,
    /// One for each result of the op. A result that updates an operand is described like it.
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
    /// For a collective, the group: of the plugin's own library, or ..
    pub comm: *mut dsr_comm,
    /// .. of the host.
    pub transport: *const dsr_transport,
    /// For a collective: this rank.
    pub rank: u32,
    /// For a collective: how many ranks there are.
    pub ranks: u32,
}

/// Whether and how a device runs a call. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_support {
    /// sizeof(dsr_support) of the host.
    pub struct_size: u32,
    /// DSR_SUPPORT_* flags; without DSR_SUPPORT_NATIVE the device does not run the call.
    pub flags: u32,
    /// Scratch memory a bound call needs.
    pub workspace_bytes: u64,
    /// Memory the plan will hold as long as it lives.
    pub persistent_bytes: u64,
    /// For DSR_OP_ATTENTION_PREPARE: how long the device wants its work list.
    pub work_words: u64,
    /// Takes why the device does not run the call: which element type, shape or feature.
    pub reason: *mut dsr_text,
}

/// A weight to be packed. What it points to is the caller's, and is valid until the function returns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_weight_desc {
    /// sizeof(dsr_weight_desc) of the caller.
    pub struct_size: u32,
    /// DSR_WEIGHT_* flags.
    pub flags: u32,
    /// Shape and format it comes in.
    pub weight_type: dsr_weight_type,
}

/// How a device would keep a weight. The plugin fills it in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_packed_layout {
    /// sizeof(dsr_packed_layout) of the host.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Bytes on the device.
    pub bytes: u64,
    /// Takes a name for the layout, private to the plugin and its version.
    pub name: *mut dsr_text,
}

/// The rows of a weight, in the canonical layout of its format: one after the other, no padding, little-endian.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_row_reader {
    /// sizeof(dsr_row_reader) of the caller.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// First argument of `rows`.
    pub context: *mut c_void,
    /// Gives the bytes of rows first .. first + count, in any order and number. They are the host's, and valid until the next
    /// call or until prepack returns. One thread at a time.
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

/// A range of a buffer. Its size never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_slice {
    /// The buffer.
    pub buffer: *mut dsr_buffer,
    /// Where the range starts, in bytes.
    pub offset: u64,
    /// How many bytes it is long.
    pub bytes: u64,
}

/// What an operand or result is bound to. Its size never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_argument {
    /// One of DSR_OPERAND_*.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
    /// With DSR_OPERAND_TENSOR: where its elements are.
    pub slice: dsr_slice,
    /// With a bounded tensor: an i32 on the device, how many rows of the first dimension are real. No buffer: all are.
    pub extent: dsr_slice,
    /// With DSR_OPERAND_WEIGHT.
    pub weight: *mut dsr_weight,
}

/// What a call is bound to. What it points to is the caller's, and is valid until the function returns; the buffers and weights
/// are valid as long as the bound call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_arguments {
    /// sizeof(dsr_arguments) of the caller.
    pub struct_size: u32,
    /// Length of `operands`.
    pub operand_count: u32,
    /// One for each operand of the description.
    pub operands: *const dsr_argument,
    /// One for each result; a result that updates an operand is bound to the same range.
    pub results: *const dsr_argument,
    /// Length of `results`.
    pub result_count: u32,
    /// 0.
    pub flags: u32,
    /// Scratch memory; no buffer if the plan needs none.
    pub workspace: dsr_slice,
}

/// What a plugin knows of the arguments of a bind, for dsr_host_api.validate_arguments.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_bind_limits {
    /// sizeof(dsr_bind_limits) of the plugin.
    pub struct_size: u32,
    /// The device's alignment.
    pub alignment: u32,
    /// Scratch memory the plan needs.
    pub workspace_bytes: u64,
    /// First argument of the functions.
    pub context: *mut c_void,
    /// How long a buffer is; DSR_NONE if it is no buffer of this plugin.
    pub buffer_bytes: Option<unsafe extern "C" fn(context: *mut c_void, buffer: *const dsr_buffer) -> u64>,
    /// The type a weight was packed from; 0 if it is no weight of this plugin, else 1. May be NULL if no op here takes one.
    pub weight_type: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            weight: *const dsr_weight,
            weight_type: *mut dsr_weight_type,
        ) -> u32,
    >,
}

/// The name of a group while its ranks gather.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsr_group_id {
    /// What one rank made and gave to the others.
    pub bytes: [u8; 128],
}
