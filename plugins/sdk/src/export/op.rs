//! Shims of ops: weights, plans and bound calls.

use super::{
    objects::{Object, Ours, exclusive, give_back, hand_out, object, with_stream},
    stream::range,
    table::table,
};
use crate::{
    comm::GivenTransport,
    decode,
    host_table::{HostTable, host, returned, value_or},
    prefix,
    raw::*,
};
use dsrun_core::{
    Error, Result, WeightReader, WeightType,
    checked::{CheckedPlan, ValidCall},
    collective::Comm,
    device::Device,
    kernels::{BoundCall, PackedWeight},
};
use std::{
    borrow::Cow,
    ffi::c_void,
    ptr,
    sync::{Arc, Mutex},
};

impl Object for CheckedPlan {
    type Raw = dsr_plan;
    const KIND: usize = 6;
    const NAME: &'static str = "plan";
}

/// A bound call, which its handle and graphs share.
pub(super) type SharedCall = Arc<Mutex<Box<dyn BoundCall>>>;

impl Object for SharedCall {
    type Raw = dsr_call;
    const KIND: usize = 7;
    const NAME: &'static str = "call";
}

pub(super) const OP: dsr_op_api = table!(dsr_op_api {
    query,
    prepack_query,
    prepack,
    weight_bytes,
    weight_free,
    plan,
    plan_free,
    plan_workspace,
    bind,
    enqueue,
    call_free,
    copy_packed,
    adopt,
});

/// Decodes and validates a call.
///
/// # Errors
/// If the description is not valid.
///
/// # Safety
/// The description is readable; its group, if any, is ours or the host's, and lives as long as the result.
pub(super) unsafe fn call_desc(raw: *const dsr_call_desc) -> Result<ValidCall> {
    let host = host()?;
    let group = |raw: &dsr_call_desc| {
        if raw.transport.is_null() {
            // SAFETY: as the caller says.
            return unsafe { object::<Arc<dyn Comm>>(raw.comm) }.cloned();
        }
        // SAFETY: as the caller says.
        unsafe { GivenTransport::comm(raw.transport, host) }
    };
    // SAFETY: as the caller says.
    unsafe { decode::call(raw, group) }
}

unsafe extern "C" fn query(
    device: *mut dsr_device,
    call: *const dsr_call_desc,
    support: *mut dsr_support,
) -> *mut dsr_status {
    returned(|| {
        // SAFETY: the caller passes our device, a description and a struct to be filled.
        let (device, call, mut filled) =
            unsafe { (object::<Arc<dyn Device>>(device)?, call_desc(call)?, prefix::read(support)?) };
        let answer = device.kernels().query(&call).map_err(|error| error.in_op(call.op.name()))?;
        let flags = [
            (answer.native, DSR_SUPPORT_NATIVE),
            (answer.capture_safe, DSR_SUPPORT_CAPTURE_SAFE),
            (answer.batch_invariant, DSR_SUPPORT_BATCH_INVARIANT),
        ];
        filled.flags = flags.iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag);
        filled.workspace_bytes = answer.workspace_bytes as u64;
        filled.persistent_bytes = answer.persistent_bytes as u64;
        filled.work_words = answer.work_words as u64;
        host()?.set_text(filled.reason, &answer.reason);
        // SAFETY: read above.
        unsafe { prefix::write(support, &filled) };
        Ok(())
    })
}

unsafe extern "C" fn prepack_query(
    device: *mut dsr_device,
    weight: *const dsr_weight_desc,
    layout: *mut dsr_packed_layout,
) -> *mut dsr_status {
    returned(|| {
        // SAFETY: the caller passes our device, a description and a struct to be filled.
        let (device, weight, mut filled) =
            unsafe { (object::<Arc<dyn Device>>(device)?, decode::weight(weight)?, prefix::read(layout)?) };
        let answer = device.kernels().prepack_query(&weight)?;
        filled.bytes = answer.bytes as u64;
        filled.flags = if answer.relocatable { DSR_PACKED_RELOCATABLE } else { 0 };
        filled.flags |= if answer.readable_when_pinned { DSR_PACKED_READABLE_WHEN_PINNED } else { 0 };
        host()?.set_text(filled.name, &answer.name);
        // SAFETY: read above.
        unsafe { prefix::write(layout, &filled) };
        Ok(())
    })
}

/// The reader of the caller.
struct Rows {
    raw: dsr_row_reader,
    host: HostTable,
    weight_type: WeightType,
    row_bytes: usize,
}

impl WeightReader for Rows {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn rows(&mut self, first: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        let read = self.raw.rows.ok_or_else(|| Error::invalid("is null").at("rows"))?;
        let (mut bytes, mut length): (*const c_void, usize) = (ptr::null(), 0);
        // SAFETY: a function of the caller with its context and output parameters.
        let status =
            unsafe { read(self.raw.context, first as u64, count as u64, &raw mut bytes, &raw mut length) };
        self.host.take(status)?;
        if count.checked_mul(self.row_bytes) != Some(length) {
            let message = format!("returned {length} bytes for {count} rows of {} bytes", self.row_bytes);
            return Err(Error::invalid(message).at("rows"));
        }
        // SAFETY: the bytes are readable until the next call, which borrows `self` again.
        unsafe { prefix::bytes(bytes.cast(), length, "rows") }.map(Cow::Borrowed)
    }
}

