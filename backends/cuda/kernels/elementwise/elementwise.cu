/*
 * add, cast, fill, gather_rows: one thread per element, or per 8 of them for sums of many rows.
 *
 * Grid: (column chunks of 256, rows up to 65535). Reads each operand once, writes the result once; any row stride. Loads
 * are as wide as an element, coalesced over the warp: at batch 1 these kernels are bounded by their launch. add_wide has
 * loads of 16 bytes.
 */

#ifndef FILL_ONLY
/* y = a + alpha * (b + bias) + c */
extern "C" __global__ void add(Extent extent, i64 columns, float alpha, const T0* a, i64 a_row, const T0* b, i64 b_row,
                               const T0* c, i64 c_row, const T1* bias, T0* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) {
            float sum = widen(b[row * b_row + i]) + or_else(bias, i, 0.0f);
            sum = widen(a[row * a_row + i]) + alpha * sum;
            if (c) sum += widen(c[row * c_row + i]);
            y[row * y_row + i] = narrow<T0>(sum);
        }
    }
}

/* The same, 8 elements for a thread, in loads of 16 bytes: for many rows. */
extern "C" __global__ void add_wide(Extent extent, i64 columns, float alpha, const T0* a, i64 a_row, const T0* b, i64 b_row,
                                    const T0* c, i64 c_row, const T1* bias, T0* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(item, columns / 8) {
            i64 i = item * 8;
            float first[8], second[8], third[8] = {};
            load_eight(a + row * a_row + i, first);
            load_eight(b + row * b_row + i, second);
            if (c) load_eight(c + row * c_row + i, third);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                first[k] = first[k] + alpha * (second[k] + or_else(bias, i + k, 0.0f));
                if (c) first[k] += third[k];
            }
            store_eight(y + row * y_row + i, first);
        }
    }
}

/* y = round(x). The same type copies bits. */
template <typename From, typename To> struct Convert {
    static __device__ To apply(From x) { return narrow<To>(widen(x)); }
};
template <typename T> struct Convert<T, T> {
    static __device__ T apply(T x) { return x; }
};

extern "C" __global__ void cast(Extent extent, i64 columns, const T0* x, i64 x_row, T1* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) y[row * y_row + i] = Convert<T0, T1>::apply(x[row * x_row + i]);
    }
}

#endif

#ifdef FILL_ONLY
/* The value comes as the bits of an element, whatever its type: T0 is an unsigned integer of its size. */
extern "C" __global__ void fill(Extent extent, i64 columns, u32 bits, T0* x, i64 x_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) x[row * x_row + i] = (T0)bits;
    }
}

#endif

#ifndef FILL_ONLY
/* y[r] = x[rows[r]]; indices outside are skipped. */
extern "C" __global__ void gather_rows(Extent extent, Extent source, i64 columns, const T0* x, i64 x_row, const int* index,
                                       T0* y, i64 y_row) {
    launch_dependents_and_wait();
    i64 rows = extent.count(), limit = source.count();
    FOR_ROWS(row, rows) {
        i64 from = index[row];
        if (from < 0 || from >= limit) continue;
        FOR_COLUMNS(i, columns) y[row * y_row + i] = x[from * x_row + i];
    }
}
#endif
