/*
 * By how much a step turns queries and keys: cosine and sine of each row's position times each frequency. Rows past the extent are
 * there too: what comes of them is not used.
 */
extern "C" __global__ void turns(const int* positions, const float* frequencies, i64 rows, i64 pairs, float2* table) {
    take_turn();
    FOR_COLUMNS(item, rows * pairs) {
        /* There are fewer than 2^31, and long divisions are slow. */
        u32 row = (u32)item / (u32)pairs, pair = (u32)item % (u32)pairs;
        float angle = __fmul_rn((float)positions[row], frequencies[pair]);
        table[item] = {cosf(angle), sinf(angle)};
    }
}
