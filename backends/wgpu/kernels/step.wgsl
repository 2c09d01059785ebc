// The request table: deriving a step's inputs, recording its tokens.

const IN_PROMPT: i32 = 0x40000000;
const LARGEST: u32 = 0x7fffffffu;

#if PREPARE
// Data of the current sequence, uniform over the workgroup.
struct Sequence {
    request: i32,
    source: i32,
    start: u32,
    count: u32,
    first: u32,
}

var<workgroup> tokens_shared: u32;
var<workgroup> sequences_shared: u32;
var<workgroup> sequence_shared: Sequence;

// One workgroup loops over the sequences; its threads divide the tokens and pages of each.
@compute @workgroup_size(256)
fn prepare_step(@builtin(local_invocation_index) lid: u32) {
    if (lid == 0u) {
        tokens_shared = min(ids_live(), min(positions_live(), slots_live()));
        sequences_shared = min(min(min(step_request_live(), step_length_live()), min(step_source_live(), query_start_live())),
            min(min(query_length_live(), kv_length_live()), tables_live()));
        sequence_shared.start = 0u;
        sequence_shared.count = 0u;
    }
    let tokens = workgroupUniformLoad(&tokens_shared);
    let sequences = workgroupUniformLoad(&sequences_shared);
    let capacity = min(min(block_table_live(), last_token_live()), min(finished_live(), min(lengths_live(), counts_live())));
    for (var row = lid; row < tokens; row += 256u) {
        ids_set(row * P.ids_stride, -1);
        positions_set(row * P.positions_stride, -1);
        slots_set(row * P.slots_stride, -1);
    }
    for (var sequence = 0u; sequence < sequences; sequence += 1u) {
        // Orders the writes of the previous sequence, which may belong to the same request.
        storageBarrier();
        workgroupBarrier();
        if (lid == 0u) {
            let start = sequence_shared.start + sequence_shared.count;
            let request = step_request_get(sequence * P.step_request_stride);
            var known = Sequence(-1, -1, start, 0u, 0u);
            query_start_set(sequence * P.query_start_stride, i32(start));
            var queries = 0;
            var keys = 0;
            if (request >= 0 && u32(request) < capacity) {
                known.request = request;
                known.source = step_source_get(sequence * P.step_source_stride);
                var count = 1u;
                if (known.source >= 0) { count = u32(max(step_length_get(sequence * P.step_length_stride), 0)); }
                known.count = min(count, tokens - start);
                if (finished_get(u32(request) * P.finished_stride) == 0) {
                    known.first = u32(max(lengths_get(u32(request) * P.lengths_stride), 0));
                    queries = i32(known.count);
                    keys = i32(min(known.first + known.count, LARGEST));
                    lengths_set(u32(request) * P.lengths_stride, keys);
                } else {
                    known.first = NONE;
                }
            }
            query_length_set(sequence * P.query_length_stride, queries);
            kv_length_set(sequence * P.kv_length_stride, keys);
            sequence_shared = known;
        }
        let known = workgroupUniformLoad(&sequence_shared);
        for (var column = lid; column < P.blocks; column += 256u) {
            var page = -1;
            if (known.request >= 0) { page = block_table_get(u32(known.request) * P.block_table_stride + column); }
            tables_set(sequence * P.tables_stride + column, page);
        }
        if (known.request < 0 || known.first == NONE) { continue; }
        for (var offset = lid; offset < known.count; offset += 256u) {
            token(known, offset);
        }
    }
    storageBarrier();
    workgroupBarrier();
    for (var row = lid; row < min(rows_live(), row_positions_live()); row += 256u) {
        let place = rows_get(row * P.rows_stride);
        var position = -1;
        if (place >= 0 && u32(place) < tokens) { position = positions_get(u32(place) * P.positions_stride); }
        if (position >= 0) { position = i32(min(u32(position) + 1u, LARGEST)); }
        row_positions_set(row * P.row_positions_stride, position);
    }
}

// Writes id, position and slot of a token of a sequence.
fn token(known: Sequence, offset: u32) {
    let request = u32(known.request);
    let row = known.start + offset;
    let position = known.first + offset;
    var id = -1;
    if (known.source >= 0) {
        let index = u32(known.source) + offset;
        if (index < prompt_ids_live()) { id = prompt_ids_get(index * P.prompt_ids_stride); }
        if (id >= 0 && u32(id) < P.vocabulary) {
            // Threads with the same id write the same value.
            let at = request * P.counts_stride + u32(id);
            counts_set(at, counts_get(at) | IN_PROMPT);
        }
    } else {
        id = last_token_get(request * P.last_token_stride);
    }
    var slot = -1;
    let column = position / P.block;
    if (column < P.blocks) {
        let page = block_table_get(request * P.block_table_stride + column);
        let within = position % P.block;
        if (page >= 0 && u32(page) <= (LARGEST - within) / P.block) { slot = i32(u32(page) * P.block + within); }
    }
    ids_set(row * P.ids_stride, id);
    positions_set(row * P.positions_stride, select(-1, i32(position), position <= LARGEST));
    slots_set(row * P.slots_stride, slot);
}
#endif

#if COMMIT
@compute @workgroup_size(64)
fn commit_tokens(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let row = flat_group(wid, nwg) * 64u + lid;
    if (row >= min(requests_live(), ids_live())) { return; }
    let request = requests_get(row * P.requests_stride);
    let id = ids_get(row * P.ids_stride);
    let capacity = min(last_token_live(), min(finished_live(), counts_live()));
    if (request < 0 || u32(request) >= capacity || id < 0 || u32(id) >= P.vocabulary) { return; }
    let c = u32(request);
    if (finished_get(c * P.finished_stride) != 0) { return; }
    last_token_set(c * P.last_token_stride, id);
    let at = c * P.counts_stride + u32(id);
    let count = counts_get(at);
    // A full count stays, because the bit above it is IN_PROMPT.
    if ((count & (IN_PROMPT - 1)) != IN_PROMPT - 1) { counts_set(at, count + 1); }
    for (var index = 0u; index < stop_ids_live(); index += 1u) {
        if (stop_ids_get(index * P.stop_ids_stride) == id) { finished_set(c * P.finished_stride, 1); }
    }
}
#endif
