//! Prompts of completions and embeddings as tokens.

use super::{api::completions::Prompts, app::Loaded, error::ApiError, intake::Work};
use dsrun_models::tokenizer::EncodeOptions;

/// Encodes at most `most` prompts. `parse_special` parses control tokens in texts as such. Errors name `field`.
///
/// # Errors
/// If there are more prompts, the model has no tokenizer, or a text cannot be encoded or is longer than the context.
pub(super) fn encode(
    prompts: &Prompts,
    loaded: &Loaded,
    field: &str,
    parse_special: bool,
    most: usize,
    work: &Work,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let text = |text: &String| {
        work.check()?;
        let options = EncodeOptions { add_special: true, parse_special };
        let context = loaded.engine.limits().context;
        let tokens = loaded.tokenizer()?.encode_within(text, options, context);
        let tokens = tokens.map_err(|error| ApiError::field(field, error.to_string()))?;
        tokens.ok_or_else(|| ApiError::too_long(field, context))
    };
    let count = match prompts {
        Prompts::Texts(prompts) => prompts.len(),
        // Tokens cost no work here.
        Prompts::Text(_) | Prompts::Tokens(_) | Prompts::ManyTokens(_) => 1,
    };
    if count > most {
        return Err(ApiError::field(field, format!("at most {most} texts")));
    }
    Ok(match prompts {
        Prompts::Text(prompt) => vec![text(prompt)?],
        Prompts::Texts(prompts) => prompts.iter().map(text).collect::<Result<_, _>>()?,
        Prompts::Tokens(prompt) => vec![prompt.clone()],
        Prompts::ManyTokens(prompts) => prompts.clone(),
    })
}
