/*
 * The epilogue of an 8-bit integer product: y = sum * scale of the row * scale of the output + bias. With GATED the first half of
 * the outputs gates the other: y = f(first) * second.
 */
struct Results {
    const float* row_scales;
    /* Of type W_SCALE; kernels that do not define it are told the type. */
#ifdef W_SCALE
    const W_SCALE* output_scales;
#else
    const void* output_scales;
#endif
    const BIAS* bias;
    Y* y;
    i64 y_row;
    /* With ADDED: y = added + alpha * product. */
    const Y* added;
    i64 added_row;
    float alpha;
    /* With GATED: the limit on gate and up, if it is positive. */
    float limit;
};
