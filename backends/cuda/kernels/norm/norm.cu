/*
 * rms_norm, layer_norm, add_rms_norm: one block per row (and group).
 *
 * Grid: (groups of a row, rows up to 65535), up to 1024 threads. Every element is read from memory once, and again from the L1;
 * the result is written once. Sums are in f32: each thread adds its own elements, then the block adds in a fixed order, so a
 * row's result depends on that row only.
 */
extern "C" __global__ void rms_norm(const __grid_constant__ RmsNormParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        const X* from = p.x.row(row) + blockIdx.x * p.width;
        X* to = p.y.row(row) + blockIdx.x * p.width;
        float squares = 0.0f;
        for (i64 i = threadIdx.x; i < p.width; i += blockDim.x) {
            float value = widen(from[i]);
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(block_sum(squares) / (float)p.width + p.eps);
        for (i64 i = threadIdx.x; i < p.width; i += blockDim.x) {
            to[i] = narrow<X>(widen(from[i]) * scale * (widen(p.weight[i]) + p.weight_offset));
        }
    }
}

/*
 * The same, 8 elements at a time, with as many blocks as are resident at once. A thread that has at most two vectors of a row
 * keeps the norm's weights in registers, and loads the next row before it adds up the current one; the first row is loaded before
 * the extent is known, as rows past it have memory too.
 */
extern "C" __global__ void rms_norm_wide(const __grid_constant__ RmsNormParams p) {
    launch_dependents_and_wait();
    int step = blockDim.x * 8, first = threadIdx.x * 8;
    float value[2][8], weight[2][8];
    Eight<X> next[2];
    bool kept = p.width <= 2 * step;
    auto read = [&](i64 row) {
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            int i = first + piece * step;
            if (i < p.width) next[piece].read(p.x.row(row) + blockIdx.x * p.width + i);
        }
    };
    const Extent::Loaded loaded = p.extent.load();
    if (kept) {
        read(blockIdx.y);
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            int i = first + piece * step;
            if (i < p.width) load_eight(p.weight + i, weight[piece]);
        }
    }
    i64 rows = p.extent.count(loaded);
    FOR_ROWS(row, rows) {
        const X* from = p.x.row(row) + blockIdx.x * p.width;
        X* to = p.y.row(row) + blockIdx.x * p.width;
        float squares = 0.0f;
        auto add = [&](const float (&value)[8]) {
#pragma unroll
            for (int k = 0; k < 8; ++k) squares += value[k] * value[k];
        };
        auto write = [&](i64 i, float (&value)[8], const float (&weight)[8], float scale) {
#pragma unroll
            for (int k = 0; k < 8; ++k) value[k] = value[k] * scale * (weight[k] + p.weight_offset);
            store_eight(to + i, value);
        };
        if (kept) {
#pragma unroll
            for (int piece = 0; piece < 2; ++piece) next[piece].widen_to(value[piece]);
            if (row + gridDim.y < rows) read(row + gridDim.y);
#pragma unroll
            for (int piece = 0; piece < 2; ++piece) {
                if (first + piece * step < p.width) add(value[piece]);
            }
        } else {
            for (i64 i = first; i < p.width; i += step) {
                load_eight(from + i, value[0]);
                add(value[0]);
            }
        }
        float scale = 1.0f / sqrtf(block_sum(squares) / (float)p.width + p.eps);
        if (kept) {
#pragma unroll
            for (int piece = 0; piece < 2; ++piece) {
                if (first + piece * step < p.width) write(first + piece * step, value[piece], weight[piece], scale);
            }
        } else {
            for (i64 i = first; i < p.width; i += step) {
                load_eight(from + i, value[0]);
                load_eight(p.weight + i, weight[0]);
                write(i, value[0], weight[0], scale);
            }
        }
    }
}

/* r = a + alpha * b, y = rms_norm(r): the norm uses the sum before it is rounded. */
extern "C" __global__ void add_rms_norm(const __grid_constant__ AddRmsNormParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        i64 start = blockIdx.x * p.width;
        const X* first = p.a.row(row) + start;
        const X* second = p.b.row(row) + start;
        float squares = 0.0f;
        for (i64 i = threadIdx.x; i < p.width; i += blockDim.x) {
            float value = widen(first[i]) + p.alpha * widen(second[i]);
            squares += value * value;
            p.r.row(row)[start + i] = narrow<X>(value);
        }
        float scale = 1.0f / sqrtf(block_sum(squares) / (float)p.width + p.eps);
        for (i64 i = threadIdx.x; i < p.width; i += blockDim.x) {
            float value = widen(first[i]) + p.alpha * widen(second[i]);
            p.y.row(row)[start + i] = narrow<X>(value * scale * (widen(p.weight[i]) + p.weight_offset));
        }
    }
}

