//! Mixture of experts: the router, the linear layers of experts, and the weighted sum.

use crate::{
    floats::{FloatFrame, FloatOutput, FloatsMut},
    kernel::Kernel,
    ops::linear::{HELD, grow},
    packed::{PackedMatrix, RowRange},
    parallel::{Lane, Worker},
};
use dsrun_core::{
    Result,
    kernels::PackedWeight,
    op::{GroupScore, GroupedLinear, MoeCombine, MoeGroup, MoeRoute, RouterNorm, RouterScore},
};
use dsrun_host::{Frame, Tensor};

impl Kernel for MoeRoute {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let logits = frame.floats(0)?;
        let vector = |index: usize| frame.has(index).then(|| Ok(frame.input::<f32>(index)?.data)).transpose();
        let (bias, selection_bias, expert_scale) = (vector(1)?, vector(2)?, vector(3)?);
        let ids = frame.has(4).then(|| frame.input::<i32>(4)).transpose()?;
        let (mut chosen, mut weights) = (frame.output::<i32>(0)?, frame.output::<f32>(1)?);
        let rows = logits.rows.min(chosen.rows).min(weights.rows);
        let rows = rows.min(ids.as_ref().map_or(rows, |ids| ids.rows));
        let (experts, slots) = (logits.width(), chosen.width());
        // The experts of a row, as bits, and their weights stand side by side until all rows are routed.
        let width = 2 * slots;
        grow(worker.outputs, rows * width);
        let (shape, strides) = ([rows, width], [width, 1]);
        let data = FloatsMut::F32(&mut worker.outputs[..rows * width]);
        let held = Tensor { data, shape: &shape, strides: &strides, rows };
        held.fill_rows(&mut worker.team, rows, 32 * experts / width, |row, out, lane| {
            let [logit, key, free, group, group_free] =
                lane.split([experts, experts, experts, self.groups as usize, self.groups as usize]);
            logits.data.widen(logits.row_start(row), logit);
            if let Some(bias) = bias {
                logit.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias);
            }
            let (out, weights) = out.split_at_mut(slots);
            let routed = Routed { op: self, logit, selection_bias, expert_scale };
            routed.route(ids.as_ref().map(|ids| ids.row(row)), out, weights, [key, free, group, group_free]);
        });
        for (row, held) in worker.outputs.chunks_exact(width).take(rows).enumerate() {
            let (bits, values) = held.split_at(slots);
            for (chosen, bits) in chosen.row_mut(row).iter_mut().zip(bits) {
                *chosen = bits.to_bits() as i32;
            }
            weights.row_mut(row).copy_from_slice(values);
        }
        Ok(())
    }
}

/// A token whose experts are to be chosen.
struct Routed<'a> {
    op: &'a MoeRoute,
    /// The logits of all experts, with the bias.
    logit: &'a [f32],
    selection_bias: Option<&'a [f32]>,
    expert_scale: Option<&'a [f32]>,
}

