/*
 * Parameters of the decoder kernel.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* The operands of a layer. Products are query, key and value; output; both halves of the MLP. */
struct Layer {
    const u8* weights[4];
    const BIAS* biases[4];
    /* Weights and biases of the norms before attention and MLP. */
    const G* norm_weights[2];
    const SHIFT* norm_biases[2];
    /* Weights of the norms of query and key heads. */
    const HEAD_NORM* head_norms[2];
    X* keys;
    X* values;
};
static_assert(sizeof(Layer) == 128, "Layer as in Rust");
static_assert(sizeof(Layer::weights) == 32 && alignof(decltype(Layer::weights)) == 8, "Layer as in Rust");
static_assert(sizeof(Layer::biases) == 32 && alignof(decltype(Layer::biases)) == 8, "Layer as in Rust");
static_assert(sizeof(Layer::norm_weights) == 16 && alignof(decltype(Layer::norm_weights)) == 8, "Layer as in Rust");
static_assert(sizeof(Layer::norm_biases) == 16 && alignof(decltype(Layer::norm_biases)) == 8, "Layer as in Rust");
static_assert(sizeof(Layer::head_norms) == 16 && alignof(decltype(Layer::head_norms)) == 8, "Layer as in Rust");
static_assert(sizeof(Layer::keys) == 8 && alignof(decltype(Layer::keys)) == 8, "Layer as in Rust");
static_assert(sizeof(Layer::values) == 8 && alignof(decltype(Layer::values)) == 8, "Layer as in Rust");

/* Additional operands of a layer with a mixture of experts: weights and biases of the router and of the up projection. */
struct ExpertLayer {
    const u8* router;
    const u8* second;
    const BIAS* router_bias;
    const BIAS* second_bias;
    RouterVectors vectors;
};
static_assert(sizeof(ExpertLayer) == 56, "ExpertLayer as in Rust");
static_assert(sizeof(ExpertLayer::router) == 8 && alignof(decltype(ExpertLayer::router)) == 8, "ExpertLayer as in Rust");
static_assert(sizeof(ExpertLayer::second) == 8 && alignof(decltype(ExpertLayer::second)) == 8, "ExpertLayer as in Rust");
static_assert(sizeof(ExpertLayer::router_bias) == 8 && alignof(decltype(ExpertLayer::router_bias)) == 8, "ExpertLayer as in Rust");
static_assert(sizeof(ExpertLayer::second_bias) == 8 && alignof(decltype(ExpertLayer::second_bias)) == 8, "ExpertLayer as in Rust");
static_assert(sizeof(ExpertLayer::vectors) == 24 && alignof(decltype(ExpertLayer::vectors)) == 8, "ExpertLayer as in Rust");

/* Additional operands of a layer with norms after attention and MLP or with sinks, or of a model with several kinds of attention. */
struct ExtraLayer {
    /* Weights of the norms after attention and MLP. */
    const G* post_norms[2];
    /* The sink of each query head. */
    const float* sinks;
    /* The index of the layer's kind of attention. */
    i64 kind;
};
static_assert(sizeof(ExtraLayer) == 32, "ExtraLayer as in Rust");
static_assert(sizeof(ExtraLayer::post_norms) == 16 && alignof(decltype(ExtraLayer::post_norms)) == 8, "ExtraLayer as in Rust");
static_assert(sizeof(ExtraLayer::sinks) == 8 && alignof(decltype(ExtraLayer::sinks)) == 8, "ExtraLayer as in Rust");
static_assert(sizeof(ExtraLayer::kind) == 8 && alignof(decltype(ExtraLayer::kind)) == 8, "ExtraLayer as in Rust");

/* What the attention layers of one kind share. */
struct AttentionKind {
    /* Null if heads are not rotated. */
    const float* frequencies;
    float query_scale;
    float key_scale;
    /* The scale of attention scores. */
    float score_scale;
    /* The number of keys that the token attends to, its own included; 0 for all. */
    int window;
};
static_assert(sizeof(AttentionKind) == 24, "AttentionKind as in Rust");
static_assert(sizeof(AttentionKind::frequencies) == 8 && alignof(decltype(AttentionKind::frequencies)) == 8, "AttentionKind as in Rust");
static_assert(sizeof(AttentionKind::query_scale) == 4 && alignof(decltype(AttentionKind::query_scale)) == 4, "AttentionKind as in Rust");
static_assert(sizeof(AttentionKind::key_scale) == 4 && alignof(decltype(AttentionKind::key_scale)) == 4, "AttentionKind as in Rust");
static_assert(sizeof(AttentionKind::score_scale) == 4 && alignof(decltype(AttentionKind::score_scale)) == 4, "AttentionKind as in Rust");
static_assert(sizeof(AttentionKind::window) == 4 && alignof(decltype(AttentionKind::window)) == 4, "AttentionKind as in Rust");

