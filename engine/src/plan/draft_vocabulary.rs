//! Checks that a draft model has the vocabulary of the model it proposes tokens for.

use crate::error::{EngineError, Result};
use dsrun_models::model::Model;

/// Checks that every token id that both models have is the same token. One vocabulary may be longer, because of padding or
/// added tokens: the engine drops proposed tokens that the target model does not have, and proposes nothing for texts with
/// tokens that the draft model does not have.
///
/// # Errors
/// Names the first token that differs, or the sizes of the vocabularies if a model has no tokenizer.
pub(super) fn check_vocabulary(model: &Model, draft: &Model) -> Result<()> {
    let mismatch = |reason: String| {
        Err(EngineError::Draft { draft: draft.name().to_owned(), model: model.name().to_owned(), reason })
    };
    let (Some(tokens), Some(drafted)) = (model.tokenizer(), draft.tokenizer()) else {
        let [size, own] = [model, draft].map(|model| model.config().vocabulary);
        if size == own {
            return Ok(());
        }
        return mismatch(format!("it has {own} tokens instead of {size}"));
    };
    let known = tokens.vocabulary_size().min(drafted.vocabulary_size());
    let differs = |id: &u32| {
        tokens.token_bytes(*id) != drafted.token_bytes(*id)
            || tokens.is_special(*id) != drafted.is_special(*id)
    };
    match (0..known as u32).find(differs) {
        None => Ok(()),
        Some(id) => {
            let [text, own] = [tokens, drafted].map(|tokens| tokens.id_to_token(id).unwrap_or_default());
            mismatch(format!("its token {id} is {own:?} instead of {text:?}"))
        }
    }
}
