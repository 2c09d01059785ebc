//! What runs next: the tokens of a step, chosen from the running requests.
//!
//! A step has a fixed budget of tokens. Requests that generate bring one token each and come first; what is left is
//! filled with chunks of prompts, in the order the requests came. So a long prompt neither stalls those that generate nor
//! starves behind them: as long as any request runs, every step makes progress.

use crate::blocks::PageAllocator;
use std::collections::VecDeque;

/// A request as the scheduler sees it.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// Its row of the request table.
    pub(crate) slot: usize,
    /// Tokens of its prompt.
    pub(crate) prompt: Vec<i32>,
    /// Prompt tokens already processed.
    pub(crate) processed: usize,
    /// Tokens it may still sample: those of steps under way are counted already.
    pub(crate) left: usize,
    /// Pages it holds.
    pub(crate) pages: Vec<i32>,
}

impl Sequence {
    /// Whether its whole prompt is processed.
    pub(crate) fn generates(&self) -> bool {
        self.processed == self.prompt.len()
    }

    /// Whether it brings the token it generated last into the next step.
    fn continues(&self) -> bool {
        self.generates() && self.left > 0
    }
}

/// A request's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Index among the running sequences.
    pub(crate) sequence: usize,
    /// Tokens it brings.
    pub(crate) tokens: usize,
    /// Where in its prompt they start; `None` if it is the token generated last.
    pub(crate) from: Option<usize>,
    /// Whether a token is sampled from its last row: it generates, or its prompt ends here.
    pub(crate) samples: bool,
}

/// Chooses the parts of the next step from sequences that run, in the order they came. Marks prompt tokens as processed and
/// counts tokens as sampled: the step after may be chosen before this one has run.
pub(crate) fn next_step(sequences: &mut [Sequence], budget: usize) -> Vec<Part> {
    let mut left = budget;
    let mut parts = Vec::new();
    let continuing = sequences.iter_mut().enumerate().filter(|(_, sequence)| sequence.continues());
    for (index, sequence) in continuing.take(budget) {
        left -= 1;
        sequence.left -= 1;
        parts.push(Part { sequence: index, tokens: 1, from: None, samples: true });
    }
    for (index, sequence) in sequences.iter_mut().enumerate() {
        if left == 0 {
            break;
        }
        let tokens = (sequence.prompt.len() - sequence.processed).min(left);
        if tokens == 0 {
            continue;
        }
        let from = Some(sequence.processed);
        sequence.processed += tokens;
        left -= tokens;
        let samples = sequence.continues();
        sequence.left -= usize::from(samples);
        parts.push(Part { sequence: index, tokens, from, samples });
    }
    parts
}

/// A request that waits for a row of the request table and for pages.
#[derive(Debug)]
pub(crate) struct Waiting<T> {
    /// Pages it will need in all: none is taken from a request that runs, so all are set aside when it starts.
    pub(crate) pages: usize,
    /// What waits.
    pub(crate) item: T,
}

/// Takes the first waiting request if a slot and its pages are free. Those behind it do not overtake it.
pub(crate) fn admit<T>(
    waiting: &mut VecDeque<Waiting<T>>,
    free_slots: &mut Vec<usize>,
    pages: &mut PageAllocator,
) -> Option<(T, usize, Vec<i32>)> {
    let needed = waiting.front()?.pages;
    if free_slots.is_empty() {
        return None;
    }
    let taken = pages.take(needed)?;
    let slot = free_slots.pop()?;
    waiting.pop_front().map(|waiting| (waiting.item, slot, taken))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sequence(prompt: usize, processed: usize) -> Sequence {
        Sequence { slot: 0, prompt: vec![0; prompt], processed, left: 100, pages: Vec::new() }
    }

    #[test]
    fn generating_requests_come_first_and_prompts_fill_the_rest() {
        let mut sequences = [sequence(10, 0), sequence(3, 3), sequence(4, 0)];
        let parts = next_step(&mut sequences, 8);
        assert_eq!(
            parts,
            [
                Part { sequence: 1, tokens: 1, from: None, samples: true },
                Part { sequence: 0, tokens: 7, from: Some(0), samples: false },
            ]
        );
        let parts = next_step(&mut sequences, 8);
        assert_eq!(
            parts,
            [
                Part { sequence: 1, tokens: 1, from: None, samples: true },
                Part { sequence: 0, tokens: 3, from: Some(7), samples: true },
                Part { sequence: 2, tokens: 4, from: Some(0), samples: true },
            ]
        );
    }

    #[test]
    fn no_more_tokens_are_sampled_than_wanted() {
        let mut sequences = [Sequence { left: 2, ..sequence(3, 0) }];
        let part = |tokens, from| Part { sequence: 0, tokens, from, samples: true };
        assert_eq!(next_step(&mut sequences, 8), [part(3, Some(0))]);
        assert_eq!(next_step(&mut sequences, 8), [part(1, None)]);
        assert_eq!(next_step(&mut sequences, 8), []);
    }

    proptest! {
        #[test]
        fn steps_keep_the_budget_and_every_prompt_is_processed_once_in_order(
            prompts in prop::collection::vec(1usize..50, 1..8),
            budget in 8usize..40,
        ) {
            let mut sequences: Vec<Sequence> = prompts.iter().map(|prompt| sequence(*prompt, 0)).collect();
            let mut processed = vec![0; prompts.len()];
            for _ in 0..prompts.iter().sum::<usize>() {
                if sequences.iter().all(Sequence::generates) {
                    break;
                }
                let parts = next_step(&mut sequences, budget);
                prop_assert!(parts.iter().map(|part| part.tokens).sum::<usize>() <= budget);
                let prompt_tokens: usize = parts.iter().filter(|p| p.from.is_some()).map(|p| p.tokens).sum();
                prop_assert!(prompt_tokens > 0, "a step without progress");
                for part in parts {
                    if let Some(from) = part.from {
                        prop_assert_eq!(from, processed[part.sequence]);
                        processed[part.sequence] += part.tokens;
                        prop_assert_eq!(part.samples, processed[part.sequence] == prompts[part.sequence]);
                    } else {
                        prop_assert_eq!(processed[part.sequence], prompts[part.sequence]);
                    }
                }
            }
            prop_assert_eq!(processed, prompts);
        }
    }

    #[test]
    fn admission_is_in_order_and_needs_slot_and_pages() {
        let mut pages = PageAllocator::new(4);
        let mut slots = vec![1, 0];
        let mut waiting: VecDeque<_> =
            [("a", 3), ("b", 2), ("c", 1)].map(|(item, pages)| Waiting { pages, item }).into();
        let (item, slot, taken) = admit(&mut waiting, &mut slots, &mut pages).unwrap();
        assert_eq!((item, slot, taken.len()), ("a", 0, 3));
        assert!(
            admit(&mut waiting, &mut slots, &mut pages).is_none(),
            "b does not fit and c may not overtake"
        );
        pages.give(taken);
        assert_eq!(admit(&mut waiting, &mut slots, &mut pages).unwrap().0, "b");
        assert!(admit(&mut waiting, &mut slots, &mut pages).is_none(), "no slot is free");
    }
}
