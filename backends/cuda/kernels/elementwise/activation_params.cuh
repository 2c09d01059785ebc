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
    /* The largest input; 0 for no limit. */
    float limit;
};
static_assert(sizeof(ActivationParams) == 128, "ActivationParams as in Rust");
static_assert(__builtin_offsetof(ActivationParams, extent) == 0, "ActivationParams as in Rust");
static_assert(__builtin_offsetof(ActivationParams, x) == 72, "ActivationParams as in Rust");
static_assert(__builtin_offsetof(ActivationParams, bias) == 88, "ActivationParams as in Rust");
static_assert(__builtin_offsetof(ActivationParams, y) == 96, "ActivationParams as in Rust");
static_assert(__builtin_offsetof(ActivationParams, columns) == 112, "ActivationParams as in Rust");
static_assert(__builtin_offsetof(ActivationParams, limit) == 120, "ActivationParams as in Rust");

/* Parameters of `gated_activation` and `gated_activation_wide`. */
struct GatedActivationParams {
    Extent extent;
    Matrix<const X> gate;
    /* Absent where gate and up are columns of one tensor. */
    Matrix<const X> up;
    /* Of gate and up, in the layout of their columns; may be null. */
    const BIAS* bias;
    Matrix<X> y;
    /* Columns of the result. */
    i64 columns;
    /* The largest gate and the largest magnitude of up; 0 for no limit. */
    float limit;
};
static_assert(sizeof(GatedActivationParams) == 144, "GatedActivationParams as in Rust");
static_assert(__builtin_offsetof(GatedActivationParams, extent) == 0, "GatedActivationParams as in Rust");
static_assert(__builtin_offsetof(GatedActivationParams, gate) == 72, "GatedActivationParams as in Rust");
static_assert(__builtin_offsetof(GatedActivationParams, up) == 88, "GatedActivationParams as in Rust");
static_assert(__builtin_offsetof(GatedActivationParams, bias) == 104, "GatedActivationParams as in Rust");
static_assert(__builtin_offsetof(GatedActivationParams, y) == 112, "GatedActivationParams as in Rust");
static_assert(__builtin_offsetof(GatedActivationParams, columns) == 128, "GatedActivationParams as in Rust");
static_assert(__builtin_offsetof(GatedActivationParams, limit) == 136, "GatedActivationParams as in Rust");
