/*
 * kv_write, page_copy, page_gather, page_scatter: one thread per element.
 *
 * A cache is [pages, heads, slots, size] with any strides but 1 at the end. Grid: (chunks of 256 of a token's or page's
 * elements, tokens or pages up to 65535). Each element is read and written once.
 */
extern "C" __global__ void kv_write(Extent extent, i64 pages, i64 heads, i64 slots, i64 key_size, i64 value_size, T0* keys,
                                    Strides key_strides, T0* values, Strides value_strides, const T1* key, i64 key_row,
                                    const T2* value, i64 value_row, const int* places) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        i64 place = places[row];
        if (place < 0 || place >= pages * slots) continue;
        i64 page = place / slots, slot = place % slots;
        T0* key_to = keys + page * key_strides.page + slot * key_strides.slot;
        T0* value_to = values + page * value_strides.page + slot * value_strides.slot;
        FOR_COLUMNS(i, heads * (key_size + value_size)) {
            if (i < heads * key_size) {
                /* A row has fewer than 2^31 elements, and long divisions are slow. */
                u32 head = (u32)i / (u32)key_size, at = (u32)i % (u32)key_size;
                key_to[head * key_strides.head + at] = narrow<T0>(widen(key[row * key_row + i]));
            } else {
                u32 j = (u32)(i - heads * key_size), head = j / (u32)value_size, at = j % (u32)value_size;
                value_to[head * value_strides.head + at] = narrow<T0>(widen(value[row * value_row + j]));
            }
        }
    }
}

/* Element `i` of a page, counted without gaps. */
__device__ inline i64 in_page(i64 i, i64 slots, i64 size, const Strides& strides) {
    return i / (slots * size) * strides.head + i / size % slots * strides.slot + i % size;
}

extern "C" __global__ void page_copy(Extent extent, i64 pages, i64 heads, i64 slots, i64 size, T0* cache, Strides strides,
                                     const int* pairs, i64 pairs_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        i64 from = pairs[row * pairs_row], to = pairs[row * pairs_row + 1];
        if (from < 0 || from >= pages || to < 0 || to >= pages) continue;
        FOR_COLUMNS(i, heads * slots * size) {
            i64 at = in_page(i, slots, size, strides);
            cache[to * strides.page + at] = cache[from * strides.page + at];
        }
    }
}

extern "C" __global__ void page_gather(Extent extent, i64 pages, i64 heads, i64 slots, i64 size, const T0* cache,
                                       Strides strides, const int* index, T0* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        i64 page = index[row];
        if (page < 0 || page >= pages) continue;
        FOR_COLUMNS(i, heads * slots * size) {
            y[row * y_row + i] = cache[page * strides.page + in_page(i, slots, size, strides)];
        }
    }
}

extern "C" __global__ void page_scatter(Extent extent, i64 pages, i64 heads, i64 slots, i64 size, T0* cache, Strides strides,
                                        const T0* x, i64 x_row, const int* index) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        i64 page = index[row];
        if (page < 0 || page >= pages) continue;
        FOR_COLUMNS(i, heads * slots * size) {
            cache[page * strides.page + in_page(i, slots, size, strides)] = x[row * x_row + i];
        }
    }
}
