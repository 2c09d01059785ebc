//! Passes rewrite a program: they [`quantize`] its weights, [`partition`](mod@partition) it into pipeline stages,
//! [`shard`](mod@shard) it over ranks, [`fuse`] its calls, [merge](Merger) those of each step size further, and [`prune_unused_rows`] of its
//! last layer.
//!
//! A pass maps a program to a program. What it needs to know of a device it asks through [`Native`] and the kernel query.

mod concatenate;
mod fuse;
pub mod partition;
mod prune_unused_rows;
pub mod quantize;
mod rewrite;
pub mod shard;
mod work_lists;

pub use fuse::{Merger, Native, fuse};
pub use prune_unused_rows::prune_unused_rows;
pub use work_lists::size_work_lists;
