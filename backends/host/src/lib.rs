//! Everything of a backend that computes in host memory except its kernels: devices, memory, streams, argument views.
//!
//! A backend implements [`Compute`], which packs weights and runs ops, and opens its devices with [`open`].
//!
//! # How it is built
//!
//! - The backend has one device, the host's processors. Each handle opened on it is a device of its own, a [`Host`]: a thread
//!   pool, an account of memory, and one lock.
//! - Streams do not queue: a call runs on the thread that enqueues it, and is done when `enqueue` returns. Streams and
//!   events therefore have nothing to wait for.
//! - A call holds its device's lock while it touches memory. Threads may use one device at the same time; their calls take
//!   turns, and each call may spread its work over the pool. The lock is what makes it sound to turn buffers into slices: no
//!   two calls ever see the same memory at once. Collectives release the lock while they wait for other ranks.
//! - Binding checks all bounds and overlaps again, so that no sequence of safe calls reaches memory it should not.
//! - Indices that come from device memory (ids, slots, pages, requests, rows) are checked at every use and act as their op
//!   documents: they skip or give zeros.
//! - Ops that only move bytes or count tokens run here, alike for all backends: collectives, page moves, the request table.
//!
//! | module | holds |
//! |---|---|
//! | `device` | the device and its properties |
//! | `host` | what a device handle, its buffers and its calls share: threads, an account, a lock |
//! | `memory` | buffers |
//! | `stream` | streams and events |
//! | `graph` | lists of calls that run without leaving the pool |
//! | `view` | operands as slices of rows |
//! | `weight` | packed weights |
//! | `kernels` | query, prepack, plan, bind, enqueue |
//! | `collective`, `pages`, `step` | the ops that run here |
//! | `philox` | the random numbers of `sample` |

mod collective;
mod device;
mod graph;
mod host;
mod kernels;
mod memory;
mod pages;
mod philox;
mod step;
mod stream;
mod view;
mod weight;

pub use device::{device_info, open};
pub use host::Host;
pub use kernels::Compute;
pub use memory::PackedMemory;
pub use philox::uniform;
pub use view::{Bytes, Element, Frame, Tensor};
