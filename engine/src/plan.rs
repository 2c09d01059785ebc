//! Planning an engine and loading it: everything is counted before anything is allocated.

mod compile_ahead;
mod compiled_step;
mod draft_vocabulary;
mod layout;
mod plan_cache;

pub(crate) use compiled_step::{
    Bucket, CompiledStep, EXTENTS, FixedSizes, Resident, Shared, Site, describe, describe_call, input_range,
    sizes,
};
use draft_vocabulary::check_vocabulary;
pub(crate) use layout::Layout;
pub(crate) use plan_cache::{PlanCache, plan_key};

use crate::{
    Engine,
    engine::Loaded,
    error::{EngineError, Result},
    kv_cache::SwapSpace,
    memory::MemoryPlan,
    options::EngineOptions,
    passes::{
        fuse, prune_unused_rows,
        quantize::{Calibration, Policy, quantize, smooth},
        size_work_lists,
    },
    runner::request_table::RequestTable,
    speculation::{Drafter, Speculation},
};
use dsrun_core::{
    DType, Error, TensorDesc, TensorType, WeightExpr, WeightFormat, WeightType,
    device::{BufferSlice, Device, MemoryKind, Stream},
    kernels::{WeightDesc, WeightUse},
    op::{Op, OperandType},
    program::{Call, Origin, Program, Value, ValueId},
};
use dsrun_models::{
    model::Model,
    step::{ProgramOptions, Storage},
    weights::{ExprReader, TensorSource},
};
use std::{collections::HashMap, sync::Arc, time::Duration};

/// How long the device may take to take in the weights.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// The part of the device's free memory that is left free where the KV cache takes what there is: one in so many.
const SPARE: u64 = 20;

/// An engine that is planned but not loaded: its program and its memory.
#[derive(Debug)]
pub struct EnginePlan {
    pub(crate) program: Program,
    /// The same for steps that bring tokens that are not wanted: what only wanted rows need is computed for these alone.
    pruned: Program,
    pub(crate) options: EngineOptions,
    pub(crate) context: usize,
    pub(crate) fixed: FixedSizes,
    pub(crate) limits: Bucket,
    layout: Layout,
    memory: MemoryPlan,
    pub(crate) draft: Option<DraftPlan>,
}

/// What is planned for a second model that proposes tokens.
#[derive(Debug)]
pub(crate) struct DraftPlan {
    model: Arc<Model>,
    pub(crate) plan: Box<EnginePlan>,
    /// Tokens it proposes at a time.
    tokens: usize,
}

/// What a step of generation reads from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTraffic {
    /// Bytes of weights, read once per step whatever the batch.
    pub weights: u64,
    /// Bytes of KV cache read per token of a request's context.
    pub kv_per_token: u64,
}

impl EnginePlan {
    /// Plans an engine for a model on a device. Allocates nothing.
    ///
    /// # Errors
    /// If an option is out of range, or the device does not run one of the model's ops.
    pub fn new(model: &Model, device: &dyn Device, options: &EngineOptions) -> Result<Self> {
        options.validate()?;
        if let Some(speculation @ Speculation::Draft { .. }) = options.speculation {
            return Err(EngineError::option(
                "speculate",
                speculation,
                "needs a second model, which is not given",
            ));
        }
        Self::sketch(model, device, options)?.fitted(device)
    }

    /// Plans an engine with a second model, `draft`, that proposes tokens as [`Speculation::Draft`] says. It runs on the same
    /// device, in the same precision, but is not quantised. Its cache holds as many tokens as the engine's, or its own context
    /// for each request if that is less.
    ///
    /// # Errors
    /// As [`Self::new`]; [`EngineError::Draft`] if the vocabularies differ.
    pub fn with_draft(
        model: &Model,
        draft: &Arc<Model>,
        device: &dyn Device,
        options: &EngineOptions,
    ) -> Result<Self> {
        options.validate()?;
        let Some(Speculation::Draft { tokens }) = options.speculation else {
            let given = options.speculation.map_or_else(|| "off".to_owned(), String::from);
            return Err(EngineError::option("speculate", given, "must be `draft` to use a second model"));
        };
        check_vocabulary(model, draft)?;
        let mut plan = Self::sketch(model, device, options)?;
        let own = EngineOptions {
            context: Some(plan.context.min(draft.config().context)),
            speculation: None,
            quantize: None,
            calibration: None,
            tune_step: false,
            kv_tokens: None,
            swap_tokens: 0,
            ..options.clone()
        };
        let own = Box::new(Self::sketch(draft, device, &own)?);
        plan.draft = Some(DraftPlan { model: draft.clone(), plan: own, tokens });
        plan.fitted(device)
    }

