//! The options of an engine.

mod experts_in;
mod kv_in;
mod prefix_store;
mod speculation;
mod weights_in;

use crate::{
    error::{EngineError, Result},
    passes::{
        partition::PipelineOptions,
        quantize::{Calibration, Policy},
        shard::ShardPolicy,
    },
};
use dsrun_core::DType;
use dsrun_models::config::DecoderConfig;
pub use experts_in::ExpertsIn;
pub use kv_in::KvIn;
pub use prefix_store::PrefixStore;
pub use speculation::Speculation;
use std::sync::Arc;
pub use weights_in::WeightsIn;

/// The element type of weights, activations and KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Weights as in the file; activations in the device's preferred type.
    #[default]
    Keep,
    /// Everything in f32.
    F32,
    /// Everything in bf16.
    Bf16,
    /// Everything in f16.
    F16,
}

impl Precision {
    /// The element type for all tensors; `None` to keep the types of the file.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::Keep => None,
            Self::F32 => Some(DType::F32),
            Self::Bf16 => Some(DType::BF16),
            Self::F16 => Some(DType::F16),
        }
    }
}

/// The element type of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CachePrecision {
    /// That of the activations, or f16 if they are f32 (see [`EngineOptions::exact`]).
    #[default]
    Keep,
    /// f32.
    F32,
    /// bf16.
    Bf16,
    /// f16.
    F16,
    /// Signed bytes with a scale for each 32 elements of a key or value.
    Int8,
}

impl CachePrecision {
    /// The element type; `None` for [`Self::Keep`].
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::Keep => None,
            Self::F32 => Some(DType::F32),
            Self::Bf16 => Some(DType::BF16),
            Self::F16 => Some(DType::F16),
            Self::Int8 => Some(DType::I8),
        }
    }
}

