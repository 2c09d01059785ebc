//! Tool calls: the formats that models write them in, and a parser that finds them in an answer.

use super::api::chat::Function;
use dsrun_models::chat::ChatTemplate;
use serde_json::{Map, Value};

/// The beginning of a call in the Hermes format.
const OPEN: &str = "<tool_call>";
/// The end of a call in the Hermes format.
const CLOSE: &str = "</tool_call>";

/// The format of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, several in an answer, text around them (Hermes, Qwen).
    Hermes,
    /// The whole answer is `{"name": .., "parameters": {..}}`, several with `;` between them (Llama 3).
    Json,
    /// The whole answer is a list `[{"name": .., "arguments": {..}}]` (Mistral, Phi-4-mini).
    List,
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
    /// A tool call. The arguments are JSON.
    Call { name: String, arguments: String },
}

impl ToolFormat {
    /// The format of a model, by its chat template; `None` if the template does not support tools.
    pub(crate) fn of(template: &ChatTemplate) -> Option<Self> {
        if !template.mentions("tools") {
            None
        } else if template.mentions(OPEN) {
            Some(Self::Hermes)
        } else if template.mentions("[TOOL_CALLS]") || template.mentions("<|tool_call|>") {
            Some(Self::List)
        } else if template.mentions("\"parameters\"") {
            Some(Self::Json)
        } else {
            None
        }
    }

    /// A Lark grammar of answers that call one of the functions, or several of them, or are something else.
    pub(crate) fn grammar(self, functions: &[&Function], several: bool, otherwise: &Otherwise) -> String {
        let calls = match (self, several) {
            (Self::Hermes, true) => "call (\"\\n\" call)*",
            (Self::Json, true) => "call (\"; \" call)*",
            (Self::Hermes | Self::Json, false) => "call",
            (Self::List, true) => "\"[\" call (\", \" call)* \"]\"",
            (Self::List, false) => "\"[\" call \"]\"",
        };
        let within_text = self == Self::Hermes && *otherwise == Otherwise::Text;
        let mut grammar = match (self, otherwise) {
            (_, Otherwise::Nothing) => format!("start: {calls}\n"),
            (_, Otherwise::Form(rule)) => format!("start: {calls} | form\nform: {rule}\n"),
            // From the mark on that begins a call, only a call may follow.
            (Self::Hermes, Otherwise::Text) => format!(
                "start: (opening call)* TEXT?\nopening[suffix=\"{OPEN}\"]: /(?s:.*)/\n\
                 TEXT: /(?s:.+)/ & ~/(?s:.*){OPEN}(?s:.*)/\n"
            ),
            (Self::Json, Otherwise::Text) => format!("start: {calls} | TEXT\nTEXT: /[^\\{{](?s:.*)/\n"),
            (Self::List, Otherwise::Text) => format!("start: {calls} | TEXT\nTEXT: /[^\\[](?s:.*)/\n"),
        };
        let calls: Vec<String> = (0..functions.len()).map(|index| format!("call{index}")).collect();
        grammar.push_str(&format!("call: {}\n", calls.join(" | ")));
        for (call, function) in calls.iter().zip(functions) {
            let name = Value::from(function.name.as_str());
            let (before, after) = match self {
                Self::Hermes if within_text => {
                    (format!("\n{{\"name\": {name}, \"arguments\": "), format!("}}\n{CLOSE}"))
                }
                Self::Hermes => {
                    (format!("{OPEN}\n{{\"name\": {name}, \"arguments\": "), format!("}}\n{CLOSE}"))
                }
                Self::Json => (format!("{{\"name\": {name}, \"parameters\": "), "}".to_owned()),
                Self::List => (format!("{{\"name\": {name}, \"arguments\": "), "}".to_owned()),
            };
            // Each function has a rule of its own, because references in a schema start at its root.
            let schema = arguments_schema(function);
            grammar.push_str(&format!(
                "{call}: {} arguments_{call} {}\narguments_{call}: %json {schema}\n",
                Value::from(before),
                Value::from(after)
            ));
        }
        grammar
    }
}

