//! Checks of behaviour: what no single call with its expected results can show.
//!
//! A case of [`crate::cases`] says what an op computes. A check says how a backend behaves: what it does with bad input, with
//! several streams or threads, when memory runs out, over a whole model. It is a function that is given the [`Subject`] and
//! says how it went; it is named, run in a child process, and reported as a case is, under the id `check/NAME`.

mod batch;
mod bench;
mod claims;
mod collective;
mod crowd;
mod decoder;
mod faults;
mod indices;
mod jobs;
mod logits;
mod memory;
mod metamorphic;
mod paged;
mod quantised;
mod raw;
mod replay;
mod sampling;
mod tape;
mod threads;
mod token;

use crate::{
    runner::{Report, Status},
    subject::Subject,
};
use dsrun_core::op::Profile;

/// A check of behaviour.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Its name, in lower case with `_` between words. Behind `check/` it is the id that the check is reported under and run
    /// by, for ever.
    pub id: &'static str,
    /// What must hold, in a line.
    pub about: &'static str,
    /// The profile that asks for it. A backend that is held to this profile fails if the check is [`Status::Unsupported`].
    /// `None` if it concerns every backend and may find nothing to check.
    pub profile: Option<Profile>,
    /// Runs it. It may crash or hang: it runs in a process of its own.
    pub run: fn(&Subject) -> Status,
}

/// A check that stops at the first thing that is wrong.
macro_rules! check {
    ($id:literal, $about:literal, $profile:expr, $run:path) => {
        Check { id: $id, about: $about, profile: $profile, run: |subject| bench::status($run(subject)) }
    };
}

const CORE: Option<Profile> = Some(Profile::LlmCore1);
const DISTRIBUTED: Option<Profile> = Some(Profile::LlmDist1);

