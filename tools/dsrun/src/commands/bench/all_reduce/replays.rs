//! `dsrun bench all-reduce --check`: compares all-reduces with their sums, bit by bit, while ranks are late at random.
//!
//! An all-reduce whose ranks wait for each other by flags in memory may go wrong only when one of them is late, or early. So every
//! rank works for a random time before each all-reduce of a graph, pauses before it launches one, and several graphs with other
//! numbers write to the same memory in turn: a result that is not written, or written from old data, is then a wrong one.

use crate::group::{LIMIT, Place, Rank, on_ranks};
use anyhow::{Context, Result, bail};
use dsrun_core::{
    DType, TensorDesc,
    device::{BufferSlice, Device, MemoryKind},
    graph::{CallList, Graph},
    kernels::BoundCall,
    op::{AllReduce, Cast, MeshAxis, Reduction},
};
use half::{bf16, f16};
use indicatif::ProgressBar;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    hint,
    sync::Arc,
    time::{Duration, Instant},
};

/// The most all-reduces of a graph.
const MOST_CALLS: usize = 50;
/// Bytes of the tensors of a graph, if one of them is not larger: the host keeps those of all graphs for each rank.
const GRAPH_BYTES: usize = 32 << 20;
/// Graphs, with numbers and delays of their own.
const GRAPHS: usize = 4;
/// Rows that the longest delay copies, of [`COLUMNS`] f32: some tens of microseconds on a GPU.
const MOST_ROWS: usize = 1 << 11;
const COLUMNS: usize = 1 << 10;
/// The longest pause of a rank before a launch.
const LONGEST_PAUSE: Duration = Duration::from_micros(50);
/// From a tensor to the next in memory is a multiple of this.
const ALIGNMENT: usize = 256;

/// Compares at least `count` all-reduces of tensors of so many bytes on every rank. Returns how many.
///
/// # Errors
/// If a sum is wrong: names the first wrong element.
pub(super) fn check(
    devices: &[Arc<dyn Device>],
    bytes: usize,
    dtype: DType,
    count: u64,
    bar: &ProgressBar,
) -> Result<u64> {
    let job = Job::new(bytes, dtype, devices.len())?;
    let calls = job.calls as u64;
    let replays = count.div_ceil(calls);
    let all = replays.checked_mul(calls).with_context(|| format!("{count} are too many all-reduces"))?;
    bar.set_length(all);
    let scratch = TensorDesc::dense(DType::F32, &[MOST_ROWS, COLUMNS]);
    on_ranks(devices, &scratch, |rank| {
        let sums = job.bind(rank)?;
        // All ranks launch the same graphs.
        let (mut order, mut pauses) = (StdRng::seed_from_u64(0), StdRng::seed_from_u64(1 + rank.rank as u64));
        let (mut index, mut found) = (0, vec![0; sums.results.bytes]);
        for replay in 0..replays {
            // Never the same one again: its results are there already.
            index = (index + order.random_range(1..GRAPHS)) % GRAPHS;
            pause(pauses.random_range(Duration::ZERO..LONGEST_PAUSE));
            sums.graphs[index].launch(&mut *rank.stream)?;
            rank.stream.download(&sums.results, &mut found, "all-reduces", LIMIT)?;
            rank.comm.status()?;
            if let Some((call, element)) = job.difference(&found, &sums.expected[index]) {
                let call = replay * calls + call as u64;
                bail!("element {element} of all-reduce {call} is wrong on rank {}", rank.rank);
            }
            if rank.rank == 0 {
                bar.inc(calls);
            }
        }
        Ok(())
    })?;
    Ok(all)
}

/// Waits, without a sleep: that would take longer than it should.
fn pause(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        hint::spin_loop();
    }
}

/// All-reduces of one size.
#[derive(Clone, Copy)]
struct Job {
    bytes: usize,
    dtype: DType,
    ranks: usize,
    /// From a tensor to the next.
    stride: usize,
    /// All-reduces of a graph.
    calls: usize,
}

/// The graphs of a rank.
struct Sums {
    graphs: Vec<Box<dyn Graph>>,
    /// The memory of the results of any of them.
    results: BufferSlice,
    /// The bytes that belong there, of each graph.
    expected: Vec<Vec<u8>>,
}

impl Job {
    fn new(bytes: usize, dtype: DType, ranks: usize) -> Result<Self> {
        let stride = bytes.checked_next_multiple_of(ALIGNMENT).filter(|_| bytes > 0);
        let stride = stride.with_context(|| format!("no tensor has {bytes} bytes"))?;
        Ok(Self { bytes, dtype, ranks, stride, calls: (GRAPH_BYTES / stride).clamp(1, MOST_CALLS) })
    }

