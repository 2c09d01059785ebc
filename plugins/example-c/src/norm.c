/* Ops over rows or heads: rms_norm, layer_norm, rope. Sums and angles are computed in double. */

#include "backend.h"

#include <math.h>

/* y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), for each group of features as wide as the weight. */
void run_rms_norm(const dsr_call *call) {
    const tensor *x = &call->operands[0], *weight = &call->operands[1], *y = &call->results[0];
    dsr_rms_norm_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(rows_of(y), x), width = size_of(weight, 0);
    const float *weights = floats(weight, 0);
    for (uint64_t row = 0; row < rows; row++) {
        for (uint64_t group = 0; group < size_of(x, 1); group += width) {
            const float *in = floats(x, row) + group;
            float *out = floats(y, row) + group;
            double squares = 0.0;
            for (uint64_t i = 0; i < width; i++) {
                squares += (double)in[i] * in[i];
            }
            double factor = 1.0 / sqrt(squares / (double)width + attributes.eps);
            for (uint64_t i = 0; i < width; i++) {
                out[i] = (float)(in[i] * factor * ((double)weights[i] + attributes.weight_offset));
            }
        }
    }
}

/* y = (x - mean) / sqrt(variance + eps) * weight + bias */
void run_layer_norm(const dsr_call *call) {
    const tensor *x = &call->operands[0], *weight = &call->operands[1], *bias = &call->operands[2];
    const tensor *y = &call->results[0];
    dsr_layer_norm_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(rows_of(y), x), width = size_of(x, 1);
    for (uint64_t row = 0; row < rows; row++) {
        const float *in = floats(x, row);
        float *out = floats(y, row);
        double sum = 0.0, squares = 0.0;
        for (uint64_t i = 0; i < width; i++) {
            sum += in[i];
        }
        double mean = sum / (double)width;
        for (uint64_t i = 0; i < width; i++) {
            squares += (in[i] - mean) * (in[i] - mean);
        }
        double factor = 1.0 / sqrt(squares / (double)width + attributes.eps);
        for (uint64_t i = 0; i < width; i++) {
            double scaled = (in[i] - mean) * factor * (is_there(weight) ? floats(weight, 0)[i] : 1.0f);
            out[i] = (float)(scaled + (is_there(bias) ? floats(bias, 0)[i] : 0.0f));
        }
    }
}

/* Rotates pairs of elements of each head by an angle proportional to the position. */
void run_rope(const dsr_call *call) {
    const tensor *x = &call->operands[0], *positions = &call->operands[1], *frequencies = &call->operands[2];
    const tensor *y = &call->results[0];
    dsr_rope_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(common_rows(rows_of(y), x), positions), width = size_of(x, 1);
    uint64_t pairs = size_of(frequencies, 0), head = width / attributes.heads;
    bool halves = attributes.pairing == DSR_ROPE_PAIRING_HALVES;
    for (uint64_t row = 0; row < rows; row++) {
        int32_t position = integers(positions, 0)[row];
        if (position < 0) {
            continue;
        }
        const float *in = floats(x, row);
        float *out = floats(y, row);
        memcpy(out, in, width * sizeof(float));
        for (uint64_t pair = 0; pair < pairs; pair++) {
            /* The op defines the product as rounded to f32, which matters at large positions. */
            float angle = (float)((double)position * floats(frequencies, 0)[pair]);
            double sine = sin(angle) * attributes.scale, cosine = cos(angle) * attributes.scale;
            uint64_t first = halves ? pair : 2 * pair, second = halves ? pair + pairs : 2 * pair + 1;
            for (uint64_t start = 0; start < width; start += head) {
                double p = in[start + first], q = in[start + second];
                out[start + first] = (float)(p * cosine - q * sine);
                out[start + second] = (float)(q * cosine + p * sine);
            }
        }
    }
}
