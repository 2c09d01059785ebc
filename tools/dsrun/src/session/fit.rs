//! Chooses the context and the number of requests that a user leaves open, by the model and by the memory of its devices.

use super::{calibrated, plan_engine};
use crate::{devices::Devices, terminal::Terminal};
use anyhow::Result;
use dsrun_engine::{CacheRoom, EngineError, EngineOptions, EnginePlan, KvIn, MemoryPlan};
use dsrun_models::model::Model;
use std::sync::Arc;

/// Requests that run at the same time on devices with memory of their own, at most: more rarely make them faster.
const ACCELERATOR_REQUESTS: usize = 256;
/// Requests that run at the same time on the host, at most, and where the memory is not known.
const HOST_REQUESTS: usize = 16;
/// The tokens that a request is expected to have on average, where several share the cache.
const TYPICAL_TOKENS: usize = 1024;
/// The share of the host's free memory that the context of one request may take: one part in this many.
const HOST_CONTEXT: u64 = 4;
/// The share of the host's free memory that the caches of all requests may take: one part in this many.
const HOST_CACHE: u64 = 2;

/// The sizes that are chosen for an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Tokens a request may have; `None` leaves it to the engine.
    pub(crate) context: Option<usize>,
    /// The length of the longest sequence that rotary embeddings are chosen by: the given context or the model's own limit, so that
    /// answers do not depend on the memory that is free.
    pub(crate) rope_context: Option<usize>,
    /// The most requests at the same time.
    pub(crate) requests: usize,
    /// Tokens that the cache holds; `None` for as many as all requests need or fit.
    pub(crate) kv_tokens: Option<usize>,
    /// What was chosen, and why, in a line; absent if nothing was.
    pub(crate) note: Option<String>,
}

/// The sizes that the user gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Given {
    pub(crate) context: Option<usize>,
    pub(crate) requests: Option<usize>,
    pub(crate) kv_tokens: Option<usize>,
}

/// Chooses the sizes that are not given. Several processes, which must agree but see their own memory only, have those of the engine.
///
/// # Errors
/// If the model's program cannot be built.
pub(crate) fn choose(
    model: &Model,
    draft: Option<&Arc<Model>>,
    devices: &Devices,
    options: &EngineOptions,
    given: Given,
) -> Result<Sizes> {
    if devices.processes().is_some() || (given.context.is_some() && given.requests.is_some()) {
        let requests = given.requests.unwrap_or(HOST_REQUESTS);
        let (context, kv_tokens) = (given.context, given.kv_tokens);
        return Ok(Sizes { context, rope_context: context, requests, kv_tokens, note: None });
    }
    let smallest = EngineOptions { context: given.context, ..options.clone() };
    let (draft, engines) = (draft.map(|draft| &**draft), devices.engines());
    let room = CacheRoom::estimate(model, draft, devices.ranks(), engines, &smallest)?;
    Ok(sizes(model.config().context, room, engines, given))
}

