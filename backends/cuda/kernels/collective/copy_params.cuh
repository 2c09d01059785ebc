/*
 * Parameters of the kernels in collective/copy.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `spread`. */
struct SpreadParams {
    Extent extent;
    Matrix<const X> x;
    Matrix<X> y;
    /* Elements from the part of `x` that goes to a rank to the next part. */
    i64 x_part;
    /* Elements from the part of `y` that comes from a rank to the next part. */
    i64 y_part;
    i64 columns;
    /* Where this rank's packets begin at each rank. */
    void* to[8];
    /* Where the packets of all ranks begin here. */
    const void* from;
    /* The rounds so far, by block. */
    u32* rounds;
    void* state;
    /* Whether a wait of the rank has failed. */
    u32* failed;
    /* The longest wait in nanoseconds. */
    u64 patience;
    int rank;
    int ranks;
    /* Packets of a thread in a round for each rank, at most `DEPTH`. */
    int depths;
    /* The only rank whose data counts, or -1. */
    int root;
    /* Whether there is a round without data. */
    int barrier;
    int unused;
};
static_assert(sizeof(SpreadParams) == 256, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::extent) == 72 && alignof(decltype(SpreadParams::extent)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::x) == 16 && alignof(decltype(SpreadParams::x)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::y) == 16 && alignof(decltype(SpreadParams::y)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::x_part) == 8 && alignof(decltype(SpreadParams::x_part)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::y_part) == 8 && alignof(decltype(SpreadParams::y_part)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::columns) == 8 && alignof(decltype(SpreadParams::columns)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::to) == 64 && alignof(decltype(SpreadParams::to)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::from) == 8 && alignof(decltype(SpreadParams::from)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::rounds) == 8 && alignof(decltype(SpreadParams::rounds)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::state) == 8 && alignof(decltype(SpreadParams::state)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::failed) == 8 && alignof(decltype(SpreadParams::failed)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::patience) == 8 && alignof(decltype(SpreadParams::patience)) == 8, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::rank) == 4 && alignof(decltype(SpreadParams::rank)) == 4, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::ranks) == 4 && alignof(decltype(SpreadParams::ranks)) == 4, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::depths) == 4 && alignof(decltype(SpreadParams::depths)) == 4, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::root) == 4 && alignof(decltype(SpreadParams::root)) == 4, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::barrier) == 4 && alignof(decltype(SpreadParams::barrier)) == 4, "SpreadParams as in Rust");
static_assert(sizeof(SpreadParams::unused) == 4 && alignof(decltype(SpreadParams::unused)) == 4, "SpreadParams as in Rust");

/* Parameters of `send` and `receive`. */
struct MessageParams {
    Extent extent;
    Matrix<X> x;
    i64 columns;
    /* Where the packets are, at the receiver. */
    void* packets;
    /* The rounds that the receiver has taken, by thread, at the sender. */
    u32* taken;
    /* The rounds so far, by block. */
    u32* rounds;
    void* state;
    /* Whether a wait of the rank has failed. */
    u32* failed;
    /* The longest wait in nanoseconds. */
    u64 patience;
    int peer;
    /* Packets of a thread in a round, at most `DEPTH`. */
    int depths;
};
static_assert(sizeof(MessageParams) == 152, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::extent) == 72 && alignof(decltype(MessageParams::extent)) == 8, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::x) == 16 && alignof(decltype(MessageParams::x)) == 8, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::columns) == 8 && alignof(decltype(MessageParams::columns)) == 8, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::packets) == 8 && alignof(decltype(MessageParams::packets)) == 8, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::taken) == 8 && alignof(decltype(MessageParams::taken)) == 8, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::rounds) == 8 && alignof(decltype(MessageParams::rounds)) == 8, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::state) == 8 && alignof(decltype(MessageParams::state)) == 8, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::failed) == 8 && alignof(decltype(MessageParams::failed)) == 8, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::patience) == 8 && alignof(decltype(MessageParams::patience)) == 8, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::peer) == 4 && alignof(decltype(MessageParams::peer)) == 4, "MessageParams as in Rust");
static_assert(sizeof(MessageParams::depths) == 4 && alignof(decltype(MessageParams::depths)) == 4, "MessageParams as in Rust");
