//! The scheduler against a device that is simulated: pages hold what was written to them, in the order of launches.

use super::*;
use proptest::{prelude::*, sample::Index};
use std::collections::VecDeque;

/// What a page's slot holds: a hash of its token and all before it.
type Content = u64;

fn mix(before: Content, token: i32) -> Content {
    (before ^ (token as u64 + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23)
}

/// The token that a model samples behind a prefix. Few enough that answers have prefixes in common.
fn next_token(prefix: Content) -> i32 {
    (prefix >> 40) as i32 & 1
}

/// What a request should come to, alone.
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
struct Wish {
    /// The step before which it comes.
    at: usize,
    prompt: Vec<i32>,
    limit: usize,
    priority: i32,
    waits: bool,
    /// Tokens that are proposed at a time.
    draft: usize,
    /// After how many of its tokens it is cancelled.
    cancelled: Option<usize>,
}

/// A device and an engine around the scheduler, without either.
struct Simulation {
    scheduler: Scheduler<usize>,
    pages: Vec<Vec<Content>>,
    host_pages: Vec<Vec<Content>>,
    /// Per slot: pages, length, last token.
    table: Vec<(Vec<i32>, usize, i32)>,
    flights: VecDeque<Vec<(Key, Vec<i32>)>>,
    plan: StepPlan,
}

/// The last token of a slot that the device was not told.
const UNKNOWN: i32 = -7;

impl Wish {
    fn entry(&self, item: usize) -> Entry<usize> {
        let Self { prompt, limit, priority, waits, .. } = self.clone();
        Entry { prompt, limit, priority, waits, whole: false, guesses: false, item }
    }

    /// What is proposed to follow so many tokens of the answer: wrong now and then, and beyond its end.
    fn proposed(&self, after: usize) -> Vec<i32> {
        let mut tokens = alone(&self.prompt, after + self.draft).split_off(after);
        if let Some(wrong) = tokens.get_mut((after * 7 + self.limit) % (self.draft + 2)) {
            *wrong ^= 1;
        }
        tokens
    }
}

impl Simulation {
    fn new(capacity: Capacity) -> Self {
        let page = vec![0; capacity.block_size];
        Self {
            scheduler: Scheduler::new(capacity),
            pages: vec![page.clone(); capacity.pages],
            host_pages: vec![page; capacity.host_pages],
            table: vec![(Vec::new(), 0, 0); capacity.slots],
            flights: VecDeque::new(),
            plan: StepPlan::default(),
        }
    }

    fn prefix(&self, slot: usize, position: usize) -> Content {
        let block = self.scheduler.capacity().block_size;
        self.pages[self.table[slot].0[position / block] as usize][position % block]
    }

    /// Plans a step and runs it, without telling of its tokens. Whether there was one.
    fn launch(&mut self, wishes: &[Wish]) -> bool {
        self.scheduler.plan(&mut self.plan);
        let capacity = self.scheduler.capacity();
        for (page, host_page) in &self.plan.swap_out {
            self.host_pages[*host_page as usize] = self.pages[*page as usize].clone();
        }
        for (host_page, page) in &self.plan.swap_in {
            self.pages[*page as usize] = self.host_pages[*host_page as usize].clone();
        }
        for (key, length) in &self.plan.placed {
            let Some(sequence) = self.scheduler.get(*key).filter(|sequence| sequence.runs()) else {
                continue;
            };
            let row = &mut self.table[sequence.slot];
            (row.0, row.1) = (sequence.pages.clone(), *length);
        }
        for (key, from) in &self.plan.grown {
            let Some(sequence) = self.scheduler.get(*key).filter(|sequence| sequence.runs()) else {
                continue;
            };
            let row = &mut self.table[sequence.slot];
            row.0.truncate(*from);
            row.0.extend_from_slice(&sequence.pages[*from..]);
        }
        if self.plan.parts.is_empty() {
            return false;
        }
        let total: usize = self.plan.parts.iter().map(|part| part.tokens).sum();
        assert!(
            total == self.plan.tokens && total <= capacity.tokens && self.plan.parts.len() <= capacity.slots
        );
        let parts = std::mem::take(&mut self.plan.parts);
        // All parts write before any reads, as calls of a step do.
        for part in &parts {
            let sequence = self.scheduler.get(part.key).unwrap();
            let slot = sequence.slot;
            // Behind what was proposed in vain.
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
        for part in &parts {
            let sequence = self.scheduler.get(part.key).unwrap();
            let slot = sequence.slot;
            let length = self.table[slot].1;
            assert_eq!(length, sequence.computed);
            // Attention reads everything up to here: it must be this request's own, and then what is proposed.
            let wish = &wishes[sequence.item];
            let own = wish.prompt.iter().copied().chain(alone(&wish.prompt, wish.limit));
            let proposed = &sequence.draft[..part.proposed()];
            assert!(
                proposed.is_empty() || sequence.unread == 1,
                "tokens under way stand before what is proposed"
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
                [token] => self.table[slot].2 = token,
                _ => self.table[slot].2 = UNKNOWN,
            }
            flight.push((part.key, sampled));
        }
        self.flights.push_back(flight);
        true
    }
}

fn run(capacity: Capacity, wishes: &[Wish]) -> Counts {
    let mut simulation = Simulation::new(capacity);
    let mut answers: Vec<Vec<i32>> = vec![Vec::new(); wishes.len()];
    let mut ended = vec![false; wishes.len()];
    let mut keys = vec![None; wishes.len()];
    // Every step of a request that is first in the order brings at least a token of it, or waits for one.
    let longest: usize = wishes.iter().map(|wish| wish.prompt.len() + 2 * wish.limit + 2).sum();
    let arrivals = wishes.iter().map(|wish| wish.at).max().unwrap_or(0);
    for step in 0..=2 * (longest + arrivals) {
        for (index, wish) in wishes.iter().enumerate().filter(|(_, wish)| wish.at == step) {
            keys[index] = Some(simulation.scheduler.add(wish.entry(index)));
        }
        let mut cancel = |simulation: &mut Simulation, answers: &[Vec<i32>]| {
            for (index, wish) in wishes.iter().enumerate() {
                let due = wish.cancelled.is_some_and(|after| answers[index].len() >= after);
                if let Some(key) = keys[index].filter(|_| due && !ended[index]) {
                    assert_eq!(simulation.scheduler.end(key), Some(index));
                    ended[index] = true;
                }
            }
        };
        cancel(&mut simulation, &answers);
        let mut launched = false;
        while simulation.flights.len() < 2 && simulation.launch(wishes) {
            launched = true;
        }
        assert!(
            launched || !simulation.flights.is_empty() || simulation.scheduler.is_idle(),
            "nothing runs, and nothing is under way"
        );
        for (key, sampled) in simulation.flights.pop_front().unwrap_or_default() {
            let Some(index) = simulation.scheduler.get(key).map(|sequence| sequence.item) else { continue };
            let (answer, wish) = (&mut answers[index], &wishes[index]);
            let right = simulation.scheduler.took(key, sampled.iter().copied());
            answer.extend_from_slice(&sampled[..right]);
            if answer.len() == wish.limit {
                simulation.scheduler.end(key);
                ended[index] = true;
            } else if let Some(sequence) = simulation.scheduler.get_mut(key) {
                sequence.draft = wish.proposed(answer.len());
            }
        }
        if step > arrivals && simulation.scheduler.is_idle() {
            break;
        }
    }
    for ((index, wish), answer) in wishes.iter().enumerate().zip(&answers) {
        assert!(ended[index], "request {index} is not finished: {wish:?}");
        let expected = alone(&wish.prompt, wish.limit);
        match wish.cancelled {
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
    Capacity { tokens, slots, pages, block_size: 4, host_pages: 0, keep_prefixes: true, prompts_first: false }
}

fn wish(prompt: usize, limit: usize) -> Wish {
    Wish { at: 0, prompt: vec![0; prompt], limit, priority: 0, waits: false, draft: 0, cancelled: None }
}

prop_compose! {
    /// A workload, and a capacity that each of its requests fits into.
    fn workload()(
        wishes in prop::collection::vec((0usize..30, 1usize..40, any::<Index>(), 1usize..30, -1i32..2, any::<u8>()), 1..12),
        slots in 1usize..5, budget in 0usize..20, extra in 0usize..20, host_pages in prop_oneof![Just(0usize), 0usize..30],
        keep_prefixes in any::<bool>(),
        prompts_first in any::<bool>(),
    ) -> (Capacity, Vec<Wish>) {
        let wishes: Vec<Wish> = wishes.into_iter().map(|(at, prompt, which, limit, priority, kind)| {
            // Prompts begin alike, and differ somewhere.
            let differs = which.index(prompt);
            let prompt = (0..prompt).map(|index| i32::from(index == differs) + 2).collect();
            let cancelled = (kind % 5 == 0).then(|| which.index(limit));
            let draft = [0, 1, 3, 9][usize::from(kind / 64)];
            Wish { at, prompt, limit, priority, waits: kind % 3 == 0, draft, cancelled }
        }).collect();
        let most = wishes.iter().map(|wish| (wish.prompt.len() + wish.limit - 1).div_ceil(4)).max();
        let pages = most.unwrap_or(0) + extra;
        (Capacity { tokens: slots + budget, slots, pages, block_size: 4, host_pages, keep_prefixes, prompts_first }, wishes)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn every_request_gets_its_answer_in_bounded_steps_and_no_page_is_lost_or_used_twice(
        (capacity, wishes) in workload(),
    ) {
        run(capacity, &wishes);
    }
}

#[test]
fn requests_that_grow_beyond_the_pages_yield_in_order() {
    // Each needs ten pages, there are twelve.
    let wishes = [Wish { prompt: vec![1; 8], ..wish(8, 32) }, Wish { prompt: vec![2; 8], ..wish(8, 32) }];
    for host_pages in [0, 12] {
        for draft in [0, 5] {
            let wishes: Vec<Wish> = wishes.iter().map(|wish| Wish { draft, ..wish.clone() }).collect();
            let counts = run(Capacity { host_pages, ..capacity(16, 2, 12) }, &wishes);
            assert!(counts.preemptions > 0);
        }
    }
}

#[test]
fn answers_to_one_prompt_share_its_pages() {
    let wishes = vec![wish(40, 4); 4];
    let counts = run(capacity(64, 4, 100), &wishes);
    // Nine of ten pages each: the last token is computed by each for itself.
    assert_eq!(counts.prefix_hit_tokens, 3 * 36);
    assert_eq!(counts.prompt_tokens, 4 * 40);
    let mut simulation = Simulation::new(capacity(64, 4, 100));
    for (index, wish) in wishes.iter().enumerate() {
        simulation.scheduler.add(wish.entry(index));
    }
    assert!((0..3).all(|_| simulation.launch(&wishes)));
    assert!(simulation.scheduler.pages().in_use() <= 9 + 4 * 2);
}

/// The tokens that each request brings to the next step.
fn shares(scheduler: &mut Scheduler<usize>) -> Vec<(usize, usize)> {
    let mut plan = StepPlan::default();
    scheduler.plan(&mut plan);
    let share = |part: &Part| (scheduler.get(part.key).unwrap().item, part.tokens);
    let mut shares: Vec<(usize, usize)> = plan.parts.iter().map(share).collect();
    shares.sort_unstable();
    shares
}

fn add(scheduler: &mut Scheduler<usize>, item: usize, prompt: usize, priority: i32) -> Key {
    let prompt = vec![item as i32; prompt];
    scheduler.add(Entry { prompt, limit: 8, priority, waits: false, whole: false, guesses: false, item })
}

#[test]
fn a_long_prompt_neither_starves_the_others_nor_is_starved() {
    let mut scheduler = Scheduler::new(capacity(16, 8, 200));
    add(&mut scheduler, 0, 100, 0);
    assert_eq!(shares(&mut scheduler), [(0, 16)], "it has all while it is alone");
    add(&mut scheduler, 1, 30, 0);
    add(&mut scheduler, 2, 5, 0);
    // Half for the first, the rest for the shortest and then for the next.
    assert_eq!(shares(&mut scheduler), [(0, 8), (1, 3), (2, 5)]);
    // The one that generates comes before both.
    assert_eq!(shares(&mut scheduler), [(0, 8), (1, 7), (2, 1)]);
}

#[test]
fn whole_prompts_go_ahead_of_generation_if_asked_to() {
    let mut scheduler = Scheduler::new(Capacity { prompts_first: true, ..capacity(16, 8, 200) });
    add(&mut scheduler, 0, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 4)]);
    for (item, prompt) in [(1, 9), (2, 9), (3, 20)] {
        add(&mut scheduler, item, prompt, 0);
    }
    assert_eq!(shares(&mut scheduler), [(1, 9)], "the next does not fit as a whole");
    assert_eq!(shares(&mut scheduler), [(2, 9)]);
    assert_eq!(shares(&mut scheduler), [(3, 16)], "longer than any step");
    assert_eq!(shares(&mut scheduler), [(3, 4)]);
    assert_eq!(shares(&mut scheduler), [(0, 1), (1, 1), (2, 1), (3, 1)]);
}

#[test]
fn a_higher_priority_takes_the_place_of_a_lower_one() {
    let mut scheduler = Scheduler::new(capacity(16, 2, 200));
    add(&mut scheduler, 0, 4, 0);
    add(&mut scheduler, 1, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 4)]);
    add(&mut scheduler, 2, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 1), (1, 1)], "an equal one waits");
    let urgent = add(&mut scheduler, 3, 4, 1);
    assert_eq!(shares(&mut scheduler), [(0, 1), (3, 4)], "the last that came yields");
    assert_eq!((scheduler.running(), scheduler.waiting(), scheduler.counts().preemptions), (2, 2, 1));
    scheduler.end(urgent);
    assert_eq!(shares(&mut scheduler), [(0, 1)], "the tokens of the one that comes back are under way");
}

