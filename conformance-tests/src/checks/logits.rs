//! A small Llama, end to end: every op of a layer in its place, text fed from outside, logits held to the oracle's.
//!
//! The oracle evaluates the same layers in f64 and rounds nowhere. How far a device may be off is counted in roundings: on
//! the longest way from a token to its logits lie [`ROUNDINGS`] stored values, each off by no more than one rounding of
//! its type in mean square (the limits in [`crate::gate`]). Errors of different values are independent, and norms keep their
//! relative size; where two ways join (the residual sums) errors add up no faster than the values do. So the mean square
//! error of all logits, relative to their own, is at most that many times the limit of one.

use super::bench::{Bench, Given, Held, Outcome, Stop, ensure, floats};
use crate::{
    case::Weight,
    gate::Gate,
    oracle::{
        activation,
        attention::{Scoring, Seen, attend},
        linear, norm, rope,
    },
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat, WeightType,
    op::{
        Add, AttentionMask, Embed, GateLayout, GatedActivation, KvWrite, Linear, Nonlinearity,
        PagedAttention, RmsNorm, Rope, RopePairing,
    },
};

const VOCABULARY: usize = 101;
const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 16;
const INNER: usize = 96;
const LAYERS: usize = 2;
const TOKENS: usize = 41;
const BLOCK: usize = 16;
const EPS: f32 = 1e-5;

/// Values stored on the way from a token to its logits: the embedding; per layer, two norms, a projection, the rotation,
/// the cache, the weighted values, two projections back, the gate, and two sums; the last norm.
const ROUNDINGS: f64 = 2.0 + 11.0 * LAYERS as f64;

/// One matrix, as it is stored and as the oracle reads it.
struct Matrix {
    tensor: Tensor,
    values: Vec<f64>,
}

impl Matrix {
    fn new(random: &mut Random, dtype: DType, rows: usize, columns: usize) -> Self {
        let tensor = random.scaled(dtype, &[rows, columns], Values::Uniform, (3.0 / columns as f64).sqrt());
        Self { values: tensor.values(), tensor }
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        let [n, k] = [self.tensor.shape[0], self.tensor.shape[1]];
        linear::linear(x, &self.values, None, [x.len() / k, n, k]).iter().map(|real| real.value).collect()
    }

    fn pack(&self, bench: &mut Bench) -> Result<Given, Stop> {
        let format = WeightFormat::Dense(self.tensor.dtype);
        let weight = Weight {
            weight_type: WeightType { format, shape: self.tensor.shape.clone() },
            bytes: self.tensor.bytes(),
        };
        bench.pack(&weight)
    }
}

struct Layer {
    attention_norm: Tensor,
    /// Queries, keys, values, and back.
    projections: [Matrix; 4],
    mlp_norm: Tensor,
    /// Gate, up, and back.
    mlp: [Matrix; 3],
}

struct Model {
    dtype: DType,
    embedding: Matrix,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Matrix,
    frequencies: Tensor,
}

impl Model {
    fn new(dtype: DType) -> Self {
        let random = &mut Random::named(&format!("logits/{dtype}"));
        let scales = |random: &mut Random| {
            let all: Vec<f64> = (0..HIDDEN).map(|_| random.between(0.5, 1.5)).collect();
            Tensor::floats(dtype, &[HIDDEN], &all)
        };
        let layer = |random: &mut Random| {
            let mut matrix = |rows, columns| Matrix::new(random, dtype, rows, columns);
            let projections = [
                matrix(HEADS * HEAD, HIDDEN),
                matrix(KV_HEADS * HEAD, HIDDEN),
                matrix(KV_HEADS * HEAD, HIDDEN),
                matrix(HIDDEN, HEADS * HEAD),
            ];
            let mlp = [matrix(INNER, HIDDEN), matrix(INNER, HIDDEN), matrix(HIDDEN, INNER)];
            Layer { attention_norm: scales(random), projections, mlp_norm: scales(random), mlp }
        };
        let frequencies: Vec<f64> =
            (0..HEAD / 2).map(|pair| 10_000f64.powf(-2.0 * pair as f64 / HEAD as f64)).collect();
        Self {
            dtype,
            embedding: Matrix::new(random, dtype, VOCABULARY, HIDDEN),
            layers: (0..LAYERS).map(|_| layer(random)).collect(),
            norm: scales(random),
            head: Matrix::new(random, dtype, VOCABULARY, HIDDEN),
            frequencies: Tensor::floats(DType::F32, &[HEAD / 2], &frequencies),
        }
    }