    /// Plans all but how much of the memory there is.
    fn sketch(model: &Model, device: &dyn Device, options: &EngineOptions) -> Result<Self> {
        let context = options.context(model.config().context)?;
        let blocks = context.div_ceil(options.block_size);
        let kv_tokens = options.kv_tokens.unwrap_or(context.saturating_mul(options.max_requests));
        if options.kv_tokens.is_some() && kv_tokens < options.block_size {
            let rule = format!("must hold at least one page of {}", options.block_size);
            return Err(EngineError::option("kv-tokens", kv_tokens, rule));
        }
        let pages = if options.kv_tokens.is_some() {
            kv_tokens / options.block_size
        } else {
            blocks.saturating_mul(options.max_requests)
        };
        // The device names the type it likes best first.
        let preferred = device.properties().dtypes.first().copied().unwrap_or(DType::F32);
        let activation = options.precision.dtype().unwrap_or(preferred);
        let mut program = model.program(&ProgramOptions {
            activation,
            storage: options.precision.dtype().map_or(Storage::Keep, Storage::Cast),
            cache: activation,
            block_size: options.block_size as u32,
        })?;
        program = quantized(&program, model, options)?;
        let fixed = FixedSizes { requests: options.max_requests, blocks, pages, stop_ids: 1 };
        let limits = Bucket {
            tokens: options.step_tokens,
            sequences: options.max_requests,
            rows: (options.max_requests * options.rows_per_request()).min(options.step_tokens),
            every: false,
        };
        let sizes = sizes(limits, fixed);
        size_work_lists(&mut program, device, &sizes)?;
        if options.fuse {
            program = fuse_for(&program, device, limits, fixed)?;
        }
        let pruned = prune_unused_rows(&program)?;
        let mut layout = Layout::new(&pruned, device, &sizes, limits.every)?;
        // Of fewer rows what is small may lie where something large would fit.
        let is_large = |bucket: &Bucket| {
            bucket.sequences == limits.sequences && (bucket.every || bucket.tokens == limits.tokens)
        };
        for bucket in Bucket::all(limits, options.rows_per_request()).into_iter().filter(is_large) {
            let program = if bucket.every { &program } else { &pruned };
            let other = Layout::new(program, device, &self::sizes(bucket, fixed), bucket.every)?;
            layout.cover(other.shared_bytes());
        }
        let (options, memory) = (options.clone(), MemoryPlan::default());
        Ok(Self { program, pruned, options, context, fixed, limits, layout, memory, draft: None })
    }

    /// Counts the memory, and plans fewer pages if that is what it takes to fit.
    fn fitted(mut self, device: &dyn Device) -> Result<Self> {
        self.count(device)?;
        if let (Some(missing), None) = (self.memory.missing(), self.options.kv_tokens) {
            // Requests share what there is, and yield pages to each other when it is used up.
            let page = self.page_bytes().max(1);
            let spare = self.memory.available.unwrap_or(0) / SPARE;
            let fewer = usize::try_from((missing + spare).div_ceil(page)).unwrap_or(usize::MAX);
            self.fixed.pages = self.fixed.pages.saturating_sub(fewer).max(self.fixed.blocks);
            self.count(device)?;
        }
        Ok(self)
    }

    /// Counts what will be allocated.
    fn count(&mut self, device: &dyn Device) -> Result<()> {
        self.memory = plan_memory(&self.program, device, &self.layout, self.fixed, &self.options)?;
        if let Some(DraftPlan { plan, .. }) = &mut self.draft {
            let most = plan.fixed.blocks.saturating_mul(plan.fixed.requests);
            plan.fixed.pages = self.fixed.pages.min(most);
            plan.count(device)?;
            // What the device has left is for both together.
            plan.memory.available = None;
            self.memory.draft = Some(Box::new(plan.memory.clone()));
        }
        Ok(())
    }

    /// Bytes of a page, with that of the second model.
    fn page_bytes(&self) -> u64 {
        let draft = self.draft.as_ref().map_or(0, |draft| draft.plan.page_bytes());
        self.memory.kv_cache / self.fixed.pages.max(1) as u64 + draft
    }

    /// What will be allocated.
    pub fn memory(&self) -> &MemoryPlan {
        &self.memory
    }

    /// The program that will run, after all passes, in steps of which every token is wanted: all that generate, and nothing else.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The program of all other steps: [`prune_unused_rows`] makes it of the former. The same weights and states have the same numbers.
    pub fn pruned(&self) -> &Program {
        &self.pruned
    }

