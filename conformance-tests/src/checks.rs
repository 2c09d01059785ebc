//! Checks of behaviour that takes more than one call.
//!
//! A case of [`crate::cases`] tests what an op computes. A check tests how a backend behaves: on bad input, with several streams
//! or threads, when memory runs out, or over a whole model. It is a function from a [`Subject`] to a [`Status`]; it runs in a
//! worker process and is reported like a case, under the id `check/NAME`.

mod accounts;
mod batch;
mod bench;
mod claimed_calls;
mod claims;
mod collective;
mod crowd;
mod decoder;
mod faults;
mod indices;
mod jobs;
mod large;
mod leaks;
mod logits;
mod memory;
mod metamorphic;
mod ordering;
mod packed;
mod paged;
mod pinned;
mod quantised;
mod raw;
mod replay;
mod sampling;
mod tape;
mod threads;
mod token;
mod weights;

pub(crate) use accounts::remember_process;

use crate::{
    runner::{Report, Status},
    subject::Subject,
};
use dsrun_core::op::Profile;

/// A check of behaviour.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// The name, in lower case with `_` between words. The check is reported and selected as `check/NAME`, which never changes.
    pub id: &'static str,
    /// The property that must hold, in one line.
    pub about: &'static str,
    /// The profile that requires the check: if that is tested, [`Status::Unsupported`] is a failure. `None` if the check applies
    /// to every backend and may find nothing to test.
    pub profile: Option<Profile>,
    /// Runs the check, which may crash or hang, because it runs in a worker process.
    pub run: fn(&Subject) -> Status,
}

/// Declares a check that stops at its first failure.
macro_rules! check {
    ($id:literal, $about:literal, $profile:expr, $run:path) => {
        Check { id: $id, about: $about, profile: $profile, run: |subject| bench::status($run(subject)) }
    };
}

const CORE: Option<Profile> = Some(Profile::LlmCore1);
const DISTRIBUTED: Option<Profile> = Some(Profile::LlmDist1);

