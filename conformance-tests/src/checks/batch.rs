//! Batch invariance, where it is claimed: a row gives the same bits alone as in the batch.

use super::{
    bench::{Bench, Given, Outcome, Stop, fail, floats, open, rows, same_bits},
    paged::{Sequence, Turn},
};
use crate::{
    cases::{drawn_weight, formats, goes_with},
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat,
    device::{Device, DeviceOptions},
    op::{
        Activation, Add, Argmax, GateLayout, GatedActivation, GroupedLinear, LayerNorm, Linear, LinearA8,
        Nonlinearity, Op, QuantPerGroup, QuantPerToken, RmsNorm, Rope, RopePairing,
    },
    region::well_known::{self, AttentionInput, Heads},
};
use std::{collections::HashSet, sync::Arc};

/// The rows of a batch: above the tile of any device.
const ROWS: usize = 163;

/// Outputs and inputs of layers whose inputs a device might divide if there are few rows.
const LAYER: [usize; 2] = [144, 1280];
/// Experts of a layer, and those of a token.
const EXPERTS: [usize; 2] = [6, 2];

/// Query heads and KV heads of a layer.
const HEADS: [u32; 2] = [2, 1];
/// Elements of a head.
const HEAD: usize = 64;

/// The device as the suite opened it, and opened to be batch-invariant: then it may choose other kernels, and claim more.
fn devices(subject: &Subject) -> Result<[Arc<dyn Device>; 2], Stop> {
    let options = DeviceOptions { batch_invariant: true, ..subject.options().clone() };
    Ok([subject.device().clone(), open(subject, &options)?])
}

/// The calls that were claimed to be invariant.
#[derive(Default)]
struct Claims(HashSet<String>);

impl Claims {
    /// Whether the device claims that these calls are invariant, and no device did before.
    fn are_new(&mut self, name: String, bench: &Bench, op: &Op, calls: &[&[Given]]) -> Result<bool, Stop> {
        let mut all = true;
        for operands in calls {
            let support = bench.support(op, operands)?;
            all &= support.native && support.batch_invariant;
        }
        Ok(all && self.0.insert(name))
    }

    fn settle(&self) -> Outcome {
        if self.0.is_empty() {
            return Err(Stop::Unsupported("the device claims no batch invariance".into()));
        }
        Ok(())
    }
}

/// An operand whose rows belong to the rows of the result, or one that all rows share.
#[derive(Clone)]
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
    /// Whether a result has a row for each row of the operands; caches do not.
    fn has_rows(&self, result: usize) -> bool {
        self.op.updates(result).is_none()
    }

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
    calls.extend(wide_calls(bench, dtype)?);
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

/// Calls of layers with many inputs: alone, fused, and of experts.
fn wide_calls(bench: &mut Bench, dtype: DType) -> Result<Vec<Call>, Stop> {
    let mut random = Random::named(&format!("batch/wide/{dtype}"));
    let [outputs, inputs] = LAYER;
    let plane = random.tensor(dtype, &[ROWS, inputs], Values::HeavyTailed);
    let x = || Operand::Rows(plane.clone());
    let residual = random.tensor(dtype, &[ROWS, outputs], Values::HeavyTailed);
    let gain = bench.give(&random.tensor(dtype, &[inputs], Values::Uniform))?;
    let absent = || Operand::Shared(Given::Absent);
    let mut calls = Vec::new();
    for format in ["int8", "int4g128_f16"].into_iter().filter_map(WeightFormat::from_name) {
        let of_layer = bench.pack(&drawn_weight(&mut random, format, LAYER, 0.03));
        if let Ok(weight) = of_layer {
            let operands = vec![x(), Operand::Shared(weight), absent()];
            calls.push((format!("wide_linear_{format}"), Linear { dtype }.into(), operands));
        }
    }
    let dense = WeightFormat::Dense(dtype);
    let weight = drawn_weight(&mut random, dense, LAYER, 0.03);
    let weight = Operand::Shared(bench.pack(&weight)?);
    let [count, slots] = EXPERTS;
    let of_experts = drawn_weight(&mut random, dense, [count * outputs, inputs], 0.03);
    let of_experts = Operand::Shared(bench.pack(&of_experts)?);
    let chosen =
        (0..ROWS).flat_map(|row| (0..slots).map(move |slot| ((row + slot) % count) as u32)).collect();
    let chosen = Tensor { dtype: DType::I32, shape: vec![ROWS, slots], bits: chosen };
    let norm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
    let gated = GatedActivation {
        function: Nonlinearity::Silu,
        layout: GateLayout::Concatenated,
        limit: 0.0,
        up_offset: 0.0,
    };
    let mlp = well_known::mlp_input(norm, dtype, false, gated)?;
    let sum = well_known::linear_add(dtype, false, Add { alpha: 1.0 })?;
    calls.extend([
        ("wide_linear".into(), Linear { dtype }.into(), vec![x(), weight.clone(), absent()]),
        (
            "wide_linear_to_f32".into(),
            Linear { dtype: DType::F32 }.into(),
            vec![x(), weight.clone(), absent()],
        ),
        ("mlp_input".into(), Op::Region(mlp.into()), vec![x(), Operand::Shared(gain), weight.clone()]),
        ("linear_add".into(), Op::Region(sum.into()), vec![x(), weight, Operand::Rows(residual)]),
        (
            "grouped_linear".into(),
            GroupedLinear { dtype, count: count as u32, first_expert: 0 }.into(),
            vec![x(), of_experts, Operand::Rows(chosen), absent(), absent(), absent()],
        ),
    ]);
    let mut calls: Vec<_> =
        calls.into_iter().map(|(name, op, operands)| Call { name, op, operands }).collect();
    calls.push(heads_call(bench, &mut random, norm, plane)?);
    Ok(calls)
}