impl Routed<'_> {
    /// Sets the experts of all slots, as bits, and their weights. `ids` are experts chosen in advance.
    fn route(
        &self,
        ids: Option<&[i32]>,
        experts: &mut [f32],
        weights: &mut [f32],
        [key, free, group, group_free]: [&mut [f32]; 4],
    ) {
        let set = |slot: &mut f32, expert: i32| *slot = f32::from_bits(expert as u32);
        let largest = self.logit.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let unsound = !largest.is_finite() || self.logit.iter().any(|logit| logit.is_nan());
        // What experts are chosen by, and whether they can be. In the end `key` holds scores.
        free.fill(1.0);
        match ids {
            Some(ids) => experts.iter_mut().zip(ids).for_each(|(slot, id)| set(slot, *id)),
            None if unsound => (0..).zip(experts.iter_mut()).for_each(|(index, slot)| set(slot, index)),
            None => {
                if self.op.groups == 1 && self.selection_bias.is_none() {
                    // The order of scores, some of which may round to equal numbers, is that of logits.
                    key.copy_from_slice(self.logit);
                } else {
                    self.score(largest, key);
                }
                if let Some(bias) = self.selection_bias {
                    key.iter_mut().zip(bias).for_each(|(key, bias)| *key += bias);
                }
                self.keep_best_groups(key, free, group, group_free);
                for (slot, weight) in experts.iter_mut().zip(weights.iter_mut()) {
                    let expert = largest_free(key, free);
                    if self.op.score == RouterScore::SparseMixer {
                        *weight = self.share_of_near(expert, free);
                    }
                    free[expert] = 0.0;
                    set(slot, expert as i32);
                }
            }
        }
        let count = self.logit.len();
        let expert_of =
            |slot: &f32| usize::try_from(slot.to_bits() as i32).ok().filter(|expert| *expert < count);
        if unsound {
            for (slot, weight) in experts.iter().zip(weights) {
                *weight = if expert_of(slot).is_some() { f32::NAN } else { 0.0 };
            }
            return;
        }
        match self.op.score {
            RouterScore::Softmax | RouterScore::Sigmoid => {
                self.score(largest, key);
                for (slot, weight) in experts.iter().zip(weights.iter_mut()) {
                    *weight = expert_of(slot).map_or(0.0, |expert| key[expert]);
                }
            }
            RouterScore::SoftmaxOfSelected => {
                let logits = experts.iter().filter_map(|slot| expert_of(slot).map(|e| self.logit[e]));
                let largest = logits.fold(f32::NEG_INFINITY, f32::max);
                let mut sum = 0.0;
                for (slot, weight) in experts.iter().zip(weights.iter_mut()) {
                    *weight = expert_of(slot).map_or(0.0, |expert| (self.logit[expert] - largest).exp());
                    sum += *weight;
                }
                weights.iter_mut().zip(&*experts).for_each(|(weight, slot)| {
                    if expert_of(slot).is_some() {
                        *weight /= sum;
                    }
                });
            }
            RouterScore::SparseMixer => {}
        }
        let sum: f32 = weights.iter().sum();
        let divisor = match self.op.norm {
            RouterNorm::None => 1.0,
            RouterNorm::Sum => sum + self.op.eps,
            RouterNorm::ClampedSum => sum.max(self.op.eps),
        };
        for (slot, weight) in experts.iter().zip(weights) {
            if let Some(expert) = expert_of(slot) {
                *weight =
                    *weight / divisor * self.op.scale * self.expert_scale.map_or(1.0, |all| all[expert]);
            }
        }
    }

    /// The scores of all experts.
    fn score(&self, largest: f32, out: &mut [f32]) {
        match self.op.score {
            RouterScore::Softmax => {
                let mut sum = 0.0;
                for (out, logit) in out.iter_mut().zip(self.logit) {
                    *out = (logit - largest).exp();
                    sum += *out;
                }
                out.iter_mut().for_each(|out| *out /= sum);
            }
            RouterScore::Sigmoid => {
                out.iter_mut().zip(self.logit).for_each(|(out, logit)| *out = 1.0 / (1.0 + (-logit).exp()));
            }
            RouterScore::SoftmaxOfSelected | RouterScore::SparseMixer => out.copy_from_slice(self.logit),
        }
    }

    /// Makes the experts of all but the best groups unavailable.
    fn keep_best_groups(&self, key: &[f32], free: &mut [f32], group: &mut [f32], group_free: &mut [f32]) {
        if self.op.top_groups == self.op.groups {
            return;
        }
        let size = key.len() / group.len();
        for (group, keys) in group.iter_mut().zip(key.chunks_exact(size)) {
            let mut best = [f32::NEG_INFINITY; 2];
            for key in keys {
                if *key > best[0] {
                    best = [*key, best[0]];
                } else if *key > best[1] {
                    best[1] = *key;
                }
            }
            *group = match self.op.group_score {
                GroupScore::TopTwoSum if size > 1 => best[0] + best[1],
                GroupScore::Max | GroupScore::TopTwoSum => best[0],
            };
        }
        group_free.fill(1.0);
        free.fill(0.0);
        for _ in 0..self.op.top_groups {
            let best = largest_free(group, group_free);
            group_free[best] = 0.0;
            free[best * size..][..size].fill(1.0);
        }
    }

    /// The share of an expert in the softmax over the free experts that are near it.
    fn share_of_near(&self, expert: usize, free: &[f32]) -> f32 {
        let top = self.logit[expert];
        let near = |(other, logit): (usize, &f32)| {
            let reach = self.op.threshold * logit.abs().max(top);
            (other == expert || (free[other] > 0.0 && top - logit <= reach)).then_some(*logit)
        };
        let others = self.logit.iter().enumerate().filter_map(near);
        1.0 / others.map(|logit| if logit == top { 1.0 } else { (logit - top).exp() }).sum::<f32>()
    }
}

