//! Pins: how the user wants weights to be split. The search decides about weights that are not pinned.

use super::{choices::Form, costs::MeshCosts};
use crate::passes::quantize::matches_name;
use dsrun_core::{
    Error, Result,
    program::{Origin, Program, ValueId},
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
};

/// How a weight is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pin {
    /// Whole on every rank.
    Replicated,
    /// Each rank has a part of the rows: the outputs of a projection, of every expert if it has several, tokens of the vocabulary, elements of a vector.
    Rows,
    /// Each rank has a part of the columns: the inputs of a projection.
    Columns,
    /// Each rank has the matrices of some of the experts.
    Experts,
}

impl Pin {
    /// Whether the pin allows a form of its weight.
    pub(super) fn admits(self, form: Form) -> bool {
        match form {
            Form::Whole => self == Self::Replicated,
            Form::Split { dimension: 0, .. } => self == Self::Rows,
            Form::Split { .. } => self == Self::Columns,
            Form::Experts => self == Self::Experts,
            Form::Partial => false,
        }
    }
}

/// The user's choices for sharding. Without pins it is automatic; with a pin for every weight it is manual.
///
/// ```toml
/// [weights]
/// "embedding" = "replicated"
/// "layers.*.down" = "columns"
/// ```
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct ShardPolicy {
    /// Pins, by the name of the weight. `*` stands for any one part of a name, a pattern also matches the names that it begins, and
    /// the pattern with the most parts decides.
    pub weights: BTreeMap<String, Pin>,
    /// The cost model for the search, in place of the default for the kind of device.
    pub costs: Option<MeshCosts>,
}

impl ShardPolicy {
    /// Reads a policy.
    ///
    /// # Errors
    /// If the text is not TOML, or has an unknown field.
    pub fn from_toml(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error| Error::invalid(error.to_string()).in_op("shard"))
    }

    /// The policy for a part of a program that has only some of its weights.
    ///
    /// # Errors
    /// If a pattern matches no weight of the whole program.
    pub(crate) fn for_part(&self, whole: &Program, part: &Program) -> Result<Self> {
        self.resolve(whole).map_err(|error| error.in_op("shard"))?;
        let matches = |pattern: &str| {
            let mut weights = part.values_from(|origin| matches!(origin, Origin::Weight(_)));
            weights.any(|(_, value)| matches_name(pattern, &value.name))
        };
        let weights = self.weights.iter().filter(|(pattern, _)| matches(pattern));
        Ok(Self {
            weights: weights.map(|(pattern, pin)| (pattern.clone(), *pin)).collect(),
            costs: self.costs.clone(),
        })
    }

    /// The pin of each pinned weight of a program.
    ///
    /// # Errors
    /// If a pattern matches no weight.
    pub(super) fn resolve(&self, program: &Program) -> Result<HashMap<ValueId, Pin>> {
        let mut pins = HashMap::new();
        let mut patterns: Vec<(&String, &Pin)> = self.weights.iter().collect();
        let stars = |pattern: &str| pattern.split('.').filter(|part| *part == "*").count();
        patterns.sort_by_key(|(pattern, _)| (Reverse(pattern.split('.').count()), stars(pattern)));
        for (pattern, pin) in patterns {
            let mut matched = false;
            for (id, value) in program.values_from(|origin| matches!(origin, Origin::Weight(_))) {
                if matches_name(pattern, &value.name) {
                    matched = true;
                    pins.entry(id).or_insert(*pin);
                }
            }
            if !matched {
                let message = format!(
                    "`{pattern}` matches no weight; `dsrun inspect --program` lists the names of the weights"
                );
                return Err(Error::invalid(message).at("weights"));
            }
        }
        Ok(pins)
    }
}
