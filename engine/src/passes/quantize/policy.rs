//! Quantisation policies: which weight gets which format, written in TOML.

use super::{HEAD, ProductWeight};
use dsrun_core::{
    BlockFormat, DType, Error, GroupBits, GroupFormat, GroupOffset, GroupSize, Result, ScaleType,
    WeightFormat,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

/// The storage of a weight and the inputs of its product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheme {
    /// `keep`: the weight stays as it is.
    #[default]
    Keep,
    /// `f32`, `f16`, `bf16`: dense elements of this type.
    Dense(DType),
    /// `w8a16`: 8-bit integers with a scale for each row; activations stay as they are.
    W8A16,
    /// `w8a8`: 8-bit integers with a scale for each row; activations are quantised row by row.
    W8A8,
    /// `w4a16`: 4-bit integers with a scale for each [`Policy::group`]; activations stay as they are.
    W4A16,
    /// `mxfp4`: 4-bit floats with a power of two for each 32 columns; activations stay as they are. As a default it is the scheme of
    /// experts only, as in gpt-oss; other weights stay as they are unless a pattern names them.
    Mxfp4,
    /// A group format by its name, such as `int4g64z_f16`; activations stay as they are.
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
            Self::Mxfp4 => f.write_str(BlockFormat::Mxfp4.name()),
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
            "mxfp4" => Ok(Self::Mxfp4),
            _ => {
                let dense = DType::from_name(text).filter(|dtype| dtype.is_float()).map(Self::Dense);
                let group = || GroupFormat::from_name(text).map(Self::Group);
                dense.or_else(group).ok_or_else(|| {
                    format!(
                        "unknown quantisation scheme `{text}`: use keep, f32, f16, bf16, w8a16, w8a8, w4a16, mxfp4, or a \
                         format such as int4g64z_f16"
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

/// The zero point of `w4a16` groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Offset {
    /// Zero.
    #[default]
    Symmetric,
    /// An integer zero point for each group.
    ZeroPoint,
    /// A minimum for each group, as a real number.
    Minimum,
}

impl Offset {
    fn group_offset(self) -> GroupOffset {
        match self {
            Self::Symmetric => GroupOffset::Symmetric,
            Self::ZeroPoint => GroupOffset::ZeroPoint,
            Self::Minimum => GroupOffset::Minimum,
        }
    }
}

/// Says which weight gets which [`Scheme`].
///
/// ```toml
/// default = "w4a16"          # for every weight that only products read
/// group = 64
///
/// [weights]                  # the longest pattern that matches a weight decides; `*` matches any one part of a name
/// lm_head = "w8a16"          # the weight of the logits, kept unless it is named
/// "layers.0" = "w8a16"
/// "layers.*.down" = "int4g32m_f16"
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Policy {
    /// The scheme of weights that no pattern matches.
    pub default: Scheme,
    /// The group size of `w4a16`, in columns: 32, 64 or 128; 0 is the whole row. If absent, the largest that divides the columns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<usize>,
    /// The zero point of `w4a16` groups.
    pub offset: Offset,
    /// Whether to search for the scales of least squared error, instead of scaling to the range of each group.
    pub search: bool,
    /// The SmoothQuant migration strength for `w8a8`: how far outliers of activations are moved into the weights, from 0 (not at
    /// all, the default) to 1 (entirely).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smooth: Option<f32>,
    /// Schemes by patterns of weight names.
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

/// A value of the table of weights. TOML reads a name without quotes, such as `layers.0`, as a table within a table.
#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a quantisation scheme, such as \"w8a16\", or a table of weight names")]
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
    /// The policy that gives every weight the same scheme.
    pub fn of(default: Scheme) -> Self {
        Self { default, ..Self::default() }
    }

    /// Reads a policy from TOML.
    ///
    /// # Errors
    /// If a key is unknown or a value is out of range; the message says where.
    pub fn from_toml(text: &str) -> Result<Self> {
        let policy: Self = toml::from_str(text).map_err(|error| Error::invalid(error.to_string()))?;
        policy.check()?;
        Ok(policy)
    }

    /// Writes the policy as TOML.
    ///
    /// # Errors
    /// If the policy cannot be serialised, which is a defect.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|error| Error::internal(error.to_string()))
    }

    /// Checks the ranges of `group` and `smooth`.
    ///
    /// # Errors
    /// Names the key, its value and the range.
    pub fn check(&self) -> Result<()> {
        self.group_size()?;
        match self.smooth {
            Some(smooth) if !(0.0..=1.0).contains(&smooth) => {
                Err(Error::invalid(format!("is {smooth}, must be from 0 to 1")).at("smooth"))
            }
            _ => Ok(()),
        }
    }

    /// The group size of the policy, if it has one.
    fn group_size(&self) -> Result<Option<GroupSize>> {
        let Some(columns) = self.group else { return Ok(None) };
        let size = GroupSize::from_columns((columns > 0).then_some(columns));
        let message = || format!("is {columns}, must be 32, 64, 128, or 0 for the whole row");
        size.map(Some).ok_or_else(|| Error::invalid(message()).at("group"))
    }

    /// The scheme of a weight; `None` if the policy does not change it. Adds every matching pattern to `used`.
    pub(super) fn scheme_of<'a>(
        &'a self,
        weight: &ProductWeight,
        used: &mut BTreeSet<&'a str>,
    ) -> Option<Scheme> {
        let matches_weight = |pattern: &&String| {
            matches_name(pattern, &weight.name) || weight.head && pattern.as_str() == HEAD
        };
        let wildcards = |pattern: &str| pattern.split('.').filter(|part| *part == "*").count();
        let length = |pattern: &str| pattern.split('.').count();
        let all: Vec<&String> = self.weights.keys().filter(matches_weight).collect();
        used.extend(all.iter().map(|pattern| pattern.as_str()));
        let best = all.into_iter().max_by_key(|pattern| (length(pattern), usize::MAX - wildcards(pattern)));
        match best {
            Some(pattern) => self.weights.get(pattern).copied(),
            None if weight.kept || self.default == Scheme::Mxfp4 && !weight.expert => None,
            None => Some(self.default),
        }
    }

    /// The format that a scheme gives a weight with this number of columns; `None` to leave the weight as it is.
    ///
    /// # Errors
    /// If the group size, or the 32 columns of a block of MXFP4, do not divide the columns.
    pub(super) fn format(&self, scheme: Scheme, columns: usize) -> Result<Option<WeightFormat>> {
        let format = match scheme {
            Scheme::Keep => return Ok(None),
            Scheme::Dense(dtype) => return Ok(Some(WeightFormat::Dense(dtype))),
            Scheme::Mxfp4 => WeightFormat::Block(BlockFormat::Mxfp4),
            Scheme::W8A16 | Scheme::W8A8 => WeightFormat::Group(GroupFormat::INT8),
            Scheme::W4A16 => {
                let dividing = [GroupSize::Of128, GroupSize::Of64, GroupSize::Of32]
                    .into_iter()
                    .find(|size| size.columns().is_some_and(|group| columns.is_multiple_of(group)));
                WeightFormat::Group(GroupFormat {
                    bits: GroupBits::Four,
                    group: self.group_size()?.or(dividing).unwrap_or(GroupSize::Row),
                    offset: self.offset.group_offset(),
                    scale: ScaleType::F16,
                })
            }
            Scheme::Group(format) => WeightFormat::Group(format),
        };
        if format.row_bytes(columns).is_none() {
            let advice = match scheme {
                Scheme::Mxfp4 => "its blocks have 32 columns",
                _ if matches!(format, WeightFormat::Group(GroupFormat { group: GroupSize::Row, .. })) => {
                    "there must be an even number of them"
                }
                _ => "choose a group that divides them",
            };
            return Err(Error::invalid(format!(
                "rows of {columns} columns cannot be stored as {format}; {advice}"
            )));
        }
        Ok(Some(format))
    }
}

/// Whether a pattern matches a name, or the first parts of it.
pub(crate) fn matches_name(pattern: &str, name: &str) -> bool {
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
        ProductWeight {
            id: dsrun_core::program::ValueId::new(0),
            name: name.into(),
            kept: head,
            head,
            router: false,
            expert: name.contains("expert"),
        }
    }

    #[rstest]
    #[case("layers.3.up", false, Some(Scheme::W4A16))]
    #[case("layers.0.up", false, Some(Scheme::W8A16))]
    #[case("layers.0.down", false, Some(Scheme::W8A8))]
    #[case("embedding", true, Some(Scheme::Dense(DType::BF16)))]
    fn the_longest_pattern_decides(#[case] name: &str, #[case] head: bool, #[case] expected: Option<Scheme>) {
        let policy = Policy::from_toml(TEXT).unwrap();
        assert_eq!(policy.scheme_of(&weight(name, head), &mut BTreeSet::new()), expected);
    }

    #[test]
    fn a_star_matches_any_one_part() {
        let policy = Policy::from_toml(TEXT).unwrap();
        let down = policy.scheme_of(&weight("layers.12.down", false), &mut BTreeSet::new());
        assert_eq!(down.unwrap().to_string(), "int4g32m_f16");
        assert_eq!(Policy::default().scheme_of(&weight("head", true), &mut BTreeSet::new()), None);
    }

    #[test]
    fn a_policy_survives_a_round_trip_through_toml() {
        let policy = Policy::from_toml(TEXT).unwrap();
        assert_eq!(Policy::from_toml(&policy.to_toml().unwrap()).unwrap(), policy);
    }

    #[rstest]
    #[case("defualt = \"w8a8\"", "defualt")]
    #[case("default = \"w3a16\"", "unknown quantisation scheme `w3a16`")]
    #[case("group = 48", "group: is 48, must be 32, 64, 128")]
    #[case("smooth = 1.5", "smooth: is 1.5")]
    #[case("[weights]\nlayers.0 = \"int5\"", "unknown quantisation scheme `int5`")]
    #[case("[weights]\nlayers.0 = 7", "must be a quantisation scheme")]
    fn errors_name_the_key_and_the_value(#[case] text: &str, #[case] message: &str) {
        let error = Policy::from_toml(text).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn mxfp4_is_the_default_of_experts_only() {
        let policy = Policy::from_toml("default = \"mxfp4\"\n[weights]\nlayers.1 = \"mxfp4\"\n").unwrap();
        let scheme = |name: &str| policy.scheme_of(&weight(name, false), &mut BTreeSet::new());
        assert_eq!(scheme("layers.0.expert_up"), Some(Scheme::Mxfp4));
        assert_eq!(scheme("layers.0.query"), None);
        assert_eq!(scheme("layers.1.query"), Some(Scheme::Mxfp4), "a pattern names it");
        assert_eq!(policy.format(Scheme::Mxfp4, 96).unwrap().unwrap().to_string(), "mxfp4");
        let error = policy.format(Scheme::Mxfp4, 48).unwrap_err().to_string();
        assert!(
            error.contains("48 columns cannot be stored as mxfp4; its blocks have 32 columns"),
            "{error}"
        );
    }

    #[test]
    fn w4a16_takes_the_largest_group_that_divides_the_columns() {
        let policy = Policy::of(Scheme::W4A16);
        let name = |columns| policy.format(Scheme::W4A16, columns).unwrap().unwrap().to_string();
        assert_eq!([512, 576, 96, 34].map(name), ["int4g128_f16", "int4g64_f16", "int4g32_f16", "int4_f16"]);
        let wide = Policy { group: Some(128), ..policy };
        let error = wide.format(Scheme::W4A16, 576).unwrap_err().to_string();
        assert!(error.contains("576 columns cannot be stored as int4g128_f16"), "{error}");
    }
}
