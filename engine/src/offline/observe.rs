//! Observes the activations of every product of a program.

use crate::{
    engine::Engine,
    error::Result,
    passes::quantize::{ObservedActivations, observed_activations},
    plan::{Bucket, StepSegment, StepSize},
    runner::{CallByCall, Runner, STEP_TIMEOUT, StepInputs, as_i32},
};
use dsrun_core::{
    WeightFormat,
    kernels::{Argument, OperandDesc},
    program::ValueId,
};
use std::collections::HashMap;

/// The maximum number of tokens that are observed at a time: every result of a step is kept until it has been read.
const CHUNK_TOKENS: usize = 64;

/// Receives the name of a product's weight, rows of the activations it is multiplied with, and their columns.
pub type Observer<'a> = dyn FnMut(&str, &[f32], usize) + 'a;

impl Engine {
    /// Runs a sequence of tokens and shows the activations of every product with a weight, chunk by chunk. Products inside regions
    /// cannot be observed: plan the engine [without fusion](crate::EngineOptions::fuse).
    ///
    /// # Errors
    /// Same as [`Self::score`].
    pub fn observe(&mut self, tokens: &[u32], each: &mut Observer<'_>) -> Result<()> {
        let runner = self.runner_mut();
        runner.limits().check_prompt(tokens)?;
        runner.with_pages(tokens.len(), |runner, pages| observe(runner, pages, tokens, each))
    }
}

fn observe(runner: &mut Runner, pages: &[i32], tokens: &[u32], each: &mut Observer<'_>) -> Result<()> {
    runner.place_alone(0, 0, pages)?;
    let tokens: Vec<i32> = as_i32(tokens).collect();
    let chunk = CHUNK_TOKENS.min(runner.plan().limits.tokens);
    let bucket = Bucket { tokens: chunk, sequences: 1, rows: 1, all_rows: false };
    let executor = runner.executor_mut();
    let program = executor.plan().programs.all_rows().clone();
    let step = CallByCall::new(executor, &program, bucket, 0)?;
    let nodes = step.nodes(&[StepSegment::Forward])?;
    // Several products may read the same activations.
    let mut products: HashMap<ValueId, Vec<ObservedActivations>> = HashMap::new();
    for product in observed_activations(step.program()) {
        products.entry(product.id).or_default().push(product);
    }
    let mut inputs = StepInputs::default();
    for tokens in tokens.chunks(chunk) {
        inputs.clear();
        inputs.push_tokens(0, tokens);
        inputs.request_logits(1);
        step.upload(executor.stream(), &inputs)?;
        let mut shown = Vec::new();
        for node in nodes.iter().copied() {
            step.bind(executor, node)?.enqueue(executor.stream())?;
            let (call, desc) = (&step.call(node).0.call, step.call(node).1);
            let Some(x) = call.operands.first().copied().flatten() else { continue };
            let Some(products) = products.get(&x).filter(|_| !shown.contains(&x)) else { continue };
            let arguments = step.arguments(executor, node)?;
            let (Some(Some(OperandDesc::Tensor(tensor))), Some(Some(Argument::Tensor(binding)))) =
                (desc.operands.first(), arguments.operands.first())
            else {
                continue;
            };
            shown.push(x);
            let mut bytes = vec![0; tensor.bytes()?];
            let slice = binding.slice.slice(0, bytes.len())?;
            executor.stream().download(&slice, &mut bytes, "the activations of a product", STEP_TIMEOUT)?;
            let mut values = vec![0.0; bytes.len() / tensor.dtype.bytes()];
            WeightFormat::Dense(tensor.dtype).decode_row(&bytes, &mut values)?;
            let of_rows = StepSize::of_rows(step.program().value(x)?) == Some(StepSize::Rows);
            let rows = if of_rows { 1 } else { tokens.len() };
            let width = tensor.shape.last().copied().unwrap_or(0);
            let values = &values[..(rows * width).min(values.len())];
            products.iter().for_each(|product| each(&product.weight, values, product.columns));
        }
    }
    Ok(())
}