/// Queries, keys and values of `x`, with rotated heads.
fn heads_call(bench: &mut Bench, random: &mut Random, norm: RmsNorm, x: Tensor) -> Result<Call, Stop> {
    let (dtype, inputs) = (x.dtype, x.shape[1]);
    let gain = bench.give(&random.tensor(dtype, &[inputs], Values::Uniform))?;
    let positions: Vec<i32> = (0..ROWS as i32).collect();
    let positions = || Operand::Rows(Tensor::vector(&positions));
    let rope = |heads| Rope { heads, pairing: RopePairing::Halves, scale: 1.0 };
    let ([heads, kv_heads], size) = (HEADS, HEAD);
    let columns = [heads, kv_heads, kv_heads].map(|heads| heads * size as u32);
    let shaped = Heads { columns, head_norms: None, ropes: Some([rope(heads), rope(kv_heads)]) };
    let input = AttentionInput { norm: norm.into(), dtype, bias: false, heads: shaped };
    let queries = well_known::attention_input(input)?;
    let projection = [columns.iter().sum::<u32>() as usize, inputs];
    let projection = bench.pack(&drawn_weight(random, WeightFormat::Dense(dtype), projection, 0.03))?;
    let frequencies = bench.give(&Tensor::floats(DType::F32, &[size / 2], &vec![0.37; size / 2]))?;
    let mut cache = || bench.empty(dtype, &[ROWS.div_ceil(16), kv_heads as usize, 16, size]);
    let caches = [cache()?, cache()?].map(|cache| Operand::Shared(cache.into()));
    let mut operands = vec![Operand::Rows(x), Operand::Shared(gain), Operand::Shared(projection)];
    operands.extend([positions(), Operand::Shared(frequencies)]);
    operands.extend(caches);
    operands.push(positions());
    Ok(Call { name: "attention_input".into(), op: Op::Region(queries.into()), operands })
}

/// Ops whose rows stand for themselves.
pub(super) fn of_rows(subject: &Subject) -> Outcome {
    let mut claims = Claims::default();
    for device in devices(subject)? {
        rows_of(&device, &mut claims)?;
    }
    claims.settle()
}

fn rows_of(device: &Arc<dyn Device>, claims: &mut Claims) -> Outcome {
    let mut bench = Bench::new(device)?;
    for dtype in floats(&**device) {
        for call in calls(&mut bench, dtype)? {
            let (batch, alone) = (call.operands(&mut bench, 0, ROWS)?, call.operands(&mut bench, 0, 1)?);
            if !claims.are_new(format!("{}/{dtype}", call.name), &bench, &call.op, &[&batch, &alone])? {
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
                let rows_of = part.iter().zip(&whole).enumerate().filter(|(index, _)| call.has_rows(*index));
                for (_, (part, whole)) in rows_of {
                    same_bits(&what, &bench.get(part)?, &rows(whole, first, count))?;
                }
            }
        }
    }
    Ok(())
}

/// Attention with long and short sequences side by side: splitting long ones must not depend on who else is there. Below two
/// thousand keys a device might not split at all, and this would show nothing.
pub(super) fn of_attention(subject: &Subject) -> Outcome {
    let mut claims = Claims::default();
    for device in devices(subject)? {
        // Heads of both sizes, because a device may have other kernels for each.
        for heads in [[4, 2, 32], [2, 1, 64]] {
            attention_of(&device, heads, &mut claims)?;
        }
    }
    claims.settle()
}

/// Query heads, KV heads and the size of a head.
fn attention_of(device: &Arc<dyn Device>, heads: [usize; 3], claims: &mut Claims) -> Outcome {
    const BLOCK: usize = 16;
    let mut bench = Bench::new(device)?;
    for dtype in floats(&**device) {
        let lengths = [(2100, 1), (17, 1), (2048, 3), (1, 1), (300, 40)];
        let sequences: Vec<Sequence> = lengths
            .iter()
            .map(|(length, _)| Sequence::new(&format!("batch/{dtype}/{length}"), dtype, heads, *length))
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
            let name = format!("{heads:?}/{dtype}/{index}");
            if !claims.are_new(name, &bench, &op, &[&batch, &alone])? {
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
    Ok(())
}
