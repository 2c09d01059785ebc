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
    /* How many tiles have been taken. */
    u32* counter;
};
static_assert(sizeof(PromptWgmmaParams) == 832, "PromptWgmmaParams as in Rust");
static_assert(__builtin_offsetof(PromptWgmmaParams, query_map) == 0, "PromptWgmmaParams as in Rust");
static_assert(__builtin_offsetof(PromptWgmmaParams, key_map) == 128, "PromptWgmmaParams as in Rust");
static_assert(__builtin_offsetof(PromptWgmmaParams, value_map) == 256, "PromptWgmmaParams as in Rust");
static_assert(__builtin_offsetof(PromptWgmmaParams, attention) == 384, "PromptWgmmaParams as in Rust");
static_assert(__builtin_offsetof(PromptWgmmaParams, counter) == 784, "PromptWgmmaParams as in Rust");
