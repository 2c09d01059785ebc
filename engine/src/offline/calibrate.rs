//! Calibration: collects statistics of a model's activations on a text.

use crate::{
    error::{EngineError, Result},
    options::EngineOptions,
    passes::quantize::Calibration,
    plan::EnginePlan,
};
use dsrun_core::device::Device;
use dsrun_models::{model::Model, tokenizer::EncodeOptions};
use std::sync::Arc;

/// A text to calibrate with: prose, a conversation, numbers and code.
pub const CALIBRATION_TEXT: &str = include_str!("calibrate/text.txt");

/// Runs sequences of tokens through the unquantised model, and collects statistics of the input activations of every matrix
/// product.
///
/// # Errors
/// Same as [`EnginePlan::new`], [`EnginePlan::load`] and [`Engine::observe`](crate::Engine::observe).
pub fn calibrate(model: &Model, device: Arc<dyn Device>, sequences: &[Vec<u32>]) -> Result<Calibration> {
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
    let options = EngineOptions {
        context: Some(longest.max(1)),
        step_tokens: 64,
        fuse: false,
        ..EngineOptions::default()
    };
    let plan = EnginePlan::new(model, &*device, &options)?;
    let mut engine = plan.load(model, device, &mut |_, _| {})?;
    let mut calibration = Calibration::default();
    for tokens in sequences {
        engine.observe(tokens, &mut |weight, rows, columns| calibration.add(weight, rows, columns))?;
    }
    Ok(calibration)
}

/// Splits [`CALIBRATION_TEXT`] into sequences of at most `length` tokens.
///
/// # Errors
/// If the model has no tokenizer, or the tokenizer fails.
pub fn calibration_sequences(model: &Model, length: usize) -> Result<Vec<Vec<u32>>> {
    let missing = EngineError::Missing {
        what: "tokenizer",
        hint: "calibration encodes a text; leave `smooth` out of the policy, and give no budget",
    };
    let tokenizer = model.tokenizer().ok_or(missing)?;
    let tokens = tokenizer.encode(CALIBRATION_TEXT, EncodeOptions::default())?;
    Ok(tokens.chunks(length.max(1)).map(<[u32]>::to_vec).collect())
}