extern "C" __global__ void layer_norm(const __grid_constant__ LayerNormParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        const X* from = p.x.row(row);
        float sum = 0.0f;
        for (i64 i = threadIdx.x; i < p.width; i += blockDim.x) sum += widen(from[i]);
        float mean = block_sum(sum) / (float)p.width;
        /* Corrects the mean for its rounding error, which for a large mean is not small compared with the deviations. */
        float squares = 0.0f, rest = 0.0f;
        for (i64 i = threadIdx.x; i < p.width; i += blockDim.x) {
            float value = widen(from[i]) - mean;
            squares += value * value;
            rest += value;
        }
        squares = block_sum(squares);
        rest = block_sum(rest) / (float)p.width;
        float variance = squares / (float)p.width - rest * rest;
        float scale = 1.0f / sqrtf((variance > 0.0f || is_nan(variance) ? variance : 0.0f) + p.eps);
        for (i64 i = threadIdx.x; i < p.width; i += blockDim.x) {
            float value = ((widen(from[i]) - mean) - rest) * scale;
            p.y.row(row)[i] = narrow<X>(value * or_else(p.weight, i, 1.0f) + or_else(p.bias, i, 0.0f));
        }
    }
}

/*
 * The same, 8 elements at a time, with as many blocks as are resident at once. A thread that has at most VECTORS vectors of
 * a row keeps them in registers; longer rows are read again, from the L1 or the L2. Rows up to 32 * VECTORS * 8 elements have a warp each.
 */
extern "C" __global__ void layer_norm_wide(const __grid_constant__ LayerNormParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    int step = blockDim.x * 8, first = threadIdx.x * 8;
    bool kept = p.width <= VECTORS * step;
    FOR_ROWS(row, rows) {
        const X* from = p.x.row(row);
        X* to = p.y.row(row);
        float value[VECTORS][8];
        if (kept) {
#pragma unroll
            for (int piece = 0; piece < VECTORS; ++piece) {
                if (first + piece * step < p.width) load_eight(from + first + piece * step, value[piece]);
            }
        }
        auto for_each_vector = [&](auto use) {
            if (kept) {
#pragma unroll
                for (int piece = 0; piece < VECTORS; ++piece) {
                    if (first + piece * step < p.width) use(first + piece * step, value[piece]);
                }
            } else {
                for (i64 i = first; i < p.width; i += step) {
                    load_eight(from + i, value[0]);
                    use(i, value[0]);
                }
            }
        };
        float sum = 0.0f;
        for_each_vector([&](i64, const float (&x)[8]) {
#pragma unroll
            for (int k = 0; k < 8; ++k) sum += x[k];
        });
        float mean = block_sum(sum) / (float)p.width;
        /* Corrects the mean for its rounding error, which for a large mean is not small compared with the deviations. */
        float squares = 0.0f, rest = 0.0f;
        for_each_vector([&](i64, const float (&x)[8]) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                float deviation = x[k] - mean;
                squares += deviation * deviation;
                rest += deviation;
            }
        });
        squares = block_sum(squares);
        rest = block_sum(rest) / (float)p.width;
        float variance = squares / (float)p.width - rest * rest;
        float scale = 1.0f / sqrtf((variance > 0.0f || is_nan(variance) ? variance : 0.0f) + p.eps);
        for_each_vector([&](i64 i, const float (&x)[8]) {
            float weight[8], y[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) y[k] = ((x[k] - mean) - rest) * scale;
            if (p.weight) {
                load_eight(p.weight + i, weight);
#pragma unroll
                for (int k = 0; k < 8; ++k) y[k] *= weight[k];
            }
            if (p.bias) {
                load_eight(p.bias + i, weight);
#pragma unroll
                for (int k = 0; k < 8; ++k) y[k] += weight[k];
            }
            store_eight(to + i, y);
        });
    }
}
