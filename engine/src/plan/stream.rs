//! Weight streaming, for models larger than device memory: the packed weights of some layers stay in pinned host memory and are
//! copied to the device in each step.
//!
//! | module | holds |
//! |---|---|
//! | `choice` | which layers are streamed, and the size of the ring buffer that they are copied to |
//! | `layers` | the repeating layers of a program |
//! | `ring` | the ring buffer of slots on the device, and the copies to it |
//! | `parts` | the parts of a step that are launched between copies |
//! | `link` | the rate of copies from the host, and the prediction of a step's time |
//!
//! Streamed layer `i` always uses slot `i mod k`, where the number of slots `k` divides the number of streamed layers. So a call
//! is bound to the same memory in every step, and captured graphs stay valid.

mod choice;
mod layers;
mod link;
mod parts;
mod ring;

pub(crate) use choice::{StreamPlan, StreamableLayers};
pub(crate) use link::StreamedStep;
pub use link::{LinkRates, StreamForecast};
pub(crate) use parts::{Reads, parts};
pub(crate) use ring::{WeightImages, WeightRing};
