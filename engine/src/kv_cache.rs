//! The KV cache: its pages, the prefixes they keep, and the memory outside the device that pages are moved to.
//!
//! | module | holds |
//! |---|---|
//! | `pages` | the pages on the device: their holders, and the prefixes that they keep |
//! | `mover`, `lane` | copies of pages to the host and back |
//! | `swap` | the host memory of pre-empted requests |
//! | `store`, `host_tier`, `page_folder`, `page_key` | pages that are kept outside the device for later requests |

mod host_tier;
mod lane;
mod mover;
mod page_folder;
mod page_key;
mod pages;
mod store;
mod swap;

pub(crate) use lane::PageLane;
pub(crate) use mover::{PageMove, PageMover};
pub(crate) use page_folder::PageFolder;
pub(crate) use page_key::PageKey;
pub(crate) use pages::{PagePool, Prefix};
pub(crate) use store::{Fetch, PageStore, StoreCounts, StoredPage, Tier};
pub(crate) use swap::SwapSpace;
