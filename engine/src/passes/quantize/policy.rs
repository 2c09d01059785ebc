//! What is rounded to what, as people write it.

use super::{HEAD, ProductWeight};
use dsrun_core::{
    DType, Error, GroupBits, GroupFormat, GroupOffset, GroupSize, Result, ScaleType, WeightFormat,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

/// How a weight is kept, and what its product reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheme {
    /// `keep`: as it is.
    #[default]
    Keep,
    /// `f32`, `f16`, `bf16`: dense.
    Dense(DType),
    /// `w8a16`: integers of 8 bits with a scale for each row; activations as they are.
    W8A16,
    /// `w8a8`: the same, and activations quantised row by row.
    W8A8,
    /// `w4a16`: integers of 4 bits with a scale for each [`Policy::group`].
    W4A16,
    /// The name of a group format, as `int4g64z_f16`.
    Group(GroupFormat),
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keep => f.write_str("keep"),
            Self::Dense(dtype) => dtype.fmt(f),
            Self::W8A16 => f.write_str("w8a16"),
            Self::W8A8 => f.write_str("w8a8"),
            Self::W4A16 => f.write_str("w4a16"),
            Self::Group(format) => format.fmt(f),
        }
    }
}

impl FromStr for Scheme {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "keep" => Ok(Self::Keep),
            "w8a16" => Ok(Self::W8A16),
            "w8a8" => Ok(Self::W8A8),
            "w4a16" => Ok(Self::W4A16),
            _ => {
                let dense = DType::from_name(text).filter(|dtype| dtype.is_float()).map(Self::Dense);
                let group = || GroupFormat::from_name(text).map(Self::Group);
                dense.or_else(group).ok_or_else(|| {
                    format!(
                        "`{text}` is no way to keep a weight: keep, f32, f16, bf16, w8a16, w8a8, w4a16, or a format such as \
                         int4g64z_f16"
                    )
                })
            }
        }
    }
}

impl Serialize for Scheme {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Scheme {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// What the integers of `w4a16` are counted from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Offset {
    /// From zero.
    #[default]
    Symmetric,
    /// From an integer of each group.
    ZeroPoint,
    /// From a number of each group.
    Minimum,
}

impl Offset {
    fn of_group(self) -> GroupOffset {
        match self {
            Self::Symmetric => GroupOffset::Symmetric,
            Self::ZeroPoint => GroupOffset::ZeroPoint,
            Self::Minimum => GroupOffset::Minimum,
        }
    }
}

/// What is rounded to what.
///
/// ```toml
/// default = "w4a16"          # for every weight that only products read
/// group = 64
///
/// [weights]                  # the longest name that fits a weight decides; `*` stands for any one part
/// lm_head = "w8a16"          # the weight that makes the logits, kept unless it is named
/// "layers.0" = "w8a16"
/// "layers.*.down" = "int4g32m_f16"
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Policy {
    /// For weights that no name fits.
    pub default: Scheme,
    /// Columns that share a scale in `w4a16`: 32, 64 or 128; 0 is the whole row. The largest that divides the columns if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<usize>,
    /// What the integers of `w4a16` are counted from.
    pub offset: Offset,
    /// Whether scales are searched for that have less error than those that span a group.
    pub search: bool,
    /// How far outliers of activations are moved into the weights of `w8a8`, from 0 (not) to 1 (all); absent is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smooth: Option<f32>,
    /// For weights by name.
    #[serde(deserialize_with = "flattened")]
    pub weights: BTreeMap<String, Scheme>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            default: Scheme::Keep,
            group: None,
            offset: Offset::Symmetric,
            search: true,
            smooth: None,
            weights: BTreeMap::new(),
        }
    }
}

/// A name without quotes, as `layers.0`, is a table within a table to TOML.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "this is neither a way to keep a weight, such as \"w8a16\", nor a table of names"
)]
enum Entry {
    Scheme(String),
    Table(BTreeMap<String, Self>),
}

fn flattened<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<BTreeMap<String, Scheme>, D::Error> {
    fn flatten(
        prefix: &str,
        table: BTreeMap<String, Entry>,
        out: &mut BTreeMap<String, Scheme>,
    ) -> Result<(), String> {
        for (name, entry) in table {
            let name = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
            match entry {
                Entry::Scheme(scheme) => drop(out.insert(name, scheme.parse()?)),
                Entry::Table(table) => flatten(&name, table, out)?,
            }
        }
        Ok(())
    }
    let mut out = BTreeMap::new();
    flatten("", BTreeMap::deserialize(deserializer)?, &mut out).map_err(de::Error::custom)?;
    Ok(out)
}

impl Policy {
    /// The policy that keeps every weight so.
    pub fn of(default: Scheme) -> Self {
        Self { default, ..Self::default() }
    }

    /// Reads a policy from TOML.
    ///
    /// # Errors
    /// If a key is unknown or a value is none it can have; the message says where.
    pub fn from_toml(text: &str) -> Result<Self> {
        let policy: Self = toml::from_str(text).map_err(|error| Error::invalid(error.to_string()))?;
        policy.check()?;
        Ok(policy)
    }

