//! Time of a decode step on random weights, beside the bandwidth of a copy measured in the same run.
//!
//! `cargo run --release -p dsrun-cuda --example decode -- --batch 1,8 llama-1b llama-8b`
//!
//! The step is what a model comes to when its layers are fused, run by this backend's kernels and replayed as a graph: embedding,
//! layers of five calls, final norm with head, and argmax. The floor is the bytes of weights and of the KV cache over the
//! bandwidth of the copy. With `--parts` the calls of one kind are also timed by themselves, all layers one after the other,
//! and the step without them. `--weights` and `--head` name the format of the layers' weights and of the head's (int8,
//! int4g128_f16, ..), `--bytes` quantises activations of the layers too, `--head-bytes` those of the head, and with `--prompt` the
//! step is one sequence's whole context. With `--sets` layers take turns at four sets of weights, which is soon loaded and still
//! more than caches hold. With `--check` the logits of the graph are held to those of the calls one by one, and its replays to
//! each other, and what the graph launches is told: whether layers are one launch. `--shape` is a model of other sizes: layers,
//! heads, KV heads, elements of a head, of the MLP, and of the vocabulary, separated by commas.

use dsrun_core::{
    DType, Error, Result, TensorDesc, WeightFormat, WeightReader, WeightType,
    checked::CheckedPlan,
    device::{Backend, Buffer, BufferSlice, Device, DeviceOptions, MemoryKind, Stream},
    graph::Graph,
    kernels::{
        Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc, PackedWeight, WeightDesc, WeightUse,
    },
    op::{
        Activation, Add, Argmax, AttentionMask, Embed, GateLayout, GatedActivation, GatherRows, LayerNorm,
        LinearW8A8, Nonlinearity, Op, PagedAttention, QuantPerToken, RmsNorm, Rope, RopePairing,
    },
    region::{
        Region,
        well_known::{self, AttentionInput, Heads, Norm},
    },
};
use dsrun_cuda::CudaBackend;
use std::{
    borrow::Cow,
    collections::HashMap,
    io::Write,
    sync::{Arc, Mutex},
    time::Duration,
};
use tracing_subscriber::filter::LevelFilter;

const TIMEOUT: Duration = Duration::from_secs(60);
const DTYPE: DType = DType::BF16;
/// Slots of a page.
const PAGE: usize = 16;
const REPLAYS: usize = 200;
/// How far logits of the graph may be from those of the calls one by one, as a share of the largest. Where layers are one launch,
/// sums run in another order, and what is rounded to 8 bits after each step may come out one bit apart.
const LOGITS_APART: f32 = 1.0 / 32.0;
/// Sets of weights, where layers take turns at them.
const SETS: usize = 4;
const DENSE: WeightFormat = WeightFormat::Dense(DTYPE);

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
    /// RMS norm, rotary positions and a gated MLP, without biases; else layer norm, a plain MLP, and biases.
    llama: bool,
}

const fn model(
    name: &'static str,
    layers: usize,
    heads: [usize; 3],
    inner: usize,
    vocabulary: usize,
) -> Model {
    let [heads, kv_heads, head] = heads;
    Model {
        name,
        layers,
        hidden: heads * head,
        heads,
        kv_heads,
        head,
        inner,
        vocabulary,
        llama: kv_heads < heads,
    }
}

const MODELS: [Model; 5] = [
    model("llama-1b", 16, [32, 8, 64], 8192, 128_256),
    model("llama-8b", 32, [32, 8, 128], 14_336, 128_256),
    model("smollm2-135m", 30, [9, 3, 64], 1536, 49_152),
    model("gpt2-xl", 48, [25, 25, 64], 6400, 50_257),
    model("opt-13b", 40, [40, 40, 128], 20_480, 50_272),
];

/// The calls of a layer, and what is around the layers.
const PARTS: [&str; 6] = ["attention input", "attention", "output", "mlp input", "down", "head and argmax"];

/// Bytes of random numbers, of which rows are taken.
const NOISE: usize = 8 << 20;