/* The scalars of a product, the same in all layers: of the norm before it, or after it in the second product of attention or MLP; of the residual sum; and of the activation, with what is added to the up projection. */
struct Product {
    float eps;
    float weight_offset;
    float alpha;
    float limit;
    float up_offset;
};
static_assert(sizeof(Product) == 20, "Product as in Rust");
static_assert(sizeof(Product::eps) == 4 && alignof(decltype(Product::eps)) == 4, "Product as in Rust");
static_assert(sizeof(Product::weight_offset) == 4 && alignof(decltype(Product::weight_offset)) == 4, "Product as in Rust");
static_assert(sizeof(Product::alpha) == 4 && alignof(decltype(Product::alpha)) == 4, "Product as in Rust");
static_assert(sizeof(Product::limit) == 4 && alignof(decltype(Product::limit)) == 4, "Product as in Rust");
static_assert(sizeof(Product::up_offset) == 4 && alignof(decltype(Product::up_offset)) == 4, "Product as in Rust");

/* The embedding, if the launch includes it: a row of a table, added to a row of `position_rows` unless that is null, as in embed.cu. */
struct Embedding {
    const int* ids;
    i64 first_row;
    /* Null if the hidden state is an operand. */
    const X* rows;
    i64 row_count;
    const int* positions;
    i64 position_offset;
    const X* position_rows;
    i64 position_row_count;
    /* The factor with which the sum is added to itself. */
    float alpha;
    float unused;
};
static_assert(sizeof(Embedding) == 72, "Embedding as in Rust");
static_assert(sizeof(Embedding::ids) == 8 && alignof(decltype(Embedding::ids)) == 8, "Embedding as in Rust");
static_assert(sizeof(Embedding::first_row) == 8 && alignof(decltype(Embedding::first_row)) == 8, "Embedding as in Rust");
static_assert(sizeof(Embedding::rows) == 8 && alignof(decltype(Embedding::rows)) == 8, "Embedding as in Rust");
static_assert(sizeof(Embedding::row_count) == 8 && alignof(decltype(Embedding::row_count)) == 8, "Embedding as in Rust");
static_assert(sizeof(Embedding::positions) == 8 && alignof(decltype(Embedding::positions)) == 8, "Embedding as in Rust");
static_assert(sizeof(Embedding::position_offset) == 8 && alignof(decltype(Embedding::position_offset)) == 8, "Embedding as in Rust");
static_assert(sizeof(Embedding::position_rows) == 8 && alignof(decltype(Embedding::position_rows)) == 8, "Embedding as in Rust");
static_assert(sizeof(Embedding::position_row_count) == 8 && alignof(decltype(Embedding::position_row_count)) == 8, "Embedding as in Rust");
static_assert(sizeof(Embedding::alpha) == 4 && alignof(decltype(Embedding::alpha)) == 4, "Embedding as in Rust");
static_assert(sizeof(Embedding::unused) == 4 && alignof(decltype(Embedding::unused)) == 4, "Embedding as in Rust");

/* The exchange with other ranks: `kernels/decoder/ranks.cuh`. Not read if there are none. */
struct Ranks {
    /* The address of this rank's parts in the memory of each rank. */
    void* to[8];
    /* The address of the parts of all ranks in this rank's memory. */
    const void* from;
    /* The number of results that earlier launches summed. */
    u32* launched;
    void* state;
    /* Whether a wait of the rank has failed. */
    u32* failed;
    /* The timeout of waits in nanoseconds. */
    u64 patience;
};
static_assert(sizeof(Ranks) == 104, "Ranks as in Rust");
static_assert(sizeof(Ranks::to) == 64 && alignof(decltype(Ranks::to)) == 8, "Ranks as in Rust");
static_assert(sizeof(Ranks::from) == 8 && alignof(decltype(Ranks::from)) == 8, "Ranks as in Rust");
static_assert(sizeof(Ranks::launched) == 8 && alignof(decltype(Ranks::launched)) == 8, "Ranks as in Rust");
static_assert(sizeof(Ranks::state) == 8 && alignof(decltype(Ranks::state)) == 8, "Ranks as in Rust");
static_assert(sizeof(Ranks::failed) == 8 && alignof(decltype(Ranks::failed)) == 8, "Ranks as in Rust");
static_assert(sizeof(Ranks::patience) == 8 && alignof(decltype(Ranks::patience)) == 8, "Ranks as in Rust");

/* Limits on each SM's weight loads. */
struct Pacing {
    /* Maximum ring slots in flight. */
    u32 in_flight;
    /* Clocks for each byte, times 2^16; 0 for no limit. */
    u32 clocks_per_byte;
    /* Clocks that an SM that fell behind may catch up. */
    u32 catch_up;
    u32 unused;
};
static_assert(sizeof(Pacing) == 16, "Pacing as in Rust");
static_assert(sizeof(Pacing::in_flight) == 4 && alignof(decltype(Pacing::in_flight)) == 4, "Pacing as in Rust");
static_assert(sizeof(Pacing::clocks_per_byte) == 4 && alignof(decltype(Pacing::clocks_per_byte)) == 4, "Pacing as in Rust");
static_assert(sizeof(Pacing::catch_up) == 4 && alignof(decltype(Pacing::catch_up)) == 4, "Pacing as in Rust");
static_assert(sizeof(Pacing::unused) == 4 && alignof(decltype(Pacing::unused)) == 4, "Pacing as in Rust");

