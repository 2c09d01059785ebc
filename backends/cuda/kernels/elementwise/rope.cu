/*
 * rope: rotary embedding, one thread for each pair of a head and for each element that is copied unrotated.
 *
 * Grid: (chunks of 256 items of a row, rows up to 65535). Every element is read once and written once. The angle is a product
 * rounded once; sine and cosine reduce their argument exactly, however large it is. With NEIGHBOURS a pair is two neighbouring
 * elements, otherwise two elements that are `pairs` apart.
 */
extern "C" __global__ void rope(const __grid_constant__ RopeParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count(), items = p.size - p.pairs;
    FOR_ROWS(row, rows) {
        int position = p.positions[row];
        if (position < 0) continue;
        FOR_COLUMNS(i, p.heads * items) {
            /* A row has fewer than 2^31 elements, and 64-bit divisions are slow. */
            i64 head = (u32)i / (u32)items * p.size, item = (u32)i % (u32)items;
            const X* from = p.x.row(row) + head;
            X* to = p.y.row(row) + head;
            if (item >= p.pairs) {
                to[item + p.pairs] = from[item + p.pairs];
                continue;
            }
            i64 first = NEIGHBOURS ? 2 * item : item, second = NEIGHBOURS ? 2 * item + 1 : item + p.pairs;
            float angle = __fmul_rn((float)position, p.frequencies[item]);
            float sine = sinf(angle), cosine = cosf(angle);
            float a = widen(from[first]), b = widen(from[second]);
            to[first] = narrow<X>(p.scale * (a * cosine - b * sine));
            to[second] = narrow<X>(p.scale * (b * cosine + a * sine));
        }
    }
}