/// Random small numbers, made as they are read.
struct Noise {
    weight_type: WeightType,
    block: Vec<u8>,
}

impl Noise {
    fn new(weight_type: WeightType) -> Result<Self> {
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as u32
        };
        let mut block = Vec::new();
        while block.len() < NOISE {
            match weight_type.format {
                WeightFormat::Group(format) => {
                    let row =
                        format.row(weight_type.columns()).ok_or_else(|| Error::invalid("no whole groups"))?;
                    let bytes = match format.scale.dtype() {
                        DType::F32 => 0.001f32.to_le_bytes().to_vec(),
                        DType::F16 => half::f16::from_f32(0.001).to_le_bytes().to_vec(),
                        _ => half::bf16::from_f32(0.001).to_le_bytes().to_vec(),
                    };
                    block.extend(bytes.iter().cycle().take(row.scales.end));
                    block.extend((row.scales.end..row.bytes).map(|_| next() as u8));
                }
                _ => {
                    let value = (next() as f32 / (1 << 23) as f32 - 1.0) * 0.02;
                    block.extend_from_slice(&half::bf16::from_f32(value).to_le_bytes());
                }
            }
        }
        Ok(Self { weight_type, block })
    }
}

impl WeightReader for Noise {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn rows(&mut self, first: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        let row = self.weight_type.row_bytes()?;
        // Rows of numbers alone begin anywhere, so that few are alike; others where a row begins.
        let start = match self.weight_type.format {
            WeightFormat::Group(_) => first * row % (NOISE / row * row).max(row),
            _ => first * row % NOISE,
        };
        let bytes = start..start + count * row;
        if bytes.end > self.block.len() {
            self.block = self.block.repeat(bytes.end.div_ceil(self.block.len()));
        }
        Ok(Cow::Borrowed(&self.block[bytes]))
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
    /// Results that are nobody's operands to begin with.
    results: Vec<BufferSlice>,
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

    fn weight(&mut self, rows: usize, columns: usize, format: WeightFormat) -> Result<Value> {
        let weight_type = WeightType { format, shape: vec![rows, columns] };
        let uses = vec![WeightUse { op: "linear", dtype: DTYPE, max_rows: 1 }];
        let desc = WeightDesc { weight_type: weight_type.clone(), uses, immutable: true };
        let weight = self.device.kernels().prepack(self.stream, &desc, &mut Noise::new(weight_type)?)?;
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
                None => {
                    let value = self.tensor(inferred.dtype, &inferred.resolve(&|_| None)?)?;
                    if let Value::Tensor(_, slice) = &value {
                        self.results.push(slice.clone());
                    }
                    value
                }
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

    /// A call whose operands are all there; kept if its part is wanted.
    fn part(
        &mut self,
        part: usize,
        wanted: &dyn Fn(usize) -> bool,
        op: Op,
        operands: &[Value],
    ) -> Result<Value> {
        let operands: Vec<Option<&Value>> = operands.iter().map(Some).collect();
        let value = self.one(op, &operands)?;
        self.keep(part, wanted);
        Ok(value)
    }

    /// Drops the call bound last unless its part is wanted.
    fn keep(&mut self, part: usize, wanted: &dyn Fn(usize) -> bool) {
        if !wanted(part) {
            self.calls.pop();
        }
    }

    fn one(&mut self, op: impl Into<Op>, operands: &[Option<&Value>]) -> Result<Value> {
        Ok(self.call(op, operands)?.swap_remove(0))
    }
}

fn words(values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    values.into_iter().flat_map(i32::to_le_bytes).collect()
}

/// What a model keeps on the device.
struct Loaded {
    embedding: Value,
    layers: Vec<Layer>,
    head: Value,
    vectors: HashMap<usize, Value>,
}

struct Layer {
    weights: [Value; 4],
    caches: [Value; 2],
}

fn load(step: &mut Step<'_>, model: &Model, wanted: &Wanted) -> Result<Loaded> {
    let (batch, context) = (wanted.batches.iter().copied().max().unwrap_or(1), wanted.context);
    let (hidden, kv) = (model.hidden, model.kv_heads * model.head);
    let first = if model.llama { 2 * model.inner } else { model.inner };
    let pages = batch * context.div_ceil(PAGE);
    let embedding = step.weight(model.vocabulary, hidden, DENSE)?;
    step.weight_bytes = 0;
    let mut layers: Vec<Layer> = Vec::new();
    for index in 0..model.layers {
        let again = index.checked_sub(SETS).filter(|_| wanted.sets).map(|before| &layers[before]);
        let weights = match again {
            Some(layer) => {
                let bytes = |weight: &Value| match weight {
                    Value::Weight(weight) => weight.bytes(),
                    Value::Tensor(..) => 0,
                };
                step.weight_bytes += layer.weights.iter().map(bytes).sum::<usize>();
                layer.weights.clone()
            }
            None => [
                step.weight(hidden + 2 * kv, hidden, wanted.weights)?,
                step.weight(hidden, hidden, wanted.weights)?,
                step.weight(first, hidden, wanted.weights)?,
                step.weight(hidden, model.inner, wanted.weights)?,
            ],
        };
        let cache = [pages, model.kv_heads, PAGE, model.head];
        layers.push(Layer { weights, caches: [step.tensor(DTYPE, &cache)?, step.tensor(DTYPE, &cache)?] });
    }
    let head = step.weight(model.vocabulary, hidden, wanted.head)?;
    let mut vectors = HashMap::new();
    for size in [hidden, hidden + 2 * kv, first] {
        let ones: Vec<u8> = (0..size).flat_map(|_| half::bf16::ONE.to_le_bytes()).collect();
        vectors.insert(size, step.constant(DTYPE, &[size], &ones)?);
    }
    Ok(Loaded { embedding, layers, head, vectors })
}

/// Binds the calls of a step of one token for each of `batch` sequences; those of parts that `wanted` leaves out are not kept.
/// The result are the logits.
fn build(
    step: &mut Step<'_>,
    model: &Model,
    loaded: &Loaded,
    settings: &Wanted,
    batch: usize,
    wanted: &dyn Fn(usize) -> bool,
) -> Result<Value> {
    let context = settings.context;
    let pages = context.div_ceil(PAGE);
    // Sequences, and rows of a step.
    let (sequences, batch) = if settings.prompt { (1, context) } else { (batch, batch) };
    let add = Add { alpha: 1.0 };
    let frequencies: Vec<u8> = (0..model.head / 2)
        .flat_map(|pair| 5e5f32.powf(-2.0 * pair as f32 / model.head as f32).to_le_bytes())
        .collect();
    let each = |count: usize, value: &dyn Fn(usize) -> usize| {
        words((0..count).map(|sequence| value(sequence) as i32))
    };
    let position = |row: usize| if settings.prompt { row } else { context - 1 };
    let slot = |row: usize| if settings.prompt { row } else { row * pages * PAGE + context - 1 };
    let ids = step.constant(DType::I32, &[batch], &each(batch, &|row| 17 + row))?;
    let positions = step.constant(DType::I32, &[batch], &each(batch, &position))?;
    let slots = step.constant(DType::I32, &[batch], &each(batch, &slot))?;
    let start = step.constant(DType::I32, &[sequences], &each(sequences, &|sequence| sequence))?;
    let length = step.constant(DType::I32, &[sequences], &each(sequences, &|_| batch / sequences))?;
    let total = step.constant(DType::I32, &[sequences], &each(sequences, &|_| context))?;
    let table = words(0..(sequences * pages) as i32);
    let table = step.constant(DType::I32, &[sequences, pages], &table)?;
    let last = step.constant(DType::I32, &[1], &words([batch as i32 - 1]))?;
    let work = step.tensor(DType::I32, &[0])?;
    let frequencies = step.constant(DType::F32, &[model.head / 2], &frequencies)?;
    let gain = &loaded.vectors[&model.hidden];
    let biased = !model.llama;
    let norm: Norm = match model.llama {
        true => RmsNorm { eps: 1e-5, weight_offset: 0.0 }.into(),
        false => LayerNorm { eps: 1e-5 }.into(),
    };
    let region = |region: Result<Region>| Ok::<_, Error>(Op::Region(region?.into()));
    let rope = |heads: usize| Rope { heads: heads as u32, pairing: RopePairing::Halves, scale: 1.0 };
    let kv = (model.kv_heads * model.head) as u32;
    let heads = Heads {
        columns: [model.hidden as u32, kv, kv],
        head_norms: None,
        ropes: model.llama.then(|| [rope(model.heads), rope(model.kv_heads)]),
    };
    let input =
        region(well_known::attention_input(AttentionInput { norm, dtype: DTYPE, bias: biased, heads }))?;
    let attention = PagedAttention {
        query_heads: model.heads as u32,
        kv_heads: model.kv_heads as u32,
        scale: 1.0 / (model.head as f32).sqrt(),
        softcap: 0.0,
        window: 0,
        mask: AttentionMask::Causal,
    };
    let linear_add = region(well_known::linear_add(DTYPE, biased, add))?;
    let mlp = match model.llama {
        true => well_known::mlp_input(
            norm,
            DTYPE,
            false,
            GatedActivation { function: Nonlinearity::Silu, layout: GateLayout::Concatenated, limit: 0.0 },
        ),
        false => well_known::mlp_input(
            norm,
            DTYPE,
            true,
            Activation { function: Nonlinearity::GeluTanh, limit: 0.0 },
        ),
    };
    let gated =
        GatedActivation { function: Nonlinearity::Silu, layout: GateLayout::Concatenated, limit: 0.0 };
    let norm_quant = region(well_known::norm_quant(norm))?;
    let input_w8a8 = region(well_known::linear_w8a8_heads(DTYPE, false, heads))?;
    let add_w8a8 = region(well_known::linear_w8a8_add(DTYPE, false, add))?;
    let mlp_w8a8 = region(well_known::linear_w8a8_activation(DTYPE, false, gated))?;
    let (mlp, head) = (region(mlp)?, region(well_known::norm_linear(norm, DTYPE, false))?);
    let bias = |size: usize| biased.then(|| &loaded.vectors[&size]);
    let normed = |x: &Value| [Some(x.clone()), Some(gain.clone()), biased.then(|| gain.clone())];
    // Absent operands of a region are left out.
    let present = |operands: Vec<Option<Value>>| operands.into_iter().flatten().collect::<Vec<_>>();
    let embed = Embed { dtype: DTYPE, first_row: 0, position_offset: 0 };
    let embedding = &loaded.embedding;
    let mut x = step.one(embed, &[Some(&ids), Some(embedding), None, None])?;
    for layer in &loaded.layers {
        let [wqkv, wo, wgu, wd] = &layer.weights;
        let [keys, values] = &layer.caches;
        if settings.bytes {
            let quantised = step.call(norm_quant.clone(), &[Some(&x), Some(gain)])?;
            step.keep(0, wanted);
            let operands =
                [&quantised[0], &quantised[1], wqkv, &positions, &frequencies, keys, values, &slots];
            let query = step.part(0, wanted, input_w8a8.clone(), &operands.map(Clone::clone))?;
            let operands = [&query, keys, values, &start, &length, &total, &table, &work].map(Some);
            let mixed = step.one(attention, &[&operands[..], &[None; 3]].concat())?;
            step.keep(1, wanted);
            let quantised = step.call(QuantPerToken {}, &[Some(&mixed)])?;
            step.keep(2, wanted);
            let operands = [&quantised[0], &quantised[1], wo, &x].map(Clone::clone);
            x = step.part(2, wanted, add_w8a8.clone(), &operands)?;
            let quantised = step.call(norm_quant.clone(), &[Some(&x), Some(gain)])?;
            step.keep(3, wanted);
            let operands = [&quantised[0], &quantised[1], wgu].map(Clone::clone);
            let inner = step.part(3, wanted, mlp_w8a8.clone(), &operands)?;
            let quantised = step.call(QuantPerToken {}, &[Some(&inner)])?;
            step.keep(4, wanted);
            let operands = [&quantised[0], &quantised[1], wd, &x].map(Clone::clone);
            x = step.part(4, wanted, add_w8a8.clone(), &operands)?;
            continue;
        }
        let mut operands = present(normed(&x).into());
        operands.push(wqkv.clone());
        operands.extend(bias(model.hidden + 2 * kv as usize).cloned());
        if model.llama {
            operands.extend([positions.clone(), frequencies.clone()]);
        }
        operands.extend([keys.clone(), values.clone(), slots.clone()]);
        let query = step.part(0, wanted, input.clone(), &operands)?;
        let operands = [&query, keys, values, &start, &length, &total, &table, &work].map(Some);
        let mixed = step.one(attention, &[&operands[..], &[None; 3]].concat())?;
        step.keep(1, wanted);
        let operands = [Some(&mixed), Some(wo), bias(model.hidden), Some(&x)];
        x =
            step.part(2, wanted, linear_add.clone(), &present(operands.map(|value| value.cloned()).into()))?;
        let mut operands = present(normed(&x).into());
        operands.push(wgu.clone());
        operands.extend(bias(model.inner).cloned().filter(|_| biased));
        let inner = step.part(3, wanted, mlp.clone(), &operands)?;
        let operands = [Some(&inner), Some(wd), bias(model.hidden), Some(&x)];
        x =
            step.part(4, wanted, linear_add.clone(), &present(operands.map(|value| value.cloned()).into()))?;
    }
    if settings.prompt {
        x = step.part(5, wanted, GatherRows {}.into(), &[x, last])?;
    }
    let logits = if settings.head_bytes {
        let quantised = step.call(norm_quant, &[Some(&x), Some(gain)])?;
        step.keep(5, wanted);
        let operands = [Some(&quantised[0]), Some(&quantised[1]), Some(&loaded.head), None];
        let logits = step.one(LinearW8A8 { dtype: DTYPE }, &operands)?;
        step.keep(5, wanted);
        logits
    } else {
        let mut operands = present(normed(&x).into());
        operands.push(loaded.head.clone());
        step.part(5, wanted, head, &operands)?
    };
    step.one(Argmax {}, &[Some(&logits)])?;
    step.keep(5, wanted);
    Ok(logits)
}

/// A tensor of the host.
fn fetch(stream: &mut dyn Stream, value: &Value) -> Result<Vec<f32>> {
    let Value::Tensor(desc, slice) = value else { return Ok(Vec::new()) };
    let mut bytes = vec![0; desc.bytes()?];
    stream.download(&slice.slice(0, bytes.len())?, &mut bytes, "logits", TIMEOUT)?;
    let (elements, _) = bytes.as_chunks::<2>();
    Ok(elements.iter().map(|bits| half::bf16::from_le_bytes(*bits).to_f32()).collect())
}

/// How far logits are apart.
struct Difference {
    /// How many differ, of how many.
    count: usize,
    all: usize,
    /// The largest difference, and the largest logit.
    most: f32,
    largest: f32,
}

impl Difference {
    fn between(one: &[f32], other: &[f32]) -> Self {
        // A NaN, too, is a difference.
        let apart = one.iter().zip(other).map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() });
        let most = |a: f32, b: f32| if a >= b || a.is_nan() { a } else { b };
        Self {
            count: apart.clone().filter(|apart| *apart != 0.0).count(),
            all: one.len(),
            most: apart.fold(0.0, most),
            largest: one.iter().map(|logit| logit.abs()).fold(0.0, most),
        }
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { count, all, most, largest } = self;
        write!(f, "{count} of {all} logits differ, by up to {most}; the largest is {largest}")
    }
}