    /// As TOML, to read and edit.
    ///
    /// # Errors
    /// If it cannot be written, which is a fault.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|error| Error::internal(error.to_string()))
    }

    /// Checks what types do not say.
    ///
    /// # Errors
    /// Names the key.
    pub fn check(&self) -> Result<()> {
        self.group_size()?;
        match self.smooth {
            Some(smooth) if !(0.0..=1.0).contains(&smooth) => {
                Err(Error::invalid(format!("is {smooth}, must be from 0 to 1")).at("smooth"))
            }
            _ => Ok(()),
        }
    }

    /// The group that was asked for.
    fn group_size(&self) -> Result<Option<GroupSize>> {
        let Some(columns) = self.group else { return Ok(None) };
        let size = GroupSize::from_columns((columns > 0).then_some(columns));
        let message = || format!("is {columns}, must be 32, 64, 128, or 0 for the whole row");
        size.map(Some).ok_or_else(|| Error::invalid(message()).at("group"))
    }

    /// What is to become of a weight; `None` if it is left alone. Notes the name that decided.
    pub(super) fn scheme_of<'a>(
        &'a self,
        weight: &ProductWeight,
        used: &mut BTreeSet<&'a str>,
    ) -> Option<Scheme> {
        let fits = |pattern: &&String| fits(pattern, &weight.name) || weight.head && pattern.as_str() == HEAD;
        let wildcards = |pattern: &str| pattern.split('.').filter(|part| *part == "*").count();
        let length = |pattern: &str| pattern.split('.').count();
        let all: Vec<&String> = self.weights.keys().filter(fits).collect();
        used.extend(all.iter().map(|pattern| pattern.as_str()));
        let best = all.into_iter().max_by_key(|pattern| (length(pattern), usize::MAX - wildcards(pattern)));
        match best {
            Some(pattern) => self.weights.get(pattern).copied(),
            None if weight.kept => None,
            None => Some(self.default),
        }
    }

    /// The format of a weight of so many columns; `None` to leave it as it is.
    ///
    /// # Errors
    /// If the columns are no whole number of groups.
    pub(super) fn format(&self, scheme: Scheme, columns: usize) -> Result<Option<WeightFormat>> {
        let format = match scheme {
            Scheme::Keep => return Ok(None),
            Scheme::Dense(dtype) => return Ok(Some(WeightFormat::Dense(dtype))),
            Scheme::W8A16 | Scheme::W8A8 => GroupFormat::INT8,
            Scheme::W4A16 => {
                let dividing = [GroupSize::Of128, GroupSize::Of64, GroupSize::Of32]
                    .into_iter()
                    .find(|size| size.columns().is_some_and(|group| columns.is_multiple_of(group)));
                GroupFormat {
                    bits: GroupBits::Four,
                    group: self.group_size()?.or(dividing).unwrap_or(GroupSize::Row),
                    offset: self.offset.of_group(),
                    scale: ScaleType::F16,
                }
            }
            Scheme::Group(format) => format,
        };
        if format.row(columns).is_none() {
            let message =
                format!("{columns} columns cannot be kept as {format}; choose a group that divides them");
            return Err(Error::invalid(message));
        }
        Ok(Some(WeightFormat::Group(format)))
    }
}

/// Whether a pattern is a name, or the beginning of one.
fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = name.split('.');
    pattern.split('.').all(|wanted| parts.next().is_some_and(|part| wanted == "*" || wanted == part))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const TEXT: &str = "default = \"w4a16\"\ngroup = 64\n[weights]\nlm_head = \"bf16\"\nlayers.0 = \"w8a16\"\n\
                        \"layers.*.down\" = \"int4g32m_f16\"\n\"layers.0.down\" = \"w8a8\"\n";

    fn weight(name: &str, head: bool) -> ProductWeight {
        ProductWeight { id: dsrun_core::program::ValueId::new(0), name: name.into(), kept: head, head }
    }

    #[rstest]
    #[case("layers.3.up", false, Some(Scheme::W4A16))]
    #[case("layers.0.up", false, Some(Scheme::W8A16))]
    #[case("layers.0.down", false, Some(Scheme::W8A8))]
    #[case("embedding", true, Some(Scheme::Dense(DType::BF16)))]
    fn the_longest_name_decides(#[case] name: &str, #[case] head: bool, #[case] expected: Option<Scheme>) {
        let policy = Policy::from_toml(TEXT).unwrap();
        assert_eq!(policy.scheme_of(&weight(name, head), &mut BTreeSet::new()), expected);
    }

    #[test]
    fn a_pattern_with_a_star_fits_any_one_part() {
        let policy = Policy::from_toml(TEXT).unwrap();
        let down = policy.scheme_of(&weight("layers.12.down", false), &mut BTreeSet::new());
        assert_eq!(down.unwrap().to_string(), "int4g32m_f16");
        assert_eq!(Policy::default().scheme_of(&weight("head", true), &mut BTreeSet::new()), None);
    }

    #[test]
    fn a_policy_is_read_back() {
        let policy = Policy::from_toml(TEXT).unwrap();
        assert_eq!(Policy::from_toml(&policy.to_toml().unwrap()).unwrap(), policy);
    }

    #[rstest]
    #[case("defualt = \"w8a8\"", "defualt")]
    #[case("default = \"w3a16\"", "`w3a16` is no way to keep a weight")]
    #[case("group = 48", "group: is 48, must be 32, 64, 128")]
    #[case("smooth = 1.5", "smooth: is 1.5")]
    #[case("[weights]\nlayers.0 = \"int5\"", "`int5` is no way")]
    #[case("[weights]\nlayers.0 = 7", "neither a way to keep a weight")]
    fn what_is_wrong_is_named(#[case] text: &str, #[case] message: &str) {
        let error = Policy::from_toml(text).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn groups_divide_the_columns() {
        let policy = Policy::of(Scheme::W4A16);
        let name = |columns| policy.format(Scheme::W4A16, columns).unwrap().unwrap().to_string();
        assert_eq!([512, 576, 96, 34].map(name), ["int4g128_f16", "int4g64_f16", "int4g32_f16", "int4_f16"]);
        let wide = Policy { group: Some(128), ..policy };
        let error = wide.format(Scheme::W4A16, 576).unwrap_err().to_string();
        assert!(error.contains("576 columns cannot be kept as int4g128_f16"), "{error}");
    }
}
