/*
 * kv_write, latent_write, page_gather, page_scatter: one thread per element.
 *
 * A cache is [pages, heads, slots, size] with any strides, the last of which is 1. Grid: (chunks of 256 of a token's or page's
 * elements, tokens or pages up to 65535). Each element is read and written once.
 */
extern "C" __global__ void kv_write(const __grid_constant__ KvWriteParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        i64 place = p.places[row];
        if (place < 0 || place >= p.pages * p.slots) continue;
        i64 page = place / p.slots, slot = place % p.slots;
        CACHE* key_to = p.keys + page * p.key_strides.page + slot * p.key_strides.slot;
        CACHE* value_to = p.values + page * p.value_strides.page + slot * p.value_strides.slot;
        FOR_COLUMNS(i, p.heads * (p.key_size + p.value_size)) {
            if (i < p.heads * p.key_size) {
                /* A row has fewer than 2^31 elements, and 64-bit divisions are slow. */
                u32 head = (u32)i / (u32)p.key_size, at = (u32)i % (u32)p.key_size;
                key_to[head * p.key_strides.head + at] = convert<CACHE>(p.key.at(row, i));
            } else {
                u32 j = (u32)(i - p.heads * p.key_size), head = j / (u32)p.value_size, at = j % (u32)p.value_size;
                value_to[head * p.value_strides.head + at] = convert<CACHE>(p.value.at(row, j));
            }
        }
    }
}

extern "C" __global__ void latent_write(const __grid_constant__ LatentWriteParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    const u32 value_size = (u32)p.value_size, rest_size = (u32)p.rest_size, size = value_size + rest_size;
    FOR_ROWS(row, rows) {
        i64 place = p.places[row];
        if (place < 0 || place >= p.pages * p.slots) continue;
        CACHE* to = p.cache + place / p.slots * p.strides.page + place % p.slots * p.strides.slot;
        FOR_COLUMNS(i, p.heads * size) {
            u32 head = (u32)i / size, at = (u32)i % size;
            to[head * p.strides.head + at] =
                at < value_size ? convert<CACHE>(p.value.at(row, head * value_size + at))
                                : convert<CACHE>(p.rest.at(row, head * rest_size + at - value_size));
        }
    }
}

/* The address of a page. */
__device__ inline CACHE* page_at(const PagedCache& cache, i64 page) { return cache.first + page * cache.strides.page; }

/* Elements of a page. */
__device__ inline i64 page_size(const PagedCache& cache) { return cache.heads * cache.slots * cache.size; }

/* The address of element `i` of a page, counted without gaps. */
__device__ inline i64 in_page(const PagedCache& cache, i64 i) {
    i64 size = cache.size, slots = cache.slots;
    return i / (slots * size) * cache.strides.head + i / size % slots * cache.strides.slot + i % size;
}

extern "C" __global__ void page_gather(const __grid_constant__ PageGatherParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        i64 page = p.index[row];
        if (page < 0 || page >= p.cache.pages) continue;
        FOR_COLUMNS(i, page_size(p.cache)) p.y.at(row, i) = page_at(p.cache, page)[in_page(p.cache, i)];
    }
}

extern "C" __global__ void page_scatter(const __grid_constant__ PageScatterParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        i64 page = p.index[row];
        if (page < 0 || page >= p.cache.pages) continue;
        FOR_COLUMNS(i, page_size(p.cache)) page_at(p.cache, page)[in_page(p.cache, i)] = p.x.at(row, i);
    }
}