    /// The program of the steps of a bucket.
    pub(crate) fn program_of(&self, bucket: Bucket) -> &Program {
        if bucket.every { &self.program } else { &self.pruned }
    }

    /// Tokens a request may have, prompt and answer together.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The description of a cache.
    pub(crate) fn cache(&self, value: &Value) -> Result<TensorDesc> {
        let tensor = value.tensor_type().ok_or_else(|| Error::internal("a cache is no tensor"))?;
        Ok(TensorDesc::dense(tensor.dtype, &tensor.resolve(&sizes(self.limits, self.fixed))?))
    }

    /// Pages of host memory for requests that are pre-empted.
    pub(crate) fn host_pages(&self) -> usize {
        self.options.swap_tokens / self.options.block_size
    }

    /// What a step of generation has to read: every matrix a product uses, and the caches. An embedding that is only
    /// looked up, vectors and activations are left out as too small to matter.
    ///
    /// # Errors
    /// If the device cannot say how large it keeps a weight.
    pub fn step_traffic(&self, device: &dyn Device) -> Result<StepTraffic> {
        let mut traffic = StepTraffic { weights: 0, kv_per_token: 0 };
        for (id, value) in self.program.values_from(|origin| *origin != Origin::Input) {
            match (&value.origin, &value.value_type) {
                (Origin::Weight(_), OperandType::Weight(weight)) => {
                    let desc = weight_desc(&self.program, id, weight, self.limits);
                    if desc.uses.iter().any(|weight_use| weight_use.op != "embed") {
                        traffic.weights += device.kernels().prepack_query(&desc)?.bytes as u64;
                    }
                }
                (Origin::State, _) if is_cache(value) => {
                    let slots = self.fixed.pages * self.options.block_size;
                    let bytes = state_bytes(value, self.limits, self.fixed)?;
                    traffic.kv_per_token += (bytes / slots.max(1)) as u64;
                }
                _ => {}
            }
        }
        Ok(traffic)
    }

    /// Multiplications of matrices that a prompt of so many tokens takes of which the last is wanted, attention included: two
    /// operations each.
    pub fn prompt_products(&self, tokens: usize) -> u64 {
        let (program, mut products) = (&self.pruned, 0);
        // Hidden states are wanted of few steps.
        for node in program.nodes.iter().filter(|node| program.segments[node.segment].name == "forward") {
            let tensor = |id: Option<ValueId>| program.values.get(id?.index())?.tensor_type();
            let of_tokens =
                |tensor: &TensorType| tensor.shape.first().and_then(|size| size.symbol()) == Some("tokens");
            let result = tensor(node.call.results.first().copied());
            let rows = if result.is_some_and(of_tokens) { tokens } else { 1 };
            let Op::PagedAttention(attention) = node.call.op else {
                for id in node.call.operands.iter().flatten() {
                    let weight = program.values[id.index()].weight_type();
                    let multiplied = readers(&node.call, *id).iter().any(|op| *op != "embed");
                    let elements = weight.filter(|_| multiplied).map(WeightType::elements);
                    products += elements
                        .map_or(0, |elements| rows.saturating_mul(elements.unwrap_or(usize::MAX)))
                        as u64;
                }
                continue;
            };
            // Each query sees half of the prompt on average, the last one all of it: once for its scores and once for its values.
            let query = tensor(node.call.operands[0]).and_then(|query| query.shape[1].known());
            let seen = if rows == 1 { tokens } else { tokens / 2 };
            let seen = if attention.window > 0 { seen.min(attention.window as usize) } else { seen };
            products += 2 * (rows * seen) as u64 * query.unwrap_or(0) as u64;
        }
        products
    }

