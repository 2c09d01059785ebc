/*
 * Layers of a decoder in one launch: the constants of a kernel, and the layout of shared memory and of the exchange.
 */
/* Threads of the consumer warps. One producer warp comes on top; with WIDE three idle warps as well, because `setmaxnreg` moves
 * registers between groups of four warps. Each warp that has a part of a run leaves 16 partial sums of it. */
#define MULTIPLIERS (WARPS * 32)
#define BLOCK (MULTIPLIERS + (WIDE ? 128 : 32))
#define RUN_SUMS (16 * WARPS)
#define UNIT 16
/* AHEAD: a warp loads its next unit of keys and values while it multiplies one. It does so if registers suffice, and if there are so
 * few splits that a warp often has another unit. ALONE: the number of units per warp up to which one block has all keys of its heads, so
 * that no splits are merged. */
#define AHEAD (HEAD <= 64 && SPLITS < 8)
/* APART: a warp loads the values of a unit only once it has multiplied the keys, because registers do not hold both. */
#define APART (HEAD > 128)
#define ALONE (AHEAD ? 2 : 1)
#define VALUE_ROW (HEAD + 4)
#define KEY_BLOCKS ((HEAD + 31) / 32)
#define VALUE_BLOCKS ((HEAD + 63) / 64)
/* Whether every block keeps the token for itself, because it adds whole results to it. */
#define KEEPS_TOKEN (POST_NORMS || RANKS > 1)
/* Whether query heads occupy the upper 8 rows of an mma. */
#define UPPER (TILE_HEADS > 8)
/* Products of a layer, in their order. */
#define INPUT 0
#define OUTPUT 1
#define UP 2
#define DOWN 3
#define ROUTER 4
#define GATED 3
/* Splits, and vectors, that a thread loads together. */
#define SPLITS_AT_ONCE (HEADS * HEAD <= 1024 ? 6 : 3)
#define VECTORS_AT_ONCE 4
/* With EXPERTS the MLP is the CHOSEN experts of the token beside each other, each with INNER / CHOSEN elements between its halves. */
#if EXPERTS
#define EXPERT_INNER (INNER / CHOSEN)
#else
#define EXPERT_INNER INNER
#endif
/* For each product: inputs, outputs, runs of a tile (two where results come in pairs), outputs of a run, and tiles. COLUMNS_OF is the
 * number of inputs of a run that one ring slot holds: all of them if they fit. */
