//! Whole layers of a decoder as one region, for one token.
//!
//! A device that runs the region has sums in another order than the ops of its body have by themselves. So the region is held to its
//! body op by op, which the cases hold to the oracle: over one sequence that grows and shrinks from launch to launch, where heads,
//! norms and MLPs are of different kinds. It runs in a graph, each launch several times.
//!
//! How far the two may be apart is for [`roundings`].

mod mixture;
mod roundings;
mod shapes;

use super::{
    bench::{Bench, Given, Held, Outcome, Stop, fail, floats, same_bits},
    collective::{SUM, group, on_ranks},
    faults::Nobodys,
    tape::{Tape, Value},
};
use crate::{
    cases::{NormSpan, drawn_weight},
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat, WeightType,
    collective::Comm,
    device::Device,
    graph::Graphs,
    op::{
        Activation, Add, AttentionMask, Columns, Embed, GateLayout, GatedActivation, KvWrite, LayerNorm,
        Linear, Nonlinearity, PagedAttention, RmsNorm, Rope,
    },
};
use mixture::mixture;
use roundings::apart;
use shapes::{
    BOUNDED, EXPERTS, EXPERTS_OF_INTEGERS, FLOATS, INTEGERS, LARGE_HEADS, OTHER_HEADS, OVER_RANKS, PARALLEL,
    SHAPES, Shape, VARIANTS, Variant,
};
use std::{iter, sync::Arc};

const LAYERS: usize = 3;
const BLOCK: usize = 16;
const PAGES: usize = 40;
/// Tokens that a sequence has, this one included, launch by launch: around the ends of pages and beyond what one warp or block
/// would take. None: the launch has no sequence.
const LENGTHS: [usize; 11] = [600, 1, 2, 16, 0, 17, 33, 200, PAGES * BLOCK, 0, 257];

/// Rows of the table of tokens, where it begins in the vocabulary, and rows of that of positions, where these begin: some ids and
/// positions are outside.
const TOKENS: usize = 48;
const FIRST_TOKEN: usize = 8;
const POSITIONS: usize = 512;
const FIRST_POSITION: u32 = 2;

/// The number of ranks of layers that are shared.
const RANKS: usize = 2;

/// How often a launch is repeated, which has to give the same bits.
const AGAIN: usize = 3;

/// Where the token stands: what changes from launch to launch.
struct Place {
    /// The token's id, and the token where it does not come from a table.
    id: Held,
    x: Held,
    positions: Held,
    slots: Held,
    /// Start, tokens, and tokens with those before.
    lengths: [Held; 3],
    table: Held,
}

impl Place {
    fn new(bench: &mut Bench, dtype: DType, shape: &Shape) -> Result<Self, Stop> {
        let mut one = || bench.empty(DType::I32, &[1]);
        let (id, positions, slots, lengths) = (one()?, one()?, one()?, [one()?, one()?, one()?]);
        let x = bench.empty(dtype, &[1, shape.hidden])?;
        Ok(Self { id, x, positions, slots, lengths, table: bench.empty(DType::I32, &[1, PAGES])? })
    }

    /// The last of `length` tokens; none if that is 0.
    fn set(&self, bench: &mut Bench, random: &mut Random, table: &[usize], length: usize) -> Outcome {
        let x = random.tensor(self.x.desc.dtype, &self.x.desc.shape, Values::HeavyTailed);
        bench.set(&self.x, &x)?;
        // From -1 to beyond the table.
        let id = random.below(FIRST_TOKEN + TOKENS + 8) as i32 - 1;
        bench.set(&self.id, &Tensor::vector(&[id]))?;
        let position = length as i32 - 1;
        let page = length.checked_sub(1).map(|position| table[position / BLOCK] * BLOCK + position % BLOCK);
        let slot = page.map_or(-1, |slot| slot as i32);
        let used = length.div_ceil(BLOCK);
        let pages = (0..PAGES).map(|page| if page < used { table[page] as i32 } else { -1 });
        bench.set(&self.table, &Tensor::integers(&[1, PAGES], &pages.collect::<Vec<_>>()))?;
        let lengths = [0, (length > 0).into(), length as i32];
        let all = self.lengths.iter().zip(lengths).chain([(&self.positions, position), (&self.slots, slot)]);
        for (held, value) in all {
            bench.set(held, &Tensor::vector(&[value]))?;
        }
        Ok(())
    }
}

