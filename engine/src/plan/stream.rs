//! Models larger than the device's memory: layers whose packed weights stay in host memory and are copied to the device for each
//! step.
//!
//! | module | holds |
//! |---|---|
//! | `choice` | which layers are streamed, and the sizes of the ring of slots that they pass through |
//! | `layers` | the repeating layers of a program |
//! | `ring` | the slots on the device, and the copies to them |
//! | `parts` | the parts of a step that are launched between copies |
//! | `link` | the rate of copies from the host, and the prediction of a step's time |
//!
//! Layer `i` always passes through slot `i mod k`, where the number of slots `k` divides the number of streamed layers. A call is
//! therefore bound to the same memory in every step, and captured graphs stay valid.

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
