//! How far the end of a model moves when the weight of one product is rounded.

use crate::engine::{Engine, STEP_TIMEOUT, as_i32};
use crate::{
    error::{EngineError, Result},
    passes::quantize::product_weights,
    plan::{Bucket, Layout, Site, input_range, sizes},
    plan::{EnginePlan, allocate_shared, weight_desc},
    runner::inputs::StepInputs,
};
use dsrun_core::{
    Error,
    device::Stream,
    kernels::{Argument, BoundCall},
    program::{Call, Origin, ValueId},
};
use dsrun_models::{model::Model, weights::ExprReader};
use rayon::prelude::*;
use std::collections::BTreeMap;

impl Engine {
    /// How far the model's probabilities move when one weight after the other is what it is in `rounded`, the plan of the same
    /// program with rounded weights: the Kullback-Leibler divergence in nats, on average over the tokens of a sequence. Weights that
    /// are [kept](crate::passes::quantize::ProductWeight::kept) are left out. `progress` hears of the weights that are done, and of
    /// all.
    ///
    /// # Errors
    /// As [`Self::score`]; if the programs are not the same; those of reading a weight.
    pub(crate) fn reach(
        &mut self,
        model: &Model,
        rounded: &EnginePlan,
        tokens: &[u32],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BTreeMap<String, f64>> {
        self.limits().check_prompt(tokens)?;
        let limit = self.plan.limits.tokens;
        if tokens.len() > limit {
            return Err(EngineError::PromptTooLong { tokens: tokens.len(), context: limit });
        }
        if self.plan.program.nodes != rounded.program.nodes {
            return Err(Error::internal("rounding changed more than the weights of a program").into());
        }
        self.with_pages(tokens.len(), |engine, pages| {
            engine.reach_in(pages, model, rounded, tokens, progress)
        })
    }

    fn reach_in(
        &mut self,
        pages: &[i32],
        model: &Model,
        rounded: &EnginePlan,
        tokens: &[u32],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BTreeMap<String, f64>> {
        self.place_alone(0, 0, pages)?;
        let (program, count) = (&self.plan.program, tokens.len());
        let bucket = Bucket { tokens: count, sequences: 1, rows: count, every: true };
        // Every result stays, so that a step can be run again from any call on.
        let keeping_all = |program| {
            Layout::keeping_all(program, &*self.device, &sizes(bucket, self.plan.fixed), bucket.every)
        };
        let (mut layout, other) = (keeping_all(program)?, keeping_all(&rounded.program)?);
        layout.workspace_bytes = layout.workspace_bytes.max(other.workspace_bytes);
        let shared = allocate_shared(&*self.device, &layout)?;
        let storage = Site { program, resident: &self.resident, shared: &shared }.storage(&layout);

        let mut inputs = StepInputs::default();
        inputs.bring_tokens(0, &as_i32(tokens).collect::<Vec<_>>());
        inputs.want_logits(count);
        self.staging.clear();
        self.staging.resize(layout.input_bytes, 0xFF);
        inputs.stage(&mut self.staging, &program.extents, &|name| input_range(&layout.inputs, name))?;
        self.stream.upload(&self.staging, &shared.inputs.slice(0, self.staging.len())?)?;

        let mut calls: Vec<(usize, Box<dyn BoundCall>)> = Vec::new();
        for (index, (node, desc)) in program.nodes.iter().zip(&layout.calls).enumerate() {
            if program.segments[node.segment].name == "forward" && layout.runs(index) {
                let call = self.plans.plan(&*self.device, desc)?.bind(&storage.arguments(&node.call)?)?;
                calls.push((index, call));
            }
        }
        let logits = storage.output("logits")?.slice(0, count * self.vocabulary * size_of::<f32>())?;
        let vocabulary = self.vocabulary;
        let probabilities = |stream: &mut dyn Stream| -> Result<Vec<f32>> {
            let mut bytes = vec![0; logits.bytes];
            stream.download(&logits, &mut bytes, "the logits of a text", STEP_TIMEOUT)?;
            let mut values: Vec<f32> =
                bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            values.par_chunks_exact_mut(vocabulary).for_each(to_logarithms);
            Ok(values)
        };
        calls.iter().try_for_each(|(_, call)| call.enqueue(&mut *self.stream))?;
        let expected = probabilities(&mut *self.stream)?;

        // The last first: what stands in front of a product is then as it was.
        let reads = |call: &Call, weight: ValueId| call.operands.iter().position(|id| *id == Some(weight));
        let mut weights: Vec<(usize, usize, ValueId, String)> = Vec::new();
        for weight in product_weights(program).into_iter().filter(|weight| !weight.kept) {
            let reader = calls
                .iter()
                .enumerate()
                .find_map(|(at, (node, _))| Some((at, reads(&program.nodes[*node].call, weight.id)?)));
            if let Some((at, operand)) = reader {
                weights.push((at, operand, weight.id, weight.name));
            }
        }
        weights.sort_by_key(|(at, ..)| std::cmp::Reverse(*at));
        let total = weights.len() as u64;
        let mut reach = BTreeMap::new();
        for (at, operand, id, name) in weights {
            progress(reach.len() as u64, total);
            let value = rounded.program.value(id)?;
            let (Origin::Weight(expr), Some(weight_type)) = (&value.origin, value.weight_type()) else {
                continue;
            };
            let in_weight = |error: Error| error.at(&name);
            let reader = ExprReader::new(&**model.weights(), expr).map_err(in_weight)?;
            let mut reader = reader.stored_as(weight_type.format).map_err(in_weight)?;
            let desc = weight_desc(&rounded.program, id, weight_type, self.plan.limits);
            let packed = self.device.kernels().prepack(&mut *self.stream, &desc, &mut reader);
            let node = calls[at].0;
            let mut arguments = storage.arguments(&program.nodes[node].call)?;
            arguments.operands[operand] = Some(Argument::Weight(packed.map_err(in_weight)?));
            let call = self.plans.plan(&*self.device, &other.calls[node])?.bind(&arguments)?;
            call.enqueue(&mut *self.stream)?;
            calls[at + 1..].iter().try_for_each(|(_, call)| call.enqueue(&mut *self.stream))?;
            let found = probabilities(&mut *self.stream)?;
            reach.insert(name, divergence(&expected, &found) / count as f64);
        }
        progress(total, total);
        Ok(reach)
    }
}

/// Makes logarithms of probabilities of a row of logits.
fn to_logarithms(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    let all = sum.ln() as f32;
    row.iter_mut().for_each(|logit| *logit -= largest + all);
}

/// The Kullback-Leibler divergence of probabilities from those expected, all given as logarithms.
fn divergence(expected: &[f32], found: &[f32]) -> f64 {
    let of = |(expected, found): (&f32, &f32)| {
        let (expected, found) = (f64::from(*expected), f64::from(*found));
        // Terms are no smaller than 0 so, and cancel no digits: those that are added are 0 in all.
        expected.exp() * ((found - expected).exp_m1() - (found - expected))
    };
    // In pieces that do not depend on the machine, so that the same logits always diverge as far.
    let pieces = expected.par_chunks(4096).zip(found.par_chunks(4096));
    let sums: Vec<f64> = pieces.map(|(expected, found)| expected.iter().zip(found).map(of).sum()).collect();
    sums.into_iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divergence_is_what_the_definition_says() {
        let (mut expected, mut found) = (vec![0.0f32, 1.0, -2.0], vec![0.5f32, 0.5, -2.0]);
        to_logarithms(&mut expected);
        to_logarithms(&mut found);
        let plain: f64 =
            expected.iter().zip(&found).map(|(p, q)| f64::from(*p).exp() * f64::from(p - q)).sum();
        assert!((divergence(&expected, &found) - plain).abs() < 1e-6, "{plain}");
        assert_eq!(divergence(&expected, &expected), 0.0);
        let sum: f64 = expected.iter().map(|p| f64::from(*p).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6);
    }
}
