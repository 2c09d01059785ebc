//! Batch invariance, where it is claimed: a row gives the same bits alone as in the batch.

use super::{
    bench::{Bench, Given, Outcome, Stop, fail, floats, rows, same_bits},
    paged::{Sequence, Turn},
};
use crate::{
    cases::{drawn_weight, formats, goes_with},
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{
        Activation, Add, Argmax, GateLayout, GatedActivation, LayerNorm, Linear, LinearA8, Nonlinearity, Op,
        QuantPerGroup, QuantPerToken, RmsNorm, Rope, RopePairing,
    },
};

/// The rows of a batch: above the tile of any device.
const ROWS: usize = 163;

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

/// An operand whose rows belong to the rows of the result, or one that all rows share.
enum Operand {
    Rows(Tensor),
    Shared(Given),
}

/// A call whose rows stand for themselves.
struct Call {
    name: String,
    op: Op,
    operands: Vec<Operand>,
}

impl Call {
    /// The operands of rows `first .. first + count`.
    fn operands(&self, bench: &mut Bench, first: usize, count: usize) -> Result<Vec<Given>, Stop> {
        let mut given = Vec::new();
        for operand in &self.operands {
            given.push(match operand {
                Operand::Rows(tensor) => bench.give(&rows(tensor, first, count))?,
                Operand::Shared(operand) => operand.clone(),
            });
        }
        Ok(given)
    }
}

/// Calls of all ops that treat rows one by one, for activations of a type.
fn calls(bench: &mut Bench, dtype: DType) -> Result<Vec<Call>, Stop> {
    let mut random = Random::named(&format!("batch/{dtype}"));
    let plane = random.tensor(dtype, &[ROWS, 256], Values::HeavyTailed);
    let x = || Operand::Rows(plane.clone());
    let other = random.tensor(dtype, &[ROWS, 256], Values::HeavyTailed);
    let vector = bench.give(&random.tensor(dtype, &[256], Values::Uniform))?;
    let shared = |given: &Given| Operand::Shared(given.clone());
    let absent = || Operand::Shared(Given::Absent);
    let positions: Vec<i32> = (0..ROWS as i32).collect();
    let frequencies = bench.give(&Tensor::floats(DType::F32, &[16], &[0.125; 16]))?;
    let eps = 1e-5;
    let gated = GatedActivation {
        function: Nonlinearity::GeluTanh,
        layout: GateLayout::Separate,
        limit: 0.0,
        up_offset: 0.0,
    };
    let mut calls = vec![
        ("rms_norm", RmsNorm { eps, weight_offset: 0.0 }.into(), vec![x(), shared(&vector)]),
        ("layer_norm", LayerNorm { eps }.into(), vec![x(), shared(&vector), shared(&vector)]),
        ("activation", Activation { function: Nonlinearity::Silu, limit: 0.0 }.into(), vec![x(), absent()]),
        ("gated_activation", gated.into(), vec![x(), Operand::Rows(other.clone()), absent()]),
        ("add", Add { alpha: 0.5 }.into(), vec![x(), Operand::Rows(other), absent(), absent()]),
        (
            "rope",
            Rope { heads: 8, pairing: RopePairing::Halves, scale: 1.0 }.into(),
            vec![x(), Operand::Rows(Tensor::vector(&positions)), shared(&frequencies)],
        ),
        ("quant_per_token", QuantPerToken {}.into(), vec![x()]),
        ("quant_per_group", QuantPerGroup { group: 32 }.into(), vec![x()]),
        ("argmax", Argmax {}.into(), vec![x()]),
    ]
    .into_iter()
    .map(|(name, op, operands)| Call { name: name.into(), op, operands })
    .collect::<Vec<Call>>();
    let bits = (0..ROWS * 256).map(|_| u32::from((random.below(255) as i32 - 127) as u8)).collect();
    let integers = Tensor { dtype: DType::I8, shape: vec![ROWS, 256], bits };
    let scales = random.tensor(DType::F32, &[ROWS, 8], Values::Uniform);
    for format in formats().into_iter().filter(|format| goes_with(*format, dtype)) {
        let weight = drawn_weight(&mut random, format, [129, 256], 0.06);
        match bench.pack(&weight) {
            Ok(weight) => {
                let weight = || Operand::Shared(weight.clone());
                let grouped =
                    vec![Operand::Rows(integers.clone()), Operand::Rows(scales.clone()), weight(), absent()];
                calls.extend([
                    Call {
                        name: format!("linear_{format}"),
                        op: Linear { dtype }.into(),
                        operands: vec![x(), weight(), absent()],
                    },
                    Call {
                        name: format!("linear_a8_{format}"),
                        op: LinearA8 { dtype, group: 32 }.into(),
                        operands: grouped,
                    },
                ]);
            }
            Err(Stop::Unsupported(_)) => {}
            Err(stop) => return Err(stop),
        }
    }
    Ok(calls)
}

/// Ops whose rows stand for themselves.
pub(super) fn of_rows(subject: &Subject) -> Outcome {
    let (mut bench, mut claims) = (Bench::new(subject.device())?, Claims(false));
    for dtype in floats(&**subject.device()) {
        for call in calls(&mut bench, dtype)? {
            let (batch, alone) = (call.operands(&mut bench, 0, ROWS)?, call.operands(&mut bench, 0, 1)?);
            if !claims.are(&bench, &call.op, &[&batch, &alone])? {
                continue;
            }
            let whole = bench.run(call.op.clone(), &batch)?;
            let whole: Vec<Tensor> = whole.iter().map(|held| bench.get(held)).collect::<Result<_, _>>()?;
            for (first, count) in [(0, 1), (31, 1), (ROWS - 1, 1), (5, 7), (40, 20), (3, 66), (1, 129)] {
                let operands = call.operands(&mut bench, first, count)?;
                let part = bench.run(call.op.clone(), &operands)?;
                let what = format!(
                    "{}/{dtype}: rows {first} to {} without the others",
                    call.name,
                    first + count - 1
                );
                for (part, whole) in part.iter().zip(&whole) {
                    same_bits(&what, &bench.get(part)?, &rows(whole, first, count))?;
                }
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