    fn bind(&self, rank: &mut Rank) -> Result<Sums> {
        let allocate = |bytes: usize| -> Result<BufferSlice> {
            Ok(BufferSlice::whole(rank.device.allocate(bytes, MemoryKind::Device)?))
        };
        let results = allocate(self.calls * self.stride)?;
        let copied = allocate(rank.memory.bytes)?;
        let tensor = TensorDesc::dense(self.dtype, &[1, self.bytes / self.dtype.bytes()]);
        let mut delays = StdRng::seed_from_u64(1 + rank.rank as u64);
        let (mut graphs, mut expected) = (Vec::new(), Vec::new());
        for graph in 0..GRAPHS {
            let numbers = allocate(self.calls * self.stride)?;
            let of_rank = |rank| move |call, element| number(rank, graph, call, element);
            rank.stream.upload(&self.tensors(of_rank(rank.rank)), &numbers)?;
            expected.push(
                self.tensors(|call, element| (0..self.ranks).map(|rank| of_rank(rank)(call, element)).sum()),
            );
            let mut calls = Vec::new();
            for call in 0..self.calls {
                // Short delays are as frequent as long ones.
                let rows = 1 << delays.random_range(0..=MOST_ROWS.ilog2());
                let delay = TensorDesc::dense(DType::F32, &[rows, COLUMNS]);
                calls.push(copy(rank, &delay, &rank.memory.slice(0, delay.bytes()?)?, &copied)?);
                // An all-reduce replaces its operand.
                let place = |memory: &BufferSlice| memory.slice(call * self.stride, self.bytes);
                calls.push(copy(rank, &tensor, &place(&numbers)?, &place(&results)?)?);
                let sum = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Sum };
                let result = Place { tensor: tensor.clone(), memory: place(&results)? };
                calls.push(rank.bind_to(sum, &result, Some(&result), Some(rank.comm.clone()))?);
            }
            graphs.push(match rank.device.graphs() {
                Some(graphs) => graphs.capture(&mut *rank.stream, calls)?,
                None => Box::new(CallList::new(calls)),
            });
        }
        rank.wait("numbers")?;
        Ok(Sums { graphs, results, expected })
    }

    /// The bytes of the tensors of a graph, from their numbers.
    fn tensors(&self, number: impl Fn(usize, usize) -> f32) -> Vec<u8> {
        let mut bytes = vec![0; self.calls * self.stride];
        for (call, tensor) in bytes.chunks_exact_mut(self.stride).enumerate() {
            let elements = tensor[..self.bytes].chunks_exact_mut(self.dtype.bytes());
            for (element, out) in elements.enumerate() {
                self.encode(number(call, element), out);
            }
        }
        bytes
    }

    fn encode(&self, number: f32, out: &mut [u8]) {
        match self.dtype {
            DType::F16 => out.copy_from_slice(&f16::from_f32(number).to_le_bytes()),
            DType::BF16 => out.copy_from_slice(&bf16::from_f32(number).to_le_bytes()),
            _ => out.copy_from_slice(&number.to_le_bytes()),
        }
    }

    /// The first call and element whose result is not what is expected.
    fn difference(&self, results: &[u8], expected: &[u8]) -> Option<(usize, usize)> {
        let tensors = results.chunks_exact(self.stride).zip(expected.chunks_exact(self.stride));
        let mut tensors = tensors.map(|(found, expected)| (&found[..self.bytes], &expected[..self.bytes]));
        let call = tensors.clone().position(|(found, expected)| found != expected)?;
        let (found, expected) = tensors.nth(call)?;
        let byte = found.iter().zip(expected).position(|(found, expected)| found != expected)?;
        Some((call, byte / self.dtype.bytes()))
    }
}

/// A copy of a tensor to the front of other memory.
fn copy(
    rank: &Rank,
    tensor: &TensorDesc,
    from: &BufferSlice,
    to: &BufferSlice,
) -> Result<Box<dyn BoundCall>> {
    let place = |memory| Place { tensor: tensor.clone(), memory };
    let to = place(to.slice(0, tensor.bytes()?)?);
    rank.bind_to(Cast { dtype: tensor.dtype }, &place(from.clone()), Some(&to), None)
}

/// A number of a rank: whole and at most 8, so that sums are exact in every type.
fn number(rank: usize, graph: usize, call: usize, element: usize) -> f32 {
    ((element * 7 + call * 5 + graph * 13 + rank * 3 + rank * rank) % 17) as f32 - 8.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::device::{Backend, DeviceOptions};
    use rstest::rstest;

    #[rstest]
    fn sums_of_the_cpu_are_right(#[values(DType::F32, DType::F16, DType::BF16)] dtype: DType) {
        let open = |_| dsrun_cpu::CpuBackend::new().open(0, &DeviceOptions::default()).unwrap();
        let devices: Vec<_> = (0..3).map(open).collect();
        assert_eq!(check(&devices, 36, dtype, 120, &ProgressBar::hidden()).unwrap(), 150);
    }

    #[test]
    fn one_wrong_bit_is_found() {
        let job = Job::new(20, DType::BF16, 2).unwrap();
        let expected = job.tensors(|call, element| number(0, 1, call, element));
        assert_eq!(job.difference(&expected, &expected), None);
        for (call, element) in [(0, 0), (7, 9), (MOST_CALLS - 1, 3)] {
            let mut found = expected.clone();
            found[call * job.stride + 2 * element + 1] ^= 1;
            assert_eq!(job.difference(&found, &expected), Some((call, element)));
        }
        // What is between the tensors does not matter.
        let mut found = expected.clone();
        found[job.bytes] ^= 1;
        assert_eq!(job.difference(&found, &expected), None);
    }

    #[test]
    fn large_tensors_make_short_graphs() {
        let calls = |bytes| Job::new(bytes, DType::F32, 2).map(|job| job.calls);
        assert_eq!((calls(4).unwrap(), calls(16 << 20).unwrap(), calls(1 << 40).unwrap()), (50, 2, 1));
        assert!(calls(0).is_err() && calls(usize::MAX - 3).is_err());
    }

    #[test]
    fn graphs_differ_in_every_tensor() {
        let job = Job::new(4, DType::F32, 2).unwrap();
        let sums = |graph| {
            job.tensors(move |call, element| (0..2).map(|rank| number(rank, graph, call, element)).sum())
        };
        for (a, b) in [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)] {
            let (a, b) = (sums(a), sums(b));
            assert!(a.chunks(job.stride).zip(b.chunks(job.stride)).all(|(a, b)| a != b));
        }
    }
}
