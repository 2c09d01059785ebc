//! Batch invariance, where it is claimed: a row gives the same bits alone as in the batch.

use super::{
    bench::{Bench, Given, Outcome, Stop, fail, floats, rows, same_bits},
    paged::{Sequence, Turn},
};
use crate::{
    cases::random_weight,
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    BlockFormat, WeightFormat,
    op::{Activation, Linear, Nonlinearity, Op, RmsNorm},
};

/// The rows of a batch: above the tile of any device.
const ROWS: usize = 67;

/// Remembers whether anything was claimed.
struct Claims(bool);

impl Claims {
    /// Whether the device claims that these calls are invariant.
    fn are(&mut self, bench: &Bench, op: &Op, calls: &[&[Given]]) -> Result<bool, Stop> {
        let mut all = true;
        for operands in calls {
            let support = bench.support(op, operands)?;
            all &= support.native && support.batch_invariant;
        }
        self.0 |= all;
        Ok(all)
    }

    fn settle(&self) -> Outcome {
        if self.0 { Ok(()) } else { Err(Stop::Unsupported("the device claims no batch invariance".into())) }
    }
}

/// Ops whose rows stand for themselves.
pub(super) fn of_rows(subject: &Subject) -> Outcome {
    let (mut bench, mut claims) = (Bench::new(subject.device())?, Claims(false));
    for dtype in floats(&**subject.device()) {
        let mut random = Random::named(&format!("batch/{dtype}"));
        let x = random.tensor(dtype, &[ROWS, 256], Values::HeavyTailed);
        let norm = bench.give(&random.tensor(dtype, &[256], Values::Uniform))?;
        let mut calls: Vec<(String, Op, Vec<Given>)> = vec![
            ("rms_norm".into(), RmsNorm { eps: 1e-5, weight_offset: 0.0 }.into(), vec![norm]),
            (
                "activation".into(),
                Activation { function: Nonlinearity::Silu, limit: 0.0 }.into(),
                vec![Given::Absent],
            ),
        ];
        let formats = [
            WeightFormat::Dense(dtype),
            WeightFormat::Block(BlockFormat::Q4_1),
            WeightFormat::Block(BlockFormat::Q8_0),
        ];
        for format in formats {
            let (weight, _) = random_weight(&mut random, format, [129, 256], 0.06);
            match bench.pack(&weight) {
                Ok(weight) => calls.push((
                    format!("linear_{format}"),
                    Linear { dtype }.into(),
                    vec![weight, Given::Absent],
                )),
                Err(Stop::Unsupported(_)) => {}
                Err(stop) => return Err(stop),
            }
        }
        for (name, op, others) in calls {
            let mut with = |x: &Tensor| -> Result<Vec<Given>, Stop> {
                Ok([vec![bench.give(x)?], others.clone()].concat())
            };
            let (batch, alone) = (with(&x)?, with(&rows(&x, 0, 1))?);
            if !claims.are(&bench, &op, &[&batch, &alone])? {
                continue;
            }
            let whole = bench.one(op.clone(), &batch)?;
            let whole = bench.get(&whole)?;
            for (first, count) in [(0, 1), (31, 1), (ROWS - 1, 1), (5, 7), (40, 20)] {
                let operands = [vec![bench.give(&rows(&x, first, count))?], others.clone()].concat();
                let part = bench.one(op.clone(), &operands)?;
                let what =
                    format!("{name}/{dtype}: rows {first} to {} without the others", first + count - 1);
                same_bits(&what, &bench.get(&part)?, &rows(&whole, first, count))?;
            }
        }
    }
    claims.settle()
}

/// Attention with long and short sequences side by side: splitting long ones must not depend on who else is there. Below two
/// thousand keys a device might not split at all, and this would show nothing.
pub(super) fn of_attention(subject: &Subject) -> Outcome {
    const BLOCK: usize = 16;
    let (mut bench, mut claims) = (Bench::new(subject.device())?, Claims(false));
    for dtype in floats(&**subject.device()) {
        let lengths = [(2100, 1), (17, 1), (2048, 3), (1, 1), (300, 40)];
        let sequences: Vec<Sequence> = lengths
            .iter()
            .map(|(length, _)| Sequence::new(&format!("batch/{dtype}/{length}"), dtype, [4, 2, 32], *length))
            .collect();
        let mut next = 0;
        let mut pages = Vec::new();
        for (length, _) in lengths {
            let count = length.div_ceil(BLOCK) as i32;
            pages.push((next..next + count).collect::<Vec<i32>>());
            next += count;
        }
        let cache = sequences[0].cache(&mut bench, next as usize, BLOCK)?;
        let turn = |index: usize, first: usize| Turn {
            sequence: &sequences[index],
            first,
            count: lengths[index].0 - first,
            pages: &pages[index],
        };
        for index in 0..lengths.len() {
            cache.write(&mut bench, &[turn(index, 0)])?;
        }
        let last: Vec<Turn<'_>> =
            lengths.iter().enumerate().map(|(index, (length, new))| turn(index, length - new)).collect();
        let op = sequences[0].op();
        let batch = cache.operands(&mut bench, &last)?;
        let whole = bench.run(op.clone(), &batch)?;
        let whole = [bench.get(&whole[0])?, bench.get(&whole[1])?];
        let mut first = 0;
        for (index, turn) in last.iter().enumerate() {
            let one = std::slice::from_ref(turn);
            let alone = cache.operands(&mut bench, one)?;
            let (start, count) = (first, turn.count);
            first += count;
            if !claims.are(&bench, &op, &[&batch, &alone])? {
                continue;
            }
            let part = bench.run(op.clone(), &alone)?;
            for (result, whole) in whole.iter().enumerate() {
                let what = format!("attention/{dtype}: a sequence of {} keys alone", lengths[index].0);
                same_bits(&what, &bench.get(&part[result])?, &rows(whole, start, count))?;
            }
        }
        if first != whole[0].shape[0] {
            return fail("the batch has rows of no sequence");
        }
    }
    claims.settle()
}