/// The free place with the largest key, the first of equals; place 0 if none is free.
fn largest_free(keys: &[f32], free: &[f32]) -> usize {
    let mut best: Option<usize> = None;
    for (place, key) in keys.iter().enumerate() {
        if free[place] > 0.0 && best.is_none_or(|best| *key > keys[best]) {
            best = Some(place);
        }
    }
    best.unwrap_or(0)
}

/// The place of an expert among the `count` of a device from `first` on.
fn place(expert: i32, count: u32, first: u32) -> Option<usize> {
    let place = u32::try_from(expert).ok()?.checked_sub(first)?;
    (place < count).then_some(place as usize)
}

/// Groups the assignments of the first `rows` rows by expert, in ascending order for each: the order, and where each expert
/// starts in it.
fn grouped<'s>(
    experts: &Tensor<'_, &[i32]>,
    rows: usize,
    count: u32,
    first: u32,
    scratch: &'s mut Vec<u32>,
) -> (&'s [u32], &'s [u32]) {
    let slots = experts.width();
    scratch.clear();
    scratch.resize(count as usize + 1 + rows * slots, 0);
    let (starts, order) = scratch.split_at_mut(count as usize + 1);
    let places = || {
        let row = |row: usize| experts.row(row).iter().map(|expert| place(*expert, count, first));
        (0..rows)
            .flat_map(row)
            .zip(0..)
            .filter_map(|(place, assignment): (_, u32)| Some((place?, assignment)))
    };
    // Counts, then the sums of counts before, then where the next assignment goes: the end of the expert before it.
    places().for_each(|(place, _)| starts[place] += 1);
    let mut before = 0;
    for start in starts.iter_mut() {
        before += std::mem::replace(start, before);
    }
    for (place, assignment) in places() {
        order[starts[place] as usize] = assignment;
        starts[place] += 1;
    }
    starts.rotate_right(1);
    let all = std::mem::replace(&mut starts[0], 0) as usize;
    (&order[..all], starts)
}

impl Kernel for MoeGroup {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let experts = frame.input::<i32>(0)?;
        let (mut order, mut starts) = (frame.output::<i32>(0)?, frame.output::<i32>(1)?);
        let rows = experts.rows.min(order.rows);
        let tables = grouped(&experts, rows, self.count, self.first_expert, worker.owners);
        let mut assignments = tables.0.iter();
        for row in 0..rows {
            order.row_mut(row).fill_with(|| assignments.next().map_or(-1, |assignment| *assignment as i32));
        }
        for (index, start) in tables.1.iter().enumerate().take(starts.rows) {
            *starts.at_mut(index) = *start as i32;
        }
        Ok(())
    }
}

