//! Chat templates: from messages to the text of a prompt.
//!
//! A model is trained on conversations written in one particular way, which its Jinja template defines. Templates are
//! written for Python, so this renders them as Hugging Face's `apply_chat_template` does: same variables and functions,
//! same treatment of blanks around tags, Python's methods on values and its way to write them.
//!
//! Templates come with models, from strangers: they can call nothing but what is defined here, and their nesting,
//! their running time and their memory are bounded.

mod bounds;
mod budget;
mod guard;
mod json;
mod methods;

use std::sync::Arc;

use minijinja::machinery::{CompiledTemplate, TemplateConfig, eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use serde::{Deserialize, Deserializer, Serialize};

use crate::tokenizer::{EncodeOptions, NamedTemplate, Tokenizer, TokenizerError};

/// The template that is used if none is named.
const DEFAULT: &str = "default";
/// The template that is used if none is named and there are tools.
const TOOL_USE: &str = "tool_use";
/// The maximum number of template-engine instructions of a rendering: about a second, far more than any conversation needs.
const FUEL: u64 = 20_000_000;

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, ..
    pub role: String,
    /// A text, or a list of parts (`[{"type": "text", "text": ..}]`) for templates that know them. A message that calls
    /// tools may have `null` or none.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub content: Option<serde_json::Value>,
    /// The other fields that the template may read: `tool_calls`, `name`, `reasoning_content`, ..
    #[serde(flatten)]
    pub other: serde_json::Map<String, serde_json::Value>,
}

/// Distinguishes `null` from a missing field, as templates do.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<serde_json::Value>, D::Error> {
    serde_json::Value::deserialize(deserializer).map(Some)
}

impl Message {
    /// A message of text.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(text.into().into()), other: serde_json::Map::new() }
    }
}

/// The variables of a template besides the messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RenderOptions {
    /// Ends the text with the start of an answer, so that the model writes one.
    pub add_generation_prompt: bool,
    /// The tools that the model may call, as JSON schemas.
    pub tools: Option<Vec<serde_json::Value>>,
    /// Documents for retrieval-augmented generation.
    pub documents: Option<Vec<serde_json::Value>>,
    /// Which of several templates to use. Without it `tool_use` if there are tools and such a template, else `default`.
    pub template: Option<String>,
    /// Further variables, such as `enable_thinking`.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// The time for templates that print the date, in seconds since 1970, in UTC. Without it, the local time.
    pub now: Option<i64>,
}

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ChatError {
    /// The template is not valid, or does something that fails.
    #[error("chat template \"{template}\"{}: {message}", at(.line))]
    Template {
        /// The name of the template.
        template: String,
        /// The line, counted from 1.
        line: Option<usize>,
        /// What is wrong.
        message: String,
    },
    /// The template refuses the conversation, for example because roles do not alternate.
    #[error("chat template \"{template}\" refuses the conversation{}: {message}", at(.line))]
    Refused {
        /// The name of the template.
        template: String,
        /// The line, counted from 1.
        line: Option<usize>,
        /// What the template says.
        message: String,
    },
    /// There is no template of that name.
    #[error("there is no chat template \"{template}\"; there are: {known}")]
    Unknown {
        /// The name that was asked for.
        template: String,
        /// The names of the templates, with commas.
        known: String,
    },
}

fn at(line: &Option<usize>) -> String {
    line.map(|line| format!(", line {line}")).unwrap_or_default()
}

/// Marks the errors that a template raises with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct Raised;

/// The chat template of a model, or its several named ones.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    templates: Vec<NamedTemplate>,
    names: Vec<String>,
    special_tokens: Vec<(String, String)>,
}

impl ChatTemplate {
    /// A single template. `special_tokens` are variables for it: `("bos_token", "<s>")` and so on.
    ///
    /// # Errors
    /// When the template does not parse.
    pub fn new(source: &str, special_tokens: &[(String, String)]) -> Result<Self, ChatError> {
        let template = NamedTemplate { name: DEFAULT.to_owned(), source: source.to_owned() };
        Self::with_names(&[template], special_tokens)
    }

    /// Several templates, chosen by [`RenderOptions::template`].
    ///
    /// # Errors
    /// When one of them does not parse.
    pub fn with_names(
        templates: &[NamedTemplate],
        special_tokens: &[(String, String)],
    ) -> Result<Self, ChatError> {
        let environment = environment().map_err(|error| failure(DEFAULT, &error))?;
        let mut prepared = Vec::new();
        for NamedTemplate { name, source } in templates {
            bounds::check(source, environment.syntax()).map_err(|bounds::Exceeded { line, message }| {
                ChatError::Template { template: name.clone(), line, message }
            })?;
            let source = without_generation_tags(source);
            // Reports errors of the source now, before the first conversation.
            guarded(name, || compile(&environment, name, &source).map(drop))?;
            prepared.push(NamedTemplate { name: name.clone(), source });
        }
        let names = templates.iter().map(|template| template.name.clone()).collect();
        Ok(Self { environment, templates: prepared, names, special_tokens: special_tokens.to_vec() })
    }

