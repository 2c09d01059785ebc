//! Mixture of experts.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, floats, optional_vector, rows, store, store_slots},
    weight::Weight,
};
use candle_core::{D, DType, Tensor};
use dsrun_core::{
    kernels::PackedWeight,
    op::{GroupScore, GroupedLinear, MoeCombine, MoeGroup, MoeRoute, RouterNorm, RouterScore},
};
use dsrun_host::Frame;

/// The softmax of each row.
fn softmax(z: &Tensor) -> Result<Tensor> {
    let shares = z.broadcast_sub(&z.max_keepdim(D::Minus1)?)?.exp()?;
    Ok(shares.broadcast_div(&shares.sum_keepdim(D::Minus1)?)?)
}

/// The indices of the `count` largest of `places`, in descending order; the lower index wins ties.
fn largest(keys: &[f32], mut places: Vec<usize>, count: usize) -> Vec<usize> {
    // The sort is stable.
    places.sort_by(|a, b| keys[*b].partial_cmp(&keys[*a]).unwrap_or(std::cmp::Ordering::Equal));
    places.truncate(count);
    places
}

/// The experts of a token, by the keys of all experts.
fn chosen(op: &MoeRoute, keys: &[f32]) -> Vec<usize> {
    let size = keys.len() / op.groups as usize;
    let group_score = |group: &[f32]| {
        let best = largest(group, (0..size).collect(), 2);
        match (op.group_score, &best[..]) {
            (GroupScore::TopTwoSum, [first, second]) => group[*first] + group[*second],
            (_, best) => best.first().map_or(f32::NEG_INFINITY, |first| group[*first]),
        }
    };
    let groups: Vec<f32> = keys.chunks_exact(size).map(group_score).collect();
    let best = largest(&groups, (0..groups.len()).collect(), op.top_groups as usize);
    let candidates = (0..keys.len()).filter(|expert| best.contains(&(expert / size))).collect();
    largest(keys, candidates, op.top_k as usize)
}

/// The experts of a token and their weights before any divisor, by the rule of `sparse_mixer`.
fn sparse_mixer(op: &MoeRoute, z: &[f32]) -> Result<(Vec<i32>, Vec<f32>)> {
    let (mut left, mut experts, mut weights) = ((0..z.len()).collect::<Vec<_>>(), Vec::new(), Vec::new());
    for _ in 0..op.top_k {
        let expert = largest(z, left.clone(), 1)[0];
        let top = z[expert];
        // z_max - z_e <= threshold * max(|z_e|, z_max)
        let is_near = |e: usize| e == expert || top - z[e] <= op.threshold * z[e].abs().max(top);
        let near: Vec<usize> = left.iter().copied().filter(|e| is_near(*e)).collect();
        left.retain(|e| *e != expert);
        let shares = softmax(&Tensor::from_iter(near.iter().map(|e| z[*e]), CPU)?)?.to_vec1::<f32>()?;
        weights.extend(near.iter().zip(shares).find(|(e, _)| **e == expert).map(|(_, share)| share));
        experts.push(expert as i32);
    }
    Ok((experts, weights))
}

impl Kernel for MoeRoute {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, if frame.has(4) { &[0, 4] } else { &[0] }, &[0, 1]);
        if rows == 0 {
            return Ok(());
        }
        let mut z = floats(frame, 0, rows)?;
        if let Some(bias) = optional_vector(frame, 1)? {
            z = z.broadcast_add(&bias)?;
        }
        let scores = match self.score {
            RouterScore::Softmax => softmax(&z)?,
            RouterScore::Sigmoid => (z.neg()?.exp()? + 1.0)?.recip()?,
            RouterScore::SoftmaxOfSelected | RouterScore::SparseMixer => z.clone(),
        };
        let selection_bias = optional_vector(frame, 2)?;
        let keys = match &selection_bias {
            Some(bias) => scores.broadcast_add(bias)?,
            // The order of scores is that of logits, some of which may have equal scores.
            None if self.groups == 1 => z.clone(),
            None => scores.clone(),
        };
        let expert_scale = optional_vector(frame, 3)?.map(|scale| scale.to_vec1::<f32>()).transpose()?;
        let ids = frame.has(4).then(|| frame.input::<i32>(4)).transpose()?;
        let (mut all_experts, mut all_weights) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let z = z.get(row)?.to_vec1::<f32>()?;
            let unsound = z.iter().any(|z| z.is_nan() || *z == f32::INFINITY)
                || z.iter().all(|z| *z == f32::NEG_INFINITY);
            let (experts, weights) = match &ids {
                _ if unsound => {
                    let first = (0..self.top_k as i32).collect();
                    let experts: Vec<i32> = ids.as_ref().map_or(first, |ids| ids.row(row).to_vec());
                    let weights = vec![f32::NAN; experts.len()];
                    (experts, weights)
                }
                None if self.score == RouterScore::SparseMixer => sparse_mixer(self, &z)?,
                _ => {
                    let keys = keys.get(row)?.to_vec1::<f32>()?;
                    let experts: Vec<i32> = match &ids {
                        Some(ids) => ids.row(row).to_vec(),
                        None => chosen(self, &keys).into_iter().map(|expert| expert as i32).collect(),
                    };
                    let scores = scores.get(row)?.to_vec1::<f32>()?;
                    let not_skipped = experts.iter().filter_map(|id| place(*id, z.len() as u32, 0));
                    let own: Vec<f32> = not_skipped.map(|expert| scores[expert]).collect();
                    let own = match self.score {
                        RouterScore::SoftmaxOfSelected if !own.is_empty() => {
                            softmax(&Tensor::new(own, CPU)?)?.to_vec1::<f32>()?
                        }
                        _ => own,
                    };
                    let mut own = own.into_iter();
                    let weight = |id: &i32| place(*id, z.len() as u32, 0).and_then(|_| own.next());
                    let weights = experts.iter().map(weight).map(Option::unwrap_or_default).collect();
                    (experts, weights)
                }
            };
            let sum: f32 = weights.iter().sum();
            let divisor = match self.norm {
                RouterNorm::None => 1.0,
                RouterNorm::Sum => sum + self.eps,
                RouterNorm::ClampedSum => sum.max(self.eps),
            };
            // w / divisor * scale * expert_scale
            let finished = |(id, weight): (&i32, f32)| match place(*id, z.len() as u32, 0) {
                Some(expert) => {
                    weight / divisor * self.scale * expert_scale.as_ref().map_or(1.0, |scale| scale[expert])
                }
                None => 0.0,
            };
            all_weights.extend(experts.iter().zip(weights).map(finished));
            all_experts.extend(experts.into_iter().map(i64::from));
        }
        let shape = (rows, self.top_k as usize);
        store(frame, 0, &Tensor::from_vec(all_experts, shape, CPU)?)?;
        store(frame, 1, &Tensor::from_vec(all_weights, shape, CPU)?)
    }
}

