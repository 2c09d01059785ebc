//! Passes: program in, program out.

mod concatenate;
mod fuse;
mod narrow;
pub mod quantize;
mod rewrite;
mod work_lists;

pub use fuse::{Native, fuse, merge};
pub use narrow::narrow;
pub use work_lists::size_work_lists;
