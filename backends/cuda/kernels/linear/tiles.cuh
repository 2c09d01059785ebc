/*
 * What products share that walk over tiles of rows by OUTPUTS outputs with wgmma on Hopper (sm_90a): the order of
 * tiles, the way from sums to vectors, and what is added to them.
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

/* What two rows of a lane, 8 apart, are added to: 8 of every 32 results, as they are written. Read ahead of its turn. */
template <int Results> struct Residuals {
    Vector of[(Results + 31) / 32][2];

    /* Of the tile's results, whose first is number `first` of `results`; `row` is one of `rows`. What is a parameter of the kernel
     * is compared where it is. */
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

    /* Those of 32 results as lanes have sums: in pairs, or, with Ordered, as they were read. */
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
