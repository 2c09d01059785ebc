//! Cases of `moe_route`, `moe_group`, `grouped_linear` and `moe_combine`.

use super::{
    EXPONENTIAL,
    linear::{columns_of, random_weight},
    plane::drawn_layout,
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
    gate::Gate,
    oracle::moe::{self, RouterVectors},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    BlockFormat, DType, WeightFormat,
    op::{GroupScore, GroupedLinear, MoeCombine, MoeGroup, MoeRoute, RouterNorm, RouterScore},
};

/// Label, rows, experts, slots and layout.
pub(super) type Shape = (&'static str, usize, usize, usize, Layout);

const fn layout(gap: usize, bounded: bool, extent: Option<usize>) -> Layout {
    Layout { gap, offset: 0, bounded, extent }
}

const PLAIN: Layout = layout(0, false, None);

pub(super) const SHAPES: &[Shape] = &[
    ("no_rows", 0, 8, 2, PLAIN),
    ("one_expert", 3, 1, 1, PLAIN),
    ("one_row", 1, 8, 2, PLAIN),
    ("all_experts", 5, 4, 4, PLAIN),
    ("many_experts", 17, 128, 8, PLAIN),
    ("odd", 33, 12, 3, layout(5, false, None)),
    ("bounded_full", 6, 16, 4, layout(0, true, None)),
    ("extent", 70, 16, 4, layout(8, true, Some(61))),
    ("extent_of_one", 9, 60, 6, layout(0, true, Some(1))),
    ("extent_of_nothing", 6, 8, 2, layout(0, true, Some(0))),
    ("experts_257", 9, 257, 2, PLAIN),
    ("rows_1025", 1025, 4, 1, PLAIN),
];

/// A shape of a random case: rows, experts, slots and layout.
pub(super) fn drawn_shape(draw: &mut Draw) -> (usize, usize, usize, Layout) {
    let rows = draw.pick(&[1, 0, 2, 7, 16, 33, 61, 129]);
    let experts = draw.pick(&[8, 1, 2, 12, 16, 60, 64, 128]);
    let slots = draw.pick(&[2, 1, 3, 4, 8]).min(experts);
    (rows, experts, slots, drawn_layout(draw, rows))
}

/// The layout of a further tensor: the same extent, at another offset.
pub(super) fn other(layout: Layout, gap: usize) -> Layout {
    Layout { gap: if layout.gap > 0 { gap } else { 0 }, offset: layout.offset + 1, ..layout }
}

/// The values of the first rows, those within the extent.
fn real<T>(values: &[T], layout: Layout, rows: usize) -> &[T] {
    &values[..values.len() / rows.max(1) * layout.real_rows(rows)]
}

/// A router of a family of models, or one that has an attribute to itself.
#[derive(Clone, Copy)]
struct Router {
    name: &'static str,
    score: RouterScore,
    norm: RouterNorm,
    /// The number of groups, where the number of experts and of slots permits it.
    groups: u32,
    group_score: GroupScore,
    bias: bool,
    selection_bias: bool,
    expert_scale: bool,
    ids: bool,
    scale: f32,
}

const ROUTER: Router = Router {
    name: "softmax",
    score: RouterScore::Softmax,
    norm: RouterNorm::None,
    groups: 1,
    group_score: GroupScore::Max,
    bias: false,
    selection_bias: false,
    expert_scale: false,
    ids: false,
    scale: 1.0,
};

const ROUTERS: &[Router] = &[
    ROUTER,
    Router { name: "renormalised", norm: RouterNorm::Sum, ..ROUTER },
    Router { name: "selected", score: RouterScore::SoftmaxOfSelected, bias: true, ..ROUTER },
    Router { name: "sigmoid", score: RouterScore::Sigmoid, expert_scale: true, ..ROUTER },
    Router { name: "groups_max", groups: 4, scale: 16.0, ..ROUTER },
    Router {
        name: "groups_sum",
        score: RouterScore::Sigmoid,
        norm: RouterNorm::Sum,
        groups: 4,
        group_score: GroupScore::TopTwoSum,
        selection_bias: true,
        scale: 2.5,
        ..ROUTER
    },
    Router { name: "clamped", norm: RouterNorm::ClampedSum, selection_bias: true, ..ROUTER },
    Router { name: "sparse_mixer", score: RouterScore::SparseMixer, ..ROUTER },
    Router { name: "ids", norm: RouterNorm::Sum, ids: true, ..ROUTER },
    Router { name: "ids_selected", score: RouterScore::SoftmaxOfSelected, ids: true, ..ROUTER },
];

/// The least difference that may decide between experts or groups: far above the rounding of f32.
const MARGIN: f64 = 1e-4;

pub(super) fn route(dtype: DType) -> Vec<Case> {
    let case = |router: &Router, (label, rows, experts, slots, layout): &Shape| {
        let id = format!("moe_route_{}/{dtype}/{label}", router.name);
        let shape = (*rows, *experts, *slots, *layout);
        route_case(dtype, id.clone(), Random::named(&id), *router, shape, Logits::Usual)
    };
    // What wins ties and what is near 0 is exact only where experts are chosen by their logits.
    let by_logit = |router: &&Router| ["softmax", "selected", "sigmoid"].contains(&router.name);
    let special = |router: &Router, (label, logits): (&str, Logits)| {
        let id = format!("moe_route_{}/{dtype}/{label}", router.name);
        route_case(dtype, id.clone(), Random::named(&id), *router, (19, 24, 4, PLAIN), logits)
    };
    let kinds = [
        ("special_zeros", Logits::Of(Values::Zeros)),
        ("special_subnormals", Logits::Of(Values::Subnormal)),
        ("special_vectors", Logits::UnderSpecialVectors),
    ];
    let special = ROUTERS
        .iter()
        .filter(by_logit)
        .flat_map(|router| kinds.into_iter().map(move |kind| special(router, kind)));
    let usual = ROUTERS.iter().flat_map(|router| SHAPES.iter().map(move |shape| case(router, shape)));
    usual.chain(special).collect()
}

/// The logits of a router's case, and the vectors beside them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Logits {
    /// Normal ones, with ties, and rows in which no choice is sound.
    Usual,
    /// All of a distribution.
    Of(Values),
    /// Normal ones, beside a bias that is minus infinity for some experts, and factors of 0, infinity and NaN.
    UnderSpecialVectors,
}

