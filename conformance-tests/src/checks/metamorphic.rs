//! Different ways to the same answer.

use super::{
    bench::{Bench, Given, Outcome, Stop, floats, near, same_bits},
    paged::{self, Sequence},
};
use crate::{
    case::Weight,
    gate::Gate,
    oracle::linear,
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat, WeightType,
    op::{Add, Linear},
};

const BLOCK: usize = 16;
const LENGTH: usize = 83;

/// A prompt in chunks, whole, and token by token behind a part of it: attention sees the same keys and gives the same
/// answer. To the bit it need not be: a chunk's length may decide how the work is shared out.
pub(super) fn chunks(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let pages: Vec<i32> = (0..LENGTH.div_ceil(BLOCK) as i32).collect();
    for dtype in floats(&**subject.device()) {
        let sequence = Sequence::new(&format!("chunks/{dtype}"), dtype, [6, 2, 64], LENGTH);
        let reals = sequence.expected();
        let mut answer = |chunks: &[usize]| sequence.in_chunks(&mut bench, chunks, &pages, BLOCK);
        let whole = answer(&[LENGTH])?;
        let chunked = answer(&[16, 1, 31, 35])?;
        let decoded = answer(&[&[64][..], &[1; LENGTH - 64]].concat())?;
        let answers =
            [("the whole prompt", &whole), ("the prompt in chunks", &chunked), ("decoding", &decoded)];
        near(&format!("attention/{dtype}"), paged::gate(dtype), &reals, &answers)?;
    }
    Ok(())
}

/// Where the pages of a sequence lie has no part in the answer. If rows are claimed not to depend on each other, no bit
/// may change; otherwise the answers must be equally near to the oracle.
pub(super) fn pages(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let count = LENGTH.div_ceil(BLOCK);
    for dtype in floats(&**subject.device()) {
        let sequence = Sequence::new(&format!("pages/{dtype}"), dtype, [4, 4, 32], LENGTH);
        let in_order: Vec<i32> = (0..count as i32).collect();
        let shuffled = Random::named("pages").shuffled(count + 5);
        let shuffled: Vec<i32> = shuffled.into_iter().take(count).map(|page| page as i32).collect();
        let first = sequence.in_chunks(&mut bench, &[LENGTH], &in_order, BLOCK)?;
        let second = sequence.in_chunks(&mut bench, &[LENGTH], &shuffled, BLOCK)?;
        let name = format!("attention/{dtype} over other pages");
        let answers = [("pages in order", &first), ("pages out of order", &second)];
        near(&name, paged::gate(dtype), &sequence.expected(), &answers)?;
        if invariant(&mut bench, &sequence)? {
            same_bits(&name, &second, &first)?;
        }
    }
    Ok(())
}

fn invariant(bench: &mut Bench, sequence: &Sequence) -> Result<bool, Stop> {
    let cache = sequence.cache(bench, LENGTH.div_ceil(BLOCK), BLOCK)?;
    let pages: Vec<i32> = (0..LENGTH.div_ceil(BLOCK) as i32).collect();
    let turn = paged::Turn { sequence, first: 0, count: LENGTH, pages: &pages };
    let operands = cache.operands(bench, &[turn])?;
    Ok(bench.support(&sequence.op(), &operands)?.batch_invariant)
}

/// Rows, outputs, inputs of the layer that is cut in two.
const LAYER: [usize; 3] = [5, 48, 96];
const RANKS: usize = 2;

/// A linear layer cut along its outputs gives the pieces of the whole; cut along its inputs, the pieces add up to it.
pub(super) fn shards(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let [m, n, k] = LAYER;
    for dtype in floats(&**subject.device()) {
        let mut random = Random::named(&format!("shards/{dtype}"));
        let x = random.tensor(dtype, &[m, k], Values::Uniform);
        let weight = random.scaled(dtype, &[n, k], Values::HeavyTailed, 0.1);
        let reals = linear::linear(&x.values(), &weight.values(), None, LAYER);
        let whole = product(&mut bench, &x, &weight, dtype)?;

        let share = n / RANKS;
        let mut by_outputs = Tensor::filled(dtype, &[m, n], 0);
        for rank in 0..RANKS {
            let part = Tensor {
                shape: vec![share, k],
                bits: weight.bits[rank * share * k..][..share * k].to_vec(),
                ..weight.clone()
            };
            let piece = product(&mut bench, &x, &part, dtype)?;
            for row in 0..m {
                let to = row * n + rank * share;
                by_outputs.bits[to..][..share].copy_from_slice(&piece.bits[row * share..][..share]);
            }
        }
        let answers = [("the whole layer", &whole), ("a layer cut along its outputs", &by_outputs)];
        near(&format!("linear/{dtype}"), Gate::default(), &reals, &answers)?;

        // Partial sums stay f32 until they are added up, so that there is one rounding, as in the whole.
        let share = k / RANKS;
        let mut sum = None;
        for rank in 0..RANKS {
            let columns = |tensor: &Tensor| {
                let rows = tensor.bits.chunks(k).flat_map(|row| row[rank * share..][..share].iter().copied());
                let bits = rows.collect();
                Tensor { shape: vec![tensor.shape[0], share], bits, ..tensor.clone() }
            };
            let part = product(&mut bench, &columns(&x), &columns(&weight), DType::F32)?;
            let part = bench.put(&part)?;
            sum = Some(match sum {
                None => part,
                Some(sum) => {
                    let operands = [Given::from(sum), part.into(), Given::Absent, Given::Absent];
                    bench.one(Add { alpha: 1.0 }, &operands)?
                }
            });
        }
        if let Some(sum) = sum {
            let sum = bench.get(&sum)?;
            let answers = [("a layer cut along its inputs", &sum)];
            near(&format!("linear/{dtype}"), Gate::default(), &reals, &answers)?;
        }
    }
    Ok(())
}

fn product(bench: &mut Bench, x: &Tensor, weight: &Tensor, to: DType) -> Result<Tensor, Stop> {
    let format = WeightFormat::Dense(weight.dtype);
    let weight =
        Weight { weight_type: WeightType { format, shape: weight.shape.clone() }, bytes: weight.bytes() };
    let weight = bench.pack(&weight)?;
    let x = bench.give(x)?;
    let y = bench.one(Linear { dtype: to }, &[x, weight, Given::Absent])?;
    bench.get(&y)
}
