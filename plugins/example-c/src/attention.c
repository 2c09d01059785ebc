/*
 * Attention: attention_prepare, paged_attention, attention.
 *
 * Each query head takes two passes over the keys it attends to: one writes the scores to scratch memory, the other computes
 * their softmax and the weighted sum of values. A real backend would need one pass and no scratch memory.
 */

#include "backend.h"

#include <math.h>

/* The keys and values of a sequence for one KV head. */
typedef struct keys {
    const tensor *key, *value;
    uint64_t head, key_size, value_size;
    /* With a cache: the pages of the sequence, their number, and the slots of a page. */
    const int32_t *pages;
    uint64_t page_count, block;
    /* Without a cache: the first row of the sequence. */
    uint64_t first_row;
    /* The number of keys. */
    uint64_t count;
} keys;

/* A query head of a row. */
typedef struct query {
    const float *elements;
    /* The position of the row, and of the first new token of its sequence. */
    int64_t position, step_start;
    /* The bits of an explicit mask and the number of words; NULL without one. */
    const uint32_t *bits;
    uint64_t words;
    uint32_t mask, window;
    /* Whether distances to later keys count like those to earlier keys, as without a cache. */
    bool both_ways;
    float scale, softcap, slope;
    const float *sink;
} query;

/* Finds key and value `i`; false if their page is missing. */
static bool locate(const keys *all, uint64_t i, const float **key, const float **value) {
    const uint64_t *k = all->key->desc->strides, *v = all->value->desc->strides;
    if (all->pages == NULL) {
        *key = (const float *)all->key->data + (all->first_row + i) * k[0] + all->head * all->key_size;
        *value = (const float *)all->value->data + (all->first_row + i) * v[0] + all->head * all->value_size;
        return true;
    }
    uint64_t slot = i % all->block, limit = least(rows_of(all->key), rows_of(all->value));
    int32_t page = i / all->block < all->page_count ? all->pages[i / all->block] : -1;
    if (page < 0 || (uint64_t)page >= limit) {
        return false;
    }
    *key = (const float *)all->key->data + (uint64_t)page * k[0] + all->head * k[1] + slot * k[2];
    *value = (const float *)all->value->data + (uint64_t)page * v[0] + all->head * v[1] + slot * v[2];
    return true;
}

static bool sees(const query *q, uint64_t i) {
    int64_t key = (int64_t)i, window = q->window;
    if (window > 0 && (key <= q->position - window || (q->both_ways && key >= q->position + window))) {
        return false;
    }
    if (q->mask == DSR_ATTENTION_MASK_CAUSAL) {
        return key <= q->position;
    }
    if (q->mask == DSR_ATTENTION_MASK_EXPLICIT && key >= q->step_start) {
        uint64_t bit = (uint64_t)(key - q->step_start);
        return bit / 32 < q->words && (q->bits[bit / 32] >> bit % 32 & 1) != 0;
    }
    return true;
}

static void attend(const query *q, const keys *all, float *scores, float *y, float *log_sum_exp) {
    const float *key, *value;
    float largest = q->sink != NULL ? *q->sink : -INFINITY;
    bool none = q->sink == NULL;
    for (uint64_t i = 0; i < all->count; i++) {
        if (!sees(q, i) || !locate(all, i, &key, &value)) {
            continue;
        }
        float score = q->scale * dot(q->elements, key, all->key_size);
        if (q->softcap > 0.0f) {
            score = (float)(q->softcap * tanh((double)score / q->softcap));
        }
        float distance = (float)(q->position - (int64_t)i);
        score -= q->slope * (q->both_ways ? fabsf(distance) : distance);
        scores[i] = score;
        largest = score > largest ? score : largest;
        none = false;
    }
    memset(y, 0, all->value_size * sizeof(float));
    double sum = q->sink != NULL ? exp((double)*q->sink - largest) : 0.0;
    for (uint64_t i = 0; i < all->count; i++) {
        if (!sees(q, i) || !locate(all, i, &key, &value)) {
            continue;
        }
        float weight = expf(scores[i] - largest);
        sum += weight;
        for (uint64_t d = 0; d < all->value_size; d++) {
            y[d] += weight * value[d];
        }
    }
    for (uint64_t d = 0; !none && d < all->value_size; d++) {
        y[d] = (float)(y[d] / sum);
    }
    if (log_sum_exp != NULL) {
        *log_sum_exp = none ? -INFINITY : (float)(largest + log(sum));
    }
}

/* This backend needs no work list, so it asks for one of length 0. */
void run_attention_prepare(const dsr_call *call) { (void)call; }

