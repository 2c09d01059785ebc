/*
 * Unpacks weights to dense rows of another element type, for products of many rows. `unpack` is for dense weights, one thread per
 * element; `unpack_integers` processes 16 bytes of packed integers per thread, a step of 8 rows per warp, and writes runs of 4, 8
 * or 16 columns. Grids: (chunks of 256 of a row, rows up to 65535); (blocks of 8 steps, units up to 65535). `first` is the first
 * row of a unit. Reads the packed rows once and writes two or four bytes per element once, which is the floor.
 */
#if FORMAT < FORMAT_PACKED
extern "C" __global__ void unpack(i64 first, i64 rows, i64 columns, Weight weight, Y* y, i64 y_row) {
    launch_dependents_and_wait();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, columns) y[row * y_row + i] = narrow<Y>(weight.at(first + row, i));
    }
}
#else
#define OWN (128 / Weight::bits)
#define SPAN (4 * OWN)
#define RUN (Weight::bits == 4 ? 8 : Weight::group ? 4 : 16)

extern "C" __global__ void unpack_integers(i64 first, i64 rows, i64 columns, Weight weight, Y* y, i64 y_row) {
    launch_dependents_and_wait();
    int lane = threadIdx.x % 32, part = lane % 4;
    i64 steps = (columns + SPAN - 1) / SPAN;
    FOR_ROWS(unit, (rows + 7) / 8) {
        i64 own = unit * 8 + lane / 4, row = first + own;
        if (own >= rows) continue;
        for (i64 step = (i64)blockIdx.x * 8 + threadIdx.x / 32; step < steps; step += (i64)gridDim.x * 8) {
            Vector v = load_stream(weight.elements + row / 8 * weight.row_bytes + step * 512 + part * 128 + row % 8 * 16);
#pragma unroll
            for (int run = 0; run < OWN / RUN; ++run) {
                i64 column = step * SPAN + (RUN == 16 ? part * 16 : run * (4 * RUN) + part * RUN);
                if (column >= columns) break;
                i64 group = Weight::group ? column / (Weight::group ? Weight::group : 1) : 0;
                float scale = weight.number(row, group, 0), second = Weight::numbers == 2 ? weight.number(row, group, 1) : 0.0f;
                Y* to = y + own * y_row + column;
                float out[RUN];
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    const int at = run * RUN + i;
                    out[i] = Weight::scaled(Weight::element(v.word[at / Weight::per_word], at % Weight::per_word), scale, second);
                }
                if (RUN >= 8 && column + RUN <= columns) {
#pragma unroll
                    for (int at = 0; at + 8 <= RUN; at += 8) {
                        float eight[8];
#pragma unroll
                        for (int i = 0; i < 8; ++i) eight[i] = out[(at + i) % RUN];
                        store_eight(to + at, eight);
                    }
                    continue;
                }
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    if (column + i < columns) to[i] = narrow<Y>(out[i]);
                }
            }
        }
    }
}
#endif
