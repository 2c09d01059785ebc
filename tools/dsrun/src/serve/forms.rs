//! The form that an answer has to follow, from the several fields that name one.

use super::{
    api::{Form, NamedSchema, ResponseFormat, StructuredOutputs, Syntax},
    error::ApiError,
};
use serde_json::Value;

/// The form that a request asks for, by `response_format`, `structured_outputs` or the `guided_` fields.
///
/// # Errors
/// If more than one is given, or one is not valid.
pub(super) fn form(
    response_format: Option<&ResponseFormat>,
    structured: Option<&StructuredOutputs>,
    guided: &StructuredOutputs,
) -> Result<Option<Form>, ApiError> {
    let mut all = Vec::new();
    if let Some(outputs) = structured {
        let forms = forms(outputs, "structured_outputs.")?;
        if forms.is_empty() {
            let message = "give one of json, regex, choice, grammar and json_object";
            return Err(ApiError::field("structured_outputs", message));
        }
        all.extend(forms);
    }
    all.extend(forms(guided, "guided_")?);
    // Plain text is what an answer is without any of the others.
    let given = response_format.filter(|format| **format != ResponseFormat::Text || all.is_empty());
    all.extend(given.cloned().map(Form::from));
    if all.len() > 1 {
        let names: Vec<&str> = all.iter().map(|form| form.field.as_str()).collect();
        let message = format!("an answer has one form, but several are given: {}", names.join(", "));
        return Err(ApiError::field(names[0], message));
    }
    Ok(all.pop())
}

/// The forms that are given, of which there should be at most one. Errors name a field with the prefix.
fn forms(outputs: &StructuredOutputs, prefix: &str) -> Result<Vec<Form>, ApiError> {
    let StructuredOutputs { json, regex, choice, grammar, json_object } = outputs;
    let mut forms = Vec::new();
    let mut add = |name: &str, format| forms.push(Form { field: format!("{prefix}{name}"), format });
    if let Some(schema) = json {
        let schema = match schema {
            Value::String(text) => serde_json::from_str(text).map_err(|error| {
                ApiError::field(format!("{prefix}json"), format!("the schema is not JSON: {error}"))
            })?,
            schema => schema.clone(),
        };
        let json_schema =
            NamedSchema { name: "answer".to_owned(), description: None, schema: Some(schema), strict: None };
        add("json", ResponseFormat::JsonSchema { json_schema });
    }
    let syntax =
        |syntax, definition: &String| ResponseFormat::Grammar { syntax, definition: definition.clone() };
    regex.iter().for_each(|regex| add("regex", syntax(Syntax::Regex, regex)));
    grammar.iter().for_each(|grammar| add("grammar", syntax(Syntax::Lark, grammar)));
    if let Some(texts) = choice {
        if texts.is_empty() || texts.iter().any(String::is_empty) {
            let message = "there must be at least one text, and none may be empty";
            return Err(ApiError::field(format!("{prefix}choice"), message));
        }
        // One expression: a parser would follow every text by itself, and takes 2,000.
        let texts: Vec<String> = texts.iter().map(|text| regex::escape(text)).collect();
        add("choice", syntax(Syntax::Regex, &format!("(?:{})", texts.join("|"))));
    }
    if *json_object == Some(true) {
        add("json_object", ResponseFormat::JsonObject);
    }
    Ok(forms)
}
