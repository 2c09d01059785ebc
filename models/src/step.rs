//! What every decoder program has in common: the step around the layers.
//!
//! A step brings some tokens of some sequences, runs them through the layers, and samples a token for each row that
//! wants one. What is uploaded for each step is small; the rest is derived on the device from the request table (see
//! [`dsrun_core::op::PrepareStep`]), so steps can be launched ahead of the tokens they depend on.
//!
//! # Inputs (i32; extents in the order tokens, sequences, rows)
//!
//! | input | shape | |
//! |---|---|---|
//! | `step_request` | `[?sequences]` | row of the request table; -1 is a padded sequence |
//! | `step_length` | `[?sequences]` | how many tokens it brings |
//! | `step_source` | `[?sequences]` | where they start in `prompt_ids`; -1: it brings the token generated last |
//! | `prompt_ids` | `[?tokens]` | prompt tokens |
//! | `rows` | `[?rows]` | rows of the step whose logits are wanted |
//! | `row_request` | `[?rows]` | whose token the row samples; -1: only logits are wanted |
//! | `commit_request` | `[?rows]` | whose last token the sampled one becomes, no request twice; -1: it is just reported |
//! | `wanted_start`, `wanted_length` | `[?sequences]` | where the wanted rows of a sequence begin in `rows`, and how many they are |
//! | `mask` | u32 `[?rows, ceil(V / 32)]` | tokens that may be sampled; read by `sample_limited` only, and the last input |
//!
//! Wanted are the last tokens of a sequence, or none of it; rows stand in the order of the tokens. The program as a model writes
//! it has no use for the last two inputs ([`WANTED`]): they are for passes that compute for the wanted rows alone.
//!
//! # States
//!
//! | state | type | |
//! |---|---|---|
//! | `block_table` | i32 `[$requests, $blocks]` | pages of each request, -1 behind the last |
//! | `last_token`, `finished`, `length` | i32 `[$requests]` | |
//! | `counts` | i32 `[$requests, V]` | for penalties |
//! | `parameters` | f32 `[$requests, 8]` | see [`dsrun_core::op::SamplingColumn`] |
//! | `seeds` | u32 `[$requests, 2]` | |
//! | `bias` | f32 `[$requests, V]` | added to logits by `sample_limited` |
//! | `stop_ids` | i32 `[$stop_ids]` | tokens that finish a request; -1 is none |
//! | `layers.N.key_cache`, `layers.N.value_cache` | `[$pages, kv_heads, block_size, head_dim]` | |
//! | `layers.N.latent_cache` | `[$pages, 1, block_size, rank + rotated]` | in place of both, in models with latent attention |
//!
//! # Segments and outputs
//!
//! `forward` ends with the logits. `embed` brings the hidden states of all tokens to where the head reads those of the wanted
//! rows; a step whose hidden states nobody wants leaves it out. `sample` and `sample_limited` are two ways to turn them into tokens and to record these: a
//! step runs one of them. The second also applies `bias` and `mask`, which cost memory and time that few steps need.
//!
//! The outputs stand in [`OUTPUTS`]; behind them come the caches, so that nothing of a step is lost as dead. Those of a
//! segment are to be read before another is run.
//!
//! # Attention's work list
//!
//! `attention_prepare` is built with a list of 0 words. Who compiles the program asks the backend how long it must be and
//! sets the attribute `words`.

use dsrun_core::{
    DType, Result, Size, TensorType,
    op::{
        Add, AttentionMask, AttentionPrepare, CommitTokens, Embed, GatherRows, KvWrite, LatentWrite, Linear,
        LogitProcess, PagedAttention, PrepareStep, SAMPLING_COLUMNS, Sample,
    },
    program::{Program, ProgramBuilder, SegmentKind, ValueId},
};

/// The first outputs of a decoder program, in order: the logits; the hidden states that the head would turn into logits, of all
/// tokens, `[?tokens, hidden]` in the type of activations; of each way to sample, the logits that are sampled from f32
/// `[?rows, V]`, the tokens i32 `[?rows]` and the logarithms of their probabilities f32 `[?rows]`; and the states that a step
/// updates. Behind them come the key and value cache of each layer.
pub const OUTPUTS: [&str; 12] = [
    "logits",
    "hidden",
    "processed",
    "ids",
    "log_probability",
    "limited_processed",
    "limited_ids",
    "limited_log_probability",
    "length",
    "last_token",
    "finished",
    "counts",
];

/// The inputs that say which of `rows` are a sequence's: where they begin, and how many they are.
pub const WANTED: [&str; 2] = ["wanted_start", "wanted_length"];

