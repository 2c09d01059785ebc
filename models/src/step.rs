//! What all programs have in common: the step around the layers.
//!
//! # Decoders
//!
//! A step brings some tokens of some sequences, runs them through the layers, and samples a token for each row that
//! wants one. What is uploaded for each step is small; the rest is derived on the device from the request table (see
//! [`dsrun_core::op::PrepareStep`]), so steps can be launched ahead of the tokens they depend on.
//!
//! ## Inputs (i32; extents in the order tokens, sequences, rows)
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
//! ## States
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
//! | `layers.N.key_cache`, `layers.N.value_cache` | `[$pages, kv_heads, block_size, row]` | `row` is [`cache_row_size`] of `head_dim` |
//! | `layers.N.latent_cache` | `[$pages, 1, block_size, rank + rotated]` | in place of both, in models with latent attention |
//!
//! ## Segments and outputs
//!
//! `forward` ends with the logits. `embed` brings the hidden states of all tokens to where the head reads those of the wanted
//! rows; a step whose hidden states nobody wants leaves it out. `sample` and `sample_limited` are two ways to turn them into tokens and to record these: a
//! step runs one of them. The second also applies `bias` and `mask`, which cost memory and time that few steps need.
//!
//! The outputs stand in [`OUTPUTS`]; behind them come the caches, so that nothing of a step is lost as dead. Those of a
//! segment are to be read before another is run.
//!
//! ## Attention's work list
//!
//! `attention_prepare` is built with a list of 0 words. Who compiles the program asks the backend how long it must be and
//! sets the attribute `words`.
//!
//! # Encoders
//!
//! A step brings whole sequences, and every token attends to all tokens of its sequence. Nothing outlives the step, so the program
//! has no states, and the host uploads all that the step needs.
//!
//! | input | shape | |
//! |---|---|---|
//! | `prompt_ids` | `[?tokens]` | tokens; those of a sequence stand side by side |
//! | `step_positions` | `[?tokens]` | the position of each token in its sequence |
//! | `step_token_types` | `[?tokens]` | the part of its sequence that each token belongs to: 0 for the first, 1 for the second |
//! | `step_start`, `step_length` | `[?sequences]` | where the tokens of each sequence start, and how many they are |
//! | `rows` | `[?rows]` | rows of the step that a classification head reads: one of each sequence that has to be classified |
//!
//! The only segment is `forward`. The outputs stand in [`ENCODER_OUTPUTS`]; only models with a classification head have the second.

mod heads;

use dsrun_core::{
    DType, Error, Result, Size, TensorType,
    cache_row::cache_row_size,
    op::{
        Activation, Add, Attention, AttentionMask, AttentionPrepare, CommitTokens, Embed, GatherRows,
        KvWrite, LatentWrite, Linear, LogitProcess, Nonlinearity, PagedAttention, PrepareStep,
        SAMPLING_COLUMNS, Sample,
    },
    program::{Program, ProgramBuilder, SegmentKind, ValueId},
};
pub use heads::{Heads, LatentHeads};

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

/// The outputs of an encoder program, in order: the hidden states of all tokens, `[?tokens, hidden]` in the type of activations, and
/// what the classification head makes of `rows`: f32 `[?rows, labels]`.
pub const ENCODER_OUTPUTS: [&str; 2] = ["hidden", "scores"];

/// The input that only encoder programs have: the part of its sequence that each token belongs to.
pub const TOKEN_TYPES: &str = "step_token_types";

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
    /// Element type of the KV cache: a float, or i8 with scales (see [`dsrun_core::cache_row`]). That of a model with latent attention is
    /// a float.
    pub cache: DType,
    /// Slots of a page of the KV cache.
    pub block_size: u32,
    /// The length of the longest sequence there may be, by which LongRoPE chooses its frequencies; `None` for the model's full context.
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

