//! Structured output: JSON, a schema, a regular expression or a grammar, enforced token by token by llguidance.

mod after_reasoning;
pub(super) mod references;
pub(super) mod schema;

use super::{
    api::{Form, ResponseFormat, Syntax},
    app::Loaded,
    budget::{Budget, Held},
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
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread,
};
use toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};

/// The most bytes of the source of a grammar: a schema, a regular expression or a grammar in Lark.
const MAX_SOURCE: usize = 1 << 20;
/// The most bytes of the sources of all grammars together. Each takes several times as much in memory while its request waits or runs.
const ALL_SOURCES: usize = 8 << 20;
/// The most definitions of a grammar: rules, terminals, and references and properties of a schema.
const MAX_DEFINITIONS: usize = 20_000;
/// The stack of the thread that compiles a grammar, without definitions, and what each may add: the compiler recurses from each
/// definition into those that it uses, and from each property of a schema to the next. Only what is used takes memory.
const STACK: usize = 64 << 20;
const STACK_OF_DEFINITION: usize = 16 << 10;
/// The most states of the lexer of an answer, of 1 to 2 kB each.
const MAX_LEXER_STATES: usize = 20_000;

/// The state that all grammars of a model share: its vocabulary as a trie.
pub(crate) struct Grammars {
    factory: OnceLock<Result<ParserFactory, String>>,
    /// The tokens of reasoning, of a model that reasons.
    reasoning: OnceLock<Arc<ReasoningTokens>>,
    sources: Arc<Budget>,
}

impl Default for Grammars {
    fn default() -> Self {
        Self { factory: OnceLock::new(), reasoning: OnceLock::new(), sources: Budget::new(ALL_SOURCES) }
    }
}

impl Grammars {
    /// The bytes of the sources of all grammars that requests hold.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.sources.held()
    }
}

impl fmt::Debug for Grammars {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Grammars")
    }
}

/// A grammar that answers have to follow.
pub(crate) struct Grammar {
    answer: GrammarConstraint,
    /// The constraint on an answer with reasoning before it, if there may be some.
    with_reasoning: Option<AfterReasoning<GrammarConstraint>>,
}

/// What the answers to a request share.
struct Source {
    /// The state before the first token. Nothing but clones is made of it.
    matcher: Mutex<Matcher>,
    _held: Held,
}

impl Grammar {
    /// The grammar of a form; `None` for plain text.
    ///
    /// # Errors
    /// If the form cannot be enforced.
    pub(crate) fn of(form: &Form, loaded: &Loaded) -> Result<Option<Self>, ApiError> {
        let Form { field, format } = form;
        if let ResponseFormat::Grammar { definition, .. } = format {
            check_length(definition.len(), field)?;
        }
        check_references(form)?;
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
        Self::new(grammar, loaded, field).map(Some)
    }

    /// A Lark grammar. Errors name `field`.
    ///
    /// # Errors
    /// If the grammar is invalid or cannot be enforced.
    pub(crate) fn lark(grammar: String, loaded: &Loaded, field: &str) -> Result<Self, ApiError> {
        Self::new(TopLevelGrammar::from_lark(grammar), loaded, field)
    }

