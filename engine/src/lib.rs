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

mod calibrate;
mod compile;
mod embedding;
mod engine;
mod error;
mod handover;
mod inputs;
mod load;
mod memory;
mod mixture;
mod options;
mod pages;
pub mod passes;
mod pipeline;
mod prepare;
mod request;
mod sampling;
mod schedule;
mod score;
pub mod service;
mod speculation;
mod statistics;
mod swap;
mod table;

pub use calibrate::{CALIBRATION_TEXT, calibrate, calibration_sequences};
pub use embedding::{EmbeddingRequest, Pooling};
pub use engine::{CallFigures, Engine, Observer};
pub use error::{EngineError, Result};
pub use load::{EnginePlan, StepTraffic};
pub use memory::{Bytes, MemoryPlan};
pub use mixture::{Figures, Mixture, Sensitivity, check_budget, mixture, sensitivity};
pub use options::{EngineOptions, Precision};
pub use pipeline::{Answer, GenerateOptions, Pipeline, Progress, Prompt, Timings};
pub use request::{Constraint, ConstraintError, FinishReason, Request, RequestId, RequestLimits, TokenEvent};
pub use sampling::SamplingOptions;
pub use score::{Score, ScoredPosition, log_probability};
pub use speculation::Speculation;
pub use statistics::{Histogram, Phase, Statistics};