/// The program of a model under construction. Make one, embed, and add layers. For a decoder, turn the [wanted](Self::wanted) rows
/// into [logits](Self::logits), and end with [`Self::finish`]; for an encoder, end with [`Self::finish_encoder`].
#[derive(Debug)]
pub struct StepBuilder {
    /// Where layers add their calls.
    pub program: ProgramBuilder,
    /// The position of each token of the step: i32 `[?tokens]`.
    pub positions: ValueId,
    options: ProgramOptions,
    ids: ValueId,
    query_start: ValueId,
    query_length: ValueId,
    rows: ValueId,
    kind: Kind,
}

/// What only one kind of program has.
#[derive(Debug)]
enum Kind {
    Decoder(Box<DecoderValues>),
    Encoder { token_types: ValueId },
}

/// The values that only decoder programs have: those of the KV cache, and those of sampling.
#[derive(Debug)]
struct DecoderValues {
    slots: ValueId,
    kv_length: ValueId,
    tables: ValueId,
    work: ValueId,
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

impl StepBuilder {
    /// Declares inputs and request table of a decoder, and begins the segment `forward`.
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
        let kind = Kind::Decoder(Box::new(DecoderValues {
            slots,
            kv_length,
            tables,
            work,
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
        }));
        Ok(Self { program, positions, options, ids, query_start, query_length, rows, kind })
    }

    /// Declares the inputs of an encoder, and begins its segment.
    ///
    /// # Errors
    /// If the program refuses an input, which is a defect.
    pub fn begin_encoder(name: &str, options: ProgramOptions) -> Result<Self> {
        let mut program = ProgramBuilder::new(name);
        program.segment("forward", SegmentKind::Graph);
        let [tokens, sequences, rows] = ["tokens", "sequences", "rows"].map(|extent| program.bounded(extent));
        let mut input = |name, size: &Size| program.input(name, TensorType::new(DType::I32, [size.clone()]));
        let ids = input("prompt_ids", &tokens)?;
        let positions = input("step_positions", &tokens)?;
        let token_types = input(TOKEN_TYPES, &tokens)?;
        let query_start = input("step_start", &sequences)?;
        let query_length = input("step_length", &sequences)?;
        let rows = input("rows", &rows)?;
        let kind = Kind::Encoder { token_types };
        Ok(Self { program, positions, options, ids, query_start, query_length, rows, kind })
    }

