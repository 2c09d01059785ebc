/*
 * prepare_step and commit_tokens: the request table.
 *
 * prepare_step: block 0 of 1024 threads owns everything but the tables: it scans the sequences' lengths 1024 at a time, then
 * each warp takes a sequence and its lanes the tokens. The other blocks copy one row of the block table each. A few
 * kilobytes; bounded by its launch and by the latency of three dependent passes.
 *
 * commit_tokens: one thread per row.
 */
#define IN_PROMPT (1 << 30)

extern "C" __global__ void __launch_bounds__(1024) prepare_step(
    Extent sequence_extent, Extent token_extent, Extent row_extent, Extent request_extent, i64 prompts, i64 blocks,
    i64 vocabulary, i64 block_size, const int* requests, const int* lengths, const int* sources, const int* prompt,
    const int* wanted, const int* table, i64 table_row, const int* last_token, const int* finished, int* ids, int* positions,
    int* slots, int* query_start, int* query_length, int* kv_length, int* tables, i64 tables_row, int* row_positions,
    int* length, int* counts, i64 counts_row) {
    take_turn();
    i64 sequences = sequence_extent.count(), tokens = token_extent.count(), rows = row_extent.count();
    i64 capacity = request_extent.count();
    if (blockIdx.x > 0) {
        for (i64 sequence = blockIdx.x - 1; sequence < sequences; sequence += gridDim.x - 1) {
            i64 request = requests[sequence];
            bool known = request >= 0 && request < capacity;
            for (i64 i = threadIdx.x; i < blocks; i += blockDim.x) {
                tables[sequence * tables_row + i] = known ? table[request * table_row + i] : -1;
            }
        }
        return;
    }
    for (i64 i = threadIdx.x; i < tokens; i += blockDim.x) ids[i] = positions[i] = slots[i] = -1;

    __shared__ i64 scan[1024];
    i64 carried = 0;
    for (i64 base = 0; base < sequences; base += 1024) {
        i64 sequence = base + threadIdx.x, request = sequence < sequences ? requests[sequence] : -1;
        i64 brings = 0;
        if (request >= 0 && request < capacity) {
            brings = sources[sequence] >= 0 ? (lengths[sequence] > 0 ? lengths[sequence] : 0) : 1;
        }
        __syncthreads();
        scan[threadIdx.x] = brings;
        __syncthreads();
        for (int distance = 1; distance < 1024; distance *= 2) {
            i64 before = threadIdx.x >= distance ? scan[threadIdx.x - distance] : 0;
            __syncthreads();
            scan[threadIdx.x] += before;
            __syncthreads();
        }
        i64 start = carried + scan[threadIdx.x] - brings;
        carried += scan[1023];
        if (sequence < sequences) {
            start = start < tokens ? start : tokens;
            brings = brings < tokens - start ? brings : tokens - start;
            bool runs = request >= 0 && request < capacity && finished[request] == 0;
            query_start[sequence] = (int)start;
            query_length[sequence] = runs ? (int)brings : 0;
            kv_length[sequence] = 0;
        }
    }
    __syncthreads();

    int lane = threadIdx.x % 32;
    for (i64 sequence = threadIdx.x / 32; sequence < sequences; sequence += blockDim.x / 32) {
        i64 request = requests[sequence];
        if (request < 0 || request >= capacity || finished[request] != 0) continue;
        i64 start = query_start[sequence], brings = query_length[sequence], source = sources[sequence];
        i64 first = length[request] > 0 ? length[request] : 0;
        __syncwarp();
        for (i64 offset = lane; offset < brings; offset += 32) {
            i64 position = first + offset;
            int id;
            if (source >= 0) {
                id = source + offset < prompts ? prompt[source + offset] : -1;
                if (id >= 0 && id < vocabulary) atomicOr(counts + request * counts_row + id, IN_PROMPT);
            } else {
                id = last_token[request];
            }
            i64 page = position / block_size < blocks ? table[request * table_row + position / block_size] : -1;
            ids[start + offset] = id;
            positions[start + offset] = (int)position;
            slots[start + offset] = page < 0 ? -1 : (int)(page * block_size + position % block_size);
        }
        if (lane == 0) {
            length[request] = (int)(first + brings);
            kv_length[sequence] = (int)(first + brings);
        }
    }
    __syncthreads();
    for (i64 i = threadIdx.x; i < rows; i += blockDim.x) {
        i64 row = wanted[i];
        int position = row >= 0 && row < tokens ? positions[row] : -1;
        row_positions[i] = position < 0 ? -1 : position + 1;
    }
}

extern "C" __global__ void commit_tokens(Extent extent, Extent request_extent, i64 stops, i64 vocabulary,
                                         const int* requests, const int* ids, const int* stop_ids, int* last_token,
                                         int* finished, int* counts, i64 counts_row) {
    take_turn();
    i64 rows = extent.count(), capacity = request_extent.count();
    for (i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += (i64)gridDim.x * blockDim.x) {
        i64 request = requests[row], id = ids[row];
        if (request < 0 || request >= capacity || id < 0 || id >= vocabulary || finished[request] != 0) continue;
        last_token[request] = (int)id;
        int* count = counts + request * counts_row + id;
        /* The bit above the count says something else: a count that is full stays. */
        if ((*count & (IN_PROMPT - 1)) != IN_PROMPT - 1) *count += 1;
        for (i64 i = 0; i < stops; ++i) {
            if (stop_ids[i] == id) finished[request] = 1;
        }
    }
}
