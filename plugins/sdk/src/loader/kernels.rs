//! Ops of a plugin: weights, plans and bound calls.

use super::{
    device::PluginDevice,
    group::PluginComm,
    open_device::{OpenDevice, slice},
    plugin::{Health, Plugin, Raw, call, free},
    stream::PluginStream,
};
use crate::{
    comm::OfferedTransport,
    encode::{self, EncodedCall, NO_SLICE},
    host::TextSink,
    prefix,
    raw::*,
    status,
};
use dsrun_core::{
    Error, Result, WeightReader, WeightType,
    checked::{ValidArguments, ValidCall, ValidOperand},
    collective::Comm,
    device::{BufferSlice, Stream},
    kernels::{
        Arguments, Binding, BoundCall, CallDesc, Kernels, PackedLayout, PackedWeight, Plan, Support,
        WeightDesc,
    },
};
use std::{any::Any, borrow::Cow, ffi::c_void, ptr, sync::Arc};

/// The group of a call in the form that the plugin takes.
#[derive(Debug, Default)]
pub(super) struct Group {
    comm: Option<Arc<dyn Comm>>,
    transport: Option<Box<OfferedTransport>>,
}

impl PluginDevice {
    /// A group of the plugin as its handle, and a group of the host as a transport.
    pub(super) fn group(&self, call: &CallDesc) -> Result<Group> {
        let Some(comm) = &call.comm else { return Ok(Group::default()) };
        let transport = match PluginComm::of(&**comm, &self.open.plugin) {
            Some(_) => None,
            None => Some(OfferedTransport::new(comm.clone()).map_err(|error| error.in_op(call.op.name()))?),
        };
        Ok(Group { comm: Some(comm.clone()), transport })
    }

    pub(super) fn raw_call(&self, call: &EncodedCall, group: &Group) -> dsr_call_desc {
        let own = group.comm.as_ref().and_then(|comm| PluginComm::of(&**comm, &self.open.plugin));
        let comm = own.map_or(ptr::null_mut(), |comm| comm.handle.get());
        let transport = group.transport.as_ref().map_or(ptr::null(), |transport| transport.as_raw());
        call.with_group(comm, transport)
    }

    fn call(&self, run: impl FnOnce(&dsr_op_api, *mut dsr_device) -> Result<*mut dsr_status>) -> Result<()> {
        self.open.health.call("device", || run(&self.open.plugin.tables.op, self.open.handle.get()))
    }

    /// A weight that the plugin has returned.
    fn packed(
        &self,
        handle: *mut dsr_weight,
        weight: &WeightDesc,
        memory: Option<BufferSlice>,
    ) -> Result<Arc<dyn PackedWeight>> {
        let mut packed = PluginWeight {
            handle: Raw::new(handle, "weight")?,
            weight_type: weight.weight_type.clone(),
            bytes: 0,
            open: self.open.clone(),
            _memory: memory,
        };
        let table = &self.open.plugin.tables.op;
        packed.bytes = prefix::size(call!(table, weight_bytes(packed.handle.get())), "bytes")?;
        Ok(Arc::new(packed))
    }
}

