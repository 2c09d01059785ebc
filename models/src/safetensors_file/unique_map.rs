//! JSON objects whose keys must not come twice.
//!
//! JSON parsers keep the last of two equal keys, and so two readers can see two different models in one file.

use crate::weights::quoted::quoted;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

/// A value of an object, whose form may depend on its key.
pub(super) trait EntryValue<'de>: Sized {
    /// Reads the value of `key`, which comes next.
    fn read<A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Self, A::Error>;
}

impl<'de> EntryValue<'de> for String {
    fn read<A: MapAccess<'de>>(_: &str, map: &mut A) -> Result<Self, A::Error> {
        map.next_value()
    }
}

/// The entries of a JSON object in the order of the file.
#[derive(Debug)]
pub(super) struct UniqueMap<V>(pub(super) Vec<(String, V)>);

impl<'de, V: EntryValue<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

struct Entries<V>(PhantomData<V>);

impl<'de, V: EntryValue<'de>> Visitor<'de> for Entries<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = V::read(&key, &mut map)
                .map_err(|error| A::Error::custom(format!("{}: {error}", quoted(&key))))?;
            entries.push((key, value));
        }
        let mut seen = HashSet::with_capacity(entries.len());
        if let Some((twice, _)) = entries.iter().find(|(key, _)| !seen.insert(key.as_str())) {
            return Err(A::Error::custom(format!("{} comes twice", quoted(twice))));
        }
        Ok(UniqueMap(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_are_refused_however_they_are_written() {
        let map: UniqueMap<String> = serde_json::from_str(r#"{"b": "1", "a": "2"}"#).unwrap();
        assert_eq!(map.0, [("b".to_owned(), "1".to_owned()), ("a".to_owned(), "2".to_owned())]);
        let error = serde_json::from_str::<UniqueMap<String>>(r#"{"a": "1", "\u0061": "2"}"#).unwrap_err();
        assert!(error.to_string().contains("`a` comes twice"), "{error}");
        let error = serde_json::from_str::<UniqueMap<String>>(r#"{"a": 1}"#).unwrap_err();
        assert!(error.to_string().contains("`a`: invalid type"), "{error}");
    }
}
