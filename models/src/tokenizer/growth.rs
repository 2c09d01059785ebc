//! How much a `tokenizer.json` may enlarge a text, found before the library reads it. The library has no bound: a few replacements of one
//! letter by a thousand, one after the other, would take all memory for a short text.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use regex::Regex;
use serde_json::Value;

/// How many times as long a text may become. The largest factor seen in a file in use is 4.
const MAX_GROWTH: usize = 64;

/// Checks a normalizer or a decoder, whose parts are applied one after the other.
///
/// # Errors
/// If a text may become too much longer, or a table of characters claims to be longer than it is.
pub(super) fn check(field: &str, steps: &Value) -> Result<(), String> {
    let growth = growth(steps)?;
    if growth > MAX_GROWTH {
        return Err(format!(
            "the replacements of the {field} make a text up to {growth} times as long, at most {MAX_GROWTH} are allowed"
        ));
    }
    Ok(())
}

/// The factor by which a step may enlarge a text.
fn growth(step: &Value) -> Result<usize, String> {
    let text = |key: &str| step.get(key).and_then(Value::as_str).unwrap_or_default();
    match text("type") {
        "Sequence" => {
            let parts = ["normalizers", "decoders"].into_iter().filter_map(|key| step.get(key)?.as_array());
            parts.flatten().try_fold(1usize, |product, part| Ok(product.saturating_mul(growth(part)?)))
        }
        "Replace" => Ok(growth_of_replacement(step.get("pattern"), text("content"))),
        "Precompiled" => check_table(text("precompiled_charsmap")).map(|()| 1),
        _ => Ok(1),
    }
}

fn growth_of_replacement(pattern: Option<&Value>, content: &str) -> usize {
    let of = |kind: &str| pattern.and_then(|pattern| pattern.get(kind)?.as_str());
    match (of("String"), of("Regex")) {
        (Some(text), _) => content.len().div_ceil(text.len().max(1)).max(1),
        (_, Some(regex)) if !may_match_nothing(regex) => content.len().max(1),
        _ => content.len() + 1,
    }
}

/// Whether an expression may match between characters, so that what replaces it is inserted there.
fn may_match_nothing(regex: &str) -> bool {
    let at_places = ["\\b", "\\B", "\\A", "\\z", "^", "$"];
    at_places.iter().any(|part| regex.contains(part))
        // Expressions with lookaround are not known here.
        || Regex::new(regex).map_or(true, |regex| regex.is_match(""))
}

/// Checks the size that a compiled table of characters has in its first four bytes, which the library allocates unseen.
fn check_table(table: &str) -> Result<(), String> {
    let Ok(bytes) = BASE64_STANDARD.decode(table) else { return Ok(()) };
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return Ok(()) };
    let size = u32::from_le_bytes(*size);
    if size as usize > rest.len() {
        let message = format!("precompiled_charsmap says that {size} bytes follow, but {} do", rest.len());
        return Err(message);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check;
    use rstest::rstest;
    use serde_json::{Value, json};

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn replacements_in_use_are_accepted() {
        let many = vec![replace(json!({"Regex": " {2,}"}), "▁"), json!({"type": "Prepend", "prepend": "▁"})];
        let spaces = (0..100).map(|_| replace(json!({"Regex": r"\s+"}), " "));
        let quotes = (0..100).map(|_| replace(json!({"String": "``"}), "\""));
        let steps: Vec<Value> = many.into_iter().chain(spaces).chain(quotes).collect();
        assert_eq!(check("normalizer", &json!({"type": "Sequence", "normalizers": steps})), Ok(()));
        assert_eq!(check("decoder", &json!({"type": "ByteLevel"})), Ok(()));
    }

    #[rstest]
    #[case::of_text(json!({"String": "a"}), "a".repeat(9), 2, "81 times")]
    #[case::of_an_empty_text(json!({"String": ""}), "a".repeat(100), 1, "100 times")]
    #[case::between_characters(json!({"Regex": "x*"}), "a".into(), 7, "128 times")]
    #[case::before_characters(json!({"Regex": "(?=x)"}), "xx".into(), 4, "81 times")]
    #[case::more_than_counts(json!({"String": "a"}), "a".repeat(1000), 64, "up to")]
    fn replacements_that_take_all_memory_are_refused(
        #[case] pattern: Value,
        #[case] content: String,
        #[case] times: usize,
        #[case] found: &str,
    ) {
        let steps = vec![replace(pattern, &content); times];
        let nested = json!({"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": steps}]});
        let message = check("normalizer", &nested).unwrap_err();
        assert!(message.contains(found) && message.contains("at most 64"), "{message}");
    }

    #[test]
    fn a_table_longer_than_the_file_is_refused() {
        let table = json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="});
        let message = check("normalizer", &table).unwrap_err();
        assert_eq!(message, "precompiled_charsmap says that 4294967295 bytes follow, but 0 do");
    }
}
