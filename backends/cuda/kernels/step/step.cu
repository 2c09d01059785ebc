/*
 * prepare_step and commit_tokens: update the request table.
 *
 * prepare_step: block 0 computes everything except the block tables. One thread per sequence: a scan of the sequences' lengths
 * gives the row of its first token, which the thread writes; sequences of several tokens are written by teams of warps, which
 * share the available warps evenly. Every other block copies one row of the block table. A few kilobytes; bounded by the launch
 * and by a chain of three dependent reads: the step's inputs together with the extent (their memory always exists), the requests'
 * rows of the table, and their pages.
 *
 * commit_tokens: one thread per row.
 */
/* Maximum threads of a block of prepare_step, and tokens whose positions it keeps in shared memory. */
#define MOST 1024

/* The tokens of a sequence with several tokens. */
struct Piece { int start, brings, first, source, request; };

__device__ inline i64 warp_sum_up_to(i64 x) {
    for (int distance = 1; distance < 32; distance *= 2) {
        i64 before = __shfl_up_sync(0xffffffffu, x, distance);
        if (threadIdx.x % 32 >= distance) x += before;
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(MOST) prepare_step(const __grid_constant__ PrepareStepParams p) {
    __shared__ i64 sums[32];
    __shared__ Piece pieces[MOST];
    __shared__ int places[MOST];
    launch_dependents_and_wait();
    if (blockIdx.x > 0) {
        i64 sequence = blockIdx.x - 1;
        i64 request = sequence < p.sequence_extent.rows ? p.requests[sequence] : -1;
        i64 sequences = p.sequence_extent.count(), capacity = p.request_extent.count();
        while (sequence < sequences) {
            bool known = request >= 0 && request < capacity;
            for (i64 i = threadIdx.x; i < p.blocks; i += blockDim.x) {
                p.tables.at(sequence, i) = known ? p.table.at(request, i) : -1;
            }
            sequence += gridDim.x - 1;
            if (sequence < sequences) request = p.requests[sequence];
        }
        return;
    }
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warps = blockDim.x / 32;
    bool planned = thread < p.sequence_extent.rows;
    i64 request = planned ? p.requests[thread] : -1;
    int source = planned ? p.sources[thread] : -1, bounded = planned ? p.lengths[thread] : 0;
    int own_row = thread < p.row_extent.rows ? p.wanted[thread] : -1;
    i64 sequences = p.sequence_extent.count(), tokens = p.token_extent.count(), rows = p.row_extent.count();
    i64 capacity = p.request_extent.count();
    for (i64 i = thread; i < tokens; i += blockDim.x) {
        p.ids[i] = p.positions[i] = p.slots[i] = -1;
        if (i < MOST) places[i] = -1;
    }

    auto put = [&](i64 at, i64 position, int id, i64 of) {
        /* Positions are below 2^31 + 2^31. */
        i64 page_index = (u32)position / (u32)p.block_size;
        i64 page = page_index < p.blocks ? p.table.at(of, page_index) : -1;
        p.ids[at] = id;
        p.positions[at] = (int)position;
        if (at < MOST) places[at] = (int)position;
        p.slots[at] = page < 0 ? -1 : (int)(page * p.block_size + (u32)position % (u32)p.block_size);
    };
    auto of_prompt = [&](i64 at, i64 of) {
        int id = at < p.prompt_tokens ? p.prompt[at] : -1;
        if (id >= 0 && id < p.vocabulary) atomicOr(&p.counts.at(of, id), IN_PROMPT);
        return id;
    };

    i64 carried = 0;
    for (i64 base = 0; base < sequences; base += blockDim.x) {
        i64 sequence = base + thread;
        bool there = sequence < sequences;
        if (base > 0 && there) {
            request = p.requests[sequence];
            source = p.sources[sequence];
            bounded = p.lengths[sequence];
        }
        bool known = there && request >= 0 && request < capacity;
        int done = 0, first = 0, last = -1;
        if (known) {
            done = p.finished[request];
            first = p.length[request];
            last = p.last_token[request];
        }
        i64 brings = !known ? 0 : source < 0 ? 1 : bounded > 0 ? bounded : 0;
        i64 up_to = warp_sum_up_to(brings);
        if (lane == 31) sums[warp] = up_to;
        /* After this barrier, what was set to -1 may be overwritten, too. */
        __syncthreads();
        i64 of_warps = warp_sum_up_to(lane < warps ? sums[lane] : 0);
        i64 before = __shfl_sync(0xffffffffu, of_warps, warp > 0 ? warp - 1 : 0);
        i64 start = carried + (warp > 0 ? before : 0) + up_to - brings;
        carried += __shfl_sync(0xffffffffu, of_warps, 31);

        start = start < tokens ? start : tokens;
        brings = brings < tokens - start ? brings : tokens - start;
        bool runs = known && done == 0;
        first = first > 0 ? first : 0;
        if (!runs) brings = 0;
        bool several = brings > 1;
        pieces[thread] = {(int)start, several ? (int)brings : 0, first, source, (int)request};
        if (brings == 1) put(start, first, source < 0 ? last : of_prompt(source, request), request);
        if (there) {
            p.query_start[sequence] = (int)start;
            p.query_length[sequence] = (int)brings;
            p.kv_length[sequence] = runs ? (int)(first + brings) : 0;
        }
        if (runs) p.length[request] = (int)(first + brings);
        if (!__syncthreads_or(several)) continue;

        /* Divides the threads evenly among the sequences. */
        i64 here = sequences - base < blockDim.x ? sequences - base : blockDim.x;
        int teams = here < warps ? (int)here : warps, members = warps / teams * 32;
        if (thread / members < teams) {
            for (i64 i = thread / members; i < here; i += teams) {
                Piece piece = pieces[i];
                for (i64 offset = thread % members; offset < piece.brings; offset += members) {
                    int id = of_prompt((i64)piece.source + offset, piece.request);
                    put(piece.start + offset, (i64)piece.first + offset, id, piece.request);
                }
            }
        }
        __syncthreads();
    }
    __syncthreads();
    for (i64 i = thread; i < rows; i += blockDim.x) {
        i64 row = i < blockDim.x ? own_row : p.wanted[i];
        int position = row < 0 || row >= tokens ? -1 : row < MOST ? places[row] : p.positions[row];
        p.row_positions[i] = position < 0 ? -1 : position + 1;
    }
}

extern "C" __global__ void commit_tokens(const __grid_constant__ CommitTokensParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count(), capacity = p.records.requests.count();
    for (i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += (i64)gridDim.x * blockDim.x) {
        i64 request = p.requests[row], id = p.ids[row];
        if (request < 0 || request >= capacity || id < 0 || id >= p.records.vocabulary || p.records.finished[request] != 0) continue;
        record_token(p.records, request, id);
    }
}