/// Chooses sizes for a model with this limit and this room for its cache, beside the other engines on its devices.
fn sizes(limit: usize, room: CacheRoom, engines: usize, given: Given) -> Sizes {
    let least = limit.min(EngineOptions::DEFAULT_CONTEXT);
    let part = |share: u64| {
        let tokens = room.free.map(|free| free / if room.of_host { share } else { 1 } / room.token_bytes);
        tokens.map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX))
    };
    let longest = part(HOST_CONTEXT).map_or(least, |tokens| tokens.clamp(least, limit));
    // A multiple of a round number is easier to read and to compare.
    let rounded = if longest < limit { (longest / 256 * 256).max(least) } else { longest };
    let context = given.context.unwrap_or(rounded);
    let cache = given.kv_tokens.or(part(HOST_CACHE));
    let most = if room.of_host || room.free.is_none() { HOST_REQUESTS } else { ACCELERATOR_REQUESTS };
    let fitting = cache.map_or(most, |tokens| tokens / TYPICAL_TOKENS.min(context).max(1));
    let requests = given.requests.unwrap_or_else(|| fitting.clamp(1, most));
    let whole = context.saturating_mul(requests);
    // What one request needs is planned in any case, and loading says so if it does not fit.
    let shares = room.of_host || engines > 1;
    let bounded = cache.filter(|tokens| shares && *tokens < whole).map(|tokens| tokens.max(context));
    let why = match room.free {
        None => "the device does not report its free memory".to_owned(),
        Some(_) if context == limit => "the model's own limit".to_owned(),
        Some(_) if context == least => "there is memory for little more".to_owned(),
        Some(_) if room.of_host => "a quarter of the free memory; --context chooses another".to_owned(),
        Some(_) if room.in_host => "as much as fits into the memory of device and host".to_owned(),
        Some(_) => "as much as fits into the device's memory".to_owned(),
    };
    let context_note = given.context.is_none().then(|| format!("context of {context} tokens: {why}"));
    let requests_note = given.requests.is_none().then(|| {
        let why = if requests == most { "the most by default" } else { "as many as fit the memory" };
        format!("up to {requests} requests at a time: {why}")
    });
    let note: Vec<String> = context_note.into_iter().chain(requests_note).collect();
    Sizes {
        context: Some(context),
        rope_context: Some(given.context.unwrap_or(limit)),
        requests,
        kv_tokens: given.kv_tokens.or(bounded),
        note: (!note.is_empty()).then(|| note.join("; ")),
    }
}

/// The options with the context that suits the model and the memory, for one request at a time.
///
/// # Errors
/// As [`choose`].
pub(crate) fn for_one_request(
    model: &Model,
    draft: Option<&Arc<Model>>,
    devices: &Devices,
    options: EngineOptions,
) -> Result<(EngineOptions, Option<String>)> {
    let given = Given {
        context: options.context,
        requests: Some(options.max_requests),
        kv_tokens: options.kv_tokens,
    };
    let chosen = choose(model, draft, devices, &options, given)?;
    let Sizes { context, rope_context, kv_tokens, .. } = chosen;
    let options = EngineOptions { context, rope_context, kv_tokens, ..options };
    Ok((options, chosen.note))
}

