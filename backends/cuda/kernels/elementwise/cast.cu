/*
 * cast: y = round(x), one thread per element. Equal types copy bits, which is how `columns` copies a range of columns.
 *
 * Grid: (column chunks of 256 threads, rows up to 65535). Every element is read once and written once.
 */
template <typename From, typename To> struct Convert {
    static __device__ To apply(From x) { return narrow<To>(widen(x)); }
};
template <typename T> struct Convert<T, T> {
    static __device__ T apply(T x) { return x; }
};

extern "C" __global__ void cast(const __grid_constant__ CastParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, p.columns) p.y.row(row)[i] = Convert<X, Y>::apply(p.x.row(row)[i]);
    }
}
