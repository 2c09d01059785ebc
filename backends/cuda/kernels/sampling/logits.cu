/*
 * logit_process: one thread per logit. Grid: (chunks of 256 of the vocabulary, rows up to 65535). Reads the logit, the count
 * and, if there, bias and mask bit; writes one f32.
 */
#define IN_PROMPT (1 << 30)

extern "C" __global__ void logit_process(Extent extent, i64 vocabulary, i64 capacity, const T0* logits, i64 logits_row,
                                         const int* requests, const float* parameters, i64 parameters_row,
                                         const int* counts, i64 counts_row, const float* bias, i64 bias_row,
                                         const u32* mask, i64 mask_row, float* y, i64 y_row) {
    take_turn();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        i64 request = requests[row];
        if (request < 0 || request >= capacity) continue;
        const float* own = parameters + request * parameters_row;
        float repetition = own[4], presence = own[5], frequency = own[6];
        FOR_COLUMNS(i, vocabulary) {
            float x = widen(logits[row * logits_row + i]);
            int count = counts[request * counts_row + i];
            if (count != 0) x = x > 0.0f ? x / repetition : x * repetition;
            int generated = count & (IN_PROMPT - 1);
            if (generated > 0) x = x - frequency * (float)generated - presence;
            if (bias) x += bias[request * bias_row + i];
            if (mask && !(mask[row * mask_row + i / 32] >> (i % 32) & 1)) x = -infinity();
            y[row * y_row + i] = x;
        }
    }
}
