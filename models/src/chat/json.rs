//! The `tojson` filter, with the output of Python's `json.dumps`.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Values nested deeper than this are refused; they would exhaust the stack.
const DEEPEST: usize = 200;

/// How JSON is laid out.
struct Layout {
    ascii: bool,
    /// What stands for one level at the start of a line, if there are lines.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, ensure_ascii: Option<bool>, arguments: Kwargs) -> Result<String, Error> {
    let option = |name: &str| -> Result<Option<Value>, Error> {
        Ok(arguments.get::<Option<Value>>(name)?.filter(|value| !value.is_none()))
    };
    let ascii = match option("ensure_ascii")? {
        Some(value) => value.is_true(),
        None => ensure_ascii.unwrap_or(false),
    };
    let indent = option("indent")?.map(|indent| indent_text(&indent)).transpose()?;
    let sort_keys = option("sort_keys")?.is_some_and(|value| value.is_true());
    let (item_separator, key_separator) = match option("separators")? {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.as_slice() {
                [item, key] => (item.to_string(), key.to_string()),
                _ => return Err(invalid("separators must be two texts".to_owned())),
            }
        }
    };
    arguments.assert_all_used()?;
    let layout = Layout { ascii, indent, item_separator, key_separator, sort_keys };
    let mut text = String::new();
    write(value, &layout, 0, &mut text)?;
    Ok(text)
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {message}"))
}

fn indent_text(indent: &Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        return Ok(text.to_owned());
    }
    match indent.as_i64() {
        Some(width @ ..=64) => Ok(" ".repeat(usize::try_from(width).unwrap_or(0))),
        _ => Err(invalid("indent must be a text or a number up to 64".to_owned())),
    }
}

fn write(value: &Value, layout: &Layout, depth: usize, text: &mut String) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(invalid("the value is nested too deeply".to_owned()));
    }
    match value.kind() {
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => text.push_str(&number(value)),
        ValueKind::String => write_text(value.as_str().unwrap_or_default(), layout.ascii, text),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(['[', ']'], items.len(), layout, depth, text, |index, text| {
                write(&items[index], layout, depth + 1, text)
            })?;
        }
        ValueKind::Map => {
            let mut fields = Vec::new();
            for key in value.try_iter()? {
                fields.push((key_text(&key)?, value.get_item(&key)?));
            }
            if layout.sort_keys {
                fields.sort_by(|left, right| left.0.cmp(&right.0));
            }
            write_items(['{', '}'], fields.len(), layout, depth, text, |index, text| {
                write_text(&fields[index].0, layout.ascii, text);
                text.push_str(&layout.key_separator);
                write(&fields[index].1, layout, depth + 1, text)
            })?;
        }
        kind => return Err(invalid(format!("{kind} is not JSON"))),
    }
    Ok(())
}

fn write_items(
    brackets: [char; 2],
    count: usize,
    layout: &Layout,
    depth: usize,
    text: &mut String,
    mut item: impl FnMut(usize, &mut String) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |depth: usize, text: &mut String| {
        if let Some(indent) = layout.indent.as_ref().filter(|_| count > 0) {
            text.push('\n');
            text.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    };
    text.push(brackets[0]);
    for index in 0..count {
        if index > 0 {
            text.push_str(&layout.item_separator);
        }
        line(depth + 1, text);
        item(index, text)?;
    }
    line(depth, text);
    text.push(brackets[1]);
    Ok(())
}

/// Keys that are no texts are written as JSON, and that as a text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number => Ok(number(key)),
        kind => Err(invalid(format!("{kind} cannot be a key"))),
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// The text of a float as Python prints it; `None` for other values.
pub(super) fn python_float(value: &Value) -> Option<String> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return None;
    }
    let value = f64::try_from(value.clone()).ok()?;
    // `repr(float("inf"))` is `inf`, JSON's is `Infinity`.
    Some(if value.is_finite() { float(value) } else { format!("{value}").to_lowercase() })
}

/// A float as Python writes it: the shortest digits that read back the same, with an exponent for numbers below 1e-4
/// and from 1e16 on.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent) if value != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

fn write_text(value: &str, ascii: bool, text: &mut String) {
    text.push('"');
    for character in value.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            character if character < ' ' || (ascii && !character.is_ascii()) => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    text.push_str(&format!("\\u{unit:04x}"));
                }
            }
            character => text.push(character),
        }
    }
    text.push('"');
}
