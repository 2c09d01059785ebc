/*
 * rope: rotary embedding. Every element is read once and written once. The angle is a product rounded once; sine and cosine reduce
 * their argument exactly, however large it is. With NEIGHBOURS a pair is two neighbouring elements, otherwise two elements that are
 * `pairs` apart.
 */

/* Rotates a pair. Roundings are explicit, so that both kernels agree to the bit. */
__device__ inline void turn(float& a, float& b, float angle, float scale) {
    float sine = sinf(angle), cosine = cosf(angle), first = a;
    a = __fmul_rn(scale, __fmaf_rn(first, cosine, -__fmul_rn(b, sine)));
    b = __fmul_rn(scale, __fmaf_rn(b, cosine, __fmul_rn(first, sine)));
}

/* One thread for each pair of a head and for each element that is copied unrotated. Grid: (chunks of 256 items of a row, rows up to 65535). */
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
            float a = widen(from[first]), b = widen(from[second]);
            turn(a, b, angle, p.scale);
            to[first] = narrow<X>(a);
            to[second] = narrow<X>(b);
        }
    }
}

#if !NEIGHBOURS
/*
 * The same with 8 pairs, or 8 elements that are not rotated, per thread: heads, their rotated parts and rows of multiples of 8
 * elements. Grid: blocks of 256 vectors, those of all rows in turn. One thread computes 8 sines and cosines, so this is for many rows.
 */
extern "C" __global__ void rope_wide(const __grid_constant__ RopeParams p) {
    launch_dependents_and_wait();
    i64 in_head = (p.size - p.pairs) / 8, in_row = p.heads * in_head, all = p.extent.count() * in_row;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (i64)gridDim.x * blockDim.x) {
        i64 row = i / in_row, vector = i - row * in_row;
        int position = p.positions[row];
        if (position < 0) continue;
        i64 head = (u32)vector / (u32)in_head * p.size, item = (u32)vector % (u32)in_head * 8;
        const X* from = p.x.row(row) + head + item;
        X* to = p.y.row(row) + head + item;
        if (item >= p.pairs) {
#pragma unroll
            for (int k = 0; k < 8; k += Lanes<X>::count) store_vector(to + p.pairs + k, load_vector(from + p.pairs + k));
            continue;
        }
        float a[8], b[8];
        load_eight(from, a);
        load_eight(from + p.pairs, b);
#pragma unroll
        for (int k = 0; k < 8; ++k) turn(a[k], b[k], __fmul_rn((float)position, p.frequencies[item + k]), p.scale);
        store_eight(to, a);
        store_eight(to + p.pairs, b);
    }
}
#endif
