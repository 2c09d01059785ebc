//! GGUF models in several files: `model-00001-of-00003.gguf` and so on.
//!
//! The first part has the metadata of the model. Every part has a header of its own with its tensors, its number, the number
//! of parts and the number of tensors in all.

use super::{GgufError, GgufFile, GgufProblem, Result};
use crate::weights::{TensorSource, fingerprint_of_files};
use dsrun_core::WeightType;
use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

/// The most parts of a model. Numbers have five digits, but no model has a hundredth of that.
const MAX_PARTS: usize = 1000;

/// The name of a part, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartName<'a> {
    /// The name up to the number.
    stem: &'a str,
    /// The number, counted from 1.
    pub(crate) number: usize,
    /// The number of parts.
    pub(crate) count: usize,
    /// The extension as it is written.
    extension: &'a str,
}

impl<'a> PartName<'a> {
    /// Takes a file name apart; `None` if it is not that of a part.
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        let (rest, extension) = name.rsplit_once('.')?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let parse = |digits: &str| {
            let plain = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
            plain.then(|| digits.parse::<usize>().ok()).flatten()
        };
        let (number, count) = (parse(number)?, parse(count)?);
        let valid =
            extension.eq_ignore_ascii_case("gguf") && (1..=count).contains(&number) && count <= MAX_PARTS;
        valid.then_some(Self { stem, number, count, extension })
    }

    /// The name up to the number.
    pub(crate) fn stem(&self) -> &'a str {
        self.stem
    }

    /// The names of all parts, in order.
    pub(crate) fn all(&self) -> impl Iterator<Item = String> + '_ {
        let Self { stem, count, extension, .. } = self;
        (1..=*count).map(move |number| format!("{stem}-{number:05}-of-{count:05}.{extension}"))
    }
}

/// The tensors of a model in several files.
#[derive(Debug)]
pub(crate) struct GgufParts {
    parts: Vec<GgufFile>,
    /// The part of each tensor.
    part_of: HashMap<String, usize>,
}

impl GgufParts {
    /// Opens the parts of a model behind its first, which is open already.
    ///
    /// # Errors
    /// If a part cannot be read, or the parts do not belong together.
    pub(crate) fn open(first: GgufFile, others: &[PathBuf]) -> Result<Self> {
        let mut parts = vec![first];
        for path in others {
            parts.push(GgufFile::open(path)?);
        }
        let count = parts.len();
        let mut part_of = HashMap::new();
        for (index, part) in parts.iter().enumerate() {
            let expected = [("split.no", index), ("split.count", count)];
            for (key, expected) in expected {
                let found = split_field(part, key)?;
                if found != Some(expected as u64) {
                    return Err(mismatch(part.path(), key, found, expected));
                }
            }
            for tensor in part.tensors() {
                match part_of.entry(tensor.name.to_owned()) {
                    Entry::Vacant(place) => drop(place.insert(index)),
                    Entry::Occupied(place) => {
                        let other: &GgufFile = &parts[*place.get()];
                        let message = format!("tensor {} is in {}, too", tensor.name, other.path().display());
                        return Err(GgufError::new(part.path(), GgufProblem::Parts(message)));
                    }
                }
            }
        }
        let total = split_field(&parts[0], "split.tensors.count")?;
        if total.is_some_and(|total| total != part_of.len() as u64) {
            return Err(mismatch(parts[0].path(), "split.tensors.count", total, part_of.len()));
        }
        Ok(Self { parts, part_of })
    }

    fn part(&self, name: &str) -> &GgufFile {
        // A tensor that no part has is refused by the first.
        &self.parts[self.part_of.get(name).copied().unwrap_or(0)]
    }
}

/// A number of the metadata about parts, which writers give various integer types.
pub(crate) fn split_field(file: &GgufFile, key: &str) -> Result<Option<u64>> {
    file.metadata().get::<u64>(key)
}

fn mismatch(path: &Path, key: &str, found: Option<u64>, expected: usize) -> GgufError {
    let found = found.map_or_else(|| "missing".to_owned(), |found| found.to_string());
    let message = format!("{key} is {found}, but must be {expected}: the parts do not belong together");
    GgufError::new(path, GgufProblem::Parts(message))
}

impl TensorSource for GgufParts {
    fn describe(&self) -> String {
        format!("{} in {} parts", self.parts[0].describe(), self.parts.len())
    }

    fn names(&self) -> Vec<&str> {
        self.parts.iter().flat_map(GgufFile::names).collect()
    }

    fn tensor_type(&self, name: &str) -> dsrun_core::Result<WeightType> {
        self.part(name).tensor_type(name)
    }

    fn rows(&self, name: &str, first: usize, count: usize) -> dsrun_core::Result<Cow<'_, [u8]>> {
        self.part(name).rows(name, first, count)
    }

    fn fingerprint(&self) -> Option<String> {
        fingerprint_of_files(self.parts.iter().map(GgufFile::path))
    }

    fn release(&self, name: &str) {
        self.part(name).release(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("m-00002-of-00003.gguf", Some((2, 3)))]
    #[case("Q4_K_M-00001-of-00001.GGUF", Some((1, 1)))]
    #[case("m-00004-of-00003.gguf", None)]
    #[case("m-00000-of-00003.gguf", None)]
    #[case("m-2-of-3.gguf", None)]
    #[case("m-00001-of-99999.gguf", None)]
    #[case("m-00001-of-00002.safetensors", None)]
    #[case("m.gguf", None)]
    fn names_of_parts(#[case] name: &str, #[case] expected: Option<(usize, usize)>) {
        assert_eq!(PartName::parse(name).map(|part| (part.number, part.count)), expected);
    }

    #[test]
    fn a_part_names_all_parts() {
        let part = PartName::parse("m-00002-of-00003.gguf").unwrap();
        let all: Vec<String> = part.all().collect();
        assert_eq!(all, ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]);
    }
}
