/*
 * moe_combine: the weighted sum of a token's slots, in their order. Skipped slots are not read.
 *
 * Grid: (chunks of columns for 256 threads, tokens up to 65535). A thread computes one element of the result, or 8 with
 * `moe_combine_wide`, in loads of 16 bytes. Every slot is read once and the result written once: floor (slots + 1) T H elements.
 */

/* The weight of a slot; `skipped` if its expert is not on this device. */
__device__ inline float weight_of(const MoeCombineParams& p, i64 row, int slot, bool& skipped) {
    int expert = p.experts.row(row)[slot];
    skipped = expert < 0 || (u32)expert - (u32)p.first_expert >= (u32)p.count;
    return skipped ? 0.0f : p.weights.row(row)[slot];
}

extern "C" __global__ void moe_combine(const __grid_constant__ MoeCombineParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, p.columns) {
            float sum = 0.0f;
#pragma unroll 4
            for (int slot = 0; slot < SLOTS; ++slot) {
                bool skipped;
                float weight = weight_of(p, row, slot, skipped);
                if (!skipped) sum += weight * widen(p.x.row(row)[slot * p.columns + i]);
            }
            p.y.row(row)[i] = narrow<X>(sum);
        }
    }
}

extern "C" __global__ void moe_combine_wide(const __grid_constant__ MoeCombineParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(item, p.columns / 8) {
            float sum[8] = {};
#pragma unroll 4
            for (int slot = 0; slot < SLOTS; ++slot) {
                bool skipped;
                float weight = weight_of(p, row, slot, skipped);
                if (skipped) continue;
                float own[8];
                load_eight(p.x.row(row) + slot * p.columns + item * 8, own);
#pragma unroll
                for (int k = 0; k < 8; ++k) sum[k] += weight * own[k];
            }
            store_eight(p.y.row(row) + item * 8, sum);
        }
    }
}
