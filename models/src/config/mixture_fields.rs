//! Reads the mixture of experts of a model from `config.json` and from the metadata of GGUF files.

use super::{
    ConfigError, Result,
    fields::Fields,
    gguf::Keys,
    limits,
    mixture::{MOST_EXPERTS, Mixture, MixtureNames},
};
use dsrun_core::op::MoeRoute;

/// The defaults of fields that a file may leave out; `None` for a field that is required.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MixtureDefaults {
    pub(crate) experts: Option<usize>,
    pub(crate) top_k: Option<usize>,
    pub(crate) intermediate: Option<usize>,
}

/// Reads the numbers of experts of `config.json`. The rest is for the family to change.
pub(crate) fn read(
    fields: &Fields<'_>,
    names: &MixtureNames,
    defaults: MixtureDefaults,
    route: MoeRoute,
    layers: usize,
) -> Result<Mixture> {
    let size = |field: &str, default: Option<usize>, most: usize| match default {
        Some(default) => Ok(fields.size(field, 1, most)?.unwrap_or(default)),
        None => fields.required_size(field, most),
    };
    let mut experts = fields.size(names.experts, 1, MOST_EXPERTS)?;
    // transformers knows the number by several names, and writes either.
    for other in ["num_experts", "num_local_experts"].into_iter().filter(|other| *other != names.experts) {
        match (experts, fields.size(other, 1, MOST_EXPERTS)?) {
            (Some(count), Some(found)) if found != count => {
                let [first, second] = [names.experts, other].map(|field| fields.path(field));
                return Err(ConfigError::Contradiction { first, second });
            }
            (found, also) => experts = found.or(also),
        }
    }
    let experts = match experts {
        Some(experts) => experts,
        None => size(names.experts, defaults.experts, MOST_EXPERTS)?,
    };
    let top_k = size(names.top_k, defaults.top_k, MOST_EXPERTS)?;
    let intermediate = size(names.intermediate, defaults.intermediate, limits::INTERMEDIATE)?;
    Ok(Mixture::plain(experts, top_k, intermediate, layers, route))
}

/// Reads the numbers of experts of a GGUF file. Biases are those among the tensors of the first layer with experts.
pub(crate) fn from_gguf(
    keys: &Keys<'_>,
    intermediate: Option<usize>,
    route: MoeRoute,
    layers: usize,
) -> Result<Mixture> {
    let names = MixtureNames::GGUF;
    let experts = keys.required_size(names.experts, MOST_EXPERTS)?;
    let top_k = keys.required_size(names.top_k, MOST_EXPERTS)?;
    let of_expert = keys.size(names.intermediate, limits::INTERMEDIATE)?.or(intermediate);
    let missing = || ConfigError::Missing { field: keys.path(names.intermediate) };
    Ok(Mixture::plain(experts, top_k, of_expert.ok_or_else(missing)?, layers, route))
}
