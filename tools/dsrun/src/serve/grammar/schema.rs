//! Schemas as grammars need them: JSON that small models can come to an end with.

use serde_json::{Map, Value, json};

/// The whitespace allowed between the parts of JSON. Small models that may write any amount never stop.
const WHITESPACE: &str = "[ \\n]{0,2}";

/// Keywords whose value is a schema, or a list of schemas.
const WITH_SCHEMAS: [&str; 6] = ["items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties"];
/// Keywords whose value is an object of schemas.
const WITH_NAMED_SCHEMAS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// Keywords by which several schemas together describe one object.
const WITH_SIBLINGS: [&str; 9] = [
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "not",
    "dependentSchemas",
    "unevaluatedProperties",
];

/// A schema that bounds the whitespace between the parts of JSON, and the properties of objects to those that it names.
///
/// Without `additionalProperties`, JSON Schema allows any others. Small models then invent properties without end, and no
/// client reads them. So objects have others only if the schema says `additionalProperties`, as in other servers.
pub(crate) fn bounded(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if !combines(&schema) {
        close(&mut schema);
    }
    if let Some(object) = schema.as_object_mut() {
        let guidance = object.entry("x-guidance").or_insert_with(|| json!({}));
        if let Some(guidance) = guidance.as_object_mut() {
            guidance.entry("whitespace_pattern").or_insert_with(|| WHITESPACE.into());
        }
    }
    schema
}

/// Whether several schemas describe the properties of one object anywhere in a schema: none of them names all then.
fn combines(schema: &Value) -> bool {
    let Value::Object(fields) = schema else { return false };
    let list = |key: &str| fields.get(key).and_then(Value::as_array).map_or(0, Vec::len);
    let siblings = WITH_SIBLINGS.iter().any(|key| fields.contains_key(*key));
    list("allOf") > 1 || (fields.contains_key("properties") && siblings) || subschemas(fields).any(combines)
}

/// Forbids properties that an object's schema does not name.
fn close(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    if let Some(Value::Object(properties)) = fields.get("properties") {
        let required = fields.get("required").and_then(Value::as_array);
        let named = |name: &Value| name.as_str().is_some_and(|name| properties.contains_key(name));
        let all_named = required.is_none_or(|required| required.iter().all(named));
        if all_named && !fields.contains_key("patternProperties") {
            fields.entry("additionalProperties").or_insert(Value::Bool(false));
        }
    }
    for (key, value) in fields.iter_mut() {
        match value {
            Value::Array(list) if WITH_SCHEMAS.contains(&key.as_str()) => list.iter_mut().for_each(close),
            Value::Object(named) if WITH_NAMED_SCHEMAS.contains(&key.as_str()) => {
                named.values_mut().for_each(close);
            }
            value if WITH_SCHEMAS.contains(&key.as_str()) => close(value),
            _ => {}
        }
    }
}

/// The schemas within a schema.
fn subschemas(fields: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let named =
        WITH_NAMED_SCHEMAS.iter().filter_map(|key| fields.get(*key)?.as_object()).flat_map(Map::values);
    let schemas = WITH_SCHEMAS.iter().filter_map(|key| fields.get(*key));
    named.chain(schemas.flat_map(|value| value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// The schema without what bounds whitespace.
    fn closed(schema: &Value) -> Value {
        let mut schema = bounded(schema);
        schema.as_object_mut().expect("an object").remove("x-guidance").expect("whitespace is bounded");
        schema
    }

    #[test]
    fn objects_have_the_properties_that_are_named() {
        let point = json!({"type": "object", "properties": {"x": {}, "properties": {"properties": {}}}});
        let schema = json!({"$defs": {"P": point}, "type": "object", "properties": {"list": {"items": point},
            "free": {"type": "object"}, "open": {"properties": {}, "additionalProperties": true}, "either": {"anyOf": [point]},
            "map": {"type": "object", "additionalProperties": point}, "all": {"allOf": [{"$ref": "#/$defs/P"}]}},
            "default": {"properties": {}}});
        let point = json!({"type": "object", "properties": {"x": {}, "properties": {"properties": {},
            "additionalProperties": false}}, "additionalProperties": false});
        let expected = json!({"$defs": {"P": point}, "type": "object", "properties": {"list": {"items": point},
            "free": {"type": "object"}, "open": {"properties": {}, "additionalProperties": true}, "either": {"anyOf": [point]},
            "map": {"type": "object", "additionalProperties": point}, "all": {"allOf": [{"$ref": "#/$defs/P"}]}},
            "default": {"properties": {}}, "additionalProperties": false});
        assert_eq!(closed(&schema), expected);
    }

    #[rstest]
    #[case(json!({"allOf": [{"properties": {"x": {}}}, {"properties": {"y": {}}}]}))]
    #[case(json!({"properties": {"x": {}}, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}))]
    #[case(json!({"$defs": {"B": {"properties": {"x": {}}}}, "items": {"$ref": "#/$defs/B", "properties": {"y": {}}}}))]
    #[case(json!({"properties": {"x": {}}, "required": ["y"]}))]
    #[case(json!({"properties": {"x": {}}, "patternProperties": {"^y": {}}}))]
    #[case(json!({"properties": {"x": {}}, "additionalProperties": {"type": "string"}}))]
    fn schemas_that_need_other_properties_stay(#[case] schema: Value) {
        assert_eq!(closed(&schema), schema);
    }
}
