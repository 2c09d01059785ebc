/*
 * Parameters of the kernels in experts/route.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `moe_route`. */
struct MoeRouteParams {
    Extent extent;
    Matrix<const X> logits;
    /* May be null. */
    const float* bias;
    /* May be null. */
    const float* selection_bias;
    /* May be null. */
    const float* expert_scale;
    /* Experts that are chosen in advance; absent if the router chooses. */
    Matrix<const int> ids;
    Matrix<int> experts;
    Matrix<float> weights;
    i64 expert_count;
    /* Experts of a token. */
    i64 slots;
    i64 groups;
    i64 top_groups;
    float eps;
    float scale;
    float threshold;
};
static_assert(sizeof(MoeRouteParams) == 208, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::extent) == 72 && alignof(decltype(MoeRouteParams::extent)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::logits) == 16 && alignof(decltype(MoeRouteParams::logits)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::bias) == 8 && alignof(decltype(MoeRouteParams::bias)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::selection_bias) == 8 && alignof(decltype(MoeRouteParams::selection_bias)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::expert_scale) == 8 && alignof(decltype(MoeRouteParams::expert_scale)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::ids) == 16 && alignof(decltype(MoeRouteParams::ids)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::experts) == 16 && alignof(decltype(MoeRouteParams::experts)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::weights) == 16 && alignof(decltype(MoeRouteParams::weights)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::expert_count) == 8 && alignof(decltype(MoeRouteParams::expert_count)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::slots) == 8 && alignof(decltype(MoeRouteParams::slots)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::groups) == 8 && alignof(decltype(MoeRouteParams::groups)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::top_groups) == 8 && alignof(decltype(MoeRouteParams::top_groups)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::eps) == 4 && alignof(decltype(MoeRouteParams::eps)) == 4, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::scale) == 4 && alignof(decltype(MoeRouteParams::scale)) == 4, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::threshold) == 4 && alignof(decltype(MoeRouteParams::threshold)) == 4, "MoeRouteParams as in Rust");
