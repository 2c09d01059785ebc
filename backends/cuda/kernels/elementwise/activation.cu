/*
 * activation and gated_activation: one thread per element of the result.
 *
 * Grid: (column chunks of 256, rows up to 65535). Reads each operand once, writes the result once. LAYOUT is 1
 * separate, 2 concatenated, 3 interleaved. Comparisons are written so that NaN goes through.
 */

extern "C" __global__ void activation(Extent extent, i64 columns, float limit, const T0* x, i64 x_row, const T1* bias, T0* y,
                                      i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) {
            float value = widen(x[row * x_row + i]) + or_else(bias, i, 0.0f);
            if (limit > 0.0f && value > limit) value = limit;
            y[row * y_row + i] = narrow<T0>(apply(value));
        }
    }
}

#ifdef LAYOUT
/* The function of the gate times the other half, both bounded if there is a limit. */
__device__ inline float combine(float first, float second, float limit) {
    if (limit > 0.0f) {
        if (first > limit) first = limit;
        if (second > limit) second = limit;
        if (second < -limit) second = -limit;
    }
    return apply(first) * second;
}

extern "C" __global__ void gated_activation(Extent extent, i64 columns, float limit, const T0* gate, i64 gate_row,
                                            const T0* up, i64 up_row, const T1* bias, T0* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) {
            i64 g = LAYOUT == 3 ? 2 * i : i;
            i64 u = LAYOUT == 3 ? 2 * i + 1 : columns + i;
            float first = widen(gate[row * gate_row + g]) + or_else(bias, g, 0.0f);
            float second = widen(LAYOUT == 1 ? up[row * up_row + i] : gate[row * gate_row + u]) + or_else(bias, u, 0.0f);
            y[row * y_row + i] = narrow<T0>(combine(first, second, limit));
        }
    }
}

/* The same, 8 elements of the result for a thread, in loads of 16 bytes: for many rows. */
extern "C" __global__ void gated_activation_wide(Extent extent, i64 columns, float limit, const T0* gate, i64 gate_row,
                                                 const T0* up, i64 up_row, const T1* bias, T0* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(item, columns / 8) {
            i64 i = item * 8;
            const T0* own = gate + row * gate_row;
            float first[8], second[8];
            if (LAYOUT == 3) {
                load_eight(own + 2 * i, first);
                load_eight(own + 2 * i + 8, second);
                float both[16];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    both[k] = first[k];
                    both[k + 8] = second[k];
                }
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    first[k] = both[2 * k];
                    second[k] = both[2 * k + 1];
                }
            } else {
                load_eight(own + i, first);
                load_eight(LAYOUT == 1 ? up + row * up_row + i : own + columns + i, second);
            }
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                i64 at = i + k;
                first[k] += or_else(bias, LAYOUT == 3 ? 2 * at : at, 0.0f);
                second[k] += or_else(bias, LAYOUT == 3 ? 2 * at + 1 : columns + at, 0.0f);
                first[k] = combine(first[k], second[k], limit);
            }
            store_eight(y + row * y_row + i, first);
        }
    }
}
#endif
