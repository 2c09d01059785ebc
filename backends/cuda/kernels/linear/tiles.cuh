/*
 * What products share that walk over tiles of rows by OUTPUTS outputs with wgmma on Hopper (sm_90a): the registers of sums, as
 * operands of the kind that SUM says; the order of tiles; the way from sums to vectors.
 */
/* Tiles of rows that are walked together. */
#define BAND 8

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Sixteen registers in a list, and as operands. */
#define NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PLACES(i) \
    SUM(d[i]), SUM(d[i + 1]), SUM(d[i + 2]), SUM(d[i + 3]), SUM(d[i + 4]), SUM(d[i + 5]), SUM(d[i + 6]), \
    SUM(d[i + 7]), SUM(d[i + 8]), SUM(d[i + 9]), SUM(d[i + 10]), SUM(d[i + 11]), SUM(d[i + 12]), SUM(d[i + 13]), \
    SUM(d[i + 14]), SUM(d[i + 15])
#if OUTPUTS == 48
#define NAMES NAMES_0 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define ALL PLACES(0), SUM(d[16]), SUM(d[17]), SUM(d[18]), SUM(d[19]), SUM(d[20]), SUM(d[21]), SUM(d[22]), SUM(d[23])
#define OPERANDS "%24, %25"
#define FLAG "%26"
#elif OUTPUTS == 32
#define NAMES NAMES_0
#define ALL PLACES(0)
#define OPERANDS "%16, %17"
#define FLAG "%18"
#elif OUTPUTS == 64
#define NAMES NAMES_0 ", " NAMES_1
#define ALL PLACES(0), PLACES(16)
#define OPERANDS "%32, %33"
#define FLAG "%34"
#elif OUTPUTS == 96
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2
#define ALL PLACES(0), PLACES(16), PLACES(32)
#define OPERANDS "%48, %49"
#define FLAG "%50"
#elif OUTPUTS == 128
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3
#define ALL PLACES(0), PLACES(16), PLACES(32), PLACES(48)
#define OPERANDS "%64, %65"
#define FLAG "%66"
#elif OUTPUTS == 192
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4 ", " NAMES_5
#define ALL PLACES(0), PLACES(16), PLACES(32), PLACES(48), PLACES(64), PLACES(80)
#define OPERANDS "%96, %97"
#define FLAG "%98"
#elif OUTPUTS == 224
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4 ", " NAMES_5 ", " NAMES_6
#define ALL PLACES(0), PLACES(16), PLACES(32), PLACES(48), PLACES(64), PLACES(80), PLACES(96)
#define OPERANDS "%112, %113"
#define FLAG "%114"
#elif OUTPUTS == 256
#define NAMES NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4 ", " NAMES_5 ", " NAMES_6 ", " NAMES_7
#define ALL PLACES(0), PLACES(16), PLACES(32), PLACES(48), PLACES(64), PLACES(80), PLACES(96), PLACES(112)
#define OPERANDS "%128, %129"
#define FLAG "%130"
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

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
