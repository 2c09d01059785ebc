//! Keys of runs of calls: runs with equal keys get the same answer from a device.

use dsrun_core::{
    Result,
    program::{Node, Program},
};
use std::collections::HashMap;

/// Keys of the runs of calls of a program. The key of a run follows from that of the run without its last call, so that it takes as long
/// for a long run as for a short one.
#[derive(Debug)]
pub(super) struct Keys<'a> {
    program: &'a Program,
    /// The readers of each value.
    uses: &'a [usize],
    /// The number of each call: calls of the same op on values of the same types have equal numbers.
    classes: Vec<usize>,
    /// The keys of runs that are not empty, by the key of the run without its last call and what that call adds to it.
    known: HashMap<(usize, Vec<usize>), usize>,
}

/// A run of consecutive calls, and its key.
#[derive(Debug)]
pub(super) struct KeyedRun {
    /// Equal for two runs if their calls have the same classes, use each other's values in the same way, and have results with the same
    /// numbers of readers.
    pub(super) key: usize,
    /// The numbers of the values of the run, in the order of their first uses.
    numbers: Vec<Option<usize>>,
    count: usize,
}

impl<'a> Keys<'a> {
    /// Numbers the calls of the program; no run is known yet.
    ///
    /// # Errors
    /// If a call has an operand that the program does not define.
    pub(super) fn new(program: &'a Program, uses: &'a [usize]) -> Result<Self> {
        Ok(Self { program, uses, classes: classes(program)?, known: HashMap::new() })
    }

    /// The empty run.
    pub(super) fn begin(&self) -> KeyedRun {
        KeyedRun { key: 0, numbers: vec![None; self.program.values.len()], count: 0 }
    }

    /// Adds a call to a run.
    pub(super) fn extend(&mut self, run: &mut KeyedRun, node: usize) {
        let call = &self.program.nodes[node].call;
        let mut added = vec![self.classes[node]];
        for id in call.operands.iter().copied().chain(call.results.iter().copied().map(Some)) {
            added.push(id.map_or(usize::MAX, |id| {
                *run.numbers[id.index()].get_or_insert_with(|| {
                    run.count += 1;
                    run.count
                })
            }));
        }
        // Together with the uses inside of the run these tell which results it has.
        added.extend(call.results.iter().map(|id| self.uses[id.index()]));
        let next = self.known.len() + 1;
        run.key = *self.known.entry((run.key, added)).or_insert(next);
    }
}

fn classes(program: &Program) -> Result<Vec<usize>> {
    let mut known: HashMap<String, usize> = HashMap::new();
    let class = |node: &Node| {
        let operands = program.operand_types(&node.call.operands)?;
        let results: Vec<_> =
            node.call.results.iter().map(|id| program.values[id.index()].tensor_type()).collect();
        let next = known.len();
        Ok(*known.entry(format!("{} {operands:?} {results:?}", node.call.op)).or_insert(next))
    };
    program.nodes.iter().map(class).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::{DType, TensorType, op::Add, program::ProgramBuilder};
    use std::ops::Range;

    /// Four additions, each of an input and the result of the one before, whose last result and `outputs` of the others are read.
    fn sums(outputs: &[usize]) -> Program {
        let mut builder = ProgramBuilder::new("sums");
        let rows = builder.bounded("tokens");
        let tensor = TensorType::new(DType::F32, [rows, 8.into()]);
        let y = builder.input("y", tensor.clone()).unwrap();
        let mut values = vec![builder.input("x", tensor).unwrap()];
        for at in 0..4 {
            let operands = [Some(values[at]), Some(y), None, None];
            values.push(builder.call(Add { alpha: 1.0 }, operands).unwrap());
        }
        let outputs: Vec<_> = outputs.iter().chain(&[4]).map(|at| values[*at]).collect();
        builder.finish(&outputs).unwrap()
    }

    fn keys<const N: usize>(program: &Program, runs: [Range<usize>; N]) -> [usize; N] {
        let uses = program.uses();
        let mut keys = Keys::new(program, &uses).unwrap();
        runs.map(|nodes| {
            let mut run = keys.begin();
            nodes.for_each(|node| keys.extend(&mut run, node));
            run.key
        })
    }

    #[test]
    fn runs_that_do_the_same_have_the_same_key() {
        let [first, second, longer, single] = keys(&sums(&[]), [0..2, 2..4, 0..3, 0..1]);
        assert_eq!(first, second);
        assert!(first != longer && first != single && longer != single);
    }

    #[test]
    fn runs_with_other_results_have_other_keys() {
        let [first, second] = keys(&sums(&[1]), [0..2, 2..4]);
        assert_ne!(first, second);
    }
}
