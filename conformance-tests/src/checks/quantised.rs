//! Attention of single tokens and the quantisation of its result as one region, for many sequences.
//!
//! The region is held to its body op by op, to the bit: over sequences that grow, shrink, come and go from launch to launch, each launch
//! several times, in a graph.

use super::{
    bench::{Bench, Given, Held, Outcome, Stop, ensure, fail, floats, same_bits},
    tape::{Tape, Value},
};
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
    caches: [Given; 2],
}

impl Common {
    fn new(bench: &mut Bench, random: &mut Random, dtype: DType, shape: [usize; 4]) -> Result<Self, Stop> {
        let [sequences, kv_heads, group, size] = shape;
        let pages = sequences * BLOCKS;
        let table: Vec<i32> = random.shuffled(pages).into_iter().map(|page| page as i32).collect();
        let mut cache = |scale: f64| {
            let cache = random.scaled(dtype, &[pages, kv_heads, BLOCK, size], Values::Uniform, scale);
            bench.give(&cache)
        };
        let caches = [cache(2.0)?, cache(1.0)?];
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

    /// The calls, and the bytes and scales they give.
    fn tape(&self, bench: &mut Bench) -> Result<(Tape, Vec<Value>), Stop> {
        let [_, kv_heads, group, size] = self.shape;
        let attention = PagedAttention {
            query_heads: (kv_heads * group) as u32,
            kv_heads: kv_heads as u32,
            scale: (size as f32).sqrt().recip(),
            softcap: 0.0,
            window: 0,
            mask: AttentionMask::Causal,
            value_size: 0,
        };
        let lengths: Vec<Given> = self.lengths.iter().map(Given::from).collect();
        let work = bench.work_list(&lengths)?;
        let mut tape = Tape::default();
        let query = tape.give(&self.query);
        let caches = self.caches.clone().map(|cache| tape.give(cache));
        let lengths: Vec<Option<Value>> = lengths.into_iter().map(|length| tape.give(length)).collect();
        let (table, work) = (tape.give(self.table.clone()), tape.give(work));
        let operands = [query].into_iter().chain(caches).chain(lengths).chain([table, work]);
        let mixed = tape.call(attention, operands.chain([None; 3]));
        let quantised = tape.call(QuantPerToken {}, [Some(mixed[0])]);
        Ok((tape, quantised))
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
    let (tape, values) = common.tape(bench)?;
    let bound = tape.bind_region(bench, &what, &values)?;
    let (eager, places) = tape.bind_each(bench)?;
    bench.wait()?;
    let found = bound.results;
    let graph = graphs.capture(&mut *bench.stream, vec![bound.call])?;
    for launch in 0..LAUNCHES {
        let there = common.set(bench, &mut random)?;
        ensure(there.iter().any(|there| *there), || format!("{what}: nobody is there in launch {launch}"))?;
        eager.iter().try_for_each(|bound| bench.enqueue(bound))?;
        for again in 0..AGAIN {
            graph.launch(&mut *bench.stream)?;
            for ((result, found), value) in ["bytes", "scales"].iter().zip(&found).zip(&values) {
                let Given::Tensor(expected) = &places[value.number()] else {
                    return fail("a result is no tensor");
                };
                let [found, expected] =
                    [bench.get(found)?, bench.get(expected)?].map(|tensor| present(&tensor, &there));
                let what = format!("{what}, launch {launch}.{again}: {result}");
                same_bits(&what, &found, &expected)?;
            }
        }
    }
    Ok(())
}

/// The region that quantises what attention gives is what its body is op by op, whichever sequences are there. Shapes that the device
/// does not run as a region are left out; all of them is unsupported.
pub(super) fn region(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let (mut missing, mut ran) = (None, false);
    for dtype in floats(&**subject.device()) {
        for shape in SHAPES {
            match of_shape(&mut bench, dtype, shape) {
                Err(Stop::Unsupported(why)) => missing = Some(why),
                outcome => {
                    outcome?;
                    ran = true;
                }
            }
        }
    }
    missing.filter(|_| !ran).map_or(Ok(()), |why| Err(Stop::Unsupported(why)))
}
