//! Time of a decode step at batch 1 on random weights, beside the bandwidth of a copy measured in the same run.
//!
//! `cargo run --release -p dsrun-cuda --example decode -- llama-1b llama-8b`
//!
//! The step is what a Llama program comes to when projections that read the same activations are put together, run by this
//! backend's kernels and replayed as a graph: layers, final norm, head and argmax. The floor is the bytes of weights and of
//! the KV cache over the bandwidth of the copy.

use dsrun_core::{
    DType, Result, TensorDesc, WeightFormat, WeightReader, WeightType,
    checked::CheckedPlan,
    device::{Backend, Buffer, BufferSlice, Device, DeviceOptions, MemoryKind, Stream},
    kernels::{
        Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc, PackedWeight, WeightDesc, WeightUse,
    },
    op::{
        Add, Argmax, AttentionMask, Embed, GateLayout, GatedActivation, KvWrite, Linear, Nonlinearity, Op,
        PagedAttention, RmsNorm, Rope, RopePairing,
    },
    region::well_known,
};
use dsrun_cuda::CudaBackend;
use std::{borrow::Cow, collections::HashMap, io::Write, sync::Arc, time::Duration};

const TIMEOUT: Duration = Duration::from_secs(60);
const DTYPE: DType = DType::BF16;
/// Tokens in the cache.
const CONTEXT: usize = 576;
/// Slots of a page.
const PAGE: usize = 16;
const REPLAYS: usize = 200;

/// Sizes of a model.
struct Model {
    name: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head: usize,
    inner: usize,
    vocabulary: usize,
}

const MODELS: [Model; 2] = [
    Model {
        name: "llama-1b",
        layers: 16,
        hidden: 2048,
        heads: 32,
        kv_heads: 8,
        head: 64,
        inner: 8192,
        vocabulary: 128_256,
    },
    Model {
        name: "llama-8b",
        layers: 32,
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head: 128,
        inner: 14_336,
        vocabulary: 128_256,
    },
];

/// Random small numbers, made as they are read: the same block of rows again and again.
struct Noise {
    weight_type: WeightType,
    block: Vec<u8>,
}

impl Noise {
    fn new(weight_type: WeightType) -> Self {
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        let mut block = Vec::new();
        while block.len() < 8 << 20 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.02;
            block.extend_from_slice(&half::bf16::from_f32(value).to_le_bytes());
        }
        Self { weight_type, block }
    }
}

impl WeightReader for Noise {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn rows(&mut self, _: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        let bytes = count * self.weight_type.columns() * 2;
        Ok(Cow::Owned(self.block.iter().copied().cycle().take(bytes).collect()))
    }
}

/// A value on the device.
#[derive(Clone)]
enum Value {
    Tensor(TensorDesc, BufferSlice),
    Weight(Arc<dyn PackedWeight>),
}

/// A step under construction.
struct Step<'a> {
    device: &'a dyn Device,
    stream: &'a mut dyn Stream,
    plans: HashMap<String, CheckedPlan>,
    calls: Vec<Box<dyn BoundCall>>,
    weight_bytes: usize,
}

impl Step<'_> {
    fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Result<Value> {
        let desc = TensorDesc::dense(dtype, shape);
        let buffer = self.device.allocate(desc.bytes()?.max(4), MemoryKind::Device)?;
        Ok(Value::Tensor(desc, BufferSlice::whole(buffer)))
    }

    fn constant(&mut self, dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Value> {
        let value = self.tensor(dtype, shape)?;
        if let Value::Tensor(_, slice) = &value {
            self.stream.upload(bytes, slice)?;
        }
        Ok(value)
    }

    fn weight(&mut self, rows: usize, columns: usize) -> Result<Value> {
        let weight_type = WeightType { format: WeightFormat::Dense(DTYPE), shape: vec![rows, columns] };
        let uses = vec![WeightUse { op: "linear", dtype: DTYPE, max_rows: 1 }];
        let desc = WeightDesc { weight_type: weight_type.clone(), uses, immutable: true };
        let weight = self.device.kernels().prepack(self.stream, &desc, &mut Noise::new(weight_type))?;
        self.weight_bytes += weight.bytes();
        Ok(Value::Weight(weight))
    }

    /// Enqueues an op; its results are new tensors, or the operands it updates.
    fn call(&mut self, op: impl Into<Op>, operands: &[Option<&Value>]) -> Result<Vec<Value>> {
        let describe = |value: &Value| match value {
            Value::Tensor(desc, _) => OperandDesc::Tensor(desc.clone()),
            Value::Weight(weight) => OperandDesc::Weight(weight.weight_type().clone()),
        };
        let operand_descs = operands.iter().map(|value| value.map(describe)).collect();
        let mut call = CallDesc { op: op.into(), operands: operand_descs, results: Vec::new(), comm: None };
        let mut results = Vec::new();
        for (index, inferred) in call.op.infer(&call.operand_types())?.iter().enumerate() {
            let updated = call.op.updates(index).and_then(|operand| operands[operand].cloned());
            let value = match updated {
                Some(value) => value,
                None => self.tensor(inferred.dtype, &inferred.resolve(&|_| None)?)?,
            };
            if let Value::Tensor(desc, _) = &value {
                call.results.push(desc.clone());
            }
            results.push(value);
        }
        let key = format!("{call:?}");
        if !self.plans.contains_key(&key) {
            self.plans.insert(key.clone(), CheckedPlan::new(self.device, call)?);
        }
        let plan = &self.plans[&key];
        let workspace = match plan.workspace_bytes() {
            0 => None,
            bytes => Some(BufferSlice::whole(self.device.allocate(bytes, MemoryKind::Device)?)),
        };
        let bind = |value: &Value| match value {
            Value::Tensor(_, slice) => Argument::Tensor(Binding::new(slice.clone())),
            Value::Weight(weight) => Argument::Weight(weight.clone()),
        };
        let bindings = results.iter().filter_map(|value| match value {
            Value::Tensor(_, slice) => Some(Binding::new(slice.clone())),
            Value::Weight(_) => None,
        });
        let arguments = Arguments {
            operands: operands.iter().map(|value| value.map(bind)).collect(),
            results: bindings.collect(),
            workspace,
        };
        self.calls.push(plan.bind(&arguments)?);
        Ok(results)
    }

    fn one(&mut self, op: impl Into<Op>, operands: &[Option<&Value>]) -> Result<Value> {
        Ok(self.call(op, operands)?.swap_remove(0))
    }
}