/// The place of an expert among the `count` of a device from `first` on.
fn place(expert: i32, count: u32, first: u32) -> Option<usize> {
    let place = u32::try_from(expert).ok()?.checked_sub(first)?;
    (place < count).then_some(place as usize)
}

/// The assignments `row * slots + slot` to each of the experts of a device.
fn assignments(
    frame: &Frame<'_>,
    operand: usize,
    rows: usize,
    [count, first]: [u32; 2],
) -> Result<Vec<Vec<usize>>> {
    let experts = frame.input::<i32>(operand)?;
    let mut of_expert = vec![Vec::new(); count as usize];
    for row in 0..rows {
        for (slot, expert) in experts.row(row).iter().enumerate() {
            if let Some(place) = place(*expert, count, first) {
                of_expert[place].push(row * experts.width() + slot);
            }
        }
    }
    Ok(of_expert)
}

impl Kernel for MoeGroup {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0], &[0]);
        let slots = frame.input::<i32>(0)?.width();
        let groups = assignments(frame, 0, rows, [self.count, self.first_expert])?;
        let (mut order, mut starts) = (Vec::new(), vec![0]);
        for group in groups {
            order.extend(group.into_iter().map(|assignment| assignment as i64));
            starts.push(order.len() as i64);
        }
        order.resize(rows * slots, -1);
        store(frame, 0, &Tensor::from_vec(order, (rows, slots), CPU)?)?;
        store(frame, 1, &Tensor::new(starts, CPU)?)
    }
}

impl Kernel for GroupedLinear {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0, 2], &[0]);
        let slots = frame.input::<i32>(2)?.width();
        let weight: &Weight = frame.weight(1)?;
        let (inputs, count) = (weight.weight_type().columns(), self.count as usize);
        let outputs = weight.weight_type().rows() / count;
        let x = floats(frame, 0, rows)?;
        // One row for each slot.
        let x = match x.dim(1)? == inputs {
            true => x.unsqueeze(1)?.repeat((1, slots, 1))?,
            false => x,
        };
        let x = x.reshape((rows * slots, inputs))?;
        let bias = optional_vector(frame, 3)?;
        let (mut places, mut results) = (Vec::new(), Vec::new());
        let groups = assignments(frame, 2, rows, [self.count, self.first_expert])?;
        for (expert, assignments) in groups.into_iter().enumerate().filter(|(_, group)| !group.is_empty()) {
            let first = expert * outputs;
            let indices = Tensor::from_iter(assignments.iter().map(|assignment| *assignment as u32), CPU)?;
            // y[t, j, n] = sum_k x[t, j, k] * weight[e, n, k] + bias[e, n]
            let own = Tensor::arange(first as u32, (first + outputs) as u32, CPU)?;
            let mut y = x.index_select(&indices, 0)?.matmul(&weight.rows(&own)?.t()?)?;
            if let Some(bias) = &bias {
                y = y.broadcast_add(&bias.narrow(0, first, outputs)?)?;
            }
            places.extend(assignments.iter().map(|place| (place / slots, place % slots * outputs)));
            results.push(y);
        }
        if results.is_empty() {
            return Ok(());
        }
        store_slots(frame, 0, &places, &Tensor::cat(&results, 0)?)
    }
}

impl Kernel for MoeCombine {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0, 1, 2], &[0]);
        let (x, weights, experts) =
            (floats(frame, 0, rows)?, floats(frame, 1, rows)?, frame.input::<i32>(2)?);
        let slots = experts.width();
        let x = x.reshape((rows, slots, x.dim(1)? / slots))?;
        let is_own = |expert: &i32| u8::from(place(*expert, self.count, self.first_expert).is_some());
        let own: Vec<u8> = (0..rows).flat_map(|row| experts.row(row).iter().map(is_own)).collect();
        let own = Tensor::from_vec(own, (rows, slots, 1), CPU)?.broadcast_as(x.shape())?;
        // y[t, h] = sum_j weights[t, j] * x[t, j, h], in the order of slots; what skipped slots hold does not count.
        let terms = x.broadcast_mul(&weights.unsqueeze(2)?)?;
        let terms = own.where_cond(&terms, &terms.zeros_like()?)?;
        let mut y = Tensor::zeros((rows, x.dim(2)?), DType::F32, CPU)?;
        for slot in 0..slots {
            y = (y + terms.narrow(1, slot, 1)?.squeeze(1)?)?;
        }
        store(frame, 0, &y)
    }
}