/* Parameters of all layers, and the token's position in its sequence. */
struct Model {
    Product products[4];
    /* Epsilon and weight offset of the norms of query and key heads. */
    float head_eps[2];
    float head_offsets[2];
    const Layer* table;
    /* Not read unless layers have experts. */
    const ExpertLayer* expert_table;
    /* Not read unless layers have additional operands. */
    const ExtraLayer* extra_table;
    i64 layers;
    /* The hidden state before and after the layers. */
    const X* x;
    X* y;
    /* The exchange of results between blocks. */
    u8* exchange;
    /* The exchange of attention splits. */
    float* partial;
    /* The counter of finished blocks. */
    u32* done;
    AttentionKind kinds[2];
    /* The soft cap of attention scores. */
    float softcap;
    float unused;
    const int* positions;
    const int* slots;
    i64 pages;
    Strides key_strides;
    Strides value_strides;
    const int* query_start;
    const int* query_length;
    const int* kv_length;
    const int* block_table;
    i64 block_table_columns;
    Embedding embedding;
    Pacing pacing;
    Ranks ranks;
    /* The rule of the router. */
    RouteRule rule;
};
static_assert(sizeof(Model) == 584, "Model as in Rust");
static_assert(sizeof(Model::products) == 80 && alignof(decltype(Model::products)) == 4, "Model as in Rust");
static_assert(sizeof(Model::head_eps) == 8 && alignof(decltype(Model::head_eps)) == 4, "Model as in Rust");
static_assert(sizeof(Model::head_offsets) == 8 && alignof(decltype(Model::head_offsets)) == 4, "Model as in Rust");
static_assert(sizeof(Model::table) == 8 && alignof(decltype(Model::table)) == 8, "Model as in Rust");
static_assert(sizeof(Model::expert_table) == 8 && alignof(decltype(Model::expert_table)) == 8, "Model as in Rust");
static_assert(sizeof(Model::extra_table) == 8 && alignof(decltype(Model::extra_table)) == 8, "Model as in Rust");
static_assert(sizeof(Model::layers) == 8 && alignof(decltype(Model::layers)) == 8, "Model as in Rust");
static_assert(sizeof(Model::x) == 8 && alignof(decltype(Model::x)) == 8, "Model as in Rust");
static_assert(sizeof(Model::y) == 8 && alignof(decltype(Model::y)) == 8, "Model as in Rust");
static_assert(sizeof(Model::exchange) == 8 && alignof(decltype(Model::exchange)) == 8, "Model as in Rust");
static_assert(sizeof(Model::partial) == 8 && alignof(decltype(Model::partial)) == 8, "Model as in Rust");
static_assert(sizeof(Model::done) == 8 && alignof(decltype(Model::done)) == 8, "Model as in Rust");
static_assert(sizeof(Model::kinds) == 48 && alignof(decltype(Model::kinds)) == 8, "Model as in Rust");
static_assert(sizeof(Model::softcap) == 4 && alignof(decltype(Model::softcap)) == 4, "Model as in Rust");
static_assert(sizeof(Model::unused) == 4 && alignof(decltype(Model::unused)) == 4, "Model as in Rust");
static_assert(sizeof(Model::positions) == 8 && alignof(decltype(Model::positions)) == 8, "Model as in Rust");
static_assert(sizeof(Model::slots) == 8 && alignof(decltype(Model::slots)) == 8, "Model as in Rust");
static_assert(sizeof(Model::pages) == 8 && alignof(decltype(Model::pages)) == 8, "Model as in Rust");
static_assert(sizeof(Model::key_strides) == 24 && alignof(decltype(Model::key_strides)) == 8, "Model as in Rust");
static_assert(sizeof(Model::value_strides) == 24 && alignof(decltype(Model::value_strides)) == 8, "Model as in Rust");
static_assert(sizeof(Model::query_start) == 8 && alignof(decltype(Model::query_start)) == 8, "Model as in Rust");
static_assert(sizeof(Model::query_length) == 8 && alignof(decltype(Model::query_length)) == 8, "Model as in Rust");
static_assert(sizeof(Model::kv_length) == 8 && alignof(decltype(Model::kv_length)) == 8, "Model as in Rust");
static_assert(sizeof(Model::block_table) == 8 && alignof(decltype(Model::block_table)) == 8, "Model as in Rust");
static_assert(sizeof(Model::block_table_columns) == 8 && alignof(decltype(Model::block_table_columns)) == 8, "Model as in Rust");
static_assert(sizeof(Model::embedding) == 72 && alignof(decltype(Model::embedding)) == 8, "Model as in Rust");
static_assert(sizeof(Model::pacing) == 16 && alignof(decltype(Model::pacing)) == 4, "Model as in Rust");
static_assert(sizeof(Model::ranks) == 104 && alignof(decltype(Model::ranks)) == 8, "Model as in Rust");
static_assert(sizeof(Model::rule) == 56 && alignof(decltype(Model::rule)) == 8, "Model as in Rust");
