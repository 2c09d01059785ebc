/*
 * Shared code of the Hopper kernels (sm_90a): mbarriers, TMA copies, and wgmma descriptors.
 */

/* A TMA tensor map. */
struct alignas(64) TensorMap { u64 words[16]; };

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

__device__ inline u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

/* An mbarrier in shared memory; a wait names the phase. */
__device__ inline void make_barrier(u64& barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/* Fence after the initialisation of barriers by this thread: after the next barrier of the block or cluster, copies and other
 * blocks may use them. */
__device__ inline void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/* Arrives, and adds to the bytes that the barrier expects from copies. */
__device__ inline void expect(u64& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
        :: "r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

__device__ inline void arrive(u64& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(&barrier)) : "memory");
}

__device__ inline void await(u64& barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}"
        :: "r"(shared_address(&barrier)), "r"(phase) : "memory");
}

/* Prefetches a tensor map. */
__device__ inline void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

/* Starts a TMA copy of a box of a tensor, given its coordinates, innermost first; the barrier counts the bytes. */
__device__ inline void copy_box(const TensorMap& map, u32 to, u64& barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y) : "memory");
}
__device__ inline void copy_box(const TensorMap& map, u32 to, u64& barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ inline void copy_box(const TensorMap& map, u32 to, u64& barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ inline void copy_box(const TensorMap& map, u32 to, u64& barrier, int x, int y, int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v) : "memory");
}

/* The same, with an L2 cache policy. */
__device__ inline void copy_box_by(u64 policy, const TensorMap& map, u32 to, u64& barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "l"(policy) : "memory");
}
__device__ inline void copy_box_by(u64 policy, const TensorMap& map, u32 to, u64& barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "l"(policy) : "memory");
}
__device__ inline void copy_box_by(u64 policy, const TensorMap& map, u32 to, u64& barrier, int x, int y, int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "l"(policy) : "memory");
}

/* A position in a ring buffer: stage and phase. */
template <int Stages> struct Place {
    int stage = 0;
    u32 phase = 0;
    __device__ inline void next() {
        if (++stage == Stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/*
 * Proxy fence between ordinary reads by this thread of memory that TMA filled, and the arrival that permits TMA to refill it: the
 * async proxy is not ordered with ordinary reads. Reads by wgmma need no fence once the wgmma was waited for.
 */
__device__ inline void reads_end() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* The wgmma descriptor of a matrix with rows of 128 bytes, swizzled; 8 rows are 1024 bytes. */
__device__ inline u64 swizzled_at(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

/* The same for lines of 128 bytes, each 8 rows by 16 bytes: the next 16 bytes are one line further, the next 8 rows eight lines.
 * */
__device__ inline u64 lines_at(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(128 >> 4) << 16 | (u64)(1024 >> 4) << 32;
}

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Pending) : "memory");
}

/* Keeps the compiler from moving uses of accumulators across. */
template <int Count> __device__ inline void hold(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
template <int Count> __device__ inline void hold(int (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(d[i]) :: "memory");
}
#endif
