//! Attention of single tokens and what quantises it as a graph, for many sequences.
//!
//! A device may run both as one launch, in which parts of a row wait for each other: then no case of a call reaches what it runs. So
//! the graph is held to its calls one by one, which the cases hold to the oracle, to the bit: over sequences that grow, shrink, come
//! and go from launch to launch, in two layers one behind the other, each launch several times.

use super::bench::{Bench, Bound, Given, Held, Outcome, Stop, ensure, floats, same_bits};
use crate::{
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{AttentionMask, PagedAttention, QuantPerToken},
};

/// Sequences, KV heads, query heads of each, and elements of a head: parts of a row are 6 to 16, and some of 16 heads.
const SHAPES: [[usize; 4]; 6] =
    [[20, 8, 4, 128], [24, 8, 4, 64], [40, 6, 1, 80], [18, 8, 16, 128], [9, 8, 32, 32], [17, 8, 2, 256]];
const LAYERS: usize = 2;
const BLOCK: usize = 16;
/// Blocks of a sequence.
const BLOCKS: usize = 9;
const LENGTHS: [usize; 9] = [0, 1, 2, 16, 17, 33, 64, 100, BLOCKS * BLOCK];
const LAUNCHES: usize = 4;
/// How often a launch is repeated, which has to give the same bits.
const AGAIN: usize = 2;

/// What both sides read.
struct Common {
    shape: [usize; 4],
    query: Held,
    /// Start, tokens, and tokens with those before.
    lengths: [Held; 3],
    table: Given,
    caches: Vec<[Given; 2]>,
}

impl Common {
    fn new(bench: &mut Bench, random: &mut Random, dtype: DType, shape: [usize; 4]) -> Result<Self, Stop> {
        let [sequences, kv_heads, group, size] = shape;
        let pages = sequences * BLOCKS;
        let table: Vec<i32> = random.shuffled(pages).into_iter().map(|page| page as i32).collect();
        let mut caches = Vec::new();
        for _ in 0..LAYERS {
            let mut cache = |scale: f64| {
                let cache = random.scaled(dtype, &[pages, kv_heads, BLOCK, size], Values::Uniform, scale);
                bench.give(&cache)
            };
            caches.push([cache(2.0)?, cache(1.0)?]);
        }
        let mut words = || bench.empty(DType::I32, &[sequences]);
        let lengths = [words()?, words()?, words()?];
        Ok(Self {
            shape,
            query: bench.empty(dtype, &[sequences, kv_heads * group * size])?,
            lengths,
            table: bench.give(&Tensor::integers(&[sequences, BLOCKS], &table))?,
            caches,
        })
    }

    /// Other queries, of sequences of other lengths. Tells which rows there are.
    fn set(&self, bench: &mut Bench, random: &mut Random) -> Result<Vec<bool>, Stop> {
        let query = random.tensor(self.query.desc.dtype, &self.query.desc.shape, Values::HeavyTailed);
        bench.set(&self.query, &query)?;
        let lengths: Vec<i32> = (0..self.shape[0]).map(|_| random.pick(&LENGTHS) as i32).collect();
        let there: Vec<bool> = lengths.iter().map(|length| *length > 0).collect();
        let starts: Vec<i32> = (0..self.shape[0] as i32).collect();
        let tokens: Vec<i32> = there.iter().map(|there| i32::from(*there)).collect();
        for (held, values) in self.lengths.iter().zip([starts, tokens, lengths]) {
            bench.set(held, &Tensor::vector(&values))?;
        }
        Ok(there)
    }

    /// Binds all calls to new results. Gives the calls, and the result, bytes and scales of each layer.
    fn bind(&self, bench: &mut Bench) -> Result<(Vec<Bound>, Vec<Held>), Stop> {
        let [_, kv_heads, group, size] = self.shape;
        let attention = PagedAttention {
            query_heads: (kv_heads * group) as u32,
            kv_heads: kv_heads as u32,
            scale: (size as f32).sqrt().recip(),
            softcap: 0.0,
            window: 0,
            mask: AttentionMask::Causal,
        };
        let lengths: Vec<Given> = self.lengths.iter().map(Given::from).collect();
        let work = bench.work_list(&lengths)?;
        let (mut bound, mut results) = (Vec::new(), Vec::new());
        let mut query = Given::from(&self.query);
        for [keys, values] in &self.caches {
            let mut operands = vec![query, keys.clone(), values.clone()];
            operands.extend(lengths.iter().cloned());
            operands.extend([self.table.clone(), work.clone(), Given::Absent, Given::Absent, Given::Absent]);
            let plan = bench.plan(attention, &operands)?;
            let mixed = bench.bind(&plan, &operands)?;
            let operands = [(&mixed.results[0]).into()];
            let plan = bench.plan(QuantPerToken {}, &operands)?;
            let quantised = bench.bind(&plan, &operands)?;
            query = (&mixed.results[0]).into();
            results.push(mixed.results[0].clone());
            results.extend(quantised.results.iter().cloned());
            bound.extend([mixed, quantised]);
        }
        Ok((bound, results))
    }
}

/// The rows that are there, of a tensor whose first dimension they are.
fn present(tensor: &Tensor, there: &[bool]) -> Tensor {
    let width: usize = tensor.shape[1..].iter().product();
    let rows = tensor.bits.chunks(width.max(1)).zip(there).filter(|(_, there)| **there);
    let bits: Vec<_> = rows.flat_map(|(row, _)| row.iter().copied()).collect();
    let mut shape = tensor.shape.clone();
    shape[0] = there.iter().filter(|there| **there).count();
    Tensor { dtype: tensor.dtype, shape, bits }
}

fn of_shape(bench: &mut Bench, dtype: DType, shape: [usize; 4]) -> Outcome {
    let device = bench.device.clone();
    let Some(graphs) = device.graphs() else {
        return Err(Stop::Unsupported("the device has no graphs".into()));
    };
    let what = format!("{dtype}, {shape:?}");
    let mut random = Random::named(&format!("quantised/{what}"));
    let common = Common::new(bench, &mut random, dtype, shape)?;
    common.set(bench, &mut random)?;
    let ((eager, expected), (captured, found)) = (common.bind(bench)?, common.bind(bench)?);
    let calls = captured.into_iter().map(|bound| bound.call).collect();
    bench.wait()?;
    let graph = graphs.capture(&mut *bench.stream, calls)?;
    for launch in 0..LAUNCHES {
        let there = common.set(bench, &mut random)?;
        ensure(there.iter().any(|there| *there), || format!("{what}: nobody is there in launch {launch}"))?;
        eager.iter().try_for_each(|bound| bench.enqueue(bound))?;
        for again in 0..AGAIN {
            graph.launch(&mut *bench.stream)?;
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let result = ["result", "bytes", "scales"][index % 3];
                let [found, expected] =
                    [bench.get(found)?, bench.get(expected)?].map(|tensor| present(&tensor, &there));
                let what = format!("{what}, launch {launch}.{again}: {result} of layer {}", index / 3);
                same_bits(&what, &found, &expected)?;
            }
        }
    }
    Ok(())
}

/// A graph that quantises what attention gives is what its calls are one by one, whoever is there.
pub(super) fn graph(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for dtype in floats(&**subject.device()) {
        for shape in SHAPES {
            of_shape(&mut bench, dtype, shape)?;
        }
    }
    Ok(())
}
