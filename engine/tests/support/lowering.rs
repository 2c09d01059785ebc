//! A test device that admits all regions and runs their bodies op by op, so that a fused program computes exactly the values of
//! the primitives.

use super::device;
use dsrun_core::{
    Error, Result, TensorDesc, WeightReader,
    checked::CheckedPlan,
    device::{Buffer, BufferSlice, Device, DeviceProperties, Event, MemoryKind, MemoryUse, Stream},
    kernels::{
        Argument, Arguments, Binding, BoundCall, CallDesc, Kernels, OperandDesc, PackedLayout, PackedWeight,
        Plan, Support, WeightDesc,
    },
    op::{Op, OperandType},
    region::Region,
};
use std::sync::{Arc, Mutex};

/// The reference device with support for regions.
#[derive(Debug)]
pub(crate) struct LoweringDevice {
    inner: Arc<dyn Device>,
    /// The names of the planned regions.
    planned: Mutex<Vec<String>>,
}

impl LoweringDevice {
    pub(crate) fn open() -> Arc<Self> {
        Arc::new(Self { inner: device(), planned: Mutex::default() })
    }

    /// The names of the planned regions in order.
    pub(crate) fn planned(&self) -> Vec<String> {
        self.planned.lock().expect("no test panicked").clone()
    }
}

impl Device for LoweringDevice {
    fn properties(&self) -> &DeviceProperties {
        self.inner.properties()
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        self.inner.allocate(bytes, kind)
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        self.inner.stream()
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        self.inner.event()
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }
}

/// The calls of a body with their descriptions, and the places of their results in the workspace; `None` for results of the
/// region itself and for updated operands.
struct Body {
    calls: Vec<CallDesc>,
    workspace: usize,
    /// The description and place of each internal value.
    values: Vec<(TensorDesc, Option<usize>)>,
}

fn body(region: &Region, call: &CallDesc) -> Result<Body> {
    let mut types = call.operand_types();
    let mut descs: Vec<Option<OperandDesc>> = call.operands.clone();
    let rows = call.results.first().map(|result| result.bounded).unwrap_or_default();
    let (mut calls, mut values, mut workspace) = (Vec::new(), Vec::new(), 0);
    for inner in region.calls() {
        let of = |id: &Option<dsrun_core::program::ValueId>| id.map(|id| id.index());
        let operands: Vec<Option<usize>> = inner.operands.iter().map(of).collect();
        let operand_types: Vec<_> =
            operands.iter().map(|index| index.and_then(|index| types[index].clone())).collect();
        let mut results = Vec::new();
        for (index, (result, id)) in
            inner.op.infer(&operand_types)?.into_iter().zip(&inner.results).enumerate()
        {
            let updated = inner.op.updates(index).and_then(|operand| operands[operand]);
            let outer = region.results().iter().position(|result| result == id);
            let (desc, place) = match (updated.map(|updated| &descs[updated]), outer) {
                (Some(Some(OperandDesc::Tensor(desc))), _) => (desc.clone(), None),
                (_, Some(outer)) => (call.results[outer].clone(), None),
                _ => {
                    let shape = result.resolve(&|_| None)?;
                    let mut desc = TensorDesc::dense(result.dtype, &shape);
                    desc.bounded = rows;
                    let place = workspace;
                    workspace = (workspace + desc.bytes()?.max(1)).next_multiple_of(256);
                    (desc, Some(place))
                }
            };
            types.push(Some(OperandType::Tensor(result)));
            descs.push(Some(OperandDesc::Tensor(desc.clone())));
            results.push(desc.clone());
            values.push((desc, place));
        }
        let operands =
            operands.into_iter().map(|index| index.and_then(|index| descs[index].clone())).collect();
        calls.push(CallDesc { op: inner.op.clone(), operands, results, comm: None });
    }
    Ok(Body { calls, workspace, values })
}

impl Kernels for LoweringDevice {
    fn query(&self, call: &CallDesc) -> Result<Support> {
        let Op::Region(region) = &call.op else { return self.inner.kernels().query(call) };
        call.validate()?;
        let body = body(region, call)?;
        for inner in &body.calls {
            let support = self.inner.kernels().query(inner)?;
            assert!(support.native && support.workspace_bytes == 0, "the reference runs all primitives");
        }
        Ok(Support { workspace_bytes: body.workspace, ..Support::native() })
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        assert!(weight.uses.iter().all(|weight_use| ["linear", "embed"].contains(&weight_use.op)));
        self.inner.kernels().prepack_query(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        self.inner.kernels().prepack(stream, weight, rows)
    }

    fn plan(&self, call: &CallDesc) -> Result<Arc<dyn Plan>> {
        let Op::Region(region) = &call.op else { return self.inner.kernels().plan(call) };
        let body = body(region, call)?;
        let plans = body.calls.iter().map(|call| CheckedPlan::new(&*self.inner, call.clone()));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        self.planned.lock().expect("no test panicked").push(region.name().to_owned());
        Ok(Arc::new(LoweringPlan {
            region: region.clone(),
            plans,
            values: body.values,
            workspace: body.workspace,
        }))
    }
}

#[derive(Debug)]
struct LoweringPlan {
    region: Arc<Region>,
    plans: Vec<CheckedPlan>,
    values: Vec<(TensorDesc, Option<usize>)>,
    workspace: usize,
}

impl Plan for LoweringPlan {
    fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    fn bind(self: Arc<Self>, arguments: &Arguments) -> Result<Box<dyn BoundCall>> {
        let workspace = arguments.workspace.as_ref().ok_or_else(|| Error::internal("no workspace"))?;
        let extent = arguments.results.first().and_then(|result| result.extent.clone());
        let mut values: Vec<Option<Argument>> = arguments.operands.clone();
        let mut made = self.values.iter();
        let mut calls = Vec::new();
        for (plan, inner) in self.plans.iter().zip(self.region.calls()) {
            let operands: Vec<_> =
                inner.operands.iter().map(|id| id.and_then(|id| values[id.index()].clone())).collect();
            let mut results = Vec::new();
            for (index, id) in inner.results.iter().enumerate() {
                let (desc, place) = made.next().ok_or_else(|| Error::internal("no value"))?;
                let outer = self.region.results().iter().position(|result| result == id);
                let updated = inner.op.updates(index).and_then(|operand| operands[operand].clone());
                let binding = match (updated, outer, place) {
                    (Some(Argument::Tensor(binding)), ..) => binding,
                    (_, Some(outer), _) => arguments.results[outer].clone(),
                    (_, _, Some(place)) => {
                        let slice: BufferSlice = workspace.slice(*place, desc.bytes()?)?;
                        Binding { slice, extent: extent.clone().filter(|_| desc.bounded) }
                    }
                    _ => return Err(Error::internal("a value without a place")),
                };
                values.push(Some(Argument::Tensor(binding.clone())));
                results.push(binding);
            }
            calls.push(plan.bind(&Arguments { operands, results, workspace: None })?);
        }
        Ok(Box::new(LoweringCall { calls }))
    }
}

#[derive(Debug)]
struct LoweringCall {
    calls: Vec<Box<dyn BoundCall>>,
}

impl BoundCall for LoweringCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        self.calls.iter().try_for_each(|call| call.enqueue(stream))
    }
}