/// All checks.
pub const CHECKS: &[Check] = &[
    Check {
        id: "device_listing",
        about: "the device under test is listed once, with a name, an alignment that is a power of two, and element types",
        profile: None,
        run: device_listing,
    },
    check!(
        "claims_properties",
        "buffers have the sizes and alignment that the device states",
        None,
        claims::properties
    ),
    check!("claims_profiles", "every op of a claimed profile runs", None, claims::profiles),
    check!("claims_alignment", "calls run at every aligned offset", CORE, claims::alignment),
    check!(
        "claims_no",
        "unsupported calls are refused with a reason, and supported calls can be planned",
        None,
        claims::no_means_no
    ),
    check!(
        "claims_formats",
        "calls that are said to run have weights that can be packed, and can be planned",
        None,
        claimed_calls::formats_and_results
    ),
    check!(
        "claims_unlisted",
        "what is said to run on element types that the device does not list gives right results",
        None,
        claimed_calls::unlisted_types
    ),
    check!(
        "replay_graph",
        "a graph gives the results of its calls, for the data in memory at each launch",
        None,
        replay::graph
    ),
    check!(
        "replay_copies",
        "a copy to the host after a graph launch has the results of that launch",
        None,
        replay::copies
    ),
    check!(
        "replay_decoder",
        "a region of decoder layers gives the results of its body, whatever ran before",
        None,
        decoder::region
    ),
    check!(
        "replay_decoder_heads",
        "a region of decoder layers gives the results of its body with other head sizes",
        None,
        decoder::region_of_other_heads
    ),
    check!(
        "replay_decoder_variants",
        "a region of decoder layers gives the results of its body with norms after attention and MLP, and with windows",
        None,
        decoder::region_of_variants
    ),
    check!(
        "replay_decoder_parallel",
        "a region of decoder layers gives the results of its body with the MLP beside attention, and with rotated pairs of neighbours",
        None,
        decoder::region_of_parallel
    ),
    check!(
        "replay_decoder_large_heads",
        "a region of decoder layers gives the results of its body with heads of more than 128, and with soft caps",
        None,
        decoder::region_of_large_heads
    ),
    check!(
        "replay_decoder_integers",
        "a region of decoder layers gives the results of its body with weights of 4 and 8 bits",
        None,
        decoder::region_of_integers
    ),
    check!(
        "replay_decoder_experts",
        "a region of decoder layers gives the results of its body with mixtures of experts",
        None,
        decoder::region_of_experts
    ),
    check!(
        "replay_decoder_integer_experts",
        "a region of decoder layers gives the results of its body with mixtures of experts of 4 and 8 bits",
        None,
        decoder::region_of_integer_experts
    ),
    check!(
        "replay_decoder_bounds",
        "a region of decoder layers gives the results of its body with sinks, biases and bounds as gpt-oss has them",
        None,
        decoder::region_of_bounds
    ),
    check!(
        "replay_decoder_floats",
        "a region of decoder layers gives the results of its body with weights that are floats of 4 bits",
        None,
        decoder::region_of_floats
    ),
    check!(
        "replay_decoder_ranks",
        "a region of decoder layers whose results are summed over ranks gives the results of its body",
        None,
        decoder::region_over_ranks
    ),
    check!(
        "replay_token",
        "a region that samples gives the results of its body, and updates the request table in the same way",
        None,
        token::region
    ),
    check!(
        "replay_quantised",
        "a region of attention and quantisation gives the results of its body, for any set of sequences",
        None,
        quantised::region
    ),
    check!(
        "replay_elsewhere",
        "a plan gives the same bits on another stream and thread",
        CORE,
        replay::elsewhere
    ),
    check!(
        "replay_side_by_side",
        "two bound calls of a plan do not affect each other",
        CORE,
        replay::side_by_side
    ),
    check!("replay_plans", "plans of one op with different attributes are kept apart", CORE, replay::plans),
    check!(
        "batch_rows",
        "if batch invariance is claimed, a row has the same bits alone as in a batch",
        None,
        batch::of_rows
    ),
    check!(
        "batch_attention",
        "if batch invariance is claimed, attention of a sequence has the same bits alone as in a batch",
        None,
        batch::of_attention
    ),
    check!(
        "ways_chunks",
        "attention of a prompt is the same in one call, in chunks and token by token",
        CORE,
        metamorphic::chunks
    ),
    check!("ways_pages", "results do not depend on the order of pages", CORE, metamorphic::pages),
    check!(
        "ways_shards",
        "the shards of a layer, split along outputs or inputs, give the results of the layer",
        CORE,
        metamorphic::shards
    ),
    check!(
        "memory_workspace",
        "calls use no more workspace than stated, and results do not depend on its content",
        CORE,
        memory::workspace
    ),
    check!("memory_growth", "two hundred calls hold no more memory than one", CORE, memory::growth),
    check!("memory_given_back", "the memory of dropped objects is freed", CORE, memory::given_back),
    check!("memory_reopened", "the memory of a device handle is freed with it", CORE, memory::reopened),
    check!("memory_zeroed", "new memory is zero", None, memory::zeroed),
    check!("memory_limit", "the memory limit of a device handle is kept", None, memory::limit),
    check!("threads_eight", "eight threads can plan, bind and run at the same time", CORE, threads::eight),
    check!(
        "crowd_streams",
        "products on four streams that fill the device complete, and give the same bits",
        CORE,
        crowd::streams
    ),
    check!(
        "crowd_handles",
        "products on two handles of the device complete, with graphs beside calls, and give the same bits",
        CORE,
        crowd::handles
    ),
    check!("threads_moved", "a stream may move between threads", CORE, threads::moved),
    check!("threads_drop_order", "objects can be dropped in any order", CORE, threads::drop_order),
    check!("faults_foreign", "objects of another backend are refused", CORE, faults::foreign),
    check!("faults_ranges", "ranges outside their buffer are refused", CORE, faults::ranges),
    check!("faults_out_of_memory", "running out of memory is an error", CORE, faults::out_of_memory),
    check!("faults_opening", "missing devices and invalid options are refused", CORE, faults::opening),
    check!(
        "raw_descriptions",
        "a plugin called through its C tables refuses invalid descriptions",
        None,
        raw::descriptions
    ),
    check!(
        "raw_sizes",
        "a plugin reads and writes only the part of a struct that both sides know",
        None,
        raw::sizes
    ),
    check!(
        "raw_arguments",
        "a plugin called through its C tables refuses invalid arguments and ranges",
        None,
        raw::arguments_of_calls
    ),
    check!(
        "raw_weights",
        "a plugin called through its C tables refuses weights of unknown formats and of other types",
        None,
        raw::weights
    ),
    check!(
        "raw_workspaces",
        "a plugin called through its C tables refuses a workspace that is too short or not its own",
        None,
        raw::workspaces
    ),
    check!(
        "raw_resources",
        "a plugin called through its C tables refuses missing devices and more memory than there is",
        None,
        raw::resources
    ),
    check!(
        "order_streams",
        "a stream that waits for an event sees what was enqueued before it on another stream",
        CORE,
        ordering::streams
    ),
    check!(
        "order_freed",
        "what calls have enqueued is done, though they, their plans and their operands are dropped before",
        CORE,
        ordering::freed
    ),
    check!(
        "order_events",
        "host memory holds what was copied to it before an event, as soon as the event is reached",
        CORE,
        ordering::events
    ),
    check!(
        "order_copies",
        "copies, fills, uploads and downloads of any length at any offset move exactly their bytes",
        CORE,
        ordering::copies
    ),
    check!(
        "order_uploads",
        "uploads are ordered with calls, and their source may change as soon as they return",
        CORE,
        ordering::uploads
    ),
    check!(
        "memory_accounts",
        "the memory that is said to be used grows by what is held, and shrinks when it is dropped",
        CORE,
        accounts::memory
    ),
    check!(
        "memory_handles",
        "the accounts of two handles of the device are independent",
        CORE,
        accounts::handles
    ),
    check!(
        "process_untouched",
        "calls leave environment, working directory, files, signal handlers and arithmetic of the process alone",
        None,
        accounts::process
    ),
    check!(
        "memory_host_objects",
        "a plugin frees the calls and errors that the host makes for it",
        None,
        leaks::host_objects
    ),
    check!(
        "memory_process",
        "what is made and dropped thousands of times leaves nothing in the memory of the process",
        None,
        leaks::process
    ),
    check!(
        "packed_layouts",
        "a packed weight has the size that was said, and is counted while it lives",
        None,
        weights::layouts
    ),
    check!(
        "packed_readers",
        "an error of a weight's reader is passed on, and nothing is held after it",
        None,
        weights::broken_readers
    ),
    check!("events", "an event is reached when all work before it is complete", CORE, faults::events),
    check!("indices", "indices out of range read and write nothing", CORE, indices::hostile_indices),
    check!(
        "ranks_wrong",
        "invalid ranks are refused, and groups of one to four ranks reduce correctly",
        DISTRIBUTED,
        collective::ranks
    ),
    check!(
        "ranks_abort",
        "a rank that aborts wakes the others with its reason",
        DISTRIBUTED,
        collective::abort
    ),
    check!("ranks_missing", "a missing rank is named within the timeout", DISTRIBUTED, collective::missing),
    check!(
        "ranks_sharded",
        "a layer sharded over ranks gives the results of the layer",
        DISTRIBUTED,
        collective::sharded
    ),
    check!(
        "ranks_replayed",
        "a graph with collectives gives the sums of the data at each launch, when ranks come at different times",
        DISTRIBUTED,
        collective::replayed
    ),
    check!(
        "packed_moved",
        "a packed weight gives the same bits where it was packed and in memory that another stream copies it to",
        None,
        packed::moved
    ),
    check!(
        "packed_pinned",
        "a packed weight gives the same bits where it was packed and in pinned memory",
        None,
        packed::pinned
    ),
    check!(
        "cache_pinned",
        "keys and values in pinned memory are read and written there, with the bits of those in device memory",
        None,
        pinned::cache
    ),
    check!("sampling_masked", "a masked token is never drawn", CORE, sampling::masked),
    check!(
        "sampling_order",
        "a sampled token depends only on seed, position, token ids and logits",
        CORE,
        sampling::order
    ),
    check!(
        "tiny_llama",
        "logits of a small Llama match the reference for a whole prompt, in chunks and token by token",
        CORE,
        logits::tiny_llama
    ),
];

