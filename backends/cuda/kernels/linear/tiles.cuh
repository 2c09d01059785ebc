/*
 * Shared code of the wgmma kernels (sm_90a) that loop over tiles of rows by OUTPUTS outputs: the order of tiles, the conversion
 * of accumulators to vectors, and the residual.
 */
/* Tiles of rows in a band. */
#define BAND 8

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* The row and output coordinates of a tile, in bands of BAND tiles of rows. */
struct Tile { int row, output; };

__device__ inline Tile tile_at(int number, int row_tiles, int output_tiles) {
    int per_band = BAND * output_tiles, band = number / per_band, at = number % per_band;
    int height = row_tiles - band * BAND < BAND ? row_tiles - band * BAND : BAND;
    return {band * BAND + at % height, at / height};
}

/* Transposes 4 by 4 words within a quad: lane q has word q of four vectors and gets vector q. The function is its own inverse. */
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

/* The residual of a lane's two rows, 8 apart: 8 of every 32 results, in the order in which they are written. Loaded ahead. */
template <int Results> struct Residuals {
    Vector of[(Results + 31) / 32][2];

    /* Loads the residual of the tile's results, from number `first` of `results`; `row` is one of `rows`. Parameters of the
     * kernel are compared here, in place. */
    template <typename T, typename Count>
    __device__ inline void read(const T* from, i64 pitch, int row, int rows, int first, const Count& results, int q) {
#pragma unroll
        for (int block = 0; block < (Results + 31) / 32; ++block) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int output = first + block * 32 + q * 8;
                bool real = row + h * 8 < rows && output < (int)results && block * 32 + q * 8 < Results;
                of[block][h] = real ? load_vector(from + (row + h * 8) * pitch + output) : Vector{};
            }
        }
    }

    /* The residuals of 32 results in the layout of the accumulators: in pairs, or, with Ordered, as loaded. */
    template <bool Ordered = false> __device__ inline void as_sums(u32 (&words)[2][4], int block, int q) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[h][i] = of[block][h].word[i];
            if (!Ordered) transpose(words[h], q);
        }
    }
};
#endif
