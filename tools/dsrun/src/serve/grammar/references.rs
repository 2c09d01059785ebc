//! Finds references in a JSON schema that lead back to themselves, which no value can follow.

use serde_json::Value;

/// Checks that every reference of a schema leads to more than references.
///
/// # Errors
/// Shows the way of a reference back to itself.
pub(crate) fn check(schema: &Value) -> Result<(), String> {
    let mut open = vec![schema];
    while let Some(value) = open.pop() {
        match value {
            Value::Object(fields) => {
                follow(schema, value)?;
                open.extend(fields.values());
            }
            Value::Array(items) => open.extend(items),
            _ => {}
        }
    }
    Ok(())
}

/// Follows references from a part of a schema until one leads to something else. Those that are not found are left to the parser.
fn follow(root: &Value, from: &Value) -> Result<(), String> {
    let mut way: Vec<&str> = Vec::new();
    let mut part = from;
    while let Some(reference) = part.get("$ref").and_then(Value::as_str) {
        if way.contains(&reference) {
            way.push(reference);
            let way = way.join(" -> ");
            return Err(format!(
                "the reference leads back to itself, so that no value can follow the schema: {way}"
            ));
        }
        way.push(reference);
        let Some(found) = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer)) else {
            break;
        };
        part = found;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case(json!({"$ref": "#"}), Some("# -> #"))]
    #[case(json!({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}), Some("#/$defs/a"))]
    #[case(json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "string"}}}), None)]
    // A tree: its references lead back through its fields.
    #[case(json!({"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}), None)]
    #[case(json!({"$ref": "https://example.org/schema"}), None)]
    #[case(json!(true), None)]
    fn references_that_lead_nowhere_are_found(#[case] schema: Value, #[case] way: Option<&str>) {
        match (check(&schema), way) {
            (Ok(()), None) => {}
            (Err(message), Some(way)) => assert!(message.contains(way), "{message}"),
            (found, _) => panic!("{found:?}"),
        }
    }
}
