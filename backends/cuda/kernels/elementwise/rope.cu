/*
 * rope: one thread per pair of a head, or per element that is only copied.
 *
 * Grid: (chunks of 256 of a row, rows up to 65535). Reads and writes each element once. The angle is a product rounded
 * once; sine and cosine reduce their argument exactly, however large it is. NEIGHBOURS says which elements make a pair.
 */
extern "C" __global__ void rope(Extent extent, i64 heads, i64 size, i64 pairs, float scale, const T0* x, i64 x_row,
                                const int* positions, const float* frequencies, T0* y, i64 y_row) {
    take_turn();
    i64 rows = extent.count(), items = size - pairs;
    FOR_ROWS(row, rows) {
        int position = positions[row];
        if (position < 0) continue;
        FOR_COLUMNS(i, heads * items) {
            /* A row has fewer than 2^31 elements, and long divisions are slow. */
            i64 head = (u32)i / (u32)items * size, item = (u32)i % (u32)items;
            const T0* from = x + row * x_row + head;
            T0* to = y + row * y_row + head;
            if (item >= pairs) {
                to[item + pairs] = from[item + pairs];
                continue;
            }
            i64 first = NEIGHBOURS ? 2 * item : item, second = NEIGHBOURS ? 2 * item + 1 : item + pairs;
            float angle = __fmul_rn((float)position, frequencies[item]);
            float sine = sinf(angle), cosine = cosf(angle);
            float p = widen(from[first]), q = widen(from[second]);
            to[first] = narrow<T0>(scale * (p * cosine - q * sine));
            to[second] = narrow<T0>(scale * (q * cosine + p * sine));
        }
    }
}
