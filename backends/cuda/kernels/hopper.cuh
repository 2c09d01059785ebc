/*
 * What kernels for Hopper (sm_90a) share: barriers in shared memory, what the bulk copy engine and wgmma are told.
 */

/* How the bulk copy engine finds its way in a tensor. */
struct alignas(64) TensorMap { u64 words[16]; };

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

__device__ inline u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

/* A barrier in shared memory, waited for by its phase. */
__device__ inline void make_barrier(u64& barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/* For the thread that made barriers: copies and other blocks of the cluster may use them, behind the next meeting. */
__device__ inline void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/* Arrives, and has the barrier wait for so many bytes of copies too. */
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

/* What the copy engine is told of a tensor is on its way. */
__device__ inline void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

/* Starts copying a box of a tensor, by its coordinates, those of neighbours first; the barrier counts the bytes. */
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

/* The same, with a policy of the L2. */
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

/* Counts through a ring. */
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
 * Between ordinary reads of memory that the bulk copy engine filled, by this thread, and the arrival that lets it fill that again:
 * it knows nothing of reads that it has not been told of. What wgmma has read needs none, once it has been waited for.
 */
__device__ inline void reads_end() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* A matrix for wgmma: rows of 128 bytes, swizzled; 8 rows are 1024 bytes. */
__device__ inline u64 swizzled_at(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

/* The same for lines of 128 bytes, each 8 rows by 16 bytes: the next 16 bytes are a line on, the next 8 rows eight lines. */
__device__ inline u64 lines_at(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(128 >> 4) << 16 | (u64)(1024 >> 4) << 32;
}

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Pending) : "memory");
}

/* Keeps the compiler from moving uses of sums across. */
template <int Count> __device__ inline void hold(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
template <int Count> __device__ inline void hold(int (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(d[i]) :: "memory");
}
#endif
