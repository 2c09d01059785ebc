/*
 * What products of some rows with weights as wgmma's operand of 64 share: 64 outputs by TOKENS rows, which SPLIT blocks of a
 * cluster make of a part of the inputs each. A lane has, of every eight rows, two rows of an output and of that 8 further on.
 * Sums are f32, or with INTEGERS exact.
 */
/* Eights of rows, and how many of them a block finishes at most. */
#define EIGHTS (TOKENS / 8)
#define OWN ((EIGHTS + SPLIT - 1) / SPLIT)

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* The sums of so many rows in a list, as operands, and the numbers of the operands behind them. */
#define NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_48 NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_64 NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_80 NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_96 NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_112 NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_128 NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#if INTEGERS
typedef int Sum;
#define SUM "s32"
#define IN_REGISTER "r"
#else
typedef float Sum;
#define SUM "f32"
#define IN_REGISTER "f"
#endif
#define UPDATED(x) "+" IN_REGISTER(x)
#define EIGHT(i) \
    UPDATED(d[i]), UPDATED(d[i + 1]), UPDATED(d[i + 2]), UPDATED(d[i + 3]), UPDATED(d[i + 4]), UPDATED(d[i + 5]), \
    UPDATED(d[i + 6]), UPDATED(d[i + 7])
#define PLACES_32 EIGHT(0), EIGHT(8)
#define PLACES_48 PLACES_32, EIGHT(16)
#define PLACES_64 PLACES_48, EIGHT(24)
#define PLACES_80 PLACES_64, EIGHT(32)
#define PLACES_96 PLACES_80, EIGHT(40)
#define PLACES_112 PLACES_96, EIGHT(48)
#define PLACES_128 PLACES_112, EIGHT(56)
#define BEHIND_32 "%16", "%17", "%18", "%19", "%20"
#define BEHIND_48 "%24", "%25", "%26", "%27", "%28"
#define BEHIND_64 "%32", "%33", "%34", "%35", "%36"
#define BEHIND_80 "%40", "%41", "%42", "%43", "%44"
#define BEHIND_96 "%48", "%49", "%50", "%51", "%52"
#define BEHIND_112 "%56", "%57", "%58", "%59", "%60"
#define BEHIND_128 "%64", "%65", "%66", "%67", "%68"
#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)
#define NAMES JOIN(NAMES_, TOKENS)
#define PLACES JOIN(PLACES_, TOKENS)
#define CALL(f, ...) f(__VA_ARGS__)
#define BEHIND(f) CALL(f, JOIN(BEHIND_, TOKENS))
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#if INTEGERS
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k32.s32.s8.s8 {" NAMES "}, "
#elif HALF
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k16.f32.f16.f16 {" NAMES "}, "
#else
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k16.f32.bf16.bf16 {" NAMES "}, "
#endif

/* A box of rows of x: byte, row. */
__device__ inline void copy_rows(const TensorMap& map, u32 to, u64& barrier, int byte, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(to), "l"(&map), "r"(shared_address(&barrier)), "r"(byte), "r"(row) : "memory");
}

/* Where something of this block is in another block of the cluster. */
__device__ inline u32 address_at(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

/* Tells all blocks of the cluster, behind what the warp has written to them, and waits for all of their warps. */
__device__ inline void meet(u64& barrier, int lane) {
    u32 own = shared_address(&barrier);
    __syncwarp();
    if (lane < SPLIT) {
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(address_at(own, lane)) : "memory");
    }
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "@done bra over;\nbra again;\nover:\n}" :: "r"(own) : "memory");
}

/* Four sums to a block of the cluster, and added to others where they have arrived. */
__device__ inline void send(u32 to, const Sum* d) {
    asm volatile("st.shared::cluster.v4." SUM " [%0], {%1, %2, %3, %4};"
        :: "r"(to), IN_REGISTER(d[0]), IN_REGISTER(d[1]), IN_REGISTER(d[2]), IN_REGISTER(d[3]) : "memory");
}
__device__ inline void add(Sum* d, u32 from) {
    Sum v[4];
    asm volatile("ld.shared.v4." SUM " {%0, %1, %2, %3}, [%4];"
        : "=" IN_REGISTER(v[0]), "=" IN_REGISTER(v[1]), "=" IN_REGISTER(v[2]), "=" IN_REGISTER(v[3]) : "r"(from) : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += v[i];
}

/* 8 by 8 elements of 16 bits: a lane has two of a row, gets two of a column. */
__device__ inline u32 transposed(u32 word) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}
#endif
