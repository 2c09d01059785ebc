//! Prompts of completions and embeddings as tokens.

use super::{api::completions::Prompts, app::Loaded, error::ApiError};
use dsrun_models::tokenizer::EncodeOptions;

/// Encodes prompts. `parse_special` parses control tokens in texts as such. Errors name `field`.
///
/// # Errors
/// If the model has no tokenizer, or a text cannot be encoded.
pub(super) fn encode(
    prompts: &Prompts,
    loaded: &Loaded,
    field: &str,
    parse_special: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let text = |text: &String| {
        let options = EncodeOptions { add_special: true, parse_special };
        loaded.tokenizer()?.encode(text, options).map_err(|error| ApiError::field(field, error.to_string()))
    };
    Ok(match prompts {
        Prompts::Text(prompt) => vec![text(prompt)?],
        Prompts::Texts(prompts) => prompts.iter().map(text).collect::<Result<_, _>>()?,
        Prompts::Tokens(prompt) => vec![prompt.clone()],
        Prompts::ManyTokens(prompts) => prompts.clone(),
    })
}
