//! The programs of all ranks, run by threads, compute the logits of the whole program.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{
    BlockFormat, DType, GroupFormat, Size, TensorDesc, WeightFormat, WeightReader,
    checked::CheckedPlan,
    collective::{Comm, host::HostComm},
    device::{Backend, BufferSlice, Device, DeviceOptions, MemoryKind},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, PackedWeight, WeightDesc},
    op::{Op, OperandType},
    program::{Origin, Program, ValueId},
};
use dsrun_engine::passes::{
    quantize::{Policy, Scheme, quantize},
    shard::{MeshCosts, ShardPolicy, shard},
    size_work_lists,
};
use dsrun_models::{
    model::Model,
    step::{ProgramOptions, Storage},
    weights::ExprReader,
};
use rstest::rstest;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};
use support::{difference, fixtures};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Tokens of the two sequences of the step.
const LENGTHS: [usize; 2] = [5, 3];

/// Tolerance of the logits, as for one device: f32 sums differ by their order.
const TOLERANCE: f32 = 1e-4;

fn sizes(name: &str) -> Option<usize> {
    Some(match name {
        "tokens" | "rows" => LENGTHS.iter().sum(),
        "sequences" | "requests" => LENGTHS.len(),
        "blocks" => 1,
        "pages" => LENGTHS.len(),
        "stop_ids" => 1,
        _ => return None,
    })
}

/// The content of an input or state: two prompts, all of whose logits are computed, each on a page of its own.
fn content(name: &str, vocabulary: usize) -> Option<Vec<i32>> {
    let tokens: i32 = LENGTHS.iter().sum::<usize>() as i32;
    Some(match name {
        "step_request" | "block_table" => vec![0, 1],
        "step_length" => LENGTHS.map(|length| length as i32).to_vec(),
        "step_source" => vec![0, LENGTHS[0] as i32],
        "prompt_ids" => (0..tokens).map(|token| (token * 7 + 3) % vocabulary as i32).collect(),
        "rows" => (0..tokens).collect(),
        _ => return None,
    })
}

/// The values of a program on a device.
struct Memory<'a> {
    program: &'a Program,
    device: Arc<dyn Device>,
    tensors: HashMap<ValueId, BufferSlice>,
    weights: HashMap<ValueId, Arc<dyn PackedWeight>>,
}

impl Memory<'_> {
    fn desc(&self, id: ValueId) -> TensorDesc {
        let tensor = self.program.value(id).unwrap().tensor_type().unwrap();
        let desc = TensorDesc::dense(tensor.dtype, &tensor.resolve(&sizes).unwrap());
        let bounded = matches!(tensor.shape.first(), Some(Size::Bounded(_)));
        if bounded { desc.with_extent() } else { desc }
    }

    fn tensor(&mut self, id: ValueId) -> BufferSlice {
        let bytes = self.desc(id).bytes().unwrap().max(1);
        let device = &self.device;
        let allocate = || BufferSlice::whole(device.allocate(bytes, MemoryKind::Device).unwrap());
        self.tensors.entry(id).or_insert_with(allocate).clone()
    }
}