    /// Allocates what was planned and brings the weights to the device. `progress` is told the bytes of weights that are
    /// loaded, and how many there are.
    ///
    /// # Errors
    /// [`EngineError::DoesNotFit`] if there is too little memory; those of reading the model and of the device.
    pub fn load(
        mut self,
        model: &Model,
        device: Arc<dyn Device>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine> {
        if let Some(missing) = self.memory.missing() {
            return Err(EngineError::DoesNotFit { missing, plan: Box::new(self.memory) });
        }
        let mut stream = device.stream()?;
        let shared = allocate_shared(&*device, &self.layout)?;
        let mut resident = Resident::default();
        let table = RequestTable::new(&*device, self.fixed)?;
        for (id, value) in self.program.values_from(|origin| *origin == Origin::State) {
            let bytes = state_bytes(value, self.limits, self.fixed)?;
            let memory = match table.state(&value.name, bytes)? {
                Some(memory) => memory,
                None => BufferSlice::whole(device.allocate(bytes.max(1), MemoryKind::Device)?),
            };
            resident.tensors.insert(id, memory);
        }
        let (own, all) = (self.memory.weights, self.memory.all_weights());
        let mut each = |loaded| progress(loaded, all);
        self.load_weights(&**model.weights(), &*device, &mut *stream, &mut resident, &mut each)?;
        stream.synchronize("loading the weights", LOAD_TIMEOUT)?;
        let drafter = match self.draft.take() {
            None => None,
            Some(DraftPlan { model, plan, tokens }) => {
                let engine =
                    plan.load(&model, device.clone(), &mut |loaded, _| progress(own + loaded, all))?;
                Some(Drafter::new(engine, tokens))
            }
        };
        let stop_ids = if self.options.ignore_end { Vec::new() } else { model.eos().to_vec() };
        let vocabulary = model.config().vocabulary;
        Engine::new(self, device, Loaded { stream, resident, shared, table, drafter, stop_ids, vocabulary })
    }

    fn load_weights(
        &self,
        source: &dyn TensorSource,
        device: &dyn Device,
        stream: &mut dyn Stream,
        resident: &mut Resident,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let mut loaded = 0;
        progress(0);
        for (id, value) in self.program.values_from(|origin| matches!(origin, Origin::Weight(_))) {
            let Origin::Weight(expr) = &value.origin else { continue };
            let in_weight = |error: Error| error.at(&value.name);
            let reader = ExprReader::new(source, expr).map_err(in_weight)?;
            match &value.value_type {
                OperandType::Weight(weight) => {
                    let mut reader = reader.stored_as(weight.format).map_err(in_weight)?;
                    let desc = weight_desc(&self.program, id, weight, self.limits);
                    let packed = device.kernels().prepack(stream, &desc, &mut reader).map_err(in_weight)?;
                    loaded += packed.bytes() as u64;
                    resident.weights.insert(id, packed);
                    reader.release();
                }
                OperandType::Tensor(tensor) => {
                    use dsrun_core::WeightReader;
                    let mut reader =
                        reader.stored_as(WeightFormat::Dense(tensor.dtype)).map_err(in_weight)?;
                    let rows = reader.weight_type().rows();
                    let bytes = reader.rows(0, rows).map_err(in_weight)?;
                    let slice = BufferSlice::whole(device.allocate(bytes.len().max(1), MemoryKind::Device)?);
                    stream.upload(&bytes, &slice.slice(0, bytes.len())?)?;
                    loaded += bytes.len() as u64;
                    resident.tensors.insert(id, slice);
                }
            }
            progress(loaded);
        }
        Ok(())
    }
}

/// Quantises a program as the policy says, smoothed first if it says so, and else as the checkpoint says.
fn quantized(program: &Program, model: &Model, options: &EngineOptions) -> Result<Program> {
    let source = &**model.weights();
    let read = |expr: &WeightExpr| {
        let reader = ExprReader::new(source, expr)?;
        reader.decoded_rows(0, dsrun_core::WeightReader::weight_type(&reader).rows())
    };
    let in_pass = |error: Error| error.in_op("quantize");
    let (keep, unseen) = (Policy::default(), Calibration::default());
    let policy = options.quantize.as_ref().unwrap_or(&keep);
    let calibration = options.calibration.as_deref().unwrap_or(&unseen);
    let smoothed = smooth(program, policy, calibration, &read).map_err(in_pass)?;
    Ok(quantize(&smoothed, policy, &|tensor| source.quantises_inputs(tensor)).map_err(in_pass)?)
}

/// Fuses what the device has kernels for, whatever the size of the step.
fn fuse_for(program: &Program, device: &dyn Device, limits: Bucket, fixed: FixedSizes) -> Result<Program> {
    // Layers are alike, so a device is asked the same many times.
    let mut answers: HashMap<String, bool> = HashMap::new();
    let smallest = Bucket { tokens: 1, sequences: 1, rows: 1, ..limits };
    let mut native = |program: &Program, call: &Call| {
        let types = program.operand_types(&call.operands)?;
        let key = format!("{} {types:?}", call.op);
        if let Some(answer) = answers.get(&key) {
            return Ok(*answer);
        }
        let mut answer = true;
        for bucket in [limits, smallest] {
            let desc = describe_call(program, call, &sizes(bucket, fixed))?;
            answer &= device.kernels().query(&desc)?.native;
        }
        answers.insert(key, answer);
        Ok(answer)
    };
    Ok(fuse(program, &mut native)?)
}

/// What a weight is used for: every op of the program that reads it.
pub(crate) fn weight_desc(program: &Program, id: ValueId, weight: &WeightType, limits: Bucket) -> WeightDesc {
    let mut uses = Vec::new();
    for node in &program.nodes {
        if !node.call.operands.contains(&Some(id)) {
            continue;
        }
        // The rows of a call are those of its first result; its activations have that result's element type.
        let result = node.call.results.first().and_then(|result| program.values.get(result.index()));
        let Some(tensor) = result.and_then(Value::tensor_type) else { continue };
        let max_rows = match tensor.shape.first().and_then(dsrun_core::Size::symbol) {
            Some("rows") => limits.rows,
            _ => limits.tokens,
        };
        for op in readers(&node.call, id) {
            let weight_use = WeightUse { op, dtype: tensor.dtype, max_rows };
            if !uses.contains(&weight_use) {
                uses.push(weight_use);
            }
        }
    }
    WeightDesc { weight_type: weight.clone(), uses, immutable: true }
}

/// The primitives that read a value in a call: the op itself, or those of a region's body.
fn readers(call: &Call, id: ValueId) -> Vec<&'static str> {
    let Op::Region(region) = &call.op else {
        return call.op.signature().map(|signature| signature.name).into_iter().collect();
    };
    let inside = call.operands.iter().position(|operand| *operand == Some(id)).map(ValueId::new);
    let reads = region.calls().iter().filter(|call| call.operands.contains(&inside));
    reads.filter_map(|call| Some(call.op.signature()?.name)).collect()
}

