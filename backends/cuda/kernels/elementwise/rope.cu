/*
 * rope: one thread per pair of a head, or per element that is only copied.
 *
 * Grid: (chunks of 256 of a row, rows up to 65535). Reads and writes each element once. The angle is a product rounded
 * once; sine and cosine reduce their argument exactly, however large it is. NEIGHBOURS says which elements make a pair.
 */
extern "C" __global__ void rope(const __grid_constant__ RopeParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count(), items = p.size - p.pairs;
    FOR_ROWS(row, rows) {
        int position = p.positions[row];
        if (position < 0) continue;
        FOR_COLUMNS(i, p.heads * items) {
            /* A row has fewer than 2^31 elements, and long divisions are slow. */
            i64 head = (u32)i / (u32)items * p.size, item = (u32)i % (u32)items;
            const T0* from = p.x.row(row) + head;
            T0* to = p.y.row(row) + head;
            if (item >= p.pairs) {
                to[item + p.pairs] = from[item + p.pairs];
                continue;
            }
            i64 first = NEIGHBOURS ? 2 * item : item, second = NEIGHBOURS ? 2 * item + 1 : item + p.pairs;
            float angle = __fmul_rn((float)position, p.frequencies[item]);
            float sine = sinf(angle), cosine = cosf(angle);
            float a = widen(from[first]), b = widen(from[second]);
            to[first] = narrow<T0>(p.scale * (a * cosine - b * sine));
            to[second] = narrow<T0>(p.scale * (b * cosine + a * sine));
        }
    }
}
