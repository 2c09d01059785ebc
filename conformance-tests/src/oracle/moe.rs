//! Oracle of `moe_route`, `moe_group`, `grouped_linear` and `moe_combine`.

use super::{Real, float, linear};
use dsrun_core::{
    DType,
    op::{GroupScore, MoeRoute, RouterNorm, RouterScore},
};

/// The vectors that `moe_route` takes beside the logits, each with one number for every expert.
#[derive(Clone, Copy, Debug, Default)]
pub struct RouterVectors<'a> {
    /// A part of the logit.
    pub bias: Option<&'a [f64]>,
    /// A part of the number that experts are chosen by, and of no weight.
    pub selection_bias: Option<&'a [f64]>,
    /// A factor of the weights.
    pub expert_scale: Option<&'a [f64]>,
}

/// The experts of a token.
#[derive(Clone, Debug)]
pub struct Routed {
    /// The experts of the slots.
    pub experts: Vec<i32>,
    /// The weights of the slots.
    pub weights: Vec<Real>,
    /// The smallest difference that decided something other than by the order of logits, which is exact. Backends may decide
    /// otherwise if it is no larger than the rounding of f32.
    pub margin: f64,
}

/// Routes one token. `ids` are experts chosen in advance.
pub fn route(op: &MoeRoute, logits: &[f64], vectors: RouterVectors<'_>, ids: Option<&[i32]>) -> Routed {
    // The sum of a logit and its bias is rounded to f32, and its order is exact.
    let logit = |(expert, logit): (usize, &f64)| {
        float::round(DType::F32, logit + vectors.bias.map_or(0.0, |bias| bias[expert]))
    };
    let z: Vec<f64> = logits.iter().enumerate().map(logit).collect();
    let unsound =
        z.iter().any(|z| z.is_nan() || *z == f64::INFINITY) || z.iter().all(|z| *z == f64::NEG_INFINITY);
    let slots = op.top_k as usize;
    if unsound {
        let experts: Vec<i32> = ids.map_or_else(|| (0..slots as i32).collect(), <[i32]>::to_vec);
        let weight = |expert: &i32| Real::new(if *expert < 0 { 0.0 } else { f64::NAN }, 0.0);
        return Routed { weights: experts.iter().map(weight).collect(), experts, margin: f64::INFINITY };
    }
    if op.score == RouterScore::SparseMixer {
        let (experts, raw, margin) = sparse_mixer(op, &z);
        return Routed { weights: finish(op, &experts, &raw, vectors), experts, margin };
    }
    let scores = match op.score {
        RouterScore::Softmax => softmax(z.iter().copied()),
        RouterScore::Sigmoid => z.iter().map(|z| score(1.0 / (1.0 + (-z).exp()), *z)).collect(),
        RouterScore::SoftmaxOfSelected | RouterScore::SparseMixer => {
            z.iter().map(|z| Real::new(*z, z.abs())).collect()
        }
    };
    let (experts, margin) = match ids {
        Some(ids) => (ids.to_vec(), f64::INFINITY),
        None => {
            // The order of logits stands for that of scores, which may round to equal numbers.
            let by_logit = op.groups == 1 && vectors.selection_bias.is_none();
            let key = |expert: usize| match by_logit {
                true => z[expert],
                false => scores[expert].value + vectors.selection_bias.map_or(0.0, |bias| bias[expert]),
            };
            let (experts, margin) = choose(op, &(0..z.len()).map(key).collect::<Vec<_>>());
            (experts, if by_logit { f64::INFINITY } else { margin })
        }
    };
    let chosen = |expert: &i32| usize::try_from(*expert).ok();
    let raw: Vec<Real> = match op.score {
        RouterScore::SoftmaxOfSelected => {
            let mut shares = softmax(experts.iter().filter_map(chosen).map(|expert| z[expert])).into_iter();
            let share = |expert: &i32| chosen(expert).and_then(|_| shares.next()).unwrap_or_default();
            experts.iter().map(share).collect()
        }
        _ => experts.iter().map(|expert| chosen(expert).map_or(Real::default(), |e| scores[e])).collect(),
    };
    Routed { weights: finish(op, &experts, &raw, vectors), experts, margin }
}

