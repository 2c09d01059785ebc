/*
 * Parameters of the kernels in experts/route.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `moe_route`. */
struct MoeRouteParams {
    Extent extent;
    Matrix<const X> logits;
    RouterVectors vectors;
    /* Experts that were chosen in advance; absent if the router chooses. */
    Matrix<const int> ids;
    Matrix<int> experts;
    Matrix<float> weights;
    RouteRule rule;
};
static_assert(sizeof(MoeRouteParams) == 216, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::extent) == 72 && alignof(decltype(MoeRouteParams::extent)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::logits) == 16 && alignof(decltype(MoeRouteParams::logits)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::vectors) == 24 && alignof(decltype(MoeRouteParams::vectors)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::ids) == 16 && alignof(decltype(MoeRouteParams::ids)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::experts) == 16 && alignof(decltype(MoeRouteParams::experts)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::weights) == 16 && alignof(decltype(MoeRouteParams::weights)) == 8, "MoeRouteParams as in Rust");
static_assert(sizeof(MoeRouteParams::rule) == 56 && alignof(decltype(MoeRouteParams::rule)) == 8, "MoeRouteParams as in Rust");