/// What stands for the weights of layers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stored {
    /// Their types, which is enough to ask whether a device runs the layers: making the weights may take a minute.
    Types,
    Weights,
}

impl Stored {
    fn weight(
        self,
        bench: &mut Bench,
        random: &mut Random,
        format: WeightFormat,
        shape: [usize; 2],
        size: f64,
    ) -> Result<Given, Stop> {
        match self {
            Self::Types => Ok(Given::Weight(Arc::new(Nobodys(WeightType { format, shape: shape.to_vec() })))),
            Self::Weights => bench.pack(&drawn_weight(random, format, shape, size)),
        }
    }
}

/// A rank, of those that share the layers.
#[derive(Clone)]
struct Rank {
    number: usize,
    comm: Arc<dyn Comm>,
}

/// Layers with their weights.
struct Layers {
    shape: &'static Shape,
    dtype: DType,
    /// The rank, if results of attention and MLP are summed over ranks.
    rank: Option<Rank>,
    /// Operands of the calls of each that are its own: weights, vectors and biases of products and of the norms before them, and
    /// weights of norms of query and key heads, and of the results of attention and MLP.
    own: Vec<[Vec<Given>; 5]>,
    /// The sinks of heads of each, or absent ones.
    sinks: Vec<Given>,
    /// Keys and values, as they are before the first launch.
    caches: Vec<[Tensor; 2]>,
    /// Frequencies of both kinds of attention; absent where heads are not rotated.
    frequencies: [Given; 2],
    /// Tables of tokens and of positions.
    tables: [Given; 2],
}

