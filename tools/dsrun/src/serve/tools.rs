//! Tool calls: the formats that models write them in, and a parser that finds them in an answer.

mod json_call;
mod marked_call;

use super::api::chat::Function;
use dsrun_models::chat::ChatTemplate;
use json_call::{Head, ObjectEnd, head};
use serde_json::{Map, Value};

/// The beginning of a call in the Hermes format.
const OPEN: &str = "<tool_call>";
/// The end of a call in the Hermes format.
const CLOSE: &str = "</tool_call>";
/// What stands between calls in the other formats, and around them.
const SEPARATORS: [char; 8] = [' ', '\n', '\r', '\t', ';', ',', '[', ']'];

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
    functions: Vec<Function>,
    /// Calls that are still returned; later ones are dropped.
    left: usize,
    /// Whether the arguments that come belong to a call that is dropped.
    drops: bool,
    /// Text that may be a call, or the beginning of one.
    held: String,
    state: State,
    /// Calls so far.
    calls: usize,
}

#[derive(Debug)]
enum State {
    /// Only blanks so far.
    Start,
    /// Text for the reader.
    Outside,
    /// Where a call begins.
    Head,
    /// In the arguments of a call.
    Arguments(ObjectEnd),
    /// After the arguments of a call, before what closes it.
    Tail,
    /// In what may be a call with its fields in another order, which is read as a whole.
    Whole,
    /// After a call, where blanks are dropped.
    AfterCall,
}

impl ToolParser {
    /// A parser of answers that may call these functions, at most `limit` times.
    pub(crate) fn new(format: ToolFormat, functions: Vec<Function>, limit: usize) -> Self {
        Self {
            format,
            functions,
            left: limit,
            drops: false,
            held: String::new(),
            state: State::Start,
            calls: 0,
        }
    }

