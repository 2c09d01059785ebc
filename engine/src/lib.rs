//! The engine of dsrun: runs a model's program on a device.
//!
//! | module | holds |
//! |---|---|
//! | [`Pipeline`] | from text to text, in five lines |
//! | [`Engine`] | requests in, tokens out, step by step |
//! | [`EnginePlan`] | what an engine will allocate, before it does |
//! | [`Score`] | teacher-forced logits |
//! | [`passes`] | rewriting programs for a device |

mod blocks;
mod compile;
mod engine;
mod error;
mod handover;
mod load;
mod memory;
mod options;
pub mod passes;
mod pipeline;
mod prepare;
mod sampling;
mod schedule;
mod score;

pub use engine::{CallFigures, Engine, FinishReason, Request, RequestId, TokenEvent};
pub use error::{EngineError, Result};
pub use load::{EnginePlan, StepTraffic};
pub use memory::{Bytes, MemoryPlan};
pub use options::{EngineOptions, Precision};
pub use pipeline::{Answer, GenerateOptions, Pipeline, Progress, Prompt, Timings};
pub use sampling::SamplingOptions;
pub use score::{Score, ScoredPosition};
