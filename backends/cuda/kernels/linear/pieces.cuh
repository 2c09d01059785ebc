/*
 * K tiles of packed weights in shared memory, for the kernels for few rows: 16 rows in two runs of 1 KiB, and the scales and
 * offsets of their groups (see weight/packing.rs). bytes.cuh and halves.cuh define how they are multiplied: a `Product` has the
 * activations in shared memory and the sums of a warp in registers.
 */
/* Whether 4 bits are a float (floats.cuh) rather than an integer. */
#define FLOATS (OFFSET == 3)
/* Inputs of a step and of a k tile. */
#define SPAN (512 / BITS)
#define PIECE (2 * SPAN)
/* Groups of a k tile. */
#define GROUPS (GROUP == 0 ? 1 : PIECE / GROUP)
/* Bytes of the NUMBERS values of a group for 8 rows: their scales, and their zero points or minima. */
#define LINE (8 * NUMBERS * SCALE_BYTES)
/* 16-byte copies of these values for a k tile, of 8 rows. */
#define COPIES (GROUP == 0 ? 0 : GROUPS * LINE / 16)
#define STAGE (2048 + 2 * COPIES * 16)
/* Floats between the sums of consecutive tokens of a warp, chosen so that lanes have no bank conflicts. */
#define SUM_ROW 20

#if DIGITS == 1
typedef int Sum;
#else
typedef float Sum;
#endif

#if __CUDA_ARCH__ >= 800
/* Scale, and zero point or minimum, of a row of a unit. */
__device__ inline void numbers_of(const u8* line, int row, float& scale, float& second) {
    const SCALE* own = (const SCALE*)line + row * NUMBERS;
    scale = widen(own[0]);
    second = NUMBERS == 2 ? widen(own[NUMBERS - 1]) : 0.0f;
}

/* The row, of a k tile's 16, that is the first or second row of lane group `group`. Alternating rows are two neighbours. */
__device__ inline int row_of(int group, int i, bool alternate) { return alternate ? group * 2 + i : i * 8 + group; }

/*
 * Loads 16 or 8 bytes of activations. Lanes without a column skip the load and hold undefined values, which only affect columns
 * that are discarded. For one token this saves most of the reads, the main load on shared memory.
 */
__device__ inline Vector load_x(bool real, u32 from) {
    Vector v;
    asm volatile("{\n.reg .pred real;\nsetp.ne.u32 real, %5, 0;\n@real ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "r"(from), "r"((u32)real));
    return v;
}
__device__ inline uint2 load_half_x(bool real, u32 from) {
    uint2 v;
    asm volatile("{\n.reg .pred real;\nsetp.ne.u32 real, %3, 0;\n@real ld.shared.v2.u32 {%0, %1}, [%2];\n}"
        : "=r"(v.x), "=r"(v.y) : "r"(from), "r"((u32)real));
    return v;
}
#endif
