//! The steps of attention: projections, norms of heads, rotary embedding, attention over the KV cache.

use super::Builder;
use crate::{config::mixture::SOFTMAX, step, tensor_names::Part};
use dsrun_core::{
    DType, Error, Result,
    op::{Embed, MoeCombine, RmsNorm, Rope},
    program::ValueId,
};

/// The queries, keys and values of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    query: ValueId,
    key: ValueId,
    value: ValueId,
}

impl Builder<'_> {
    /// Projects `x` to queries, keys and values.
    pub(crate) fn heads(&mut self, x: ValueId) -> Result<Heads> {
        let query = self.linear(x, Part::Query)?;
        let key = self.linear(x, Part::Key)?;
        let value = self.linear(x, Part::Value)?;
        Ok(Heads { query, key, value })
    }

    /// Normalises each query head and each key head separately.
    pub(crate) fn norm_heads(&mut self, heads: Heads) -> Result<Heads> {
        let head_dim = self.config.head_dim;
        let query = self.norm_runs(heads.query, Part::QueryNorm, head_dim)?;
        let key = self.norm_runs(heads.key, Part::KeyNorm, head_dim)?;
        Ok(Heads { query, key, ..heads })
    }

    /// Normalises the queries over all heads together, and the keys likewise.
    pub(crate) fn norm_all_heads(&mut self, heads: Heads) -> Result<Heads> {
        let query = self.norm(heads.query, Part::QueryNorm)?;
        let key = self.norm(heads.key, Part::KeyNorm)?;
        Ok(Heads { query, key, ..heads })
    }

    /// Whether the current layer has a rotary embedding.
    pub(crate) fn rotates(&self) -> bool {
        self.config.attention.get(self.layer).is_some_and(|layer| layer.rope.is_some())
    }

    /// Applies the rotary embedding of the current layer to queries and keys, if it has one.
    pub(crate) fn rotate(&mut self, heads: Heads) -> Result<Heads> {
        let config = self.config;
        let layer = config.attention.get(self.layer).and_then(|layer| layer.rope.as_ref());
        let Some(rope) = layer else { return Ok(heads) };
        let found = self.frequencies.iter().find(|(other, _)| *other == rope);
        let frequencies = found.ok_or_else(|| Error::internal("a rotary embedding is not declared"))?.1;
        let mut rotate = |x: ValueId, heads: usize| {
            let heads =
                u32::try_from(heads).map_err(|_| Error::invalid(format!("{heads} heads are too many")))?;
            let rope = Rope { heads, pairing: rope.pairing, scale: rope.scale };
            self.step.program.call(rope, [x, self.step.positions, frequencies].map(Some))
        };
        let query = rotate(heads.query, config.heads)?;
        let key = rotate(heads.key, config.kv_heads)?;
        Ok(Heads { query, key, ..heads })
    }

    /// Divides each query head and each key head by its root mean square.
    pub(crate) fn norm_heads_without_weights(&mut self, heads: Heads) -> Result<Heads> {
        let ones = vec![1.0; self.config.head_dim];
        let ones = self.weights.constant(&mut self.step.program, "head_ones", ones)?;
        let norm = RmsNorm { eps: self.config.eps, weight_offset: 0.0 };
        let mut normed = |x: ValueId| self.step.program.call(norm, [x, ones].map(Some));
        Ok(Heads { query: normed(heads.query)?, key: normed(heads.key)?, ..heads })
    }

    /// Multiplies queries by the factors of their positions, in layers whose attention has a temperature.
    pub(crate) fn tune_temperature(&mut self, heads: Heads) -> Result<Heads> {
        let layer = self.config.attention.get(self.layer);
        let Some(temperature) = layer.and_then(|layer| layer.temperature) else { return Ok(heads) };
        let context = self.context();
        let factors = || temperature.factors(context);
        let table = self.weights.constant_column(&mut self.step.program, "temperature_factors", factors)?;
        let program = &mut self.step.program;
        let embed = Embed { dtype: DType::F32, first_row: 0, position_offset: 0 };
        let factors = program.call(embed, [Some(self.step.positions), Some(table), None, None])?;
        // Combining the results of one expert multiplies each row by its weight. All rows choose the only expert.
        let mut routed = program.calls(SOFTMAX, [Some(factors), None, None, None, None])?;
        let experts = routed.swap_remove(0);
        let combine = MoeCombine { count: 1, first_expert: 0 };
        let query = program.call(combine, [heads.query, factors, experts].map(Some))?;
        Ok(Heads { query, ..heads })
    }

    /// The length of the longest sequence there may be.
    fn context(&self) -> usize {
        self.options.context.unwrap_or(self.config.context)
    }

    /// Appends keys and values to the cache, attends, and applies the output projection.
    pub(crate) fn attend(&mut self, Heads { query, key, value }: Heads) -> Result<ValueId> {
        let config = self.config;
        let layer = config.attention.get(self.layer);
        let layer = layer.ok_or_else(|| Error::internal("a layer has no attention"))?;
        // Within one chunk, chunked attention is causal attention.
        let context = self.context();
        if let Some(chunk) = layer.chunk.filter(|chunk| (*chunk as usize) < context) {
            return Err(Error::unsupported(format!(
                "a context of {context} tokens is longer than the chunks of {chunk} that layers attend within, which no op \
                 supports: choose a context of at most {chunk}"
            )));
        }
        let sinks = config.sinks.then(|| self.vector(Part::Sinks)).transpose()?;
        let attended = self.step.attention(step::Heads {
            query,
            key,
            value,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: layer.scale,
            window: layer.window,
            score_cap: config.score_cap,
            sinks,
        })?;
        self.linear(attended, Part::Output)
    }
}
