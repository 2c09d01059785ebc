/* The request table: prepare_step derives the inputs of a step from it, commit_tokens records the sampled tokens. */

#include "backend.h"

/* Records that the prompt of a request contains token `id`. */
static void mark_prompt(const tensor *counts, uint64_t request, int32_t id) {
    if (id >= 0 && (uint64_t)id < size_of(counts, 1)) {
        integers(counts, request)[id] |= DSR_IN_PROMPT;
    }
}

/* The slot for the key and value of a position; -1 without a page. */
static int32_t slot_at(const tensor *table, uint64_t request, int64_t position, int64_t block) {
    if ((uint64_t)(position / block) >= size_of(table, 1)) {
        return -1;
    }
    int64_t page = integers(table, request)[position / block];
    int64_t slot = page * block + position % block;
    return page < 0 || slot > INT32_MAX ? -1 : (int32_t)slot;
}

void run_prepare_step(const dsr_call *call) {
    const tensor *in = call->operands, *out = call->results;
    const tensor *prompt = &in[3], *wanted = &in[4], *table = &in[5], *finished = &in[7];
    const tensor *lengths = &out[8], *counts = &out[9];
    int32_t *ids = integers(&out[0], 0), *positions = integers(&out[1], 0), *slots = integers(&out[2], 0);
    dsr_prepare_step_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t tokens = common_rows(common_rows(rows_of(&out[0]), &out[1]), &out[2]);
    uint64_t sequences = common_rows(common_rows(rows_of(&in[0]), &in[1]), &in[2]);
    sequences = common_rows(common_rows(common_rows(sequences, &out[3]), &out[4]), &out[5]);
    sequences = common_rows(sequences, &out[6]);
    uint64_t capacity = common_rows(common_rows(common_rows(rows_of(table), &in[6]), finished), lengths);
    capacity = common_rows(capacity, counts);
    for (uint64_t row = 0; row < tokens; row++) {
        ids[row] = positions[row] = slots[row] = -1;
    }
    uint64_t start = 0;
    for (uint64_t sequence = 0; sequence < sequences; sequence++) {
        integers(&out[3], 0)[sequence] = (int32_t)start;
        integers(&out[4], 0)[sequence] = 0;
        integers(&out[5], 0)[sequence] = 0;
        int64_t found = index_at(&in[0], sequence, capacity);
        int32_t *pages = integers(&out[6], sequence);
        if (found < 0) {
            for (uint64_t i = 0; i < size_of(&out[6], 1); i++) {
                pages[i] = -1;
            }
            continue;
        }
        uint64_t request = (uint64_t)found;
        memcpy(pages, integers(table, request), size_of(table, 1) * sizeof(int32_t));
        int64_t source = integers(&in[2], 0)[sequence];
        int32_t planned = source < 0 ? 1 : integers(&in[1], 0)[sequence];
        uint64_t brought = planned < 0 ? 0 : least((uint64_t)planned, tokens - start);
        if (integers(finished, 0)[request] == 0) {
            int32_t *length = &integers(lengths, 0)[request];
            int64_t before = *length < 0 ? 0 : *length;
            for (uint64_t i = 0; i < brought; i++) {
                int64_t position = before + (int64_t)i, place = source + (int64_t)i;
                if (source < 0) {
                    ids[start + i] = integers(&in[6], 0)[request];
                } else {
                    ids[start + i] = (uint64_t)place < rows_of(prompt) ? integers(prompt, 0)[place] : -1;
                    mark_prompt(counts, request, ids[start + i]);
                }
                positions[start + i] = (int32_t)position;
                slots[start + i] = slot_at(table, request, position, attributes.block_size);
            }
            *length = (int32_t)(before + (int64_t)brought);
            integers(&out[4], 0)[sequence] = (int32_t)brought;
            integers(&out[5], 0)[sequence] = *length;
        }
        start += brought;
    }
    for (uint64_t row = 0; row < common_rows(rows_of(&out[7]), wanted); row++) {
        int64_t place = index_at(wanted, row, tokens);
        int32_t position = place < 0 ? -1 : positions[place];
        integers(&out[7], 0)[row] = position < 0 ? -1 : position + 1;
    }
}

void run_commit_tokens(const dsr_call *call) {
    const tensor *requests = &call->operands[0], *ids = &call->operands[1], *stop = &call->operands[2];
    const tensor *last_token = &call->results[0], *finished = &call->results[1], *counts = &call->results[2];
    uint64_t rows = common_rows(rows_of(requests), ids);
    uint64_t capacity = common_rows(common_rows(rows_of(last_token), finished), counts);
    for (uint64_t row = 0; row < rows; row++) {
        int64_t request = index_at(requests, row, capacity), id = index_at(ids, row, size_of(counts, 1));
        if (request < 0 || id < 0 || integers(finished, 0)[request] != 0) {
            continue;
        }
        integers(last_token, 0)[request] = (int32_t)id;
        int32_t *count = &integers(counts, (uint64_t)request)[id];
        /* The count saturates below the bit of the prompt. */
        if ((*count & (DSR_IN_PROMPT - 1)) != DSR_IN_PROMPT - 1) {
            *count += 1;
        }
        for (uint64_t i = 0; i < rows_of(stop); i++) {
            if (integers(stop, 0)[i] == id) {
                integers(finished, 0)[request] = 1;
            }
        }
    }
}