/// Runs the segment up to the logits, and returns these.
fn logits(program: &Program, model: &Model, comm: Option<Arc<dyn Comm>>) -> Vec<f32> {
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    let device = dsrun_cpu::CpuBackend::new().open(0, &options).unwrap();
    let mut program = program.clone();
    size_work_lists(&mut program, &*device, &sizes).unwrap();
    let mut stream = device.stream().unwrap();
    let (tensors, weights) = (HashMap::new(), HashMap::new());
    let mut memory = Memory { program: &program, device: device.clone(), tensors, weights };
    for (index, value) in program.values.iter().enumerate() {
        let id = ValueId::new(index);
        match (&value.origin, &value.value_type) {
            (Origin::Weight(expr), OperandType::Weight(weight)) => {
                let reader = ExprReader::new(&**model.weights(), expr).unwrap();
                let mut reader = reader.stored_as(weight.format).unwrap();
                let desc = WeightDesc { weight_type: weight.clone(), immutable: true };
                let packed = device.kernels().prepack(&mut *stream, &desc, &mut reader).unwrap();
                memory.weights.insert(id, packed);
            }
            (Origin::Weight(expr), OperandType::Tensor(tensor)) => {
                let reader = ExprReader::new(&**model.weights(), expr).unwrap();
                let mut reader = reader.stored_as(WeightFormat::Dense(tensor.dtype)).unwrap();
                let rows = reader.weight_type().rows();
                let bytes = reader.rows(0, rows).unwrap().into_owned();
                let slice = memory.tensor(id).slice(0, bytes.len()).unwrap();
                stream.upload(&bytes, &slice).unwrap();
            }
            (Origin::Input | Origin::State, _) => {
                let slice = memory.tensor(id);
                let found = content(&value.name, model.config().vocabulary);
                match found {
                    Some(values) => stream.upload(bytemuck::cast_slice(&values), &slice).unwrap(),
                    None if value.origin == Origin::Input => stream.fill(&slice, 0xFF).unwrap(),
                    None => {}
                }
            }
            (Origin::Node(_), _) => {}
        }
    }
    let forward = program.segments.iter().position(|segment| segment.name == "forward").unwrap();
    for node in program.nodes.iter().filter(|node| node.segment == forward) {
        let call = &node.call;
        for (index, result) in call.results.iter().enumerate() {
            if let Some(updated) = call.op.updates(index).and_then(|operand| call.operands[operand]) {
                let slice = memory.tensor(updated);
                memory.tensors.insert(*result, slice);
            }
        }
        let (mut operands, mut arguments) = (Vec::new(), Vec::new());
        for id in &call.operands {
            let pair = id.map(|id| match &program.value(id).unwrap().value_type {
                OperandType::Weight(weight) => {
                    (OperandDesc::Weight(weight.clone()), Argument::Weight(memory.weights[&id].clone()))
                }
                OperandType::Tensor(_) => {
                    let binding = Binding::new(memory.tensor(id));
                    (OperandDesc::Tensor(memory.desc(id)), Argument::Tensor(binding))
                }
            });
            let (desc, argument) = pair.unzip();
            operands.push(desc);
            arguments.push(argument);
        }
        let results: Vec<TensorDesc> = call.results.iter().map(|id| memory.desc(*id)).collect();
        let comm = comm.clone().filter(|_| call.op.mesh_axis().is_some());
        let desc = CallDesc { op: call.op.clone(), operands, results, comm }.validate().unwrap();
        let plan = CheckedPlan::new(&*device, desc).unwrap();
        let results = call.results.iter().map(|id| Binding::new(memory.tensor(*id))).collect();
        let arguments = Arguments { operands: arguments, results, workspace: None };
        plan.bind(&arguments).unwrap().enqueue(&mut *stream).unwrap();
    }
    let slice = memory.tensor(program.outputs[0]);
    let mut bytes = vec![0; slice.bytes];
    stream.download(&slice, &mut bytes, "the logits", TIMEOUT).unwrap();
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Compares the logits of every rank with those of the whole program. Returns whether ranks exchange anything.
fn compare(name: &str, program: &Program, model: &Model, ranks: usize) -> bool {
    let programs = compare_with(&ShardPolicy::default(), name, program, model, ranks);
    programs[0].nodes.iter().any(|node| node.call.op.mesh_axis().is_some())
}

/// Same as [`compare`], with pins. Returns the programs of the ranks.
fn compare_with(
    policy: &ShardPolicy,
    name: &str,
    program: &Program,
    model: &Model,
    ranks: usize,
) -> Vec<Program> {
    // Exchanges are free, so that even layers as small as these are split.
    let costs =
        MeshCosts { latency_us: 0.0, gather_latency_us: 0.0, link_bandwidth: 1e15, ..MeshCosts::HOST };
    let sharded = shard(program, ranks, policy, &costs, &sizes, None).unwrap();
    let whole = logits(program, model, None);
    assert!(whole.iter().any(|logit| *logit != whole[0]), "{name}: the logits are all the same");
    let found: Vec<Vec<f32>> = thread::scope(|scope| {
        let comms = HostComm::group(ranks).unwrap();
        let threads: Vec<_> = (sharded.programs.iter().zip(comms))
            .map(|(own, comm)| scope.spawn(|| logits(own, model, Some(Arc::new(comm)))))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (rank, own) in found.iter().enumerate() {
        assert_eq!(own, &found[0], "{name}: rank {rank} differs from rank 0");
        let error = difference(std::slice::from_ref(own), std::slice::from_ref(&whole));
        assert!(error <= TOLERANCE, "{name} on {ranks} ranks: rank {rank} is off by {error}");
    }
    sharded.programs
}

/// The fixtures in a folder.
fn fixtures_in(folder: PathBuf) -> Vec<PathBuf> {
    let all = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = all.filter(|path| path.join("expected.json").exists()).collect();
    found.sort();
    found
}

fn open(folder: &Path) -> Model {
    let gguf = folder.join("model.gguf");
    Model::open(if gguf.exists() { gguf } else { folder.to_owned() }).unwrap()
}

#[rstest]
fn every_family_has_the_logits_of_one_device(#[values(2, 3, 4)] ranks: usize) {
    let folders = fixtures_in(fixtures());
    let options = ProgramOptions { storage: Storage::Cast(DType::F32), ..ProgramOptions::default() };
    let mut split = 0;
    for folder in &folders {
        let model = open(folder);
        let program = model.program(&options).unwrap();
        split += usize::from(compare(&folder.display().to_string(), &program, &model, ranks));
    }
    assert!(split * 10 >= folders.len() * 9, "{split} of {} models are split", folders.len());
}

/// Formats of files (GGUF blocks, GPTQ, AWQ, compressed-tensors), kept where parts hold whole groups and decoded where not.
#[rstest]
fn stored_formats_have_the_logits_of_one_device(#[values(2, 3, 4)] ranks: usize) {
    for folder in ["gguf", "quantised"].into_iter().flat_map(|name| fixtures_in(fixtures().join(name))) {
        let model = open(&folder);
        let program = model.program(&ProgramOptions::default()).unwrap();
        compare(&folder.display().to_string(), &program, &model, ranks);
    }
}

#[rstest]
fn policies_of_quantisation_have_the_logits_of_one_device(
    #[values(2, 3)] ranks: usize,
    #[values("int8", "int4_f16", "int4g32z_f16", "int8g32m")] format: &str,
) {
    let policy = Policy::of(Scheme::Group(GroupFormat::from_name(format).unwrap()));
    let mut compared = 0;
    for name in ["llama3", "gpt2", "qwen3"] {
        let model = open(&fixtures().join(name));
        let program = model.program(&ProgramOptions::default()).unwrap();
        // Groups of 32 do not divide every width.
        let Ok(program) = quantize(&program, &policy, &|_| false) else { continue };
        compare(name, &program, &model, ranks);
        compared += 1;
    }
    assert!(compared > 0, "{format} fits none of the models");
}

/// Mixtures of experts, of which each rank has a part of every expert, or some of the experts.
#[rstest]
fn experts_have_the_logits_of_one_device(
    #[values(2, 3, 4)] ranks: usize,
    #[values(
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "gpt_oss",
        "granitemoeshared",
        "glm4_moe",
        "deepseek_v2_groups",
        "deepseek_v3",
        "phimoe",
        "gguf/gpt_oss_mxfp4_bf16"
    )]
    name: &str,
    #[values(false, true)] whole_experts: bool,
) {
    let model = open(&fixtures().join(name));
    let program = model.program(&ProgramOptions::default()).unwrap();
    let pin = |weight: &str, of_parts: &str| {
        let pin = if whole_experts { "experts" } else { of_parts };
        format!("\"layers.*.{weight}\" = \"{pin}\"\n")
    };
    let mut policy = String::from("[weights]\n");
    for (weight, of_parts) in [("expert_gate", "rows"), ("expert_up", "rows"), ("expert_down", "columns")] {
        policy += &pin(weight, of_parts);
    }
    if program.to_string().contains("expert_down.bias") {
        policy += &pin("expert_down.bias", "replicated");
    }
    let policy = ShardPolicy::from_toml(&policy).unwrap();
    let programs = compare_with(&policy, name, &program, &model, ranks);
    for (rank, own) in programs.iter().enumerate() {
        let first = own.nodes.iter().find_map(|node| match &node.call.op {
            Op::GroupedLinear(op) => Some(op.first_expert),
            _ => None,
        });
        assert_eq!(first.unwrap() > 0, whole_experts && rank > 0, "{name}: rank {rank}");
    }
}

/// SmolLM2's shapes, whose 9 query heads and 3 KV heads divide by no even number.
#[rstest]
fn heads_that_do_not_divide_have_the_logits_of_one_device(#[values(2, 3, 4)] ranks: usize) {
    for format in [WeightFormat::Dense(DType::F32), WeightFormat::Block(BlockFormat::Q4_1)] {
        let model = Model::random_named("smollm2-135m", 0, format).unwrap();
        let program = model.program(&ProgramOptions::default()).unwrap();
        assert!(compare("smollm2-135m", &program, &model, ranks));
    }
}
