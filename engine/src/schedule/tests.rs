//! Tests the scheduler against a simulated device, whose pages hold what was written to them in the order of launches.

mod store;

use super::{scheduler::SchedulerCounts, *};
use crate::kv_cache::{PageKey, PageMove, PageStore, Prefix, StoredPage};
use proptest::{prelude::*, sample::Index};
use std::{collections::VecDeque, sync::Arc};

/// The content of a page's slot: a hash of its token and all tokens before it.
type Content = u64;

fn mix(before: Content, token: i32) -> Content {
    (before ^ (token as u64 + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23)
}

/// The token that the simulated model samples after a prefix. There are few of them, so that answers share prefixes.
fn next_token(prefix: Content) -> i32 {
    (prefix >> 40) as i32 & 1
}

/// The answer that a request gets when it runs alone.
fn alone(prompt: &[i32], limit: usize) -> Vec<i32> {
    let mut prefix = prompt.iter().fold(0, |prefix, token| mix(prefix, *token));
    let mut tokens = Vec::new();
    for _ in 0..limit {
        tokens.push(next_token(prefix));
        prefix = mix(prefix, next_token(prefix));
    }
    tokens
}

#[derive(Clone, Debug)]
struct TestRequest {
    /// The step before which it arrives.
    at: usize,
    prompt: Vec<i32>,
    limit: usize,
    priority: i32,
    waits_for_host: bool,
    /// Tokens that are proposed at a time.
    draft: usize,
    /// The number of answer tokens after which it is cancelled.
    cancelled: Option<usize>,
}

/// A scheduler with a simulated device and engine.
struct Simulation {
    scheduler: Scheduler<usize>,
    pages: Vec<Vec<Content>>,
    host_pages: Vec<Vec<Content>>,
    /// For each row of the request table: pages, length, last token.
    table: Vec<(Vec<i32>, usize, i32)>,
    in_flight: VecDeque<Vec<(SequenceKey, Vec<i32>)>>,
    step: ScheduledStep,
}

/// The last token of a row for which the device does not have it.
const UNKNOWN: i32 = -7;

impl TestRequest {
    fn new_sequence(&self, item: usize) -> NewSequence<usize> {
        let Self { prompt, limit, priority, waits_for_host, .. } = self.clone();
        NewSequence {
            prompt,
            limit,
            priority,
            waits_for_host,
            reuses_prefix: true,
            root: Prefix::EMPTY,
            provisional: false,
            item,
        }
    }

    /// The tokens proposed after this many tokens of the answer: sometimes wrong, and beyond its end.
    fn proposed(&self, after: usize) -> Vec<i32> {
        let mut tokens = alone(&self.prompt, after + self.draft).split_off(after);
        if let Some(wrong) = tokens.get_mut((after * 7 + self.limit) % (self.draft + 2)) {
            *wrong ^= 1;
        }
        tokens
    }
}

/// The key of the empty prefix in a store.
fn model() -> PageKey {
    PageKey::root([7; 32])
}

impl Simulation {
    fn new(capacity: Capacity) -> Self {
        Self::with_store(capacity, None)
    }

    fn with_store(capacity: Capacity, store: Option<Arc<PageStore>>) -> Self {
        let page = vec![0; capacity.block_size];
        Self {
            scheduler: Scheduler::with_store(capacity, store.map(|store| (model(), store))),
            pages: vec![page.clone(); capacity.pages],
            host_pages: vec![page; capacity.host_pages],
            table: vec![(Vec::new(), 0, 0); capacity.slots],
            in_flight: VecDeque::new(),
            step: ScheduledStep::default(),
        }
    }

    fn prefix(&self, slot: usize, position: usize) -> Content {
        let block = self.scheduler.capacity().block_size;
        self.pages[self.table[slot].0[position / block] as usize][position % block]
    }

    /// Moves pages in their order.
    fn move_pages(&mut self, moves: &[PageMove]) {
        for page in moves {
            match page {
                PageMove::SwapOut(page, host_page) => {
                    self.host_pages[*host_page as usize] = self.pages[*page as usize].clone();
                }
                PageMove::SwapIn(host_page, page) => {
                    self.pages[*page as usize] = self.host_pages[*host_page as usize].clone();
                }
                PageMove::Save(page, key, tier) => {
                    let bytes =
                        self.pages[*page as usize].iter().flat_map(|slot| slot.to_le_bytes()).collect();
                    let store = self.scheduler.store.as_ref().unwrap();
                    store.save(vec![(*key, *tier)], Box::new(|| Ok(vec![Arc::new(bytes)])));
                }
                PageMove::Load(StoredPage { bytes, .. }, page) => {
                    let slots = bytes.as_chunks().0.iter().map(|slot| Content::from_le_bytes(*slot));
                    self.pages[*page as usize] = slots.collect();
                }
            }
        }
    }

    /// Plans a step and runs it without reporting its tokens. Returns whether there was one.
    fn launch(&mut self, requests: &[TestRequest]) -> bool {
        let capacity = self.scheduler.capacity();
        loop {
            self.scheduler.plan(&mut self.step);
            let moves = std::mem::take(&mut self.step.moves);
            self.move_pages(&moves);
            let waits = self.step.sequences.is_empty() && self.in_flight.is_empty();
            if !(waits && self.scheduler.wait_for_pages()) {
                break;
            }
        }
        for (key, length) in &self.step.placed {
            let Some(sequence) = self.scheduler.get(*key).filter(|sequence| sequence.runs()) else {
                continue;
            };
            let row = &mut self.table[sequence.slot];
            (row.0, row.1) = (sequence.pages.clone(), *length);
        }
        for (key, from) in &self.step.grown {
            let Some(sequence) = self.scheduler.get(*key).filter(|sequence| sequence.runs()) else {
                continue;
            };
            let row = &mut self.table[sequence.slot];
            row.0.truncate(*from);
            row.0.extend_from_slice(&sequence.pages[*from..]);
        }
        if self.step.sequences.is_empty() {
            return false;
        }
        let total: usize = self.step.sequences.iter().map(|part| part.tokens).sum();
        assert!(
            total == self.step.tokens
                && total <= capacity.tokens
                && self.step.sequences.len() <= capacity.slots
        );
        let scheduled = std::mem::take(&mut self.step.sequences);
        // All sequences write before any of them reads, as calls of a step do.
        for part in &scheduled {
            let sequence = self.scheduler.get(part.key).unwrap();
            let slot = sequence.slot;
            // Rejected tokens are overwritten.
            assert!(part.from.is_none_or(|from| from <= self.table[slot].1));
            let start = part.from.unwrap_or(self.table[slot].1);
            self.table[slot].1 = start;
            let known = part.tokens - part.proposed();
            for offset in 0..part.tokens {
                let token = match part.from {
                    None => self.table[slot].2,
                    Some(from) if offset < known => sequence.tokens[from + offset],
                    Some(_) => sequence.draft[offset - known],
                };
                let position = start + offset;
                let before = if position == 0 { 0 } else { self.prefix(slot, position - 1) };
                let page = self.table[slot].0[position / capacity.block_size];
                self.pages[page as usize][position % capacity.block_size] = mix(before, token);
            }
            self.table[slot].1 += part.tokens;
        }
        let mut flight = Vec::new();
        for part in &scheduled {
            let sequence = self.scheduler.get(part.key).unwrap();
            let slot = sequence.slot;
            let length = self.table[slot].1;
            assert_eq!(length, sequence.computed);
            // Attention reads everything up to here: the request's own tokens, and then the proposed ones.
            let request = &requests[sequence.item];
            let own = request.prompt.iter().copied().chain(alone(&request.prompt, request.limit));
            let proposed = &sequence.draft[..part.proposed()];
            assert!(
                proposed.is_empty() || sequence.unread == 1,
                "tokens in flight precede the proposed ones"
            );
            let read = own.take(length - proposed.len()).chain(proposed.iter().copied());
            let (mut prefix, mut sampled) = (0, Vec::new());
            for (position, token) in read.enumerate() {
                prefix = mix(prefix, token);
                assert_eq!(self.prefix(slot, position), prefix, "request {} at {position}", sequence.item);
                if position + part.samples >= length {
                    sampled.push(next_token(prefix));
                }
            }
            assert_eq!(sampled.len(), part.samples);
            match sampled[..] {
                [] => continue,
                [token] if !capacity.tokens_from_host => self.table[slot].2 = token,
                _ => self.table[slot].2 = UNKNOWN,
            }
            flight.push((part.key, sampled));
        }
        self.in_flight.push_back(flight);
        true
    }
}

fn run(capacity: Capacity, requests: &[TestRequest]) -> SchedulerCounts {
    run_with_store(capacity, requests, None)
}

fn run_with_store(
    capacity: Capacity,
    requests: &[TestRequest],
    store: Option<Arc<PageStore>>,
) -> SchedulerCounts {
    let mut simulation = Simulation::with_store(capacity, store);
    let mut answers: Vec<Vec<i32>> = vec![Vec::new(); requests.len()];
    let mut ended = vec![false; requests.len()];
    let mut keys = vec![None; requests.len()];
    // In every step the first request in the order has at least a token, or waits for one.
    let longest: usize = requests.iter().map(|request| request.prompt.len() + 2 * request.limit + 2).sum();
    let arrivals = requests.iter().map(|request| request.at).max().unwrap_or(0);
    let depth = capacity.micro_batches.max(2);
    for step in 0..=depth * (longest + arrivals) {
        for (index, request) in requests.iter().enumerate().filter(|(_, request)| request.at == step) {
            let root = simulation.scheduler.pages().root(None);
            let new = NewSequence { root, ..request.new_sequence(index) };
            keys[index] = Some(simulation.scheduler.add(new));
        }
        let mut cancel = |simulation: &mut Simulation, answers: &[Vec<i32>]| {
            for (index, request) in requests.iter().enumerate() {
                let due = request.cancelled.is_some_and(|after| answers[index].len() >= after);
                if let Some(key) = keys[index].filter(|_| due && !ended[index]) {
                    assert_eq!(simulation.scheduler.end(key), Some(index));
                    ended[index] = true;
                }
            }
        };
        cancel(&mut simulation, &answers);
        let mut launched = false;
        while simulation.in_flight.len() < depth && simulation.launch(requests) {
            launched = true;
        }
        assert!(
            launched || !simulation.in_flight.is_empty() || simulation.scheduler.is_idle(),
            "nothing runs, and nothing is in flight"
        );
        for (key, sampled) in simulation.in_flight.pop_front().unwrap_or_default() {
            let Some(index) = simulation.scheduler.get(key).map(|sequence| sequence.item) else { continue };
            let (answer, request) = (&mut answers[index], &requests[index]);
            let valid = simulation.scheduler.accept_tokens(key, sampled.iter().copied());
            answer.extend_from_slice(&sampled[..valid]);
            if answer.len() == request.limit {
                simulation.scheduler.end(key);
                ended[index] = true;
            } else if let Some(sequence) = simulation.scheduler.get_mut(key) {
                sequence.draft = request.proposed(answer.len());
            }
        }
        if step > arrivals && simulation.scheduler.is_idle() {
            break;
        }
    }
    let mut moves = Vec::new();
    simulation.scheduler.save_pages(&mut moves);
    simulation.move_pages(&moves);
    for ((index, request), answer) in requests.iter().enumerate().zip(&answers) {
        assert!(ended[index], "request {index} is not finished: {request:?}");
        let expected = alone(&request.prompt, request.limit);
        match request.cancelled {
            Some(_) => assert_eq!(answer[..], expected[..answer.len()]),
            None => assert_eq!(*answer, expected),
        }
    }
    let Scheduler { pages, host_pages, slots, waiting, .. } = &simulation.scheduler;
    assert_eq!((pages.in_use(), pages.available()), (0, capacity.pages));
    assert_eq!((host_pages.len(), slots.len(), waiting.len()), (capacity.host_pages, capacity.slots, 0));
    let counts = simulation.scheduler.counts();
    if !capacity.keep_prefixes {
        assert_eq!(counts.prefix_hit_tokens, 0);
    }
    counts
}

fn capacity(tokens: usize, slots: usize, pages: usize) -> Capacity {
    Capacity {
        tokens,
        slots,
        pages,
        block_size: 4,
        host_pages: 0,
        keep_prefixes: true,
        prompts_first: false,
        tokens_from_host: false,
        micro_batches: 1,
    }
}

fn request(prompt: usize, limit: usize) -> TestRequest {
    TestRequest {
        at: 0,
        prompt: vec![0; prompt],
        limit,
        priority: 0,
        waits_for_host: false,
        draft: 0,
        cancelled: None,
    }
}

prop_compose! {
    /// A workload, and a capacity that each of its requests fits into.
    fn workload()(
        requests in prop::collection::vec((0usize..30, 1usize..40, any::<Index>(), 1usize..30, -1i32..2, any::<u8>()), 1..12),
        slots in 1usize..5, budget in 0usize..20, extra in 0usize..20, host_pages in prop_oneof![Just(0usize), 0usize..30],
        keep_prefixes in any::<bool>(),
        prompts_first in any::<bool>(),
        micro_batches in 1usize..4,
        tokens_from_host in any::<bool>(),
    ) -> (Capacity, Vec<TestRequest>) {
        let requests: Vec<TestRequest> = requests.into_iter().map(|(at, prompt, which, limit, priority, kind)| {
            // Prompts share a prefix, and differ in one token.
            let differs = which.index(prompt);
            let prompt = (0..prompt).map(|index| i32::from(index == differs) + 2).collect();
            let cancelled = (kind % 5 == 0).then(|| which.index(limit));
            let draft = [0, 1, 3, 9][usize::from(kind / 64)];
            TestRequest { at, prompt, limit, priority, waits_for_host: kind % 3 == 0, draft, cancelled }
        }).collect();
        let most = requests.iter().map(|request| (request.prompt.len() + request.limit - 1).div_ceil(4)).max();
        let pages = most.unwrap_or(0) + extra;
        let tokens = slots + budget;
        // Micro-batches take turns, and the host sends the tokens of each.
        let tokens_from_host = tokens_from_host || micro_batches > 1;
        let pipeline = Capacity { tokens_from_host, micro_batches, ..capacity(tokens, slots, pages) };
        (Capacity { host_pages, keep_prefixes, prompts_first, ..pipeline }, requests)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn every_request_gets_its_answer_in_bounded_steps_and_no_page_is_lost_or_used_twice(
        (capacity, requests) in workload(),
    ) {
        run(capacity, &requests);
    }
}

#[test]
fn requests_that_grow_beyond_the_pages_yield_in_order() {
    // Each request needs ten pages, and there are twelve.
    let requests = [
        TestRequest { prompt: vec![1; 8], ..request(8, 32) },
        TestRequest { prompt: vec![2; 8], ..request(8, 32) },
    ];
    for host_pages in [0, 12] {
        for draft in [0, 5] {
            let requests: Vec<TestRequest> =
                requests.iter().map(|request| TestRequest { draft, ..request.clone() }).collect();
            let counts = run(Capacity { host_pages, ..capacity(16, 2, 12) }, &requests);
            assert!(counts.preemptions > 0);
        }
    }
}

#[test]
fn answers_to_one_prompt_share_its_pages() {
    let requests = vec![request(40, 4); 4];
    let counts = run(capacity(64, 4, 100), &requests);
    // Each shares nine of its ten pages: every request computes its last token itself.
    assert_eq!(counts.prefix_hit_tokens, 3 * 36);
    assert_eq!(counts.prompt_tokens, 4 * 40);
    let mut simulation = Simulation::new(capacity(64, 4, 100));
    for (index, request) in requests.iter().enumerate() {
        simulation.scheduler.add(request.new_sequence(index));
    }
    assert!((0..3).all(|_| simulation.launch(&requests)));
    assert!(simulation.scheduler.pages().in_use() <= 9 + 4 * 2);
}

/// The tokens of each request in the next step.
fn shares(scheduler: &mut Scheduler<usize>) -> Vec<(usize, usize)> {
    let mut step = ScheduledStep::default();
    scheduler.plan(&mut step);
    let share = |part: &ScheduledSequence| (scheduler.get(part.key).unwrap().item, part.tokens);
    let mut shares: Vec<(usize, usize)> = step.sequences.iter().map(share).collect();
    shares.sort_unstable();
    shares
}

fn add(scheduler: &mut Scheduler<usize>, item: usize, prompt: usize, priority: i32) -> SequenceKey {
    let prompt = vec![item as i32; prompt];
    scheduler.add(NewSequence {
        prompt,
        limit: 8,
        priority,
        waits_for_host: false,
        reuses_prefix: true,
        root: Prefix::EMPTY,
        provisional: false,
        item,
    })
}

#[test]
fn a_long_prompt_neither_starves_the_others_nor_is_starved() {
    let mut scheduler = Scheduler::new(capacity(16, 8, 200));
    add(&mut scheduler, 0, 100, 0);
    assert_eq!(shares(&mut scheduler), [(0, 16)], "a prompt alone gets the whole step");
    add(&mut scheduler, 1, 30, 0);
    add(&mut scheduler, 2, 5, 0);
    // The first prompt gets half, then the shortest one, then the next.
    assert_eq!(shares(&mut scheduler), [(0, 8), (1, 3), (2, 5)]);
    // The request that generates comes before both prompts.
    assert_eq!(shares(&mut scheduler), [(0, 8), (1, 7), (2, 1)]);
}

#[test]
fn whole_prompts_precede_generation_if_prompts_go_first() {
    let mut scheduler = Scheduler::new(Capacity { prompts_first: true, ..capacity(16, 8, 200) });
    add(&mut scheduler, 0, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 4)]);
    for (item, prompt) in [(1, 9), (2, 9), (3, 20)] {
        add(&mut scheduler, item, prompt, 0);
    }
    assert_eq!(shares(&mut scheduler), [(1, 9)], "the next prompt does not fit whole");
    assert_eq!(shares(&mut scheduler), [(2, 9)]);
    assert_eq!(shares(&mut scheduler), [(3, 16)], "this prompt is longer than a step");
    assert_eq!(shares(&mut scheduler), [(3, 4)]);
    assert_eq!(shares(&mut scheduler), [(0, 1), (1, 1), (2, 1), (3, 1)]);
}