fn state_bytes(value: &Value, limits: Bucket, fixed: FixedSizes) -> Result<usize> {
    let tensor = value.tensor_type().ok_or_else(|| Error::internal("a state is no tensor"))?;
    let shape = tensor.resolve(&sizes(limits, fixed))?;
    let bytes = shape.iter().try_fold(tensor.dtype.bytes(), |bytes, size| bytes.checked_mul(*size));
    Ok(bytes.ok_or_else(|| Error::invalid(format!("{shape:?} bytes overflow")).at(&value.name))?)
}

/// The caches are the states that are pages.
pub(crate) fn is_cache(value: &Value) -> bool {
    let first = value.tensor_type().and_then(|tensor| tensor.shape.first());
    first.and_then(dsrun_core::Size::symbol) == Some("pages")
}

fn plan_memory(
    program: &Program,
    device: &dyn Device,
    layout: &Layout,
    fixed: FixedSizes,
    options: &EngineOptions,
) -> Result<MemoryPlan> {
    let (sequences, rows) = (options.max_requests, options.max_requests);
    let limits = Bucket { tokens: options.step_tokens, sequences, rows, every: false };
    let mut memory = MemoryPlan {
        kv_tokens: (fixed.pages * options.block_size) as u64,
        activations: layout.arena_bytes as u64,
        workspace: (layout.workspace_bytes + layout.input_bytes) as u64,
        available: device.memory().free,
        ..MemoryPlan::default()
    };
    for (index, value) in program.values.iter().enumerate() {
        match (&value.origin, &value.value_type) {
            (Origin::Weight(_), OperandType::Weight(weight)) => {
                let desc = weight_desc(program, ValueId::new(index), weight, limits);
                memory.weights += device.kernels().prepack_query(&desc)?.bytes as u64;
            }
            (Origin::Weight(_), OperandType::Tensor(tensor)) => {
                let elements: usize = tensor.resolve(&|_| None)?.iter().product();
                memory.weights += (elements * tensor.dtype.bytes()) as u64;
            }
            (Origin::State, _) => {
                let bytes = state_bytes(value, limits, fixed)? as u64;
                *(if is_cache(value) { &mut memory.kv_cache } else { &mut memory.requests }) += bytes;
            }
            _ => {}
        }
    }
    let caches = program.values_from(|origin| *origin == Origin::State).filter(|(_, value)| is_cache(value));
    let caches: Vec<TensorDesc> = caches
        .filter_map(|(_, value)| value.tensor_type())
        .map(|cache| Ok(TensorDesc::dense(cache.dtype, &cache.resolve(&sizes(limits, fixed))?)))
        .collect::<Result<_>>()?;
    memory.swap = SwapSpace::bytes(&caches, options.swap_tokens / options.block_size)?;
    Ok(memory)
}

/// The memory all buckets share.
pub(crate) fn allocate_shared(device: &dyn Device, layout: &Layout) -> Result<Shared> {
    let allocate = |bytes: usize| -> Result<BufferSlice> {
        Ok(BufferSlice::whole(device.allocate(bytes.max(1), MemoryKind::Device)?))
    };
    Ok(Shared {
        inputs: allocate(layout.input_bytes)?,
        arena: allocate(layout.arena_bytes)?,
        workspace: allocate(layout.workspace_bytes)?,
    })
}
