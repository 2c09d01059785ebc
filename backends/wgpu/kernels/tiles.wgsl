// Rows of a step in tiles, for attention of many rows of a sequence, over the paged KV cache or within sequences. A workgroup
// computes a head of the rows of a tile of ROWS rows, for each sequence that has at least P.many rows and some of them in the tile;
// the other rows are those of attention.wgsl. It takes KEYS keys at a time, a number that the kernel defines.

const ROWS: u32 = 64u;
const THREADS: u32 = 256u;
// Sequences of a tile, at most: two that begin or end outside it, and those of at least 16 rows inside.
const SEGMENTS: u32 = 6u;

// Where the key and the value of each key that is taken begin, in quads; NONE if it is not in the cache.
var<workgroup> key_places: array<u32, KEYS>;
var<workgroup> value_places: array<u32, KEYS>;
var<workgroup> rows_shared: u32;
var<workgroup> found: atomic<u32>;
var<workgroup> segments: array<u32, SEGMENTS>;
var<workgroup> segments_shared: u32;
var<workgroup> segment_shared: Segment;

// Rows of a sequence.
struct Segment {
    sequence: u32,
    // The rows of the step from the first to before the last.
    first_row: u32,
    end_row: u32,
    // The position of row 0 of the step, if it were of the sequence.
    origin: i32,
    // The keys that any row sees.
    first_key: i32,
    end_key: i32,
}

// The rows of a sequence that has enough of them, from the first to before the last.
fn rows_of(sequence: u32) -> vec2<u32> {
    let start = start_get(sequence * P.start_stride);
    let count = queries_get(sequence * P.queries_stride);
    if (start < 0 || count < i32(P.many)) { return vec2<u32>(); }
    return vec2<u32>(u32(start), u32(start) + u32(count));
}

fn segment_of(sequence: u32, first: u32, rows: u32) -> Segment {
    let of_sequence = rows_of(sequence);
    var segment = Segment();
    segment.sequence = sequence;
    segment.first_row = max(of_sequence.x, first);
    segment.end_row = min(min(of_sequence.y, first + ROWS), rows);
#if PAGED
    let kv_length = lengths_get(sequence * P.lengths_stride);
    segment.origin = kv_length - i32(of_sequence.y - of_sequence.x) - i32(of_sequence.x);
    // The block table has pages for this many keys at most. The product is computed in f32 because it may exceed 32 bits.
    segment.end_key = max(kv_length, 0);
    if (f32(P.blocks) * f32(P.block) < 2147483000.0) { segment.end_key = min(segment.end_key, i32(P.blocks * P.block)); }
#else
    segment.origin = -i32(of_sequence.x);
    segment.end_key = segment.origin + i32(min(of_sequence.y, max(of_sequence.x, min(key_live(), value_live()))));
#endif
    let end_position = segment.origin + i32(segment.end_row);
#if CAUSAL
    segment.end_key = min(segment.end_key, end_position);
#endif
#if BOTH_SIDES
    if (P.window > 0u) { segment.end_key = min(segment.end_key, end_position - 1 + window()); }
#endif
    if (P.window > 0u) { segment.first_key = max(0, segment.origin + i32(segment.first_row) - window() + 1); }
    return segment;
}

// Whether a row sees a key, if there is one.
fn sees(position: i32, key: i32) -> bool {
#if CAUSAL
    if (key > position) { return false; }
#endif
#if BOTH_SIDES
    if (P.window > 0u && key - position >= window()) { return false; }
#endif
    return P.window == 0u || key > position - window();
}

// Finds the places of the keys from `first` on.
fn find_keys(segment: Segment, head: u32, first: i32, lid: u32) {
    if (lid >= KEYS) { return; }
    let key = first + i32(lid);
    key_places[lid] = NONE;
    value_places[lid] = NONE;
    if (key >= segment.end_key) { return; }
    let kv_head = head / P.group;
#if PAGED
    let page = tables_get(segment.sequence * P.tables_stride + u32(key) / P.block);
    if (page < 0 || u32(page) >= min(key_live(), value_live())) { return; }
    let slot = u32(key) % P.block;
    key_places[lid] = (u32(page) * P.key_stride + kv_head * P.key_head_stride + slot * P.key_slot_stride) / 4u;
    value_places[lid] = (u32(page) * P.value_stride + kv_head * P.value_head_stride + slot * P.value_slot_stride) / 4u;
#else
    let row = u32(key - segment.origin);
    key_places[lid] = (row * P.key_stride + kv_head * P.key_size) / 4u;
    value_places[lid] = (row * P.value_stride + kv_head * P.value_size) / 4u;
#endif
}

// The score of a key, minus infinity if the row does not see it.
fn score_of(product: f32, position: i32, key: i32, is_stored: bool, head: u32) -> f32 {
    if (!is_stored || !sees(position, key)) { return minus_infinity(); }
    return score_of_product(product, position, key, head);
}

// The rows of the call.
fn rows_of_call(lid: u32) -> u32 {
    if (lid == 0u) {
        rows_shared = min(query_live(), y_live());
#if PAGED
        rows_shared = min(rows_shared, log_sum_exp_live());
#endif
        atomicStore(&found, 0u);
    }
    return workgroupUniformLoad(&rows_shared);
}

// Finds the sequences with rows in a tile; their number.
fn find_segments(first_row: u32, rows: u32, lid: u32) -> u32 {
    for (var sequence = lid; sequence < sequences(); sequence += THREADS) {
        let of_sequence = rows_of(sequence);
        if (of_sequence.x < min(first_row + ROWS, rows) && of_sequence.y > first_row) {
            let index = atomicAdd(&found, 1u);
            if (index < SEGMENTS) { segments[index] = sequence; }
        }
    }
    workgroupBarrier();
    if (lid == 0u) { segments_shared = min(atomicLoad(&found), SEGMENTS); }
    return workgroupUniformLoad(&segments_shared);
}

// The rows of a sequence that was found.
fn segment_at(number: u32, first_row: u32, rows: u32, lid: u32) -> Segment {
    if (lid == 0u) { segment_shared = segment_of(segments[number], first_row, rows); }
    return workgroupUniformLoad(&segment_shared);
}
