//! A rank: a program that is bound to the memory of a device.

use crate::{Result, network::Network};
use dsrun_core::{
    TensorDesc, WeightFormat, WeightReader,
    checked::CheckedPlan,
    collective::Comm,
    device::{BufferSlice, Device, MemoryKind, Stream},
    kernels::{Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc, PackedWeight, WeightDesc},
    op::{Op, OperandType},
    program::{Origin, Program, ValueId},
};
use dsrun_models::weights::ExprReader;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A round of all micro-batches on a rank.
pub(crate) struct Measured {
    /// The time of the round.
    pub(crate) seconds: f64,
    /// The time in which the rank did not wait for the previous stage.
    pub(crate) busy: f64,
    /// The outputs of the last micro-batch, if the rank has them.
    pub(crate) outputs: Vec<f32>,
}

/// A program that is bound to the memory of a device.
pub(crate) struct Rank {
    stream: Box<dyn Stream>,
    /// The calls, and whether each waits for the previous stage.
    calls: Vec<(bool, Box<dyn BoundCall>)>,
    inputs: Vec<u8>,
    input: Option<BufferSlice>,
    output: Option<BufferSlice>,
}

impl Rank {
    pub(crate) fn new(
        program: &Program,
        network: &Network,
        device: Arc<dyn Device>,
        comm: Option<Arc<dyn Comm>>,
    ) -> Result<Self> {
        let mut stream = device.stream()?;
        let mut tensors: HashMap<ValueId, BufferSlice> = HashMap::new();
        let mut weights: HashMap<ValueId, Arc<dyn PackedWeight>> = HashMap::new();
        let describe = |id: ValueId| -> Result<TensorDesc> {
            let tensor = program.value(id)?.tensor_type().ok_or("a weight is no tensor")?;
            Ok(TensorDesc::dense(tensor.dtype, &tensor.resolve(&|_| None)?))
        };
        for (index, value) in program.values.iter().enumerate() {
            let id = ValueId::new(index);
            match (&value.origin, &value.value_type) {
                (Origin::Weight(expr), OperandType::Weight(weight)) => {
                    let mut reader = ExprReader::new(&network.weights, expr)?.stored_as(weight.format)?;
                    let desc = WeightDesc { weight_type: weight.clone(), immutable: true };
                    weights.insert(id, device.kernels().prepack(&mut *stream, &desc, &mut reader)?);
                }
                (Origin::Weight(expr), OperandType::Tensor(tensor)) => {
                    let reader = ExprReader::new(&network.weights, expr)?;
                    let mut reader = reader.stored_as(WeightFormat::Dense(tensor.dtype))?;
                    let rows = reader.weight_type().rows();
                    let bytes = reader.rows(0, rows)?.into_owned();
                    let slice = BufferSlice::whole(device.allocate(bytes.len(), MemoryKind::Device)?);
                    stream.upload(&bytes, &slice)?;
                    tensors.insert(id, slice);
                }
                _ => {
                    let bytes = describe(id)?.bytes()?.max(1);
                    let slice = BufferSlice::whole(device.allocate(bytes, MemoryKind::Device)?);
                    tensors.insert(id, slice);
                }
            }
        }
        let mut calls = Vec::new();
        for node in &program.nodes {
            let call = &node.call;
            for (index, result) in call.results.iter().enumerate() {
                // A received value is in the memory of the operand that it updates.
                if let Some(updated) = call.op.updates(index).and_then(|operand| call.operands[operand]) {
                    tensors.insert(*result, tensors[&updated].clone());
                }
            }
            let operand = |id: &Option<ValueId>| -> Result<(Option<OperandDesc>, Option<Argument>)> {
                let Some(id) = *id else { return Ok((None, None)) };
                Ok(match &program.value(id)?.value_type {
                    OperandType::Weight(weight) => (
                        Some(OperandDesc::Weight(weight.clone())),
                        Some(Argument::Weight(weights[&id].clone())),
                    ),
                    OperandType::Tensor(_) => (
                        Some(OperandDesc::Tensor(describe(id)?)),
                        Some(Argument::Tensor(Binding::new(tensors[&id].clone()))),
                    ),
                })
            };
            let operands = call.operands.iter().map(operand).collect::<Result<Vec<_>>>()?;
            let (operands, arguments) = operands.into_iter().unzip();
            let results = call.results.iter().map(|id| describe(*id)).collect::<Result<_>>()?;
            let comm = comm.clone().filter(|_| call.op.mesh_axis().is_some());
            let desc = CallDesc { op: call.op.clone(), operands, results, comm }.validate()?;
            let results = call.results.iter().map(|id| Binding::new(tensors[id].clone())).collect();
            let arguments = Arguments { operands: arguments, results, workspace: None };
            let bound = CheckedPlan::new(&*device, desc)?.bind(&arguments)?;
            calls.push((matches!(call.op, Op::Receive(_)), bound));
        }
        // Only the first stage reads the inputs.
        let reads = |id: ValueId| program.nodes.iter().any(|node| node.call.operands.contains(&Some(id)));
        let input = program.values_from(|origin| *origin == Origin::Input).find(|(id, _)| reads(*id));
        let features = network.rows * network.inputs;
        let inputs = (0..features).flat_map(|i| (((i * 37) % 256) as f32 / 255.0).to_le_bytes()).collect();
        // Only the last stage has outputs; those of others are the values that they receive.
        let output = program.outputs.first().filter(|id| {
            let sends = program.nodes.iter().any(|node| matches!(node.call.op, Op::Send(_)));
            !sends && tensors.contains_key(id)
        });
        let (input, output) =
            (input.map(|(id, _)| tensors[&id].clone()), output.map(|id| tensors[id].clone()));
        Ok(Self { stream, calls, inputs, input, output })
    }

    /// Computes `count` micro-batches.
    pub(crate) fn run(&mut self, count: usize) -> Result<Measured> {
        let (start, mut waited) = (Instant::now(), Duration::ZERO);
        for _ in 0..count {
            if let Some(input) = &self.input {
                self.stream.upload(&self.inputs, input)?;
            }
            for (waits, call) in &self.calls {
                let before = Instant::now();
                call.enqueue(&mut *self.stream)?;
                if *waits {
                    waited += before.elapsed();
                }
            }
        }
        self.stream.synchronize("a round", TIMEOUT)?;
        let elapsed = start.elapsed();
        let mut outputs = Vec::new();
        if let Some(output) = &self.output {
            let mut bytes = vec![0; output.bytes];
            self.stream.download(output, &mut bytes, "the outputs", TIMEOUT)?;
            outputs = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        }
        Ok(Measured {
            seconds: elapsed.as_secs_f64(),
            busy: elapsed.saturating_sub(waited).as_secs_f64(),
            outputs,
        })
    }
}
