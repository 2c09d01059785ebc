//! Plans an engine with a draft model: a second, smaller model that proposes tokens.

use super::{DraftPlan, EnginePlan, draft_vocabulary::check_vocabulary};
use crate::{
    error::{EngineError, Result},
    options::{EngineOptions, ExpertsIn, KvIn, PrefixStore, Speculation, WeightsIn},
};
use dsrun_core::device::Device;
use dsrun_models::model::Model;
use std::sync::Arc;

impl EnginePlan {
    /// Plans an engine with a draft model, see [`Speculation::Draft`]. The draft model runs on the same device in the same
    /// precision, but is not quantised. Its KV cache holds as many tokens as the engine's, or the draft model's context for
    /// each request if that is less.
    ///
    /// # Errors
    /// Same as [`Self::new`]; [`EngineError::Draft`] if the vocabularies differ.
    pub fn with_draft(
        model: &Model,
        draft: &Arc<Model>,
        device: &dyn Device,
        options: &EngineOptions,
    ) -> Result<Self> {
        options.validate()?;
        let options = &options.for_model(model.config())?;
        options.for_model(draft.config())?;
        let Some(Speculation::Draft { tokens }) = options.speculation else {
            let given = options.speculation.map_or_else(|| "off".to_owned(), String::from);
            return Err(EngineError::option("speculate", given, "must be `draft` to use a draft model"));
        };
        check_vocabulary(model, draft)?;
        let mut plan = Self::without_memory(model, device, options)?;
        let own = EngineOptions {
            context: Some(plan.context.min(draft.config().context)),
            rope_context: Some(options.rope_context(model.config().context)),
            speculation: None,
            quantize: None,
            calibration: None,
            tune_step: false,
            kv_tokens: None,
            swap_tokens: 0,
            prefix_store: PrefixStore::default(),
            weights_in: WeightsIn::Device,
            experts: ExpertsIn::Auto,
            kv_in: KvIn::Device,
            ..options.clone()
        };
        let own = Box::new(Self::without_memory(draft, device, &own)?);
        plan.draft = Some(DraftPlan { model: draft.clone(), plan: own, tokens });
        plan.fit_to_memory(device)
    }
}