/// The schema of a function's arguments: an object, empty if the function has no parameters.
fn arguments_schema(function: &Function) -> Value {
    let empty = || serde_json::json!({"type": "object", "properties": {}, "additionalProperties": false});
    match &function.parameters {
        Some(Value::Object(schema)) if !schema.is_empty() => {
            let mut schema = schema.clone();
            schema.entry("type").or_insert_with(|| "object".into());
            Value::Object(schema)
        }
        _ => empty(),
    }
}

/// Finds tool calls in a text that arrives in pieces.
#[derive(Debug)]
pub(crate) struct ToolParser {
    format: ToolFormat,
    names: Vec<String>,
    /// Calls that are still returned; later ones are dropped.
    left: usize,
    /// Text that may be a call, or the beginning of one.
    held: String,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Only blanks so far.
    Start,
    /// Text for the reader.
    Outside,
    /// After the beginning of a call.
    Inside,
    /// After a call, where blanks are dropped.
    AfterCall,
}

impl ToolParser {
    /// A parser of answers that may call the functions of these names, at most `limit` times.
    pub(crate) fn new(format: ToolFormat, names: Vec<String>, limit: usize) -> Self {
        Self { format, names, left: limit, held: String::new(), state: State::Start }
    }

    /// Adds the next piece of text.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let parts = match self.format {
            ToolFormat::Hermes => self.hermes(),
            ToolFormat::Json => self.json('{'),
            ToolFormat::List => self.json('['),
        };
        self.limited(parts)
    }

    /// Returns the rest at the end of the text.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        let parts = self.rest();
        self.limited(parts)
    }

    fn limited(&mut self, mut parts: Vec<Part>) -> Vec<Part> {
        parts.retain(|part| {
            let call = matches!(part, Part::Call { .. });
            let dropped = call && self.left == 0;
            self.left -= usize::from(call && !dropped);
            !dropped
        });
        parts
    }

    fn rest(&mut self) -> Vec<Part> {
        let held = std::mem::take(&mut self.held);
        let calls = match (self.format, self.state) {
            (ToolFormat::Hermes, State::Inside) => parse(&held).map(|call| vec![call]),
            (ToolFormat::Json | ToolFormat::List, State::Inside) => self.all_calls(&held),
            (_, State::AfterCall) if held.trim().is_empty() => Some(Vec::new()),
            _ => None,
        };
        let text = || match self.state {
            State::Inside if self.format == ToolFormat::Hermes => format!("{OPEN}{held}"),
            _ => held.clone(),
        };
        calls.unwrap_or_else(|| {
            Some(text()).filter(|text| !text.is_empty()).map(Part::Text).into_iter().collect()
        })
    }

    fn hermes(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        loop {
            if self.state == State::Inside {
                let Some(end) = self.held.find(CLOSE) else { return parts };
                let call = parse(&self.held[..end]);
                // Anything else between the tags is text.
                parts.push(call.unwrap_or_else(|| Part::Text(format!("{OPEN}{}{CLOSE}", &self.held[..end]))));
                self.held.drain(..end + CLOSE.len());
                self.state = State::AfterCall;
            }
            if matches!(self.state, State::Start | State::AfterCall) {
                let blanks = self.held.len() - self.held.trim_start().len();
                // Blanks before a call are dropped; before text they are part of it.
                let rest = &self.held[blanks..];
                if rest.len() < OPEN.len() && OPEN.starts_with(rest) {
                    return parts;
                }
                if rest.starts_with(OPEN) {
                    self.held.drain(..blanks);
                }
                self.state = State::Outside;
            }
            let (end, open) = match self.held.find(OPEN) {
                Some(end) => (end, true),
                None => (self.held.len() - overlap(&self.held, OPEN), false),
            };
            let text: String = self.held.drain(..end).collect();
            if !text.is_empty() {
                parts.push(Part::Text(text));
            }
            if !open {
                return parts;
            }
            self.held.drain(..OPEN.len());
            self.state = State::Inside;
        }
    }

    /// Parses an answer that is calls as a whole if it begins with `first`.
    fn json(&mut self, first: char) -> Vec<Part> {
        if self.state == State::Start {
            match self.held.trim_start().chars().next() {
                None => return Vec::new(),
                Some(character) if character == first => self.state = State::Inside,
                Some(_) => self.state = State::Outside,
            }
        }
        // Whether an answer that begins like a call is one is known at its end.
        if self.state == State::Inside || self.held.is_empty() {
            return Vec::new();
        }
        vec![Part::Text(std::mem::take(&mut self.held))]
    }

    /// The calls of a text, if it consists of calls of known functions only.
    fn all_calls(&self, text: &str) -> Option<Vec<Part>> {
        let mut calls = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            let values_here = match values.next()?.ok()? {
                Value::Array(list) => list,
                value => vec![value],
            };
            for value in values_here {
                let call = as_call(value)?;
                let Part::Call { name, .. } = &call else { return None };
                if !self.names.contains(name) {
                    return None;
                }
                calls.push(call);
            }
            rest = rest[values.byte_offset()..].trim_start_matches([';', ' ', '\n', '\r', '\t']);
        }
        Some(calls)
    }
}

