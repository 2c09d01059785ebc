//! Checks JSON schemas before they are compiled: references that lead back to themselves, which no value can follow, and the number of
//! properties.

use serde_json::Value;

/// The most properties of a schema. The compiler recurses from each to the next, and its time grows with the square of their number.
const MAX_PROPERTIES: usize = 5_000;
/// The most properties of one object that may be left out. The parser follows all of them at once, and takes 2,000 items.
const MAX_OPTIONAL: usize = 450;
/// The most values of a schema, which is copied before it is compiled.
const MAX_VALUES: usize = 500_000;
/// Keywords whose value names properties, or has a schema for each item.
const WITH_PROPERTIES: [&str; 4] = ["properties", "patternProperties", "required", "prefixItems"];

/// Checks that every reference of a schema leads to more than references, and that it has not too many properties.
///
/// # Errors
/// Shows the way of a reference back to itself, or the number of properties.
pub(crate) fn check(schema: &Value) -> Result<(), String> {
    let mut open = vec![schema];
    let (mut properties, mut values) = (0, 0);
    while let Some(value) = open.pop() {
        values += length(Some(value));
        if values > MAX_VALUES {
            return Err(format!("the schema has more than {MAX_VALUES} values"));
        }
        match value {
            Value::Object(fields) => {
                follow(schema, value)?;
                let [all, required] = ["properties", "required"].map(|key| length(fields.get(key)));
                let optional = all.saturating_sub(required);
                if optional > MAX_OPTIONAL {
                    return Err(format!(
                        "an object has {optional} properties that are not required, but may have at most {MAX_OPTIONAL}"
                    ));
                }
                properties += WITH_PROPERTIES.iter().map(|key| length(fields.get(*key))).sum::<usize>();
                open.extend(fields.values());
            }
            Value::Array(items) => open.extend(items),
            _ => {}
        }
    }
    if properties > MAX_PROPERTIES {
        return Err(format!(
            "the schema has {properties} properties, required names and items, but may have at most {MAX_PROPERTIES}"
        ));
    }
    Ok(())
}

/// The number of elements of an object or a list.
fn length(value: Option<&Value>) -> usize {
    match value {
        Some(Value::Object(fields)) => fields.len(),
        Some(Value::Array(items)) => items.len(),
        _ => 0,
    }
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

    /// An object with so many properties, of which the first ones are required.
    fn of_properties(count: usize, required: usize) -> Value {
        let names: Vec<String> = (0..count).map(|index| format!("p{index}")).collect();
        let properties: serde_json::Map<_, _> = names.iter().map(|name| (name.clone(), json!({}))).collect();
        json!({"properties": properties, "required": names[..required]})
    }

    #[rstest]
    #[case(json!({"$ref": "#"}), Some("# -> #"))]
    #[case(json!({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}), Some("#/$defs/a"))]
    #[case(json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "string"}}}), None)]
    // A tree: its references lead back through its fields.
    #[case(json!({"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}), None)]
    #[case(json!({"$ref": "https://example.org/schema"}), None)]
    #[case(json!(true), None)]
    #[case(json!({"properties": {"x": {"required": vec!["y"; 5_000]}}}), Some("5001 properties"))]
    #[case(json!({"enum": vec![json!({}); 600_000]}), Some("500000 values"))]
    #[case(of_properties(450, 0), None)]
    #[case(of_properties(451, 0), Some("451 properties that are not required"))]
    #[case(of_properties(2000, 1600), None)]
    fn schemas_that_lead_nowhere_or_are_too_large_are_found(
        #[case] schema: Value,
        #[case] way: Option<&str>,
    ) {
        match (check(&schema), way) {
            (Ok(()), None) => {}
            (Err(message), Some(way)) => assert!(message.contains(way), "{message}"),
            (found, _) => panic!("{found:?}"),
        }
    }
}
