//! Grammars in Lark of answers that call functions.

use super::{
    Otherwise, ToolFormat, harmony,
    json_calls::{CLOSE, OPEN},
    named_calls::{CallMarks, DEEPSEEK, MISTRAL},
};
use crate::serve::{api::chat::Function, grammar::schema::bounded};
use serde_json::{Map, Value, json};

/// Writes a mark as Lark does: as a control token if it is one, else as a text.
pub(super) type Mark<'a> = &'a dyn Fn(&str) -> String;

/// The grammar of answers that call one of the functions, or several of them, or are something else.
pub(super) fn grammar(
    format: ToolFormat,
    functions: &[&Function],
    several: bool,
    otherwise: &Otherwise,
    mark: Mark<'_>,
) -> String {
    let mut grammar = start(format, several, otherwise, mark);
    let calls: Vec<String> = (0..functions.len()).map(|index| format!("call{index}")).collect();
    if !calls.is_empty() {
        grammar.push_str(&format!("call: {}\n", calls.join(" | ")));
    }
    for (call, function) in calls.iter().zip(functions) {
        if format == ToolFormat::Pythonic {
            grammar.push_str(&pythonic_call(call, function));
            continue;
        }
        let (before, after) = around_arguments(format, &function.name, otherwise, mark);
        // Each function has a rule of its own, because references in a schema start at its root.
        let schema = arguments_schema(function);
        grammar.push_str(&format!(
            "{call}: {before} arguments_{call} {after}\narguments_{call}: %json {schema}\n"
        ));
    }
    grammar
}

/// The rule of the whole answer, and the rules of what is no call.
fn start(format: ToolFormat, several: bool, otherwise: &Otherwise, mark: Mark<'_>) -> String {
    let text = *otherwise == Otherwise::Text;
    let calls = match (format, several) {
        (ToolFormat::Hermes, true) => "call (\"\\n\" call)*".to_owned(),
        (ToolFormat::Json, true) => "call (\"; \" call)*".to_owned(),
        (ToolFormat::List | ToolFormat::Pythonic, true) => "\"[\" call (\", \" call)* \"]\"".to_owned(),
        (ToolFormat::List | ToolFormat::Pythonic, false) => "\"[\" call \"]\"".to_owned(),
        (ToolFormat::Mistral, true) => "call+".to_owned(),
        (ToolFormat::DeepSeek { .. }, several) => {
            let [begin, end] = DEEPSEEK.around.unwrap_or_default().map(mark);
            // After text the first mark is what ended it.
            let begin = if text && !is_control(&begin) { String::new() } else { begin };
            let more = if several { "(\"\\n\"? call)*" } else { "" };
            format!("{begin} call {more} {end}")
        }
        // A call ends the answer.
        (ToolFormat::Harmony, _) => "before* call".to_owned(),
        (ToolFormat::Hermes | ToolFormat::Json | ToolFormat::Mistral, false) => "call".to_owned(),
    };
    if format == ToolFormat::Harmony {
        let (start, answer) = match otherwise {
            Otherwise::Nothing => (calls, "BODY"),
            Otherwise::Text => (format!("{calls} | before* final"), "BODY"),
            Otherwise::Form(rule) => (format!("{calls} | before* final"), rule.as_str()),
        };
        return format!("start: {start}\n{}answer: {answer}\n", harmony::rules(mark));
    }
    // The character that begins a call in the formats in which the whole answer is calls.
    let first = if format == ToolFormat::Json { "\\{" } else { "\\[" };
    match (otherwise, marks(format)) {
        (Otherwise::Nothing, _) => format!("start: {calls}\n"),
        (Otherwise::Form(rule), _) => format!("start: {calls} | form\nform: {rule}\n"),
        (Otherwise::Text, None) => format!("start: {calls} | TEXT\nTEXT: /[^{first}](?s:.*)/\n"),
        // Text has no control tokens: from the mark on, only a call may follow.
        (Otherwise::Text, Some(open)) if is_control(&mark(open)) => {
            format!("start: TEXT? ({calls})?\nTEXT: /(?s:.+)/\n")
        }
        (Otherwise::Text, Some(open)) => {
            let calls =
                if format == ToolFormat::Hermes || format == ToolFormat::Mistral { "call" } else { &calls };
            let plain = regex(open);
            let open = Value::from(open);
            format!(
                "start: (opening {calls})* TEXT?\nopening[suffix={open}]: /(?s:.*)/\n\
                 TEXT: /(?s:.+)/ & ~/(?s:.*){plain}(?s:.*)/\n"
            )
        }
    }
}

/// The mark that begins a call within text, or all calls.
fn marks(format: ToolFormat) -> Option<&'static str> {
    match format {
        ToolFormat::Hermes => Some(OPEN),
        ToolFormat::Mistral => Some(MISTRAL.first()),
        ToolFormat::DeepSeek { .. } => Some(DEEPSEEK.first()),
        ToolFormat::Json | ToolFormat::List | ToolFormat::Pythonic | ToolFormat::Harmony => None,
    }
}

