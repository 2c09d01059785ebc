/*
 * Parameters of the kernels in cache/cache.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `kv_write`. */
struct KvWriteParams {
    Extent extent;
    i64 pages;
    i64 heads;
    /* Slots of a page. */
    i64 slots;
    i64 key_size;
    i64 value_size;
    CACHE* keys;
    Strides key_strides;
    CACHE* values;
    Strides value_strides;
    /* New keys. */
    Matrix<const KEY> key;
    /* New values. */
    Matrix<const VALUE> value;
    /* The slot of each row, counted through all pages. */
    const int* places;
};
static_assert(sizeof(KvWriteParams) == 216, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::extent) == 72 && alignof(decltype(KvWriteParams::extent)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::pages) == 8 && alignof(decltype(KvWriteParams::pages)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::heads) == 8 && alignof(decltype(KvWriteParams::heads)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::slots) == 8 && alignof(decltype(KvWriteParams::slots)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::key_size) == 8 && alignof(decltype(KvWriteParams::key_size)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::value_size) == 8 && alignof(decltype(KvWriteParams::value_size)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::keys) == 8 && alignof(decltype(KvWriteParams::keys)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::key_strides) == 24 && alignof(decltype(KvWriteParams::key_strides)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::values) == 8 && alignof(decltype(KvWriteParams::values)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::value_strides) == 24 && alignof(decltype(KvWriteParams::value_strides)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::key) == 16 && alignof(decltype(KvWriteParams::key)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::value) == 16 && alignof(decltype(KvWriteParams::value)) == 8, "KvWriteParams as in Rust");
static_assert(sizeof(KvWriteParams::places) == 8 && alignof(decltype(KvWriteParams::places)) == 8, "KvWriteParams as in Rust");

/* Parameters of `latent_write`. */
struct LatentWriteParams {
    Extent extent;
    i64 pages;
    i64 heads;
    /* Slots of a page. */
    i64 slots;
    i64 value_size;
    /* Elements behind the value of a head. */
    i64 rest_size;
    CACHE* cache;
    Strides strides;
    /* New values. */
    Matrix<const VALUE> value;
    /* What follows the values in their keys. */
    Matrix<const REST> rest;
    /* The slot of each row, counted through all pages. */
    const int* places;
};
static_assert(sizeof(LatentWriteParams) == 184, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::extent) == 72 && alignof(decltype(LatentWriteParams::extent)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::pages) == 8 && alignof(decltype(LatentWriteParams::pages)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::heads) == 8 && alignof(decltype(LatentWriteParams::heads)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::slots) == 8 && alignof(decltype(LatentWriteParams::slots)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::value_size) == 8 && alignof(decltype(LatentWriteParams::value_size)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::rest_size) == 8 && alignof(decltype(LatentWriteParams::rest_size)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::cache) == 8 && alignof(decltype(LatentWriteParams::cache)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::strides) == 24 && alignof(decltype(LatentWriteParams::strides)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::value) == 16 && alignof(decltype(LatentWriteParams::value)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::rest) == 16 && alignof(decltype(LatentWriteParams::rest)) == 8, "LatentWriteParams as in Rust");
static_assert(sizeof(LatentWriteParams::places) == 8 && alignof(decltype(LatentWriteParams::places)) == 8, "LatentWriteParams as in Rust");

/* A cache of keys or of values, which is moved page by page. */
struct PagedCache {
    CACHE* first;
    Strides strides;
    i64 pages;
    i64 heads;
    /* Slots of a page. */
    i64 slots;
    /* Elements of a slot of a head. */
    i64 size;
};
static_assert(sizeof(PagedCache) == 64, "PagedCache as in Rust");
static_assert(sizeof(PagedCache::first) == 8 && alignof(decltype(PagedCache::first)) == 8, "PagedCache as in Rust");
static_assert(sizeof(PagedCache::strides) == 24 && alignof(decltype(PagedCache::strides)) == 8, "PagedCache as in Rust");
static_assert(sizeof(PagedCache::pages) == 8 && alignof(decltype(PagedCache::pages)) == 8, "PagedCache as in Rust");
static_assert(sizeof(PagedCache::heads) == 8 && alignof(decltype(PagedCache::heads)) == 8, "PagedCache as in Rust");
static_assert(sizeof(PagedCache::slots) == 8 && alignof(decltype(PagedCache::slots)) == 8, "PagedCache as in Rust");
static_assert(sizeof(PagedCache::size) == 8 && alignof(decltype(PagedCache::size)) == 8, "PagedCache as in Rust");

/* Parameters of `page_gather`. */
struct PageGatherParams {
    Extent extent;
    PagedCache cache;
    /* The page of each row. */
    const int* index;
    Matrix<CACHE> y;
};
static_assert(sizeof(PageGatherParams) == 160, "PageGatherParams as in Rust");
static_assert(sizeof(PageGatherParams::extent) == 72 && alignof(decltype(PageGatherParams::extent)) == 8, "PageGatherParams as in Rust");
static_assert(sizeof(PageGatherParams::cache) == 64 && alignof(decltype(PageGatherParams::cache)) == 8, "PageGatherParams as in Rust");
static_assert(sizeof(PageGatherParams::index) == 8 && alignof(decltype(PageGatherParams::index)) == 8, "PageGatherParams as in Rust");
static_assert(sizeof(PageGatherParams::y) == 16 && alignof(decltype(PageGatherParams::y)) == 8, "PageGatherParams as in Rust");

/* Parameters of `page_scatter`. */
struct PageScatterParams {
    Extent extent;
    PagedCache cache;
    /* The page of each row. */
    const int* index;
    Matrix<const CACHE> x;
};
static_assert(sizeof(PageScatterParams) == 160, "PageScatterParams as in Rust");
static_assert(sizeof(PageScatterParams::extent) == 72 && alignof(decltype(PageScatterParams::extent)) == 8, "PageScatterParams as in Rust");
static_assert(sizeof(PageScatterParams::cache) == 64 && alignof(decltype(PageScatterParams::cache)) == 8, "PageScatterParams as in Rust");
static_assert(sizeof(PageScatterParams::index) == 8 && alignof(decltype(PageScatterParams::index)) == 8, "PageScatterParams as in Rust");
static_assert(sizeof(PageScatterParams::x) == 16 && alignof(decltype(PageScatterParams::x)) == 8, "PageScatterParams as in Rust");