    /// The names of the templates, in the order given.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether the model defines this variable for its templates, such as `bos_token`.
    pub fn defines(&self, variable: &str) -> bool {
        self.special_tokens.iter().any(|(name, _)| name == variable)
    }

    /// Whether the source of any template contains this text, such as `tools` in those that support tools.
    pub fn mentions(&self, text: &str) -> bool {
        self.templates.iter().any(|template| template.source.contains(text))
    }

    /// Writes a conversation as a prompt for a tokenizer. Control tokens that are written in messages, tools, documents and
    /// variables stay text: only the template's own are read as tokens.
    ///
    /// Control tokens are those that the tokenizer calls special. Others that it finds in any text, such as `<think>` in some
    /// models, it finds in messages too.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<ChatPrompt, ChatError> {
        let (mut messages, mut options) = (messages.to_vec(), options.clone());
        let taken =
            |character: char| self.templates.iter().any(|template| template.source.contains(character));
        let stand_ins = guard::protect(&mut messages, &mut options, tokenizer.control_tokens(), taken);
        Ok(ChatPrompt { text: self.render(&messages, &options)?, stand_ins })
    }

    /// Writes a conversation as text, which does not tell control tokens of the template from those written in messages: for
    /// a model, use [`Self::prompt`].
    ///
    /// # Errors
    /// When the template refuses the conversation or fails, and when there is no template of the name asked for.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ChatError> {
        let has = |name: &str| self.names.iter().any(|known| known == name);
        let name = match options.template.as_deref() {
            Some(name) => name,
            None if options.tools.is_some() && has(TOOL_USE) => TOOL_USE,
            // The single template of a model is the default, whatever its name.
            None if self.names.len() == 1 && !has(DEFAULT) => &self.names[0],
            None => DEFAULT,
        };
        if !has(name) {
            let known = self.names.join(", ");
            return Err(ChatError::Unknown { template: name.to_owned(), known });
        }
        let messages: Vec<Message> = messages.iter().map(with_reasoning_names).collect();
        let mut context: Vec<(String, Value)> = Vec::new();
        for (key, text) in &self.special_tokens {
            context.push((key.clone(), Value::from(text.as_str())));
        }
        for (key, value) in &options.variables {
            context.push((key.clone(), Value::from(Serde(value))));
        }
        context.push(("messages".to_owned(), Value::from(Serde(&messages))));
        context.push(("tools".to_owned(), Value::from(Serde(&options.tools))));
        context.push(("documents".to_owned(), Value::from(Serde(&options.documents))));
        context.push(("add_generation_prompt".to_owned(), Value::from(options.add_generation_prompt)));
        let now = options.now;
        let clock = move |format: &str| time_text(format, now);
        context.push(("strftime_now".to_owned(), Value::from_function(clock)));

        let source = self.templates.iter().find(|template| template.name == name);
        let source = source.map_or("", |template| template.source.as_str());
        guarded(name, || {
            let compiled = compile(&self.environment, name, source)?;
            let (instructions, blocks) = budget::counted(&compiled);
            let mut text = String::new();
            let mut output = make_string_output(&mut text);
            budget::start();
            let root = Value::from_pairs(context);
            eval(&self.environment, &instructions, root, &blocks, &mut output, AutoEscape::None)?;
            Ok(text)
        })
    }
}

/// A conversation as the text of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatPrompt {
    text: String,
    /// Placeholder characters of the text and the characters they stand for, so that no control token is found there.
    stand_ins: Vec<(char, char)>,
}

impl ChatPrompt {
    /// Whether the prompt ends with a text, not counting blanks after it.
    pub fn ends_with(&self, text: &str) -> bool {
        self.text.trim_end().ends_with(text)
    }

    /// Ends the prompt before the last place where `mark` stands. Returns whether there is one.
    pub fn end_before(&mut self, mark: &str) -> bool {
        match self.text.rfind(mark) {
            Some(place) => {
                self.text.truncate(place);
                true
            }
            None => false,
        }
    }