/// How weights are stored on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Storage {
    /// As the file has them.
    #[default]
    Keep,
    /// Rounded to a dense float type.
    Cast(DType),
}

/// What is chosen when a program is built, because it does not depend on the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramOptions {
    /// Element type of activations; a float.
    pub activation: DType,
    /// How matrices are stored.
    pub storage: Storage,
    /// Element type of the KV cache; a float.
    pub cache: DType,
    /// Slots of a page of the KV cache.
    pub block_size: u32,
    /// The length of the longest sequence, by which LongRoPE chooses its frequencies; `None` for the model's full context.
    pub context: Option<usize>,
}

impl Default for ProgramOptions {
    fn default() -> Self {
        Self {
            activation: DType::F32,
            storage: Storage::Keep,
            cache: DType::F32,
            block_size: 16,
            context: None,
        }
    }
}

/// The queries, keys and values of a layer, rotated, and how they attend.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// `[tokens, heads * head_dim]`.
    pub query: ValueId,
    /// `[tokens, kv_heads * head_dim]`.
    pub key: ValueId,
    /// `[tokens, kv_heads * head_dim]`.
    pub value: ValueId,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// What scores are multiplied by.
    pub scale: f32,
    /// How many keys a query sees, its own included; `None` for all before it.
    pub window: Option<u32>,
    /// One more score of each head, without a key: f32 `[heads]`.
    pub sinks: Option<ValueId>,
}

/// The queries of a layer and the latents of its keys and values, and how they attend.
#[derive(Clone, Copy, Debug)]
pub struct LatentHeads {
    /// Queries multiplied by the key projections of their heads, and behind each its rotated part: `[tokens, heads * (rank +
    /// rotated)]`.
    pub query: ValueId,
    /// `[tokens, rank]`.
    pub latent: ValueId,
    /// The rotated part of keys: `[tokens, rotated]`.
    pub rest: ValueId,
    /// Query heads.
    pub heads: usize,
    /// Features of a latent.
    pub rank: usize,
    /// Features of the rotated part.
    pub rotated: usize,
    /// What scores are multiplied by.
    pub scale: f32,
}

/// A decoder program under construction. Make one, embed, add layers, turn the [wanted](Self::wanted) rows into
/// [logits](Self::logits), and end with [`Self::finish`].
#[derive(Debug)]
pub struct DecoderStep {
    /// Where layers add their calls.
    pub program: ProgramBuilder,
    /// The position of each token of the step: i32 `[?tokens]`.
    pub positions: ValueId,
    options: ProgramOptions,
    ids: ValueId,
    slots: ValueId,
    query_start: ValueId,
    query_length: ValueId,
    kv_length: ValueId,
    tables: ValueId,
    work: ValueId,
    rows: ValueId,
    row_request: ValueId,
    commit_request: ValueId,
    row_positions: ValueId,
    length: ValueId,
    counts: ValueId,
    last_token: ValueId,
    finished: ValueId,
    parameters: ValueId,
    seeds: ValueId,
    stop_ids: ValueId,
    bias: ValueId,
    mask: ValueId,
    caches: Vec<ValueId>,
    /// Layers that have a cache so far.
    layers: usize,
}

