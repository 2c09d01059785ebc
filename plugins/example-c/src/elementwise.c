/* Elementwise ops: add, cast, columns, activation, gated_activation. */

#include "backend.h"

#include <math.h>

/* y = a + alpha * (b + bias) + c */
void run_add(const dsr_call *call) {
    const tensor *a = &call->operands[0], *b = &call->operands[1], *c = &call->operands[2], *bias = &call->operands[3];
    const tensor *y = &call->results[0];
    dsr_add_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(common_rows(common_rows(rows_of(y), a), b), c), width = size_of(y, 1);
    for (uint64_t row = 0; row < rows; row++) {
        float *out = floats(y, row);
        const float *first = floats(a, row), *second = floats(b, row);
        const float *third = is_there(c) ? floats(c, row) : NULL, *added = is_there(bias) ? floats(bias, 0) : NULL;
        for (uint64_t i = 0; i < width; i++) {
            float sum = second[i] + (added != NULL ? added[i] : 0.0f);
            out[i] = first[i] + attributes.alpha * sum + (third != NULL ? third[i] : 0.0f);
        }
    }
}

/* The cast from f32 to f32, which is a copy. */
void run_cast(const dsr_call *call) {
    const tensor *x = &call->operands[0], *y = &call->results[0];
    uint64_t rows = common_rows(rows_of(y), x);
    for (uint64_t row = 0; row < rows; row++) {
        memcpy(floats(y, row), floats(x, row), size_of(y, 1) * sizeof(float));
    }
}

/* y = x[:, start .. start + count] */
void run_columns(const dsr_call *call) {
    const tensor *x = &call->operands[0], *y = &call->results[0];
    dsr_columns_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(rows_of(y), x);
    for (uint64_t row = 0; row < rows; row++) {
        memcpy(floats(y, row), floats(x, row) + attributes.start, attributes.count * sizeof(float));
    }
}

/* The non-linear function in double, so that the conversion to float is the only rounding. NaN stays NaN. */
static double nonlinearity(uint32_t function, double x) {
    switch (function) {
    case DSR_NONLINEARITY_RELU: return x < 0.0 ? 0.0 : x;
    case DSR_NONLINEARITY_SILU: return x / (1.0 + exp(-x));
    case DSR_NONLINEARITY_GELU_ERF: return x / 2.0 * (1.0 + erf(x / sqrt(2.0)));
    case DSR_NONLINEARITY_QUICK_GELU: return x / (1.0 + exp(-1.702 * x));
    case DSR_NONLINEARITY_TANH: return tanh(x);
    default: return x / 2.0 * (1.0 + tanh(0.79788456080286536 /* sqrt(2 / pi) */ * (x + 0.044715 * x * x * x)));
    }
}

/* The minimum of `x` and `limit`; 0 means no limit. The comparison is false for NaN. */
static double bounded(double x, double limit) { return limit > 0.0 && x > limit ? limit : x; }

/* y = f(min(x + bias, limit)) */
void run_activation(const dsr_call *call) {
    const tensor *x = &call->operands[0], *bias = &call->operands[1], *y = &call->results[0];
    dsr_activation_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(rows_of(y), x);
    for (uint64_t row = 0; row < rows; row++) {
        const float *in = floats(x, row), *added = is_there(bias) ? floats(bias, 0) : NULL;
        float *out = floats(y, row);
        for (uint64_t i = 0; i < size_of(y, 1); i++) {
            double sum = (double)in[i] + (added != NULL ? added[i] : 0.0f);
            out[i] = (float)nonlinearity(attributes.function, bounded(sum, attributes.limit));
        }
    }
}

/* y = f(min(gate + bias, limit)) * (clamp(up + bias, -limit, limit) + up_offset) */
void run_gated_activation(const dsr_call *call) {
    const tensor *gate = &call->operands[0], *up = &call->operands[1], *bias = &call->operands[2];
    const tensor *y = &call->results[0];
    dsr_gated_activation_attributes attributes;
    memcpy(&attributes, call->plan->attributes, sizeof attributes);
    uint64_t rows = common_rows(common_rows(rows_of(y), gate), up), width = size_of(y, 1);
    bool alternate = attributes.layout == DSR_GATE_LAYOUT_INTERLEAVED;
    const float *added = is_there(bias) ? floats(bias, 0) : NULL;
    for (uint64_t row = 0; row < rows; row++) {
        const float *first = floats(gate, row);
        const float *second = is_there(up) ? floats(up, row) : first + (alternate ? 1 : width);
        float *out = floats(y, row);
        for (uint64_t i = 0; i < width; i++) {
            uint64_t place = alternate ? 2 * i : i;
            double g = first[place], u = second[place];
            if (added != NULL) {
                /* The bias has the order of a packed row; the gate half is first with layout separate. */
                g += added[place];
                u += added[alternate ? place + 1 : place + width];
            }
            u = -bounded(-bounded(u, attributes.limit), attributes.limit) + attributes.up_offset;
            out[i] = (float)(nonlinearity(attributes.function, bounded(g, attributes.limit)) * u);
        }
    }
}
