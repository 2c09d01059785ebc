/*
 * activation and gated_activation: y = f(x + bias), and y = f(gate + bias) * (up + bias + offset).
 *
 * Grid: (column chunks of 256 threads, rows up to 65535). A thread computes one element of the result, or 8 with
 * `gated_activation_wide`, in loads of 16 bytes. Every operand is read once and the result written once. LAYOUT says where gate
 * and up are: 1 in separate tensors, 2 concatenated, 3 interleaved. Comparisons are written so that NaN propagates.
 */

#ifndef LAYOUT
extern "C" __global__ void activation(const __grid_constant__ ActivationParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, p.columns) {
            float value = widen(p.x.row(row)[i]) + or_else(p.bias, i, 0.0f);
            if (p.limit > 0.0f && value > p.limit) value = p.limit;
            p.y.row(row)[i] = narrow<X>(apply(value));
        }
    }
}
#else
extern "C" __global__ void gated_activation(const __grid_constant__ GatedActivationParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, p.columns) {
            i64 g = LAYOUT == 3 ? 2 * i : i;
            i64 u = LAYOUT == 3 ? 2 * i + 1 : p.columns + i;
            float gate = widen(p.gate.row(row)[g]) + or_else(p.bias, g, 0.0f);
            float up = widen(LAYOUT == 1 ? p.up.row(row)[i] : p.gate.row(row)[u]) + or_else(p.bias, u, 0.0f);
            p.y.row(row)[i] = narrow<X>(gated(gate, up, p.limit, p.up_offset));
        }
    }
}

extern "C" __global__ void gated_activation_wide(const __grid_constant__ GatedActivationParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(item, p.columns / 8) {
            i64 i = item * 8;
            const X* own = p.gate.row(row);
            float gate[8], up[8];
            if (LAYOUT == 3) {
                load_eight(own + 2 * i, gate);
                load_eight(own + 2 * i + 8, up);
                float both[16];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    both[k] = gate[k];
                    both[k + 8] = up[k];
                }
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    gate[k] = both[2 * k];
                    up[k] = both[2 * k + 1];
                }
            } else {
                load_eight(own + i, gate);
                load_eight(LAYOUT == 1 ? p.up.row(row) + i : own + p.columns + i, up);
            }
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                i64 at = i + k;
                gate[k] += or_else(p.bias, LAYOUT == 3 ? 2 * at : at, 0.0f);
                up[k] += or_else(p.bias, LAYOUT == 3 ? 2 * at + 1 : p.columns + at, 0.0f);
                gate[k] = gated(gate[k], up[k], p.limit, p.up_offset);
            }
            store_eight(p.y.row(row) + i, gate);
        }
    }
}
#endif
