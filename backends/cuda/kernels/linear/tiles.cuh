/*
 * What products share that walk over tiles of rows by OUTPUTS outputs with wgmma on Hopper (sm_90a): the order of
 * tiles, and the way from sums to vectors.
 */
/* Tiles of rows that are walked together. */
#define BAND 8

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* The number of a tile among those of rows and among those of outputs: in bands of BAND tiles of rows. */
struct Tile { int row, output; };

__device__ inline Tile tile_at(int number, int row_tiles, int output_tiles) {
    int per_band = BAND * output_tiles, band = number / per_band, at = number % per_band;
    int height = row_tiles - band * BAND < BAND ? row_tiles - band * BAND : BAND;
    return {band * BAND + at % height, at / height};
}

/* Lane q of a quad has word q of four vectors; gets vector q. Twice is nothing. */
__device__ inline void transpose(u32 (&v)[4], int q) {
    bool odd = q & 1, high = q & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 other = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
        (odd ? v[i] : v[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 other = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2);
        (high ? v[i] : v[i + 2]) = other;
    }
}
#endif
