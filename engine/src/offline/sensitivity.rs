//! Measures how much rounding one weight changes the output of a model.
//!
//! The error of a product says little about its effect on the output: an error in an early layer is amplified by later layers,
//! and an error in attention scores nearly vanishes. So each weight is rounded alone, to its coarsest format, and the change of
//! the model's output probabilities is measured.

use crate::{
    engine::Engine,
    error::{EngineError, Result},
    options::{EngineOptions, Precision},
    passes::quantize::{Policy, Scheme, product_weights},
    plan::{Bucket, EnginePlan, Layout, StepOutput, StepSegment, weight_desc},
    runner::{CallByCall, Executor, Runner, STEP_TIMEOUT, StepInputs, as_i32},
};
use dsrun_core::{
    DType, Error, GroupFormat, WeightType,
    device::{BufferSlice, Device},
    kernels::{Argument, BoundCall},
    op::Op,
    program::{Origin, Program, ValueId},
};
use dsrun_models::{model::Model, weights::ExprReader};
use rayon::prelude::*;
use std::{collections::BTreeMap, sync::Arc};

/// The formats of mixed precision, the smallest first: those that all readers of compressed-tensors support.
const FORMATS: [&str; 6] =
    ["int4g128_f16", "int4g64_f16", "int4g32_f16", "int8g128_f16", "int8g64_f16", "int8g32_f16"];

/// The formats of mixed precision, the smallest first.
pub(super) fn formats() -> Vec<GroupFormat> {
    FORMATS.iter().filter_map(|name| GroupFormat::from_name(name)).collect()
}

/// The effect of rounding one weight of a model, see [`sensitivity`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sensitivity {
    /// The format that the weight was rounded to.
    pub format: GroupFormat,
    /// The change of the model's probabilities: the Kullback-Leibler divergence in nats per token.
    pub divergence: f64,
}

