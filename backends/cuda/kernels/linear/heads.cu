/*
 * Queries, keys and values of a product that is in scratch memory: a warp for each head of a row. Grid: (blocks of 4 heads,
 * rows up to 65535). With HEAD_NORMS heads of queries and keys are normed, with ROPE they are turned; queries go to the
 * result, keys and values to their slots of the cache. Reads the product once or, for norms, twice (the second time from the
 * L1), writes once. WIDE says which of the two kernels there is.
 */
#if !WIDE
extern "C" __global__ void heads(Extent extent, const X* product, i64 product_row, Epilogue e, const QUERY_GAIN* query_gain,
                                 float query_eps, float query_offset, const KEY_GAIN* key_gain, float key_eps,
                                 float key_offset) {
    await_previous();
    let_next_start();
    i64 rows = extent.count();
    int lane = threadIdx.x % 32, head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int turned_heads = (int)(e.query_heads + e.kv_heads);
    if (head >= turned_heads + (int)e.kv_heads) return;
    bool is_value = head >= turned_heads, is_query = head < (int)e.query_heads;
    int size = (int)(is_value ? e.value_size : e.key_size);
    int begin = is_value ? turned_heads * (int)e.key_size + (head - turned_heads) * size : head * size;
    int pairs = ROPE && !is_value ? (int)e.pairs : 0;
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
            if (is_query) value *= scale * (widen(query_gain[i]) + query_offset);
            else if (!is_value) value *= scale * (widen(key_gain[i]) + key_offset);
#endif
            return value;
        };
