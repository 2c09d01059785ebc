//! Reads calls whose arguments stand between marks, as GLM and Qwen3-Coder write them.

use super::super::api::chat::Function;
use serde_json::{Map, Value};

/// Reads a call of one of the functions, whose schemas tell texts from other values:
///
/// - `name <arg_key>a</arg_key><arg_value>1</arg_value>` (GLM),
/// - `<function=name><parameter=a>1</parameter></function>` (Qwen3-Coder).
///
/// Returns the name, and the arguments as JSON.
pub(super) fn parse(text: &str, functions: &[Function]) -> Option<(String, String)> {
    let text = text.trim();
    let (name, pairs) = match text.strip_prefix("<function=") {
        Some(rest) => {
            let (name, rest) = rest.split_once('>')?;
            let body = rest.trim_end().strip_suffix("</function>").unwrap_or(rest);
            (name, pairs(body, "<parameter=", ">", "</parameter>")?)
        }
        None => {
            let end = text.find("<arg_key>").unwrap_or(text.len());
            let (name, body) = text.split_at(end);
            (name, pairs(body, "<arg_key>", "</arg_key>", "</arg_value>")?)
        }
    };
    let name = name.trim();
    let function = functions.iter().find(|function| function.name == name)?;
    let mut arguments = Map::new();
    for (key, value) in pairs {
        arguments.insert(key.to_owned(), as_value(function, key, value));
    }
    Some((name.to_owned(), Value::Object(arguments).to_string()))
}

/// Keys between `open` and `middle`, each with its value up to `close`; `None` if there is anything else.
fn pairs<'a>(text: &'a str, open: &str, middle: &str, close: &str) -> Option<Vec<(&'a str, &'a str)>> {
    let mut pairs = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (key, after) = rest.strip_prefix(open)?.split_once(middle)?;
        let (value, after) = after.split_once(close)?;
        // GLM has a mark before the value, Qwen a line break around it.
        let value = value.trim_start().strip_prefix("<arg_value>").unwrap_or(value);
        let value = value.strip_prefix('\n').unwrap_or(value);
        pairs.push((key.trim(), value.strip_suffix('\n').unwrap_or(value)));
        rest = after.trim_start();
    }
    Some(pairs)
}

/// A value as the schema of the parameter has it: a text is taken as it is, anything else is JSON if it can be read so.
fn as_value(function: &Function, key: &str, text: &str) -> Value {
    let schema =
        function.parameters.as_ref().and_then(|schema| schema.get("properties")?.get(key)?.get("type"));
    match schema.and_then(Value::as_str) {
        Some("string") => text.into(),
        _ => serde_json::from_str(text.trim()).unwrap_or_else(|_| text.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case("f\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n", Some(json!({"city": "12", "days": 3})))]
    #[case("f", Some(json!({})))]
    #[case("<function=f>\n<parameter=city>\nLa\nPaz\n</parameter>\n<parameter=list>\n[1, 2]\n</parameter>\n</function>", Some(json!({"city": "La\nPaz", "list": [1, 2]})))]
    #[case("<function=f>\n</function>", Some(json!({})))]
    #[case("g\n<arg_key>city</arg_key><arg_value>x</arg_value>", None)]
    #[case("f says <arg_key>city</arg_key><arg_value>x</arg_value>", None)]
    #[case("f\n<arg_key>city</arg_key> nonsense", None)]
    #[case("nonsense", None)]
    #[case("", None)]
    fn calls_between_marks(#[case] text: &str, #[case] expected: Option<Value>) {
        let parameters = json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
        let parameters = Some(parameters);
        let functions = [Function { name: "f".into(), description: None, parameters, strict: None }];
        let found = parse(text, &functions);
        let arguments = found.map(|(name, arguments)| {
            assert_eq!(name, "f");
            serde_json::from_str::<Value>(&arguments).expect("JSON")
        });
        assert_eq!(arguments, expected);
    }
}
