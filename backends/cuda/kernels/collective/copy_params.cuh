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
    /* Elements of `x` from one rank's part to the next. */
    i64 x_part;
    /* Elements of `y` from one rank's part to the next. */
    i64 y_part;
    i64 columns;
    /* The address of this rank's packets in each rank's mailbox. */
    void* to[8];
    /* The address of the packets of all ranks in this rank's mailbox. */
    const void* from;
    /* The round counter of each block. */
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
    /* The only rank whose data is used, or -1. */
    int root;
    /* Whether to run one round without data. */
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
    /* The address of the packets in the receiver's mailbox. */
    void* packets;
    /* The acknowledged rounds by thread, in the sender's mailbox. */
    u32* taken;
    /* The round counter of each block. */
    u32* rounds;
    void* state;
    /* Whether a wait of the rank has failed. */
    u32* failed;
    /* The timeout of waits in nanoseconds. */
    u64 patience;
    int peer;
    /* Packets per thread and round, at most `DEPTH`. */
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
