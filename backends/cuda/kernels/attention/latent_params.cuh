/*
 * Parameters of the kernels in attention/latent.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `latent` and `latent_combine`. */
struct LatentParams {
    AttentionParams attention;
    /* The maximum number of splits of a tile's keys. */
    i64 splits;
    /* Unnormalised results of splits. */
    float* partial;
};
static_assert(sizeof(LatentParams) == 416, "LatentParams as in Rust");
static_assert(sizeof(LatentParams::attention) == 400 && alignof(decltype(LatentParams::attention)) == 8, "LatentParams as in Rust");
static_assert(sizeof(LatentParams::splits) == 8 && alignof(decltype(LatentParams::splits)) == 8, "LatentParams as in Rust");
static_assert(sizeof(LatentParams::partial) == 8 && alignof(decltype(LatentParams::partial)) == 8, "LatentParams as in Rust");