/// Every check.
pub const CHECKS: &[Check] = &[
    Check {
        id: "device_listing",
        about: "the tested device is listed, under one index and with a name, and open devices have the properties they promise",
        profile: None,
        run: device_listing,
    },
    check!("claims_properties", "sizes and addresses are what the device says", None, claims::properties),
    check!("claims_profiles", "every op of a claimed profile runs", None, claims::profiles),
    check!(
        "claims_alignment",
        "calls run at every offset that the alignment allows",
        CORE,
        claims::alignment
    ),
    check!(
        "claims_no",
        "what is not run is refused with a reason, and what is run is planned",
        None,
        claims::no_means_no
    ),
    check!(
        "replay_graph",
        "a graph gives what its calls give, each time of what is then in memory",
        None,
        replay::graph
    ),
    check!(
        "replay_copies",
        "what is copied to the host behind a graph is what its launch left",
        None,
        replay::copies
    ),
    check!(
        "replay_decoder",
        "the region of a decoder's layers gives what its body gives, whatever was launched before",
        None,
        decoder::region
    ),
    check!(
        "replay_decoder_heads",
        "the same with heads of other sizes",
        None,
        decoder::region_of_other_heads
    ),
    check!(
        "replay_decoder_integers",
        "the same with weights of 4 and 8 bits",
        None,
        decoder::region_of_integers
    ),
    check!(
        "replay_token",
        "the region that samples gives what its body gives, and leaves the same in the request table",
        None,
        token::region
    ),
    check!(
        "replay_quantised",
        "the region that quantises what attention gives is what its body is, whichever sequences are there",
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
        "two bound calls of a plan do not disturb each other",
        CORE,
        replay::side_by_side
    ),
    check!("replay_plans", "plans of one op do not take each other's place", CORE, replay::plans),
    check!(
        "batch_rows",
        "where it is claimed, a row gives the same bits alone as in a batch",
        None,
        batch::of_rows
    ),
    check!(
        "batch_attention",
        "the same of sequences, some of over two thousand keys",
        None,
        batch::of_attention
    ),
    check!("ways_chunks", "a prompt whole, in chunks and token by token", CORE, metamorphic::chunks),
    check!("ways_pages", "where pages lie does not show", CORE, metamorphic::pages),
    check!(
        "ways_shards",
        "a layer cut along outputs or inputs is the whole layer",
        CORE,
        metamorphic::shards
    ),
    check!(
        "memory_workspace",
        "scratch memory is as long as was said, and its content does not show",
        CORE,
        memory::workspace
    ),
    check!("memory_growth", "two hundred calls hold no more memory than one", CORE, memory::growth),
    check!("memory_given_back", "what is dropped is given back", CORE, memory::given_back),
    check!(
        "memory_reopened",
        "what a handle of the device held is given back with it",
        CORE,
        memory::reopened
    ),
    check!("memory_zeroed", "new memory is zero", None, memory::zeroed),
    check!("memory_limit", "a memory limit holds", None, memory::limit),
    check!("threads_eight", "eight threads plan, bind and run at once", CORE, threads::eight),
    check!(
        "crowd_streams",
        "products of four streams that fill the device end, and give the same bits",
        CORE,
        crowd::streams
    ),
    check!(
        "crowd_handles",
        "the same of two handles of the device, with graphs beside calls",
        CORE,
        crowd::handles
    ),
    check!("threads_moved", "a stream may move between threads", CORE, threads::moved),
    check!("threads_drop_order", "what is dropped first takes nothing with it", CORE, threads::drop_order),
    check!("faults_foreign", "objects of another backend are refused", CORE, faults::foreign),
    check!("faults_ranges", "ranges outside their buffer are refused", CORE, faults::ranges),
    check!("faults_out_of_memory", "running out of memory is an error", CORE, faults::out_of_memory),
    check!(
        "faults_opening",
        "devices that are not there and options that cannot be are refused",
        CORE,
        faults::opening
    ),
    check!("raw_descriptions", "a plugin called raw refuses wrong descriptions", None, raw::descriptions),
    check!("raw_sizes", "a plugin reads and writes structs as far as both sides know them", None, raw::sizes),
    check!(
        "raw_arguments",
        "a plugin called raw refuses wrong arguments and ranges",
        None,
        raw::arguments_of_calls
    ),
    check!(
        "raw_resources",
        "a plugin called raw refuses memory and devices there are not",
        None,
        raw::resources
    ),
    check!("events", "events are reached when what is before them is done", CORE, faults::events),
    check!("indices", "indices that point nowhere touch nothing", CORE, indices::hostile_indices),
    check!(
        "ranks_wrong",
        "ranks that cannot be are refused; one to four ranks add up",
        DISTRIBUTED,
        collective::ranks
    ),
    check!(
        "ranks_abort",
        "a rank that aborts wakes the others with its reason",
        DISTRIBUTED,
        collective::abort
    ),
    check!("ranks_missing", "a rank that does not come is named in time", DISTRIBUTED, collective::missing),
    check!(
        "ranks_sharded",
        "a layer shared out over ranks is the whole layer",
        DISTRIBUTED,
        collective::sharded
    ),
    check!("sampling_masked", "a masked token is never drawn", CORE, sampling::masked),
    check!("sampling_order", "a draw depends on seed, position and token alone", CORE, sampling::order),
    check!(
        "tiny_llama",
        "logits of a small Llama, as a prompt, in chunks and token by token",
        CORE,
        logits::tiny_llama
    ),
];

impl Check {
    /// The id it is reported under.
    pub fn full_id(&self) -> String {
        format!("check/{}", self.id)
    }

    /// Runs it.
    pub fn report(&self, subject: &Subject) -> Report {
        Report { id: self.full_id(), status: (self.run)(subject), verdicts: Vec::new() }
    }
}

/// A status of these failures: passed if there are none.
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
        failures.push(format!("device {} is open, and listed {named} times", subject.index()));
    }
    if let Some(device) = devices.iter().find(|device| device.name.trim().is_empty()) {
        failures.push(format!("device {} has no name", device.index));
    }
    let properties = subject.device().properties();
    if !properties.alignment.is_power_of_two() {
        failures.push(format!("the alignment, {}, is no power of two", properties.alignment));
    }
    if properties.dtypes.is_empty() {
        failures.push("the device takes no element type".into());
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
        for check in CHECKS {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(!check.id.is_empty() && check.id.chars().all(plain), "{}", check.id);
            assert!(!check.about.is_empty(), "{} says nothing", check.id);
            assert!(seen.insert(check.id), "{} stands twice", check.id);
        }
    }
}
