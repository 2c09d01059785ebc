/*
 * Queries, keys and values of a product that is in scratch memory: a warp for each head of a row. Grid: (blocks of 4 heads,
 * rows up to 65535). With HEAD_NORMS heads of queries and keys are normed, with ROPE they are turned; queries go to the
 * result, keys and values to their slots of the cache. Reads the product once or, for norms, twice (the second time from the
 * L1), writes once.
 */
extern "C" __global__ void heads(Extent extent, const X* product, i64 product_row, Epilogue e, const QUERY_GAIN* query_gain,
                                 float query_eps, float query_offset, const KEY_GAIN* key_gain, float key_eps,
                                 float key_offset) {
    take_turn();
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