/// Whether a written mark is a control token.
fn is_control(mark: &str) -> bool {
    mark.starts_with('<')
}

/// A text as a regular expression.
fn regex(text: &str) -> String {
    let escaped = |character: char| match character {
        '[' | ']' | '(' | ')' | '{' | '}' | '.' | '*' | '+' | '?' | '|' | '^' | '$' | '\\' | '/' => {
            format!("\\{character}")
        }
        character => character.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// What stands before and after the arguments of a call.
fn around_arguments(
    format: ToolFormat,
    name: &str,
    otherwise: &Otherwise,
    mark: Mark<'_>,
) -> (String, String) {
    let text = |text: String| Value::from(text).to_string();
    let quoted = Value::from(name);
    let json = |key: &str| format!("{{\"name\": {quoted}, \"{key}\": ");
    let within_text = *otherwise == Otherwise::Text;
    let named = |marks: &CallMarks| {
        // After text that ends with the mark, the mark is not repeated.
        let first = within_text && marks.around.is_none() && !is_control(&mark(marks.open));
        let open = if first { String::new() } else { mark(marks.open) };
        (open, mark(marks.separator), marks.close.map(mark).unwrap_or_default())
    };
    match format {
        ToolFormat::Hermes => {
            let open = if within_text { "" } else { OPEN };
            (text(format!("{open}\n{}", json("arguments"))), text(format!("}}\n{CLOSE}")))
        }
        ToolFormat::Json => (text(json("parameters")), text("}".to_owned())),
        ToolFormat::List => (text(json("arguments")), text("}".to_owned())),
        ToolFormat::Mistral => {
            let (open, separator, close) = named(&MISTRAL);
            (format!("{open} {quoted} {separator}"), close)
        }
        ToolFormat::DeepSeek { fenced: false } => {
            let (open, separator, close) = named(&DEEPSEEK);
            (format!("{open} {quoted} {separator}"), close)
        }
        ToolFormat::DeepSeek { fenced: true } => {
            let (open, separator, close) = named(&DEEPSEEK);
            let head = text(format!("{name}\n```json\n"));
            (format!("{open} \"function\" {separator} {head}"), format!("\"\\n```\" {close}"))
        }
        ToolFormat::Harmony => (harmony::call_head(name, mark), String::new()),
        ToolFormat::Pythonic => (String::new(), String::new()),
    }
}

/// The schema of a function's arguments: a bounded object, empty if the function has no parameters.
fn arguments_schema(function: &Function) -> Value {
    let empty = || json!({"type": "object", "properties": {}, "additionalProperties": false});
    match &function.parameters {
        Some(Value::Object(schema)) if !schema.is_empty() => {
            let mut schema = schema.clone();
            schema.entry("type").or_insert_with(|| "object".into());
            bounded(&Value::Object(schema))
        }
        _ => empty(),
    }
}

/// The rules of a call in the syntax of Python: the arguments in the order of the schema, each as JSON.
fn pythonic_call(call: &str, function: &Function) -> String {
    let schema = arguments_schema(function);
    let none = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&none);
    let required = |name: &str| {
        schema["required"].as_array().is_some_and(|names| names.iter().any(|other| other == name))
    };
    // References in the schema of an argument start at its root.
    let definitions = ["$defs", "definitions", "x-guidance"].map(|key| (key, schema.get(key)));
    let mut rules = String::new();
    let last = properties.len();
    for (index, (name, property)) in properties.iter().enumerate() {
        let mut property = match property {
            Value::Object(property) => property.clone(),
            _ => Map::new(),
        };
        property.extend(
            definitions.iter().filter_map(|(key, value)| Some(((*key).to_owned(), (*value)?.clone()))),
        );
        let head = Value::from(format!("{name}="));
        let next = index + 1;
        // The rest of the arguments, without one before it, and with one.
        let skip = |rest: &str| {
            if required(name) { String::new() } else { format!(" | {rest}{next}_{call}") }
        };
        rules.push_str(&format!(
            "first{index}_{call}: argument{index}_{call} more{next}_{call}{}\n\
             more{index}_{call}: \", \" argument{index}_{call} more{next}_{call}{}\n\
             argument{index}_{call}: {head} value{index}_{call}\nvalue{index}_{call}: %json {}\n",
            skip("first"),
            skip("more"),
            Value::Object(property)
        ));
    }
    let head = Value::from(format!("{}(", function.name));
    format!("{call}: {head} first0_{call} \")\"\n{rules}first{last}_{call}: \"\"\nmore{last}_{call}: \"\"\n")
}

/// The grammar of an answer of a form, of a model whose answers consist of messages.
pub(super) fn form(rule: &str, mark: Mark<'_>) -> String {
    format!("start: before* final\n{}answer: {rule}\n", harmony::rules(mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_escaped_in_regular_expressions() {
        assert_eq!(regex("[TOOL_CALLS]"), "\\[TOOL_CALLS\\]");
        assert_eq!(json!(regex("<｜tool▁calls▁begin｜>")), json!("<｜tool▁calls▁begin｜>"));
    }
}
