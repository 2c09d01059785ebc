/*
 * Queries, keys and values of a product in scratch memory: one warp for each head of a row. Grid: (blocks of 4 heads, rows up to
 * 65535). With HEAD_NORMS the heads of queries and keys are normalised, each or with OVER_ALL_HEADS all together, with ROPE they are
 * rotated; queries are written to the result, keys and values to their cache slots. Reads the product once or, for norms, twice (the
 * second time from the L1; with OVER_ALL_HEADS every block of a row reads all heads), writes once. WIDE selects between the two kernels.
 */
#if !WIDE
extern "C" __global__ void heads(Extent extent, const X* product, i64 product_row, EpilogueParams e, const QUERY_GAIN* query_gain,
                                 float query_eps, float query_offset, const KEY_GAIN* key_gain, float key_eps,
                                 float key_offset) {
    wait_for_predecessor();
    launch_dependents();
    i64 rows = extent.count();
    int lane = threadIdx.x % 32, head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int turned_heads = (int)(e.query_heads + e.kv_heads);
    if (head >= turned_heads + (int)e.kv_heads) return;
    bool is_value = head >= turned_heads, is_query = head < (int)e.query_heads;
    int size = (int)(is_value ? e.value_size : e.key_size);
    int begin = is_value ? turned_heads * (int)e.key_size + (head - turned_heads) * size : head * size;
    int pairs = ROPE && !is_value ? (int)e.pairs : 0;
    /* The elements that a norm covers, and where its weight for this head begins. */
    int queries = (int)(e.query_heads * e.key_size);
    int normed_begin = !OVER_ALL_HEADS ? begin : is_query ? 0 : queries;
    int normed = !OVER_ALL_HEADS ? size : (int)e.key_size * (int)(is_query ? e.query_heads : e.kv_heads);
    int gain_begin = begin - normed_begin;
    FOR_ROWS(row, rows) {
        const X* from = product + row * product_row + begin;
        Ready ready;
        ready.place = e.places[row];
        if (ready.place >= e.pages * e.slots) ready.place = -1;
        ready.position = ROPE ? e.positions[row] : 0;
        float scale = 1.0f;
        auto element = [&](int i) {
            float value = widen(from[i]);
#if HEAD_NORMS
            if (is_query) value *= scale * (widen(query_gain[gain_begin + i]) + query_offset);
            else if (!is_value) value *= scale * (widen(key_gain[gain_begin + i]) + key_offset);
#endif
            return value;
        };
#if HEAD_NORMS
        if (!is_value) {
            float squares = 0.0f;
            const X* all = from - gain_begin;
            for (int i = lane; i < normed; i += 32) squares += widen(all[i]) * widen(all[i]);
            scale = 1.0f / sqrtf(warp_sum(squares) / (float)normed + (is_query ? query_eps : key_eps));
        }
#endif
        for (int item = lane; item < size - pairs; item += 32) {
            if (item >= pairs) {
                place(e, ready, row, begin + item + pairs, element(item + pairs));
                continue;
            }
            int first = NEIGHBOURS ? 2 * item : item, second = NEIGHBOURS ? 2 * item + 1 : item + pairs;
            float angle = __fmul_rn((float)ready.position, e.frequencies[item]);
            float factor = is_query ? e.query_scale : e.key_scale, sine = factor * sinf(angle), cosine = factor * cosf(angle);
            float p = element(first), q = element(second);
            place(e, ready, row, begin + first, p * cosine - q * sine);
            place(e, ready, row, begin + second, q * cosine + p * sine);
        }
    }
}
#else
/*
 * The same for head sizes and numbers of rotated pairs that are multiples of 8: a thread processes 8 pairs, or twice 8 elements
 * that are not rotated, in loads of 16 bytes; LANES threads share a head. Grid: (blocks of THREADS threads, as many rows as are
 * resident at once). What a thread needs to know of its head is computed once for all its rows. It loads the next row before it
 * finishes the current one; the first row is loaded before the extent is known, as rows past it have memory too. The sines of a
 * row are computed once for all heads of a block: they cost more than the memory accesses.
 */