#if HEAD_NORMS
        if (!is_value) {
            float squares = 0.0f;
            for (int i = lane; i < size; i += 32) squares += widen(from[i]) * widen(from[i]);
            scale = 1.0f / sqrtf(warp_sum(squares) / (float)size + (is_query ? query_eps : key_eps));
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
 * The same for heads whose sizes and turned pairs are multiples of 8: a thread takes 8 pairs, or 8 elements that are not turned
 * and 8 more, in loads of 16 bytes, and LANES threads share a head. Grid: (blocks of heads, rows up to 65535), 128 threads. The
 * sines of a row are computed once for all heads of a block: they cost more than the memory. So what a thread reads is on its way
 * before they are, that of the first row and its place and position ahead of the extent: the memory of a row past it is there too.
 */
#define BLOCK_HEADS (128 / LANES)

/* 8 elements of a head to where they belong: the result, or the slot of the cache. */
__device__ inline void place_eight(const Epilogue& e, i64 page, i64 slot, i64 row, int head, int at, const float (&value)[8]) {
    int kv_head = head - (int)e.query_heads;
    if (kv_head < 0) {
        store_eight(e.y + row * e.y_row + head * e.key_size + at, value);
    } else if (kv_head < (int)e.kv_heads) {
        store_eight(e.keys + page * e.key_strides.page + kv_head * e.key_strides.head + slot * e.key_strides.slot + at, value);
    } else {
        kv_head -= (int)e.kv_heads;
        store_eight(e.values + page * e.value_strides.page + kv_head * e.value_strides.head + slot * e.value_strides.slot + at, value);
    }
}

/* 8 elements as they are in memory. */
struct Eight {
    Vector of[8 / Lanes<X>::count];

    __device__ inline void read(const X* from) {
#pragma unroll
        for (int i = 0; i < 8 / Lanes<X>::count; ++i) of[i] = load_vector(from + i * Lanes<X>::count);
    }
    __device__ inline void widen_to(float (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = Lanes<X>::get(of[i / Lanes<X>::count], i % Lanes<X>::count);
    }
};

extern "C" __global__ void __launch_bounds__(128) heads_wide(Extent extent, const X* product, i64 product_row, Epilogue e,
                                                             const QUERY_GAIN* query_gain, float query_eps, float query_offset,
                                                             const KEY_GAIN* key_gain, float key_eps, float key_offset) {
    __shared__ float sines[PAIRS + 1], cosines[PAIRS + 1];
    /* In this order: attention, which is next, has the L2 fetch keys as soon as it is there, and a product would push them out. */
    await_previous();
    let_next_start();
    int lane = threadIdx.x % LANES, head = blockIdx.x * BLOCK_HEADS + threadIdx.x / LANES;
    int turned_heads = (int)(e.query_heads + e.kv_heads);
    bool is_query = head < (int)e.query_heads, is_value = head >= turned_heads, none = head >= turned_heads + (int)e.kv_heads;
    int size = none ? 0 : (int)(is_value ? e.value_size : e.key_size), pairs = is_value ? 0 : PAIRS;
    int begin = is_value ? turned_heads * (int)e.key_size + (head - turned_heads) * size : head * size;
    float factor = is_query ? e.query_scale : e.key_scale;

    /* Where the two eights of an item are: a pair that is turned, or two that are not, of which the second may be past the end. */
    int item, first, second;
    bool turned;
    Eight one, other;
    auto read = [&](const X* from) {
        turned = item < pairs;
        first = turned ? (NEIGHBOURS ? 2 * item : item) : item + pairs;
        second = turned ? (NEIGHBOURS ? first + 8 : first + pairs) : first + LANES * 8;
        if (first < size) one.read(from + first);
        if (second < size) other.read(from + second);
    };
    int slot, position;
    auto begin_row = [&](i64 row) {
        slot = e.places[row];
        position = ROPE ? e.positions[row] : 0;
        item = lane * 8;
        read(product + row * product_row + begin);
    };
    const Extent::Asked said = extent.ask();
    begin_row(blockIdx.y);
    i64 rows = extent.count(said);
    FOR_ROWS(row, rows) {
        if (row != blockIdx.y) begin_row(row);
        const X* from = product + row * product_row + begin;
        if (PAIRS > 0) {
            /* Behind all reads of the row before. */
            __syncthreads();
            for (int pair = threadIdx.x; pair < PAIRS; pair += 128) {
                float angle = __fmul_rn((float)position, e.frequencies[pair]);
                sines[pair] = sinf(angle);
                cosines[pair] = cosf(angle);
            }
            __syncthreads();
        }
        float scale = 1.0f;
#if HEAD_NORMS
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
        bool unreal = (ROPE && position < 0 && !is_value) || (!is_query && (slot < 0 || slot >= e.pages * e.slots));
        if (none || unreal) continue;
        i64 page = (u32)slot / (u32)e.slots, in_page = (u32)slot % (u32)e.slots;
        auto widened = [&](const Eight& eight, int at, float (&value)[8]) {
            eight.widen_to(value);
#if HEAD_NORMS
            if (is_value) return;
            float gain[8];
            if (is_query) load_eight(query_gain + at, gain);
            else load_eight(key_gain + at, gain);
#pragma unroll
            for (int k = 0; k < 8; ++k) value[k] *= scale * (gain[k] + (is_query ? query_offset : key_offset));
#endif
        };
        while (item < size - pairs) {
            float p[8], q[8];
            widened(one, first, p);
            if (!turned) {
                place_eight(e, page, in_page, row, head, first, p);
                if (second < size) {
                    widened(other, second, q);
                    place_eight(e, page, in_page, row, head, second, q);
                }
            } else {
                widened(other, second, q);
                float low[8], high[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    float sine = factor * sines[item + k], cosine = factor * cosines[item + k];
                    float a = NEIGHBOURS ? (k < 4 ? p[2 * k % 8] : q[2 * k % 8]) : p[k];
                    float b = NEIGHBOURS ? (k < 4 ? p[2 * k % 8 + 1] : q[2 * k % 8 + 1]) : q[k];
                    float turned_a = a * cosine - b * sine, turned_b = b * cosine + a * sine;
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
                place_eight(e, page, in_page, row, head, first, low);
                place_eight(e, page, in_page, row, head, second, high);
            }
            item += turned ? LANES * 8 : 2 * LANES * 8;
            if (item < size - pairs) read(from);
        }
    }
}
#endif
