/*
 * rms_norm, layer_norm, add_rms_norm: one block per row (and group), which owns all of it.
 *
 * Grid: (groups of a row, rows up to 65535), up to 1024 threads. Every element is read from memory once and then found in the L1;
 * the result is written once. Sums in f32: each thread adds its own elements, then the block in a fixed order, so that a
 * row's result depends on that row alone.
 */
extern "C" __global__ void rms_norm(Extent extent, i64 width, float eps, float offset, const T0* x, i64 x_row,
                                    const T1* weight, T0* y, i64 y_row) {
    launch_dependents_and_wait();
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

/*
 * The same, 8 elements at a time. There are as many blocks as multiprocessors have room for. A thread that has no more than two
 * such pieces of a row keeps their weights, which are as many bytes as the row or twice that, and reads the next row before it adds
 * up the one in hand; the first ahead of the extent, as the memory of a row past it is there too.
 */
extern "C" __global__ void rms_norm_wide(Extent extent, i64 width, float eps, float offset, const T0* x, i64 x_row,
                                         const T1* weight, T0* y, i64 y_row) {
    launch_dependents_and_wait();
    int step = blockDim.x * 8, first = threadIdx.x * 8;
    float value[2][8], gain[2][8];
    Eight<T0> next[2];
    bool kept = width <= 2 * step;
    auto read = [&](i64 row) {
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            int i = first + piece * step;
            if (i < width) next[piece].read(x + row * x_row + blockIdx.x * width + i);
        }
    };
    const Extent::Loaded loaded = extent.load();
    if (kept) {
        read(blockIdx.y);
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            int i = first + piece * step;
            if (i < width) load_eight(weight + i, gain[piece]);
        }
    }
    i64 rows = extent.count(loaded);
    FOR_ROWS(row, rows) {
        const T0* from = x + row * x_row + blockIdx.x * width;
        T0* to = y + row * y_row + blockIdx.x * width;
        float squares = 0.0f;
        auto add = [&](const float (&value)[8]) {
#pragma unroll
            for (int k = 0; k < 8; ++k) squares += value[k] * value[k];
        };
        auto write = [&](i64 i, float (&value)[8], const float (&gain)[8], float scale) {
#pragma unroll
            for (int k = 0; k < 8; ++k) value[k] = value[k] * scale * (gain[k] + offset);
            store_eight(to + i, value);
        };
        if (kept) {
#pragma unroll
            for (int piece = 0; piece < 2; ++piece) next[piece].widen_to(value[piece]);
            if (row + gridDim.y < rows) read(row + gridDim.y);
#pragma unroll
            for (int piece = 0; piece < 2; ++piece) {
                if (first + piece * step < width) add(value[piece]);
            }
        } else {
            for (i64 i = first; i < width; i += step) {
                load_eight(from + i, value[0]);
                add(value[0]);
            }
        }
        float scale = 1.0f / sqrtf(block_sum(squares) / (float)width + eps);
        if (kept) {
#pragma unroll
            for (int piece = 0; piece < 2; ++piece) {
                if (first + piece * step < width) write(first + piece * step, value[piece], gain[piece], scale);
            }
        } else {
            for (i64 i = first; i < width; i += step) {
                load_eight(from + i, value[0]);
                load_eight(weight + i, gain[0]);
                write(i, value[0], gain[0], scale);
            }
        }
    }
}

/* r = a + alpha * b, y = rms_norm(r): the norm reads the sum before it is rounded. */
extern "C" __global__ void add_rms_norm(Extent extent, i64 columns, i64 width, float alpha, float eps, float offset,
                                        const T0* a, i64 a_row, const T0* b, i64 b_row, const T1* weight, T0* r, i64 r_row,
                                        T0* y, i64 y_row) {
    launch_dependents_and_wait();
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
    launch_dependents_and_wait();
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