/// Features `start .. start + size` of a row of activations.
fn features(value: &Value, start: usize, size: usize) -> Result<Value> {
    match value {
        Value::Tensor(desc, slice) => {
            let part = TensorDesc { shape: vec![desc.shape[0], size], ..desc.clone() };
            let bytes = part.bytes()?;
            Ok(Value::Tensor(part, slice.slice(start * desc.dtype.bytes(), bytes)?))
        }
        Value::Weight(_) => Err(dsrun_core::Error::invalid("a weight has no features to take")),
    }
}

fn words(values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    values.into_iter().flat_map(i32::to_le_bytes).collect()
}

fn build(step: &mut Step<'_>, model: &Model) -> Result<()> {
    let (hidden, query, kv) = (model.hidden, model.heads * model.head, model.kv_heads * model.head);
    let pages = CONTEXT / PAGE;
    let (norm, add) = (RmsNorm { eps: 1e-5, weight_offset: 0.0 }, Add { alpha: 1.0 });
    let ones: Vec<u8> = (0..hidden).flat_map(|_| half::bf16::ONE.to_le_bytes()).collect();
    let frequencies: Vec<u8> = (0..model.head / 2)
        .flat_map(|pair| 5e5f32.powf(-2.0 * pair as f32 / model.head as f32).to_le_bytes())
        .collect();
    let ids = step.constant(DType::I32, &[1], &words([17]))?;
    let position = step.constant(DType::I32, &[1], &words([CONTEXT as i32 - 1]))?;
    let slot = position.clone();
    let start = step.constant(DType::I32, &[1], &words([0]))?;
    let length = step.constant(DType::I32, &[1], &words([1]))?;
    let total = step.constant(DType::I32, &[1], &words([CONTEXT as i32]))?;
    let table = step.constant(DType::I32, &[1, pages], &words(0..pages as i32))?;
    let work = step.tensor(DType::I32, &[0])?;
    let gain = step.constant(DTYPE, &[hidden], &ones)?;
    let frequencies = step.constant(DType::F32, &[model.head / 2], &frequencies)?;
    let embedding = step.weight(model.vocabulary, hidden)?;
    step.weight_bytes = 0;
    let linear = Linear { dtype: DTYPE };
    let norm_linear = Op::Region(well_known::norm_linear(norm, DTYPE, false)?.into());
    let rope = |heads: usize| Rope { heads: heads as u32, pairing: RopePairing::Halves, scale: 1.0 };
    let attention = PagedAttention {
        query_heads: model.heads as u32,
        kv_heads: model.kv_heads as u32,
        scale: 1.0 / (model.head as f32).sqrt(),
        softcap: 0.0,
        window: 0,
        mask: AttentionMask::Causal,
    };
    let gated =
        GatedActivation { function: Nonlinearity::Silu, layout: GateLayout::Concatenated, limit: 0.0 };
    let mut x = step.one(
        Embed { dtype: DTYPE, first_row: 0, position_offset: 0 },
        &[Some(&ids), Some(&embedding), None, None],
    )?;
    for _ in 0..model.layers {
        let (wqkv, wo) = (step.weight(query + 2 * kv, hidden)?, step.weight(hidden, query)?);
        let (wgu, wd) = (step.weight(2 * model.inner, hidden)?, step.weight(hidden, model.inner)?);
        let keys = step.tensor(DTYPE, &[pages, model.kv_heads, PAGE, model.head])?;
        let values = step.tensor(DTYPE, &[pages, model.kv_heads, PAGE, model.head])?;
        let qkv = step.one(norm_linear.clone(), &[Some(&x), Some(&gain), Some(&wqkv)])?;
        let (q, k, v) =
            (features(&qkv, 0, query)?, features(&qkv, query, kv)?, features(&qkv, query + kv, kv)?);
        let q = step.one(rope(model.heads), &[Some(&q), Some(&position), Some(&frequencies)])?;
        let k = step.one(rope(model.kv_heads), &[Some(&k), Some(&position), Some(&frequencies)])?;
        step.call(KvWrite {}, &[Some(&keys), Some(&values), Some(&k), Some(&v), Some(&slot)])?;
        let operands = [&q, &keys, &values, &start, &length, &total, &table, &work].map(Some);
        let mixed = step.one(attention, &[&operands[..], &[None; 3]].concat())?;
        let out = step.one(linear, &[Some(&mixed), Some(&wo), None])?;
        x = step.one(add, &[Some(&x), Some(&out), None, None])?;
        let gate_up = step.one(norm_linear.clone(), &[Some(&x), Some(&gain), Some(&wgu)])?;
        let inner = step.one(gated, &[Some(&gate_up), None, None])?;
        let out = step.one(linear, &[Some(&inner), Some(&wd), None])?;
        x = step.one(add, &[Some(&x), Some(&out), None, None])?;
    }
    let head = step.weight(model.vocabulary, hidden)?;
    let logits = step.one(norm_linear, &[Some(&x), Some(&gain), Some(&head)])?;
    step.one(Argmax {}, &[Some(&logits)])?;
    Ok(())
}

