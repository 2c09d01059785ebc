//! The fields of a JSON object, read with the type and range they must have.

use super::{ConfigError, Result};
use serde_json::{Map, Value};
use std::{cell::RefCell, collections::HashSet};

/// The fields of an object, with a record of those that readers asked for.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// The path of the object in the file, for error messages; empty for the whole file.
    prefix: String,
    read: RefCell<HashSet<&'a str>>,
}

/// A value as JSON, cut to a length that fits on a line.
pub(crate) fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Map<String, Value>) -> Self {
        Self::within(String::new(), object)
    }

    /// The fields of an object that is the value of one called `prefix`.
    pub(crate) fn within(prefix: impl Into<String>, object: &'a Map<String, Value>) -> Self {
        Self { object, prefix: prefix.into(), read: RefCell::default() }
    }

    /// The value of a field, if it is there and not null.
    pub(crate) fn value(&self, field: &str) -> Option<&'a Value> {
        self.get(field)
    }

    /// The name of a field as messages give it.
    pub(crate) fn path(&self, field: &str) -> String {
        match self.prefix.as_str() {
            "" => field.to_owned(),
            prefix => format!("{prefix}.{field}"),
        }
    }

    /// All fields that are not null.
    pub(crate) fn present(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        self.object.iter().filter(|(_, value)| !value.is_null()).map(|(field, value)| (field.as_str(), value))
    }

    /// Whether the field is there and null.
    pub(crate) fn is_null(&self, field: &str) -> bool {
        self.object.get(field).is_some_and(Value::is_null)
    }

    /// Returns an error for a field that no reader asked for, unless it is `harmless`.
    ///
    /// Harmless fields are those that are known not to change the result.
    pub(crate) fn refuse_unread(
        &self,
        architecture: &'static str,
        harmless: impl Fn(&str, &Value) -> bool,
    ) -> Result<()> {
        let read = self.read.borrow();
        let unknown = |(field, value): &(&str, &Value)| !read.contains(field) && !harmless(field, value);
        match self.present().find(unknown) {
            Some((field, value)) => Err(ConfigError::Unknown {
                field: self.path(&field.chars().take(80).collect::<String>()),
                value: shortened(value),
                architecture,
            }),
            None => Ok(()),
        }
    }

    fn get(&self, field: &str) -> Option<&'a Value> {
        let (field, value) = self.object.get_key_value(field)?;
        self.read.borrow_mut().insert(field);
        Some(value).filter(|value| !value.is_null())
    }

    fn wrong(&self, field: &str, value: &Value, expected: impl Into<String>) -> ConfigError {
        ConfigError::value(self.path(field), shortened(value), expected)
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| ConfigError::Missing { field: self.path(field) })
    }

    /// A whole number from `least` to `most`.
    pub(crate) fn size(&self, field: &str, least: usize, most: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        match size.filter(|size| (least..=most).contains(size)) {
            Some(size) => Ok(Some(size)),
            None => Err(self.wrong(field, value, format!("a whole number from {least} to {most}"))),
        }
    }

    /// A whole number from 1 to `most` that has no default.
    pub(crate) fn required_size(&self, field: &str, most: usize) -> Result<usize> {
        self.required(field, self.size(field, 1, most)?)
    }

    /// A number above 0 that f32 can hold.
    pub(crate) fn positive(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64().filter(|number| is_positive(*number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(field, value, "a number above 0, and neither tiny nor huge")),
        }
    }

    /// As [`Self::positive`], without a default.
    pub(crate) fn required_positive(&self, field: &str) -> Result<f64> {
        self.required(field, self.positive(field)?)
    }

    /// True or false.
    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(field, value, "true or false"))
    }

    /// Reads a list of ones and zeros, or of truth values.
    pub(crate) fn flags(&self, field: &str) -> Result<Option<Vec<bool>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let flag = |value: &Value| match value.as_u64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => value.as_bool(),
        };
        let flags = value.as_array().and_then(|list| list.iter().map(flag).collect());
        flags.map(Some).ok_or_else(|| self.wrong(field, value, "a list of ones and zeros"))
    }

    /// A list of whole numbers below `end`, such as indices of layers.
    pub(crate) fn indices(&self, field: &str, end: usize) -> Result<Option<Vec<usize>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let index = |value: &Value| {
            let index = value.as_u64().and_then(|index| usize::try_from(index).ok());
            index.filter(|index| *index < end)
        };
        let indices = value.as_array().and_then(|list| list.iter().map(index).collect());
        let expected = || format!("a list of whole numbers below {end}");
        indices.map(Some).ok_or_else(|| self.wrong(field, value, expected()))
    }

    /// A text.
    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(field, value, "a text"))
    }

    /// A list of texts.
    pub(crate) fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let texts = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        texts.map(Some).ok_or_else(|| self.wrong(field, value, "a list of texts"))
    }

    /// An object that is not empty.
    pub(crate) fn object(&self, field: &str) -> Result<Option<Self>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_object() {
            Some(object) if object.is_empty() => Ok(None),
            Some(object) => Ok(Some(Self::within(self.path(field), object))),
            None => Err(self.wrong(field, value, "an object")),
        }
    }

    /// Reads a list of `length` numbers above 0 that f32 can hold; the field is required.
    pub(crate) fn required_list(&self, field: &str, length: usize) -> Result<Vec<f32>> {
        let value = self.required(field, self.get(field))?;
        let number = |value: &Value| value.as_f64().filter(|number| is_positive(*number));
        let numbers: Option<Vec<f32>> =
            value.as_array().and_then(|list| list.iter().map(|one| Some(number(one)? as f32)).collect());
        numbers
            .filter(|numbers| numbers.len() == length)
            .ok_or_else(|| self.wrong(field, value, format!("a list of {length} numbers above 0")))
    }

    /// A token id, or a list of them.
    pub(crate) fn tokens(&self, field: &str) -> Result<Vec<u32>> {
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
pub(crate) fn is_positive(number: f64) -> bool {
    let rounded = number as f32;
    rounded.is_finite() && rounded > 0.0
}