    /// Adds the next piece of text.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        // Each step takes text from what is held, or changes the state; the last one waits for more.
        while self.step(&mut parts) {}
        self.limited(parts)
    }

    /// Returns the rest at the end of the text.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        let parts = self.rest();
        self.limited(parts)
    }

    fn limited(&mut self, mut parts: Vec<Part>) -> Vec<Part> {
        parts.retain(|part| match part {
            Part::Text(_) => true,
            Part::Arguments(_) => !self.drops,
            Part::Begins { .. } => {
                self.drops = self.left == 0;
                self.left = self.left.saturating_sub(1);
                !self.drops
            }
        });
        parts
    }

    fn rest(&mut self) -> Vec<Part> {
        let held = std::mem::take(&mut self.held);
        let hermes = self.format == ToolFormat::Hermes;
        let calls = match self.state {
            State::Arguments(_) | State::Tail => Some(Vec::new()),
            State::Head | State::Whole if hermes => self.parse(&held),
            // What closes the list.
            State::Head if self.calls > 0 && held.trim_matches(SEPARATORS).is_empty() => Some(Vec::new()),
            State::Head | State::Whole => self.all_calls(&held),
            State::AfterCall if held.trim().is_empty() => Some(Vec::new()),
            _ => None,
        };
        let text = || match self.state {
            State::Head | State::Whole if hermes => format!("{OPEN}{held}"),
            _ => held.clone(),
        };
        calls.unwrap_or_else(|| {
            Some(text()).filter(|text| !text.is_empty()).map(Part::Text).into_iter().collect()
        })
    }

    /// Reads on, and returns whether there is more to read.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match &mut self.state {
            State::Start | State::AfterCall => self.start(),
            State::Outside => self.outside(parts),
            State::Head => self.head(parts),
            State::Arguments(end) => {
                let found = end.find(&self.held);
                let arguments: String = self.held.drain(..found.unwrap_or(self.held.len())).collect();
                if !arguments.is_empty() {
                    parts.push(Part::Arguments(arguments));
                }
                if found.is_some() {
                    self.state = State::Tail;
                }
                found.is_some()
            }
            State::Tail => self.tail(),
            State::Whole => self.whole(parts),
        }
    }

    /// Finds out whether a call begins after blanks.
    fn start(&mut self) -> bool {
        let blanks = self.held.len() - self.held.trim_start().len();
        let rest = &self.held[blanks..];
        let first = match self.format {
            ToolFormat::Hermes => OPEN,
            ToolFormat::Json => "{",
            ToolFormat::List => "[",
        };
        if rest.len() < first.len() && first.starts_with(rest) {
            return false;
        }
        let begins = rest.starts_with(first);
        // Blanks before a call are dropped; before text they are part of it.
        if begins && self.format == ToolFormat::Hermes {
            self.held.drain(..blanks);
        }
        self.state = if begins && self.format != ToolFormat::Hermes { State::Head } else { State::Outside };
        true
    }

    /// Takes text for the reader, up to what may begin a call.
    fn outside(&mut self, parts: &mut Vec<Part>) -> bool {
        let (end, open) = match (self.format, self.held.find(OPEN)) {
            (ToolFormat::Hermes, Some(end)) => (end, true),
            (ToolFormat::Hermes, None) => (self.held.len() - overlap(&self.held, OPEN), false),
            // Calls are the whole answer.
            _ => (self.held.len(), false),
        };
        let text: String = self.held.drain(..end).collect();
        if !text.is_empty() {
            parts.push(Part::Text(text));
        }
        if open {
            self.held.drain(..OPEN.len());
            self.state = State::Head;
        }
        open
    }

    /// Reads the beginning of a call.
    fn head(&mut self, parts: &mut Vec<Part>) -> bool {
        let separators = match self.format {
            ToolFormat::Hermes => 0,
            _ => self.held.len() - self.held.trim_start_matches(SEPARATORS).len(),
        };
        match head(&self.held[separators..]) {
            Head::Partial => false,
            Head::Call { name, arguments } if self.is_known(&name) => {
                self.held.drain(..separators + arguments);
                parts.push(Part::Begins { name });
                self.calls += 1;
                self.state = State::Arguments(ObjectEnd::default());
                true
            }
            // After calls, other text is for the reader.
            _ if self.calls > 0 && self.format != ToolFormat::Hermes => {
                self.state = State::Outside;
                true
            }
            _ => {
                self.state = State::Whole;
                true
            }
        }
    }

    /// Whether a call of this function is one. In the format with marks any is, and the client says that there is no such tool.
    fn is_known(&self, name: &str) -> bool {
        self.format == ToolFormat::Hermes || self.functions.iter().any(|known| known.name == name)
    }

    /// Skips what closes a call.
    fn tail(&mut self) -> bool {
        if self.format == ToolFormat::Hermes {
            let Some(end) = self.held.find(CLOSE) else {
                let kept = overlap(&self.held, CLOSE);
                self.held.drain(..self.held.len() - kept);
                return false;
            };
            self.held.drain(..end + CLOSE.len());
            self.state = State::AfterCall;
            return true;
        }
        let blanks = self.held.len() - self.held.trim_start().len();
        let closes = self.held[blanks..].starts_with('}');
        if self.held.len() > blanks {
            self.held.drain(..blanks + usize::from(closes));
            self.state = State::Head;
        }
        self.held.len() > blanks
    }

    /// Reads a call as a whole, once it is there.
    fn whole(&mut self, parts: &mut Vec<Part>) -> bool {
        // In the other formats the whole answer is calls, or none of it.
        let Some(end) = self.held.find(CLOSE).filter(|_| self.format == ToolFormat::Hermes) else {
            return false;
        };
        let text = &self.held[..end];
        // Anything else between the tags is text.
        parts.extend(self.parse(text).unwrap_or_else(|| vec![Part::Text(format!("{OPEN}{text}{CLOSE}"))]));
        self.held.drain(..end + CLOSE.len());
        self.state = State::AfterCall;
        true
    }

    /// A call that is there as a whole: as JSON, or with its arguments between marks.
    fn parse(&self, text: &str) -> Option<Vec<Part>> {
        let json = || as_call(serde_json::from_str(text.trim()).ok()?);
        let (name, arguments) = json().or_else(|| marked_call::parse(text, &self.functions))?;
        Some(vec![Part::Begins { name }, Part::Arguments(arguments)])
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
                let (name, arguments) = as_call(value)?;
                if !self.is_known(&name) {
                    return None;
                }
                calls.extend([Part::Begins { name }, Part::Arguments(arguments)]);
            }
            rest = rest[values.byte_offset()..].trim_start_matches(SEPARATORS);
        }
        Some(calls)
    }
}

/// The number of bytes at the end of a text that may be the beginning of `tag`.
fn overlap(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|length| text.ends_with(&tag[..*length])).unwrap_or(0)
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
    #[case("{% if tools %}<tool_call>{% endif %}", Some(ToolFormat::Hermes))]
    #[case("{% if tools %}{\"name\": f, \"parameters\": p}{% endif %}", Some(ToolFormat::Json))]
    #[case("{{ messages }}", None)]
    fn the_format_is_detected_from_the_template(#[case] source: &str, #[case] format: Option<ToolFormat>) {
        let template = ChatTemplate::new(source, &[]).expect("a template");
        assert_eq!(ToolFormat::of(&template), format);
    }
}