/// The options of an engine.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct EngineOptions {
    /// The element type of weights and activations, and of the KV cache unless `kv_precision` says otherwise.
    pub precision: Precision,
    /// The element type of the KV cache.
    pub kv_precision: CachePrecision,
    /// Whether numbers are rounded only as the types of weights and activations say. Otherwise a device that has `llm-quant-2`
    /// rounds the inputs of linear layers with quantised weights to 8 bits, with a scale for each
    /// [`INPUT_GROUP`](crate::passes::quantize::INPUT_GROUP); and unless `precision` or `kv_precision` name a type, the KV cache of
    /// f32 activations is kept in f16.
    pub exact: bool,
    /// Tokens a request may have, prompt and answer together. The default is the model's own limit, at most
    /// [`EngineOptions::DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// The sequence length by which LongRoPE selects its short or long frequencies; it does not affect memory. The default is
    /// `context` if given, else the model's own limit.
    pub rope_context: Option<usize>,
    /// The maximum number of requests that run at the same time.
    pub max_requests: usize,
    /// The maximum number of tokens of a step: longer prompts are split into chunks.
    pub step_tokens: usize,
    /// Whether to time steps at load, and limit steps to the smallest size whose prefill rate is close to that of
    /// `step_tokens`.
    pub tune_step: bool,
    /// Token slots of a page of the KV cache.
    pub block_size: usize,
    /// Tokens that the KV cache holds over all requests. The default is every request's whole context, or what fits into the
    /// device's memory. When no page is left, later requests are pre-empted: they give their pages to earlier requests and
    /// resume afterwards.
    pub kv_tokens: Option<usize>,
    /// Capacity in tokens of the host memory that the KV cache of pre-empted requests is swapped to. What does not fit
    /// (everything, with 0) is recomputed when the request resumes.
    pub swap_tokens: usize,
    /// Whether the KV cache keeps prompts and answers for later requests with the same prefix, while there is room.
    pub prefix_cache: bool,
    /// Where the prefix cache keeps pages outside the device; nowhere by default.
    pub prefix_store: PrefixStore,
    /// Whether calls are fused into regions that the device has kernels for. Without it every primitive runs separately, for
    /// comparison.
    pub fuse: bool,
    /// Whether a step may be launched before the host has read the tokens of the step before it. A request that the host ends
    /// (by a stop string) then computes one token too many, which is dropped. Without it every token is read before the next
    /// step is launched, for comparison.
    pub launch_ahead: bool,
    /// Whether prompts share steps with requests that generate, and are split to fill them (Dynamic SplitFuse). Without it a
    /// step has either whole prompts, as many as fit, or generation, and prompts go first, for comparison.
    pub split_prompts: bool,
    /// Whether steps are captured as graphs, if the device supports them. Without it every call is launched separately, for
    /// comparison.
    pub graphs: bool,
    /// Whether results must be bit-identical whatever else is in the batch. A device that does not guarantee this is refused, and
    /// calls are fused the same way for all step sizes. Most devices have to be opened for it:
    /// [`DeviceOptions::batch_invariant`](dsrun_core::device::DeviceOptions::batch_invariant).
    pub batch_invariant: bool,
    /// How tokens are proposed for speculative decoding, which verifies several per step; off by default. Answers stay the same.
    /// Steps sample up to this many more rows, whose logits take memory; a draft model is part of the memory plan. Requests with
    /// penalties or a constraint do not speculate, and no request does before it has its [fewest
    /// tokens](crate::Request::min_tokens).
    pub speculation: Option<Speculation>,
    /// Where the weights of layers are kept. In host memory, they are copied to the device for every step.
    pub weights_in: WeightsIn,
    /// Where the weights of experts are kept. Steps of few tokens read experts in host memory when they choose them; other steps copy
    /// them to the device.
    pub experts: ExpertsIn,
    /// Where keys and values are kept. Steps of few tokens for each request read those in host memory there; other steps copy the pages
    /// that they need to the device.
    pub kv_in: KvIn,
    /// Equal engines that share the host's memory, each with devices of its own.
    pub replicas: usize,
    /// The engines that run on the same devices, this one included. If there are others, ranks do not exchange data within launches that
    /// need a whole device: the launches of two engines would wait for each other.
    pub engines_on_devices: usize,
    /// With [`WeightsIn::Disk`], the bytes of host memory that streamed weights may take, for each rank; half of what is available if
    /// absent.
    pub host_memory: Option<u64>,
    /// If weights or the KV cache are in host memory, the maximum number of layers whose weights, or keys and values, stay on the device;
    /// as many as fit if absent.
    pub resident_layers: Option<usize>,
    /// How weights are quantised at load, and activations in each step; off by default.
    pub quantize: Option<Policy>,
    /// Statistics of the activations, for policies that [smooth](Policy::smooth); see [`calibrate`](crate::calibrate).
    #[serde(skip)]
    pub calibration: Option<Arc<Calibration>>,
    /// How weights are split over several devices; by default a search decides.
    pub shard: ShardPolicy,
    /// How layers are divided into stages, on devices of their own; by default they are not.
    pub pipeline: PipelineOptions,
    /// Whether answers continue past the model's end tokens, for measurements.
    pub ignore_end: bool,
}

impl EngineOptions {
    /// The context that is planned for by default.
    pub const DEFAULT_CONTEXT: usize = 2048;
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            precision: Precision::Keep,
            kv_precision: CachePrecision::Keep,
            exact: true,
            context: None,
            rope_context: None,
            max_requests: 1,
            step_tokens: 256,
            tune_step: false,
            block_size: 16,
            kv_tokens: None,
            swap_tokens: 0,
            prefix_cache: true,
            prefix_store: PrefixStore::default(),
            fuse: true,
            launch_ahead: true,
            split_prompts: true,
            graphs: true,
            batch_invariant: false,
            speculation: None,
            weights_in: WeightsIn::default(),
            experts: ExpertsIn::default(),
            kv_in: KvIn::default(),
            replicas: 1,
            engines_on_devices: 1,
            host_memory: None,
            resident_layers: None,
            quantize: None,
            calibration: None,
            shard: ShardPolicy::default(),
            pipeline: PipelineOptions::default(),
            ignore_end: false,
        }
    }
}

impl EngineOptions {
    /// Whether weights are kept in host memory or on disk although they may fit on the device.
    pub(crate) fn keeps_weights_off_device(&self) -> bool {
        self.weights_in.is_off_device() || self.experts == ExpertsIn::Host
    }

    /// The maximum number of rows that a request samples from in a step.
    pub(crate) fn rows_per_request(&self) -> usize {
        1 + self.speculation.map_or(0, Speculation::tokens)
    }

