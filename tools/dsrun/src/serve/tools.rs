//! Tool calls: the formats that models write them in, and a parser that finds them in an answer.

mod call_grammar;
mod harmony;
mod json_call;
mod json_calls;
mod marked_call;
mod named_calls;
mod pythonic;

use super::api::chat::Function;
use dsrun_models::{chat::ChatTemplate, tokenizer::Tokenizer};
use harmony::HarmonyParser;
use json_calls::{JsonCallParser, JsonCalls, OPEN};
use named_calls::{DEEPSEEK, MISTRAL, NamedCallParser};
use pythonic::PythonicParser;
use serde_json::{Map, Value};

/// The format of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, several in an answer, text around them (Hermes, Qwen). GLM and
    /// Qwen3-Coder have marks around each argument instead.
    Hermes,
    /// The whole answer is `{"name": .., "parameters": {..}}`, several with `;` between them (Llama 3).
    Json,
    /// The whole answer is a list `[{"name": .., "arguments": {..}}]` (Mistral, Phi-4-mini).
    List,
    /// `[TOOL_CALLS]name[ARGS]{..}`, several in an answer, after text (Mistral since 2025).
    Mistral,
    /// `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{..}<｜tool▁call▁end｜>` (DeepSeek-V3.1).
    DeepSeek {
        /// Whether the arguments are in a fenced block, and the name behind the word `function` (DeepSeek-V3 and R1).
        fenced: bool,
    },
    /// The whole answer is `[name(key=value)]` (Llama 4, Llama 3.2, Gemma 3).
    Pythonic,
    /// Messages on channels, also for reasoning and answers (gpt-oss).
    Harmony,
}

/// What an answer may be besides calls.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Otherwise {
    /// Nothing: a call is required.
    Nothing,
    /// Any text, which may also stand around calls where the form has room for it.
    Text,
    /// An answer that follows the right-hand side of a rule in Lark.
    Form(String),
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Part {
    /// Text for the reader.
    Text(String),
    /// Reasoning, in the formats that have it.
    Reasoning(String),
    /// A tool call begins.
    Begins {
        /// The name of the function.
        name: String,
    },
    /// The next part of the arguments of the last call, which are JSON as a whole.
    Arguments(String),
}

impl ToolFormat {
    /// The format of a model, by its chat template; `None` if the template does not support tools.
    pub(crate) fn of(template: &ChatTemplate) -> Option<Self> {
        if template.mentions("<|channel|>") && template.mentions("<|message|>") {
            Some(Self::Harmony)
        } else if !template.mentions("tools") {
            None
        } else if template.mentions(DEEPSEEK.open) {
            Some(Self::DeepSeek { fenced: template.mentions("```json") })
        } else if template.mentions("func_name1(") {
            Some(Self::Pythonic)
        } else if template.mentions(OPEN) {
            Some(Self::Hermes)
        } else if template.mentions(MISTRAL.open) && template.mentions(MISTRAL.separator) {
            Some(Self::Mistral)
        } else if template.mentions("[TOOL_CALLS]") || template.mentions("<|tool_call|>") {
            Some(Self::List)
        } else if template.mentions("\"parameters\"") {
            Some(Self::Json)
        } else {
            None
        }
    }

    /// Whether answers have reasoning, calls and text on channels.
    pub(crate) fn has_channels(self) -> bool {
        self == Self::Harmony
    }

    /// The marks that a parser of the format reads.
    pub(crate) fn marks(self) -> Vec<&'static str> {
        match self {
            Self::Mistral => MISTRAL.all().collect(),
            Self::DeepSeek { .. } => DEEPSEEK.all().collect(),
            Self::Harmony => harmony::MARKS.into(),
            Self::Hermes | Self::Json | Self::List | Self::Pythonic => Vec::new(),
        }
    }

    /// A Lark grammar of answers that call one of the functions, or several of them, or are something else.
    pub(crate) fn grammar(
        self,
        functions: &[&Function],
        several: bool,
        otherwise: &Otherwise,
        tokenizer: &Tokenizer,
    ) -> String {
        call_grammar::grammar(self, functions, several, otherwise, &|mark| as_lark(mark, tokenizer))
    }

    /// A Lark grammar of answers without calls that follow the right-hand side of a rule; `None` if the rule is all of it.
    pub(crate) fn form(self, rule: &str, tokenizer: &Tokenizer) -> Option<String> {
        self.has_channels().then(|| call_grammar::form(rule, &|mark| as_lark(mark, tokenizer)))
    }
}