#[test]
fn a_higher_priority_preempts_a_lower_one() {
    let mut scheduler = Scheduler::new(capacity(16, 2, 200));
    add(&mut scheduler, 0, 4, 0);
    add(&mut scheduler, 1, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 4)]);
    add(&mut scheduler, 2, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 1), (1, 1)], "a request of equal priority waits");
    let urgent = add(&mut scheduler, 3, 4, 1);
    assert_eq!(shares(&mut scheduler), [(0, 1), (3, 4)], "the latest request is pre-empted");
    assert_eq!((scheduler.running(), scheduler.waiting(), scheduler.counts().preemptions), (2, 2, 1));
    scheduler.end(urgent);
    assert_eq!(shares(&mut scheduler), [(0, 1)], "tokens of the request that resumes are in flight");
}

#[test]
fn a_request_that_waits_for_the_host_is_left_out_of_the_next_step() {
    let mut scheduler = Scheduler::new(capacity(16, 2, 200));
    let waiting = NewSequence {
        prompt: vec![1; 4],
        limit: 8,
        priority: 0,
        waits_for_host: true,
        reuses_prefix: true,
        root: Prefix::EMPTY,
        provisional: false,
        item: 0,
    };
    let waiting = scheduler.add(waiting);
    add(&mut scheduler, 1, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 4)]);
    assert_eq!(shares(&mut scheduler), [(1, 1)]);
    scheduler.accept_tokens(waiting, [7]);
    assert_eq!(shares(&mut scheduler), [(0, 1), (1, 1)]);
}

