/*
 * Parameters of the kernels in elementwise/activation.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `activation`. */
struct ActivationParams {
    Extent extent;
    Matrix<const X> x;
    /* May be null. */
    const BIAS* bias;
    Matrix<X> y;
    i64 columns;
    /* The upper limit of inputs; 0 for none. */
    float limit;
};
static_assert(sizeof(ActivationParams) == 128, "ActivationParams as in Rust");
static_assert(sizeof(ActivationParams::extent) == 72 && alignof(decltype(ActivationParams::extent)) == 8, "ActivationParams as in Rust");
static_assert(sizeof(ActivationParams::x) == 16 && alignof(decltype(ActivationParams::x)) == 8, "ActivationParams as in Rust");
static_assert(sizeof(ActivationParams::bias) == 8 && alignof(decltype(ActivationParams::bias)) == 8, "ActivationParams as in Rust");
static_assert(sizeof(ActivationParams::y) == 16 && alignof(decltype(ActivationParams::y)) == 8, "ActivationParams as in Rust");
static_assert(sizeof(ActivationParams::columns) == 8 && alignof(decltype(ActivationParams::columns)) == 8, "ActivationParams as in Rust");
static_assert(sizeof(ActivationParams::limit) == 4 && alignof(decltype(ActivationParams::limit)) == 4, "ActivationParams as in Rust");

/* Parameters of `gated_activation` and `gated_activation_wide`. */
struct GatedActivationParams {
    Extent extent;
    Matrix<const X> gate;
    /* Absent if gate and up are columns of one tensor. */
    Matrix<const X> up;
    /* Of gate and up, in the layout of their columns; may be null. */
    const BIAS* bias;
    Matrix<X> y;
    /* Columns of the result. */
    i64 columns;
    /* The upper limit of the gate and of the magnitude of up; 0 for none. */
    float limit;
    /* Added to up. */
    float up_offset;
};
static_assert(sizeof(GatedActivationParams) == 144, "GatedActivationParams as in Rust");
static_assert(sizeof(GatedActivationParams::extent) == 72 && alignof(decltype(GatedActivationParams::extent)) == 8, "GatedActivationParams as in Rust");
static_assert(sizeof(GatedActivationParams::gate) == 16 && alignof(decltype(GatedActivationParams::gate)) == 8, "GatedActivationParams as in Rust");
static_assert(sizeof(GatedActivationParams::up) == 16 && alignof(decltype(GatedActivationParams::up)) == 8, "GatedActivationParams as in Rust");
static_assert(sizeof(GatedActivationParams::bias) == 8 && alignof(decltype(GatedActivationParams::bias)) == 8, "GatedActivationParams as in Rust");
static_assert(sizeof(GatedActivationParams::y) == 16 && alignof(decltype(GatedActivationParams::y)) == 8, "GatedActivationParams as in Rust");
static_assert(sizeof(GatedActivationParams::columns) == 8 && alignof(decltype(GatedActivationParams::columns)) == 8, "GatedActivationParams as in Rust");
static_assert(sizeof(GatedActivationParams::limit) == 4 && alignof(decltype(GatedActivationParams::limit)) == 4, "GatedActivationParams as in Rust");
static_assert(sizeof(GatedActivationParams::up_offset) == 4 && alignof(decltype(GatedActivationParams::up_offset)) == 4, "GatedActivationParams as in Rust");