impl DecoderStep {
    /// Declares inputs and request table, and begins the segment `forward`.
    ///
    /// # Errors
    /// If an option is not possible, such as pages of 0 slots.
    pub fn begin(name: &str, vocabulary: usize, options: ProgramOptions) -> Result<Self> {
        let mut program = ProgramBuilder::new(name);
        program.segment("forward", SegmentKind::Graph);
        let [tokens, sequences, wanted] =
            ["tokens", "sequences", "rows"].map(|extent| program.bounded(extent));
        let mut input = |name, size: &Size| program.input(name, TensorType::new(DType::I32, [size.clone()]));
        let step_request = input("step_request", &sequences)?;
        let step_length = input("step_length", &sequences)?;
        let step_source = input("step_source", &sequences)?;
        let prompt_ids = input("prompt_ids", &tokens)?;
        let rows = input("rows", &wanted)?;
        let row_request = input("row_request", &wanted)?;
        let commit_request = input("commit_request", &wanted)?;
        for name in WANTED {
            input(name, &sequences)?;
        }
        // The last, so that it need not be brought where it is not read.
        let mask = TensorType { dtype: DType::U32, shape: vec![wanted, vocabulary.div_ceil(32).into()] };
        let mask = program.input("mask", mask)?;

        let requests = || Size::bucket("requests");
        let mut state = |name, dtype, shape: Vec<Size>| program.state(name, TensorType { dtype, shape });
        let block_table = state("block_table", DType::I32, vec![requests(), Size::bucket("blocks")])?;
        let last_token = state("last_token", DType::I32, vec![requests()])?;
        let finished = state("finished", DType::I32, vec![requests()])?;
        let length = state("length", DType::I32, vec![requests()])?;
        let counts = state("counts", DType::I32, vec![requests(), vocabulary.into()])?;
        let parameters = state("parameters", DType::F32, vec![requests(), SAMPLING_COLUMNS.into()])?;
        let seeds = state("seeds", DType::U32, vec![requests(), 2.into()])?;
        let bias = state("bias", DType::F32, vec![requests(), vocabulary.into()])?;
        let stop_ids = state("stop_ids", DType::I32, vec![Size::bucket("stop_ids")])?;

        let prepare = PrepareStep { block_size: options.block_size };
        let operands = [
            step_request,
            step_length,
            step_source,
            prompt_ids,
            rows,
            block_table,
            last_token,
            finished,
            length,
            counts,
        ];
        let results = fixed(program.calls(prepare, operands.map(Some))?)?;
        let [
            ids,
            positions,
            slots,
            query_start,
            query_length,
            kv_length,
            tables,
            row_positions,
            length,
            counts,
        ] = results;
        let work =
            program.call(AttentionPrepare { words: 0 }, [query_start, query_length, kv_length].map(Some))?;
        Ok(Self {
            program,
            positions,
            options,
            ids,
            slots,
            query_start,
            query_length,
            kv_length,
            tables,
            work,
            rows,
            row_request,
            commit_request,
            row_positions,
            length,
            counts,
            last_token,
            finished,
            parameters,
            seeds,
            stop_ids,
            bias,
            mask,
            caches: Vec::new(),
            layers: 0,
        })
    }

    /// The embeddings of the step's tokens, with those of their positions if there is a table of them: `[?tokens, hidden]`.
    ///
    /// # Errors
    /// If a table is no matrix, or they differ in columns.
    pub fn embed(&mut self, table: ValueId, positions: Option<ValueId>) -> Result<ValueId> {
        let embed = Embed { dtype: self.options.activation, first_row: 0, position_offset: 0 };
        let places = positions.map(|_| self.positions);
        self.program.call(embed, [Some(self.ids), Some(table), places, positions])
    }

    /// The embeddings of the positions of the step's tokens: `[?tokens, hidden]`.
    ///
    /// # Errors
    /// If `table` is no matrix.
    pub fn embed_positions(&mut self, table: ValueId) -> Result<ValueId> {
        let embed = Embed { dtype: self.options.activation, first_row: 0, position_offset: 0 };
        self.program.call(embed, [Some(self.positions), Some(table), None, None])
    }

    /// Puts the keys and values of the next layer into its cache, and attends to it: `[?tokens, heads * head_dim]`.
    ///
    /// # Errors
    /// If the sizes do not fit.
    pub fn attention(&mut self, heads: Heads) -> Result<ValueId> {
        let layer = self.layers;
        let block_size = self.options.block_size as usize;
        let shape = [Size::bucket("pages"), heads.kv_heads.into(), block_size.into(), heads.head_dim.into()];
        let cache = TensorType::new(self.options.cache, shape);
        let keys = self.program.state(format!("layers.{layer}.key_cache"), cache.clone())?;
        let values = self.program.state(format!("layers.{layer}.value_cache"), cache)?;
        let write = [keys, values, heads.key, heads.value, self.slots];
        let [keys, values] = fixed(self.program.calls(KvWrite {}, write.map(Some))?)?;
        self.caches.extend([keys, values]);
        self.layers += 1;

        let attention = PagedAttention {
            query_heads: count(heads.heads)?,
            kv_heads: count(heads.kv_heads)?,
            scale: heads.scale,
            softcap: 0.0,
            window: heads.window.unwrap_or(0),
            mask: AttentionMask::Causal,
            value_size: 0,
        };
        self.attend(attention, [Some(heads.query), Some(keys), Some(values)], heads.sinks)
    }

