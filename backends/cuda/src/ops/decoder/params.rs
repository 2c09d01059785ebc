//! Parameters of the decoder kernel.

use crate::{
    collective::MAX_RANKS,
    driver::kernel_struct::{Pointer, declaration, header, kernel_struct},
    ops::{
        experts::{RouteRule, RouterVectors},
        params::Strides,
    },
};

/// The maximum number of kinds of attention in a model.
pub(super) const KINDS: usize = 2;

kernel_struct! {
    /// The operands of a layer. Products are query, key and value; output; both halves of the MLP.
    pub(super) struct Layer {
        pub(super) weights: [Pointer; 4] = "const u8*",
        pub(super) biases: [Pointer; 4] = "const BIAS*",
        /// Weights and biases of the norms before attention and MLP.
        pub(super) norm_weights: [Pointer; 2] = "const G*",
        pub(super) norm_biases: [Pointer; 2] = "const SHIFT*",
        /// Weights of the norms of query and key heads.
        pub(super) head_norms: [Pointer; 2] = "const HEAD_NORM*",
        pub(super) keys: Pointer = "X*",
        pub(super) values: Pointer = "X*",
    }
}

kernel_struct! {
    /// Additional operands of a layer with a mixture of experts: weights and biases of the router and of the up projection.
    pub(super) struct ExpertLayer {
        pub(super) router: Pointer = "const u8*",
        pub(super) second: Pointer = "const u8*",
        pub(super) router_bias: Pointer = "const BIAS*",
        pub(super) second_bias: Pointer = "const BIAS*",
        pub(super) vectors: RouterVectors = "RouterVectors",
    }
}

kernel_struct! {
    /// Additional operands of a layer with norms after attention and MLP or with sinks, or of a model with several kinds of attention.
    pub(super) struct ExtraLayer {
        /// Weights of the norms after attention and MLP.
        pub(super) post_norms: [Pointer; 2] = "const G*",
        /// The sink of each query head.
        pub(super) sinks: Pointer = "const float*",
        /// The index of the layer's kind of attention.
        pub(super) kind: i64 = "i64",
    }
}

kernel_struct! {
    /// What the attention layers of one kind share.
    pub(super) struct AttentionKind {
        /// Null if heads are not rotated.
        pub(super) frequencies: Pointer = "const float*",
        pub(super) query_scale: f32 = "float",
        pub(super) key_scale: f32 = "float",
        /// The scale of attention scores.
        pub(super) score_scale: f32 = "float",
        /// The number of keys that the token attends to, its own included; 0 for all.
        pub(super) window: i32 = "int",
    }
}

kernel_struct! {
    /// The scalars of a product, the same in all layers: of the norm before it, or after it in the second product of attention or
    /// MLP; of the residual sum; and of the activation, with what is added to the up projection.
    pub(super) struct Product {
        pub(super) eps: f32 = "float",
        pub(super) weight_offset: f32 = "float",
        pub(super) alpha: f32 = "float",
        pub(super) limit: f32 = "float",
        pub(super) up_offset: f32 = "float",
    }
}

kernel_struct! {
    /// The embedding, if the launch includes it: a row of a table, added to a row of `position_rows` unless that is null, as in
    /// embed.cu.
    pub(super) struct Embedding {
        pub(super) ids: Pointer = "const int*",
        pub(super) first_row: i64 = "i64",
        /// Null if the hidden state is an operand.
        pub(super) rows: Pointer = "const X*",
        pub(super) row_count: i64 = "i64",
        pub(super) positions: Pointer = "const int*",
        pub(super) position_offset: i64 = "i64",
        pub(super) position_rows: Pointer = "const X*",
        pub(super) position_row_count: i64 = "i64",
        /// The factor with which the sum is added to itself.
        pub(super) alpha: f32 = "float",
        pub(super) unused: f32 = "float",
    }
}

kernel_struct! {
    /// The exchange with other ranks: `kernels/decoder/ranks.cuh`. Not read if there are none.
    pub(super) struct Ranks {
        /// The address of this rank's parts in the memory of each rank.
        pub(super) to: [Pointer; MAX_RANKS] = "void*",
        /// The address of the parts of all ranks in this rank's memory.
        pub(super) from: Pointer = "const void*",
        /// The number of results that earlier launches summed.
        pub(super) launched: Pointer = "u32*",
        pub(super) state: Pointer = "void*",
        /// Whether a wait of the rank has failed.
        pub(super) failed: Pointer = "u32*",
        /// The timeout of waits in nanoseconds.
        pub(super) patience: u64 = "u64",
    }
}

kernel_struct! {
    /// Limits on each SM's weight loads.
    pub(super) struct Pacing {
        /// Maximum ring slots in flight.
        pub(super) in_flight: u32 = "u32",
        /// Clocks for each byte, times 2^16; 0 for no limit.
        pub(super) clocks_per_byte: u32 = "u32",
        /// Clocks that an SM that fell behind may catch up.
        pub(super) catch_up: u32 = "u32",
        pub(super) unused: u32 = "u32",
    }
}

kernel_struct! {
    /// Parameters of all layers, and the token's position in its sequence.
    pub(super) struct Model {
        pub(super) products: [Product; 4] = "Product",
        /// Epsilon and weight offset of the norms of query and key heads.
        pub(super) head_eps: [f32; 2] = "float",
        pub(super) head_offsets: [f32; 2] = "float",
        pub(super) table: Pointer = "const Layer*",
        /// Not read unless layers have experts.
        pub(super) expert_table: Pointer = "const ExpertLayer*",
        /// Not read unless layers have additional operands.
        pub(super) extra_table: Pointer = "const ExtraLayer*",
        pub(super) layers: i64 = "i64",
        /// The hidden state before and after the layers.
        pub(super) x: Pointer = "const X*",
        pub(super) y: Pointer = "X*",
        /// The exchange of results between blocks.
        pub(super) exchange: Pointer = "u8*",
        /// The exchange of attention splits.
        pub(super) partial: Pointer = "float*",
        /// The counter of finished blocks.
        pub(super) done: Pointer = "u32*",
        pub(super) kinds: [AttentionKind; 2] = "AttentionKind",
        /// The soft cap of attention scores.
        pub(super) softcap: f32 = "float",
        pub(super) unused: f32 = "float",
        pub(super) positions: Pointer = "const int*",
        pub(super) slots: Pointer = "const int*",
        pub(super) pages: i64 = "i64",
        pub(super) key_strides: Strides = "Strides",
        pub(super) value_strides: Strides = "Strides",
        pub(super) query_start: Pointer = "const int*",
        pub(super) query_length: Pointer = "const int*",
        pub(super) kv_length: Pointer = "const int*",
        pub(super) block_table: Pointer = "const int*",
        pub(super) block_table_columns: i64 = "i64",
        pub(super) embedding: Embedding = "Embedding",
        pub(super) pacing: Pacing = "Pacing",
        pub(super) ranks: Ranks = "Ranks",
        /// The rule of the router.
        pub(super) rule: RouteRule = "RouteRule",
    }
}

/// The text of `kernels/decoder/params.cuh`.
pub(crate) fn params_header() -> String {
    header(
        "Parameters of the decoder kernel.",
        &[
            declaration::<Layer>(),
            declaration::<ExpertLayer>(),
            declaration::<ExtraLayer>(),
            declaration::<AttentionKind>(),
            declaration::<Product>(),
            declaration::<Embedding>(),
            declaration::<Ranks>(),
            declaration::<Pacing>(),
            declaration::<Model>(),
        ],
    )
}
