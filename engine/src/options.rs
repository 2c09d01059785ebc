//! How an engine is set up.

use crate::{
    error::{EngineError, Result},
    passes::quantize::{Calibration, Policy},
    speculation::Speculation,
};
use dsrun_core::DType;
use std::sync::Arc;

/// Element types of weights, activations and cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Weights as the file has them; activations in the type the device likes best.
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
    /// The element type everything is in; `None` to keep the file's.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::Keep => None,
            Self::F32 => Some(DType::F32),
            Self::Bf16 => Some(DType::BF16),
            Self::F16 => Some(DType::F16),
        }
    }
}

/// How an engine is set up.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct EngineOptions {
    /// Element types.
    pub precision: Precision,
    /// Tokens a request may have, prompt and answer together. The model's own limit if absent, at most
    /// [`EngineOptions::DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Requests that run at the same time.
    pub max_requests: usize,
    /// Tokens a step may process: longer prompts are cut into chunks.
    pub step_tokens: usize,
    /// Whether to time steps when the model is loaded, and keep to the smallest that processes prompts nearly as fast as
    /// those of `step_tokens`.
    pub tune_step: bool,
    /// Slots of a page of the KV cache.
    pub block_size: usize,
    /// Tokens the KV cache holds over all requests. If absent, enough for every request's whole context, or what fits into
    /// the device's memory. Requests that outgrow it yield their pages to those before them and go on later.
    pub kv_tokens: Option<usize>,
    /// Tokens of KV cache that host memory takes in for requests that had to yield theirs; beyond that, and with 0, it is
    /// computed once more when they go on.
    pub swap_tokens: usize,
    /// Whether the KV cache keeps prompts and answers for later requests that begin alike, as long as there is room.
    pub prefix_cache: bool,
    /// Whether calls are fused into regions that the device has kernels for. Without it every primitive runs by itself, to
    /// compare with.
    pub fuse: bool,
    /// Whether a step may be launched before the host has read the tokens of the one before. A request that ends by what the
    /// host sees in a token (a stop string) then computes one token too many, which is dropped. Without it every token is
    /// read before the next step is launched.
    pub launch_ahead: bool,
    /// Whether prompts share steps with requests that generate, and are split to fill them (Dynamic SplitFuse). Without it
    /// steps have either whole prompts, as many as fit, or generation, and prompts go first: to compare with.
    pub split_prompts: bool,
    /// Whether steps are captured as graphs, where the device has them. Without it every call is launched by itself, to compare
    /// with.
    pub graphs: bool,
    /// How tokens are proposed that the model checks several at a time; not at all if absent. Answers are the same. Steps sample
    /// up to as many more rows, which takes memory for their logits; a second model is part of the memory plan. Requests with penalties or a constraint go without, and all
    /// do until they have their [fewest tokens](crate::Request::min_tokens).
    pub speculation: Option<Speculation>,
    /// How weights are quantised as they are loaded, and activations as they come; not at all if absent.
    pub quantize: Option<Policy>,
    /// What activations are like, for policies that [smooth](Policy::smooth): see [`calibrate`](crate::calibrate).
    #[serde(skip)]
    pub calibration: Option<Arc<Calibration>>,
    /// Whether answers run on past the model's end tokens, for measurements.
    pub ignore_end: bool,
}

impl EngineOptions {
    /// The context that is planned for unless asked otherwise.
    pub const DEFAULT_CONTEXT: usize = 2048;
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            precision: Precision::Keep,
            context: None,
            max_requests: 1,
            step_tokens: 256,
            tune_step: false,
            block_size: 16,
            kv_tokens: None,
            swap_tokens: 0,
            prefix_cache: true,
            fuse: true,
            launch_ahead: true,
            split_prompts: true,
            graphs: true,
            speculation: None,
            quantize: None,
            calibration: None,
            ignore_end: false,
        }
    }
}

impl EngineOptions {
    /// Rows that a request samples from in a step, at most.
    pub(crate) fn rows_per_request(&self) -> usize {
        1 + self.speculation.map_or(0, Speculation::tokens)
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
            let rule = format!("must be at least max-requests ({}): each brings a token", self.max_requests);
            return Err(EngineError::option("step-tokens", self.step_tokens, rule));
        }
        if let Some(speculation) = self.speculation {
            speculation.validate()?;
        }
        if let Some(policy) = &self.quantize {
            policy.check().map_err(|error| error.in_op("quantize"))?;
        }
        Ok(())
    }
}
