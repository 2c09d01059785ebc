//! Structured output: JSON, a schema, a regular expression or a grammar, enforced token by token by llguidance.

mod after_reasoning;
pub(super) mod references;
pub(super) mod schema;

use super::{
    api::{ResponseFormat, Syntax},
    app::Loaded,
    error::ApiError,
    reasoning::Marks,
};
use after_reasoning::{AfterReasoning, ReasoningTokens};
use anyhow::Result;
use dsrun_engine::{Constraint, ConstraintError};
use dsrun_models::tokenizer::Tokenizer;
use llguidance::{Matcher, ParserFactory, api::TopLevelGrammar};
use schema::bounded;
use serde_json::{Value, json};
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock},
};
use toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};

/// The state that all grammars of a model share: its vocabulary as a trie.
#[derive(Default)]
pub(crate) struct Grammars {
    factory: OnceLock<Result<ParserFactory, String>>,
    /// The tokens of reasoning, of a model that reasons.
    reasoning: OnceLock<Arc<ReasoningTokens>>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Grammars")
    }
}

/// A grammar that an answer has to follow.
pub(crate) struct Grammar {
    answer: GrammarConstraint,
    /// The constraint on an answer with reasoning before it, if there may be some.
    with_reasoning: Option<AfterReasoning<GrammarConstraint>>,
}

impl Grammar {
    /// The grammar of a response format; `None` for plain text.
    ///
    /// # Errors
    /// If the format cannot be enforced.
    pub(crate) fn of(format: &ResponseFormat, loaded: &Loaded) -> Result<Option<Self>, ApiError> {
        check_references(format)?;
        let json = |schema: &Value| TopLevelGrammar::from_json_schema(bounded(schema));
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

    /// A Lark grammar. Errors name `field`.
    ///
    /// # Errors
    /// If the grammar is invalid or cannot be enforced.
    pub(crate) fn lark(grammar: String, loaded: &Loaded, field: &str) -> Result<Self, ApiError> {
        Self::new(TopLevelGrammar::from_lark(grammar), loaded)
            .map_err(|message| ApiError::field(field, message))
    }

    fn new(grammar: TopLevelGrammar, loaded: &Loaded) -> Result<Self, String> {
        let factory =
            loaded.grammars.factory.get_or_init(|| factory(loaded)).as_ref().map_err(String::clone)?;
        // Grammars come from clients, and a defect of the parser must not end the server.
        let parser = catch_unwind(AssertUnwindSafe(|| factory.create_parser(grammar)))
            .map_err(|_| "this grammar cannot be enforced: the parser failed on it".to_owned())?;
        let matcher = Matcher::new(parser);
        match matcher.get_error() {
            None => Ok(Self { answer: GrammarConstraint { matcher }, with_reasoning: None }),
            Some(error) => Err(error),
        }
    }

    /// The grammar of what follows the reasoning, which stands between these marks and is free. `open` says that the prompt ends
    /// with the mark that opens it.
    ///
    /// # Errors
    /// If the model has no tokenizer.
    pub(crate) fn after_reasoning(
        mut self,
        marks: Marks,
        open: bool,
        loaded: &Loaded,
    ) -> Result<Self, ApiError> {
        let tokenizer = loaded.tokenizer()?;
        let tokens = || Arc::new(ReasoningTokens::new(tokenizer, loaded.engine.stop_ids(), marks));
        let tokens = loaded.grammars.reasoning.get_or_init(tokens).clone();
        let answer = self.answer.clone();
        self.with_reasoning = Some(AfterReasoning::new(marks, open, tokenizer.clone(), tokens, answer));
        Ok(self)
    }

    /// A constraint that enforces the grammar on one answer.
    pub(crate) fn constraint(&self) -> Box<dyn Constraint> {
        match &self.with_reasoning {
            Some(constraint) => constraint.clone_box(),
            None => self.answer.clone_box(),
        }
    }
}

/// Checks the references of a format's schema, if it has one.
fn check_references(format: &ResponseFormat) -> Result<(), ApiError> {
    let ResponseFormat::JsonSchema { json_schema } = format else { return Ok(()) };
    let checked = json_schema.schema.as_ref().map_or(Ok(()), references::check);
    checked.map_err(|message| ApiError::field("response_format", message))
}

/// The right-hand side of a rule in Lark for a response format; `None` for plain text.
///
/// # Errors
/// If the format is a grammar, which has rules of its own, or a reference of its schema leads back to itself.
pub(super) fn rule(format: &ResponseFormat) -> Result<Option<String>, ApiError> {
    check_references(format)?;
    let json = |schema: &Value| Ok(Some(format!("%json {}", bounded(schema))));
    match format {
        ResponseFormat::Text => Ok(None),
        ResponseFormat::JsonObject => json(&json!({"type": "object"})),
        ResponseFormat::JsonSchema { json_schema } => json(json_schema.schema.as_ref().unwrap_or(&json!({}))),
        ResponseFormat::Grammar { syntax: Syntax::Regex, definition } => {
            Ok(Some(format!("/{}/", definition.replace('/', "\\/"))))
        }
        ResponseFormat::Grammar { syntax: Syntax::Lark, .. } => {
            Err(ApiError::field("response_format", "a grammar in Lark is not supported together with tools"))
        }
    }
}

fn factory(loaded: &Loaded) -> Result<ParserFactory, String> {
    let tokenizer = loaded.model.tokenizer().ok_or("the model has no tokenizer")?;
    let ends = loaded.engine.stop_ids();
    let Some(end) = ends.first() else {
        return Err("the model has no end token, so structured answers would never end".to_owned());
    };
    let size = tokenizer.vocabulary_size().max(ends.iter().max().map_or(0, |end| *end as usize + 1));
    let words: Vec<Vec<u8>> = (0..size as u32).map(|id| word(tokenizer, id)).collect();
    let trie = TokTrie::from(&TokRxInfo::new(size as u32, *end), &words).with_eos_tokens(ends);
    let environment: toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
    factory.quiet();
    // The state of the parser does not help the client that sent the grammar.
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// The bytes of a token; special tokens are marked.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    if tokenizer.is_special(id) {
        let name = tokenizer.id_to_token(id).unwrap_or_default();
        let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
        word.extend_from_slice(name.as_bytes());
        return word;
    }
    tokenizer.token_bytes(id)
}

/// Enforces a grammar on one answer.
struct GrammarConstraint {
    matcher: Matcher,
}

impl Clone for GrammarConstraint {
    fn clone(&self) -> Self {
        Self { matcher: self.matcher.deep_clone() }
    }
}

impl fmt::Debug for GrammarConstraint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("GrammarConstraint")
    }
}

/// The reason why an answer cannot go on, in words that its client can use.
fn failed(message: &str) -> ConstraintError {
    let message = message.trim_end().trim_end_matches("<non-verbose/>").trim_end();
    ConstraintError(match message {
        "NoExtension" | "NoExtensionBias" => {
            "no text can follow it: the schema or the grammar contradicts itself, or asks for text that the model has no tokens for".to_owned()
        }
        message => message.to_owned(),
    })
}

impl Constraint for GrammarConstraint {
    fn allow(&mut self, tokens: &mut [u32]) -> Result<(), ConstraintError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| failed(&error.to_string()))?;
        for (word, allowed) in tokens.iter_mut().zip(mask.as_slice()) {
            *word = *allowed;
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        // An end token may follow a complete answer.
        if self.matcher.is_stopped() {
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(|error| failed(&error.to_string()))
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