/// Checks that take gigabytes of memory and minutes on a CPU, which run only where they are asked for.
pub const LARGE: &[Check] = &[
    check!("large_gather", "rows are gathered from behind element 2^31", None, large::gather),
    check!("large_add", "sums have more than 2^31 elements", None, large::add),
    check!("large_linear", "a linear layer has more than 2^31 results", None, large::linear),
    check!("large_cache", "attention reads pages behind element 2^31 of their cache", None, large::cache),
];

impl Check {
    /// The id that the check is reported under.
    pub fn full_id(&self) -> String {
        format!("check/{}", self.id)
    }

    /// Runs the check.
    pub fn report(&self, subject: &Subject) -> Report {
        Report { id: self.full_id(), status: (self.run)(subject), verdicts: Vec::new() }
    }
}

/// The status for a list of failures: passed if it is empty.
pub fn settle(failures: Vec<String>) -> Status {
    if failures.is_empty() { Status::Passed } else { Status::Failed(failures) }
}

fn device_listing(subject: &Subject) -> Status {
    let devices = match subject.backend().devices() {
        Ok(devices) => devices,
        Err(error) => return Status::Failed(vec![format!("devices cannot be listed: {error}")]),
    };
    let mut failures = Vec::new();
    let named = devices.iter().filter(|device| device.index == subject.index()).count();
    if named != 1 {
        failures.push(format!(
            "device {} can be opened, and is listed {named} times instead of once",
            subject.index()
        ));
    }
    if let Some(device) = devices.iter().find(|device| device.name.trim().is_empty()) {
        failures.push(format!("device {} has no name", device.index));
    }
    let properties = subject.device().properties();
    if !properties.alignment.is_power_of_two() {
        failures.push(format!("the alignment is {}, which is not a power of two", properties.alignment));
    }
    if properties.dtypes.is_empty() {
        failures.push("the device lists no element types".into());
    }
    settle(failures)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_plain() {
        let mut seen = HashSet::new();
        for check in CHECKS.iter().chain(LARGE) {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(!check.id.is_empty() && check.id.chars().all(plain), "{}", check.id);
            assert!(!check.about.is_empty(), "{} has no description", check.id);
            assert!(seen.insert(check.id), "two checks have the id {}", check.id);
        }
    }
}
