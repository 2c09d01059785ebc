/*
 * Parameters of the kernels in collective/reduce.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of the reducing collectives. */
struct ReduceParams {
    Extent extent;
    Matrix<const X> x;
    Matrix<X> y;
    /* To which the sums are added, if `ADDED`. */
    Matrix<const X> added;
    /* Elements of `x` from one rank's part to the next. */
    i64 x_part;
    i64 columns;
    /* The address of this rank's packets in each rank's mailbox. */
    void* to[8];
    /* The address of the packets of all ranks in this rank's mailbox. */
    const void* from;
    /* The counter of rounds of each block. */
    u32* rounds;
    void* state;
    /* Whether a wait of the rank has failed. */
    u32* failed;
    /* The timeout of waits in nanoseconds. */
    u64 patience;
    int rank;
    int ranks;
    /* Packets per thread, round and rank, at most `DEPTH`. */
    int depths;
    int reduction;
    /* The factor of the sums that are added. */
    float alpha;
    int unused;
};
static_assert(sizeof(ReduceParams) == 264, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::extent) == 72 && alignof(decltype(ReduceParams::extent)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::x) == 16 && alignof(decltype(ReduceParams::x)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::y) == 16 && alignof(decltype(ReduceParams::y)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::added) == 16 && alignof(decltype(ReduceParams::added)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::x_part) == 8 && alignof(decltype(ReduceParams::x_part)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::columns) == 8 && alignof(decltype(ReduceParams::columns)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::to) == 64 && alignof(decltype(ReduceParams::to)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::from) == 8 && alignof(decltype(ReduceParams::from)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::rounds) == 8 && alignof(decltype(ReduceParams::rounds)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::state) == 8 && alignof(decltype(ReduceParams::state)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::failed) == 8 && alignof(decltype(ReduceParams::failed)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::patience) == 8 && alignof(decltype(ReduceParams::patience)) == 8, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::rank) == 4 && alignof(decltype(ReduceParams::rank)) == 4, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::ranks) == 4 && alignof(decltype(ReduceParams::ranks)) == 4, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::depths) == 4 && alignof(decltype(ReduceParams::depths)) == 4, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::reduction) == 4 && alignof(decltype(ReduceParams::reduction)) == 4, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::alpha) == 4 && alignof(decltype(ReduceParams::alpha)) == 4, "ReduceParams as in Rust");
static_assert(sizeof(ReduceParams::unused) == 4 && alignof(decltype(ReduceParams::unused)) == 4, "ReduceParams as in Rust");