#define BLOCK_HEADS (THREADS / LANES)

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE / THREADS) heads_wide(Extent extent, const X* product, i64 product_row, EpilogueParams e,
                                                                 const QUERY_GAIN* query_gain, float query_eps, float query_offset,
                                                                 const KEY_GAIN* key_gain, float key_eps, float key_offset) {
    __shared__ __align__(16) float sines[2][PAIRS + 8], cosines[2][PAIRS + 8];
    /* In this order, because attention, which runs next, prefetches keys into the L2 when it starts, and a product would evict
     * them. */
    wait_for_predecessor();
    launch_dependents();
    int lane = threadIdx.x % LANES, head = blockIdx.x * BLOCK_HEADS + threadIdx.x / LANES;
    int turned_heads = (int)(e.query_heads + e.kv_heads);
    bool is_query = head < (int)e.query_heads, is_value = head >= turned_heads, none = head >= turned_heads + (int)e.kv_heads;
    int size = none ? 0 : (int)(is_value ? e.value_size : e.key_size), pairs = is_value ? 0 : PAIRS;
    int begin = is_value ? turned_heads * (int)e.key_size + (head - turned_heads) * size : head * size;
#if OVER_ALL_HEADS
    /* Sums of squares of all queries and of all keys, those of each warp: double-buffered as the sines are. */
    __shared__ float squares_of[2][2][THREADS / 32];
    int queries = (int)(e.query_heads * e.key_size), first_head = blockIdx.x * BLOCK_HEADS;
    /* Elements of queries and of keys, if the block has heads of them. */
    int normed[2] = {first_head < (int)e.query_heads ? queries : 0,
                     first_head < turned_heads && first_head + BLOCK_HEADS > (int)e.query_heads ? (int)(e.kv_heads * e.key_size) : 0};
    int gain_begin = is_query ? begin : begin - queries;
#else
    const int gain_begin = 0;
#endif
    float factor = is_query ? e.query_scale : e.key_scale;
    /* The address of the head in the cache. */
    const Strides& strides = is_value ? e.value_strides : e.key_strides;
    CACHE* kept = (is_value ? e.values : e.keys) + (head - (int)(is_value ? turned_heads : e.query_heads)) * strides.head;

    /* The two vectors of 8 of an item: a rotated pair, or two that are not rotated, the second of which may be past the end. */
    int item, first, second;
    bool turned;
    auto locate = [&](int at) {
        item = at;
        turned = item < pairs;
        first = turned ? (NEIGHBOURS ? 2 * item : item) : item + pairs;
        second = turned ? (NEIGHBOURS ? first + 8 : first + pairs) : first + LANES * 8;
    };
    Eight<X> one, other;
    auto read = [&](const X* from) {
        if (first < size) one.read(from + first);
        if (second < size) other.read(from + second);
    };
    int slot, position;
    auto read_row = [&](i64 row) {
        slot = e.places[row];
        position = ROPE ? e.positions[row] : 0;
        read(product + row * product_row + begin);
    };
    const Extent::Loaded loaded = extent.load();
    locate(lane * 8);
    read_row(blockIdx.y);
    i64 rows = extent.count(loaded);
    int turn = 1;
    FOR_ROWS(row, rows) {
        const X* from = product + row * product_row + begin;
        bool unreal = (ROPE && position < 0 && !is_value) || (!is_query && (slot < 0 || slot >= e.pages * e.slots));
        i64 page = is_query ? 0 : (u32)slot / (u32)e.slots, in_page = (u32)slot - page * e.slots;
        CACHE* in_cache = kept + page * strides.page + in_page * strides.slot;
        Y* in_result = e.y + row * e.y_row + begin;
        auto place_eight = [&](int at, const float (&value)[8]) {
            if (is_query) store_eight(in_result + at, value);
            else store_eight(in_cache + at, value);
        };
        Eight<X> own_one = one, own_other = other;
        float own_position = (float)position;
        if (row + gridDim.y < rows) read_row(row + gridDim.y);
        turn ^= 1;
        for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
            float angle = __fmul_rn(own_position, e.frequencies[pair]);
            sines[turn][pair] = sinf(angle);
            cosines[turn][pair] = cosf(angle);
        }
#if OVER_ALL_HEADS
#pragma unroll
        for (int of_keys = 0; of_keys < 2; ++of_keys) {
            float sum = 0.0f;
            for (int i = threadIdx.x * 8; i < normed[of_keys]; i += THREADS * 8) {
                float value[8];
                load_eight(from - begin + (of_keys ? queries : 0) + i, value);
#pragma unroll
                for (int k = 0; k < 8; ++k) sum += value[k] * value[k];
            }
            sum = warp_sum(sum);
            if (threadIdx.x % 32 == 0) squares_of[turn][of_keys][threadIdx.x / 32] = sum;
        }
#endif
        /* What the threads of a block share of a row is double-buffered: every thread here has read that of the row before last, which is
         * overwritten next. */
        if (PAIRS > 0 || OVER_ALL_HEADS) __syncthreads();
        float scale = 1.0f;
#if OVER_ALL_HEADS
        if (!is_value) {
            float squares = 0.0f;
#pragma unroll
            for (int warp = 0; warp < THREADS / 32; ++warp) squares += squares_of[turn][!is_query][warp];
            scale = 1.0f / sqrtf(squares / (float)normed[!is_query] + (is_query ? query_eps : key_eps));
        }
#elif HEAD_NORMS
        float squares = 0.0f;
        for (int i = lane * 8; i < size && !is_value; i += LANES * 8) {
            float value[8];
            load_eight(from + i, value);
#pragma unroll
            for (int k = 0; k < 8; ++k) squares += value[k] * value[k];
        }
#pragma unroll
        for (int distance = LANES / 2; distance; distance /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, distance);
        if (!is_value) scale = 1.0f / sqrtf(squares / (float)size + (is_query ? query_eps : key_eps));
#endif
        auto widened = [&](const Eight<X>& eight, int at, float (&value)[8]) {
            eight.widen_to(value);
#if HEAD_NORMS
            if (is_value) return;
            float gain[8];
            if (is_query) load_eight(query_gain + gain_begin + at, gain);
            else load_eight(key_gain + gain_begin + at, gain);
#pragma unroll
            for (int k = 0; k < 8; ++k) value[k] *= scale * (gain[k] + (is_query ? query_offset : key_offset));
#endif
        };
        auto finish = [&]() {
            float p[8], q[8];
            widened(own_one, first, p);
            if (!turned) {
                place_eight(first, p);
                if (second < size) {
                    widened(own_other, second, q);
                    place_eight(second, q);
                }
                return;
            }
            widened(own_other, second, q);
            float low[8], high[8], sine[8], cosine[8];
            load_eight(sines[turn] + item, sine);
            load_eight(cosines[turn] + item, cosine);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                sine[k] *= factor;
                cosine[k] *= factor;
                float a = NEIGHBOURS ? (k < 4 ? p[2 * k % 8] : q[2 * k % 8]) : p[k];
                float b = NEIGHBOURS ? (k < 4 ? p[2 * k % 8 + 1] : q[2 * k % 8 + 1]) : q[k];
                float turned_a = a * cosine[k] - b * sine[k], turned_b = b * cosine[k] + a * sine[k];
                if (!NEIGHBOURS) {
                    low[k] = turned_a;
                    high[k] = turned_b;
                } else if (k < 4) {
                    low[2 * k % 8] = turned_a;
                    low[2 * k % 8 + 1] = turned_b;
                } else {
                    high[2 * k % 8] = turned_a;
                    high[2 * k % 8 + 1] = turned_b;
                }
            }
            place_eight(first, low);
            place_eight(second, high);
        };
        if (!none && !unreal && item < size - pairs) {
            finish();
            /* If there are more items than threads, their elements are not prefetched. */
            while (item + (turned ? LANES : 2 * LANES) * 8 < size - pairs) {
                locate(item + (turned ? LANES : 2 * LANES) * 8);
                if (first < size) own_one.read(from + first);
                if (second < size) own_other.read(from + second);
                finish();
            }
            locate(lane * 8);
        }
    }
}
#endif