/// What the backend says of the graphs it captures.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<u8>>>);

impl Told {
    /// Listens from now on.
    fn listen(&self) {
        let told = self.clone();
        tracing_subscriber::fmt()
            .with_max_level(LevelFilter::DEBUG)
            .with_ansi(false)
            .with_writer(move || told.clone())
            .init();
    }

    /// What was launched in the graph captured last.
    fn launches(&self) -> String {
        let told = self.0.lock().map(|told| String::from_utf8_lossy(&told).into_owned()).unwrap_or_default();
        let after =
            |line: &str| line.split_once("launches in order: ").map(|(_, launches)| launches.to_owned());
        let launches = told.lines().rev().find_map(after).unwrap_or_else(|| "unknown".to_owned());
        launches.split(" calls=").next().unwrap_or_default().to_owned()
    }
}

impl Write for Told {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if let Ok(mut told) = self.0.lock() {
            told.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
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

/// A graph of calls, and the times of its replays.
fn replay(
    device: &dyn Device,
    stream: &mut dyn Stream,
    calls: Vec<Box<dyn BoundCall>>,
) -> Result<(Box<dyn Graph>, Vec<f64>)> {
    let graphs = device.graphs().ok_or_else(|| Error::unsupported("no graphs"))?;
    let graph = graphs.capture(stream, calls)?;
    let times = time(device, stream, REPLAYS, |stream| graph.launch(stream))?;
    Ok((graph, times))
}

/// Holds logits of a graph to those of its calls one by one, and those of more replays to them, to the bit. Gives the difference
/// from the former.
fn check(
    graph: &dyn Graph,
    stream: &mut dyn Stream,
    logits: &Value,
    one_by_one: &[f32],
) -> Result<Difference> {
    let found = fetch(stream, logits)?;
    let apart = Difference::between(one_by_one, &found);
    if apart.most.is_nan() || apart.most > apart.largest * LOGITS_APART {
        return Err(Error::internal(format!("the graph and its calls one by one: {apart}")));
    }
    for _ in 0..REPLAYS {
        graph.launch(stream)?;
        if fetch(stream, logits)? != found {
            return Err(Error::internal("two replays of the graph do not give the same bits"));
        }
    }
    Ok(apart)
}

fn median(times: &[f64]) -> f64 {
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A model of sizes that are written one behind the other.
fn shape(text: &str) -> Result<Model> {
    let sizes: Vec<usize> = text.split(',').filter_map(|size| size.parse().ok()).collect();
    match sizes[..] {
        [layers, heads, kv_heads, head, inner, vocabulary] => {
            Ok(model("shape", layers, [heads, kv_heads, head], inner, vocabulary))
        }
        _ => Err(Error::invalid(format!("{text:?} is not six sizes"))),
    }
}

/// What the command line asks for.
struct Wanted {
    models: Vec<Model>,
    batches: Vec<usize>,
    context: usize,
    parts: bool,
    check: bool,
    weights: WeightFormat,
    head: WeightFormat,
    bytes: bool,
    /// Whether the head's activations are quantised.
    head_bytes: bool,
    prompt: bool,
    sets: bool,
}

fn wanted() -> Result<Wanted> {
    let mut wanted = Wanted {
        models: Vec::new(),
        batches: vec![1],
        context: 576,
        parts: false,
        check: false,
        weights: DENSE,
        head: DENSE,
        bytes: false,
        head_bytes: false,
        prompt: false,
        sets: false,
    };
    let format = |name: String| {
        WeightFormat::from_name(&name).ok_or_else(|| Error::invalid(format!("{name:?} is no weight format")))
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let number = |text: &str| text.parse().map_err(|_| Error::invalid(format!("{text:?} is no number")));
        let mut value =
            || arguments.next().ok_or_else(|| Error::invalid(format!("{argument} needs a value")));
        match argument.as_str() {
            "--batch" => wanted.batches = value()?.split(',').map(number).collect::<Result<_>>()?,
            "--context" => wanted.context = number(&value()?)?,
            "--parts" => wanted.parts = true,
            "--check" => wanted.check = true,
            "--weights" => wanted.weights = format(value()?)?,
            "--head" => wanted.head = format(value()?)?,
            "--head-bytes" => wanted.head_bytes = true,
            "--bytes" => wanted.bytes = true,
            "--prompt" => wanted.prompt = true,
            "--sets" => wanted.sets = true,
            "--shape" => wanted.models.push(shape(&value()?)?),
            name => match MODELS.into_iter().find(|model| model.name == name) {
                Some(model) => wanted.models.push(model),
                None => {
                    return Err(Error::invalid(format!("{name:?} is neither a model nor an option")));
                }
            },
        }
    }
    if wanted.models.is_empty() {
        wanted.models.extend(MODELS);
    }
    Ok(wanted)
}

fn main() -> Result<()> {
    let wanted = wanted()?;
    let told = Told::default();
    if wanted.check {
        told.listen();
    }
    let device = CudaBackend::new().open(0, &DeviceOptions::default())?;
    let mut stream = device.stream()?;
    let mut out = std::io::stdout();
    let bandwidth = copy_bandwidth(&*device, &mut *stream)?;
    let _ = writeln!(out, "{}: copy {:.2} TB/s", device.properties().name, bandwidth / 1e12);
    let header = "model | batch | context | calls | calls per layer | GB | floor ms | median ms | p10 | p90 | eager ms | share";
    let _ = writeln!(out, "{header}");
    let context = wanted.context;
    for model in &wanted.models {
        let (stream, plans) = (&mut *stream, HashMap::new());
        let (calls, results) = (Vec::new(), Vec::new());
        let mut step = Step { device: &*device, stream, plans, calls, weight_bytes: 0, results };
        let loaded = load(&mut step, model, &wanted)?;
        for batch in &wanted.batches {
            let logits = build(&mut step, model, &loaded, &wanted, *batch, &|_| true)?;
            let calls = std::mem::take(&mut step.calls);
            let cache_bytes = 2 * model.layers * batch * context * model.kv_heads * model.head * 2;
            let floor = (step.weight_bytes + cache_bytes) as f64 / bandwidth * 1e3;
            let eager = time(&*device, step.stream, 20, |stream| {
                calls.iter().try_for_each(|call| call.enqueue(stream))
            })?;
            let count = calls.len();
            let one_by_one = fetch(step.stream, &logits)?;
            // The graph finds nothing of what they left.
            for slice in &step.results {
                step.stream.upload(&vec![0xff; slice.bytes], slice)?;
            }
            let (graph, times) = replay(&*device, step.stream, calls)?;
            if wanted.check {
                let apart = check(&*graph, step.stream, &logits, &one_by_one)?;
                let _ = writeln!(out, "graph of {}: {apart}", told.launches());
            }
            let _ = writeln!(
                out,
                "{} | {batch} | {context} | {count} | {} | {:.2} | {floor:.3} | {:.3} | {:.3} | {:.3} | {:.3} | {:.0}%",
                model.name,
                (count - 3) / model.layers,
                step.weight_bytes as f64 / 1e9,
                median(&times),
                times[times.len() / 10],
                times[times.len() * 9 / 10],
                median(&eager),
                floor / median(&times) * 100.0
            );
            if !wanted.parts {
                continue;
            }
            for (part, name) in PARTS.iter().enumerate() {
                build(&mut step, model, &loaded, &wanted, *batch, &|other| other == part)?;
                let alone = std::mem::take(&mut step.calls);
                let alone = median(&replay(&*device, step.stream, alone)?.1);
                build(&mut step, model, &loaded, &wanted, *batch, &|other| other != part)?;
                let without = std::mem::take(&mut step.calls);
                let without = median(&replay(&*device, step.stream, without)?.1);
                let each = if part == 5 { 1.0 } else { model.layers as f64 };
                let _ = writeln!(
                    out,
                    "  {name}: alone {:.2} us each, the step without {:.2} us each less",
                    alone / each * 1e3,
                    (median(&times) - without) / each * 1e3
                );
            }
        }
    }
    Ok(())
}
