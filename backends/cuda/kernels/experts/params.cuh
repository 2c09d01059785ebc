/*
 * Parameters of the kernels for linear layers of experts.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of the kernels for linear layers of experts. */
struct GroupedLinearParams {
    Extent extent;
    Matrix<const X> x;
    Weight weight;
    Matrix<const int> experts;
    /* The bias of the weight's rows; may be null. */
    const BIAS* bias;
    /* The weight and the bias of the up projection; absent without a gate. */
    Weight other;
    const BIAS* other_bias;
    /* The weights of slots whose products are summed; absent otherwise. */
    Matrix<const float> factors;
    /* The tables of `moe_group`; absent if each assignment is an item. */
    Matrix<const int> order;
    const int* starts;
    Matrix<Y> y;
    /* Inputs and outputs of an expert. */
    i64 inputs;
    i64 outputs;
    /* Outputs, including those of neighbouring experts in the same units of packed rows. */
    i64 covered;
    /* Experts of the device, and the index of the first. */
    i64 count;
    i64 first_expert;
    /* Assignments of a token. */
    i64 slots;
    /* Elements behind the inputs and the outputs of a slot. */
    i64 rest;
    /* Whether each slot has its own inputs. */
    i64 per_slot;
    /* The maximum number of items. */
    i64 items;
    /* A counter of the units of work that are taken; 0 between launches. Only on tensor cores, with few assignments per expert. */
    u32* taken;
    /* The upper limit of the gate and of the magnitude of up; 0 for none. */
    float limit;
    /* Added to up. */
    float up_offset;
};
static_assert(sizeof(GroupedLinearParams) == 328, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::extent) == 72 && alignof(decltype(GroupedLinearParams::extent)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::x) == 16 && alignof(decltype(GroupedLinearParams::x)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::weight) == 32 && alignof(decltype(GroupedLinearParams::weight)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::experts) == 16 && alignof(decltype(GroupedLinearParams::experts)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::bias) == 8 && alignof(decltype(GroupedLinearParams::bias)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::other) == 32 && alignof(decltype(GroupedLinearParams::other)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::other_bias) == 8 && alignof(decltype(GroupedLinearParams::other_bias)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::factors) == 16 && alignof(decltype(GroupedLinearParams::factors)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::order) == 16 && alignof(decltype(GroupedLinearParams::order)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::starts) == 8 && alignof(decltype(GroupedLinearParams::starts)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::y) == 16 && alignof(decltype(GroupedLinearParams::y)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::inputs) == 8 && alignof(decltype(GroupedLinearParams::inputs)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::outputs) == 8 && alignof(decltype(GroupedLinearParams::outputs)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::covered) == 8 && alignof(decltype(GroupedLinearParams::covered)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::count) == 8 && alignof(decltype(GroupedLinearParams::count)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::first_expert) == 8 && alignof(decltype(GroupedLinearParams::first_expert)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::slots) == 8 && alignof(decltype(GroupedLinearParams::slots)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::rest) == 8 && alignof(decltype(GroupedLinearParams::rest)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::per_slot) == 8 && alignof(decltype(GroupedLinearParams::per_slot)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::items) == 8 && alignof(decltype(GroupedLinearParams::items)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::taken) == 8 && alignof(decltype(GroupedLinearParams::taken)) == 8, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::limit) == 4 && alignof(decltype(GroupedLinearParams::limit)) == 4, "GroupedLinearParams as in Rust");
static_assert(sizeof(GroupedLinearParams::up_offset) == 4 && alignof(decltype(GroupedLinearParams::up_offset)) == 4, "GroupedLinearParams as in Rust");
