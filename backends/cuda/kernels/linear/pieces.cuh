/*
 * Pieces of packed weights: 16 rows by 1 KiB of a line each, and the numbers of their groups (see weight/packing.rs), as the
 * kernels for few rows have them in shared memory. What is done with them is in bytes.cuh or halves.cuh: a `Product` has the
 * activations in shared memory and the sums of a warp in registers.
 */
/* Inputs of a step and of a piece. */
#define SPAN (512 / BITS)
#define PIECE (2 * SPAN)
/* Groups of a piece. */
#define GROUPS (GROUP == 0 ? 1 : PIECE / GROUP)
/* Numbers for a group of a row: its scale, and its zero point or minimum. */
#define NUMBERS (OFFSET ? 2 : 1)
/* Bytes of the numbers of 8 rows, of a group. */
#define LINE (8 * NUMBERS * SCALE_BYTES)
/* Copies of 16 bytes for the numbers of a piece, of 8 rows. */
#define COPIES (GROUP == 0 ? 0 : GROUPS * LINE / 16)
#define STAGE (2048 + 2 * COPIES * 16)
/* Numbers from token to token of the sums of a warp: the lanes of a warp meet no bank twice. */
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
    second = OFFSET ? widen(own[NUMBERS - 1]) : 0.0f;
}

/* Which of a piece's 16 rows is the first or the second of lane group `group`. Rows that alternate are two neighbours. */
__device__ inline int row_of(int group, int i, bool alternate) { return alternate ? group * 2 + i : i * 8 + group; }

/*
 * 16 or 8 bytes of activations. Lanes without a column read nothing and hold anything: what comes of it is in columns of its own,
 * and goes nowhere. For one token that saves most of the reads, which are what shared memory does most.
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
