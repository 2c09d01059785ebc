//! The layout of every struct of the C ABI in Rust, which the test of the header compares with that of a C compiler.

use super::raw::*;

/// A field of a struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The name.
    pub name: &'static str,
    /// The offset in bytes.
    pub offset: usize,
}

/// A struct of the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Struct {
    /// The name.
    pub name: &'static str,
    /// The size in bytes.
    pub size: usize,
    /// The alignment in bytes.
    pub alignment: usize,
    /// The fields, in order.
    pub fields: &'static [Field],
}

macro_rules! layout {
    ($($name:ident { $($field:ident),* $(,)? })*) => {
        /// Every struct of the C ABI that has fields.
        pub const STRUCTS: &[Struct] = &[$(Struct {
            name: stringify!($name),
            size: size_of::<$name>(),
            alignment: align_of::<$name>(),
            fields: &[$(Field { name: stringify!($field), offset: std::mem::offset_of!($name, $field) },)*],
        },)*];

        // A pattern without `..` compiles only if the list above names every field.
        $(const _: fn($name) = |$name { $($field: _),* }| {};)*
    };
}

layout! {
    dsr_str { data, length }
    dsr_error { struct_size, code, message, op, argument, field }
    dsr_device_info { struct_size, index, memory_bytes, name }
    dsr_finding { struct_size, present, subject, detail }
    dsr_device_options { struct_size, compute_share, threads, memory_limit, flags }
    dsr_device_properties {
        struct_size, alignment, memory_bytes, dtypes, profiles, flags, name, flushed_operands, flushed_results
    }
    dsr_memory_use { struct_size, reserved, used, free }
    dsr_tensor_desc { dtype, rank, shape, strides, flags, reserved }
    dsr_weight_type { format, rank, shape, reserved }
    dsr_operand_desc { kind, reserved, tensor, weight }
    dsr_region_call { op, attributes_size, attributes, operands, results, operand_count, result_count }
    dsr_region { struct_size, operand_count, name, calls, results, call_count, result_count }
    dsr_transport {
        struct_size, rank, ranks, reserved, context, all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, barrier,
        send, receive, status, abort
    }
    dsr_call_desc {
        struct_size, op, attributes, operands, results, attributes_size, operand_count, result_count, flags, region, comm,
        transport, rank, ranks
    }
    dsr_support { struct_size, flags, workspace_bytes, persistent_bytes, work_words, reason }
    dsr_weight_desc { struct_size, flags, weight_type }
    dsr_packed_layout { struct_size, flags, bytes, name }
    dsr_row_reader { struct_size, reserved, context, rows }
    dsr_slice { buffer, offset, bytes }
    dsr_argument { kind, reserved, slice, extent, weight }
    dsr_arguments { struct_size, operand_count, operands, results, result_count, flags, workspace }
    dsr_bind_limits { struct_size, alignment, workspace_bytes, context, buffer_bytes, weight_type }
    dsr_group_id { bytes }
    dsr_host_api {
        struct_size, abi_major, abi_minor, host, library_path, status_new, status_get, status_free, text_set, log,
        validate_call, validate_arguments,
        checked_call_free, get_extension
    }
    dsr_plugin_api {
        struct_size, abi_major, abi_minor, flags, backend, name, version, description, device_count, device_info, device_open,
        device_close, device_properties, memory, stream, event, op, graph, comm, get_extension
    }
    dsr_memory_api { struct_size, reserved, allocate, free, host_pointer, memory_use }
    dsr_stream_api {
        struct_size, reserved, create, free, upload, download, copy, fill, record, wait, synchronize
    }
    dsr_event_api { struct_size, reserved, create, free, reached, synchronize, elapsed }
    dsr_op_api {
        struct_size, reserved, query, prepack_query, prepack, weight_bytes, weight_free, plan, plan_free, plan_workspace, bind,
        enqueue, call_free, copy_packed, adopt
    }
    dsr_graph_api { struct_size, reserved, capture, launch, free }
    dsr_comm_api { struct_size, reserved, group_id, join, free, status, abort }
    dsr_diagnose_api { struct_size, reserved, finding_count, finding }
    dsr_prepare_api { struct_size, reserved, device_describe }
}
