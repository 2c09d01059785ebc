/*
 * Applies the epilogue to a product in scratch memory: one thread per pair of outputs (see epilogue.cuh) of a row, or per 8
 * results if WIDE. Grid: (chunks of 256 pairs, rows up to 65535). Reads the product and the residual once, writes the result
 * once.
 */
#if !WIDE
extern "C" __global__ void apply_epilogue_rows(Extent extent, const X* product, i64 product_row, EpilogueParams e) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(item, (e.outputs + 15) / 16 * 8 + 8) {
            Rows place = rows_of(e, (int)(item / 8));
            Ready ready = get_ready(e, place, (int)(item % 8), row);
            turn_ready(e, place, ready);
            const X* from = product + row * product_row;
            float a = ready.first < (int)e.outputs ? widen(from[ready.first]) : 0.0f;
            float b = ready.second < (int)e.outputs ? widen(from[ready.second]) : 0.0f;
            apply_epilogue(e, place, ready, row, a, b);
        }
    }
}
#else
/*
 * The same, with 8 results per thread, in loads of 16 bytes. Grid: (chunks of 2048 results, rows up to 65535). Measured figures:
 * docs/src/performance/cuda.md.
 */
extern "C" __global__ void apply_epilogue_wide(Extent extent, const X* product, i64 product_row, EpilogueParams e) {
    launch_dependents_and_wait();
    i64 rows = extent.count(), results = EPILOGUE == GATED ? e.outputs / 2 : e.outputs;
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(item, results / 8) {
            i64 i = item * 8;
            const X* from = product + row * product_row;
            float value[8], other[8];
#if EPILOGUE == GATED && INTERLEAVED
            float both[2][8];
            load_eight(from + 2 * i, both[0]);
            load_eight(from + 2 * i + 8, both[1]);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                value[k] = both[k / 4][k % 4 * 2];
                other[k] = both[k / 4][k % 4 * 2 + 1];
            }
#else
            load_eight(from + i, value);
#if EPILOGUE == GATED
            load_eight(from + results + i, other);
#elif EPILOGUE == ADDED
            load_eight(e.added + row * e.added_row + i, other);
#endif
#endif
#pragma unroll
            for (int k = 0; k < 8; ++k) {
#if EPILOGUE == ADDED
                value[k] = other[k] + e.alpha * value[k];
#elif EPILOGUE == ACTIVATED || EPILOGUE == GATED
                if (e.limit > 0.0f && value[k] > e.limit) value[k] = e.limit;
                value[k] = apply(value[k]);
#endif
#if EPILOGUE == GATED
                if (e.limit > 0.0f && other[k] > e.limit) other[k] = e.limit;
                if (e.limit > 0.0f && other[k] < -e.limit) other[k] = -e.limit;
                value[k] *= other[k];
#endif
            }
            store_eight(e.y + row * e.y_row + i, value);
        }
    }
}
#endif
