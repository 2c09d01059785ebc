//! Multi-head latent attention: queries meet the cached latents, not keys that were made of them.
//!
//! A key head is `up_h . latent` and behind it the rotated part that all heads share. As `q . (up_h . latent) = (up_h^T . q) .
//! latent`, a query is multiplied by the transposed key projection of its head, and then attends to latents; the weighted
//! sum of latents is multiplied by the value projection of the head. So one head of `rank + rotated` elements is cached, and
//! the program is the same for prompts and for single tokens.

use super::Builder;
use crate::{
    config::DecoderConfig,
    declare::Declare,
    step::{LatentHeads, ProgramOptions, StepBuilder},
    tensor_names::Part,
};
use dsrun_core::{
    Error, Result,
    op::{HeadLinear, RmsNorm, Rope},
    program::ValueId,
};

/// Declares the frequencies of whole query heads: 0 for the pairs of the first part, which are not rotated.
pub(super) fn query_frequencies(
    config: &DecoderConfig,
    options: ProgramOptions,
    step: &mut StepBuilder,
    weights: &mut Declare<'_>,
) -> Result<Option<ValueId>> {
    let (Some(latent), Some(rope)) = (config.latent, config.ropes().first().copied()) else {
        return Ok(None);
    };
    let mut values = vec![0.0; latent.plain / 2];
    values.extend(rope.inverse_frequencies(options.context.unwrap_or(config.context)));
    weights.constant(&mut step.program, "query_frequencies", values).map(Some)
}

impl Builder<'_> {
    /// Computes latent attention, its output projection included.
    pub(crate) fn latent_attention(&mut self, x: ValueId) -> Result<ValueId> {
        let config = self.config;
        let missing = || Error::internal("a layer has no latent attention");
        let (latent, frequencies) =
            (config.latent.ok_or_else(missing)?, self.query_frequencies.ok_or_else(missing)?);
        let attention = config.attention.get(self.layer).ok_or_else(missing)?;
        let rope = attention.rope.as_ref().ok_or_else(missing)?;
        let heads = u32::try_from(config.heads)
            .map_err(|_| Error::invalid(format!("{} heads are too many", config.heads)))?;

        let query = match latent.query_rank {
            Some(_) => {
                let down = self.linear(x, Part::QueryDown)?;
                let down = self.norm_latent(down, Part::QueryDownNorm, latent.eps)?;
                self.linear(down, Part::QueryUp)?
            }
            None => self.linear(x, Part::Query)?,
        };
        let of_queries = Rope { heads, pairing: rope.pairing, scale: 1.0 };
        let query = self.rotated(of_queries, query, frequencies)?;
        let query = self.head_linear(query, Part::KeyUp, heads)?;

        let values = self.linear(x, Part::Latent)?;
        let values = self.norm_latent(values, Part::LatentNorm, latent.eps)?;
        let rest = self.linear(x, Part::KeyRest)?;
        // The factor of the embedding is that of queries and of keys; here keys have both.
        let of_keys = Rope { heads: 1, pairing: rope.pairing, scale: rope.scale * rope.scale };
        let shared = self.frequencies.iter().find(|(other, _)| *other == rope).ok_or_else(missing)?.1;
        let rest = self.rotated(of_keys, rest, shared)?;

        let attended = self.step.latent_attention(LatentHeads {
            query,
            latent: values,
            rest,
            heads: config.heads,
            rank: latent.rank,
            rotated: latent.rotated,
            scale: attention.scale,
        })?;
        let attended = self.head_linear(attended, Part::ValueUp, heads)?;
        self.linear(attended, Part::Output)
    }

    fn rotated(&mut self, rope: Rope, x: ValueId, frequencies: ValueId) -> Result<ValueId> {
        self.step.program.call(rope, [x, self.step.positions, frequencies].map(Some))
    }

    fn norm_latent(&mut self, x: ValueId, part: Part, eps: f32) -> Result<ValueId> {
        let weight = self.vector(part)?;
        self.step.program.call(RmsNorm { eps, weight_offset: 0.0 }, [x, weight].map(Some))
    }

    fn head_linear(&mut self, x: ValueId, part: Part, heads: u32) -> Result<ValueId> {
        let weight = self.matrix(part)?;
        let op = HeadLinear { dtype: self.options.activation, heads };
        self.step.program.call(op, [x, weight].map(Some))
    }
}
