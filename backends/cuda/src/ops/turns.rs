//! By how much the rows of a step are turned: a table of cosines and sines, for products that turn queries and keys themselves.
//!
//! Each such call makes its own in scratch memory, by one small launch. Programs do not know that these are the same in all
//! layers: when calls are captured as a graph, those with the same positions and frequencies are found here and share one table,
//! which is the graph's own and is made in front of the first of them.

use super::{KernelSpec, THREADS, chain::Turn};
use crate::{
    context::Context,
    kernels::Work,
    launch::{Frame, Function, Parameters, Step, Table},
    memory::CudaBuffer,
};
use dsrun_core::{Result, device::MemoryKind};
use std::{ops::Range, sync::Arc};

/// Bytes of a cosine and a sine.
const PAIR: usize = 2 * size_of::<f32>();

/// The kernel that fills a table.
pub(super) fn kernel() -> KernelSpec {
    KernelSpec::new("elementwise/turns.cu", "turns", [])
}

/// Bytes of a table.
pub(super) fn bytes(rows: usize, pairs: usize) -> usize {
    (rows * pairs * PAIR).next_multiple_of(256)
}

/// Fills the table at an address.
pub(super) fn step(
    turn: Turn,
    frame: &Frame,
    rows: usize,
    table: u64,
    function: &Arc<Function>,
) -> Result<Option<Step>> {
    let (positions, frequencies) = (frame.tensor(turn.positions)?, frame.tensor(turn.frequencies)?);
    let pairs = frequencies.size(0);
    let parameters = Parameters::default()
        .address(positions.address)
        .address(frequencies.address)
        .size(rows)
        .size(pairs)
        .address(table);
    let grid = [(rows * pairs).div_ceil(THREADS), 1, 1];
    let sources = [(positions.address, rows), (frequencies.address, pairs)]
        .map(|(address, count)| address..address + (count * 4) as u64);
    Ok(match Step::kernel(function, grid, THREADS, parameters) {
        Some(Step::Kernel(launch)) => Some(Step::Table(Table { launch, sources, bytes: bytes(rows, pairs) })),
        _ => None,
    })
}

/// A table that calls of a graph share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) step: Step,
    memory: Arc<CudaBuffer>,
}

/// Has calls share their tables. Gives the tables, and in front of which call each is made.
pub(crate) fn share(calls: &mut [Work], context: &Arc<Context>) -> Result<Vec<(usize, Shared)>> {
    let mut shared: Vec<(usize, Shared)> = Vec::new();
    for (call, at) in plan(calls) {
        let Some(table) = calls[call].table() else { continue };
        if at == call {
            let memory = Arc::new(CudaBuffer::new(context.clone(), table.bytes, MemoryKind::Device)?);
            let step = Step::Kernel(table.launch.with_last(memory.pointer));
            shared.push((call, Shared { step, memory }));
        }
        if let Some((_, table)) = shared.iter().find(|(first, _)| *first == at) {
            calls[call] = calls[call].with_table(table.memory.pointer);
        }
    }
    Ok(shared)
}

/// Calls with a table, and the first call that has the same.
fn plan(calls: &[Work]) -> Vec<(usize, usize)> {
    let each = calls.iter().map(|call| {
        let table = call.table().map(|table| (table.launch.but_last(), table.sources.clone()));
        (table, call.traffic.writes.clone())
    });
    same(each)
}

/// Which of the calls that come with what makes a table, where that reads, and what they write have the same as one before: the
/// number of the call, and of the first that has it. What a call writes is not the same any more.
fn same<T: PartialEq>(
    calls: impl Iterator<Item = (Option<(T, [Range<u64>; 2])>, Vec<Range<u64>>)>,
) -> Vec<(usize, usize)> {
    let mut known: Vec<(usize, T, [Range<u64>; 2])> = Vec::new();
    let mut found = Vec::new();
    for (call, (table, writes)) in calls.enumerate() {
        if let Some((makes, sources)) = table {
            match known.iter().find(|(_, other, _)| *other == makes) {
                Some((first, ..)) => found.push((call, *first)),
                None => {
                    found.push((call, call));
                    known.push((call, makes, sources));
                }
            }
        }
        let written = |range: &Range<u64>| {
            writes.iter().any(|write| write.start < range.end && range.start < write.end)
        };
        known.retain(|(.., sources)| !sources.iter().any(written));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    type Call = (Option<(char, [Range<u64>; 2])>, Vec<Range<u64>>);

    fn turns(makes: char, positions: u64) -> Call {
        (Some((makes, [positions..positions + 8, 100..108])), std::iter::once(200..300).collect())
    }

    fn writes(range: Range<u64>) -> Call {
        (None, vec![range])
    }

    #[test]
    fn layers_share_what_does_not_change() {
        let calls = [turns('a', 0), writes(400..500), turns('b', 8), turns('a', 0), turns('b', 8)];
        assert_eq!(same(calls.into_iter()), [(0, 0), (2, 2), (3, 0), (4, 2)]);
    }

    #[test]
    fn what_is_written_between_is_made_again() {
        for range in [7..8, 0..1, 107..120] {
            let calls = [turns('a', 0), writes(range.clone()), turns('a', 0), turns('a', 0)];
            assert_eq!(same(calls.into_iter()), [(0, 0), (2, 2), (3, 2)], "{range:?}");
        }
        let calls = [turns('a', 0), writes(8..100), writes(108..110), turns('a', 0)];
        assert_eq!(same(calls.into_iter()), [(0, 0), (3, 0)]);
    }
}