pub(super) fn drawn_route(dtype: DType, draw: &mut Draw) -> Case {
    let router = draw.pick(ROUTERS);
    let shape = drawn_shape(draw);
    route_case(dtype, draw.id(), draw.values(), router, shape, Logits::Usual)
}

fn route_case(
    dtype: DType,
    id: String,
    mut random: Random,
    router: Router,
    (rows, experts, slots, layout): (usize, usize, usize, Layout),
    kind: Logits,
) -> Case {
    let grouped = experts.is_multiple_of(router.groups as usize) && 2 * slots <= experts;
    let groups = if grouped { router.groups } else { 1 };
    let op = MoeRoute {
        top_k: slots as u32,
        score: router.score,
        groups,
        top_groups: groups.div_ceil(2),
        group_score: router.group_score,
        norm: router.norm,
        eps: if router.norm == RouterNorm::ClampedSum { 0.25 } else { 1e-20 },
        scale: router.scale,
        threshold: if router.score == RouterScore::SparseMixer { 0.5 } else { 0.0 },
    };
    let vector = |random: &mut Random, there: bool| {
        there.then(|| random.tensor(DType::F32, &[experts], Values::Uniform))
    };
    let mut bias = vector(&mut random, router.bias);
    let selection_bias = vector(&mut random, router.selection_bias);
    let mut expert_scale = vector(&mut random, router.expert_scale);
    if kind == Logits::UnderSpecialVectors {
        let infinity = f32::INFINITY.to_bits();
        // Experts that can never be chosen.
        bias.iter_mut()
            .for_each(|bias| bias.bits.iter_mut().step_by(3).for_each(|bits| *bits = infinity | 1 << 31));
        if let Some(scale) = &mut expert_scale {
            let all = [0, infinity, f32::NAN.to_bits(), infinity | 1 << 31];
            scale.bits.iter_mut().step_by(4).zip(all).for_each(|(bits, special)| *bits = special);
        }
    }
    let [biases, selection_biases, scales] =
        [&bias, &selection_bias, &expert_scale].map(|vector| vector.as_ref().map(Tensor::values));
    let vectors = RouterVectors {
        bias: biases.as_deref(),
        selection_bias: selection_biases.as_deref(),
        expert_scale: scales.as_deref(),
    };
    let ids: Option<Vec<i32>> =
        router.ids.then(|| (0..rows).flat_map(|_| slots_of(&mut random, experts, slots)).collect());
    // Only the order of logits is exact: ties elsewhere may be decided either way.
    let ties = !router.selection_bias && groups == 1 && router.score != RouterScore::SparseMixer;
    let (mut logits, mut chosen, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..rows {
        let own = ids.as_ref().map(|ids| &ids[row * slots..][..slots]);
        let (values, routed) = loop {
            let mut values = match kind {
                // All of those that are subnormal are so, and decide.
                Logits::Of(Values::Subnormal) => random.scaled(dtype, &[experts], Values::Subnormal, 0.2),
                Logits::Of(kind) => random.tensor(dtype, &[experts], kind),
                _ => random.scaled(dtype, &[experts], Values::Uniform, 6.0),
            }
            .values();
            match row % 5 {
                _ if kind != Logits::Usual => {}
                // Half of the experts tie with the other half.
                1 if ties => {
                    (0..experts / 2).for_each(|expert| values[experts - 1 - expert] = values[expert])
                }
                2 if ties => {
                    let first = values[0];
                    values.fill(first);
                }
                3 if row % 15 == 3 && experts > 1 => {
                    values[random.below(experts)] = random.pick(&[f64::NAN, f64::INFINITY]);
                }
                3 if row % 15 == 8 => values.fill(f64::NEG_INFINITY),
                4 if ties && experts > slots && own.is_none() => {
                    values[random.below(experts)] = f64::NEG_INFINITY;
                }
                _ => {}
            }
            let routed = moe::route(&op, &values, vectors, own);
            if routed.margin > MARGIN {
                break (values, routed);
            }
        };
        logits.extend(values);
        chosen.extend(routed.experts);
        weights.extend(routed.weights);
    }
    let tables = other(layout, 3);
    let results = vec![
        Expected::integers(&chosen).laid(tables, slots),
        Expected::reals(weights).gated(EXPONENTIAL).laid(other(layout, 1), slots),
    ];
    let operands = vec![
        Operand::laid(Tensor::floats(dtype, &[rows, experts], &logits), layout),
        bias.and_then(Operand::tensor),
        selection_bias.and_then(Operand::tensor),
        expert_scale.and_then(Operand::tensor),
        ids.and_then(|ids| Operand::laid(Tensor::integers(&[rows, slots], &ids), tables)),
    ];
    Case::new(id, CallCase::new(op, operands, results))
}

/// Experts of a token, none of them twice; now and then a slot is skipped.
fn slots_of(random: &mut Random, experts: usize, slots: usize) -> Vec<i32> {
    let mut order = random.shuffled(experts);
    order.truncate(slots);
    order.into_iter().map(|expert| if random.chance(0.1) { -1 } else { expert as i32 }).collect()
}

/// The experts of a device, and the assignments of tokens to them and to others.
struct Assignments {
    rows: usize,
    slots: usize,
    layout: Layout,
    /// The number of experts of the device, and the first of them.
    experts: [u32; 2],
    table: Vec<i32>,
}

impl Assignments {
    fn new(random: &mut Random, (rows, experts, slots, layout): (usize, usize, usize, Layout)) -> Self {
        let (count, first) = match experts {
            // The device has some of the experts.
            4.. if random.chance(0.5) => (experts / 2, experts / 4),
            _ => (experts, 0),
        };
        let row = |random: &mut Random| match random.below(8) {
            0 => vec![-1; slots],
            1 => vec![(first + count - 1) as i32; slots],
            _ => slots_of(random, experts, slots),
        };
        let table = (0..rows).flat_map(|_| row(random)).collect();
        Self { rows, slots, layout, experts: [count as u32, first as u32], table }
    }

    fn operand(&self) -> Option<Operand> {
        Operand::laid(Tensor::integers(&[self.rows, self.slots], &self.table), other(self.layout, 3))
    }

    /// The tables of `moe_group` for the rows within the extent: `order`, filled up to all rows, and `starts`.
    fn grouped(&self) -> (Vec<i32>, Vec<i32>) {
        let [count, first] = self.experts;
        let (mut order, starts) = moe::group(real(&self.table, self.layout, self.rows), count, first);
        order.resize(self.table.len(), -1);
        (order, starts)
    }
}

/// The cases of the shapes of an op.
fn of_shapes(name: &str, dtype: DType, case: impl Fn(String, Random, Assignments) -> Case) -> Vec<Case> {
    let of = |(label, rows, experts, slots, layout): &Shape| {
        let id = format!("{name}/{dtype}/{label}");
        if !is_wanted(&id) {
            return None;
        }
        let mut random = Random::named(&id);
        let assignments = Assignments::new(&mut random, (*rows, *experts, *slots, *layout));
        Some(case(id, random, assignments))
    };
    SHAPES.iter().filter_map(of).collect()
}

/// Cases of special values: their labels and distributions. With few NaN, the rows of an expert beside that with NaN are right.
const SPECIAL: &[(&str, Values)] = &[
    ("special_rare", Values::Rare),
    ("special_zeros", Values::Zeros),
    ("special_subnormals", Values::Subnormal),
];

fn special_assignments(id: &str) -> (Random, Assignments) {
    let mut random = Random::named(id);
    let assignments = Assignments::new(&mut random, (41, 6, 2, layout(5, false, None)));
    (random, assignments)
}

fn drawn_assignments(draw: &mut Draw) -> (Random, Assignments) {
    let shape = drawn_shape(draw);
    let mut random = draw.values();
    let assignments = Assignments::new(&mut random, shape);
    (random, assignments)
}

pub(super) fn group(dtype: DType) -> Vec<Case> {
    of_shapes("moe_group", dtype, |id, _, assignments| group_case(id, &assignments))
}

pub(super) fn drawn_group(_: DType, draw: &mut Draw) -> Case {
    let (_, assignments) = drawn_assignments(draw);
    group_case(draw.id(), &assignments)
}

fn group_case(id: String, assignments: &Assignments) -> Case {
    let ([count, first_expert], (order, starts)) = (assignments.experts, assignments.grouped());
    let results = vec![
        Expected::integers(&order).laid(assignments.layout, assignments.slots),
        Expected::integers(&starts),
    ];
    Case::new(id, CallCase::new(MoeGroup { count, first_expert }, vec![assignments.operand()], results))
}

/// The formats of expert weights, and the part of a name that stands for each.
pub(super) fn formats(dtype: DType) -> Vec<WeightFormat> {
    let blocks = [BlockFormat::Q4_0, BlockFormat::Q8_0, BlockFormat::Q4_K, BlockFormat::Mxfp4];
    let groups = ["int8", "int4g32_f16", "int4g128z_f16"].into_iter().filter_map(WeightFormat::from_name);
    [WeightFormat::Dense(dtype)].into_iter().chain(blocks.map(WeightFormat::Block)).chain(groups).collect()
}

/// The number of inputs and outputs of an expert, whether slots have rows of their own, a bias, and the tables.
struct Experts {
    format: WeightFormat,
    inputs: usize,
    outputs: usize,
    per_slot: bool,
    bias: bool,
    tables: bool,
    values: Values,
}

pub(super) fn grouped_linear(dtype: DType) -> Vec<Case> {
    let of = |format: WeightFormat| {
        let name = format!("grouped_linear_{format}");
        of_shapes(&name, dtype, |id, mut random, assignments| {
            let [per_slot, bias, tables] = [(); 3].map(|()| random.chance(0.5));
            let (inputs, outputs) = (random.pick(&[32, 64, 96]), random.pick(&[1, 7, 16, 33]));
            grouped_case(
                dtype,
                id,
                random,
                &assignments,
                &Experts { format, inputs, outputs, per_slot, bias, tables, values: Values::HeavyTailed },
            )
        })
    };
    let special = SPECIAL.iter().map(|(label, values)| {
        let format = WeightFormat::Dense(dtype);
        let id = format!("grouped_linear_{format}/{dtype}/{label}");
        let (random, assignments) = special_assignments(&id);
        let experts = Experts {
            format,
            inputs: 64,
            outputs: 19,
            per_slot: *values == Values::Rare,
            bias: true,
            tables: *values != Values::Zeros,
            values: *values,
        };
        grouped_case(dtype, id, random, &assignments, &experts)
    });
    formats(dtype).into_iter().flat_map(of).chain(special).collect()
}

pub(super) fn drawn_grouped_linear(dtype: DType, draw: &mut Draw) -> Case {
    let experts = Experts {
        format: draw.pick(&formats(dtype)),
        inputs: draw.pick(&[32, 1, 7, 64, 129, 256]),
        outputs: draw.pick(&[8, 1, 7, 16, 33, 64]),
        per_slot: draw.sometimes(),
        bias: draw.sometimes(),
        tables: draw.sometimes(),
        values: Values::HeavyTailed,
    };
    let (random, assignments) = drawn_assignments(draw);
    grouped_case(dtype, draw.id(), random, &assignments, &experts)
}

fn grouped_case(
    dtype: DType,
    id: String,
    mut random: Random,
    assignments: &Assignments,
    experts: &Experts,
) -> Case {
    let Assignments { rows, slots, layout, experts: [count, first_expert], ref table } = *assignments;
    let (inputs, outputs) = (columns_of(experts.format, experts.inputs), experts.outputs);
    let width = if experts.per_slot { slots * inputs } else { inputs };
    let x = random.tensor(dtype, &[rows, width], experts.values);
    let all = count as usize * outputs;
    let size = 1.0 / (inputs as f64).sqrt();
    let (weight, elements) = random_weight(&mut random, experts.format, [all, inputs], size);
    let bias = experts.bias.then(|| random.tensor(dtype, &[all], Values::HeavyTailed));
    let (values, biases) = (x.values(), bias.as_ref().map(Tensor::values));
    let slot = |(assignment, expert): (usize, &i32)| {
        let row = if width == inputs { assignment / slots } else { assignment };
        let x = &values[row * inputs..][..inputs];
        match moe::expert_linear(x, &elements, biases.as_deref(), *expert, assignments.experts) {
            Some(reals) => reals.into_iter().map(Element::Real).collect(),
            None => vec![Element::Untouched; outputs],
        }
    };
    let gate = Gate { inner: experts.format.is_quantised().then_some(dtype), exponential: false };
    let expected = Expected::new(table.iter().enumerate().flat_map(slot).collect());
    let expected = expected.gated(gate).laid(other(layout, 5), slots * outputs);
    let (order, starts) = assignments.grouped();
    let order = Operand::laid(Tensor::integers(&[rows, slots], &order), other(layout, 1));
    let operands = vec![
        Operand::laid(x, layout),
        Operand::weight(weight),
        assignments.operand(),
        bias.and_then(Operand::tensor),
        order.filter(|_| experts.tables),
        Operand::tensor(Tensor::vector(&starts)).filter(|_| experts.tables),
    ];
    let op = GroupedLinear { dtype: random.pick(&[dtype, DType::F32]), count, first_expert };
    Case::new(id, CallCase::new(op, operands, vec![expected]))
}

pub(super) fn combine(dtype: DType) -> Vec<Case> {
    let usual = of_shapes("moe_combine", dtype, |id, mut random, assignments| {
        let features = random.pick(&[1, 16, 33, 257]);
        combine_case(dtype, id, random, &assignments, features, Values::HeavyTailed)
    });
    let special = SPECIAL.iter().map(|(label, values)| {
        let id = format!("moe_combine/{dtype}/{label}");
        let (random, assignments) = special_assignments(&id);
        combine_case(dtype, id, random, &assignments, 45, *values)
    });
    usual.into_iter().chain(special).collect()
}

pub(super) fn drawn_combine(dtype: DType, draw: &mut Draw) -> Case {
    let features = draw.pick(&[32, 1, 7, 64, 129, 1023]);
    let (random, assignments) = drawn_assignments(draw);
    combine_case(dtype, draw.id(), random, &assignments, features, Values::HeavyTailed)
}

fn combine_case(
    dtype: DType,
    id: String,
    mut random: Random,
    assignments: &Assignments,
    features: usize,
    values: Values,
) -> Case {
    let Assignments { rows, slots, layout, experts: [count, first_expert], ref table } = *assignments;
    let mut x = random.tensor(dtype, &[rows, slots * features], values);
    let mut weights = random.tensor(DType::F32, &[rows, slots], Values::Uniform);
    if values == Values::Rare {
        // A router that goes wrong gives all slots of a token the weight NaN.
        weights.bits[..slots].fill(f32::NAN.to_bits());
    }
    let (values, factors) = (x.values(), weights.values());
    let row = |row: usize| {
        let [own, first] = [slots, slots * features].map(|width| row * width);
        let x = &values[first..][..slots * features];
        moe::combine(x, &factors[own..][..slots], &table[own..][..slots], assignments.experts)
    };
    let expected = Expected::reals((0..rows).flat_map(row)).laid(other(layout, 5), features);
    // What a skipped slot holds must not show: here it is all ones, which is NaN. Its weight may be anything, too.
    let owned = i64::from(first_expert)..i64::from(first_expert) + i64::from(count);
    for ((slot, weight), expert) in x.bits.chunks_mut(features).zip(&mut weights.bits).zip(table) {
        if !owned.contains(&i64::from(*expert)) {
            slot.fill(u32::MAX >> (32 - 8 * dtype.bytes()));
            *weight = f32::NAN.to_bits();
        }
    }
    let operands =
        vec![Operand::laid(x, layout), Operand::laid(weights, other(layout, 1)), assignments.operand()];
    Case::new(id, CallCase::new(MoeCombine { count, first_expert }, operands, vec![expected]))
}
