/*
 * Parameters of the epilogue of products.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of an epilogue. */
struct EpilogueParams {
    i64 outputs;
    /* May be null. */
    const BIAS* bias;
    Y* y;
    i64 y_row;
    /* A residual sum: y = added + alpha * product. */
    const Y* added;
    i64 added_row;
    float alpha;
    /* The limit of an activation; 0 for none. */
    float limit;
    /* Query, key and value: their heads. */
    i64 query_heads;
    i64 kv_heads;
    i64 key_size;
    i64 value_size;
    /* The rotated pairs of a head. */
    i64 pairs;
    const int* positions;
    const float* frequencies;
    float query_scale;
    float key_scale;
    /* The slots of rows in the cache. */
    const int* places;
    i64 pages;
    /* The slots of a page. */
    i64 slots;
    CACHE* keys;
    Strides key_strides;
    CACHE* values;
    Strides value_strides;
};
static_assert(sizeof(EpilogueParams) == 208, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::outputs) == 8 && alignof(decltype(EpilogueParams::outputs)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::bias) == 8 && alignof(decltype(EpilogueParams::bias)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::y) == 8 && alignof(decltype(EpilogueParams::y)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::y_row) == 8 && alignof(decltype(EpilogueParams::y_row)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::added) == 8 && alignof(decltype(EpilogueParams::added)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::added_row) == 8 && alignof(decltype(EpilogueParams::added_row)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::alpha) == 4 && alignof(decltype(EpilogueParams::alpha)) == 4, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::limit) == 4 && alignof(decltype(EpilogueParams::limit)) == 4, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::query_heads) == 8 && alignof(decltype(EpilogueParams::query_heads)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::kv_heads) == 8 && alignof(decltype(EpilogueParams::kv_heads)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::key_size) == 8 && alignof(decltype(EpilogueParams::key_size)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::value_size) == 8 && alignof(decltype(EpilogueParams::value_size)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::pairs) == 8 && alignof(decltype(EpilogueParams::pairs)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::positions) == 8 && alignof(decltype(EpilogueParams::positions)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::frequencies) == 8 && alignof(decltype(EpilogueParams::frequencies)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::query_scale) == 4 && alignof(decltype(EpilogueParams::query_scale)) == 4, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::key_scale) == 4 && alignof(decltype(EpilogueParams::key_scale)) == 4, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::places) == 8 && alignof(decltype(EpilogueParams::places)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::pages) == 8 && alignof(decltype(EpilogueParams::pages)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::slots) == 8 && alignof(decltype(EpilogueParams::slots)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::keys) == 8 && alignof(decltype(EpilogueParams::keys)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::key_strides) == 24 && alignof(decltype(EpilogueParams::key_strides)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::values) == 8 && alignof(decltype(EpilogueParams::values)) == 8, "EpilogueParams as in Rust");
static_assert(sizeof(EpilogueParams::value_strides) == 24 && alignof(decltype(EpilogueParams::value_strides)) == 8, "EpilogueParams as in Rust");
