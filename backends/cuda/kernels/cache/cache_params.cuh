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
static_assert(__builtin_offsetof(KvWriteParams, extent) == 0, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, pages) == 72, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, heads) == 80, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, slots) == 88, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, key_size) == 96, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, value_size) == 104, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, keys) == 112, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, key_strides) == 120, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, values) == 144, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, value_strides) == 152, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, key) == 176, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, value) == 192, "KvWriteParams as in Rust");
static_assert(__builtin_offsetof(KvWriteParams, places) == 208, "KvWriteParams as in Rust");

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
static_assert(__builtin_offsetof(PagedCache, first) == 0, "PagedCache as in Rust");
static_assert(__builtin_offsetof(PagedCache, strides) == 8, "PagedCache as in Rust");
static_assert(__builtin_offsetof(PagedCache, pages) == 32, "PagedCache as in Rust");
static_assert(__builtin_offsetof(PagedCache, heads) == 40, "PagedCache as in Rust");
static_assert(__builtin_offsetof(PagedCache, slots) == 48, "PagedCache as in Rust");
static_assert(__builtin_offsetof(PagedCache, size) == 56, "PagedCache as in Rust");

/* Parameters of `page_copy`. */
struct PageCopyParams {
    Extent extent;
    PagedCache cache;
    /* A source and a destination in each row. */
    Matrix<const int> pairs;
};
static_assert(sizeof(PageCopyParams) == 152, "PageCopyParams as in Rust");
static_assert(__builtin_offsetof(PageCopyParams, extent) == 0, "PageCopyParams as in Rust");
static_assert(__builtin_offsetof(PageCopyParams, cache) == 72, "PageCopyParams as in Rust");
static_assert(__builtin_offsetof(PageCopyParams, pairs) == 136, "PageCopyParams as in Rust");

/* Parameters of `page_gather`. */
struct PageGatherParams {
    Extent extent;
    PagedCache cache;
    /* The page of each row. */
    const int* index;
    Matrix<CACHE> y;
};
static_assert(sizeof(PageGatherParams) == 160, "PageGatherParams as in Rust");
static_assert(__builtin_offsetof(PageGatherParams, extent) == 0, "PageGatherParams as in Rust");
static_assert(__builtin_offsetof(PageGatherParams, cache) == 72, "PageGatherParams as in Rust");
static_assert(__builtin_offsetof(PageGatherParams, index) == 136, "PageGatherParams as in Rust");
static_assert(__builtin_offsetof(PageGatherParams, y) == 144, "PageGatherParams as in Rust");

/* Parameters of `page_scatter`. */
struct PageScatterParams {
    Extent extent;
    PagedCache cache;
    /* The page of each row. */
    const int* index;
    Matrix<const CACHE> x;
};
static_assert(sizeof(PageScatterParams) == 160, "PageScatterParams as in Rust");
static_assert(__builtin_offsetof(PageScatterParams, extent) == 0, "PageScatterParams as in Rust");
static_assert(__builtin_offsetof(PageScatterParams, cache) == 72, "PageScatterParams as in Rust");
static_assert(__builtin_offsetof(PageScatterParams, index) == 136, "PageScatterParams as in Rust");
static_assert(__builtin_offsetof(PageScatterParams, x) == 144, "PageScatterParams as in Rust");
