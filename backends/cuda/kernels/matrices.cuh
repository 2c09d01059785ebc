/*
 * ldmatrix: loads matrices of 8 by 8 elements of 16 bits from shared memory into the fragments of mma.sync.
 */

/* Loads four matrices. Lane `l` gives the address of row `l % 8` of matrix `l / 8`, and gets two neighbours of row `lane / 4` of
 * each. */
__device__ inline void load_matrices(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}

/* The same for transposed matrices: a lane gets two neighbours of column `lane / 4` of each. */
__device__ inline void load_transposed(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
__device__ inline void load_transposed(u32 (&r)[4], const void* row) {
    load_transposed(r, (u32)__cvta_generic_to_shared(row));
}