impl Layers {
    fn new(
        bench: &mut Bench,
        dtype: DType,
        shape: &'static Shape,
        rank: Option<&Rank>,
        stored: Stored,
    ) -> Result<Self, Stop> {
        let random = &mut Random::named(&format!("decoder/{}", shape.named(dtype)));
        let format = match shape.format {
            Some(name) => WeightFormat::from_name(name)
                .ok_or_else(|| Stop::Failed(format!("there is no weight format {name}")))?,
            None => WeightFormat::Dense(dtype),
        };
        let (heads, keys) = (shape.kv_heads * shape.group * shape.size, shape.kv_heads * shape.size);
        let pre_norms = shape.variant.pre_norms;
        let cache = [PAGES, shape.kv_heads, BLOCK, shape.size];
        let of_attention = if shape.dense_attention { WeightFormat::Dense(dtype) } else { format };
        let (mut own, mut sinks, mut caches) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..LAYERS {
            let selection_bias = match shape.experts {
                // Scores are below 1.
                Some([count, chosen]) if chosen < count => {
                    let bias: Vec<f64> =
                        random.shuffled(count).iter().map(|place| 2.0 * *place as f64).collect();
                    bench.give(&Tensor::floats(DType::F32, &[count], &bias))?
                }
                _ => Given::Absent,
            };
            let mut product = |format, normed: bool, [rows, columns]: [usize; 2], size: f64, lean: &[f64]| {
                let mut operands = Vec::new();
                let mut vector = |length: usize, low: f64, high: f64, lean: &[f64]| {
                    let lean = lean.iter().chain(iter::repeat(&0.0));
                    let all: Vec<f64> =
                        lean.take(length).map(|lean| lean + random.between(low, high)).collect();
                    bench.give(&Tensor::floats(dtype, &[length], &all))
                };
                if normed {
                    operands.push(vector(columns, 0.5, 1.5, &[])?);
                }
                if normed && !shape.llama {
                    operands.push(vector(columns, -0.2, 0.2, &[])?);
                }
                let biased = !shape.llama || shape.bounded;
                let bias = if biased { Some(vector(rows, -0.2, 0.2, lean)?) } else { None };
                // Dense ones have now and then an element a hundred times as large, which makes rows five times as large.
                let rare = if matches!(format, WeightFormat::Dense(_)) { 8.0 } else { 1.0 };
                let size = size / (columns as f64).sqrt() / rare;
                operands.push(stored.weight(bench, random, format, [rows, columns], size)?);
                operands.push(bias.unwrap_or(Given::Absent));
                Ok::<_, Stop>(operands)
            };
            let first = if shape.llama { 2 * shape.inner } else { shape.inner };
            let (input, output, lean) = match shape.small_weights {
                false => (1.5, 1.0, Vec::new()),
                // The score of a token with itself is about 16, and with those before it 0: 2^23 times less weight for each. What it
                // attends to shows beside what it is itself.
                true => {
                    let key = 16.0 / 2.0 / (shape.size as f64).sqrt();
                    (0.05, 30.0, [vec![2.0; heads], vec![key; keys]].concat())
                }
            };
            let (before, mut behind) = (
                product(of_attention, pre_norms, [heads + 2 * keys, shape.hidden], input, &lean)?,
                product(of_attention, false, [shape.hidden, heads], output, &[])?,
            );
            let halves = match shape.experts {
                None => [
                    product(format, pre_norms, [first, shape.hidden], 1.0, &[])?,
                    product(format, false, [shape.hidden, shape.inner], 1.0, &[])?,
                ],
                Some([count, _]) => {
                    // The norm and the router, then the halves of the gated activation.
                    let dense = WeightFormat::Dense(dtype);
                    let mut up = product(dense, true, [count, shape.hidden], 1.0, &[])?;
                    up.push(selection_bias);
                    for _ in 0..2 {
                        let rows = count * shape.inner;
                        up.extend(product(format, false, [rows, shape.hidden], 1.0, &[])?);
                    }
                    [up, product(format, false, [count * shape.hidden, shape.inner], 1.0, &[])?]
                }
            };
            let [up, mut down] = halves;
            if let Some(rank) = rank {
                // Ranks have the token in common, and so whatever it is multiplied with, but parts of the results of their own.
                let random = &mut Random::named(&format!("decoder/{}/{}", shape.named(dtype), rank.number));
                let experts = shape.experts.map_or(1, |[count, _]| count);
                let rare = if shape.format.is_none() { 8.0 } else { 1.0 };
                let parts = [(&mut behind, 1, heads, output), (&mut down, experts, shape.inner, 1.0)];
                for (part, rows, columns, size) in parts {
                    let size = size / (RANKS as f64 * columns as f64).sqrt() / rare;
                    part[0] = stored.weight(bench, random, format, [rows * shape.hidden, columns], size)?;
                }
            }
            let Variant { head_norms, post_norms, .. } = shape.variant;
            let of_heads = |span| {
                let heads = match span {
                    NormSpan::EachHead => [1; 2],
                    NormSpan::AllHeads => [shape.kv_heads * shape.group, shape.kv_heads],
                };
                heads.map(|heads| heads * shape.size)
            };
            let post = if post_norms { 2 } else { 0 };
            let widths = head_norms.map(of_heads).into_iter().flatten();
            let widths = widths.chain(iter::repeat_n(shape.hidden, post));
            let vector = |width: usize| {
                let all: Vec<f64> = (0..width).map(|_| random.between(0.5, 1.5)).collect();
                bench.give(&Tensor::floats(dtype, &[width], &all))
            };
            let norms = widths.map(vector).collect::<Result<Vec<_>, _>>()?;
            own.push([before, behind, up, down, norms]);
            sinks.push(match shape.bounded {
                true => {
                    // Of the size of scores, so that a sink takes more or less of the weight than keys do.
                    let heads = shape.kv_heads * shape.group;
                    let all: Vec<f64> = (0..heads).map(|_| random.between(-1.0, 6.0)).collect();
                    bench.give(&Tensor::floats(DType::F32, &[heads], &all))?
                }
                false => Given::Absent,
            });
            caches.push(match shape.small_weights {
                false => [2.0, 1.0].map(|size| random.scaled(dtype, &cache, Values::Uniform, size)),
                true => [0.0, 60_000.0]
                    .map(|value| Tensor::floats(dtype, &cache, &vec![value; cache.iter().product()])),
            });
        }
        let mut frequencies_of = |base: Option<f64>| {
            let Some(base) = base else { return Ok(Given::Absent) };
            let rotated = shape.size / shape.variant.rotates_one_of;
            let pairs = 0..rotated / 2;
            let all: Vec<f64> = pairs.map(|pair| base.powf(-2.0 * pair as f64 / rotated as f64)).collect();
            bench.give(&Tensor::floats(DType::F32, &[rotated / 2], &all))
        };
        let [first, second] = shape.variant.bases;
        let frequencies = [frequencies_of(first)?, frequencies_of(second)?];
        let mut table = |wanted: bool, rows: usize| match wanted {
            true => {
                let dense = WeightFormat::Dense(dtype);
                stored.weight(bench, random, dense, [rows, shape.hidden], 1.0)
            }
            false => Ok(Given::Absent),
        };
        let tables = [table(shape.embeds, TOKENS)?, table(shape.embeds && !shape.llama, POSITIONS)?];
        Ok(Self { shape, dtype, rank: rank.cloned(), own, sinks, caches, frequencies, tables })
    }

