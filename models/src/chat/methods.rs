//! Python's methods on values, which templates call freely.
//!
//! Most come from `minijinja-contrib`; here are those it lacks or answers differently.

use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Calls `method` on `value`.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if matches!(method, "replace" | "join" | "format") {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        super::budget::estimate(method, &all)?;
    }
    let result = match value.as_str() {
        Some(text) => text_method(text, method, arguments)?,
        None if value.kind() == ValueKind::Map => map_method(value, method, arguments)?,
        None => None,
    };
    match result {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

/// The methods of texts; `None` for those that are not here.
fn text_method(text: &str, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let result = match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            parts(before, found(text, separator), after)
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            parts(before, found(text, separator), after)
        }
        "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(arguments)?;
            let limit = limit
                .and_then(|limit| usize::try_from(limit).ok())
                .map_or(usize::MAX, |limit| limit.saturating_add(1));
            let mut parts: Vec<&str> = match separator {
                Some("") => return Err(empty_separator()),
                Some(separator) => text.rsplitn(limit, separator).collect(),
                None => rsplit_blanks(text, limit),
            };
            parts.reverse();
            parts.into_iter().map(Value::from).collect()
        }
        "index" => {
            let (wanted,): (&str,) = from_args(arguments)?;
            let Some(start) = text.find(wanted) else {
                return Err(Error::new(ErrorKind::InvalidOperation, "substring not found"));
            };
            Value::from(text[..start].chars().count())
        }
        "ljust" | "rjust" | "zfill" => {
            let (width, fill): (i64, Option<&str>) = from_args(arguments)?;
            // No template needs more; a huge width would only take memory.
            let width = usize::try_from(width).unwrap_or(0).min(4096);
            let missing = width.saturating_sub(text.chars().count());
            match method {
                "ljust" => Value::from(format!("{text}{}", fill.unwrap_or(" ").repeat(missing))),
                "rjust" => Value::from(format!("{}{text}", fill.unwrap_or(" ").repeat(missing))),
                _ => {
                    let sign = usize::from(text.starts_with(['-', '+']));
                    Value::from(format!("{}{}{}", &text[..sign], "0".repeat(missing), &text[sign..]))
                }
            }
        }
        _ => return Ok(None),
    };
    Ok(Some(result))
}

fn found<'a>(text: &str, separator: &'a str) -> &'a str {
    if text.contains(separator) { separator } else { "" }
}

fn parts(before: &str, separator: &str, after: &str) -> Value {
    Value::from(Tuple::from([before, separator, after].map(Value::from)))
}

fn empty_separator() -> Error {
    Error::new(ErrorKind::InvalidOperation, "empty separator")
}

/// Splits at runs of blanks from the end, into at most `limit` parts; the last one first. Blanks at the start stay with
/// a part that was not split further.
fn rsplit_blanks(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        match rest.rfind(char::is_whitespace).filter(|_| parts.len() + 1 < limit) {
            Some(blank) => {
                parts.push(rest[blank..].trim_start());
                rest = rest[..blank].trim_end();
            }
            None => {
                parts.push(rest);
                break;
            }
        }
    }
    parts
}

/// The methods of mappings; `None` for those that are not here.
fn map_method(value: &Value, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    match method {
        "copy" => {
            let () = from_args(arguments)?;
            Ok(Some(value.clone()))
        }
        _ => Ok(None),
    }
}
