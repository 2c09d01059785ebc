//! The KV cache: its pages, the prefixes they keep, and the host memory that pages are swapped to.

mod pages;
mod swap;

pub(crate) use pages::{PagePool, Prefix};
pub(crate) use swap::SwapSpace;
