//! Merges the calls of a program for steps of many sizes.

use super::{
    Native,
    neighbours::Neighbours,
    partition, replace,
    runs::{Runs, SizeSet},
};
use dsrun_core::{Result, program::Program};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

/// Merges neighbouring calls of a program for the sizes of one step after the other.
///
/// An engine has hundreds of step sizes, which are combinations of the numbers of tokens, sequences and output rows, but many calls
/// depend on the number of tokens alone. So the answers of the device are kept, by the sizes that a run depends on: it is asked once
/// about equal runs at equal sizes, and a run that is known costs a lookup. Regions of regions are asked about again for every step.
/// Threads may merge at the same time, and use each other's answers; a run that two need at once is asked about twice.
#[derive(Debug)]
pub struct Merger {
    program: Arc<Program>,
    uses: Vec<usize>,
    runs: Runs,
    /// The numbers of the sizes that were asked for.
    sizes: Mutex<HashMap<Sizes, usize>>,
    answers: Answers,
}

/// The answers of a device, by the keys of runs and the numbers of their sizes.
#[derive(Debug, Default)]
pub(super) struct Answers(RwLock<HashMap<(usize, usize), bool>>);

impl Answers {
    pub(super) fn get(&self, question: (usize, usize)) -> Option<bool> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&question).copied()
    }

    pub(super) fn keep(&self, question: (usize, usize), answer: bool) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(question, answer);
    }
}

/// The sizes that an answer depends on: for each symbol of the program its size, if a run has it, and the conditions of the step.
type Sizes = (Vec<Option<usize>>, Vec<bool>);

impl Merger {
    /// Prepares a program, which must come from [`fuse`](super::fuse()).
    ///
    /// # Errors
    /// If a call has an operand that the program does not define.
    pub fn new(program: Arc<Program>) -> Result<Self> {
        let uses = program.uses();
        let runs = Runs::new(&program, &uses, || Neighbours::new(&program))?;
        Ok(Self { program, uses, runs, sizes: Mutex::default(), answers: Answers::default() })
    }

    /// Drops all answers.
    pub fn forget(&mut self) {
        self.answers = Answers::default();
    }

    /// Replaces neighbouring calls by regions that `native` supports, until there are no larger ones. `native` answers for the step with
    /// these sizes. Nothing but the sizes of a run and `conditions` may change its answer, unless [`Self::forget`] is called.
    ///
    /// # Errors
    /// The errors of `native`; [`dsrun_core::Code::Internal`] if the result is no valid program.
    pub fn merge(
        &self,
        sizes: &dyn Fn(&str) -> Option<usize>,
        conditions: &[bool],
        native: &mut Native<'_>,
    ) -> Result<Arc<Program>> {
        let values: Vec<Option<usize>> = self.program.symbols().iter().map(|name| sizes(name)).collect();
        let number = |set: &SizeSet| {
            let own = set.iter().zip(&values).map(|(has, size)| size.filter(|_| *has)).collect();
            let mut sizes = self.sizes.lock().unwrap_or_else(PoisonError::into_inner);
            let next = sizes.len();
            *sizes.entry((own, conditions.to_vec())).or_insert(next)
        };
        let numbers: Vec<usize> = self.runs.sizes().iter().map(number).collect();
        let parts = partition(&self.program, &self.uses, &self.runs, &numbers, &self.answers, native)?;
        if parts.iter().all(|part| part.region.is_none()) {
            return Ok(self.program.clone());
        }
        let merged = replace(&self.program, parts)?;
        Self::new(Arc::new(merged))?.merge(sizes, conditions, native)
    }
}