    /// The calls of the layers, with caches of their own: the tape, the caches and the token as values, and the caches as memory.
    fn tape(&self, bench: &mut Bench, place: &Place) -> Result<(Tape, Vec<Value>, Vec<Held>), Stop> {
        let Shape { llama, kv_heads, group, size, variant, .. } = *self.shape;
        let (queries, keys) = (kv_heads * group * size, kv_heads * size);
        let (query_heads, kv_heads) = ((kv_heads * group) as u32, kv_heads as u32);
        let (dtype, add) = (self.dtype, Add { alpha: 1.0 });
        let rope = |heads: u32| Rope { heads, pairing: variant.pairing, scale: 1.0 };
        let attention = PagedAttention {
            query_heads,
            kv_heads,
            scale: ((size as f32).sqrt() * variant.score_spread).recip(),
            softcap: variant.softcap,
            window: 0,
            mask: AttentionMask::Causal,
            value_size: 0,
        };
        let lengths: Vec<Given> = place.lengths.iter().map(Given::from).collect();
        let work = bench.work_list(&lengths)?;
        let mut tape = Tape::over(self.rank.as_ref().map(|rank| rank.comm.clone()));
        let lengths: Vec<Option<Value>> = lengths.into_iter().map(|length| tape.give(length)).collect();
        let positions = tape.give(&place.positions);
        let frequencies = match variant.bases[0] == variant.bases[1] {
            true => [tape.give(self.frequencies[0].clone()); 2],
            false => self.frequencies.clone().map(|frequencies| tape.give(frequencies)),
        };
        let (slots, table, work) = (tape.give(&place.slots), tape.give(&place.table), tape.give(work));
        let one = |results: Vec<Value>| results.first().copied();
        let (mut results, mut kept) = (Vec::new(), Vec::new());
        let mut x = if self.shape.embeds {
            let embed = Embed { dtype, first_row: FIRST_TOKEN as u32, position_offset: FIRST_POSITION };
            let [tokens, places] = self.tables.clone();
            let ids = tape.give(&place.id);
            let operands = [ids, tape.give(tokens), positions.filter(|_| !llama), tape.give(places)];
            let embedded = one(tape.call(embed, operands));
            match variant.scale {
                Some(alpha) => one(tape.call(Add { alpha }, [embedded, embedded, None, None])),
                None => embedded,
            }
        } else {
            tape.give(&place.x)
        };
        for (layer, ((own, sinks), memory)) in self.own.iter().zip(&self.sinks).zip(&self.caches).enumerate()
        {
            let (frequencies, window) = (frequencies[layer % 2], variant.windows[layer % 2]);
            let [first, output, up, down, norms] = own
                .each_ref()
                .map(|own| own.iter().map(|given| tape.give(given.clone())).collect::<Vec<_>>());
            let rms_norm = RmsNorm { eps: 1e-5, weight_offset: variant.weight_offset };
            let norm = |tape: &mut Tape, x, own: &[Option<Value>]| match llama {
                _ if !variant.pre_norms => x,
                true => one(tape.call(rms_norm, [x, own[0]])),
                false => one(tape.call(LayerNorm { eps: 1e-5 }, [x, own[0], own[1]])),
            };
            let linear = |tape: &mut Tape, x, own: &[Option<Value>]| {
                one(tape.call(Linear { dtype }, [x, own[0], own[1]]))
            };
            let vectors = match llama {
                _ if !variant.pre_norms => 0,
                true => 1,
                false => 2,
            };
            let (head_norms, post_norms) = norms.split_at(if variant.head_norms.is_some() { 2 } else { 0 });
            // Adds a result to the token, summed over ranks if there are any, and normalised if that has norms.
            let sum = |tape: &mut Tape, x, result, index: usize| {
                let result = match self.rank {
                    Some(_) => one(tape.call(SUM, [result])),
                    None => result,
                };
                let result = match post_norms.get(index) {
                    Some(weight) => one(tape.call(rms_norm, [result, *weight])),
                    None => result,
                };
                one(tape.call(add, [x, result, None, None]))
            };
            let first_normed = norm(&mut tape, x, &first);
            let product = linear(&mut tape, first_normed, &first[vectors..]);
            let mut start = 0;
            let [mut query, mut key, value] = [queries, keys, keys].map(|count| {
                let columns = Columns { start, count: count as u32 };
                start += count as u32;
                one(tape.call(columns, [product]))
            });
            if let [of_query, of_key] = head_norms {
                query = one(tape.call(rms_norm, [query, *of_query]));
                key = one(tape.call(rms_norm, [key, *of_key]));
            }
            if llama && frequencies.is_some() {
                query = one(tape.call(rope(query_heads), [query, positions, frequencies]));
                key = one(tape.call(rope(kv_heads), [key, positions, frequencies]));
            }
            let caches = [bench.put(&memory[0])?, bench.put(&memory[1])?];
            let before = caches.each_ref().map(|cache| tape.give(cache));
            kept.extend(caches);
            let written = tape.call(KvWrite {}, [before[0], before[1], key, value, slots]);
            results.extend(&written);
            let operands =
                [query, Some(written[0]), Some(written[1])].into_iter().chain(lengths.iter().copied());
            let attention = PagedAttention { window, ..attention };
            let sinks = tape.give(sinks.clone());
            let mixed = one(tape.call(attention, operands.chain([table, work, None, sinks, None])));
            let projected = linear(&mut tape, mixed, &output);
            let before = x;
            if !variant.parallel {
                x = sum(&mut tape, x, projected, 0);
            }
            let normed = match variant.shares_norm {
                true => first_normed,
                false => norm(&mut tape, x, &up),
            };
            if let Some(experts) = self.shape.experts {
                let mixed = mixture(&mut tape, dtype, (self.shape, experts), normed, &up[1..], &down);
                x = sum(&mut tape, x, mixed, 1);
                continue;
            }
            let product = linear(&mut tape, normed, &up[vectors..]);
            let activated = match llama {
                true => {
                    let (function, layout) = (variant.function, GateLayout::Concatenated);
                    let gated = GatedActivation { function, layout, limit: 0.0, up_offset: 0.0 };
                    one(tape.call(gated, [product, None, None]))
                }
                false => {
                    let plain = Activation { function: Nonlinearity::GeluTanh, limit: 0.0 };
                    one(tape.call(plain, [product, None]))
                }
            };
            let inner = linear(&mut tape, activated, &down);
            x = match variant.parallel {
                true => one(tape.call(add, [before, projected, inner, None])),
                false => sum(&mut tape, x, inner, 1),
            };
        }
        results.extend(x);
        Ok((tape, results, kept))
    }
}