/// Rounds each product weight of a model alone, and measures the change of the output probabilities over a sequence of tokens.
/// Weights that policies keep by default, and weights that fit no mixed-precision format, are skipped. `progress` receives the
/// number of weights done, and of all.
///
/// # Errors
/// If the sequence is empty or longer than the model's context; those of planning, loading and running the model.
pub fn sensitivity(
    model: &Model,
    device: Arc<dyn Device>,
    tokens: &[u32],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<BTreeMap<String, Sensitivity>> {
    let mut options = EngineOptions {
        context: Some(tokens.len().max(1)),
        step_tokens: tokens.len().max(1),
        fuse: false,
        ..EngineOptions::default()
    };
    let mut plan = EnginePlan::new(model, &*device, &options)?;
    if plan.program().nodes.iter().any(|node| matches!(node.call.op, Op::LinearW8A8(_))) {
        // This checkpoint is made for integer matrix products; with rounded weights they would become floating-point products.
        options.precision = preferred_precision(&*device);
        plan = EnginePlan::new(model, &*device, &options)?;
    }
    let coarsest = coarsest_formats(plan.program());
    let weights = coarsest.iter().map(|(name, format)| (name.clone(), Scheme::Group(*format)));
    let policy = Policy { weights: weights.collect(), ..Policy::default() };
    let rounded = EnginePlan::new(model, &*device, &EngineOptions { quantize: Some(policy), ..options })?;
    let mut engine = plan.load(model, device, &mut |_, _| {})?;
    let divergences = divergences(&mut engine, model, &rounded, tokens, progress)?;
    let of = |(name, format): (String, GroupFormat)| {
        let divergence = *divergences.get(&name)?;
        Some((name, Sensitivity { format, divergence }))
    };
    Ok(coarsest.into_iter().filter_map(of).collect())
}

/// The float type that a device computes best in.
fn preferred_precision(device: &dyn Device) -> Precision {
    match device.properties().dtypes.first() {
        Some(DType::BF16) => Precision::Bf16,
        Some(DType::F16) => Precision::F16,
        _ => Precision::F32,
    }
}

/// The smallest format of each weight that only products read.
fn coarsest_formats(program: &Program) -> BTreeMap<String, GroupFormat> {
    let formats = formats();
    let of = |name: &String, columns: usize| {
        let format = formats.iter().find(|format| format.row(columns).is_some())?;
        Some((name.clone(), *format))
    };
    let weights = product_weights(program).into_iter().filter(|weight| !weight.kept);
    weights
        .filter_map(|weight| {
            let columns = program.values[weight.id.index()].weight_type().map(WeightType::columns)?;
            of(&weight.name, columns)
        })
        .collect()
}

/// Measures the change of the model's output probabilities when one weight at a time is replaced by its rounded version from
/// `rounded`, a plan of the same program: the Kullback-Leibler divergence in nats, averaged over the tokens. Weights that are
/// [kept](crate::passes::quantize::ProductWeight::kept) are skipped.
///
/// # Errors
/// Same as [`Engine::score`]; if the programs differ; those of reading a weight.
fn divergences(
    engine: &mut Engine,
    model: &Model,
    rounded: &EnginePlan,
    tokens: &[u32],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<BTreeMap<String, f64>> {
    let runner = engine.runner_mut();
    runner.limits().check_prompt(tokens)?;
    let limit = runner.plan().limits.tokens;
    if tokens.len() > limit {
        return Err(EngineError::PromptTooLong { tokens: tokens.len(), context: limit });
    }
    if runner.plan().program().nodes != rounded.program().nodes {
        return Err(Error::internal("rounding changed the program's calls, not only its weights").into());
    }
    runner.with_pages(tokens.len(), |runner, pages| {
        runner.place_alone(0, 0, pages)?;
        Forward::run(runner, rounded, tokens)?.measure(runner, model, rounded, progress)
    })
}

/// A forward pass that keeps all intermediate results, so that it can be re-run from any call on.
struct Forward {
    step: CallByCall,
    /// The layout of the rounded program, for the descriptions of its calls.
    rounded: Layout,
    /// The calls with the original weights, by node.
    calls: Vec<(usize, Box<dyn BoundCall>)>,
    logits: BufferSlice,
    vocabulary: usize,
    /// The logarithms of the probabilities with the original weights.
    expected: Vec<f32>,
}

impl Forward {
    /// Runs the tokens through the model with its original weights.
    fn run(runner: &mut Runner, rounded: &EnginePlan, tokens: &[u32]) -> Result<Self> {
        let (count, vocabulary) = (tokens.len(), runner.requests().vocabulary());
        let executor = runner.executor_mut();
        let bucket = Bucket { tokens: count, sequences: 1, rows: count, all_rows: true };
        let (program, device) = (executor.plan().programs.of(bucket).clone(), executor.device().clone());
        let rounded =
            Layout::keeping_all(rounded.programs.of(bucket), &*device, bucket, executor.plan().fixed)?;
        let step = CallByCall::new(executor, &program, bucket, rounded.shared.workspace)?;
        let mut inputs = StepInputs::default();
        inputs.push_tokens(0, &as_i32(tokens).collect::<Vec<_>>());
        inputs.request_logits(count);
        step.upload(executor.stream(), &inputs)?;
        let mut calls = Vec::new();
        for node in step.nodes(&[StepSegment::Forward])? {
            calls.push((node, step.bind(executor, node)?));
        }
        let logits = step.output(executor, StepOutput::Logits)?;
        let logits = logits.slice(0, count * vocabulary * size_of::<f32>())?;
        let mut forward = Self { step, rounded, calls, logits, vocabulary, expected: Vec::new() };
        forward.enqueue_from(executor, 0)?;
        forward.expected = forward.log_probabilities(executor)?;
        Ok(forward)
    }

    /// Enqueues the calls from the one at `place` on.
    fn enqueue_from(&self, executor: &mut Executor, place: usize) -> Result<()> {
        Ok(self.calls[place..].iter().try_for_each(|(_, call)| call.enqueue(executor.stream()))?)
    }

    /// The logarithms of the probabilities of all tokens.
    fn log_probabilities(&self, executor: &mut Executor) -> Result<Vec<f32>> {
        let mut bytes = vec![0; self.logits.bytes];
        executor.stream().download(&self.logits, &mut bytes, "the logits of a text", STEP_TIMEOUT)?;
        let mut values: Vec<f32> =
            bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        values.par_chunks_exact_mut(self.vocabulary).for_each(to_log_probabilities);
        Ok(values)
    }

    /// Re-runs the pass once per weight with that weight rounded, and measures each divergence.
    fn measure(
        &self,
        runner: &mut Runner,
        model: &Model,
        rounded: &EnginePlan,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BTreeMap<String, f64>> {
        let weights = self.weights();
        let total = weights.len() as u64;
        let mut divergences = BTreeMap::new();
        let executor = runner.executor_mut();
        for RoundedWeight { place, operand, id, name } in weights {
            progress(divergences.len() as u64, total);
            let value = rounded.program().value(id)?;
            let (Origin::Weight(expr), Some(weight_type)) = (&value.origin, value.weight_type()) else {
                continue;
            };
            let in_weight = |error: Error| error.at(&name);
            let reader = ExprReader::new(&**model.weights(), expr).map_err(in_weight)?;
            let mut reader = reader.stored_as(weight_type.format).map_err(in_weight)?;
            let desc = weight_desc(weight_type);
            let (device, stream, _) = executor.device_stream_plans();
            let packed = device.kernels().prepack(stream, &desc, &mut reader).map_err(in_weight)?;
            let node = self.calls[place].0;
            let mut arguments = self.step.arguments(executor, node)?;
            arguments.operands[operand] = Some(Argument::Weight(packed));
            let (device, stream, plans) = executor.device_stream_plans();
            let call = plans.plan(device, &self.rounded.calls[node])?.bind(&arguments)?;
            call.enqueue(stream)?;
            self.enqueue_from(executor, place + 1)?;
            let found = self.log_probabilities(executor)?;
            let tokens = (self.expected.len() / self.vocabulary) as f64;
            divergences.insert(name, divergence(&self.expected, &found) / tokens);
        }
        progress(total, total);
        Ok(divergences)
    }

    /// The weights to round, in reverse order of their calls, so that the results before a call still come from the original
    /// weights.
    fn weights(&self) -> Vec<RoundedWeight> {
        let program = self.step.program();
        let mut weights = Vec::new();
        for weight in product_weights(program).into_iter().filter(|weight| !weight.kept) {
            let reader = self.calls.iter().enumerate().find_map(|(place, (node, _))| {
                let mut operands = program.nodes[*node].call.operands.iter();
                Some((place, operands.position(|id| *id == Some(weight.id))?))
            });
            if let Some((place, operand)) = reader {
                weights.push(RoundedWeight { place, operand, id: weight.id, name: weight.name });
            }
        }
        weights.sort_by_key(|weight| std::cmp::Reverse(weight.place));
        weights
    }
}

/// A weight to round, and the call that reads it.
struct RoundedWeight {
    /// The place of the call in [`Forward::calls`].
    place: usize,
    /// The operand of the call.
    operand: usize,
    id: ValueId,
    name: String,
}

/// Turns a row of logits into logarithms of probabilities.
fn to_log_probabilities(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    let log_sum = sum.ln() as f32;
    row.iter_mut().for_each(|logit| *logit -= largest + log_sum);
}

/// The Kullback-Leibler divergence of the found probabilities from the expected ones, given as logarithms.
fn divergence(expected: &[f32], found: &[f32]) -> f64 {
    let term = |(expected, found): (&f32, &f32)| {
        let (expected, found) = (f64::from(*expected), f64::from(*found));
        // Equivalent to the usual form because the added terms sum to 0 over a distribution, but every term is at least 0, so
        // nothing cancels.
        expected.exp() * ((found - expected).exp_m1() - (found - expected))
    };
    // Summed in chunks that do not depend on the machine, so that equal logits always have an equal divergence.
    let chunks = expected.par_chunks(4096).zip(found.par_chunks(4096));
    let sums: Vec<f64> = chunks.map(|(expected, found)| expected.iter().zip(found).map(term).sum()).collect();
    sums.into_iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divergence_agrees_with_its_definition() {
        let (mut expected, mut found) = (vec![0.0f32, 1.0, -2.0], vec![0.5f32, 0.5, -2.0]);
        to_log_probabilities(&mut expected);
        to_log_probabilities(&mut found);
        let plain: f64 =
            expected.iter().zip(&found).map(|(p, q)| f64::from(*p).exp() * f64::from(p - q)).sum();
        assert!((divergence(&expected, &found) - plain).abs() < 1e-6, "{plain}");
        assert_eq!(divergence(&expected, &expected), 0.0);
        let sum: f64 = expected.iter().map(|p| f64::from(*p).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6);
    }
}