    /// The logits of every token, in f64.
    fn oracle(&self, ids: &[i32]) -> Vec<f64> {
        let mut x: Vec<f64> = ids
            .iter()
            .flat_map(|id| self.embedding.values[*id as usize * HIDDEN..][..HIDDEN].to_vec())
            .collect();
        for layer in &self.layers {
            let normed = normalise(&x, &layer.attention_norm);
            let [q, k, v] = [0, 1, 2].map(|index| layer.projections[index].times(&normed));
            let (q, k) = (self.rotate(&q, HEADS), self.rotate(&k, KV_HEADS));
            let back = layer.projections[3].times(&attention(&q, &k, &v));
            x.iter_mut().zip(back).for_each(|(x, back)| *x += back);
            let normed = normalise(&x, &layer.mlp_norm);
            let (gate, up) = (layer.mlp[0].times(&normed), layer.mlp[1].times(&normed));
            let gated: Vec<f64> = gate
                .iter()
                .zip(&up)
                .map(|(gate, up)| {
                    activation::gated(Nonlinearity::Silu, 0.0, 0.0, [*gate, 0.0], [*up, 0.0]).value
                })
                .collect();
            x.iter_mut().zip(layer.mlp[2].times(&gated)).for_each(|(x, back)| *x += back);
        }
        self.head.times(&normalise(&x, &self.norm))
    }

    fn rotate(&self, x: &[f64], heads: usize) -> Vec<f64> {
        let frequencies = self.frequencies.values();
        let one = |(index, head): (usize, &[f64])| {
            let position = (index / heads) as i32;
            let rotated = rope::rope(head, position, &frequencies, RopePairing::Halves, 1.0);
            rotated
                .into_iter()
                .zip(head)
                .map(|(real, x)| real.map_or(*x, |real| real.value))
                .collect::<Vec<_>>()
        };
        x.chunks(HEAD).enumerate().flat_map(one).collect()
    }

    /// The logits of every token from the device, the text in steps of these lengths.
    fn logits(&self, bench: &mut Bench, ids: &[i32], steps: &[usize]) -> Result<Vec<f64>, Stop> {
        let dtype = self.dtype;
        let table = self.embedding.pack(bench)?;
        let head = self.head.pack(bench)?;
        let (norm, frequencies) = (bench.give(&self.norm)?, bench.give(&self.frequencies)?);
        let pages = TOKENS.div_ceil(BLOCK);
        let mut layers = Vec::new();
        for layer in &self.layers {
            let cache = [pages, KV_HEADS, BLOCK, HEAD];
            let mut packed = Vec::new();
            for matrix in layer.projections.iter().chain(&layer.mlp) {
                packed.push(matrix.pack(bench)?);
            }
            let norms = [bench.give(&layer.attention_norm)?, bench.give(&layer.mlp_norm)?];
            let caches = [Given::from(bench.empty(dtype, &cache)?), bench.empty(dtype, &cache)?.into()];
            layers.push((packed, norms, caches));
        }
        let (linear, plus) = (Linear { dtype }, Add { alpha: 1.0 });
        let rms_norm = RmsNorm { eps: EPS, weight_offset: 0.0 };
        let rope = |heads: usize| Rope { heads: heads as u32, pairing: RopePairing::Halves, scale: 1.0 };
        let (mut first, mut logits) = (0, Vec::new());
        for count in steps.iter().copied() {
            // Pages are used from the last to the first.
            let place = |token: usize| ((pages - 1 - token / BLOCK) * BLOCK + token % BLOCK) as i32;
            let range = first..first + count;
            let positions: Vec<i32> = range.clone().map(|token| token as i32).collect();
            let slots: Vec<i32> = range.clone().map(place).collect();
            let (positions, slots) =
                (bench.give(&Tensor::vector(&positions))?, bench.give(&Tensor::vector(&slots))?);
            let lengths =
                [0, count as i32, range.end as i32].map(|value| bench.give(&Tensor::vector(&[value])));
            let lengths = lengths.into_iter().collect::<Result<Vec<_>, _>>()?;
            let work = bench.work_list(&lengths)?;
            let tables: Vec<i32> = (0..pages as i32).rev().collect();
            let tables = bench.give(&Tensor::integers(&[1, pages], &tables))?;
            let ids = bench.give(&Tensor::vector(&ids[range]))?;
            let embed = Embed { dtype, first_row: 0, position_offset: 0 };
            let mut x = bench.one(embed, &[ids, table.clone(), Given::Absent, Given::Absent])?;
            for (packed, norms, caches) in &layers {
                let project = |bench: &mut Bench, x: &Held, index: usize| {
                    bench.one(linear, &[x.into(), packed[index].clone(), Given::Absent])
                };
                let normed = bench.one(rms_norm, &[(&x).into(), norms[0].clone()])?;
                let [q, k, v] = [0, 1, 2].map(|index| project(bench, &normed, index));
                let q = bench.one(rope(HEADS), &[q?.into(), positions.clone(), frequencies.clone()])?;
                let k = bench.one(rope(KV_HEADS), &[k?.into(), positions.clone(), frequencies.clone()])?;
                let [keys, values] = caches.clone();
                bench.run(KvWrite {}, &[keys.clone(), values.clone(), k.into(), v?.into(), slots.clone()])?;
                let attention = PagedAttention {
                    query_heads: HEADS as u32,
                    kv_heads: KV_HEADS as u32,
                    scale: (HEAD as f32).sqrt().recip(),
                    softcap: 0.0,
                    window: 0,
                    mask: AttentionMask::Causal,
                    value_size: 0,
                };
                let mut operands = vec![q.into(), keys, values];
                operands.extend(lengths.iter().cloned());
                operands.extend([tables.clone(), work.clone(), Given::Absent, Given::Absent, Given::Absent]);
                let attended = bench.run(attention, &operands)?.swap_remove(0);
                let back = project(bench, &attended, 3)?;
                x = bench.one(plus, &[x.into(), back.into(), Given::Absent, Given::Absent])?;
                let normed = bench.one(rms_norm, &[(&x).into(), norms[1].clone()])?;
                let (gate, up) = (project(bench, &normed, 4)?, project(bench, &normed, 5)?);
                let gated = GatedActivation {
                    function: Nonlinearity::Silu,
                    layout: GateLayout::Separate,
                    limit: 0.0,
                    up_offset: 0.0,
                };
                let gated = bench.one(gated, &[gate.into(), up.into(), Given::Absent])?;
                let back = project(bench, &gated, 6)?;
                x = bench.one(plus, &[x.into(), back.into(), Given::Absent, Given::Absent])?;
            }
            let normed = bench.one(rms_norm, &[x.into(), norm.clone()])?;
            let y = bench.one(Linear { dtype: DType::F32 }, &[normed.into(), head.clone(), Given::Absent])?;
            logits.extend(bench.get(&y)?.values());
            first += count;
        }
        Ok(logits)
    }
}