/// A mark as Lark writes it: as a control token if it is one, else as a text.
fn as_lark(mark: &str, tokenizer: &Tokenizer) -> String {
    match tokenizer.token_to_id(mark).filter(|id| tokenizer.is_special(*id)) {
        Some(id) => format!("<[{id}]>"),
        None => Value::from(mark).to_string(),
    }
}

/// Finds tool calls in a text that arrives in pieces.
#[derive(Debug)]
pub(crate) struct ToolParser {
    form: Form,
    /// Calls that are still returned; later ones are dropped.
    left: usize,
    /// Whether the arguments that come belong to a call that is dropped.
    drops: bool,
}

/// The parser of a format.
#[derive(Debug)]
enum Form {
    Json(JsonCallParser),
    Named(NamedCallParser),
    Pythonic(PythonicParser),
    Harmony(HarmonyParser),
}

impl ToolParser {
    /// A parser of answers that may call these functions, at most `limit` times.
    pub(crate) fn new(format: ToolFormat, functions: Vec<Function>, limit: usize) -> Self {
        let names = || functions.iter().map(|function| function.name.clone()).collect();
        let form = match format {
            ToolFormat::Hermes => Form::Json(JsonCallParser::new(JsonCalls::Hermes, functions)),
            ToolFormat::Json => Form::Json(JsonCallParser::new(JsonCalls::Json, functions)),
            ToolFormat::List => Form::Json(JsonCallParser::new(JsonCalls::List, functions)),
            ToolFormat::Mistral => Form::Named(NamedCallParser::new(&MISTRAL)),
            ToolFormat::DeepSeek { .. } => Form::Named(NamedCallParser::new(&DEEPSEEK)),
            ToolFormat::Pythonic => Form::Pythonic(PythonicParser::new(names())),
            ToolFormat::Harmony => Form::Harmony(HarmonyParser::default()),
        };
        Self { form, left: limit, drops: false }
    }

    /// Adds the next piece of text.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Part> {
        let parts = match &mut self.form {
            Form::Json(parser) => parser.push(text),
            Form::Named(parser) => parser.push(text),
            Form::Pythonic(parser) => parser.push(text),
            Form::Harmony(parser) => parser.push(text),
        };
        self.limited(parts)
    }

    /// Returns the rest at the end of the text.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        let parts = match &mut self.form {
            Form::Json(parser) => parser.finish(),
            Form::Named(parser) => parser.finish(),
            Form::Pythonic(parser) => parser.finish(),
            Form::Harmony(parser) => parser.finish(),
        };
        self.limited(parts)
    }

    fn limited(&mut self, mut parts: Vec<Part>) -> Vec<Part> {
        parts.retain(|part| match part {
            Part::Text(_) | Part::Reasoning(_) => true,
            Part::Arguments(_) => !self.drops,
            Part::Begins { .. } => {
                self.drops = self.left == 0;
                self.left = self.left.saturating_sub(1);
                !self.drops
            }
        });
        parts
    }
}

/// The number of bytes at the end of a text that may be the beginning of `tag`.
fn overlap(text: &str, tag: &str) -> usize {
    let begins = |length: &usize| tag.get(..*length).is_some_and(|begin| text.ends_with(begin));
    (1..tag.len()).rev().find(begins).unwrap_or(0)
}

