/*
 * Layers of a decoder in one launch: sizes, which are constants, and what the kernel is told.
 */
/* Warps that multiply; one more copies. Of a run each that has a part of it leaves 16 sums. With WIDE, three more are there for their
 * registers, which those that multiply get: `setmaxnreg` is for four warps together. */
#define MULTIPLIERS (WARPS * 32)
#define BLOCK (MULTIPLIERS + (WIDE ? 128 : 32))
#define RUN_SUMS (16 * WARPS)
#define UNIT 16
/* Whether a warp's next unit of keys and values is on its way while it multiplies one: where registers are enough, and where splits
 * are so few that there often is one. Up to so many units for a warp, a block alone has its heads: nothing is to be merged then. */
#define AHEAD (HEAD <= 64 && SPLITS < 8)
#define ALONE (AHEAD ? 2 : 1)
#define VALUE_ROW (HEAD + 4)
#define KEY_BLOCKS ((HEAD + 31) / 32)
#define VALUE_BLOCKS ((HEAD + 63) / 64)
/* Whether there are query heads in the upper 8 rows of a product. */
#define UPPER (TILE_HEADS > 8)
/* Products of a layer, in their order. */
#define INPUT 0
#define OUTPUT 1
#define UP 2
#define DOWN 3
#define ROUTER 4
#define GATED 3
/* Splits that are read together, and vectors. */
#define SPLITS_AT_ONCE (HEADS * HEAD <= 1024 ? 6 : 3)
#define VECTORS_AT_ONCE 4
/* With EXPERTS the MLP is the CHOSEN experts of the token beside each other, each with INNER / CHOSEN elements between its halves. */
#if EXPERTS
#define EXPERT_INNER (INNER / CHOSEN)
#else
#define EXPERT_INNER INNER
#endif
/* Products of a layer: inputs and outputs; runs of neighbouring outputs in a tile, two where results come of pairs, and outputs in a
 * run; tiles. A slot of the ring takes so many inputs of a run: all, where they fit. */
constexpr int INPUTS_OF[5] = {HIDDEN, HEADS * HEAD, HIDDEN, INNER, HIDDEN};
constexpr int OUTPUTS_OF[5] = {(HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, MIDDLE == GATED ? 2 * INNER : INNER, HIDDEN, EXPERTS};
constexpr int RUNS_OF[5] = {ROPE ? 2 : 1, 1, MIDDLE == GATED ? 2 : 1, 1, 1}, ROWS_OF[5] = {ROWS_0, ROWS_1, ROWS_2, ROWS_3, ROWS_4};
constexpr int TILES_OF[5] = {OUTPUTS_OF[0] / (RUNS_OF[0] * ROWS_0), HIDDEN / ROWS_1, OUTPUTS_OF[2] / (RUNS_OF[2] * ROWS_2),
                             HIDDEN / ROWS_3, EXPERTS / ROWS_4};
/* Teams of warps, which take runs of a product in turn, and the sums that one leaves of a run. */
constexpr int TEAMS_OF[5] = {TEAMS_0, TEAMS_1, TEAMS_2, TEAMS_3, TEAMS_4};
constexpr int SUMS_OF[5] = {RUN_SUMS / TEAMS_0, RUN_SUMS / TEAMS_1, RUN_SUMS / TEAMS_2, RUN_SUMS / TEAMS_3, RUN_SUMS / TEAMS_4};
#if BITS
/* The numbers of 8 outputs of a group, and where numbers begin behind the integers of a product. */
#define LINE (8 * (int)sizeof(SCALE))
#define NUMBERS_AT(product) ((i64)OUTPUTS_OF[product] * INPUTS_OF[product] / 8 * BITS)
#endif
constexpr int COLUMNS_OF[5] = {COLUMNS_0, COLUMNS_1, COLUMNS_2, COLUMNS_3, COLUMNS_4};
/* What blocks leave for each other in a layer, in bytes: the token in front of it, query, key and value, the token in the
 * middle, the MLP's inner one, with MERGED what attention comes to, and the router's logits. */
#define ROOM_OF(elements) (((elements) * 2 + 255) / 256 * 256)
#define QUERIES_AT ROOM_OF(HIDDEN)
#define MIDDLE_AT (QUERIES_AT + ROOM_OF((HEADS + 2 * KV_HEADS) * HEAD))
#define INNER_AT (MIDDLE_AT + ROOM_OF(HIDDEN))
#define MERGED_AT (INNER_AT + ROOM_OF(INNER))
#define LOGITS_AT (MERGED_AT + (MERGED ? ROOM_OF(HEADS * HEAD) : 0))
#define LAYER_BYTES (LOGITS_AT + ROOM_OF(2 * EXPERTS))
/* Floats of the splits of attention in a layer. */
#define PARTIAL_FLOATS (KV_HEADS * PARTS_OF_GROUP * SPLITS * TILE_HEADS * VALUE_ROW)
/* Shared memory behind the ring. Attention works behind its own result, where inputs of other products are. */
#define ROUNDED(bytes) (((bytes) + 127) / 128 * 128)
/* Activations of a product there: as they are, or for packed integers three planes of bytes with a scale for each 128. */
#if BITS
#define PLANE(inputs) ((inputs) + 64)
#define STAGED(inputs) ROUNDED(3 * PLANE(inputs) + (inputs) / 128 * 4)
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
/* What is there for experts: their own table, and what the router keeps of the token. */
#define EXPERT_TABLE_AT (TABLE_AT + ROUNDED(TABLE_LAYERS * (int)sizeof(Layer)))
#define CHOICE_AT (EXPERT_TABLE_AT + ROUNDED(TABLE_LAYERS * (int)sizeof(ExpertLayer)))

extern __shared__ __align__(128) u8 memory[];
