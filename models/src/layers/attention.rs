//! The steps of attention: projections, norms of heads, rotary embedding, attention over the KV cache.

use super::Builder;
use crate::{step, tensor_names::Part};
use dsrun_core::{Error, Result, op::Rope, program::ValueId};

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

    /// Appends keys and values to the cache, attends, and applies the output projection.
    pub(crate) fn attend(&mut self, Heads { query, key, value }: Heads) -> Result<ValueId> {
        let config = self.config;
        let layer = config.attention.get(self.layer);
        let layer = layer.ok_or_else(|| Error::internal("a layer has no attention"))?;
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
            sinks,
        })?;
        self.linear(attended, Part::Output)
    }
}