/// Milliseconds of each of `count` runs, sorted.
fn time(
    device: &dyn Device,
    stream: &mut dyn Stream,
    count: usize,
    mut run: impl FnMut(&mut dyn Stream) -> Result<()>,
) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    for round in 0..count + 10 {
        let (begin, end) = (device.event()?, device.event()?);
        stream.record(&*begin)?;
        run(stream)?;
        stream.record(&*end)?;
        stream.synchronize("a timed run", TIMEOUT)?;
        if round >= 10 {
            times.extend(end.elapsed_since(&*begin)?.map(|time| time.as_secs_f64() * 1e3));
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// Bytes per second of a copy of 2 GiB, read and written counted.
fn copy_bandwidth(device: &dyn Device, stream: &mut dyn Stream) -> Result<f64> {
    let bytes = 2usize << 30;
    let buffers: [Arc<dyn Buffer>; 2] =
        [device.allocate(bytes, MemoryKind::Device)?, device.allocate(bytes, MemoryKind::Device)?];
    let [from, to] = buffers.map(BufferSlice::whole);
    let times = time(device, stream, 20, |stream| stream.copy(&from, &to))?;
    Ok(2.0 * bytes as f64 / (times[times.len() / 2] / 1e3))
}

fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let device = CudaBackend::new().open(0, &DeviceOptions::default())?;
    let mut stream = device.stream()?;
    let mut out = std::io::stdout();
    let bandwidth = copy_bandwidth(&*device, &mut *stream)?;
    let _ = writeln!(out, "{}: copy {:.2} TB/s", device.properties().name, bandwidth / 1e12);
    let _ =
        writeln!(out, "model | launches | GB | floor ms | median ms | p10 | p90 | eager ms | share of floor");
    for model in
        MODELS.iter().filter(|model| wanted.is_empty() || wanted.iter().any(|name| name == model.name))
    {
        let mut step = Step {
            device: &*device,
            stream: &mut *stream,
            plans: HashMap::new(),
            calls: Vec::new(),
            weight_bytes: 0,
        };
        build(&mut step, model)?;
        let Step { calls, weight_bytes, .. } = step;
        let cache_bytes = 2 * model.layers * CONTEXT * model.kv_heads * model.head * 2;
        let floor = (weight_bytes + cache_bytes) as f64 / bandwidth * 1e3;
        let eager = time(&*device, &mut *stream, 20, |stream| {
            calls.iter().try_for_each(|call| call.enqueue(stream))
        })?;
        let launches = calls.len();
        let graphs = device.graphs().ok_or_else(|| dsrun_core::Error::unsupported("no graphs"))?;
        let graph = graphs.capture(&mut *stream, calls)?;
        let times = time(&*device, &mut *stream, REPLAYS, |stream| graph.launch(stream))?;
        let median = times[times.len() / 2];
        let _ = writeln!(
            out,
            "{} | {launches} | {:.2} | {floor:.3} | {median:.3} | {:.3} | {:.3} | {:.3} | {:.0}%",
            model.name,
            weight_bytes as f64 / 1e9,
            times[times.len() / 10],
            times[times.len() * 9 / 10],
            eager[eager.len() / 2],
            floor / median * 100.0
        );
    }
    Ok(())
}