#[test]
fn drafts_take_what_is_left_of_a_step_and_wait_for_the_host() {
    let mut scheduler = Scheduler::new(capacity(16, 4, 200));
    let first = add(&mut scheduler, 0, 4, 0);
    let second = add(&mut scheduler, 1, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 4)]);
    assert_eq!(scheduler.accept_tokens(first, [5]), 1);
    assert_eq!(scheduler.accept_tokens(second, [5]), 1);
    scheduler.get_mut(first).unwrap().draft = vec![6, 7, 8];
    scheduler.get_mut(second).unwrap().draft = vec![6; 20];
    add(&mut scheduler, 2, 8, 0);
    // A token of each, the prompt, all three tokens of the first draft, and three of the second draft.
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 4), (2, 8)]);
    // Neither takes part while its tokens are in flight; the third request generates.
    assert_eq!(shares(&mut scheduler), [(2, 1)]);
    // Tokens are accepted up to the first that differs, with the token sampled in its place.
    assert_eq!(scheduler.accept_tokens(first, [6, 7, 9, 1]), 3);
    assert_eq!(scheduler.accept_tokens(second, [6, 6, 6, 2]), 4);
    let tokens = |scheduler: &Scheduler<usize>, key| scheduler.get(key).unwrap().tokens[4..].to_vec();
    assert_eq!(tokens(&scheduler, first), [5, 6, 7, 9]);
    assert_eq!(tokens(&scheduler, second), [5, 6, 6, 6, 2]);
    // No draft exceeds the rest of the answer: of eight tokens, the first has four and the second five.
    scheduler.get_mut(first).unwrap().draft = vec![1; 9];
    scheduler.get_mut(second).unwrap().draft = vec![1; 9];
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 3), (2, 1)]);
}