constexpr int INPUTS_OF[5] = {HIDDEN, HEADS * HEAD, HIDDEN, INNER, HIDDEN};
constexpr int OUTPUTS_OF[5] = {(HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, MIDDLE == GATED ? 2 * INNER : INNER, HIDDEN, EXPERTS};
constexpr int RUNS_OF[5] = {ROPE && !NEIGHBOURS ? 2 : 1, 1, MIDDLE == GATED ? 2 : 1, 1, 1}, ROWS_OF[5] = {ROWS_0, ROWS_1, ROWS_2, ROWS_3, ROWS_4};
constexpr int TILES_OF[5] = {OUTPUTS_OF[0] / (RUNS_OF[0] * ROWS_0), HIDDEN / ROWS_1, OUTPUTS_OF[2] / (RUNS_OF[2] * ROWS_2),
                             HIDDEN / ROWS_3, EXPERTS / ROWS_4};
/* Teams of warps, which take runs in turn, and the partial sums that a team leaves of a run. */
constexpr int TEAMS_OF[5] = {TEAMS_0, TEAMS_1, TEAMS_2, TEAMS_3, TEAMS_4};
constexpr int SUMS_OF[5] = {RUN_SUMS / TEAMS_0, RUN_SUMS / TEAMS_1, RUN_SUMS / TEAMS_2, RUN_SUMS / TEAMS_3, RUN_SUMS / TEAMS_4};
/* Whether packed weights are floats of 4 bits instead of integers, and whether activations become planes of bytes, which integers are
 * multiplied by. */
#if BITS
#define FLOATS (OFFSET == 3)
#define PLANES (OFFSET != 3)
#else
#define FLOATS 0
#define PLANES 0
#endif
/* The number of inputs of a row of weights. With experts a run of the second half of the MLP has rows of several of them. */
#define IS_OF_EXPERTS(product) (EXPERTS && ((product) == UP || (product) == DOWN))
#define ROW_OF(product) (IS_OF_EXPERTS(product) && (product) == DOWN ? EXPERT_INNER : INPUTS_OF[product])
#if BITS
/* Inputs of a span. Rows of packed weights are padded to whole spans, and their scales to pairs of spans (weight/packing.rs); rows of
 * integers have whole spans, and so no padding. */
#define SPAN 128
#define PADDED_TO(inputs, step) (((inputs) + (step) - 1) / (step) * (step))
/* Bytes of a unit of 8 packed outputs, of the scales of 8 outputs in a group, and of the scales of a unit; and the offset of the scales,
 * which follow the units of a product, with experts those of all of them. */
#define UNIT_BYTES(product) (PADDED_TO(ROW_OF(product), SPAN) * BITS)
#define LINE (8 * (int)sizeof(SCALE))
#define UNIT_SCALES(product) (GROUP ? PADDED_TO(ROW_OF(product), 2 * SPAN) / (GROUP ? GROUP : 1) * LINE : LINE)
#define ROWS_IN_MEMORY(product) (!IS_OF_EXPERTS(product) ? OUTPUTS_OF[product] : EXPERTS * ((product) == UP ? EXPERT_INNER : HIDDEN))
#define NUMBERS_AT(product) ((i64)(ROWS_IN_MEMORY(product) / 8) * UNIT_BYTES(product))
#endif
/* Whether a product has dense weights. A router always has. */
#define IS_DENSE(product) (!BITS || (product) == ROUTER || (DENSE_ATTENTION && (product) < UP))
/* Whether each output has one scale, by which its sum is multiplied in the end. Those of experts are in the slots. */
#if BITS
#define IS_SCALED(product) (!GROUP && !IS_DENSE(product) && !IS_OF_EXPERTS(product))
#else
#define IS_SCALED(product) false
#endif
/* Slots of a row of packed weights; the rows that a slot holds, of as many experts; slots of a run. */
#define SLOTS_OF_ROW(product) ((PADDED_TO(ROW_OF(product), SPAN) + COLUMNS_OF[product] - 1) / COLUMNS_OF[product])
#define ROWS_OF_SLOT(product) (SLOTS_OF_ROW(product) > 1 ? 1 : COLUMNS_OF[product] / PADDED_TO(ROW_OF(product), SPAN))
#define SLOTS_OF_RUN(product) \
    ((INPUTS_OF[product] / ROW_OF(product) + ROWS_OF_SLOT(product) - 1) / ROWS_OF_SLOT(product) * SLOTS_OF_ROW(product))
constexpr int COLUMNS_OF[5] = {COLUMNS_0, COLUMNS_1, COLUMNS_2, COLUMNS_3, COLUMNS_4};
/* The exchange of a layer, offsets in bytes: the token in front of the layer, query, key and value, the token in the middle of
 * the layer, the inner activations of the MLP, with MERGED the result of attention, and the router's logits. With POST_NORMS what
 * is added to the token once it is normalised takes the place of the token: the result of the MLP before, and of attention. */
#define ROOM_OF(elements) (((elements) * 2 + 255) / 256 * 256)
#define QUERIES_AT ROOM_OF(HIDDEN)
#define MIDDLE_AT (QUERIES_AT + ROOM_OF((HEADS + 2 * KV_HEADS) * HEAD))
#define INNER_AT (MIDDLE_AT + ROOM_OF(HIDDEN))
#define MERGED_AT (INNER_AT + ROOM_OF(INNER))
#define LOGITS_AT (MERGED_AT + (MERGED ? ROOM_OF(HEADS * HEAD) : 0))
#define LAYER_BYTES (LOGITS_AT + ROOM_OF(2 * EXPERTS))
/* All layers, and with POST_NORMS the result of the last MLP. Results that are summed over ranks are elsewhere (ranks.cuh). */
#define EXCHANGE_END(layers) ((i64)(layers) * LAYER_BYTES + (POST_NORMS && RANKS == 1 ? ROOM_OF(HIDDEN) : 0))
/* Floats of a layer's attention splits. */
#define PARTIAL_FLOATS (KV_HEADS * PARTS_OF_GROUP * SPLITS * TILE_HEADS * VALUE_ROW)
/* Shared memory after the ring. Attention uses the memory after its own result, which holds inputs of other products otherwise. */
#define ROUNDED(bytes) (((bytes) + 127) / 128 * 128)
/* Elements that are staged together with COUNT of them: warps make bytes of two spans at a time, of which the last may be missing. */
#if PLANES
#define WITH_WHOLE_WARPS(count) PADDED_TO(count, 2 * SPAN)
#else
#define WITH_WHOLE_WARPS(count) (count)
#endif
/* Bytes of the staged activations of a product: as they are, or three planes of bytes with a scale for each span. */
#if PLANES
#define PLANE(inputs) (WITH_WHOLE_WARPS(inputs) + 64)
#define STAGED(inputs) ROUNDED(3 * PLANE(inputs) + WITH_WHOLE_WARPS(inputs) / SPAN * 4)
#else
#define STAGED(inputs) ROUNDED((inputs) * 2)
#endif
#define ACTIVATIONS_AT (RING_SLOTS * SLOT_BYTES)
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define MOST_INPUTS LARGER(HIDDEN, LARGER(INNER, HEADS * HEAD))
#define HEADS_AT (ACTIVATIONS_AT + STAGED(HEADS * HEAD))
#define HEADS_END (HEADS_AT + ROUNDED(WARPS * TILE_HEADS * (HEAD + 6) * 4))
#define SUMS_AT LARGER(ACTIVATIONS_AT + STAGED(MOST_INPUTS), HEADS_END)
#define SUMS_OF_TILE(product) (RUNS_OF[product] * SUMS_OF[product])
#define MOST_SUMS LARGER(LARGER(LARGER(SUMS_OF_TILE(0), SUMS_OF_TILE(1)), LARGER(SUMS_OF_TILE(2), SUMS_OF_TILE(3))), EXPERTS ? SUMS_OF_TILE(4) : 0)
#define BARRIERS_AT (SUMS_AT + WARPS * MOST_SUMS * 4)
#define TABLE_AT (BARRIERS_AT + ROUNDED(RING_SLOTS * 16))
/* With additional operands of layers, their table; if blocks keep the token, the token. */
#define EXTRAS (POST_NORMS || KINDS > 1 || SINKS)
#define EXTRA_TABLE_AT (TABLE_AT + ROUNDED(TABLE_LAYERS * (int)sizeof(Layer)))
#define TOKEN_AT (EXTRA_TABLE_AT + (EXTRAS ? ROUNDED(TABLE_LAYERS * (int)sizeof(ExtraLayer)) : 0))
/* With experts: the table of expert layers, with planes of bytes the router's activations as they are, and the memory of the router. */
#define EXPERT_TABLE_AT (TOKEN_AT + (KEEPS_TOKEN ? ROUNDED(HIDDEN * 2) : 0))
#define PLAIN_AT (EXPERT_TABLE_AT + ROUNDED(TABLE_LAYERS * (int)sizeof(ExpertLayer)))
#define CHOICE_AT (PLAIN_AT + (PLANES ? ROUNDED(HIDDEN * 2) : 0))

extern __shared__ __align__(128) u8 memory[];