/// The region of whole layers of two ranks, which sum the results of attention and MLP, gives what its body gives op by op.
pub(super) fn region_over_ranks(subject: &Subject) -> Outcome {
    let (devices, id) = group(subject, RANKS)?;
    on_ranks(&devices, &id, |number, device, comm| {
        let rank = Rank { number, comm };
        of_shapes_on(device, &OVER_RANKS, Some(&rank))?;
        Ok(rank.comm.status()?)
    })
}

/// The region of whole layers gives what its body gives op by op, whatever was launched before.
pub(super) fn region(subject: &Subject) -> Outcome {
    of_shapes(subject, &SHAPES)
}

/// The same with heads of other sizes.
pub(super) fn region_of_other_heads(subject: &Subject) -> Outcome {
    of_shapes(subject, &OTHER_HEADS)
}

/// The same with weights of 4 and 8 bits.
pub(super) fn region_of_integers(subject: &Subject) -> Outcome {
    of_shapes(subject, &INTEGERS)
}

/// The same with mixtures of experts.
pub(super) fn region_of_experts(subject: &Subject) -> Outcome {
    of_shapes(subject, &EXPERTS)
}

/// The same with weights of 4 and 8 bits, but for the router.
pub(super) fn region_of_integer_experts(subject: &Subject) -> Outcome {
    of_shapes(subject, &EXPERTS_OF_INTEGERS)
}

