//! Continuous batching, independent of devices: the scheduler assigns rows of the request table, pages of the KV cache and each
//! step's token budget, and receives the sampled tokens.
//!
//! Requests are ordered by priority, then by arrival. In each step:
//!
//! 1. **Admission.** Waiting requests start in order while a row of the request table is free, and enough pages for all their
//!    tokens beyond those that running requests need next. No request overtakes another. A request of higher priority
//!    pre-empts one of lower priority.
//! 2. **Generation.** Every generating request adds one token to the step. A request that needs the host to read its last token
//!    first (see [`NewSequence::waits_for_host`]) skips the steps launched before that. With several [`Capacity::micro_batches`],
//!    a step takes an even share of the generating requests, so that the steps in flight together cover all of them.
//! 3. **Prompts** fill the rest of the step's token budget (Dynamic SplitFuse). The first prompt gets half of it, so that it is
//!    not starved; the others share the other half, shortest first, so that the first does not starve them.
//! 4. **Drafts.** Proposed tokens use what is left of the budget and of the pages. A request with a draft waits for the host as
//!    in 2.
//!
//! With [`Capacity::prompts_first`], for comparison, steps contain only prompts while there are any, in order, each unsplit if
//! it fits into a step.
//!
//! Sequences take pages as they grow. If no page is left, the last sequence in the order is pre-empted: it gives up its pages
//! and waits again. Its tokens are recomputed when it resumes, unless its pages were swapped to host memory.
//!
//! **Progress.** The first request in the order can pre-empt every other one, and requests that need more pages than exist are
//! refused. So in every step the first request either takes part or only waits for a token in flight, and it finishes after a
//! bounded number of steps, whatever the others do.

mod admission;
mod composition;
mod launched_step;
mod prefix_reuse;
mod scheduled_step;
mod scheduler;
mod sequence;
#[cfg(test)]
mod tests;

pub use launched_step::LaunchedStep;
pub(crate) use scheduled_step::{ScheduledSequence, ScheduledStep};
pub(crate) use scheduler::{Capacity, Scheduler};
pub(crate) use sequence::{NewSequence, Sequence, SequenceKey};
