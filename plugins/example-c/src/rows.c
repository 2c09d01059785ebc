/* Ops that gather and scatter rows and pages by index: embed, gather_rows, kv_write, page_gather, page_scatter. An index of -1
 * or out of range is skipped. */

#include "backend.h"

/* y[t] = table[ids[t] - first_row] + position_table[positions[t] + position_offset]; rows out of range are zeros */
void run_embed(const dsr_call *call) {
    const tensor *ids = &call->operands[0], *positions = &call->operands[2], *y = &call->results[0];
    const dsr_weight *table = call->operands[1].weight, *position_table = call->operands[3].weight;
    dsr_embed_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(common_rows(rows_of(y), ids), positions), width = size_of(y, 1);
    for (uint64_t row = 0; row < rows; row++) {
        float *out = floats(y, row);
        int64_t id = (int64_t)integers(ids, 0)[row] - attributes.first_row;
        if (id >= 0 && (uint64_t)id < table->rows) {
            memcpy(out, table->elements + (uint64_t)id * width, width * sizeof(float));
        } else {
            memset(out, 0, width * sizeof(float));
        }
        if (position_table == NULL || integers(positions, 0)[row] < 0) {
            continue;
        }
        uint64_t position = (uint64_t)integers(positions, 0)[row] + attributes.position_offset;
        for (uint64_t i = 0; position < position_table->rows && i < width; i++) {
            out[i] += position_table->elements[position * width + i];
        }
    }
}

/* y[r] = x[rows[r]] */
void run_gather_rows(const dsr_call *call) {
    const tensor *x = &call->operands[0], *wanted = &call->operands[1], *y = &call->results[0];
    uint64_t rows = common_rows(rows_of(y), wanted);
    for (uint64_t row = 0; row < rows; row++) {
        int64_t source = index_at(wanted, row, rows_of(x));
        if (source >= 0) {
            memcpy(floats(y, row), floats(x, (uint64_t)source), size_of(x, 1) * sizeof(float));
        }
    }
}

/* The shape of a cache is [pages, heads, slots of a page, elements of a head]. */
static float *slot_of(const tensor *cache, uint64_t page, uint64_t head, uint64_t slot) {
    const uint64_t *strides = cache->desc->strides;
    return (float *)cache->data + page * strides[0] + head * strides[1] + slot * strides[2];
}

/* cache[slots[t]] = rows[t], head by head */
static void write_slots(const tensor *cache, const tensor *x, const tensor *slots) {
    uint64_t heads = size_of(cache, 1), block = size_of(cache, 2), size = size_of(cache, 3);
    uint64_t rows = common_rows(rows_of(x), slots);
    for (uint64_t row = 0; row < rows; row++) {
        int64_t slot = index_at(slots, row, rows_of(cache) * block);
        for (uint64_t head = 0; slot >= 0 && head < heads; head++) {
            float *to = slot_of(cache, (uint64_t)slot / block, head, (uint64_t)slot % block);
            memcpy(to, floats(x, row) + head * size, size * sizeof(float));
        }
    }
}

void run_kv_write(const dsr_call *call) {
    write_slots(&call->results[0], &call->operands[2], &call->operands[4]);
    write_slots(&call->results[1], &call->operands[3], &call->operands[4]);
}

/* page_gather and page_scatter copy in opposite directions. */
static void move_pages(const tensor *cache, const tensor *plane, const tensor *pages, bool into_cache) {
    uint64_t block = size_of(cache, 2), size = size_of(cache, 3);
    uint64_t rows = common_rows(rows_of(plane), pages);
    for (uint64_t row = 0; row < rows; row++) {
        int64_t page = index_at(pages, row, rows_of(cache));
        for (uint64_t head = 0; page >= 0 && head < size_of(cache, 1); head++) {
            for (uint64_t slot = 0; slot < block; slot++) {
                float *inside = slot_of(cache, (uint64_t)page, head, slot);
                float *flat = floats(plane, row) + (head * block + slot) * size;
                memcpy(into_cache ? inside : flat, into_cache ? flat : inside, size * sizeof(float));
            }
        }
    }
}

/* y[i] = cache[pages[i]] */
void run_page_gather(const dsr_call *call) {
    move_pages(&call->operands[0], &call->results[0], &call->operands[1], false);
}

/* cache[pages[i]] = x[i] */
void run_page_scatter(const dsr_call *call) {
    move_pages(&call->results[0], &call->operands[1], &call->operands[2], true);
}
