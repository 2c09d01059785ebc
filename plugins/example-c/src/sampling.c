/* From logits to tokens: logit_process, argmax, sample. */

#include "backend.h"

#include <math.h>

void run_logit_process(const dsr_call *call) {
    const tensor *logits = &call->operands[0], *requests = &call->operands[1], *parameters = &call->operands[2];
    const tensor *counts = &call->operands[3], *bias = &call->operands[4], *mask = &call->operands[5];
    const tensor *y = &call->results[0];
    uint64_t rows = common_rows(common_rows(common_rows(rows_of(y), logits), requests), mask);
    uint64_t capacity = common_rows(common_rows(rows_of(parameters), counts), bias);
    for (uint64_t row = 0; row < rows; row++) {
        int64_t found = index_at(requests, row, capacity);
        if (found < 0) {
            continue;
        }
        uint64_t request = (uint64_t)found;
        const float *in = floats(logits, row), *parameter = floats(parameters, request);
        float *out = floats(y, row);
        for (uint64_t token = 0; token < size_of(y, 1); token++) {
            float x = in[token];
            int32_t count = integers(counts, request)[token], generated = count & (DSR_IN_PROMPT - 1);
            if (count != 0) {
                float penalty = parameter[DSR_SAMPLING_REPETITION_PENALTY];
                x = x > 0.0f ? x / penalty : x * penalty;
            }
            if (generated > 0) {
                x -= parameter[DSR_SAMPLING_FREQUENCY_PENALTY] * (float)generated;
                x -= parameter[DSR_SAMPLING_PRESENCE_PENALTY];
            }
            if (is_there(bias)) {
                x += floats(bias, request)[token];
            }
            if (is_there(mask) && (words(mask, row)[token / 32] >> token % 32 & 1) == 0) {
                x = -INFINITY;
            }
            out[token] = x;
        }
    }
}

/* The lowest index of the largest element; NaN counts as minus infinity. -1 if all elements are NaN. */
static int64_t largest(const float *x, uint64_t count) {
    int64_t best = -1;
    for (uint64_t i = 0; i < count; i++) {
        if (!isnan(x[i]) && (best < 0 || x[i] > x[best])) {
            best = (int64_t)i;
        }
    }
    /* If minus infinity is the largest, an earlier NaN has the same rank and a lower index. */
    return best >= 0 && x[best] == -INFINITY ? 0 : best;
}

void run_argmax(const dsr_call *call) {
    const tensor *x = &call->operands[0], *ids = &call->results[0];
    uint64_t rows = common_rows(rows_of(ids), x);
    for (uint64_t row = 0; row < rows; row++) {
        integers(ids, 0)[row] = (int32_t)largest(floats(x, row), size_of(x, 1));
    }
}

/* The first word of Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). */
static uint32_t philox(uint32_t key_0, uint32_t key_1, uint32_t token, uint32_t position) {
    uint32_t counter[4] = {token, position, 0, 0};
    for (int round = 0; round < 10; round++) {
        uint64_t first = UINT64_C(0xD2511F53) * counter[0], second = UINT64_C(0xCD9E8D57) * counter[2];
        uint32_t next[4] = {(uint32_t)(second >> 32) ^ counter[1] ^ key_0, (uint32_t)second,
                            (uint32_t)(first >> 32) ^ counter[3] ^ key_1, (uint32_t)first};
        memcpy(counter, next, sizeof counter);
        key_0 += UINT32_C(0x9E3779B9);
        key_1 += UINT32_C(0xBB67AE85);
    }
    return counter[0];
}

/* A candidate of the draw. */
typedef struct candidate {
    float logit;
    uint32_t token;
} candidate;

uint64_t sample_workspace(const dsr_plan *plan) { return plan->operands[0].tensor.shape[1] * sizeof(candidate); }

/* The order of candidates: by descending probability, then by ascending token. */
static int likelier(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    if (a->logit != b->logit) {
        return a->logit > b->logit ? -1 : 1;
    }
    return a->token < b->token ? -1 : 1;
}