/// A score whose exponential has an argument of this size: the argument's rounding is one of the score.
fn score(value: f64, argument: f64) -> Real {
    let argument = if argument.is_finite() { argument.abs() } else { 0.0 };
    Real::new(value, value * (1.0 + argument))
}

fn softmax(members: impl Iterator<Item = f64> + Clone) -> Vec<Real> {
    let largest = members.clone().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = members.clone().map(|z| (z - largest).exp()).sum();
    members.map(|z| score((z - largest).exp() / sum, z - largest)).collect()
}

/// The indices of the `count` largest keys, in descending order, and the smallest difference that decided.
fn largest(keys: &[(usize, f64)], count: usize) -> (Vec<usize>, f64) {
    let mut order = keys.to_vec();
    // The sort is stable, so the lower index is first among equals.
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    let differences = order.windows(2).take(count).map(|pair| pair[0].1 - pair[1].1);
    let margin = differences.fold(f64::INFINITY, |least, difference| least.min(difference));
    (order.into_iter().take(count).map(|(index, _)| index).collect(), margin)
}

/// The experts with the largest keys in the best groups, and the smallest difference that decided.
fn choose(op: &MoeRoute, keys: &[f64]) -> (Vec<i32>, f64) {
    let size = keys.len() / op.groups as usize;
    let group_score = |group: &[f64]| {
        let mut group = group.to_vec();
        group.sort_by(|a, b| b.total_cmp(a));
        match op.group_score {
            GroupScore::Max => group[0],
            GroupScore::TopTwoSum => group.iter().take(2).sum(),
        }
    };
    let groups: Vec<(usize, f64)> = keys.chunks(size).map(group_score).enumerate().collect();
    let (best, group_margin) = largest(&groups, op.top_groups as usize);
    let candidates: Vec<(usize, f64)> =
        keys.iter().copied().enumerate().filter(|(expert, _)| best.contains(&(expert / size))).collect();
    let (experts, margin) = largest(&candidates, op.top_k as usize);
    let group_margin = if op.top_groups < op.groups { group_margin } else { f64::INFINITY };
    (experts.into_iter().map(|expert| expert as i32).collect(), margin.min(group_margin))
}

/// Experts and shares of `sparse_mixer`, and the smallest distance of a quotient from the threshold.
fn sparse_mixer(op: &MoeRoute, z: &[f64]) -> (Vec<i32>, Vec<Real>, f64) {
    let (mut experts, mut shares, mut margin) = (Vec::new(), Vec::new(), f64::INFINITY);
    let threshold = f64::from(op.threshold);
    for _ in 0..op.top_k {
        let free: Vec<(usize, f64)> = z
            .iter()
            .copied()
            .enumerate()
            .filter(|(expert, _)| !experts.contains(&(*expert as i32)))
            .collect();
        let chosen = largest(&free, 1).0[0];
        let top = z[chosen];
        let mut sum = 0.0;
        for (expert, z) in free {
            let (distance, reach) = (top - z, threshold * z.abs().max(top));
            if expert != chosen && z.is_finite() {
                margin = margin.min((distance - reach).abs());
            }
            if expert == chosen {
                sum += 1.0;
            } else if distance <= reach {
                sum += (z - top).exp();
            }
        }
        experts.push(chosen as i32);
        shares.push(score(1.0 / sum, top));
    }
    (experts, shares, margin)
}