fn normalise(x: &[f64], weight: &Tensor) -> Vec<f64> {
    let weight = weight.values();
    let row = |row: &[f64]| {
        let reals = norm::rms_norm(row, &weight, f64::from(EPS), 0.0);
        reals.into_iter().map(|real| real.value).collect::<Vec<_>>()
    };
    x.chunks(HIDDEN).flat_map(row).collect()
}

fn attention(q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
    let scoring = Scoring { scale: (HEAD as f64).sqrt().recip(), ..Scoring::default() };
    let width = KV_HEADS * HEAD;
    let one = |(index, query): (usize, &[f64])| {
        let (token, start) = (index / HEADS, index % HEADS / (HEADS / KV_HEADS) * HEAD);
        let seen = |key: usize| Seen {
            distance: (token - key) as f64,
            key: &k[key * width + start..][..HEAD],
            value: &v[key * width + start..][..HEAD],
        };
        let seen: Vec<Seen<'_>> = (0..=token).map(seen).collect();
        attend(scoring, query, &seen, HEAD).0.into_iter().map(|real| real.value).collect::<Vec<_>>()
    };
    q.chunks(HEAD).enumerate().flat_map(one).collect()
}

/// The token with the largest logit, and by how much it is larger than the next.
fn best(row: &[f64]) -> (usize, f64) {
    let top = (0..row.len()).fold(0, |best, token| if row[token] > row[best] { token } else { best });
    let others = (0..row.len()).filter(|token| *token != top).map(|token| row[token]);
    (top, row[top] - others.fold(f64::NEG_INFINITY, f64::max))
}

fn hold(what: &str, dtype: DType, found: &[f64], expected: &[f64]) -> Outcome {
    let size = expected.iter().map(|y| y * y).sum::<f64>() / expected.len() as f64;
    let error =
        found.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum::<f64>() / expected.len() as f64;
    let limit = ROUNDINGS * Gate::default().mean_square_limit(dtype);
    ensure(error <= limit * size, || {
        format!(
            "{what}: the logits are off by {:.1e} in relative mean square, at most {limit:.1e}",
            error / size
        )
    })?;
    // Four standard deviations of the difference of two logits, if all of what is allowed were used up.
    let doubt = 4.0 * (2.0 * limit * size).sqrt();
    for (row, (found, expected)) in found.chunks(VOCABULARY).zip(expected.chunks(VOCABULARY)).enumerate() {
        let (token, margin) = best(expected);
        ensure(margin <= doubt || best(found).0 == token, || {
            format!(
                "{what}: token {row} is followed by {}, must be {token}, by a margin of {margin}",
                best(found).0
            )
        })?;
    }
    Ok(())
}

/// Logits of a text, as a prompt, in chunks, and token by token.
pub(super) fn tiny_llama(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let ids: Vec<i32> = (0..TOKENS).map(|index| (index * 37 + 11) as i32 % VOCABULARY as i32).collect();
    for dtype in floats(&**subject.device()) {
        let model = Model::new(dtype);
        let expected = model.oracle(&ids);
        let decode: Vec<usize> = [32].into_iter().chain([1; TOKENS - 32]).collect();
        for (how, steps) in
            [("as a prompt", &[TOKENS][..]), ("in chunks", &[7, 9, 25][..]), ("token by token", &decode[..])]
        {
            let found = model.logits(&mut bench, &ids, steps)?;
            hold(&format!("{dtype}, {how}"), dtype, &found, &expected)?;
        }
    }
    Ok(())
}
