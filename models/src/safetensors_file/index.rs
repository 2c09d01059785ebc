//! The index of a model in several safetensors files: `model.safetensors.index.json`.
//!
//! ```json
//! {"metadata": {"total_size": 4}, "weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}
//! ```

use super::error::SafetensorsProblem;
use super::unique_map::{EntryValue, UniqueMap};
use serde::de::{IgnoredAny, MapAccess};
use std::path::{Component, Path};

/// Which shard each tensor is in, in the order of the index.
pub(super) fn read_index(json: &[u8]) -> Result<Vec<(String, String)>, SafetensorsProblem> {
    let index: UniqueMap<Entry> =
        serde_json::from_slice(json).map_err(|error| SafetensorsProblem::Index(error.to_string()))?;
    let map = index.0.into_iter().find_map(|(_, entry)| match entry {
        Entry::WeightMap(map) => Some(map.0),
        Entry::Other => None,
    });
    let map = map.ok_or_else(|| SafetensorsProblem::Index("it has no `weight_map`".to_owned()))?;
    for (tensor, shard) in &map {
        if !is_file_name(shard) {
            return Err(SafetensorsProblem::ShardName { shard: shard.clone(), tensor: tensor.clone() });
        }
    }
    Ok(map)
}

/// Whether this is the name of a file in the folder of the index, on every system: no separators, no drive, no `..`.
fn is_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let single = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    single && !name.contains(['/', '\\', ':', '\0'])
}

enum Entry {
    WeightMap(UniqueMap<String>),
    Other,
}

impl<'de> EntryValue<'de> for Entry {
    fn read<A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Self, A::Error> {
        if key == "weight_map" {
            map.next_value().map(Self::WeightMap)
        } else {
            map.next_value::<IgnoredAny>().map(|_| Self::Other)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("model-00001-of-00002.safetensors", true)]
    #[case("a b.safetensors", true)]
    #[case("", false)]
    #[case(".", false)]
    #[case("..", false)]
    #[case("../x", false)]
    #[case("x/../y", false)]
    #[case("/etc/passwd", false)]
    #[case("x/", false)]
    #[case("..\\x", false)]
    #[case("C:x", false)]
    #[case("x\0", false)]
    fn only_plain_file_names_are_shards(#[case] name: &str, #[case] allowed: bool) {
        assert_eq!(is_file_name(name), allowed);
    }
}
