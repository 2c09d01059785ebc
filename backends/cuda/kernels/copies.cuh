/*
 * Asynchronous copies into shared memory (cp.async), 16 or 4 bytes per lane, sm_80 and up. They complete in order, by groups.
 */

/* Starts copying 16 bytes to an address of shared memory, or writes zeros. */
__device__ inline void copy_ahead(u32 to, const void* from, bool real) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
#endif
}
__device__ inline void copy_ahead(Vector* to, const void* from, bool real) {
    copy_ahead((u32)__cvta_generic_to_shared(to), from, real);
}

/* The same for 4 bytes. */
__device__ inline void copy_pair_ahead(u32 to, const void* from, bool real) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(to), "l"(from), "r"(real ? 4 : 0) : "memory");
#endif
}

/* Commits a group. */
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits for all groups of this lane except the newest N. */
template <int Pending> __device__ inline void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
#endif
}
