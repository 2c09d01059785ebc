//! The fields of a JSON object, read with the type and range they must have.

use super::{ConfigError, Result};
use serde_json::{Map, Value};

/// The fields of an object. `prefix` is what stands in front of a field's name in messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    prefix: &'static str,
}

/// A value as JSON, cut to a length that fits on a line.
pub(super) fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl<'a> Fields<'a> {
    pub(super) fn new(object: &'a Map<String, Value>) -> Self {
        Self { object, prefix: "" }
    }

    /// The fields of an object that is the value of one called `prefix`.
    pub(super) fn within(prefix: &'static str, object: &'a Map<String, Value>) -> Self {
        Self { object, prefix }
    }

    /// The value of a field, if it is there and not null.
    pub(super) fn value(&self, field: &str) -> Option<&'a Value> {
        self.get(field)
    }

    /// The name of a field as messages give it.
    pub(super) fn path(&self, field: &str) -> String {
        match self.prefix {
            "" => field.to_owned(),
            prefix => format!("{prefix}.{field}"),
        }
    }

    /// All fields that are not null.
    pub(super) fn present(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        self.object.iter().filter(|(_, value)| !value.is_null()).map(|(field, value)| (field.as_str(), value))
    }

    /// Whether the field is there and null.
    pub(super) fn is_null(&self, field: &str) -> bool {
        self.object.get(field).is_some_and(Value::is_null)
    }

    fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn wrong(&self, field: &str, value: &Value, expected: impl Into<String>) -> ConfigError {
        ConfigError::value(self.path(field), shortened(value), expected)
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| ConfigError::Missing { field: self.path(field) })
    }

    /// A whole number from `least` to `most`.
    pub(super) fn size(&self, field: &str, least: usize, most: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        match size.filter(|size| (least..=most).contains(size)) {
            Some(size) => Ok(Some(size)),
            None => Err(self.wrong(field, value, format!("a whole number from {least} to {most}"))),
        }
    }

    /// A whole number from 1 to `most` that has no default.
    pub(super) fn required_size(&self, field: &str, most: usize) -> Result<usize> {
        self.required(field, self.size(field, 1, most)?)
    }

    /// A number above 0 that f32 can hold.
    pub(super) fn positive(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64().filter(|number| is_positive(*number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(field, value, "a number above 0, and neither tiny nor huge")),
        }
    }

    /// As [`Self::positive`], without a default.
    pub(super) fn required_positive(&self, field: &str) -> Result<f64> {
        self.required(field, self.positive(field)?)
    }

    /// True or false.
    pub(super) fn flag(&self, field: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(field, value, "true or false"))
    }

    /// A text.
    pub(super) fn text(&self, field: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(field, value, "a text"))
    }

    /// A list of texts.
    pub(super) fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let texts = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        texts.map(Some).ok_or_else(|| self.wrong(field, value, "a list of texts"))
    }

    /// An object that is not empty.
    pub(super) fn object(&self, field: &'static str) -> Result<Option<Self>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_object() {
            Some(object) if object.is_empty() => Ok(None),
            Some(object) => Ok(Some(Self { object, prefix: field })),
            None => Err(self.wrong(field, value, "an object")),
        }
    }

    /// A token id, or a list of them.
    pub(super) fn tokens(&self, field: &str) -> Result<Vec<u32>> {
        let Some(value) = self.get(field) else { return Ok(Vec::new()) };
        let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let tokens = match value.as_array() {
            Some(list) => list.iter().map(one).collect(),
            None => one(value).map(|id| vec![id]),
        };
        tokens.ok_or_else(|| self.wrong(field, value, "a token id or a list of them"))
    }
}

/// Above 0, and still so when it is rounded to f32.
pub(super) fn is_positive(number: f64) -> bool {
    let rounded = number as f32;
    rounded.is_finite() && rounded > 0.0
}
