/*
 * What becomes of the sums of a product of bytes with bytes: y = sum * scale of the row * scale of the output + bias. With GATED
 * the first half of the outputs gates the other: y = f(first) * second.
 */
struct Results {
    const float* row_scales;
    const W_SCALE* output_scales;
    const BIAS* bias;
    Y* y;
    i64 y_row;
    /* With ADDED: y = added + alpha * product. */
    const Y* added;
    i64 added_row;
    float alpha;
    /* With GATED: of what gates and what is gated, if it is positive. */
    float limit;
};
