/*
 * Parameter structs of several kernel families.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* The number of valid rows of a dimension. The kernels' `struct Extent` derives from it. */
struct ExtentParams {
    /* Addresses of row counts in device memory, without gaps; null after the last. */
    const int* counts[8];
    /* The maximum number of rows. */
    i64 rows;
};
static_assert(sizeof(ExtentParams) == 72, "ExtentParams as in Rust");
static_assert(sizeof(ExtentParams::counts) == 64 && alignof(decltype(ExtentParams::counts)) == 8, "ExtentParams as in Rust");
static_assert(sizeof(ExtentParams::rows) == 8 && alignof(decltype(ExtentParams::rows)) == 8, "ExtentParams as in Rust");

/* A row-major matrix. The kernels' `struct Matrix` derives from it. */
struct MatrixParams {
    /* The first element; null if the matrix is absent. */
    void* first;
    /* Distance between rows, in elements. */
    i64 stride;
};
static_assert(sizeof(MatrixParams) == 16, "MatrixParams as in Rust");
static_assert(sizeof(MatrixParams::first) == 8 && alignof(decltype(MatrixParams::first)) == 8, "MatrixParams as in Rust");
static_assert(sizeof(MatrixParams::stride) == 8 && alignof(decltype(MatrixParams::stride)) == 8, "MatrixParams as in Rust");

/* A packed weight. The kernels' `struct WeightOf` derives from it. */
struct WeightParams {
    /* Dense rows, or packed integers. */
    const u8* elements;
    /* Scales and offsets of the groups of packed integers. */
    const u8* scales;
    /* Bytes between rows of elements, or between units of 8 rows if they are packed. */
    i64 row_bytes;
    /* Bytes between units of 8 rows of scales. */
    i64 scale_bytes;
};
static_assert(sizeof(WeightParams) == 32, "WeightParams as in Rust");
static_assert(sizeof(WeightParams::elements) == 8 && alignof(decltype(WeightParams::elements)) == 8, "WeightParams as in Rust");
static_assert(sizeof(WeightParams::scales) == 8 && alignof(decltype(WeightParams::scales)) == 8, "WeightParams as in Rust");
static_assert(sizeof(WeightParams::row_bytes) == 8 && alignof(decltype(WeightParams::row_bytes)) == 8, "WeightParams as in Rust");
static_assert(sizeof(WeightParams::scale_bytes) == 8 && alignof(decltype(WeightParams::scale_bytes)) == 8, "WeightParams as in Rust");

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
