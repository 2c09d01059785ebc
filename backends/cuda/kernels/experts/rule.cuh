/*
 * The rule by which a router chooses.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* The rule by which a router chooses; see `moe_route`. */
struct RouteRule {
    i64 experts;
    /* Experts of a token. */
    i64 slots;
    i64 groups;
    i64 top_groups;
    float eps;
    float scale;
    float threshold;
    /* What weights are divided by: 0 nothing, 1 their sum plus `eps`, 2 their sum or `eps` if that is larger. */
    int divisor;
    /* Whether the score of a group is the sum of its best two experts, instead of the best. */
    int group_sum;
    /* Whether experts are selected by logits, which have the order of the scores. */
    int by_logit;
};
static_assert(sizeof(RouteRule) == 56, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::experts) == 8 && alignof(decltype(RouteRule::experts)) == 8, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::slots) == 8 && alignof(decltype(RouteRule::slots)) == 8, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::groups) == 8 && alignof(decltype(RouteRule::groups)) == 8, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::top_groups) == 8 && alignof(decltype(RouteRule::top_groups)) == 8, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::eps) == 4 && alignof(decltype(RouteRule::eps)) == 4, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::scale) == 4 && alignof(decltype(RouteRule::scale)) == 4, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::threshold) == 4 && alignof(decltype(RouteRule::threshold)) == 4, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::divisor) == 4 && alignof(decltype(RouteRule::divisor)) == 4, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::group_sum) == 4 && alignof(decltype(RouteRule::group_sum)) == 4, "RouteRule as in Rust");
static_assert(sizeof(RouteRule::by_logit) == 4 && alignof(decltype(RouteRule::by_logit)) == 4, "RouteRule as in Rust");

/* Per expert: the bias added to logits, the selection bias added to scores, and the factors of the weights; may be null. */
struct RouterVectors {
    const float* bias;
    const float* selection_bias;
    const float* scale;
};
static_assert(sizeof(RouterVectors) == 24, "RouterVectors as in Rust");
static_assert(sizeof(RouterVectors::bias) == 8 && alignof(decltype(RouterVectors::bias)) == 8, "RouterVectors as in Rust");
static_assert(sizeof(RouterVectors::selection_bias) == 8 && alignof(decltype(RouterVectors::selection_bias)) == 8, "RouterVectors as in Rust");
static_assert(sizeof(RouterVectors::scale) == 8 && alignof(decltype(RouterVectors::scale)) == 8, "RouterVectors as in Rust");