/// The name and the arguments of a call, which may be under either name, and JSON in a string.
fn as_call(value: Value) -> Option<(String, String)> {
    let Value::Object(mut call) = value else { return None };
    let Some(Value::String(name)) = call.remove("name") else { return None };
    let arguments = call.remove("arguments").or_else(|| call.remove("parameters"));
    let arguments = match arguments {
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => serde_json::from_str(&text).ok()?,
        None | Some(Value::Null) => Map::new(),
        Some(_) => return None,
    };
    Some((name, Value::Object(arguments).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn text(text: &str) -> Part {
        Part::Text(text.into())
    }

    fn functions() -> Vec<Function> {
        let function =
            |name: &str| Function { name: name.into(), description: None, parameters: None, strict: None };
        ["f", "g"].map(function).into()
    }

    /// A call, in a form that is easy to write and to compare.
    fn call(name: &str, arguments: &str) -> Part {
        Part::Begins { name: format!("{name}({arguments})") }
    }

    /// The parts of a text that arrives in pieces of this many characters, with neighbouring texts joined.
    fn parts(format: ToolFormat, answer: &str, size: usize) -> Vec<Part> {
        let mut parser = ToolParser::new(format, functions(), usize::MAX);
        let characters: Vec<char> = answer.chars().collect();
        let mut parts: Vec<Part> = Vec::new();
        let pieces: Vec<Vec<Part>> =
            characters.chunks(size).map(|piece| parser.push(&piece.iter().collect::<String>())).collect();
        for part in pieces.into_iter().flatten().chain(parser.finish()) {
            match (parts.last_mut(), part) {
                (Some(Part::Text(before)), Part::Text(text)) => before.push_str(&text),
                (Some(Part::Begins { name }), Part::Arguments(text)) => name.push_str(&text),
                (_, part) => parts.push(part),
            }
        }
        // Arguments are JSON, however they were written.
        for part in &mut parts {
            if let Part::Begins { name: call } = part {
                let (name, arguments) = call.split_at(1);
                let arguments = serde_json::from_str(arguments)
                    .map_or(arguments.to_owned(), |value: Value| value.to_string());
                *call = format!("{name}({arguments})");
            }
        }
        parts
    }

    #[rstest]
    #[case("Hello.", vec![text("Hello.")])]
    #[case("", vec![])]
    #[case("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>", vec![call("f", r#"{"x":1}"#)])]
    #[case(
        "Let me see.\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n<tool_call>{\"name\": \"g\"}</tool_call>",
        vec![text("Let me see.\n"), call("f", "{}"), call("g", "{}")]
    )]
    #[case("<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 2}\"}</tool_call>", vec![call("f", r#"{"x":2}"#)])]
    #[case("<tool_call>{\"name\": \"f\", \"arguments\": {}}", vec![call("f", "{}")])]
    #[case("<tool_call>{\"arguments\": {\"x\": 1}, \"name\": \"f\"}</tool_call>", vec![call("f", r#"{"x":1}"#)])]
    #[case("<tool_call>{\"name\": \"f\"}</tool_call> Done.", vec![call("f", "{}"), text(" Done.")])]
    #[case("<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call>\"}}</tool_call>", vec![call("f", r#"{"x":"</tool_call>"}"#)])]
    // A limit cuts the arguments off.
    #[case("<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1", vec![call("f", "{\"x\": 1")])]
    #[case("<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", vec![call("f", r#"{"x":1}"#)])]
    #[case("<tool_call>\n<function=g>\n<parameter=x>\n[1]\n</parameter>\n</function>\n</tool_call> Done.", vec![call("g", r#"{"x":[1]}"#), text(" Done.")])]
    // Models forget the closing mark.
    #[case("<tool_call>{\"name\": \"f\", \"arguments\": {}} Done.", vec![call("f", "{}"), text("Done.")])]
    #[case(
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}\n<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>",
        vec![call("f", "{}"), call("g", "{}")]
    )]
    #[case("<tool_call>{\"name\": \"f\", \"arguments\": {}, \"id\": 1}</tool_call>", vec![call("f", "{}")])]
    #[case("<tool_call>nonsense</tool_call>", vec![text("<tool_call>nonsense</tool_call>")])]
    #[case("<tool_call>nonsense", vec![text("<tool_call>nonsense")])]
    #[case("a < b <tool", vec![text("a < b <tool")])]
    #[case("  indented", vec![text("  indented")])]
    fn hermes(#[case] answer: &str, #[case] expected: Vec<Part>, #[values(1, 3, 1000)] size: usize) {
        assert_eq!(parts(ToolFormat::Hermes, answer, size), expected);
    }

    #[rstest]
    #[case("Hello.", vec![text("Hello.")])]
    #[case("{\"name\": \"f\", \"parameters\": {\"x\": 1}}", vec![call("f", r#"{"x":1}"#)])]
    #[case("{\"name\": \"f\"}; {\"name\": \"g\", \"parameters\": {}}", vec![call("f", "{}"), call("g", "{}")])]
    #[case("{\"name\": \"unknown\"}", vec![text("{\"name\": \"unknown\"}")])]
    #[case("{\"answer\": 4}", vec![text("{\"answer\": 4}")])]
    #[case("{\"name\": \"f\", ", vec![text("{\"name\": \"f\", ")])]
    #[case("{\"name\": \"f\", \"parameters\": {\"x\": {\"y\": 1}}}", vec![call("f", r#"{"x":{"y":1}}"#)])]
    #[case(
        "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}\n",
        vec![call("f", "{}"), call("g", "{}")]
    )]
    fn json(#[case] answer: &str, #[case] expected: Vec<Part>, #[values(1, 3, 1000)] size: usize) {
        assert_eq!(parts(ToolFormat::Json, answer, size), expected);
    }

    #[rstest]
    #[case("Hello.", vec![text("Hello.")])]
    #[case(" [{\"name\": \"f\", \"arguments\": {\"x\": 1}}]", vec![call("f", r#"{"x":1}"#)])]
    #[case("[{\"name\": \"f\"}, {\"name\": \"g\", \"arguments\": {}}]", vec![call("f", "{}"), call("g", "{}")])]
    #[case("[1] is a list", vec![text("[1] is a list")])]
    fn list(#[case] answer: &str, #[case] expected: Vec<Part>, #[values(1, 3, 1000)] size: usize) {
        assert_eq!(parts(ToolFormat::List, answer, size), expected);
    }

    #[test]
    fn arguments_come_piece_by_piece() {
        for (format, before, after) in [
            (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": ", "}</tool_call>"),
            (ToolFormat::Json, "{\"name\": \"f\", \"parameters\": ", "}"),
            (ToolFormat::List, "[{\"name\": \"f\", \"arguments\": ", "}]"),
        ] {
            let mut parser = ToolParser::new(format, functions(), usize::MAX);
            assert_eq!(parser.push(before), []);
            let begins = vec![Part::Begins { name: "f".into() }, Part::Arguments("{\"x\"".into())];
            assert_eq!(parser.push("{\"x\""), begins);
            assert_eq!(parser.push(": [1,"), [Part::Arguments(": [1,".into())]);
            assert_eq!(parser.push("2]}"), [Part::Arguments("2]}".into())]);
            assert_eq!(parser.push(after), []);
            assert_eq!(parser.finish(), []);
        }
    }

    #[test]
    fn calls_beyond_the_limit_are_dropped_with_their_arguments() {
        let call = "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>";
        let mut parser = ToolParser::new(ToolFormat::Hermes, functions(), 1);
        let parts = parser.push(&format!("{call}{call}"));
        assert_eq!(parts, [Part::Begins { name: "f".into() }, Part::Arguments("{\"x\": 1}".into())]);
    }

    #[rstest]
    #[case("{% if tools %}[TOOL_CALLS]{% endif %}", Some(ToolFormat::List))]
    #[case("{% if tools %}[TOOL_CALLS]f[ARGS]{% endif %}", Some(ToolFormat::Mistral))]
    #[case("{% if tools %}<｜tool▁call▁begin｜>f```json{% endif %}", Some(ToolFormat::DeepSeek { fenced: true }))]
    #[case("{% if tools %}<｜tool▁call▁begin｜>f{% endif %}", Some(ToolFormat::DeepSeek { fenced: false }))]
    #[case("{% if tools %}[func_name1(x=1)] {\"parameters\"}{% endif %}", Some(ToolFormat::Pythonic))]
    #[case("<|start|>{{ messages }}<|channel|>final<|message|>", Some(ToolFormat::Harmony))]
    #[case("{% if tools %}<tool_call>{% endif %}", Some(ToolFormat::Hermes))]
    #[case("{% if tools %}{\"name\": f, \"parameters\": p}{% endif %}", Some(ToolFormat::Json))]
    #[case("{{ messages }}", None)]
    fn the_format_is_detected_from_the_template(#[case] source: &str, #[case] format: Option<ToolFormat>) {
        let template = ChatTemplate::new(source, &[]).expect("a template");
        assert_eq!(ToolFormat::of(&template), format);
    }
}