/// The number of bytes at the end of a text that may be the beginning of `tag`.
fn overlap(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|length| text.ends_with(&tag[..*length])).unwrap_or(0)
}

fn parse(text: &str) -> Option<Part> {
    as_call(serde_json::from_str(text.trim()).ok()?)
}

/// A call, with its arguments under either name. Arguments may be JSON in a string.
fn as_call(value: Value) -> Option<Part> {
    let Value::Object(mut call) = value else { return None };
    let Some(Value::String(name)) = call.remove("name") else { return None };
    let arguments = call.remove("arguments").or_else(|| call.remove("parameters"));
    let arguments = match arguments {
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => serde_json::from_str(&text).ok()?,
        None | Some(Value::Null) => Map::new(),
        Some(_) => return None,
    };
    Some(Part::Call { name, arguments: Value::Object(arguments).to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn text(text: &str) -> Part {
        Part::Text(text.into())
    }

    fn call(name: &str, arguments: &str) -> Part {
        Part::Call { name: name.into(), arguments: arguments.into() }
    }

    /// The parts of a text that arrives in pieces of this many characters, with neighbouring texts joined.
    fn parts(format: ToolFormat, answer: &str, size: usize) -> Vec<Part> {
        let mut parser = ToolParser::new(format, vec!["f".into(), "g".into()], usize::MAX);
        let characters: Vec<char> = answer.chars().collect();
        let mut parts: Vec<Part> = Vec::new();
        let pieces: Vec<Vec<Part>> =
            characters.chunks(size).map(|piece| parser.push(&piece.iter().collect::<String>())).collect();
        for part in pieces.into_iter().flatten().chain(parser.finish()) {
            match (parts.last_mut(), part) {
                (Some(Part::Text(before)), Part::Text(text)) => before.push_str(&text),
                (_, part) => parts.push(part),
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

    #[rstest]
    #[case("{% if tools %}[TOOL_CALLS]{% endif %}", Some(ToolFormat::List))]
    #[case("{% if tools %}<tool_call>{% endif %}", Some(ToolFormat::Hermes))]
    #[case("{% if tools %}{\"name\": f, \"parameters\": p}{% endif %}", Some(ToolFormat::Json))]
    #[case("{{ messages }}", None)]
    fn the_format_is_detected_from_the_template(#[case] source: &str, #[case] format: Option<ToolFormat>) {
        let template = ChatTemplate::new(source, &[]).expect("a template");
        assert_eq!(ToolFormat::of(&template), format);
    }
}