/// `w / divisor * scale * expert_scale`.
fn finish(op: &MoeRoute, experts: &[i32], raw: &[Real], vectors: RouterVectors<'_>) -> Vec<Real> {
    let (sum, eps) = (raw.iter().map(|real| real.value).sum::<f64>(), f64::from(op.eps));
    let divisor = match op.norm {
        RouterNorm::None => 1.0,
        RouterNorm::Sum => sum + eps,
        RouterNorm::ClampedSum => sum.max(eps),
    };
    let of_sum = if op.norm == RouterNorm::None { 0.0 } else { raw.iter().map(|real| real.magnitude).sum() };
    let weight = |(expert, real): (&i32, &Real)| {
        let Ok(expert) = usize::try_from(*expert) else { return Real::default() };
        let factor = f64::from(op.scale) * vectors.expert_scale.map_or(1.0, |scale| scale[expert]) / divisor;
        let value = real.value * factor;
        Real::new(value, (real.magnitude * factor).abs() + (value * of_sum / divisor).abs())
    };
    experts.iter().zip(raw).map(weight).collect()
}

/// The place of an expert among the `count` of a device from `first` on.
fn place(expert: i32, count: u32, first: u32) -> Option<usize> {
    let place = i64::from(expert) - i64::from(first);
    (expert >= 0 && (0..i64::from(count)).contains(&place)).then_some(place as usize)
}

/// The tables of `moe_group`: `order`, as long as `experts`, and `starts`.
pub fn group(experts: &[i32], count: u32, first: u32) -> (Vec<i32>, Vec<i32>) {
    let (mut order, mut starts) = (Vec::new(), vec![0]);
    for wanted in 0..count as usize {
        let own = |(_, expert): &(usize, &i32)| place(**expert, count, first) == Some(wanted);
        order.extend(experts.iter().enumerate().filter(own).map(|(assignment, _)| assignment as i32));
        starts.push(order.len() as i32);
    }
    order.resize(experts.len(), -1);
    (order, starts)
}

/// The outputs of one slot of `grouped_linear`; `None` if it is skipped. `x` is the slot's row.
pub fn expert_linear(
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    expert: i32,
    [count, first]: [u32; 2],
) -> Option<Vec<Real>> {
    let place = place(expert, count, first)?;
    let (inputs, outputs) = (x.len(), weight.len() / x.len() / count as usize);
    let own = &weight[place * outputs * inputs..][..outputs * inputs];
    let bias = bias.map(|bias| &bias[place * outputs..][..outputs]);
    Some(linear::linear(x, own, bias, [1, outputs, inputs]))
}

