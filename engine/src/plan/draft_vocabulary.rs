//! Whether a second model speaks of the same tokens.

use crate::error::{EngineError, Result};
use dsrun_models::model::Model;

/// Checks that every token that both models know is the same. One may know more behind: embeddings are padded, and tokens
/// added. What the draft proposes of these is left out, and texts that have some are not drafted for.
///
/// # Errors
/// Names the first token that differs, or the sizes where there is no text to compare.
pub(crate) fn check_vocabulary(model: &Model, draft: &Model) -> Result<()> {
    let wrong = |reason: String| {
        Err(EngineError::Draft { draft: draft.name().to_owned(), model: model.name().to_owned(), reason })
    };
    let (Some(tokens), Some(drafted)) = (model.tokenizer(), draft.tokenizer()) else {
        let [size, own] = [model, draft].map(|model| model.config().vocabulary);
        if size == own {
            return Ok(());
        }
        return wrong(format!("it has {own} tokens instead of {size}"));
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
            wrong(format!("its token {id} is {own:?} instead of {text:?}"))
        }
    }
}
