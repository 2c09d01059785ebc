//! Weight streaming, for models larger than device memory: the packed weights of some layers stay in pinned host memory, or in a file
//! on disk, and are copied to the device in each step.
//!
//! | module | holds |
//! |---|---|
//! | `choice` | which layers are streamed, and the size of the ring buffer that they are copied to |
//! | `layers` | the repeating layers of a program |
//! | `images` | the packed weights outside the device: in host memory or in a file |
//! | `packed_file` | the file of packed weights |
//! | `read_ahead` | the threads that read layers from it, and their buffers |
//! | `ring` | the ring buffer of slots on the device, and the copies to it |
//! | `parts` | the parts of a step that are launched between copies |
//! | `link` | the rate of copies from the host, and the prediction of a step's time |
//!
//! Streamed layer `i` always uses slot `i mod k`, where the number of slots `k` divides the number of streamed layers. So a call
//! is bound to the same memory in every step, and captured graphs stay valid.

mod choice;
mod images;
mod layers;
mod link;
mod packed_file;
mod parts;
mod read_ahead;
mod ring;
mod streamed_layer;

pub(crate) use choice::{StreamPlan, StreamableLayers};
pub(crate) use images::{DiskReads, WeightImages};
pub(crate) use link::StreamedStep;
pub use link::{LinkRates, StreamForecast};
pub(crate) use packed_file::Identity;
pub(crate) use parts::{Reads, parts, parts_by_caches};
pub(crate) use ring::WeightRing;