/// One row of `moe_combine`: `x` holds the slots side by side.
pub fn combine(x: &[f64], weights: &[f64], experts: &[i32], [count, first]: [u32; 2]) -> Vec<Real> {
    let features = x.len() / experts.len();
    let element = |feature: usize| {
        let (mut value, mut magnitude) = (0.0, 0.0);
        for (slot, expert) in experts.iter().enumerate() {
            if place(*expert, count, first).is_some() {
                let term = weights[slot] * x[slot * features + feature];
                value += term;
                magnitude += term.abs();
            }
        }
        Real::sum(value, magnitude, experts.len())
    };
    (0..features).map(element).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTE: MoeRoute = MoeRoute {
        top_k: 2,
        score: RouterScore::Softmax,
        groups: 1,
        top_groups: 1,
        group_score: GroupScore::Max,
        norm: RouterNorm::None,
        eps: 0.0,
        scale: 1.0,
        threshold: 0.0,
    };

    fn assert_routed(routed: &Routed, experts: &[i32], weights: &[f64]) {
        assert_eq!(routed.experts, experts);
        for (found, expected) in routed.weights.iter().zip(weights) {
            assert!((found.value - expected).abs() < 1e-12, "{} is not {expected}", found.value);
        }
    }

    #[test]
    fn softmax_router_by_hand() {
        // The exponentials are 1, 4, 2 and 1.
        let logits = [0.0, 4f64.ln(), 2f64.ln(), 0.0].map(|z| float::round(DType::F32, z));
        let routed = route(&ROUTE, &logits, RouterVectors::default(), None);
        assert_eq!(routed.experts, [1, 2]);
        assert!((routed.weights[0].value - 0.5).abs() < 1e-7);
        let all = MoeRoute { top_k: 4, norm: RouterNorm::Sum, scale: 2.0, ..ROUTE };
        let routed = route(&all, &[0.0; 4], RouterVectors::default(), None);
        assert_routed(&routed, &[0, 1, 2, 3], &[0.5; 4]);
    }

    #[test]
    fn the_selection_bias_chooses_and_does_not_weigh() {
        let op = MoeRoute { score: RouterScore::Sigmoid, norm: RouterNorm::Sum, ..ROUTE };
        let bias = [0.0, 0.0, 1.0, 0.5];
        let vectors = RouterVectors { selection_bias: Some(&bias), ..RouterVectors::default() };
        assert_routed(&route(&op, &[0.0; 4], vectors, None), &[2, 3], &[0.5, 0.5]);
    }

    #[test]
    fn groups_are_ranked_by_their_two_best_experts() {
        let op = MoeRoute {
            score: RouterScore::SoftmaxOfSelected,
            groups: 2,
            group_score: GroupScore::TopTwoSum,
            ..ROUTE
        };
        // The largest logit is in the first group, the larger sum in the second.
        let routed = route(&op, &[5.0, 0.0, 3.0, 3.0], RouterVectors::default(), None);
        assert_routed(&routed, &[2, 3], &[0.5, 0.5]);
        let by_max = MoeRoute { group_score: GroupScore::Max, ..op };
        assert_eq!(route(&by_max, &[5.0, 0.0, 3.0, 3.0], RouterVectors::default(), None).experts, [0, 1]);
    }

    #[test]
    fn sparse_mixer_drops_what_is_far_and_forgets_what_was_chosen() {
        let op = MoeRoute { score: RouterScore::SparseMixer, threshold: 0.5, ..ROUTE };
        // 4 and 4 are near each other, 1 is far; then 4 stands beside 1 alone, which is far.
        assert_routed(&route(&op, &[4.0, 1.0, 4.0], RouterVectors::default(), None), &[0, 2], &[0.5, 1.0]);
    }

    #[test]
    fn unsound_logits_and_skipped_slots() {
        let routed = route(&ROUTE, &[0.0, f64::NAN, 9.0], RouterVectors::default(), None);
        assert_eq!(routed.experts, [0, 1]);
        assert!(routed.weights.iter().all(|weight| weight.value.is_nan()));
        let op = MoeRoute { score: RouterScore::SoftmaxOfSelected, ..ROUTE };
        let routed = route(&op, &[0.0, 1.0, 9.0], RouterVectors::default(), Some(&[-1, 0]));
        assert_routed(&routed, &[-1, 0], &[0.0, 1.0]);
    }

    #[test]
    fn assignments_are_grouped_by_expert_in_ascending_order() {
        let (order, starts) = group(&[5, 4, -1, 5, 9, 4], 3, 4);
        assert_eq!((order, starts), (vec![1, 5, 0, 3, -1, -1], vec![0, 2, 4, 4]));
    }

    #[test]
    fn experts_multiply_and_are_combined_by_hand() {
        // Two experts from 7 on, of one output and two inputs.
        let (weight, bias) = ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0]);
        let y = expert_linear(&[1.0, 1.0], &weight, Some(&bias), 8, [2, 7]).unwrap();
        assert_eq!(y[0].value, 27.0);
        assert!(expert_linear(&[1.0, 1.0], &weight, None, 9, [2, 7]).is_none());
        let y = combine(&[1.0, 2.0, 100.0, 100.0, 3.0, 4.0], &[0.5, 1.0, 2.0], &[7, -1, 8], [2, 7]);
        assert_eq!([y[0].value, y[1].value], [6.5, 9.0]);
        assert_eq!(combine(&[1.0], &[1.0], &[6], [2, 7])[0].value, 0.0);
    }
}