#[test]
fn a_draft_takes_no_page_that_another_sequence_needs() {
    // A page is left for the next token of each running sequence.
    for (pages, scheduled) in [(4, 1), (6, 1), (7, 3)] {
        let mut scheduler = Scheduler::new(capacity(32, 2, pages));
        let first = add(&mut scheduler, 0, 7, 0);
        let second = add(&mut scheduler, 1, 7, 0);
        assert_eq!(shares(&mut scheduler), [(0, 7), (1, 7)]);
        for key in [first, second] {
            assert_eq!(scheduler.accept_tokens(key, [5]), 1);
        }
        scheduler.get_mut(first).unwrap().draft = vec![6, 7];
        assert_eq!(shares(&mut scheduler), [(0, scheduled), (1, 1)], "{pages} pages");
    }
}

/// As many groups as stages take turns, and they are even.
#[test]
fn requests_that_generate_are_divided_into_even_micro_batches() {
    let requests = vec![request(1, 30); 10];
    let pipeline = Capacity { tokens_from_host: true, micro_batches: 3, ..capacity(16, 10, 200) };
    let mut simulation = Simulation::new(pipeline);
    let keys: Vec<_> = requests
        .iter()
        .enumerate()
        .map(|(index, request)| simulation.scheduler.add(request.new_sequence(index)))
        .collect();
    let mut sizes = Vec::new();
    for round in 0..40 {
        if round == 20 {
            for key in &keys[..4] {
                assert!(simulation.scheduler.end(*key).is_some());
            }
        }
        while simulation.in_flight.len() < 3 && simulation.launch(&requests) {
            sizes.push(simulation.in_flight.back().unwrap().len());
        }
        for (key, sampled) in simulation.in_flight.pop_front().unwrap() {
            if simulation.scheduler.get(key).is_some() {
                simulation.scheduler.accept_tokens(key, sampled);
            }
        }
    }
    assert_eq!(sizes[..6], [4, 4, 2, 4, 4, 2]);
    assert_eq!(sizes[sizes.len() - 6..], [2; 6]);
}
