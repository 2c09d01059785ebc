/*
 * add: y = a + alpha * (b + bias) + c.
 *
 * Grid: (column chunks of 256 threads, rows up to 65535). `add` gives a thread one element, `add_wide` 8 in loads of 16 bytes. Every
 * operand is read once and the result written once, so the floor is the bytes of the operands over the memory bandwidth; at batch 1
 * it is the launch. Figures: docs/src/performance/cuda.md.
 */

extern "C" __global__ void add(const __grid_constant__ AddParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(i, p.columns) {
            float sum = widen(p.b.row(row)[i]) + or_else(p.bias, i, 0.0f);
            sum = widen(p.a.row(row)[i]) + p.alpha * sum;
            if (p.c.first) sum += widen(p.c.row(row)[i]);
            p.y.row(row)[i] = narrow<X>(sum);
        }
    }
}

extern "C" __global__ void add_wide(const __grid_constant__ AddParams p) {
    launch_dependents_and_wait();
    i64 rows = p.extent.count();
    FOR_ROWS(row, rows) {
        FOR_COLUMNS(item, p.columns / 8) {
            i64 i = item * 8;
            float first[8], second[8], third[8] = {};
            load_eight(p.a.row(row) + i, first);
            load_eight(p.b.row(row) + i, second);
            if (p.c.first) load_eight(p.c.row(row) + i, third);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                first[k] = first[k] + p.alpha * (second[k] + or_else(p.bias, i + k, 0.0f));
                if (p.c.first) first[k] += third[k];
            }
            store_eight(p.y.row(row) + i, first);
        }
    }
}