    /// The tokens of the prompt, for the tokenizer it was written for. The template has written all of its special tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
        tokenizer.encode_with(&self.text, Self::OPTIONS, &self.stand_ins)
    }

    /// As [`Self::encode`], but `None` if the prompt certainly has more than `most` tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_within(
        &self,
        tokenizer: &Tokenizer,
        most: usize,
    ) -> Result<Option<Vec<u32>>, TokenizerError> {
        tokenizer.encode_within_with(&self.text, Self::OPTIONS, &self.stand_ins, most)
    }

    const OPTIONS: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };
}

/// Compiles a template.
fn compile<'source>(
    environment: &Environment<'_>,
    name: &'source str,
    source: &'source str,
) -> Result<CompiledTemplate<'source>, minijinja::Error> {
    let config = TemplateConfig {
        syntax_config: environment.syntax().clone(),
        default_auto_escape: Arc::new(|_| AutoEscape::None),
    };
    CompiledTemplate::new(name, source, &config)
}

/// The template environment of Hugging Face's chat templates.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(methods::call);
    environment.add_filter("tojson", json::tojson);
    // Only floats are formatted differently from Python.
    environment
        .add_filter("string", |value: &Value| json::python_float(value).unwrap_or_else(|| value.to_string()));
    environment.set_formatter(|output, state, value| {
        budget::spend_written(value)?;
        match json::python_float(value) {
            Some(text) => output.write_str(&text).map_err(minijinja::Error::from),
            None => minijinja::escape_formatter(output, state, value),
        }
    });
    budget::prepare(&mut environment);
    environment.add_function("raise_exception", raise_exception);
    // In Jinja a text is a sequence and can be iterated over, and so is a mapping; templates tell texts from lists by
    // the order in which they ask.
    let has_items = |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Bytes)
    };
    environment.add_test("sequence", has_items);
    environment.add_test("iterable", move |value: &Value| {
        has_items(value) || value.kind() == ValueKind::Iterable || value.is_undefined()
    });
    Ok(environment)
}

fn raise_exception(message: &Value) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.to_string()).with_source(Raised))
}

/// `strftime_now`: the time in the notation of C's `strftime`.
fn time_text(format: &str, now: Option<i64>) -> Result<String, minijinja::Error> {
    let error = |error: jiff::Error| {
        minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}"))
    };
    let now = match now {
        Some(seconds) => {
            jiff::Timestamp::from_second(seconds).map_err(error)?.to_zoned(jiff::tz::TimeZone::UTC)
        }
        None => jiff::Zoned::now(),
    };
    jiff::fmt::strtime::format(format, &now).map_err(error)
}

/// Reasoning has three field names: most templates read `reasoning_content`, some `thinking`.
fn with_reasoning_names(message: &Message) -> Message {
    let mut message = message.clone();
    let names = ["reasoning_content", "thinking", "reasoning"];
    let reasoning = names.iter().find_map(|name| message.other.get(*name).filter(|value| !value.is_null()));
    if let Some(reasoning) = reasoning.cloned() {
        message.other.entry("thinking").or_insert_with(|| reasoning.clone());
        message.other.insert("reasoning_content".to_owned(), reasoning);
    }
    message
}

/// Replaces `{% generation %}` and its end, which mark the tokens to train on, by tags that only open a scope. The
/// marks for blanks and the line numbers stay as they are.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        result.push_str(before);
        rest = tag;
        let Some((inside, _)) = tag.split_once("%}") else { break };
        let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        result.push_str(&inside.replacen(word, replacement, 1));
        rest = &tag[inside.len()..];
    }
    result.push_str(rest);
    result
}

/// Runs the template engine, which panics in a few cases (`[][::-1]`) where Python has an answer.
fn guarded<T>(template: &str, call: impl FnOnce() -> Result<T, minijinja::Error>) -> Result<T, ChatError> {
    match crate::guarded::guarded(call) {
        Some(result) => result.map_err(|error| failure(template, &error)),
        None => Err(ChatError::Template {
            template: template.to_owned(),
            line: None,
            message: "the template engine gave up on it".to_owned(),
        }),
    }
}

fn failure(template: &str, error: &minijinja::Error) -> ChatError {
    let line = error.line();
    let template = error.name().unwrap_or(template).to_owned();
    let raised =
        std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| error.source())
            .any(|cause| cause.is::<Raised>());
    if raised {
        return ChatError::Refused { template, line, message: error.detail().unwrap_or_default().to_owned() };
    }
    let message = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None if error.kind() == ErrorKind::OutOfFuel => "it takes too long".to_owned(),
        None => error.kind().to_string(),
    };
    ChatError::Template { template, line, message }
}

#[cfg(test)]
mod tests;
