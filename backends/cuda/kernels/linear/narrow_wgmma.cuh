/*
 * Shared code of the wgmma kernels with weights as the 64-row operand: 64 outputs by TOKENS rows, whose inputs are split over the
 * SPLIT blocks of a cluster. Of every eight rows, a lane has two rows of one output and of the output 8 further. Sums are f32, or
 * with INTEGERS exact.
 */
/* Groups of eight rows, and the maximum number of them that a block finishes. */
#define EIGHTS (TOKENS / 8)
#define OWN ((EIGHTS + SPLIT - 1) / SPLIT)

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

#if INTEGERS
typedef int Sum;
#define SUM_TYPE "s32"
#define IN_REGISTER "r"
#else
typedef float Sum;
#define SUM_TYPE "f32"
#define IN_REGISTER "f"
#endif
#define SUM(x) "+" IN_REGISTER(x)
#if INTEGERS
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k32.s32.s8.s8 " NAMES(TOKENS) ", "
#elif HALF
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k16.f32.f16.f16 " NAMES(TOKENS) ", "
#else
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k16.f32.bf16.bf16 " NAMES(TOKENS) ", "
#endif

/* The address of a variable of this block in another block of the cluster. */
__device__ inline u32 address_at(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

/* Arrives at a barrier of a block of the cluster, after this thread's writes to that block. */
__device__ inline void arrive_in_cluster(u32 barrier, int rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(address_at(barrier, rank)) : "memory");
}
__device__ inline void await_cluster(u32 barrier) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "@done bra over;\nbra again;\nover:\n}" :: "r"(barrier) : "memory");
}

/* Cluster barrier by warp: tells all blocks of the cluster that this warp has arrived, and waits for all warps. */
__device__ inline void meet(u64& barrier, int lane) {
    u32 own = shared_address(&barrier);
    __syncwarp();
    if (lane < SPLIT) arrive_in_cluster(own, lane);
    await_cluster(own);
}

/* The same after writes to the other blocks: each thread arrives for itself. */
__device__ inline void meet_behind_writes(u64& barrier) {
    u32 own = shared_address(&barrier);
#pragma unroll
    for (int rank = 0; rank < SPLIT; ++rank) arrive_in_cluster(own, rank);
    await_cluster(own);
}

/* Sends four sums to a block of the cluster; and adds received sums. */
__device__ inline void send(u32 to, const Sum* d) {
    asm volatile("st.shared::cluster.v4." SUM_TYPE " [%0], {%1, %2, %3, %4};"
        :: "r"(to), IN_REGISTER(d[0]), IN_REGISTER(d[1]), IN_REGISTER(d[2]), IN_REGISTER(d[3]) : "memory");
}
__device__ inline void add(Sum* d, u32 from) {
    Sum v[4];
    asm volatile("ld.shared.v4." SUM_TYPE " {%0, %1, %2, %3}, [%4];"
        : "=" IN_REGISTER(v[0]), "=" IN_REGISTER(v[1]), "=" IN_REGISTER(v[2]), "=" IN_REGISTER(v[3]) : "r"(from) : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += v[i];
}

/* Transposes 8 by 8 elements of 16 bits: a lane has two of a row, gets two of a column. */
__device__ inline u32 transposed(u32 word) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}
#endif
