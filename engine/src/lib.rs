//! The engine of dsrun: runs a model's program on a device.
//!
//! | module | holds |
//! |---|---|
//! | [`Pipeline`] | from text to text, in five lines |
//! | [`Engine`] | requests in, tokens out, step by step |
//! | [`service`] | an engine on a thread of its own, for many callers |
//! | [`EnginePlan`] | what an engine will allocate, before it does |
//! | [`Score`] | teacher-forced logits |
//! | [`calibrate`], [`sensitivity`], [`mixture`] | choosing formats for weights |
//! | [`passes`] | rewriting programs for a device |

mod engine;
mod error;
mod kv_cache;
mod memory;
mod offline;
mod options;
pub mod passes;
mod pipeline;
mod plan;
mod request;
mod runner;
mod sampling;
mod schedule;
pub mod service;
mod speculation;
mod statistics;

pub use engine::Engine;
pub use error::{EngineError, Result};
pub use memory::{Bytes, MemoryPlan};
pub use offline::{
    CALIBRATION_TEXT, CallFigures, Figures, Mixture, Observer, Score, ScoredPosition, Sensitivity, calibrate,
    calibration_sequences, check_budget, log_probability, mixture, sensitivity,
};
pub use options::{EngineOptions, Precision};
pub use pipeline::{Answer, GenerateOptions, Pipeline, Progress, Prompt, Timings};
pub use plan::{EnginePlan, StepTraffic};
pub use request::{Constraint, ConstraintError, FinishReason, Request, RequestId, RequestLimits, TokenEvent};
pub use runner::pooler::{EmbeddingRequest, Pooling};
pub use sampling::SamplingOptions;
pub use speculation::Speculation;
pub use statistics::{Histogram, Phase, Statistics};
