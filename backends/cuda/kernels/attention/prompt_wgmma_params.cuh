/*
 * Parameters of the kernels in attention/prompt_wgmma.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `prompt_wgmma`. */
struct PromptWgmmaParams {
    TensorMap query_map;
    TensorMap key_map;
    TensorMap value_map;
    AttentionParams attention;
    /* The number of tiles that blocks have taken. */
    u32* counter;
};
static_assert(sizeof(PromptWgmmaParams) == 832, "PromptWgmmaParams as in Rust");
static_assert(sizeof(PromptWgmmaParams::query_map) == 128 && alignof(decltype(PromptWgmmaParams::query_map)) == 64, "PromptWgmmaParams as in Rust");
static_assert(sizeof(PromptWgmmaParams::key_map) == 128 && alignof(decltype(PromptWgmmaParams::key_map)) == 64, "PromptWgmmaParams as in Rust");
static_assert(sizeof(PromptWgmmaParams::value_map) == 128 && alignof(decltype(PromptWgmmaParams::value_map)) == 64, "PromptWgmmaParams as in Rust");
static_assert(sizeof(PromptWgmmaParams::attention) == 400 && alignof(decltype(PromptWgmmaParams::attention)) == 8, "PromptWgmmaParams as in Rust");
static_assert(sizeof(PromptWgmmaParams::counter) == 8 && alignof(decltype(PromptWgmmaParams::counter)) == 8, "PromptWgmmaParams as in Rust");
