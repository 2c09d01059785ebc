//! Queries and keys of several layers as a graph, for some rows and for many.
//!
//! What a step is turned by is the same in all layers, and a device may work it out once for a graph: then no case of a call reaches
//! what it runs. So the graph is held to its calls one by one, which the cases hold to the oracle: over layers that share positions
//! and frequencies or do not, and positions that are others in the middle of the graph, and from launch to launch.

use super::{
    bench::{Bench, Bound, Given, Held, Outcome, Stop, floats, same_bits},
    decoder::bind,
};
use crate::{
    cases::random_weight,
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType, TensorDesc, WeightFormat,
    op::{Fill, Op, RmsNorm, Rope, RopePairing},
    region::well_known::{self, AttentionInput},
};

/// Rows, inputs, heads of queries and of keys, and their size.
type Shape = [usize; 5];

const SHAPES: [Shape; 2] = [[24, 64, 4, 2, 64], [131, 32, 48, 4, 128]];
const PAIRINGS: [RopePairing; 2] = [RopePairing::Halves, RopePairing::Neighbours];
const BLOCK: usize = 16;
const LAUNCHES: usize = 3;

/// What a graph is made of.
#[derive(Clone, Copy)]
enum Part {
    /// A layer that is turned by frequencies of this number.
    Layer(usize),
    /// All rows are at this position from here on.
    At(f32),
}

const PARTS: [Part; 7] = [
    Part::Layer(0),
    Part::Layer(1),
    Part::Layer(0),
    Part::At(3.0),
    Part::Layer(0),
    Part::Layer(1),
    Part::Layer(1),
];

/// What both sides read.
struct Common {
    shape: Shape,
    x: Held,
    positions: Held,
    slots: Given,
    norm: Given,
    frequencies: [Given; 2],
    /// One for each part.
    weights: Vec<Given>,
    cache: Tensor,
}

impl Common {
    fn new(bench: &mut Bench, random: &mut Random, dtype: DType, shape: Shape) -> Result<Self, Stop> {
        let [rows, inputs, heads, kv_heads, size] = shape;
        let outputs = (heads + 2 * kv_heads) * size;
        let pages = 1 + rows / BLOCK;
        let free = random.shuffled(pages * BLOCK);
        let slots = (0..rows).map(|row| if row % 5 == 3 { -1 } else { free[row] as i32 }).collect::<Vec<_>>();
        let mut frequencies = |base: f64| {
            let all: Vec<f64> =
                (0..size / 2).map(|pair| base.powf(-2.0 * pair as f64 / size as f64)).collect();
            bench.give(&Tensor::floats(DType::F32, &[size / 2], &all))
        };
        let frequencies = [frequencies(10_000.0)?, frequencies(500.0)?];
        let format = WeightFormat::Dense(dtype);
        let mut weight = || {
            let (weight, _) = random_weight(random, format, [outputs, inputs], 0.1, dtype);
            bench.pack(&weight, "linear", rows)
        };
        let weights = PARTS.iter().map(|_| weight()).collect::<Result<_, _>>()?;
        Ok(Self {
            shape,
            x: bench.empty(dtype, &[rows, inputs])?,
            positions: bench.empty(DType::I32, &[rows])?,
            slots: bench.give(&Tensor::vector(&slots))?,
            norm: bench.give(&random.tensor(dtype, &[inputs], Values::Uniform))?,
            frequencies,
            weights,
            cache: random.tensor(dtype, &[pages, kv_heads, BLOCK, size], Values::Uniform),
        })
    }

    /// Other activations.
    fn set(&self, bench: &mut Bench, random: &mut Random) -> Outcome {
        let [rows, inputs, ..] = self.shape;
        bench.set(&self.x, &random.tensor(self.x.desc.dtype, &[rows, inputs], Values::HeavyTailed))
    }