/// The same with sinks, biases and bounds.
pub(super) fn region_of_bounds(subject: &Subject) -> Outcome {
    of_shapes(subject, &BOUNDED)
}

/// The same with floats of 4 bits.
pub(super) fn region_of_floats(subject: &Subject) -> Outcome {
    of_shapes(subject, &FLOATS)
}

/// The same with norms after attention and MLP, and with windows.
pub(super) fn region_of_variants(subject: &Subject) -> Outcome {
    of_shapes(subject, &VARIANTS)
}

/// The same with the MLP beside attention, and with rotated pairs of neighbours.
pub(super) fn region_of_parallel(subject: &Subject) -> Outcome {
    of_shapes(subject, &PARALLEL)
}

/// The same with heads of more than 128, and with soft caps.
pub(super) fn region_of_large_heads(subject: &Subject) -> Outcome {
    of_shapes(subject, &LARGE_HEADS)
}

/// One check for all would take minutes where a device builds kernels for each. Shapes and types that the device does not run as a
/// region are left out; all of them is unsupported.
fn of_shapes(subject: &Subject, shapes: &'static [Shape]) -> Outcome {
    of_shapes_on(subject.device(), shapes, None)
}

fn of_shapes_on(device: &Arc<dyn Device>, shapes: &'static [Shape], rank: Option<&Rank>) -> Outcome {
    let Some(graphs) = Device::graphs(&**device) else {
        return Err(Stop::Unsupported("the device has no graphs".into()));
    };
    let mut bench = Bench::new(device)?;
    let (mut missing, mut ran) = (None, false);
    for dtype in floats(&**device) {
        for shape in shapes {
            match of_shape(&mut bench, graphs, dtype, shape, rank) {
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

fn of_shape(
    bench: &mut Bench,
    graphs: &dyn Graphs,
    dtype: DType,
    shape: &'static Shape,
    rank: Option<&Rank>,
) -> Outcome {
    let name = shape.named(dtype);
    let place = Place::new(bench, dtype, shape)?;
    let (tape, results, _) = Layers::new(bench, dtype, shape, rank, Stored::Types)?.tape(bench, &place)?;
    tape.ask(bench, &name, &results)?;
    let layers = Layers::new(bench, dtype, shape, rank, Stored::Weights)?;
    let mut random = Random::named(&format!("decoder/{name}/launches"));
    let table = random.shuffled(PAGES);
    place.set(bench, &mut random, &table, 1)?;
    let (tape, results, caches) = layers.tape(bench, &place)?;
    let bound = tape.bind_region(bench, &name, &results)?;
    let (tape, results, kept) = layers.tape(bench, &place)?;
    let (eager, values) = tape.bind_each(bench)?;
    let (Some(found), Some(last)) = (bound.results.last().cloned(), results.last()) else { return Ok(()) };
    let Given::Tensor(expected) = &values[last.number()] else { return fail("the token is no tensor") };
    bench.wait()?;
    let graph = graphs.capture(&mut *bench.stream, vec![bound.call])?;
    for length in LENGTHS {
        place.set(bench, &mut random, &table, length)?;
        eager.iter().try_for_each(|bound| bench.enqueue(bound))?;
        graph.launch(&mut *bench.stream)?;
        if length == 0 {
            // The result of attention for a row of no sequence is not written. It must not change what comes after.
            continue;
        }
        let what = format!("{name}, {length} tokens");
        let (first, expected) = (bench.get(&found)?, bench.get(expected)?);
        apart(&what, shape, &first, &expected)?;
        for again in 0..AGAIN {
            graph.launch(&mut *bench.stream)?;
            same_bits(&format!("{what}, launch {again} behind the first"), &bench.get(&found)?, &first)?;
        }
    }
    for (found, expected) in caches.iter().zip(&kept) {
        let (found, expected) = (bench.get(found)?, bench.get(expected)?);
        apart(&format!("{name}, keys or values"), shape, &found, &expected)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