/* Scratch memory for a score of every key that a block table can hold. */
uint64_t paged_attention_workspace(const dsr_plan *plan) {
    return plan->operands[6].tensor.shape[1] * plan->operands[1].tensor.shape[2] * sizeof(float);
}

void run_paged_attention(const dsr_call *call) {
    const tensor *in = call->operands, *y = &call->results[0], *log_sum_exp = &call->results[1];
    const tensor *start = &in[3], *length = &in[4], *total = &in[5], *table = &in[6];
    const tensor *alibi = &in[8], *sinks = &in[9], *bits = &in[10];
    dsr_paged_attention_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(common_rows(rows_of(y), &in[0]), log_sum_exp);
    rows = common_rows(rows, bits);
    uint64_t sequences = common_rows(common_rows(common_rows(rows_of(start), length), total), table);
    /* Without a cache of their own, values are the first elements of their keys. */
    const tensor *value = is_there(&in[2]) ? &in[2] : &in[1];
    keys all = {.key = &in[1], .value = value, .key_size = size_of(&in[1], 3)};
    all.value_size = is_there(&in[2]) ? size_of(&in[2], 3) : attributes.value_size;
    all.page_count = size_of(table, 1);
    all.block = size_of(&in[1], 2);
    query q = {.mask = attributes.mask, .window = attributes.window, .scale = attributes.scale};
    q.softcap = attributes.softcap;
    for (uint64_t sequence = 0; sequence < sequences; sequence++) {
        int64_t first = integers(start, 0)[sequence], count = integers(length, 0)[sequence];
        int64_t keys_there = integers(total, 0)[sequence];
        all.pages = integers(table, sequence);
        all.count = keys_there < 0 ? 0 : least((uint64_t)keys_there, all.page_count * all.block);
        q.step_start = keys_there - count;
        for (int64_t i = 0; first >= 0 && i < count && (uint64_t)(first + i) < rows; i++) {
            uint64_t row = (uint64_t)(first + i);
            q.position = q.step_start + i;
            q.bits = is_there(bits) ? words(bits, row) : NULL;
            q.words = is_there(bits) ? size_of(bits, 1) : 0;
            for (uint64_t head = 0; head < attributes.query_heads; head++) {
                all.head = head / (attributes.query_heads / attributes.kv_heads);
                q.elements = floats(&in[0], row) + head * all.key_size;
                q.slope = is_there(alibi) ? floats(alibi, 0)[head] : 0.0f;
                q.sink = is_there(sinks) ? floats(sinks, 0) + head : NULL;
                attend(&q, &all, call->workspace, floats(y, row) + head * all.value_size,
                       floats(log_sum_exp, row) + head);
            }
        }
    }
}

/* Scratch memory for a score of every row. */
uint64_t attention_workspace(const dsr_plan *plan) { return plan->operands[1].tensor.shape[0] * sizeof(float); }

void run_attention(const dsr_call *call) {
    const tensor *in = call->operands, *y = &call->results[0];
    const tensor *start = &in[3], *length = &in[4], *alibi = &in[5];
    dsr_attention_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(common_rows(common_rows(rows_of(y), &in[0]), &in[1]), &in[2]);
    uint64_t sequences = common_rows(rows_of(start), length);
    keys all = {.key = &in[1], .value = &in[2]};
    all.key_size = size_of(&in[1], 1) / attributes.kv_heads;
    all.value_size = size_of(&in[2], 1) / attributes.kv_heads;
    query q = {.mask = attributes.mask, .window = attributes.window, .scale = attributes.scale};
    q.softcap = attributes.softcap;
    q.both_ways = attributes.mask == DSR_ATTENTION_MASK_BIDIRECTIONAL;
    for (uint64_t sequence = 0; sequence < sequences; sequence++) {
        int64_t first = integers(start, 0)[sequence], count = integers(length, 0)[sequence];
        if (first < 0 || count < 0 || (uint64_t)first > rows) {
            continue;
        }
        all.first_row = (uint64_t)first;
        all.count = least((uint64_t)count, rows - all.first_row);
        for (uint64_t i = 0; i < all.count; i++) {
            uint64_t row = all.first_row + i;
            q.position = (int64_t)i;
            for (uint64_t head = 0; head < attributes.query_heads; head++) {
                all.head = head / (attributes.query_heads / attributes.kv_heads);
                q.elements = floats(&in[0], row) + head * all.key_size;
                q.slope = is_there(alibi) ? floats(alibi, 0)[head] : 0.0f;
                attend(&q, &all, call->workspace, floats(y, row) + head * all.value_size, NULL);
            }
        }
    }
}