    /// Rows are at positions from `first` on, but for those that are padding.
    fn place(&self, bench: &mut Bench, first: i32) -> Outcome {
        let rows = self.shape[0] as i32;
        let positions: Vec<i32> =
            (0..rows).map(|row| if row % 7 == 2 { -1 } else { first + 3 * row }).collect();
        bench.set(&self.positions, &Tensor::vector(&positions))
    }

    /// Binds all parts to new results and caches. Gives the calls, and the queries, keys and values.
    fn bind(
        &self,
        bench: &mut Bench,
        dtype: DType,
        pairing: RopePairing,
    ) -> Result<(Vec<Bound>, Vec<Held>), Stop> {
        let [rows, _, heads, kv_heads, size] = self.shape;
        let rope = |heads: usize, scale: f32| Rope { heads: heads as u32, pairing, scale };
        let input = well_known::attention_input(AttentionInput {
            norm: RmsNorm { eps: 1e-5, weight_offset: 0.0 }.into(),
            dtype,
            bias: false,
            columns: [heads, kv_heads, kv_heads].map(|heads| (heads * size) as u32),
            head_norms: None,
            ropes: Some([rope(heads, 1.0), rope(kv_heads, 1.25)]),
        });
        let input = Op::Region(input?.into());
        let mut column = self.positions.clone();
        column.desc = TensorDesc::dense(DType::I32, &[rows, 1]);
        let (mut bound, mut results) = (Vec::new(), Vec::new());
        for (part, weight) in PARTS.into_iter().zip(&self.weights) {
            let turned_by = match part {
                Part::At(value) => {
                    bind(bench, &Fill { value }.into(), &[(&column).into()], &mut bound)?;
                    continue;
                }
                Part::Layer(number) => self.frequencies[number].clone(),
            };
            let caches = [bench.put(&self.cache)?, bench.put(&self.cache)?];
            let operands = [
                (&self.x).into(),
                self.norm.clone(),
                weight.clone(),
                (&self.positions).into(),
                turned_by,
                (&caches[0]).into(),
                (&caches[1]).into(),
                self.slots.clone(),
            ];
            if let Given::Tensor(query) = bind(bench, &input, &operands, &mut bound)? {
                results.push(query);
            }
            results.extend(caches);
        }
        Ok((bound, results))
    }
}

/// A graph of layers turns queries and keys as its calls do one by one, by the positions that are then in memory.
pub(super) fn graph(subject: &Subject) -> Outcome {
    let device = subject.device().clone();
    let Some(graphs) = device.graphs() else {
        return Err(Stop::Unsupported("the device has no graphs".into()));
    };
    let mut bench = Bench::new(&device)?;
    for dtype in floats(&*device) {
        for (shape, pairing) in SHAPES.into_iter().flat_map(|shape| PAIRINGS.map(|pairing| (shape, pairing)))
        {
            let what = format!("{dtype}, {} rows, {}", shape[0], pairing.name());
            let mut random = Random::named(&format!("heads/{what}"));
            let common = Common::new(&mut bench, &mut random, dtype, shape)?;
            let (eager, expected) = common.bind(&mut bench, dtype, pairing)?;
            let (captured, found) = common.bind(&mut bench, dtype, pairing)?;
            let calls = captured.into_iter().map(|bound| bound.call).collect();
            bench.wait()?;
            let graph = graphs.capture(&mut *bench.stream, calls)?;
            for launch in 0..LAUNCHES {
                common.set(&mut bench, &mut random)?;
                let first = random.below(4000) as i32;
                common.place(&mut bench, first)?;
                eager.iter().try_for_each(|bound| bench.enqueue(bound))?;
                // A graph leaves its last positions.
                common.place(&mut bench, first)?;
                graph.launch(&mut *bench.stream)?;
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let result = ["queries", "keys", "values"][index % 3];
                    let (found, expected) = (bench.get(found)?, bench.get(expected)?);
                    let what = format!("{what}, launch {launch}, {result} of layer {}", index / 3);
                    same_bits(&what, &found, &expected)?;
                }
            }
        }
    }
    Ok(())
}
