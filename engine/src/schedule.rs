//! Decides what runs next, without any knowledge of devices: the scheduler hands out rows of the request table, pages of the KV
//! cache and tokens of steps, and is told which tokens were sampled.
//!
//! Requests are ordered by priority, then by arrival. In each step:
//!
//! 1. **Admission.** The first waiting requests start while there is a free row in the request table, and pages for all their
//!    tokens besides those that running requests need next. No request overtakes another in this queue. A request of higher
//!    priority pre-empts one of lower priority.
//! 2. **Generation.** Every request that generates adds one token to the step. A request that has to wait until the host has read
//!    its last token (see [`NewSequence::waits_for_host`]) is left out of a step that is launched before that; the others go on.
//!    With [`Capacity::micro_batches`] a step has an even share of these requests, so that several steps in flight have all of them.
//! 3. **Prompts** fill the rest of the step's token budget (Dynamic SplitFuse). The first prompt gets half of it, so that it is
//!    not starved; the others share the other half, shortest first, so that the first does not starve them.
//! 4. **Drafts.** Proposed tokens take what is left of the budget and of the pages, which may be nothing. A request with a draft
//!    waits for the host as in 2.
//!
//! With [`Capacity::prompts_first`], for comparison, a step has prompts only as long as there are prompts to process, in their
//! order and each of them whole if it fits into a step.
//!
//! Sequences take pages as they grow. If no page is left, a sequence takes those of the last one in the order, which then waits
//! again: its tokens are recomputed when it resumes, or its pages are swapped to host memory meanwhile.
//!
//! **Progress.** The first request in the order can take the pages of every other request, and no request is admitted that needs
//! more pages than there are. So in every step the first request either takes part or only waits for a token in flight, and it is
//! done after as many steps as it has tokens, whatever the others do.

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
pub(crate) use scheduler::{Capacity, NewSequence, Scheduler, SequenceKey};
pub(crate) use sequence::Sequence;
