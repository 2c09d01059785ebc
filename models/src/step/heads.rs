//! What a layer hands to attention.

use dsrun_core::program::ValueId;

/// The queries, keys and values of a layer, rotated, and how they attend.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// `[tokens, heads * head_dim]`.
    pub query: ValueId,
    /// `[tokens, kv_heads * head_dim]`.
    pub key: ValueId,
    /// `[tokens, kv_heads * head_dim]`.
    pub value: ValueId,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// What scores are multiplied by.
    pub scale: f32,
    /// How many keys a query of a decoder sees, its own included; `None` for all before it. A query of an encoder sees as many on
    /// either side.
    pub window: Option<u32>,
    /// The bound of the soft cap of scores; 0 for none.
    pub score_cap: f32,
    /// One more score of each head, without a key: f32 `[heads]`.
    pub sinks: Option<ValueId>,
}

/// The queries of a layer and the latents of its keys and values, and how they attend.
#[derive(Clone, Copy, Debug)]
pub struct LatentHeads {
    /// Queries multiplied by the key projections of their heads, and behind each its rotated part: `[tokens, heads * (rank +
    /// rotated)]`.
    pub query: ValueId,
    /// `[tokens, rank]`.
    pub latent: ValueId,
    /// The rotated part of keys: `[tokens, rotated]`.
    pub rest: ValueId,
    /// Query heads.
    pub heads: usize,
    /// Features of a latent.
    pub rank: usize,
    /// Features of the rotated part.
    pub rotated: usize,
    /// What scores are multiplied by.
    pub scale: f32,
}
