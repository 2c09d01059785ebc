/*
 * What the kernel for decoder layers is told.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* What differs from layer to layer. Products are query, key and value; output; both halves of the MLP. */
struct Layer {
    const u8* weights[4];
    const BIAS* biases[4];
    /* Weights and biases of the norms in front of attention and MLP. */
    const G* norm_weights[2];
    const SHIFT* norm_biases[2];
    /* Weights of the norms of query and key heads. */
    const HEAD_NORM* head_norms[2];
    X* keys;
    X* values;
};
static_assert(sizeof(Layer) == 128, "Layer as in Rust");
static_assert(__builtin_offsetof(Layer, weights) == 0, "Layer as in Rust");
static_assert(__builtin_offsetof(Layer, biases) == 32, "Layer as in Rust");
static_assert(__builtin_offsetof(Layer, norm_weights) == 64, "Layer as in Rust");
static_assert(__builtin_offsetof(Layer, norm_biases) == 80, "Layer as in Rust");
static_assert(__builtin_offsetof(Layer, head_norms) == 96, "Layer as in Rust");
static_assert(__builtin_offsetof(Layer, keys) == 112, "Layer as in Rust");
static_assert(__builtin_offsetof(Layer, values) == 120, "Layer as in Rust");

/* A product as it is in all layers: the norm in front of it, the scale of the sum and the limit of the activation behind it. */
struct Product {
    float eps;
    float weight_offset;
    float alpha;
    float limit;
};
static_assert(sizeof(Product) == 16, "Product as in Rust");
static_assert(__builtin_offsetof(Product, eps) == 0, "Product as in Rust");
static_assert(__builtin_offsetof(Product, weight_offset) == 4, "Product as in Rust");
static_assert(__builtin_offsetof(Product, alpha) == 8, "Product as in Rust");
static_assert(__builtin_offsetof(Product, limit) == 12, "Product as in Rust");

/* The token in front of the layers, where this launch makes it: a row of a table, and where `position_rows` is not null, added to one of another for its position. As embed.cu. */
struct Embedding {
    const int* ids;
    i64 first_row;
    /* Null: the token is there. */
    const X* rows;
    i64 row_count;
    const int* positions;
    i64 position_offset;
    const X* position_rows;
    i64 position_row_count;
};
static_assert(sizeof(Embedding) == 64, "Embedding as in Rust");
static_assert(__builtin_offsetof(Embedding, ids) == 0, "Embedding as in Rust");
static_assert(__builtin_offsetof(Embedding, first_row) == 8, "Embedding as in Rust");
static_assert(__builtin_offsetof(Embedding, rows) == 16, "Embedding as in Rust");
static_assert(__builtin_offsetof(Embedding, row_count) == 24, "Embedding as in Rust");
static_assert(__builtin_offsetof(Embedding, positions) == 32, "Embedding as in Rust");
static_assert(__builtin_offsetof(Embedding, position_offset) == 40, "Embedding as in Rust");
static_assert(__builtin_offsetof(Embedding, position_rows) == 48, "Embedding as in Rust");
static_assert(__builtin_offsetof(Embedding, position_row_count) == 56, "Embedding as in Rust");

/* How fast a multiprocessor asks memory for weights. */
struct Pacing {
    /* Ring slots on their way at once. */
    u32 in_flight;
    /* Clocks for each byte, times 2^16; 0 for as fast as there is room. */
    u32 clocks_per_byte;
    /* For how many clocks a multiprocessor that fell behind may go faster. */
    u32 catch_up;
    u32 unused;
};
static_assert(sizeof(Pacing) == 16, "Pacing as in Rust");
static_assert(__builtin_offsetof(Pacing, in_flight) == 0, "Pacing as in Rust");
static_assert(__builtin_offsetof(Pacing, clocks_per_byte) == 4, "Pacing as in Rust");
static_assert(__builtin_offsetof(Pacing, catch_up) == 8, "Pacing as in Rust");
static_assert(__builtin_offsetof(Pacing, unused) == 12, "Pacing as in Rust");

/* All layers, and the token's place in its sequence. */
struct Model {
    Product products[4];
    /* Epsilon and weight offset of the norms of query and key heads. */
    float head_eps[2];
    float head_offsets[2];
    const Layer* table;
    i64 layers;
    /* The token in front of the layers and behind them. */
    const X* x;
    X* y;
    /* Results that blocks exchange. */
    u8* exchange;
    /* Splits of attention that blocks exchange. */
    float* partial;
    /* How many blocks are done. */
    u32* done;
    float query_scale;
    float key_scale;
    /* The scale of attention scores. */
    float score_scale;
    float unused;
    const int* positions;
    const float* frequencies;
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
};
static_assert(sizeof(Model) == 352, "Model as in Rust");
static_assert(__builtin_offsetof(Model, products) == 0, "Model as in Rust");
static_assert(__builtin_offsetof(Model, head_eps) == 64, "Model as in Rust");
static_assert(__builtin_offsetof(Model, head_offsets) == 72, "Model as in Rust");
static_assert(__builtin_offsetof(Model, table) == 80, "Model as in Rust");
static_assert(__builtin_offsetof(Model, layers) == 88, "Model as in Rust");
static_assert(__builtin_offsetof(Model, x) == 96, "Model as in Rust");
static_assert(__builtin_offsetof(Model, y) == 104, "Model as in Rust");
static_assert(__builtin_offsetof(Model, exchange) == 112, "Model as in Rust");
static_assert(__builtin_offsetof(Model, partial) == 120, "Model as in Rust");
static_assert(__builtin_offsetof(Model, done) == 128, "Model as in Rust");
static_assert(__builtin_offsetof(Model, query_scale) == 136, "Model as in Rust");
static_assert(__builtin_offsetof(Model, key_scale) == 140, "Model as in Rust");
static_assert(__builtin_offsetof(Model, score_scale) == 144, "Model as in Rust");
static_assert(__builtin_offsetof(Model, unused) == 148, "Model as in Rust");
static_assert(__builtin_offsetof(Model, positions) == 152, "Model as in Rust");
static_assert(__builtin_offsetof(Model, frequencies) == 160, "Model as in Rust");
static_assert(__builtin_offsetof(Model, slots) == 168, "Model as in Rust");
static_assert(__builtin_offsetof(Model, pages) == 176, "Model as in Rust");
static_assert(__builtin_offsetof(Model, key_strides) == 184, "Model as in Rust");
static_assert(__builtin_offsetof(Model, value_strides) == 208, "Model as in Rust");
static_assert(__builtin_offsetof(Model, query_start) == 232, "Model as in Rust");
static_assert(__builtin_offsetof(Model, query_length) == 240, "Model as in Rust");
static_assert(__builtin_offsetof(Model, kv_length) == 248, "Model as in Rust");
static_assert(__builtin_offsetof(Model, block_table) == 256, "Model as in Rust");
static_assert(__builtin_offsetof(Model, block_table_columns) == 264, "Model as in Rust");
static_assert(__builtin_offsetof(Model, embedding) == 272, "Model as in Rust");
static_assert(__builtin_offsetof(Model, pacing) == 336, "Model as in Rust");