    /// The values of a decoder.
    fn decoder(&mut self) -> Result<&mut DecoderValues> {
        match &mut self.kind {
            Kind::Decoder(values) => Ok(values),
            Kind::Encoder { .. } => Err(Error::internal("an encoder has neither a KV cache nor logits")),
        }
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

    /// The embeddings of the token types of an encoder's step: `[?tokens, hidden]`.
    ///
    /// # Errors
    /// If `table` is no matrix, or this is a decoder.
    pub fn embed_token_types(&mut self, table: ValueId) -> Result<ValueId> {
        let Kind::Encoder { token_types } = self.kind else {
            return Err(Error::internal("a decoder has no token types"));
        };
        let embed = Embed { dtype: self.options.activation, first_row: 0, position_offset: 0 };
        self.program.call(embed, [Some(token_types), Some(table), None, None])
    }

    /// Attends with the queries of the next layer: `[?tokens, heads * head_dim]`. A decoder puts keys and values into the cache of
    /// the layer and attends to that; an encoder attends to the keys of the step, on both sides.
    ///
    /// # Errors
    /// If the sizes do not fit.
    pub fn attention(&mut self, heads: Heads) -> Result<ValueId> {
        match self.kind {
            Kind::Decoder(_) => self.cached_attention(heads),
            Kind::Encoder { .. } => self.two_sided_attention(heads),
        }
    }

    fn two_sided_attention(&mut self, heads: Heads) -> Result<ValueId> {
        if heads.sinks.is_some() {
            return Err(Error::internal("encoders have no sinks"));
        }
        let attention = Attention {
            query_heads: count(heads.heads)?,
            kv_heads: count(heads.kv_heads)?,
            scale: heads.scale,
            softcap: heads.score_cap,
            window: heads.window.unwrap_or(0),
            mask: AttentionMask::Bidirectional,
        };
        let operands = [heads.query, heads.key, heads.value, self.query_start, self.query_length].map(Some);
        self.program.call(attention, operands.into_iter().chain([None]))
    }

    /// The mean of each feature over the tokens of its sequence, in every row of the sequence: `[?tokens, features]`. It is attention
    /// with equal weights, by as many heads as the layers have.
    ///
    /// # Errors
    /// If `heads` does not divide the features.
    pub fn mean_of_sequence(&mut self, x: ValueId, heads: usize) -> Result<ValueId> {
        let heads = Heads {
            query: x,
            key: x,
            value: x,
            heads,
            kv_heads: heads,
            head_dim: 0,
            scale: 0.0,
            window: None,
            score_cap: 0.0,
            sinks: None,
        };
        self.two_sided_attention(heads)
    }

    fn cached_attention(&mut self, heads: Heads) -> Result<ValueId> {
        let (options, values) = (self.options, self.decoder()?);
        let (layer, slots) = (values.layers, values.slots);
        values.layers += 1;
        let block_size = options.block_size as usize;
        let row = cache_row_size(options.cache, heads.head_dim);
        let shape = [Size::bucket("pages"), heads.kv_heads.into(), block_size.into(), row.into()];
        let cache = TensorType::new(options.cache, shape);
        let keys = self.program.state(format!("layers.{layer}.key_cache"), cache.clone())?;
        let values = self.program.state(format!("layers.{layer}.value_cache"), cache)?;
        let write = [keys, values, heads.key, heads.value, slots];
        let [keys, values] = fixed(self.program.calls(KvWrite {}, write.map(Some))?)?;
        self.decoder()?.caches.extend([keys, values]);

        let attention = PagedAttention {
            query_heads: count(heads.heads)?,
            kv_heads: count(heads.kv_heads)?,
            scale: heads.scale,
            softcap: heads.score_cap,
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
        let (options, values) = (self.options, self.decoder()?);
        let (layer, slots) = (values.layers, values.slots);
        values.layers += 1;
        let block_size = options.block_size as usize;
        let shape = [Size::bucket("pages"), 1.into(), block_size.into(), (heads.rank + heads.rotated).into()];
        let cache = TensorType::new(options.cache, shape);
        let keys = self.program.state(format!("layers.{layer}.latent_cache"), cache)?;
        let write = [keys, heads.latent, heads.rest, slots];
        let keys = self.program.call(LatentWrite {}, write.map(Some))?;
        self.decoder()?.caches.push(keys);
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
        let DecoderValues { kv_length, tables, work, .. } = *self.decoder()?;
        let step = [self.query_start, self.query_length, kv_length, tables, work].map(Some);
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

    /// Turns the hidden states of the [wanted](Self::wanted) rows into logits times `scale`, which a `cap` above 0 bounds to `cap *
    /// tanh(logit / cap)`. The head is a matrix `[vocabulary, hidden]` and perhaps a bias. What is called from here on belongs to the
    /// segment `embed`.
    ///
    /// # Errors
    /// If the sizes do not fit.
    pub fn logits(
        &mut self,
        wanted: ValueId,
        head: [Option<ValueId>; 2],
        [scale, cap]: [f32; 2],
    ) -> Result<ValueId> {
        let [matrix, bias] = head;
        let mut logits = self.program.call(Linear { dtype: DType::F32 }, [Some(wanted), matrix, bias])?;
        if cap > 0.0 {
            logits = self.times(logits, scale / cap)?;
            logits = self
                .program
                .call(Activation { function: Nonlinearity::Tanh, limit: 0.0 }, [Some(logits), None])?;
            logits = self.times(logits, cap)?;
        } else {
            logits = self.times(logits, scale)?;
        }
        self.program.segment("embed", SegmentKind::Graph);
        Ok(logits)
    }

    /// Multiplies by a factor.
    fn times(&mut self, x: ValueId, factor: f32) -> Result<ValueId> {
        if factor == 1.0 {
            return Ok(x);
        }
        self.program.call(Add { alpha: factor - 1.0 }, [Some(x), Some(x), None, None])
    }

    /// Turns the hidden states of the [wanted](Self::wanted) rows of an encoder into scores: f32 `[?rows, labels]`. `matrix` is
    /// `[labels, hidden]`.
    ///
    /// # Errors
    /// If the sizes do not fit.
    pub fn scores(&mut self, wanted: ValueId, matrix: ValueId, bias: Option<ValueId>) -> Result<ValueId> {
        self.program.call(Linear { dtype: DType::F32 }, [Some(wanted), Some(matrix), bias])
    }

    /// Ends the program of an encoder. `hidden` are the hidden states of all tokens.
    ///
    /// # Errors
    /// If the program is not valid.
    pub fn finish_encoder(self, hidden: ValueId, scores: Option<ValueId>) -> Result<Program> {
        let outputs: Vec<ValueId> = [hidden].into_iter().chain(scores).collect();
        self.program.finish(&outputs)
    }

    /// Samples from logits, and ends the program. `hidden` are the hidden states of all tokens.
    ///
    /// # Errors
    /// If the sizes do not fit, or the program is not valid.
    pub fn finish(mut self, logits: ValueId, hidden: ValueId) -> Result<Program> {
        let (bias, mask) = {
            let values = self.decoder()?;
            (values.bias, values.mask)
        };
        self.program.segment("sample", SegmentKind::Graph);
        let plain = self.sample(logits, [None; 2])?;
        self.program.segment("sample_limited", SegmentKind::Graph);
        let limited = self.sample(logits, [Some(bias), Some(mask)])?;

        let values = self.decoder()?;
        let states = [values.length, values.last_token, values.finished, values.counts];
        let caches = std::mem::take(&mut values.caches);
        let outputs = [logits, hidden].into_iter().chain(plain).chain(limited).chain(states).chain(caches);
        let outputs: Vec<ValueId> = outputs.collect();
        self.program.finish(&outputs)
    }

    /// Samples from logits, with a bias and a mask if there are any, and records the tokens. Gives the logits that are sampled
    /// from, the tokens, and the logarithms of their probabilities.
    fn sample(&mut self, logits: ValueId, limits: [Option<ValueId>; 2]) -> Result<[ValueId; 3]> {
        let Self { program, kind: Kind::Decoder(values), .. } = self else {
            return Err(Error::internal("an encoder does not sample"));
        };
        let process = [logits, values.row_request, values.parameters, values.counts].map(Some);
        let processed = program.call(LogitProcess {}, process.into_iter().chain(limits))?;
        let sample = [processed, values.row_request, values.row_positions, values.parameters, values.seeds];
        let [ids, log_probability] = fixed(program.calls(Sample {}, sample.map(Some))?)?;
        let commit =
            [values.commit_request, ids, values.stop_ids, values.last_token, values.finished, values.counts];
        [values.last_token, values.finished, values.counts] =
            fixed(program.calls(CommitTokens {}, commit.map(Some))?)?;
        Ok([processed, ids, log_probability])
    }
}

/// A number of heads or features, as an attribute.
fn count(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::invalid(format!("{count} is too large")))
}

/// The results of an op that has exactly `N`.
fn fixed<const N: usize>(results: Vec<ValueId>) -> Result<[ValueId; N]> {
    results.try_into().map_err(|results: Vec<ValueId>| {
        Error::internal(format!("an op has {} results, not {N}", results.len()))
    })
}
