//! Reads a call as JSON from a text that arrives in pieces: first its name, then its arguments as they come.

/// The beginning of a call, up to its arguments.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// The text may become one.
    Partial,
    /// The text begins with a call of this function, whose arguments start at this byte.
    Call { name: String, arguments: usize },
    /// The text does not begin so. It may be a call all the same, with its fields in another order.
    Other,
}

/// Reads `{"name": .., "arguments": ` or `{"name": .., "parameters": ` before an object.
pub(super) fn head(text: &str) -> Head {
    let mut rest = text;
    let mut parts = ["{", "\"name\"", ":"].into_iter();
    if let Some(head) = parts.find_map(|part| skip(&mut rest, part)) {
        return head;
    }
    rest = rest.trim_start();
    let mut values = serde_json::Deserializer::from_str(rest).into_iter::<String>();
    let name = match values.next() {
        None => return Head::Partial,
        Some(Ok(name)) => name,
        Some(Err(error)) => return if error.is_eof() { Head::Partial } else { Head::Other },
    };
    rest = &rest[values.byte_offset()..];
    if let Some(head) = skip(&mut rest, ",") {
        return head;
    }
    let mut other = rest;
    match (skip(&mut rest, "\"arguments\""), skip(&mut other, "\"parameters\"")) {
        (None, _) => {}
        (_, None) => rest = other,
        (Some(Head::Partial), _) | (_, Some(Head::Partial)) => return Head::Partial,
        _ => return Head::Other,
    }
    if let Some(head) = skip(&mut rest, ":") {
        return head;
    }
    rest = rest.trim_start();
    match rest.chars().next() {
        None => Head::Partial,
        Some('{') => Head::Call { name, arguments: text.len() - rest.len() },
        Some(_) => Head::Other,
    }
}

/// Skips blanks and `part`; otherwise returns what that says about the head.
fn skip(rest: &mut &str, part: &str) -> Option<Head> {
    let text = rest.trim_start();
    if let Some(after) = text.strip_prefix(part) {
        *rest = after;
        return None;
    }
    Some(if part.starts_with(text) { Head::Partial } else { Head::Other })
}

/// Finds the end of a JSON object.
#[derive(Debug, Default)]
pub(super) struct ObjectEnd {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl ObjectEnd {
    /// Adds the next piece, and returns the bytes of it that belong to the object if the object ends there.
    pub(super) fn find(&mut self, piece: &str) -> Option<usize> {
        for (index, byte) in piece.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(index + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(r#"{"name": "f", "arguments": {"x": 1}}"#, Some(("f", 27)))]
    #[case("\n{ \"name\" :\"a\\\"b\" ,\"parameters\":{", Some(("a\"b", 32)))]
    #[case(r#"{"arguments": {}, "name": "f"}"#, None)]
    #[case(r#"{"name": "f"}"#, None)]
    #[case(r#"{"name": "f", "arguments": "{}"}"#, None)]
    #[case("nonsense", None)]
    fn heads(#[case] text: &str, #[case] expected: Option<(&str, usize)>) {
        let expected = match expected {
            Some((name, arguments)) => Head::Call { name: name.to_owned(), arguments },
            None => Head::Other,
        };
        assert_eq!(head(text), expected);
        // Until it is known, everything is a possible beginning.
        for (end, _) in text.char_indices() {
            let part = head(&text[..end]);
            assert!(part == Head::Partial || part == expected, "{:?}: {part:?}", &text[..end]);
        }
    }

    #[rstest]
    #[case(r#"{"x": "}\"{", "y": [{}]}}"#, Some(24))]
    #[case(r#"{"x": {"#, None)]
    fn ends_of_objects(#[case] text: &str, #[case] expected: Option<usize>) {
        assert_eq!(ObjectEnd::default().find(text), expected);
        let mut end = ObjectEnd::default();
        let found = text.char_indices().find_map(|(start, character)| {
            end.find(character.encode_utf8(&mut [0; 4])).map(|bytes| start + bytes)
        });
        assert_eq!(found, expected);
    }
}
