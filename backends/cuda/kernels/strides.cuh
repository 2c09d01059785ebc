/*
 * Strides of a paged cache.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Distances between pages, heads and slots of a cache, in elements. */
struct Strides {
    i64 page;
    i64 head;
    i64 slot;
};
static_assert(sizeof(Strides) == 24, "Strides as in Rust");
static_assert(sizeof(Strides::page) == 8 && alignof(decltype(Strides::page)) == 8, "Strides as in Rust");
static_assert(sizeof(Strides::head) == 8 && alignof(decltype(Strides::head)) == 8, "Strides as in Rust");
static_assert(sizeof(Strides::slot) == 8 && alignof(decltype(Strides::slot)) == 8, "Strides as in Rust");