    /// Puts the latents of the next layer into its cache, and attends to it. The result is the weighted sum of latents for each
    /// head: `[?tokens, heads * rank]`.
    ///
    /// # Errors
    /// If the sizes do not fit.
    pub fn latent_attention(&mut self, heads: LatentHeads) -> Result<ValueId> {
        let (layer, block_size) = (self.layers, self.options.block_size as usize);
        let shape = [Size::bucket("pages"), 1.into(), block_size.into(), (heads.rank + heads.rotated).into()];
        let cache = TensorType::new(self.options.cache, shape);
        let keys = self.program.state(format!("layers.{layer}.latent_cache"), cache)?;
        let write = [keys, heads.latent, heads.rest, self.slots];
        let keys = self.program.call(LatentWrite {}, write.map(Some))?;
        self.caches.push(keys);
        self.layers += 1;
        let attention = PagedAttention {
            query_heads: count(heads.heads)?,
            kv_heads: 1,
            scale: heads.scale,
            softcap: 0.0,
            window: 0,
            mask: AttentionMask::Causal,
            value_size: count(heads.rank)?,
        };
        self.attend(attention, [Some(heads.query), Some(keys), None], None)
    }

    /// Attends with queries to a key and a value cache.
    fn attend(
        &mut self,
        attention: PagedAttention,
        [query, keys, values]: [Option<ValueId>; 3],
        sinks: Option<ValueId>,
    ) -> Result<ValueId> {
        let step = [self.query_start, self.query_length, self.kv_length, self.tables, self.work].map(Some);
        let operands = [query, keys, values].into_iter().chain(step).chain([None, sinks, None]);
        self.program.call(attention, operands)
    }

    /// The rows whose logits are wanted, out of those of all tokens: `[?rows, hidden]`. What comes behind it, the last norm
    /// included, runs on these rows only.
    ///
    /// # Errors
    /// If `hidden` has no rows.
    pub fn wanted(&mut self, hidden: ValueId) -> Result<ValueId> {
        self.program.call(GatherRows {}, [hidden, self.rows].map(Some))
    }

    /// Turns the hidden states of the [wanted](Self::wanted) rows into logits times `scale`. The head is a matrix
    /// `[vocabulary, hidden]` and perhaps a bias. What is called from here on belongs to the segment `embed`.
    ///
    /// # Errors
    /// If the sizes do not fit.
    pub fn logits(&mut self, wanted: ValueId, head: [Option<ValueId>; 2], scale: f32) -> Result<ValueId> {
        let [matrix, bias] = head;
        let mut logits = self.program.call(Linear { dtype: DType::F32 }, [Some(wanted), matrix, bias])?;
        if scale != 1.0 {
            let operands = [Some(logits), Some(logits), None, None];
            logits = self.program.call(Add { alpha: scale - 1.0 }, operands)?;
        }
        self.program.segment("embed", SegmentKind::Graph);
        Ok(logits)
    }

    /// Samples from logits, and ends the program. `hidden` are the hidden states of all tokens.
    ///
    /// # Errors
    /// If the sizes do not fit, or the program is not valid.
    pub fn finish(mut self, logits: ValueId, hidden: ValueId) -> Result<Program> {
        self.program.segment("sample", SegmentKind::Graph);
        let plain = self.sample(logits, [None; 2])?;
        self.program.segment("sample_limited", SegmentKind::Graph);
        let limited = self.sample(logits, [Some(self.bias), Some(self.mask)])?;

        let states = [self.length, self.last_token, self.finished, self.counts];
        let outputs =
            [logits, hidden].into_iter().chain(plain).chain(limited).chain(states).chain(self.caches);
        let outputs: Vec<ValueId> = outputs.collect();
        self.program.finish(&outputs)
    }

    /// Samples from logits, with a bias and a mask if there are any, and records the tokens. Gives the logits that are sampled
    /// from, the tokens, and the logarithms of their probabilities.
    fn sample(&mut self, logits: ValueId, limits: [Option<ValueId>; 2]) -> Result<[ValueId; 3]> {
        let program = &mut self.program;
        let process = [logits, self.row_request, self.parameters, self.counts].map(Some);
        let processed = program.call(LogitProcess {}, process.into_iter().chain(limits))?;
        let sample = [processed, self.row_request, self.row_positions, self.parameters, self.seeds];
        let [ids, log_probability] = fixed(program.calls(Sample {}, sample.map(Some))?)?;
        let commit = [self.commit_request, ids, self.stop_ids, self.last_token, self.finished, self.counts];
        [self.last_token, self.finished, self.counts] =
            fixed(program.calls(CommitTokens {}, commit.map(Some))?)?;
        Ok([processed, ids, log_probability])
    }
}

/// A number of heads or features, as an attribute.
fn count(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| dsrun_core::Error::invalid(format!("{count} is too large")))
}

/// The results of an op that has exactly `N`.
fn fixed<const N: usize>(results: Vec<ValueId>) -> Result<[ValueId; N]> {
    results.try_into().map_err(|results: Vec<ValueId>| {
        dsrun_core::Error::internal(format!("an op has {} results, not {N}", results.len()))
    })
}