impl Kernels for PluginDevice {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        let (encoded, group) = (EncodedCall::new(call)?, self.group(call)?);
        let desc = self.raw_call(&encoded, &group);
        let mut reason = TextSink::default();
        let mut raw = dsr_support { reason: reason.as_raw(), ..prefix::zeroed() };
        let support = &raw mut raw;
        self.call(|table, device| Ok(call!(table, query(device, &raw const desc, support))))?;
        let has = |flag| raw.flags & flag != 0;
        Ok(Support {
            native: has(DSR_SUPPORT_NATIVE),
            reason: reason.into_text(),
            workspace_bytes: prefix::size(raw.workspace_bytes, "workspace_bytes")?,
            persistent_bytes: prefix::size(raw.persistent_bytes, "persistent_bytes")?,
            work_words: prefix::size(raw.work_words, "work_words")?,
            capture_safe: has(DSR_SUPPORT_CAPTURE_SAFE),
            batch_invariant: has(DSR_SUPPORT_BATCH_INVARIANT),
        })
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        let desc = encode::weight_desc(weight)?;
        let mut name = TextSink::default();
        let mut raw = dsr_packed_layout { name: name.as_raw(), ..prefix::zeroed() };
        let layout = &raw mut raw;
        self.call(|table, device| Ok(call!(table, prepack_query(device, &raw const desc, layout))))?;
        Ok(PackedLayout {
            bytes: prefix::size(raw.bytes, "bytes")?,
            name: name.into_text(),
            relocatable: raw.flags & DSR_PACKED_RELOCATABLE != 0,
            readable_when_pinned: raw.flags & DSR_PACKED_READABLE_WHEN_PINNED != 0,
        })
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        if *rows.weight_type() != weight.weight_type {
            let message = format!("gives {}, must give {}", rows.weight_type(), weight.weight_type);
            return Err(Error::invalid(message).at("rows"));
        }
        let stream = PluginStream::of(stream, &self.open.plugin)?;
        stream.health.check("stream")?;
        let desc = encode::weight_desc(weight)?;
        let mut source = RowSource { rows, given: Vec::new() };
        let reader =
            dsr_row_reader { context: (&raw mut source).cast(), rows: Some(give_rows), ..prefix::zeroed() };
        let mut handle = ptr::null_mut();
        let (stream, desc) = (stream.handle.get(), &raw const desc);
        self.call(|table, device| {
            Ok(call!(table, prepack(device, stream, desc, &raw const reader, &raw mut handle)))
        })?;
        self.packed(handle, weight, None)
    }

    fn copy_packed(
        &self,
        stream: &mut dyn Stream,
        weight: &Arc<dyn PackedWeight>,
        destination: &BufferSlice,
    ) -> Result<()> {
        if self.open.plugin.tables.op.copy_packed.is_none() {
            return Err(Error::unsupported("the plugin cannot copy packed weights"));
        }
        let any: &dyn Any = &**weight;
        let weight = any.downcast_ref::<PluginWeight>();
        let weight = weight.filter(|weight| Arc::ptr_eq(&weight.open.plugin, &self.open.plugin));
        let weight = weight.ok_or_else(|| Error::invalid("belongs to another backend").at("weight"))?;
        let stream = PluginStream::of(stream, &self.open.plugin)?;
        stream.health.check("stream")?;
        let destination = slice(&self.open.plugin, destination).map_err(|error| error.at("destination"))?;
        let (stream, weight, destination) =
            (stream.handle.get(), weight.handle.get(), &raw const destination);
        self.call(|table, device| Ok(call!(table, copy_packed(device, stream, weight, destination))))
    }

    fn adopt(&self, weight: &WeightDesc, memory: &BufferSlice) -> Result<Arc<dyn PackedWeight>> {
        if self.open.plugin.tables.op.adopt.is_none() {
            return Err(Error::unsupported("the plugin cannot adopt packed weights"));
        }
        let desc = encode::weight_desc(weight)?;
        let range = slice(&self.open.plugin, memory).map_err(|error| error.at("memory"))?;
        let (desc, range) = (&raw const desc, &raw const range);
        let mut handle = ptr::null_mut();
        self.call(|table, device| Ok(call!(table, adopt(device, desc, range, &raw mut handle))))?;
        self.packed(handle, weight, Some(memory.clone()))
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let (encoded, group) = (EncodedCall::new(call)?, self.group(call)?);
        let desc = self.raw_call(&encoded, &group);
        let mut handle = ptr::null_mut();
        self.call(|table, device| Ok(call!(table, plan(device, &raw const desc, &raw mut handle))))?;
        let mut plan = PluginPlan {
            handle: Raw::new(handle, "plan")?,
            workspace_bytes: 0,
            health: Health::default(),
            _group: group,
            open: self.open.clone(),
        };
        let table = &self.open.plugin.tables.op;
        let workspace: u64 = call!(table, plan_workspace(plan.handle.get()));
        plan.workspace_bytes = prefix::size(workspace, "workspace")?;
        Ok(Arc::new(plan))
    }
}

/// The rows of a weight, for a plugin that packs them.
struct RowSource<'a> {
    rows: &'a mut dyn WeightReader,
    /// Rows that the reader owns and does not borrow.
    given: Vec<u8>,
}

