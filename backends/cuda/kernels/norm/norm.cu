/*
 * rms_norm, layer_norm, add_rms_norm: one block per row (and group), which owns all of it.
 *
 * Grid: (groups of a row, rows up to 65535), 256 threads. Every element is read from memory once and then found in the L1;
 * the result is written once. Sums in f32: each thread adds its own elements, then the block in a fixed order, so that a
 * row's result depends on that row alone.
 */
extern "C" __global__ void rms_norm(Extent extent, i64 width, float eps, float offset, const T0* x, i64 x_row,
                                    const T1* weight, T0* y, i64 y_row) {
    take_turn();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        const T0* from = x + row * x_row + blockIdx.x * width;
        T0* to = y + row * y_row + blockIdx.x * width;
        float squares = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            float value = widen(from[i]);
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(block_sum(squares) / (float)width + eps);
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            to[i] = narrow<T0>(widen(from[i]) * scale * (widen(weight[i]) + offset));
        }
    }
}

/* The same, 8 elements at a time. */
extern "C" __global__ void rms_norm_wide(Extent extent, i64 width, float eps, float offset, const T0* x, i64 x_row,
                                         const T1* weight, T0* y, i64 y_row) {
    take_turn();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        const T0* from = x + row * x_row + blockIdx.x * width;
        T0* to = y + row * y_row + blockIdx.x * width;
        float squares = 0.0f, value[8], gain[8];
        for (i64 i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
            load_eight(from + i, value);
#pragma unroll
            for (int k = 0; k < 8; ++k) squares += value[k] * value[k];
        }
        float scale = 1.0f / sqrtf(block_sum(squares) / (float)width + eps);
        for (i64 i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
            load_eight(from + i, value);
            load_eight(weight + i, gain);
#pragma unroll
            for (int k = 0; k < 8; ++k) value[k] = value[k] * scale * (gain[k] + offset);
            store_eight(to + i, value);
        }
    }
}

/* r = a + alpha * b, y = rms_norm(r): the norm reads the sum before it is rounded. */
extern "C" __global__ void add_rms_norm(Extent extent, i64 columns, i64 width, float alpha, float eps, float offset,
                                        const T0* a, i64 a_row, const T0* b, i64 b_row, const T1* weight, T0* r, i64 r_row,
                                        T0* y, i64 y_row) {
    take_turn();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        i64 start = blockIdx.x * width;
        const T0* first = a + row * a_row + start;
        const T0* second = b + row * b_row + start;
        float squares = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            float value = widen(first[i]) + alpha * widen(second[i]);
            squares += value * value;
            r[row * r_row + start + i] = narrow<T0>(value);
        }
        float scale = 1.0f / sqrtf(block_sum(squares) / (float)width + eps);
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            float value = widen(first[i]) + alpha * widen(second[i]);
            y[row * y_row + start + i] = narrow<T0>(value * scale * (widen(weight[i]) + offset));
        }
    }
}

extern "C" __global__ void layer_norm(Extent extent, i64 width, float eps, const T0* x, i64 x_row, const T1* weight,
                                      const T2* bias, T0* y, i64 y_row) {
    take_turn();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        const T0* from = x + row * x_row;
        float sum = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) sum += widen(from[i]);
        float mean = block_sum(sum) / (float)width;
        /* What the mean lost to rounding is found again: with a large mean it is not small beside the deviations. */
        float squares = 0.0f, rest = 0.0f;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            float value = widen(from[i]) - mean;
            squares += value * value;
            rest += value;
        }
        squares = block_sum(squares);
        rest = block_sum(rest) / (float)width;
        float variance = squares / (float)width - rest * rest;
        float scale = 1.0f / sqrtf((variance > 0.0f || is_nan(variance) ? variance : 0.0f) + eps);
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            float value = ((widen(from[i]) - mean) - rest) * scale;
            y[row * y_row + i] = narrow<T0>(value * or_else(weight, i, 1.0f) + or_else(bias, i, 0.0f));
        }
    }
}