unsafe extern "C" fn prepack(
    device: *mut dsr_device,
    stream: *mut dsr_stream,
    weight: *const dsr_weight_desc,
    rows: *const dsr_row_reader,
    packed: *mut *mut dsr_weight,
) -> *mut dsr_status {
    // SAFETY: the caller passes our device and stream, a description, a reader, and a place for the weight.
    returned(|| unsafe {
        prefix::check_out(packed, "packed")?;
        let (device, weight) = (object::<Arc<dyn Device>>(device)?, decode::weight(weight)?);
        let weight_type = weight.weight_type.clone();
        let row_bytes = weight_type.row_bytes()?;
        let mut rows = Rows { raw: prefix::read(rows)?, host: host()?, weight_type, row_bytes };
        let made = with_stream(stream, |stream| device.kernels().prepack(stream, &weight, &mut rows))?;
        prefix::put(packed, "packed", hand_out(made))
    })
}

unsafe extern "C" fn copy_packed(
    device: *mut dsr_device,
    stream: *mut dsr_stream,
    weight: *mut dsr_weight,
    destination: *const dsr_slice,
) -> *mut dsr_status {
    // SAFETY: the caller passes our device, stream and weight, and a range of our buffer.
    returned(|| unsafe {
        let (device, weight) = (object::<Arc<dyn Device>>(device)?, object::<Arc<dyn PackedWeight>>(weight)?);
        let destination = range(destination, "destination")?;
        with_stream(stream, |stream| device.kernels().copy_packed(stream, weight, &destination))
    })
}

unsafe extern "C" fn adopt(
    device: *mut dsr_device,
    weight: *const dsr_weight_desc,
    memory: *const dsr_slice,
    packed: *mut *mut dsr_weight,
) -> *mut dsr_status {
    // SAFETY: the caller passes our device, a description, a range of our buffer, and a place for the weight.
    returned(|| unsafe {
        prefix::check_out(packed, "packed")?;
        let (device, weight) = (object::<Arc<dyn Device>>(device)?, decode::weight(weight)?);
        let made = device.kernels().adopt(&weight, &range(memory, "memory")?)?;
        prefix::put(packed, "packed", hand_out(made))
    })
}

unsafe extern "C" fn weight_bytes(weight: *mut dsr_weight) -> u64 {
    // SAFETY: the caller passes our weight.
    value_or(0, || Ok(unsafe { object::<Arc<dyn PackedWeight>>(weight) }?.bytes() as u64))
}

unsafe extern "C" fn weight_free(weight: *mut dsr_weight) {
    // SAFETY: the caller passes our weight, once.
    unsafe { give_back::<Arc<dyn PackedWeight>>(weight) }
}

unsafe extern "C" fn plan(
    device: *mut dsr_device,
    call: *const dsr_call_desc,
    plan: *mut *mut dsr_plan,
) -> *mut dsr_status {
    // SAFETY: the caller passes our device, a description, and a place for the plan; the group outlives the plan.
    returned(|| unsafe {
        prefix::check_out(plan, "plan")?;
        let (device, call) = (object::<Arc<dyn Device>>(device)?, call_desc(call)?);
        prefix::put(plan, "plan", hand_out(CheckedPlan::new(&**device, call)?))
    })
}

unsafe extern "C" fn plan_free(plan: *mut dsr_plan) {
    // SAFETY: the caller passes our plan, once.
    unsafe { give_back::<CheckedPlan>(plan) }
}

unsafe extern "C" fn plan_workspace(plan: *mut dsr_plan) -> u64 {
    // SAFETY: the caller passes our plan.
    value_or(0, || Ok(unsafe { object::<CheckedPlan>(plan) }?.workspace_bytes() as u64))
}

unsafe extern "C" fn bind(
    plan: *mut dsr_plan,
    arguments: *const dsr_arguments,
    call: *mut *mut dsr_call,
) -> *mut dsr_status {
    // SAFETY: the caller passes our plan, arguments whose handles are ours, and a place for the call.
    returned(|| unsafe {
        prefix::check_out(call, "call")?;
        let plan = object::<CheckedPlan>(plan)?;
        let arguments = decode::arguments(arguments, plan.call(), &mut Ours)?;
        let bound: SharedCall = Arc::new(Mutex::new(plan.bind(&arguments)?));
        prefix::put(call, "call", hand_out(bound))
    })
}

unsafe extern "C" fn enqueue(call: *mut dsr_call, stream: *mut dsr_stream) -> *mut dsr_status {
    // SAFETY: the caller passes our call and stream.
    returned(|| unsafe {
        let call = exclusive(object::<SharedCall>(call)?, "call")?;
        with_stream(stream, |stream| call.enqueue(stream))
    })
}

unsafe extern "C" fn call_free(call: *mut dsr_call) {
    // SAFETY: the caller passes our call, once.
    unsafe { give_back::<SharedCall>(call) }
}