/* The difference of a logit to the largest, over the temperature. Infinity minus infinity would be NaN. */
static double relative(float logit, float best, float temperature) {
    return logit == best ? 0.0 : ((double)logit - best) / temperature;
}

/* Draws a token of a row; -1 if there is no candidate. */
static int64_t draw(const float *logits, uint64_t count, const float *parameter, const uint32_t *seed, int32_t position,
                    candidate *kept) {
    int64_t favourite = largest(logits, count);
    float temperature = parameter[DSR_SAMPLING_TEMPERATURE], top_k = parameter[DSR_SAMPLING_TOP_K];
    float top_p = parameter[DSR_SAMPLING_TOP_P], min_p = parameter[DSR_SAMPLING_MIN_P];
    if (favourite < 0 || !(logits[favourite] > -INFINITY)) {
        return -1;
    }
    if (!(temperature > 0.0f)) {
        return favourite;
    }
    float best = logits[favourite];
    uint64_t left = 0;
    for (uint64_t token = 0; token < count; token++) {
        if (logits[token] > -INFINITY) {
            kept[left++] = (candidate){logits[token], (uint32_t)token};
        }
    }
    if (top_k >= 1.0f || top_p < 1.0f) {
        qsort(kept, left, sizeof *kept, likelier);
    }
    if (top_k >= 1.0f && top_k < (float)left) {
        left = (uint64_t)top_k;
    }
    if (top_p < 1.0f) {
        double total = 0.0, sum = 0.0;
        for (uint64_t i = 0; i < left; i++) {
            total += exp(relative(kept[i].logit, best, temperature));
        }
        for (uint64_t i = 0; i < left; i++) {
            sum += exp(relative(kept[i].logit, best, temperature));
            if (sum >= top_p * total) {
                left = i + 1;
            }
        }
    }
    int64_t winner = -1;
    double winning = 0.0;
    for (uint64_t i = 0; i < left; i++) {
        double x = relative(kept[i].logit, best, temperature);
        if (min_p > 0.0f && exp(x) < min_p) {
            continue;
        }
        double v = (philox(seed[0], seed[1], kept[i].token, (uint32_t)position) + 0.5) / 4294967296.0;
        double score = x - log(-log1p(-v));
        if (winner < 0 || score > winning || (score == winning && kept[i].token < winner)) {
            winner = kept[i].token;
            winning = score;
        }
    }
    return winner;
}

/* ln softmax(logits)[token] */
static double log_softmax(const float *logits, uint64_t count, uint64_t token) {
    float best = logits[largest(logits, count)];
    double sum = 0.0;
    for (uint64_t i = 0; i < count; i++) {
        sum += isnan(logits[i]) ? 0.0 : exp((double)logits[i] - best);
    }
    return (double)logits[token] - best - log(sum);
}

void run_sample(const dsr_call *call) {
    const tensor *logits = &call->operands[0], *requests = &call->operands[1], *positions = &call->operands[2];
    const tensor *parameters = &call->operands[3], *seeds = &call->operands[4];
    const tensor *ids = &call->results[0], *log_probability = &call->results[1];
    uint64_t rows = common_rows(common_rows(common_rows(rows_of(ids), logits), requests), positions);
    rows = common_rows(rows, log_probability);
    uint64_t capacity = common_rows(rows_of(parameters), seeds), count = size_of(logits, 1);
    for (uint64_t row = 0; row < rows; row++) {
        int64_t request = index_at(requests, row, capacity), token = -1;
        if (request >= 0) {
            token = draw(floats(logits, row), count, floats(parameters, (uint64_t)request),
                         words(seeds, (uint64_t)request), integers(positions, 0)[row], call->workspace);
        }
        integers(ids, 0)[row] = (int32_t)token;
        floats(log_probability, 0)[row] =
            token < 0 ? 0.0f : (float)log_softmax(floats(logits, row), count, (uint64_t)token);
    }
}