unsafe extern "C" fn give_rows(
    context: *mut c_void,
    first: u64,
    count: u64,
    bytes: *mut *const c_void,
    length: *mut usize,
) -> *mut dsr_status {
    status::returned(|| {
        prefix::check_out(bytes, "bytes")?;
        prefix::check_out(length, "length")?;
        // SAFETY: the context is on the stack of `prepack` until that returns, and the plugin calls from one thread at a time.
        let source = unsafe { context.cast::<RowSource<'_>>().as_mut() };
        let source = source.ok_or_else(|| Error::invalid("is null").at("context"))?;
        let (first, count) = (prefix::size(first, "first")?, prefix::size(count, "count")?);
        // Borrowed rows are valid until the next call of the reader.
        let rows = match source.rows.rows(first, count)? {
            Cow::Borrowed(rows) => rows,
            Cow::Owned(rows) => {
                source.given = rows;
                &source.given
            }
        };
        // SAFETY: output parameters of the plugin.
        unsafe {
            prefix::put(bytes, "bytes", rows.as_ptr().cast())?;
            prefix::put(length, "length", rows.len())
        }
    })
}

/// A packed weight of a plugin.
#[derive(Debug)]
struct PluginWeight {
    handle: Raw<dsr_weight>,
    weight_type: WeightType,
    bytes: usize,
    open: Arc<OpenDevice>,
    /// The memory of an adopted weight, kept alive.
    _memory: Option<BufferSlice>,
}

impl Drop for PluginWeight {
    fn drop(&mut self) {
        free!(self.open.plugin.tables.op, weight_free, self.handle);
    }
}

impl PackedWeight for PluginWeight {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A plan of a plugin.
#[derive(Debug)]
struct PluginPlan {
    handle: Raw<dsr_plan>,
    workspace_bytes: usize,
    health: Health,
    /// Kept alive, because the plan may use it as long as it lives.
    _group: Group,
    open: Arc<OpenDevice>,
}

impl Drop for PluginPlan {
    fn drop(&mut self) {
        free!(self.open.plugin.tables.op, plan_free, self.handle);
    }
}

impl PluginPlan {
    fn binding(&self, binding: &Binding) -> Result<dsr_argument> {
        let one = |range| slice(&self.open.plugin, range);
        let extent = binding.extent.as_ref().map(one).transpose().map_err(|error| error.field("extent"))?;
        Ok(dsr_argument {
            kind: DSR_OPERAND_TENSOR,
            reserved: 0,
            slice: one(&binding.slice)?,
            extent: extent.unwrap_or(NO_SLICE),
            weight: ptr::null_mut(),
        })
    }

    fn operand(&self, operand: Option<ValidOperand<'_>>) -> Result<dsr_argument> {
        let absent = dsr_argument {
            kind: DSR_OPERAND_ABSENT,
            reserved: 0,
            slice: NO_SLICE,
            extent: NO_SLICE,
            weight: ptr::null_mut(),
        };
        match operand {
            None => Ok(absent),
            Some(ValidOperand::Tensor(_, binding)) => self.binding(binding),
            Some(ValidOperand::Weight(weight)) => {
                let any: &dyn Any = &**weight;
                match any.downcast_ref::<PluginWeight>() {
                    Some(weight) if Arc::ptr_eq(&weight.open.plugin, &self.open.plugin) => {
                        Ok(dsr_argument { kind: DSR_OPERAND_WEIGHT, weight: weight.handle.get(), ..absent })
                    }
                    _ => Err(Error::invalid("is a weight of another backend").field("weight")),
                }
            }
        }
    }
}

impl Plan for PluginPlan {
    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    fn bind(self: Arc<Self>, valid: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let (call, arguments) = (valid.call(), valid.arguments());
        let operand =
            |(index, operand)| self.operand(operand).map_err(|error| error.at(&call.operand_name(index)));
        let operands = valid.operands().enumerate().map(operand).collect::<Result<Vec<_>>>()?;
        let result = |(index, (_, binding)): (usize, (_, &Binding))| {
            self.binding(binding).map_err(|error| error.at(&call.result_name(index)))
        };
        let results = valid.results().enumerate().map(result).collect::<Result<Vec<_>>>()?;
        let workspace = arguments.workspace.as_ref().map(|range| slice(&self.open.plugin, range));
        let too_many = |_| Error::invalid("are more than the ABI can count").at("operands");
        let raw = dsr_arguments {
            operands: operands.as_ptr(),
            operand_count: u32::try_from(operands.len()).map_err(too_many)?,
            results: results.as_ptr(),
            result_count: u32::try_from(results.len()).map_err(too_many)?,
            workspace: workspace.transpose().map_err(|error| error.at("workspace"))?.unwrap_or(NO_SLICE),
            ..prefix::zeroed()
        };
        let table = &self.open.plugin.tables.op;
        let mut handle = ptr::null_mut();
        self.health
            .call("plan", || Ok(call!(table, bind(self.handle.get(), &raw const raw, &raw mut handle))))?;
        let handle = Raw::new(handle, "call")?;
        let _arguments = arguments.clone();
        Ok(Box::new(PluginCall { handle, health: Health::default(), _arguments, plan: self.clone() }))
    }
}

/// A bound call of a plugin.
#[derive(Debug)]
pub(super) struct PluginCall {
    pub(super) handle: Raw<dsr_call>,
    health: Health,
    /// Kept alive, because the plugin may use them as long as the call lives.
    _arguments: Arguments,
    plan: Arc<PluginPlan>,
}

impl PluginCall {
    pub(super) fn is_of(&self, plugin: &Arc<Plugin>) -> bool {
        Arc::ptr_eq(&self.plan.open.plugin, plugin)
    }
}

impl Drop for PluginCall {
    fn drop(&mut self) {
        free!(self.plan.open.plugin.tables.op, call_free, self.handle);
    }
}

impl BoundCall for PluginCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        let plugin = &self.plan.open.plugin;
        let stream = PluginStream::of(stream, plugin)?;
        let table = &plugin.tables.op;
        // After a panic the state of both is unknown.
        self.health.call("call", || {
            stream
                .health
                .call("stream", || Ok(call!(table, enqueue(self.handle.get(), stream.handle.get()))))?;
            Ok(ptr::null_mut())
        })
    }
}