#[test]
fn one_that_waits_for_the_host_is_left_out_of_the_step_ahead() {
    let mut scheduler = Scheduler::new(capacity(16, 2, 200));
    let waiting = Entry {
        prompt: vec![1; 4],
        limit: 8,
        priority: 0,
        waits: true,
        whole: false,
        guesses: false,
        item: 0,
    };
    let waiting = scheduler.add(waiting);
    add(&mut scheduler, 1, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 4)]);
    assert_eq!(shares(&mut scheduler), [(1, 1)]);
    scheduler.took(waiting, [7]);
    assert_eq!(shares(&mut scheduler), [(0, 1), (1, 1)]);
}

#[test]
fn drafts_take_what_others_leave_and_wait_for_the_host() {
    let mut scheduler = Scheduler::new(capacity(16, 4, 200));
    let first = add(&mut scheduler, 0, 4, 0);
    let second = add(&mut scheduler, 1, 4, 0);
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 4)]);
    assert_eq!(scheduler.took(first, [5]), 1);
    assert_eq!(scheduler.took(second, [5]), 1);
    scheduler.get_mut(first).unwrap().draft = vec![6, 7, 8];
    scheduler.get_mut(second).unwrap().draft = vec![6; 20];
    add(&mut scheduler, 2, 8, 0);
    // A token of each, the prompt, three of the first draft, and what is left for the second: of six only three fit.
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 4), (2, 8)]);
    // Neither is launched ahead of what it has under way, while the other generates.
    assert_eq!(shares(&mut scheduler), [(2, 1)]);
    // What is right is kept: up to the first that differs, and what was sampled in its place.
    assert_eq!(scheduler.took(first, [6, 7, 9, 1]), 3);
    assert_eq!(scheduler.took(second, [6, 6, 6, 2]), 4);
    let tokens = |scheduler: &Scheduler<usize>, key| scheduler.get(key).unwrap().tokens[4..].to_vec();
    assert_eq!(tokens(&scheduler, first), [5, 6, 7, 9]);
    assert_eq!(tokens(&scheduler, second), [5, 6, 6, 6, 2]);
    // Never more than the answer may still have: of eight tokens, the first has four and the second five.
    scheduler.get_mut(first).unwrap().draft = vec![1; 9];
    scheduler.get_mut(second).unwrap().draft = vec![1; 9];
    assert_eq!(shares(&mut scheduler), [(0, 4), (1, 3), (2, 1)]);
}

#[test]
fn a_draft_takes_no_page_from_anybody() {
    // Each that runs is left a page for its next token.
    for (pages, brought) in [(4, 1), (6, 1), (7, 3)] {
        let mut scheduler = Scheduler::new(capacity(32, 2, pages));
        let first = add(&mut scheduler, 0, 7, 0);
        let second = add(&mut scheduler, 1, 7, 0);
        assert_eq!(shares(&mut scheduler), [(0, 7), (1, 7)]);
        for key in [first, second] {
            assert_eq!(scheduler.took(key, [5]), 1);
        }
        scheduler.get_mut(first).unwrap().draft = vec![6, 7];
        assert_eq!(shares(&mut scheduler), [(0, brought), (1, 1)], "{pages} pages");
    }
}
