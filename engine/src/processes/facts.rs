//! The facts that processes compare before they run a model together.

use crate::{
    error::{EngineError, Result},
    options::EngineOptions,
};
use dsrun_core::Error;
use dsrun_models::model::Model;
use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

/// What a process is about to run, as facts by name.
pub type Facts = BTreeMap<String, String>;

/// Tensors of at most this many bytes are compared as a whole.
const WHOLE_BYTES: usize = 64 << 10;

/// The maximum number of bytes that are compared of a row of a larger tensor.
const SAMPLE_BYTES: usize = 4096;

/// The facts of this process.
///
/// # Errors
/// If a tensor cannot be read.
pub(crate) fn facts(model: &Model, options: &EngineOptions) -> Result<Facts> {
    let table = toml::Table::try_from(options).map_err(|error| {
        EngineError::from(Error::internal(format!("the options cannot be compared: {error}")))
    })?;
    let option = |(name, value): (String, toml::Value)| (format!("option {name}"), value.to_string());
    let mut facts: Facts = table.into_iter().map(option).collect();
    facts.insert("the model".into(), model_fingerprint(model)?);
    Ok(facts)
}

/// A hash of the model's configuration, and of the name, the type and the content of each tensor: all of small tensors, and the
/// first, middle and last row of others, since reading all would take as long as loading the model.
fn model_fingerprint(model: &Model) -> Result<String> {
    let source = model.weights();
    let mut names = source.names();
    names.sort_unstable();
    // `DefaultHasher` has fixed keys, and all processes run the same version, so equal models have equal hashes.
    let mut hasher = DefaultHasher::new();
    format!("{:?}", model.config()).hash(&mut hasher);
    for name in names {
        name.hash(&mut hasher);
        // A tensor of a type that no weight can have is never read.
        let Ok(weight) = source.tensor_type(name) else { continue };
        format!("{weight:?}").hash(&mut hasher);
        let rows = weight.rows();
        if rows == 0 {
            continue;
        }
        if weight.bytes()? <= WHOLE_BYTES {
            source.rows(name, 0, rows).map_err(|error| error.at(name))?.hash(&mut hasher);
            continue;
        }
        for row in [0, rows / 2, rows - 1] {
            let bytes = source.rows(name, row, 1).map_err(|error| error.at(name))?;
            bytes[..bytes.len().min(SAMPLE_BYTES)].hash(&mut hasher);
        }
    }
    Ok(format!("{} with fingerprint {:016x}", model.name(), hasher.finish()))
}

/// Describes the first fact that differs between a process and process 0.
pub(super) fn difference(all: &[Facts]) -> Option<String> {
    let (first, others) = all.split_first()?;
    let shown = |facts: &Facts, name: &str| facts.get(name).cloned().unwrap_or_else(|| "none".into());
    others.iter().enumerate().find_map(|(index, other)| {
        let names = first.keys().chain(other.keys());
        let name = names.into_iter().find(|name| first.get(*name) != other.get(*name))?;
        let (one, two) = (shown(first, name), shown(other, name));
        Some(format!(
            "the processes would run different things: {name} is {one} on process 0, but {two} on process {}",
            index + 1
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fact_that_differs_is_named() {
        let facts = |context: &str| -> Facts {
            [("option context".to_owned(), context.to_owned()), ("the version".into(), "1".into())].into()
        };
        assert_eq!(difference(&[facts("64"), facts("64")]), None);
        let mut other = facts("64");
        other.insert("option swap-tokens".into(), "8".into());
        assert_eq!(
            difference(&[facts("64"), facts("64"), other]).unwrap(),
            "the processes would run different things: option swap-tokens is none on process 0, but 8 on process 2"
        );
        assert!(
            difference(&[facts("64"), facts("32")]).unwrap().contains("option context is 64 on process 0")
        );
    }
}
