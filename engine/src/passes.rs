//! Passes rewrite a program: [`quantize`] its weights, [`partition`](mod@partition) it into stages, [`shard`](mod@shard) it over
//! ranks, [`fuse`] its calls, [`prune_unused_rows`] of its last layer.
//!
//! A pass takes a program and gives a program. It knows a device only by the answers of [`Native`] and of the kernel query.

mod concatenate;
mod fuse;
pub mod partition;
mod prune_unused_rows;
pub mod quantize;
mod rewrite;
pub mod shard;
mod work_lists;

pub use fuse::{Native, fuse, merge};
pub use prune_unused_rows::prune_unused_rows;
pub use work_lists::size_work_lists;
