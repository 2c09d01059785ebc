//! The engine of dsrun: runs a model's program on a device.
//!
//! [`Pipeline`] goes from text to text in five lines. [`Engine`] takes requests and returns tokens, step by step. An [`EnginePlan`]
//! says what an engine will allocate, before it does. [`service`] runs an engine on a thread of its own, for many callers.
//!
//! The crate is divided into rooms. Each room may use the rooms above it in this table, and none below:
//!
//! | room | holds |
//! |---|---|
//! | [`passes`] | rewriting programs for a device: stages, splits, quantisation, fusion, pruning |
//! | `error`, `memory`, `options`, `request`, `sampling`, `statistics` | the types of the public API |
//! | `processes` | several processes that run a model together, each with some of its ranks |
//! | `trace` | records when each rank runs which step and which collective |
//! | `plan` | what is decided before anything is allocated: programs, buckets, layouts, memory; compiled steps |
//! | `kv_cache` | pages of the KV cache, the prefixes they keep, swapping to host memory |
//! | `schedule` | which sequences take part in a step; knows no device |
//! | [`planner`] | forecasts for devices that need not be present: memory, time, timelines |
//! | `runner` | launches steps and reads their tokens back |
//! | `speculation` | proposes tokens, by prompt lookup or with a draft model |
//! | `engine` | [`Engine`]: a runner, with speculation |
//! | `offline` | measurements while no request runs: [`Score`], [`calibrate`], [`sensitivity`], [`mixed_precision`] |
//! | [`service`], `text`, `pipeline` | an engine for many callers; tokens to text; text in, text out |

mod engine;
mod error;
mod kv_cache;
mod memory;
mod offline;
mod options;
pub mod passes;
mod pipeline;
mod plan;
pub mod planner;
mod processes;
mod request;
mod runner;
mod sampling;
mod schedule;
pub mod service;
mod speculation;
mod statistics;
mod text;
mod trace;

pub use engine::Engine;
pub use error::{ConstraintError, EngineError, Result};
pub use memory::{Bytes, MemoryPlan};
pub use offline::{
    CALIBRATION_TEXT, CallFigures, FormatFigures, MixedPrecision, Observer, Score, ScoredPosition,
    Sensitivity, calibrate, calibration_sequences, check_budget, log_probability, mixed_precision,
    sensitivity,
};
pub use options::{
    CachePrecision, EngineOptions, ExpertsIn, KvIn, Precision, PrefixStore, Speculation, WeightsIn,
};
pub use pipeline::{Answer, GenerateOptions, Pipeline, Progress, Prompt, Timings};
pub use plan::{CacheRoom, EnginePlan, HostCacheForecast, LinkRates, StepTraffic, StreamForecast};
pub use processes::{Facts, Launch, LaunchError, Launcher, Processes};
pub use request::{
    Constraint, EmbeddingRequest, FinishReason, Pooling, Request, RequestId, RequestLimits, TokenEvent,
};
pub use sampling::SamplingOptions;
pub use schedule::LaunchedStep;
pub use statistics::{Histogram, Phase, Statistics};
pub use text::{TextPiece, TextStream};
pub use trace::{SpanKind, Trace, TraceSpan};