/// Plans an engine whose sizes were chosen. Where the estimate was too high, the plan has the smallest context instead.
///
/// # Errors
/// Those of the plan.
pub(crate) fn plan_chosen(
    model: &Model,
    draft: Option<&Arc<Model>>,
    devices: &Devices,
    options: &EngineOptions,
    note: Option<&str>,
    terminal: &Terminal,
) -> Result<EnginePlan> {
    let options = &calibrated(model, devices.first(), options, terminal)?;
    let plan = plan_engine(model, draft, devices, options);
    let Some(note) = note else { return plan };
    let least = model.config().context.min(EngineOptions::DEFAULT_CONTEXT);
    let host_is_full = |error: &anyhow::Error| {
        matches!(error.downcast_ref::<EngineError>(), Some(EngineError::HostCache { .. }))
    };
    let (tight, context) = match &plan {
        // With streamed weights the device's memory is better used for layers than for a longer context, but not that of the host.
        Ok(plan) => {
            let streams = options.kv_in == KvIn::Device;
            let is_tight =
                |memory: &MemoryPlan| memory.missing().is_some() || (streams && memory.streamed > 0);
            (plan.memory_of_ranks().any(is_tight), plan.context())
        }
        Err(error) => (host_is_full(error), options.context.unwrap_or(usize::MAX)),
    };
    if tight && context > least {
        let smaller = EngineOptions { context: Some(least), kv_tokens: None, ..options.clone() };
        terminal.note(&format!("context of {least} tokens: there is memory for little more"));
        return plan_engine(model, draft, devices, &smaller);
    }
    let plan = plan?;
    terminal.note(note);
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn room(token_bytes: u64, free: Option<u64>, of_host: bool) -> CacheRoom {
        CacheRoom { token_bytes, free, of_host, in_host: false }
    }

    #[test]
    fn a_small_model_has_its_own_context() {
        let chosen = sizes(8192, room(46_080, Some(20 * GIB), true), 1, Given::default());
        assert_eq!((chosen.context, chosen.requests), (Some(8192), HOST_REQUESTS));
        assert_eq!(chosen.kv_tokens, None, "half of the memory has room for every request");
        let note = chosen.note.expect("a line says why");
        assert!(
            note.contains("8192 tokens: the model's own limit") && note.contains("16 requests"),
            "{note}"
        );
    }

    #[test]
    fn on_the_host_the_cache_leaves_memory_to_other_programs() {
        // Llama 3.1 8B with a cache in f32 on a laptop.
        let chosen = sizes(131_072, room(262_144, Some(8 * GIB), true), 1, Given::default());
        let context = chosen.context.expect("it is chosen");
        assert_eq!(context, 8192);
        let cache = chosen.kv_tokens.expect("it is bounded") as u64 * 262_144;
        assert!(cache <= 4 * GIB, "{cache}");
        assert_eq!(chosen.requests, HOST_REQUESTS);
    }

    #[test]
    fn an_accelerator_runs_as_many_requests_as_its_memory_suggests() {
        let large = sizes(131_072, room(131_072, Some(100 * GIB), false), 1, Given::default());
        assert_eq!((large.context, large.requests), (Some(131_072), ACCELERATOR_REQUESTS));
        let small = sizes(131_072, room(131_072, Some(2 * GIB), false), 1, Given::default());
        assert_eq!((small.context, small.requests), (Some(16_384), 16));
        assert_eq!(small.kv_tokens, None, "the engine fits the cache to the device");
    }

    #[test]
    fn a_cache_in_host_memory_has_room_for_longer_contexts() {
        let together = CacheRoom { in_host: true, ..room(131_072, Some(6 * GIB), false) };
        let chosen = sizes(131_072, together, 1, Given::default());
        assert_eq!(chosen.context, Some(49_152));
        let note = chosen.note.expect("a line says why");
        assert!(note.contains("the memory of device and host"), "{note}");
    }

    #[test]
    fn engines_on_one_device_leave_room_for_each_other() {
        let chosen = sizes(131_072, room(131_072, Some(30 * GIB), false), 2, Given::default());
        assert_eq!(chosen.kv_tokens, Some(30 * 8192));
    }

    #[test]
    fn little_or_unknown_memory_keeps_the_smallest_context() {
        for free in [None, Some(0), Some(GIB / 100)] {
            let chosen = sizes(131_072, room(262_144, free, false), 1, Given::default());
            assert_eq!(chosen.context, Some(EngineOptions::DEFAULT_CONTEXT));
            assert!(chosen.requests >= 1);
        }
        assert_eq!(sizes(1024, room(1, None, true), 1, Given::default()).context, Some(1024));
    }

    #[test]
    fn frequencies_of_rotary_embeddings_do_not_depend_on_free_memory() {
        for free in [None, Some(GIB / 100), Some(8 * GIB), Some(800 * GIB)] {
            let chosen = sizes(131_072, room(262_144, free, true), 1, Given::default());
            assert_eq!(chosen.rope_context, Some(131_072), "{free:?}");
            let given = Given { context: Some(4096), ..Given::default() };
            assert_eq!(sizes(131_072, room(262_144, free, true), 1, given).rope_context, Some(4096));
        }
    }

    #[test]
    fn what_is_given_is_kept() {
        let given = Given { context: Some(512), requests: Some(3), kv_tokens: Some(600) };
        let chosen = sizes(8192, room(46_080, Some(GIB), true), 1, given);
        assert_eq!((chosen.context, chosen.requests, chosen.kv_tokens), (Some(512), 3, Some(600)));
        assert_eq!(chosen.note, None);
    }
}
