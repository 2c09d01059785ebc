/*
 * The linear layer.
 *
 * The result of a row is bit-identical whatever the other rows are: sums have the same order whether one row or four are
 * computed together.
 */

#include "backend.h"

/* The number of partial sums: a multiple of the lanes of a vector register. */
#define LANES 8
/* The number of rows of x that share a pass over a row of weights. */
#define TOGETHER 4
/* The number of rows of x that stay in the cache during a pass over all weights. */
#define BLOCK 32

static float fold(const float sums[LANES], const float *a, const float *b, uint64_t from, uint64_t count) {
    float rest = 0.0f;
    for (uint64_t i = from; i < count; i++) {
        rest += a[i] * b[i];
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7])) + rest;
}

float dot(const float *a, const float *b, uint64_t count) {
    float sums[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            sums[lane] += a[i + lane] * b[i + lane];
        }
    }
    return fold(sums, a, b, i, count);
}

/* Four dot products, which share the reads of `b`. */
static void dot_four(const float *const a[TOGETHER], const float *b, uint64_t count, float results[TOGETHER]) {
    const float *a0 = a[0], *a1 = a[1], *a2 = a[2], *a3 = a[3];
    float s0[LANES] = {0}, s1[LANES] = {0}, s2[LANES] = {0}, s3[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            s0[lane] += a0[i + lane] * b[i + lane];
            s1[lane] += a1[i + lane] * b[i + lane];
            s2[lane] += a2[i + lane] * b[i + lane];
            s3[lane] += a3[i + lane] * b[i + lane];
        }
    }
    results[0] = fold(s0, a0, b, i, count);
    results[1] = fold(s1, a1, b, i, count);
    results[2] = fold(s2, a2, b, i, count);
    results[3] = fold(s3, a3, b, i, count);
}

/* y[m, n] = sum_k x[m, k] * weight[n, k] (+ bias[n]) */
void run_linear(const dsr_call *call) {
    const tensor *x = &call->operands[0], *bias = &call->operands[2], *y = &call->results[0];
    const dsr_weight *weight = call->operands[1].weight;
    uint64_t rows = common_rows(rows_of(y), x);
    for (uint64_t block = 0; block < rows; block += BLOCK) {
        uint64_t end = least(rows, block + BLOCK);
        for (uint64_t n = 0; n < weight->rows; n++) {
            const float *weights = weight->elements + n * weight->columns;
            float added = is_there(bias) ? floats(bias, 0)[n] : 0.0f;
            uint64_t row = block;
            for (; row + TOGETHER <= end; row += TOGETHER) {
                const float *in[TOGETHER] = {floats(x, row), floats(x, row + 1), floats(x, row + 2), floats(x, row + 3)};
                float sums[TOGETHER];
                dot_four(in, weights, weight->columns, sums);
                for (uint64_t i = 0; i < TOGETHER; i++) {
                    floats(y, row + i)[n] = sums[i] + added;
                }
            }
            for (; row < end; row++) {
                floats(y, row)[n] = dot(floats(x, row), weights, weight->columns) + added;
            }
        }
    }
}