    fn new(grammar: TopLevelGrammar, loaded: &Loaded, field: &str) -> Result<Self, ApiError> {
        let refused = |message: String| ApiError::field(field, message);
        // A grammar is written in the same way as it was read, so its length is that of its source.
        let source = serde_json::to_string(&grammar).map_err(|error| refused(error.to_string()))?;
        check_length(source.len(), field)?;
        let definitions = most_definitions(&grammar, &source);
        if definitions > MAX_DEFINITIONS {
            let message = format!(
                "has {definitions} lines, references and properties, but a grammar or a schema may have at most {MAX_DEFINITIONS}"
            );
            return Err(refused(message));
        }
        let held = loaded.grammars.sources.hold(source.len()).ok_or_else(ApiError::queue_full)?;
        let factory = loaded.grammars.factory.get_or_init(|| factory(loaded)).as_ref();
        let factory = factory.map_err(|message| refused(message.clone()))?;
        let matcher = compile(factory, grammar, definitions).map_err(refused)?;
        match matcher.get_error() {
            None => {
                let source = Arc::new(Source { matcher: Mutex::new(matcher), _held: held });
                let answer = GrammarConstraint { source, matcher: None };
                Ok(Self { answer, with_reasoning: None })
            }
            Some(error) => Err(refused(error)),
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

    /// A constraint that enforces the grammar on one answer. It takes memory of its own only once the answer begins.
    pub(crate) fn constraint(&self) -> Box<dyn Constraint> {
        match &self.with_reasoning {
            Some(constraint) => constraint.clone_box(),
            None => self.answer.clone_box(),
        }
    }
}

/// Compiles a grammar. Grammars come from clients, so neither a defect of the compiler nor the depth of its recursion may end the server.
fn compile(factory: &ParserFactory, grammar: TopLevelGrammar, definitions: usize) -> Result<Matcher, String> {
    let stack = STACK + definitions * STACK_OF_DEFINITION;
    thread::scope(|scope| {
        let compile = || Matcher::new(factory.create_parser(grammar));
        let thread = thread::Builder::new().name("grammar".to_owned()).stack_size(stack);
        let running = thread.spawn_scoped(scope, compile);
        let running = running.map_err(|error| format!("no thread can be started to compile it: {error}"))?;
        running.join().map_err(|_| "this grammar cannot be enforced: the parser failed on it".to_owned())
    })
}

/// An upper bound on the number of definitions of a grammar, given also as JSON. Each rule and terminal starts a line. The properties of
/// a schema were counted, but not those of schemas within a grammar, whose names are followed by a colon or a comma.
fn most_definitions(grammar: &TopLevelGrammar, source: &str) -> usize {
    let count = |text: &str| source.matches(text).count();
    let is_schema = grammar.grammars.iter().all(|grammar| grammar.lark_grammar.is_none());
    let properties = if is_schema { 0 } else { count("\":") + count("\",") };
    count("\\n") + count("$ref") + properties
}

/// Refuses a source that is too long.
fn check_length(length: usize, field: &str) -> Result<(), ApiError> {
    if length <= MAX_SOURCE {
        return Ok(());
    }
    let message = format!("has {length} bytes, but a schema or a grammar may have at most {MAX_SOURCE}");
    Err(ApiError::field(field, message))
}

/// Checks the references of a form's schema, if it has one.
fn check_references(form: &Form) -> Result<(), ApiError> {
    let ResponseFormat::JsonSchema { json_schema } = &form.format else { return Ok(()) };
    let checked = json_schema.schema.as_ref().map_or(Ok(()), references::check);
    checked.map_err(|message| ApiError::field(&form.field, message))
}

/// The right-hand side of a rule in Lark for a form; `None` for plain text.
///
/// # Errors
/// If the form is a grammar, which has rules of its own, or a reference of its schema leads back to itself.
pub(super) fn rule(form: &Form) -> Result<Option<String>, ApiError> {
    check_references(form)?;
    let json = |schema: &Value| Ok(Some(format!("%json {}", bounded(schema))));
    match &form.format {
        ResponseFormat::Text => Ok(None),
        ResponseFormat::JsonObject => json(&json!({"type": "object"})),
        ResponseFormat::JsonSchema { json_schema } => json(json_schema.schema.as_ref().unwrap_or(&json!({}))),
        ResponseFormat::Grammar { syntax: Syntax::Regex, definition } => {
            Ok(Some(format!("/{}/", definition.replace('/', "\\/"))))
        }
        ResponseFormat::Grammar { syntax: Syntax::Lark, .. } => {
            Err(ApiError::field(&form.field, "a grammar in Lark is not supported together with tools"))
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
    factory.limits_mut().max_lexer_states = MAX_LEXER_STATES;
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
    source: Arc<Source>,
    /// The state after the tokens so far; `None` before the first.
    matcher: Option<Matcher>,
}

impl GrammarConstraint {
    fn matcher(&mut self) -> &mut Matcher {
        let begin = || self.source.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        self.matcher.get_or_insert_with(begin)
    }
}

impl Clone for GrammarConstraint {
    fn clone(&self) -> Self {
        Self { source: self.source.clone(), matcher: self.matcher.as_ref().map(Matcher::deep_clone) }
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
        let mask = self.matcher().compute_mask_or_eos().map_err(|error| failed(&error.to_string()))?;
        for (word, allowed) in tokens.iter_mut().zip(mask.as_slice()) {
            *word = *allowed;
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        // An end token may follow a complete answer.
        let matcher = self.matcher();
        if matcher.is_stopped() {
            return Ok(());
        }
        matcher.consume_token(token).map_err(|error| failed(&error.to_string()))
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