    /// Pages of host memory for requests that are pre-empted.
    pub(crate) fn host_pages(&self) -> usize {
        self.swap_tokens / self.block_size
    }

    /// Whether pages of the KV cache move to the host and back.
    pub(crate) fn moves_pages(&self) -> bool {
        self.host_pages() > 0 || self.prefix_store.is_on()
    }

    /// The context, given the model's own limit.
    ///
    /// # Errors
    /// If it is 0 or above the model's limit.
    pub(crate) fn context(&self, limit: usize) -> Result<usize> {
        match self.context {
            None => Ok(limit.min(Self::DEFAULT_CONTEXT)),
            Some(context) if (1..=limit).contains(&context) => Ok(context),
            Some(context) => {
                Err(EngineError::option("context", context, format!("must be from 1 to the model's {limit}")))
            }
        }
    }

    /// The length of the longest sequence for rotary embeddings, given the model's own limit.
    pub(crate) fn rope_context(&self, limit: usize) -> usize {
        self.rope_context.or(self.context).map_or(limit, |context| context.min(limit))
    }

    /// The options as they apply to a model. An encoder has no cache, and the tokens of a text attend to each other in both
    /// directions: a step has whole texts, so it has room for the longest.
    ///
    /// # Errors
    /// If an option is not possible for the model.
    pub(crate) fn for_model(&self, config: &DecoderConfig) -> Result<Self> {
        if config.encoder.is_none() {
            return Ok(self.clone());
        }
        if let Some(speculation) = self.speculation {
            let rule = "must be off: the model is an encoder, which generates no tokens";
            return Err(EngineError::option("speculate", speculation, rule));
        }
        if self.kv_in == KvIn::Host {
            let rule = "must be device: the model is an encoder, which has no KV cache";
            return Err(EngineError::option("kv-in", self.kv_in, rule));
        }
        let stages = self.pipeline.count();
        if stages > 1 {
            let rule = "must be 1: the model is an encoder, whose layers are not divided into stages";
            return Err(EngineError::option("pp", stages, rule));
        }
        Ok(Self {
            step_tokens: self.step_tokens.max(self.context(config.context)?),
            split_prompts: false,
            prefix_cache: false,
            prefix_store: PrefixStore::default(),
            tune_step: false,
            kv_tokens: None,
            swap_tokens: 0,
            ..self.clone()
        })
    }

    /// Checks every field's range.
    ///
    /// # Errors
    /// Names the option, its value and the range.
    pub(crate) fn validate(&self) -> Result<()> {
        let ranges = [
            ("max-requests", self.max_requests, 1..=4096),
            ("step-tokens", self.step_tokens, 1..=65536),
            ("block-size", self.block_size, 1..=1024),
        ];
        for (option, value, range) in ranges {
            if !range.contains(&value) {
                let rule = format!("must be from {} to {}", range.start(), range.end());
                return Err(EngineError::option(option, value, rule));
            }
        }
        if self.step_tokens < self.max_requests {
            let rule = format!(
                "must be at least max-requests ({}): each needs a token of a step",
                self.max_requests
            );
            return Err(EngineError::option("step-tokens", self.step_tokens, rule));
        }
        if self.experts == ExpertsIn::Host && !matches!(self.weights_in, WeightsIn::Auto | WeightsIn::Host) {
            let rule = format!("needs --weights-in auto or host, not {}", self.weights_in);
            return Err(EngineError::option("experts", self.experts, rule));
        }
        if let (Some(bytes), false) = (self.host_memory, matches!(self.weights_in, WeightsIn::Disk(_))) {
            let rule =
                format!("bounds weights on disk: it needs --weights-in disk:FOLDER, not {}", self.weights_in);
            return Err(EngineError::option("host-memory", format!("{bytes} bytes"), rule));
        }
        if let Some(speculation) = self.speculation {
            speculation.validate()?;
        }
        if !self.prefix_cache {
            self.prefix_store.refuse("needs the prefix cache, which is off")?;
        }
        self.pipeline.check()?;
        if let Some(policy) = &self.quantize {
            policy.check().map_err(|error| error.in_op("quantize"))?;
        }
        Ok(())
    }
}
