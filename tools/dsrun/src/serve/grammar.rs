//! Answers of a given form: JSON, a schema, a regular expression, a grammar. llguidance says token by token what may come.

use super::{
    api::{ResponseFormat, Syntax},
    app::Loaded,
    error::ApiError,
};
use anyhow::Result;
use dsrun_engine::{Constraint, ConstraintError};
use dsrun_models::tokenizer::Tokenizer;
use llguidance::{Matcher, ParserFactory, api::TopLevelGrammar};
use serde_json::json;
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock},
};
use toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};

/// The most tokens of whitespace between the parts of JSON. Small models that may write any number never stop.
const WHITESPACE: &str = "[ \\n]{0,2}";

/// What all grammars of a model share: its vocabulary as a tree.
#[derive(Default)]
pub(crate) struct Grammars {
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Grammars")
    }
}

/// The form that an answer has to have.
pub(crate) struct Grammar {
    matcher: Matcher,
}

impl Grammar {
    /// The form that a request asks for, if any.
    pub(crate) fn of(format: &ResponseFormat, loaded: &Loaded) -> Result<Option<Self>, ApiError> {
        let json = |schema: &serde_json::Value| {
            let mut schema = schema.clone();
            if let Some(object) = schema.as_object_mut() {
                let guidance = object.entry("x-guidance").or_insert_with(|| json!({}));
                if let Some(guidance) = guidance.as_object_mut() {
                    guidance.entry("whitespace_pattern").or_insert_with(|| WHITESPACE.into());
                }
            }
            TopLevelGrammar::from_json_schema(schema)
        };
        let grammar = match format {
            ResponseFormat::Text => return Ok(None),
            ResponseFormat::JsonObject => json(&json!({"type": "object"})),
            ResponseFormat::JsonSchema { json_schema } => match &json_schema.schema {
                Some(schema) => json(schema),
                None => json(&json!({})),
            },
            ResponseFormat::Grammar { syntax: Syntax::Lark, definition } => {
                TopLevelGrammar::from_lark(definition.clone())
            }
            ResponseFormat::Grammar { syntax: Syntax::Regex, definition } => {
                TopLevelGrammar::from_regex(definition)
            }
        };
        Self::new(grammar, loaded).map(Some).map_err(|message| ApiError::field("response_format", message))
    }

    /// The form that a Lark grammar describes.
    pub(crate) fn lark(grammar: String, loaded: &Loaded, field: &str) -> Result<Self, ApiError> {
        Self::new(TopLevelGrammar::from_lark(grammar), loaded)
            .map_err(|message| ApiError::field(field, message))
    }

    fn new(grammar: TopLevelGrammar, loaded: &Loaded) -> Result<Self, String> {
        let factory =
            loaded.grammars.factory.get_or_init(|| factory(loaded)).as_ref().map_err(String::clone)?;
        // Grammars come from strangers, and parsers of them have defects.
        let parser = catch_unwind(AssertUnwindSafe(|| factory.create_parser(grammar)))
            .map_err(|_| "this grammar cannot be followed".to_owned())?;
        let matcher = Matcher::new(parser);
        match matcher.get_error() {
            None => Ok(Self { matcher }),
            Some(error) => Err(error),
        }
    }

    /// What keeps one answer to the form.
    pub(crate) fn constraint(&self) -> Box<dyn Constraint> {
        Box::new(Grammatical { matcher: self.matcher.deep_clone() })
    }
}

fn factory(loaded: &Loaded) -> Result<ParserFactory, String> {
    let tokenizer = loaded.model.tokenizer().ok_or("the model has no tokenizer")?;
    let ends = loaded.engine.stop_ids();
    let Some(end) = ends.first() else {
        return Err("the model has no end token, so that answers of a given form would never end".to_owned());
    };
    let size = tokenizer.vocabulary_size().max(ends.iter().max().map_or(0, |end| *end as usize + 1));
    let words: Vec<Vec<u8>> = (0..size as u32).map(|id| word(tokenizer, id)).collect();
    let trie = TokTrie::from(&TokRxInfo::new(size as u32, *end), &words).with_eos_tokens(ends);
    let environment: toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
    factory.quiet();
    // What the parser was at is no help to who sent the grammar.
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// The bytes of a token, marked if it is no text.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    if tokenizer.is_special(id) {
        let name = tokenizer.id_to_token(id).unwrap_or_default();
        let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
        word.extend_from_slice(name.as_bytes());
        return word;
    }
    tokenizer.token_bytes(id)
}

/// Keeps an answer to a form.
struct Grammatical {
    matcher: Matcher,
}

impl fmt::Debug for Grammatical {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Grammatical")
    }
}

impl Constraint for Grammatical {
    fn allow(&mut self, tokens: &mut [u32]) -> Result<(), ConstraintError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| ConstraintError(error.to_string()))?;
        for (word, allowed) in tokens.iter_mut().zip(mask.as_slice()) {
            *word = *allowed;
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        // An end token may come after the form is complete.
        if self.matcher.is_stopped() {
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(|error| ConstraintError(error.to_string()))
    }
}
