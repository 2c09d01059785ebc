//! Mixture of experts (MoE): the number of experts, and the router's settings.

use super::error::ConfigError;
use dsrun_core::op::{GroupScore, MoeRoute, RouterNorm, RouterScore};

/// The mixture of experts that replaces the MLP in some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixture {
    /// Number of experts of a layer.
    pub experts: usize,
    /// The inner size of an expert.
    pub intermediate: usize,
    /// How the router selects and weights experts.
    pub route: MoeRoute,
    /// Whether each layer has experts; the others have an MLP.
    pub layers: Vec<bool>,
    /// Whether the router has a bias that is part of the logits.
    pub router_bias: bool,
    /// Whether the router has a selection bias, which affects the choice of experts but not their weights.
    pub selection_bias: bool,
    /// Whether the matrices of experts have biases.
    pub biases: bool,
    /// The limit of gate and up in the activation; 0 for none.
    pub limit: f32,
    /// The offset that is added to up in the activation.
    pub up_offset: f32,
    /// Whether weights multiply the inputs of experts instead of their outputs.
    pub weighted_inputs: bool,
    /// The shared expert, which processes all tokens.
    pub shared: Option<SharedExpert>,
}

/// A shared expert: an MLP whose result is added to that of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its inner size.
    pub intermediate: usize,
    /// Whether its result is multiplied by the sigmoid of a linear function of the input.
    pub gated: bool,
}

/// The largest accepted number of experts of a layer; far more than any model has.
pub(super) const MOST_EXPERTS: usize = 1 << 16;

/// A router that chooses by the softmax over all experts.
pub(crate) const SOFTMAX: MoeRoute = MoeRoute {
    top_k: 1,
    score: RouterScore::Softmax,
    groups: 1,
    top_groups: 1,
    group_score: GroupScore::Max,
    norm: RouterNorm::None,
    eps: 0.0,
    scale: 1.0,
    threshold: 0.0,
};

/// The router of DeepSeek-V3 and of families like it.
pub(crate) const DEEPSEEK_SIGMOID: MoeRoute =
    MoeRoute { score: RouterScore::Sigmoid, group_score: GroupScore::TopTwoSum, eps: 1e-20, ..SOFTMAX };

impl Mixture {
    /// A mixture in every layer, without biases, limits and shared experts.
    pub(super) fn plain(
        experts: usize,
        top_k: usize,
        intermediate: usize,
        layers: usize,
        route: MoeRoute,
    ) -> Self {
        // Configurations are checked for more experts than exist, so this does not overflow.
        let route = MoeRoute { top_k: u32::try_from(top_k).unwrap_or(u32::MAX), ..route };
        Self {
            experts,
            intermediate,
            route,
            layers: vec![true; layers],
            router_bias: false,
            selection_bias: false,
            biases: false,
            limit: 0.0,
            up_offset: 0.0,
            weighted_inputs: false,
            shared: None,
        }
    }

    /// Sets whether the weights of a token's experts are renormalised.
    pub(crate) fn renormalise(&mut self, renormalise: bool) {
        self.route.norm = if renormalise { RouterNorm::Sum } else { RouterNorm::None };
    }

    /// Gives the first `count` layers an MLP, and the others experts.
    pub(crate) fn dense_before(&mut self, count: usize) {
        for (layer, sparse) in self.layers.iter_mut().enumerate() {
            *sparse = layer >= count;
        }
    }

    /// Checks everything that building a program relies on, for a model with this many layers.
    pub(super) fn validate(&self, names: &MixtureNames, layers: usize) -> Result<(), ConfigError> {
        if self.experts == 0 || self.experts > MOST_EXPERTS {
            let expected = format!("a whole number from 1 to {MOST_EXPERTS}");
            return Err(ConfigError::value(names.experts, self.experts, expected));
        }
        let MoeRoute { top_k, groups, top_groups, .. } = self.route;
        let [top_k, groups, top_groups] = [top_k, groups, top_groups].map(|size| size as usize);
        let experts = self.experts;
        if top_k == 0 || top_k > experts {
            let expected = format!("from 1 to {experts} ({})", names.experts);
            return Err(ConfigError::value(names.top_k, top_k, expected));
        }
        if groups == 0 || !experts.is_multiple_of(groups) {
            let expected = format!("a divisor of {experts} ({})", names.experts);
            return Err(ConfigError::value(names.groups, groups, expected));
        }
        if top_groups == 0 || top_groups > groups {
            let expected = format!("from 1 to {groups} ({})", names.groups);
            return Err(ConfigError::value(names.top_groups, top_groups, expected));
        }
        if top_groups * (experts / groups) < top_k {
            let expected = format!("groups that have {top_k} ({}) experts together", names.top_k);
            return Err(ConfigError::value(names.top_groups, top_groups, expected));
        }
        let numbers = [self.route.eps, self.route.scale, self.route.threshold, self.limit, self.up_offset];
        if let Some(number) = numbers.iter().find(|number| !number.is_finite()) {
            return Err(ConfigError::value("a number of the mixture of experts", number, "finite"));
        }
        if self.layers.len() != layers {
            let found = format!("{} long", self.layers.len());
            return Err(ConfigError::value(
                "the list of layers with experts",
                found,
                format!("{layers} long"),
            ));
        }
        Ok(())
    }
}

/// The names of a mixture's fields in one file format, for readers and error messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MixtureNames {
    pub(crate) experts: &'static str,
    pub(crate) top_k: &'static str,
    pub(crate) intermediate: &'static str,
    pub(crate) shared: &'static str,
    pub(crate) groups: &'static str,
    pub(crate) top_groups: &'static str,
}

impl MixtureNames {
    /// The names of Mixtral in `config.json`.
    pub(crate) const MIXTRAL: Self = Self {
        experts: "num_local_experts",
        top_k: "num_experts_per_tok",
        intermediate: "intermediate_size",
        shared: "shared_expert_intermediate_size",
        groups: "n_group",
        top_groups: "topk_group",
    };

    /// The names of Qwen in `config.json`.
    pub(crate) const QWEN: Self =
        Self { experts: "num_experts", intermediate: "moe_intermediate_size", ..Self::MIXTRAL };

    /// The names of DeepSeek in `config.json`.
    pub(crate) const DEEPSEEK: Self = Self { experts: "n_routed_experts", ..Self::QWEN };

    /// The keys of GGUF metadata, without the prefix of the architecture.
    pub(crate) const GGUF: Self = Self {
        experts: "expert_count",
        top_k: "expert_used_count",
        intermediate: "expert_feed_forward_length",
        shared: "expert_shared_feed_forward_length",
        groups: "expert_group_count",
        top_groups: "expert_group_used_count",
    };
}