impl Kernel for GroupedLinear {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, weight) = (frame.floats(0)?, frame.weight::<PackedMatrix>(1)?);
        let (experts, bias) = (frame.input::<i32>(2)?, frame.optional_floats(3)?);
        let mut y = frame.floats_mut(0)?;
        let rows = x.rows.min(experts.rows).min(y.rows);
        let (slots, inputs) = (experts.width(), weight.weight_type().columns());
        let outputs = y.width() / slots;
        if outputs == 0 {
            return Ok(());
        }
        let per_slot = x.width() != inputs;
        // Counting is cheaper than to check tables of others.
        let (order, starts) = grouped(&experts, rows, self.count, self.first_expert, worker.owners);
        let range_of = |expert: usize| expert * outputs..(expert + 1) * outputs;
        let padded = weight.padded_inputs();
        let widest = (0..self.count as usize).map(|expert| weight.covered(&range_of(expert)).len()).max();
        let widest = widest.unwrap_or(outputs);
        let at_once = (HELD / padded.saturating_add(widest).max(1)).max(16).min(order.len());
        for (chunk, assignments) in order.chunks(at_once.max(1)).enumerate() {
            let (first, count) = (chunk * at_once, assignments.len());
            grow(worker.inputs, count * padded);
            grow(worker.outputs, count * widest);
            let (shape, strides) = ([count, padded], [padded, 1]);
            let data = FloatsMut::F32(&mut worker.inputs[..count * padded]);
            let held = Tensor { data, shape: &shape, strides: &strides, rows: count };
            held.fill_rows(&mut worker.team, count, 2, |index, out, _: &mut Lane| {
                let (token, slot) =
                    (assignments[index] as usize / slots, assignments[index] as usize % slots);
                let start = x.row_start(token) + if per_slot { slot * inputs } else { 0 };
                x.data.widen(start, &mut out[..inputs]);
                out[inputs..].fill(0.0);
            });
            // The experts of this chunk, and how many of its assignments are theirs.
            let runs = (0..self.count as usize).filter_map(|expert| {
                let [start, end] =
                    [0, 1].map(|end| (starts[expert + end] as usize).clamp(first, first + count));
                (start < end).then_some((expert, end - start))
            });
            let (mut ranges, mut xs) = (Vec::new(), &worker.inputs[..count * padded]);
            let mut outs = &mut worker.outputs[..count * widest];
            for (expert, length) in runs.clone() {
                let covered = weight.covered(&range_of(expert)).len();
                let (x, other_xs) = xs.split_at(length * padded);
                let (out, other_outs) = std::mem::take(&mut outs).split_at_mut(length * widest);
                ranges.push(RowRange { rows: range_of(expert), x, out: &mut out[..length * covered] });
                (xs, outs) = (other_xs, other_outs);
            }
            weight.multiply_ranges(ranges, worker.team.pool)?;
            let (mut assignments, mut outs) = (assignments.iter(), &mut worker.outputs[..count * widest]);
            let [biases] = worker.team.lane().split([outputs]);
            for (expert, length) in runs {
                let (range, covered) = (range_of(expert), weight.covered(&range_of(expert)));
                let bias = bias.as_ref().map(|bias| bias.data.range(range.start, outputs, biases));
                let (out, others) = std::mem::take(&mut outs).split_at_mut(length * widest);
                for (out, assignment) in
                    out.chunks_exact_mut(covered.len()).zip(assignments.by_ref().take(length))
                {
                    let out = &mut out[range.start - covered.start..][..outputs];
                    if let Some(bias) = bias {
                        out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
                    }
                    let (token, slot) = (*assignment as usize / slots, *assignment as usize % slots);
                    let start = y.row_start(token) + slot * outputs;
                    y.data.store(start, out);
                }
                outs = others;
            }
        }
        Ok(())
    }
}

impl Kernel for MoeCombine {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, weights) = (frame.floats(0)?, frame.input::<f32>(1)?);
        let (experts, y) = (frame.input::<i32>(2)?, frame.floats_mut(0)?);
        let rows = x.rows.min(weights.rows).min(experts.rows).min(y.rows);
        let features = y.width();
        y.fill_rows(&mut worker.team, rows, 2 * experts.width(), |row, out, lane| {
            out.fill(0.0);
            let [scratch] = lane.split([x.data.scratch(features)]);
            for (slot, (expert, weight)) in experts.row(row).iter().zip(weights.row(row)).enumerate() {
                if place(*expert, self.count, self.first_expert).is_some() {
                    let values = x.data.range(x.row_start(row) + slot * features, features, scratch);
                    out.iter_mut().zip(values).for_each(|(out, value)| *out += weight * value);
                }
            }
        });
        Ok(())
    }
}
