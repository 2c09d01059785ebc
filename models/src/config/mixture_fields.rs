//! Reads the mixture of experts of a model from `config.json` and from the metadata of GGUF files.

use super::{
    ConfigError, Result,
    fields::Fields,
    gguf::Keys,
    limits,
    mixture::{DEEPSEEK_SIGMOID, MOST_EXPERTS, Mixture, MixtureNames, SOFTMAX, SharedExpert},
};
use dsrun_core::op::MoeRoute;

/// The defaults of optional fields; `None` if the field is required.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MixtureDefaults {
    pub(crate) experts: Option<usize>,
    pub(crate) top_k: Option<usize>,
    pub(crate) intermediate: Option<usize>,
}

/// Reads the numbers of experts from `config.json`. Other settings get basic values, for the family to change.
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
    // transformers has several names for this field, and writes any of them.
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

/// Reads a number that is at least 1.
pub(crate) fn count(fields: &Fields<'_>, field: &str, default: u32) -> Result<u32> {
    let size = fields.size(field, 1, limits::INTERMEDIATE)?;
    Ok(size.and_then(|size| u32::try_from(size).ok()).unwrap_or(default))
}

/// Reads the fields of DeepSeek's mixtures that other families have too: how many experts are shared, how many of the first
/// layers have an MLP, and the factor of weights.
pub(crate) fn read_shared(
    fields: &Fields<'_>,
    mixture: &mut Mixture,
    [shared, dense]: [u32; 2],
    scale: f32,
) -> Result<()> {
    let shared = count(fields, "n_shared_experts", shared)? as usize * mixture.intermediate;
    mixture.shared = Some(SharedExpert { intermediate: shared, gated: false });
    let dense = fields.size("first_k_dense_replace", 0, limits::LAYERS)?.unwrap_or(dense as usize);
    mixture.dense_before(dense);
    mixture.route.scale = fields.positive("routed_scaling_factor")?.map_or(scale, |scale| scale as f32);
    Ok(())
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

/// Reads the mixture of DeepSeek and of families like it from a GGUF file: groups of experts, scores of either kind, a shared
/// expert, and first layers with an MLP.
pub(crate) fn deepseek_from_gguf(keys: &Keys<'_>, layers: usize) -> Result<Mixture> {
    const SCORES: &str = "expert_gating_func";
    let route = match keys.get::<u32>(SCORES)? {
        None | Some(1) => SOFTMAX,
        Some(2) => DEEPSEEK_SIGMOID,
        Some(other) => {
            let reason = "supported: 1 (softmax), 2 (sigmoid)";
            return Err(ConfigError::unsupported(keys.path(SCORES), other, reason));
        }
    };
    let mut mixture = from_gguf(keys, None, route, layers)?;
    mixture.renormalise(keys.get::<bool>("expert_weights_norm")?.unwrap_or(false));
    mixture.route.scale = keys.positive("expert_weights_scale")?.unwrap_or(1.0);
    mixture.route.groups = keys.get::<u32>(MixtureNames::GGUF.groups)?.unwrap_or(1);
    mixture.route.top_groups = keys.get::<u32>(MixtureNames::GGUF.top_groups)?.unwrap_or(1);
    let dense = keys.get::<u32>("leading_dense_block_count")?.unwrap_or(0) as usize;
    mixture.dense_before(dense);
    mixture.selection_bias = keys.has(&format!("blk.{dense}.exp_probs_b.bias"));
    let shared = keys.required_size("expert_shared_count", limits::INTERMEDIATE)?;
    let intermediate = shared.saturating_mul(mixture.intermediate);
    mixture.shared = Some(SharedExpert { intermediate, gated: false });
    Ok(mixture)
}
