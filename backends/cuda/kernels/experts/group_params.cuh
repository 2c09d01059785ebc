/*
 * Parameters of the kernels in experts/group.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `moe_group`. */
struct MoeGroupParams {
    Extent extent;
    Matrix<const int> experts;
    Matrix<int> order;
    int* starts;
    /* Experts of the device, and the index of the first. */
    i64 count;
    i64 first_expert;
};
static_assert(sizeof(MoeGroupParams) == 128, "MoeGroupParams as in Rust");
static_assert(sizeof(MoeGroupParams::extent) == 72 && alignof(decltype(MoeGroupParams::extent)) == 8, "MoeGroupParams as in Rust");
static_assert(sizeof(MoeGroupParams::experts) == 16 && alignof(decltype(MoeGroupParams::experts)) == 8, "MoeGroupParams as in Rust");
static_assert(sizeof(MoeGroupParams::order) == 16 && alignof(decltype(MoeGroupParams::order)) == 8, "MoeGroupParams as in Rust");
static_assert(sizeof(MoeGroupParams::starts) == 8 && alignof(decltype(MoeGroupParams::starts)) == 8, "MoeGroupParams as in Rust");
static_assert(sizeof(MoeGroupParams::count) == 8 && alignof(decltype(MoeGroupParams::count)) == 8, "MoeGroupParams as in Rust");
static_assert(sizeof(MoeGroupParams::first_expert) == 8 && alignof(decltype(MoeGroupParams::first_expert)) == 8, "MoeGroupParams as in Rust");
