//! What the products of a program read, seen from outside.

use crate::engine::{Engine, STEP_TIMEOUT, as_i32};
use crate::{
    error::Result,
    passes::quantize::observed_activations,
    plan::allocate_shared,
    plan::{Bucket, Layout, Site, input_range, sizes},
    runner::inputs::StepInputs,
};
use dsrun_core::{
    WeightFormat,
    kernels::{Argument, OperandDesc},
};
use std::collections::HashMap;

/// Tokens that are looked at at a time: every result of a step is kept until it has been seen.
const TOKENS: usize = 64;

/// Is given the name of a weight, rows of what it is multiplied with, and their columns.
pub type Observer<'a> = dyn FnMut(&str, &[f32], usize) + 'a;

impl Engine {
    /// Runs a sequence of tokens and shows the activations of every product with a weight, chunk by chunk. Products inside
    /// regions are not seen: plan the engine [without fusion](crate::EngineOptions::fuse).
    ///
    /// # Errors
    /// As [`Self::score`].
    pub fn observe(&mut self, tokens: &[u32], each: &mut Observer<'_>) -> Result<()> {
        self.limits().check_prompt(tokens)?;
        self.with_pages(tokens.len(), |engine, pages| engine.observe_in(pages, tokens, each))
    }

    fn observe_in(&mut self, pages: &[i32], tokens: &[u32], each: &mut Observer<'_>) -> Result<()> {
        self.place_alone(0, 0, pages)?;
        let tokens: Vec<i32> = as_i32(tokens).collect();
        let chunk = TOKENS.min(self.plan.limits.tokens);
        let mut inputs = StepInputs::default();
        let bucket = Bucket { tokens: chunk, sequences: 1, rows: 1, every: false };
        let program = &self.plan.program;
        let sizes = sizes(bucket, self.plan.fixed);
        let layout = Layout::keeping_all(program, &*self.device, &sizes, bucket.every)?;
        let shared = allocate_shared(&*self.device, &layout)?;
        let storage = Site { program, resident: &self.resident, shared: &shared }.storage(&layout);
        let names: HashMap<_, Vec<String>> = observed_activations(program).into_iter().fold(
            HashMap::new(),
            |mut names: HashMap<_, Vec<String>>, (name, id)| {
                names.entry(id).or_default().push(name);
                names
            },
        );
        let place = |name: &str| input_range(&layout.inputs, name);
        for tokens in tokens.chunks(chunk) {
            let count = tokens.len();
            inputs.clear();
            inputs.bring_tokens(0, tokens);
            inputs.want_logits(1);
            self.staging.clear();
            self.staging.resize(layout.input_bytes, 0xFF);
            inputs.stage(&mut self.staging, &program.extents, &place)?;
            self.stream.upload(&self.staging, &shared.inputs.slice(0, self.staging.len())?)?;
            let mut shown = Vec::new();
            for (index, (node, desc)) in program.nodes.iter().zip(&layout.calls).enumerate() {
                if program.segments[node.segment].name != "forward" || !layout.runs(index) {
                    continue;
                }
                let arguments = storage.arguments(&node.call)?;
                self.plans.plan(&*self.device, desc)?.bind(&arguments)?.enqueue(&mut *self.stream)?;
                let Some(x) = node.call.operands.first().copied().flatten() else { continue };
                let (
                    Some(names),
                    Some(Some(OperandDesc::Tensor(tensor))),
                    Some(Some(Argument::Tensor(binding))),
                ) = (names.get(&x), desc.operands.first(), arguments.operands.first())
                else {
                    continue;
                };
                if shown.contains(&x) {
                    continue;
                }
                shown.push(x);
                let mut bytes = vec![0; tensor.bytes()?];
                let slice = binding.slice.slice(0, bytes.len())?;
                self.stream.download(&slice, &mut bytes, "the activations of a product", STEP_TIMEOUT)?;
                let mut values = vec![0.0; bytes.len() / tensor.dtype.bytes()];
                WeightFormat::Dense(tensor.dtype).decode_row(&bytes, &mut values)?;
                let of_rows =
                    program.value(x)?.tensor_type().and_then(|tensor| tensor.shape.first()?.symbol());
                let rows = if of_rows == Some("rows") { 1 } else { count };
                let columns = tensor.shape.last().copied().unwrap_or(0);
                let values = &values[..(rows * columns).min(values.len())];
                names.iter().for_each(|name| each(name, values, columns));
            }
        }
        Ok(())
    }
}
